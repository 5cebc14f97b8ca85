"""A lock between processes that ends with its holder."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kcache.errors import LockTimeoutError
from kcache.fsops.checks import check_regular_stat
from kcache.fsops.failures import translated

_OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def locked(path: str | os.PathLike[str], timeout: float) -> Iterator[None]:
    """Holds an exclusive lock on the file `path` while the body runs.

    The lock is the kernel's (`flock`), so it ends with its holder: a file left by a dead process is no obstacle, and the file
    is never removed. Its mode is 0600: who may not write the cache has no reason to lock it, and must not be able to hold up
    its owner. Waiting is bounded. The holder's pid and host are written into the file, for the message of those who wait.

    Args:
        timeout: seconds to wait at most; 0 tries once.

    Raises:
        LockTimeoutError: another process holds it for longer.
        TrustError: the lock is a symbolic link, no regular file, or someone else could change it.
        NoSpaceError, InstallError: the lock file cannot be made or locked here.
    """
    target = Path(path)
    descriptor = _acquire(target, time.monotonic() + timeout, timeout)
    try:
        with suppress(OSError):  # only for messages; a full disk must not matter
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
        yield
    finally:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may still hold the descriptor open
        os.close(descriptor)


def _acquire(path: Path, deadline: float, timeout: float) -> int:
    pause = 0.002
    while True:
        descriptor = _try_lock(path)
        if descriptor is not None:
            return descriptor
        left = deadline - time.monotonic()
        if left <= 0:
            raise LockTimeoutError(
                f"the lock {path} was held by another process for {timeout:g} s",
                why=_holder(path),
                remedy="Wait for that process or end it; the file itself need not be removed.",
            )
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, 0.1)


def _try_lock(path: Path) -> int | None:
    """A descriptor that holds the lock, or None if it is held elsewhere or the file was exchanged meanwhile."""
    with translated(path, "lock"):
        descriptor = os.open(path, _OPEN_LOCK, 0o600)
        try:
            found = os.fstat(descriptor)
            if found.st_nlink > 0:  # else it was unlinked since; the next try makes a new one
                check_regular_stat(path, found)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(path, found):
                    if not found.st_mode & 0o200:  # made under an umask that would keep its owner out the next time
                        os.fchmod(descriptor, 0o600)
                    return descriptor
        except BlockingIOError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None


def _is_at(path: Path, found: os.stat_result) -> bool:
    try:
        now = os.lstat(path)
    except FileNotFoundError:
        return False
    return (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino)


def _holder(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        text = os.read(descriptor, 300).decode("utf-8", "replace").strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return f"it says: {''.join(c if c.isprintable() else '?' for c in text)}" if text else ""
