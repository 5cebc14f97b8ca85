"""Bringing files to disk while the caller goes on: what waits for a disk need not wait for it one file after another.

File systems with a journal write it once for all that wait, so several threads take little longer than one.
"""

from __future__ import annotations

import os
from pathlib import Path

from kcache.fsops.failures import translated

TYPE_CHECKING = False
if TYPE_CHECKING:
    from queue import SimpleQueue
    from threading import Thread

_THREADS = 8


class Flusher:
    """Takes over open files, flushes and closes each. Made for one writer; `finish` says whether all are on disk."""

    def __init__(self) -> None:
        from queue import SimpleQueue  # a start that installs nothing does not pay for it

        self._files: SimpleQueue[tuple[int, Path] | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._failed: list[tuple[Path, OSError]] = []

    def take(self, descriptor: int, path: Path) -> None:
        """Flushes and closes `descriptor` some time before `finish` returns; `path` is for messages."""
        self._files.put((descriptor, path))
        if len(self._threads) < _THREADS:
            from threading import Thread

            # A disk that hangs must keep no process from ending.
            thread = Thread(target=_work, args=(self._files, self._failed), daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self) -> None:
        """Returns when all files are on disk.

        Raises:
            NoSpaceError, InstallError: one of them is not.
        """
        for _ in self._threads:
            self._files.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        for path, error in self._failed:
            with translated(path, "write"):
                raise error


def _work(files: SimpleQueue[tuple[int, Path] | None], failed: list[tuple[Path, OSError]]) -> None:
    while (file := files.get()) is not None:
        descriptor, path = file
        try:
            os.fsync(descriptor)
        except OSError as error:
            failed.append((path, error))
        finally:
            os.close(descriptor)
