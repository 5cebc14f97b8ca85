"""A store in one file, for reading: a plain tar of a store's objects, as `kcache export` writes it, for hosts without a network.

The file is read by place, never unpacked: a restore reads the index, a manifest and an archive out of it. It is believed as
little as any other store: whoever reads checks digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

from kcache.errors import AccessDeniedError, NotFoundError, StoreError, UnavailableError
from kcache.store.base import CHUNK, StoredObject, check_name, collect, within

BLOCK = 512
MAX_OBJECTS = 1_000_000


class BundleStore:
    """The store in the file `path`. Implements `kcache.store.base.Store`, as far as reading goes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, tuple[int, int]] | None = None

    def describe(self) -> str:
        return str(self._path)

    def _open(self) -> BinaryIO:
        try:
            return self._path.open("rb")
        except FileNotFoundError as error:
            raise StoreError(f"there is no bundle {self._path}") from error
        except PermissionError as error:
            raise AccessDeniedError(f"no access to {self._path}", why=error.strerror or "") from error
        except OSError as error:
            raise UnavailableError(f"{self._path} cannot be read", why=error.strerror or "") from error

    def _objects(self) -> dict[str, tuple[int, int]]:
        """Name -> where its bytes begin, and how many there are."""
        if self._found is None:
            with self._open() as stream:
                self._found = _members(stream, str(self._path))
        return self._found

    def stat(self, name: str) -> StoredObject | None:
        check_name(name)
        found = self._objects().get(name)
        return None if found is None else StoredObject(size=found[1])

    def read(self, name: str, *, offset: int = 0) -> Iterator[bytes]:
        check_name(name)
        found = self._objects().get(name)
        if found is None:
            raise NotFoundError(f"there is no {name} in {self._path}")
        return self._chunks(name, self._open(), found[0] + offset, found[1] - offset)

    def _chunks(self, name: str, stream: BinaryIO, start: int, left: int) -> Iterator[bytes]:
        with stream:
            try:
                stream.seek(start)
                while left > 0:
                    if not (chunk := stream.read(min(CHUNK, left))):
                        raise StoreError(f"{self._path} ends within {name}", remedy="Copy it again.")
                    left -= len(chunk)
                    yield chunk
            except OSError as error:
                raise UnavailableError(f"{name} in {self._path} cannot be read", why=error.strerror or "") from error

    def read_bytes(self, name: str, limit: int) -> bytes:
        return collect(self.read(name), name, limit)

    def list(self, prefix: str, *, depth: int | None = None) -> Iterator[str]:
        prefix = prefix.rstrip("/")
        if prefix:
            check_name(prefix)
        below = [name for name in self._objects() if within(name, prefix, depth)]
        return iter(sorted(below, key=lambda name: name.split("/")))

    def _refuse(self, name: str) -> NoReturn:
        check_name(name)
        raise AccessDeniedError(f"{self._path} can only be read", why=f"{name} was to be changed")

    def write(self, name: str, source: Path | bytes, *, if_absent: bool) -> bool:
        self._refuse(name)

    def write_many(self, items: Sequence[tuple[str, Path | bytes]], *, if_absent: bool) -> Sequence[bool]:
        return [self.write(name, source, if_absent=if_absent) for name, source in items]

    def replace(self, name: str, data: bytes, expected: bytes | None) -> None:
        self._refuse(name)

    def delete(self, *names: str) -> bool:
        self._refuse(names[0])


def header(name: str, size: int) -> bytes:
    """The block before an object: ustar, a regular file of mode 0644 and no time, so that equal content gives equal bytes."""
    encoded = name.encode("ascii")
    prefix = b""
    if len(encoded) > 100:
        cut = encoded.rfind(b"/", 0, 156)
        prefix, encoded = encoded[:cut], encoded[cut + 1 :]
        if cut <= 0 or len(encoded) > 100:
            raise StoreError(f"{name} is too long a name for a bundle")
    fields = [
        encoded.ljust(100, b"\0"),
        b"0000644\0" + b"0000000\0" * 2,
        b"%011o\0" % size,
        b"00000000000\0",
        b" " * 8,
        b"0".ljust(101, b"\0"),
        b"ustar\00000".ljust(8, b"\0"),
        b"\0" * 64,
        b"0000000\0" * 2,
        prefix.ljust(167, b"\0"),
    ]
    block = b"".join(fields)
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def padding(size: int) -> bytes:
    """What follows an object's bytes."""
    return b"\0" * (-size % BLOCK)


END = b"\0" * (2 * BLOCK)


def _members(stream: BinaryIO, what: str) -> dict[str, tuple[int, int]]:
    """The objects of a bundle. Anything but what `header` writes is refused."""
    found: dict[str, tuple[int, int]] = {}
    at, length = 0, stream.seek(0, 2)
    while True:
        stream.seek(at)
        block = stream.read(BLOCK)
        if len(block) < BLOCK:
            raise StoreError(f"{what} is no bundle, or is cut off", remedy="Copy it again.")
        if not block.strip(b"\0"):
            return found
        name, size = _named(block, what)
        if name in found or len(found) >= MAX_OBJECTS or at + BLOCK + size > length:
            raise StoreError(f"{what} is no bundle, or is cut off", why=f"at {name}", remedy="Copy it again.")
        found[name] = (at + BLOCK, size)
        at += BLOCK + size + len(padding(size))


def _named(block: bytes, what: str) -> tuple[str, int]:
    try:
        parts: Iterable[bytes] = (block[345:512].rstrip(b"\0"), block[:100].rstrip(b"\0"))
        name = b"/".join(part for part in parts if part).decode("ascii")
        size = int(block[124:135], 8)
        check_name(name)
        if header(name, size) == block:
            return name, size
    except (ValueError, StoreError):
        pass
    raise StoreError(f"{what} is no bundle", why="a file that `kcache export` did not write", remedy="Export it again.")
