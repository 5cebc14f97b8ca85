"""A store in this process's memory: for tests, and the plainest reading of the contract."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from kcache.errors import ConflictError, NotFoundError, StoreError
from kcache.store.base import CHUNK, StoredObject, check_name, collect, within


class MemoryStore:
    """Implements `kcache.store.base.Store`; safe for several threads."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def describe(self) -> str:
        return "memory"

    def stat(self, name: str) -> StoredObject | None:
        check_name(name)
        data = self.objects.get(name)
        return None if data is None else StoredObject(size=len(data))

    def read(self, name: str, *, offset: int = 0) -> Iterator[bytes]:
        check_name(name)
        data = self.objects.get(name)
        if data is None:
            raise NotFoundError(f"there is no {name} in memory")
        return (data[start : start + CHUNK] for start in range(offset, len(data), CHUNK))

    def read_bytes(self, name: str, limit: int) -> bytes:
        return collect(self.read(name), name, limit)

    def list(self, prefix: str, *, depth: int | None = None) -> Iterator[str]:
        prefix = prefix.rstrip("/")
        if prefix:
            check_name(prefix)
        below = [name for name in _names(self.objects) if within(name, prefix, depth)]
        return iter(sorted(below, key=lambda name: name.split("/")))

    def write(self, name: str, source: Path | bytes, *, if_absent: bool) -> bool:
        check_name(name)
        try:
            data = source if isinstance(source, bytes) else source.read_bytes()
        except OSError as error:
            raise StoreError(f"cannot read {source!r}", why=error.strerror or "") from error
        with self._lock:
            if if_absent and name in self.objects:
                return False
            self.objects[name] = data
        return True

    def write_many(self, items: Sequence[tuple[str, Path | bytes]], *, if_absent: bool) -> Sequence[bool]:
        return [self.write(name, source, if_absent=if_absent) for name, source in items]

    def replace(self, name: str, data: bytes, expected: bytes | None) -> None:
        check_name(name)
        with self._lock:
            if self.objects.get(name) != expected:
                raise ConflictError(f"{name} in memory was changed by another writer", remedy="Read it again and repeat.")
            self.objects[name] = data

    def delete(self, *names: str) -> bool:
        for name in names:
            check_name(name)
        with self._lock:
            return len([name for name in names if self.objects.pop(name, None) is not None]) > 0


def _names(objects: dict[str, bytes]) -> list[str]:
    """The names, taken at once while other threads write."""
    return [*objects]
