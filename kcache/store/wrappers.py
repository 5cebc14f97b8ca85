"""Stores around stores: retrying, refusing to write, counting, failing on purpose. Each keeps the contract of what it wraps."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from kcache.errors import AccessDeniedError, ConflictError, UnavailableError
from kcache.store.base import Store, StoredObject, collect

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeVar

    _T = TypeVar("_T")


class Wrapper:
    """Passes every call on to the store inside."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def describe(self) -> str:
        return self.inner.describe()

    def stat(self, name: str) -> StoredObject | None:
        return self.inner.stat(name)

    def read(self, name: str, *, offset: int = 0) -> Iterator[bytes]:
        return self.inner.read(name, offset=offset)

    def read_bytes(self, name: str, limit: int) -> bytes:
        return self.inner.read_bytes(name, limit)

    def list(self, prefix: str, *, depth: int | None = None) -> Iterator[str]:
        return self.inner.list(prefix, depth=depth)

    def write(self, name: str, source: Path | bytes, *, if_absent: bool) -> bool:
        return self.inner.write(name, source, if_absent=if_absent)

    def write_many(self, items: Sequence[tuple[str, Path | bytes]], *, if_absent: bool) -> Sequence[bool]:
        return self.inner.write_many(items, if_absent=if_absent)

    def replace(self, name: str, data: bytes, expected: bytes | None) -> None:
        self.inner.replace(name, data, expected)

    def delete(self, *names: str) -> bool:
        return self.inner.delete(*names)


class ReadOnlyStore(Wrapper):
    """A store that nothing can be changed in."""

    def _refuse(self, name: str) -> AccessDeniedError:
        return AccessDeniedError(f"{self.describe()} is opened for reading only", why=f"{name} was to be changed")

    def write(self, name: str, source: Path | bytes, *, if_absent: bool) -> bool:
        raise self._refuse(name)

    def write_many(self, items: Sequence[tuple[str, Path | bytes]], *, if_absent: bool) -> Sequence[bool]:
        raise self._refuse(items[0][0] if items else "nothing")

    def replace(self, name: str, data: bytes, expected: bytes | None) -> None:
        raise self._refuse(name)

    def delete(self, *names: str) -> bool:
        raise self._refuse(names[0])


class MetricsStore(Wrapper):
    """Counts what is asked of a store: `requests` by operation, and bytes that went through."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.requests: Counter[str] = Counter()
        self.bytes_read = 0
        self.bytes_written = 0

    def stat(self, name: str) -> StoredObject | None:
        self.requests["stat"] += 1
        return super().stat(name)

    def read(self, name: str, *, offset: int = 0) -> Iterator[bytes]:
        self.requests["read"] += 1
        return self._counted(super().read(name, offset=offset))

    def _counted(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self.bytes_read += len(chunk)
            yield chunk

    def read_bytes(self, name: str, limit: int) -> bytes:
        self.requests["read"] += 1
        data = super().read_bytes(name, limit)
        self.bytes_read += len(data)
        return data

    def list(self, prefix: str, *, depth: int | None = None) -> Iterator[str]:
        self.requests["list"] += 1
        return super().list(prefix, depth=depth)

    def write(self, name: str, source: Path | bytes, *, if_absent: bool) -> bool:
        self.requests["write"] += 1
        written = super().write(name, source, if_absent=if_absent)
        if written:
            self.bytes_written += _size(source)
        return written

    def write_many(self, items: Sequence[tuple[str, Path | bytes]], *, if_absent: bool) -> Sequence[bool]:
        self.requests["write"] += 1
        written = super().write_many(items, if_absent=if_absent)
        self.bytes_written += sum(_size(source) for (_, source), done in zip(items, written, strict=True) if done)
        return written

    def replace(self, name: str, data: bytes, expected: bytes | None) -> None:
        self.requests["replace"] += 1
        super().replace(name, data, expected)
        self.bytes_written += len(data)

    def delete(self, *names: str) -> bool:
        self.requests["delete"] += 1
        return super().delete(*names)


def _size(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size


class RetryStore(Wrapper):
    """Repeats what failed with `UnavailableError`, with growing, jittered pauses, until a deadline. Streams go on where they
    broke off. Only immutable objects may be read as a stream: one that is rewritten meanwhile would be a mixture.
    """

    def __init__(
        self,
        inner: Store,
        *,
        seconds: float,
        first_pause: float = 0.2,
        longest_pause: float = 5.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            seconds: for each call, how long after its beginning (or a stream's last chunk) it may still be repeated.
            first_pause, longest_pause: seconds; each pause is twice the one before, times a random 0.5 to 1.
        """
        super().__init__(inner)
        self._seconds, self._first, self._longest = seconds, first_pause, longest_pause
        self._sleep, self._clock = sleep, clock

    def _pauses(self) -> Iterator[None]:
        """Sleeps before each value; ends when the next pause would pass the deadline."""
        deadline = self._clock() + self._seconds
        pause = self._first
        while True:
            jittered = pause * (0.5 + os.urandom(1)[0] / 510)
            if self._clock() + jittered > deadline:
                return
            self._sleep(jittered)
            pause = min(pause * 2, self._longest)
            yield

    def _repeat(self, call: Callable[[], _T]) -> _T:
        pauses = self._pauses()
        while True:
            try:
                return call()
            except UnavailableError as error:
                if not _another(pauses):
                    raise error

    def stat(self, name: str) -> StoredObject | None:
        return self._repeat(lambda: self.inner.stat(name))

    def read(self, name: str, *, offset: int = 0) -> Iterator[bytes]:
        return self._resumed(name, offset, self._repeat(lambda: self.inner.read(name, offset=offset)))

    def _resumed(self, name: str, offset: int, chunks: Iterator[bytes]) -> Iterator[bytes]:
        pauses = self._pauses()
        while True:
            try:
                for chunk in chunks:
                    offset += len(chunk)
                    yield chunk
                    pauses = self._pauses()  # a stream that moves may break off again, however long it takes in all
                return
            except UnavailableError as error:
                if not _another(pauses):
                    raise error
                chunks = self._repeat(partial(self.inner.read, name, offset=offset))

    def read_bytes(self, name: str, limit: int) -> bytes:
        return self._repeat(lambda: self.inner.read_bytes(name, limit))

    def list(self, prefix: str, *, depth: int | None = None) -> Iterator[str]:
        return iter(self._repeat(lambda: [*self.inner.list(prefix, depth=depth)]))

    def write(self, name: str, source: Path | bytes, *, if_absent: bool) -> bool:
        """As the contract says; after an attempt whose outcome is not known, False may mean that it was this one's."""
        return self._repeat(lambda: self.inner.write(name, source, if_absent=if_absent))

    def write_many(self, items: Sequence[tuple[str, Path | bytes]], *, if_absent: bool) -> Sequence[bool]:
        """As for `write`: after an attempt that failed half way, False may mean that it was this one's."""
        return self._repeat(lambda: self.inner.write_many(items, if_absent=if_absent))

    def replace(self, name: str, data: bytes, expected: bytes | None) -> None:
        uncertain = False

        def attempt() -> None:
            nonlocal uncertain
            try:
                self.inner.replace(name, data, expected)
            except UnavailableError:
                uncertain = True  # it may have been written: look before calling it a conflict
                raise
            except ConflictError:
                if not uncertain or self.inner.read_bytes(name, max(len(data), 1)) != data:
                    raise

        self._repeat(attempt)

    def delete(self, *names: str) -> bool:
        return self._repeat(lambda: self.inner.delete(*names))


