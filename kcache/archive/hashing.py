"""SHA-256 in another thread, while this one decompresses and writes: hashlib and libzstd both let other threads run.

Pieces are hashed in the order given, and never fall further behind than bounded memory allows.
"""

from __future__ import annotations

import hashlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from queue import SimpleQueue
    from typing import Any, Protocol

    class Hasher(Protocol):
        """What is used of hashlib's hashers."""

        def update(self, data: bytes, /) -> object: ...

        def hexdigest(self) -> str: ...


_AHEAD = 4 << 20
"""Bytes that may wait, twice."""


class Background:
    """One thread that hashes. To be closed by whoever made it."""

    def __init__(self) -> None:
        # Imported where there is something to install: a start with nothing to do need not pay for it.
        from queue import SimpleQueue
        from threading import Lock, Thread

        self._lock = Lock
        self._pieces: SimpleQueue[Any] = SimpleQueue()
        self._given = 0
        self._mark: Any = None
        self._failed: list[BaseException] = []
        Thread(target=_work, args=(self._pieces, self._failed), daemon=True).start()

    def sha256(self) -> Hasher:
        """A hasher that works there."""
        return _Remote(self)

    def close(self) -> None:
        """Ends the thread when it has done what it was given."""
        self._pieces.put(None)

    def put(self, hasher: Hasher, piece: bytes) -> None:
        self._pieces.put((hasher, piece))
        self._given += len(piece)
        if self._given >= _AHEAD:
            self._given = 0
            before, self._mark = self._mark, self._marker()
            if before is not None:
                self._reach(before)

    def wait(self) -> None:
        """Returns when everything that was given is hashed."""
        self._reach(self._marker())
        self._mark = None

    def _marker(self) -> Any:
        """A lock that is released when the thread comes to it."""
        lock = self._lock()
        lock.acquire()
        self._pieces.put((lock, None))
        return lock

    def _reach(self, marker: Any) -> None:
        marker.acquire()
        if self._failed:
            raise self._failed[0]


class _Remote:
    """A hasher whose work is done by a `Background`."""

    def __init__(self, background: Background) -> None:
        self._background = background
        self._hasher = hashlib.sha256()

    def update(self, data: bytes, /) -> None:
        self._background.put(self._hasher, data)

    def hexdigest(self) -> str:
        self._background.wait()
        return self._hasher.hexdigest()


def _work(pieces: SimpleQueue[Any], failed: list[BaseException]) -> None:
    while (item := pieces.get()) is not None:
        hasher, piece = item
        if piece is None:
            hasher.release()
            continue
        try:
            hasher.update(piece)
        except BaseException as error:  # is raised again where the digest is asked for  # noqa: BLE001
            failed.append(error)
        del hasher, piece, item
