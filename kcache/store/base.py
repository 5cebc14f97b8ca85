"""The contract that every store keeps, and that one conformance suite holds all of them to.

- An object is visible under its name only when it is whole and durable. A writer that dies leaves the old object or the new one.
- Objects are immutable, but for the few that `replace` rewrites by compare-and-swap.
- Failures are `StoreError`s, also while a stream is being read: foreign exceptions do not come through. `NotFoundError` means
  that the store works and has no such object; a store that cannot be reached, or whose own place is missing, never says so.
- `UnavailableError` may be retried. Every other one is permanent: repeating the call would give the same answer.
- Stores are not verified: whoever reads checks size and digest against a manifest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kcache.errors import IntegrityError, StoreError
from kcache.values import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol
else:
    Protocol = object

CHUNK = 1 << 20
"""Bytes in a chunk of a stream, at most."""

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}")
_MAX_NAME = 800


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """What a store says of an object. `size` in bytes."""

    size: int


class Store(Protocol):
    """Named bytes. A name is a relative path of plain segments (see `check_name`)."""

    def describe(self) -> str:
        """The store as a user would write it, for messages."""
        ...

    def stat(self, name: str) -> StoredObject | None:
        """The object of this name, or None if the store works and has none.

        Raises:
            StoreError
        """
        ...

    def read(self, name: str, *, offset: int = 0) -> Iterator[bytes]:
        """The object's bytes from `offset` on, in chunks of at most `CHUNK`; none where `offset` is at or past the end.

        Raises:
            NotFoundError: at the call, not later.
            StoreError: at the call or while iterating.
        """
        ...

    def read_bytes(self, name: str, limit: int) -> bytes:
        """The whole of an object of at most `limit` bytes.

        Raises:
            NotFoundError, StoreError
            IntegrityError: it is larger.
        """
        ...

    def list(self, prefix: str, *, depth: int | None = None) -> Iterator[str]:
        """The names of all objects below the directory `prefix` (the whole store if empty), sorted by path segments.

        Args:
            depth: only those of at most so many segments below `prefix`; what lies deeper costs nothing.

        Raises:
            StoreError: at the call or while iterating. A directory that is not there is an empty one.
        """
        ...

    def write(self, name: str, source: Path | bytes, *, if_absent: bool) -> bool:
        """Stores the bytes, or the file's content, under a name.

        Args:
            if_absent: leave an object that is there already alone, whatever it holds.

        Returns:
            Whether the object was written.

        Raises:
            StoreError: nothing changed, except after an `UnavailableError`: then it may have been written.
        """
        ...

    def write_many(self, items: Sequence[tuple[str, Path | bytes]], *, if_absent: bool) -> Sequence[bool]:
        """Writes several objects, as `write` does each of them in turn. A store for which every step is dear takes many at once.

        Returns:
            For each whether it was written.

        Raises:
            StoreError: any of them may have been written.
        """
        ...

    def replace(self, name: str, data: bytes, expected: bytes | None) -> None:
        """Writes `data` if the object still holds `expected` (None: if there is no such object), and nothing otherwise.

        Raises:
            ConflictError: it holds something else; another writer was first.
            StoreError: as for `write`.
        """
        ...

    def delete(self, *names: str) -> bool:
        """Removes objects, in this order. A store for which every step is dear removes many at once.

        Returns:
            Whether any of them was there.

        Raises:
            StoreError
        """
        ...


def check_name(name: str) -> None:
    """Refuses a name that could climb out of a store, hide in it, or differ between file systems.

    Raises:
        StoreError
    """
    if len(name) > _MAX_NAME or not all(_SEGMENT.fullmatch(segment) for segment in name.split("/")):
        raise StoreError(f"{name!r} cannot be the name of an object", why="each segment must be a plain name")


def is_name(segment: str) -> bool:
    """Whether one segment is a plain name; what a listing comes across and is not, belongs to somebody else."""
    return _SEGMENT.fullmatch(segment) is not None


def within(name: str, prefix: str, depth: int | None) -> bool:
    """Whether an object lies below the directory `prefix` (the whole store if empty), at most `depth` segments deep."""
    if prefix and not name.startswith(f"{prefix}/"):
        return False
    return depth is None or name.count("/", len(prefix) + 1 if prefix else 0) < depth


def collect(chunks: Iterator[bytes], name: str, limit: int) -> bytes:
    """The chunks as one, for `read_bytes`.

    Raises:
        IntegrityError: more than `limit` bytes.
    """
    parts = []
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if size > limit:
            raise IntegrityError(f"{name} is larger than the {limit} bytes that it may have")
        parts.append(chunk)
    return b"".join(parts)