def _another(pauses: Iterator[None]) -> bool:
    for _ in pauses:
        return True
    return False


class FaultStore(Wrapper):
    """Fails on purpose, for tests.

    Args:
        fault: called with operation and name before each call, and with `chunk` and the name before each chunk of a stream;
            it raises what shall go wrong, or returns.
        after: the same, called when a call has done its work, for failures whose outcome the caller cannot know.
        corrupt: changes each chunk that is read.
    """

    def __init__(
        self,
        inner: Store,
        *,
        fault: Callable[[str, str], None] = lambda operation, name: None,
        after: Callable[[str, str], None] = lambda operation, name: None,
        corrupt: Callable[[str, bytes], bytes] = lambda name, chunk: chunk,
    ) -> None:
        super().__init__(inner)
        self._fault, self._after, self._corrupt = fault, after, corrupt

    def _call(self, operation: str, name: str, call: Callable[[], _T]) -> _T:
        self._fault(operation, name)
        result = call()
        self._after(operation, name)
        return result

    def stat(self, name: str) -> StoredObject | None:
        return self._call("stat", name, lambda: self.inner.stat(name))

    def read(self, name: str, *, offset: int = 0) -> Iterator[bytes]:
        return self._faulty(name, self._call("read", name, lambda: self.inner.read(name, offset=offset)))

    def _faulty(self, name: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
        for chunk in chunks:
            self._fault("chunk", name)
            yield self._corrupt(name, chunk)

    def read_bytes(self, name: str, limit: int) -> bytes:
        return collect(self.read(name), name, limit)

    def list(self, prefix: str, *, depth: int | None = None) -> Iterator[str]:
        return self._call("list", prefix, lambda: self.inner.list(prefix, depth=depth))

    def write(self, name: str, source: Path | bytes, *, if_absent: bool) -> bool:
        return self._call("write", name, lambda: self.inner.write(name, source, if_absent=if_absent))

    def write_many(self, items: Sequence[tuple[str, Path | bytes]], *, if_absent: bool) -> Sequence[bool]:
        return [self.write(name, source, if_absent=if_absent) for name, source in items]

    def replace(self, name: str, data: bytes, expected: bytes | None) -> None:
        self._call("replace", name, lambda: self.inner.replace(name, data, expected))

    def delete(self, *names: str) -> bool:
        return self._call("delete", names[0], lambda: self.inner.delete(*names))
