"""Reading what others may have put somewhere: never waits, never takes more memory than it was allowed.

A named pipe would be waited for, /dev/zero never ends, a directory or a file of somebody else raises. For what kcache only
compares with what it expects, all of that is the same: it is not that (`read_small`, `digest_or_none`). What it goes on to use
has to be said why it cannot be used (`read_checked`).
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kcache import digest
from kcache.errors import IntegrityError
from kcache.fsops.checks import check_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO


def read_small(path: str | os.PathLike[str], limit: int) -> bytes | None:
    """The bytes of a regular file (links are followed) of at most `limit` bytes; None for anything else, or where it cannot be
    read."""
    try:
        with _opened(path) as stream:
            data = stream.read(limit + 1)
    except OSError:
        return None
    return data if len(data) <= limit else None


def digest_or_none(path: str | os.PathLike[str]) -> str | None:
    """The digest of a regular file (links are followed); None for anything else, or where it cannot be read."""
    try:
        with _opened(path) as stream:
            return digest.of_stream(stream)[0]
    except OSError:
        return None


def read_checked(path: Path, limit: int) -> bytes:
    """The bytes of a file that only we could have written, of at most `limit` bytes.

    Raises:
        TrustError: see `check_regular`. IntegrityError: it is larger, or cannot be read.
    """
    if check_regular(path).size > limit:
        raise IntegrityError(f"{path.name} is too large", why=f"at most {limit} bytes are read")
    try:
        return path.read_bytes()
    except OSError as error:
        raise IntegrityError(f"{path.name} cannot be read", why=error.strerror or str(error)) from error


def _opened(path: str | os.PathLike[str]) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{os.fspath(path)} is no regular file")
    return os.fdopen(descriptor, "rb", buffering=0)
