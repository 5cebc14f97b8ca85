"""One process of a node builds a module; the others wait, and never for ever.

FlashInfer's own lock (a file, `flock`) is taken, so that plain FlashInfer processes keep out as well. There are file systems
where such a lock lies: everybody gets it. So a name in the kernel (an abstract socket, which ends with its holder and needs no
file system) is held too, and whether the lock lies is found out by asking for it twice. Where it does, processes of other nodes
or network namespaces are not kept out, and the caller builds in a directory of its own.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kcache.warmup.stopping import LateError, Stop

_PAUSE = 0.05


@contextmanager
def building(lock: Path, stop: Stop) -> Iterator[bool]:
    """Holds a module's locks while the body runs.

    Args:
        lock: FlashInfer's lock file of the module (`JitSpec.lock_path`).

    Yields:
        Whether the lock keeps out others; False where it lies.

    Raises:
        LateError: another process held it until the end came; its path is in the message.
    """
    import filelock

    name = _take_name(lock, stop)
    try:
        held = filelock.FileLock(str(lock), thread_local=False)
        while True:
            try:
                held.acquire(timeout=min(1.0, stop.left()), poll_interval=_PAUSE)
                break
            except filelock.Timeout as error:
                if stop.come:
                    raise LateError(f"another process held {lock} until the deadline") from error
        try:
            yield _honest(lock)
        finally:
            held.release()
    finally:
        if name is not None:
            name.close()


def _take_name(lock: Path, stop: Stop) -> socket.socket | None:
    """Holds the lock's name in the kernel; None where there are no such names."""
    where = os.path.realpath(lock.parent)
    key = hashlib.sha256(f"{where}/{lock.name}".encode()).hexdigest()[:32]
    while True:
        try:
            found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError:
            return None
        try:
            found.bind(f"\0kcache-warmup-{key}")
        except OSError as error:
            found.close()
            if error.errno != errno.EADDRINUSE:
                return None
            if stop.come:
                raise LateError(f"another process of this node held {lock} until the deadline") from error
            stop.pause(_PAUSE)
        else:
            return found


def _honest(lock: Path) -> bool:
    """Whether a second holder of a lock that is held is refused."""
    try:
        second = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(second)
    return False
