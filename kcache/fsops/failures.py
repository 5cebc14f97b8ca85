"""What an operating system error means for someone who runs kcache, and what to do about it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kcache.errors import InstallError, NoSpaceError, TrustError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def translated(path: Path, verb: str) -> Iterator[None]:
    """Turns an `OSError` of the body into an error of kcache: `cannot <verb> <path>`, why, and a remedy.

    Raises:
        NoSpaceError: the file system or a quota is full.
        TrustError: a symbolic link where none may be.
        InstallError: anything else.
    """
    try:
        yield
    except OSError as error:
        _raisetranslated(path, verb, error)


def _raisetranslated(path: Path, verb: str, error: OSError) -> NoReturn:
    what = f"cannot {verb} {path}"
    if error.errno in _FULL:
        raise NoSpaceError(what, why=reason(error), remedy="Free some space, or set KCACHE_DIR elsewhere.") from error
    if error.errno == errno.ELOOP:
        raise TrustError(what, why="it is a symbolic link", remedy="Remove it and run again.") from error
    remedies = {
        errno.EROFS: "Set KCACHE_DIR to a writable directory.",
        errno.EACCES: "Set KCACHE_DIR to a directory that this user can write.",
        errno.EPERM: "Set KCACHE_DIR to a directory that this user can write.",
        errno.ENOLCK: "This file system has no locks: set KCACHE_DIR to a local one.",
        errno.EOPNOTSUPP: "This file system has no locks: set KCACHE_DIR to a local one.",
    }
    raise InstallError(what, why=reason(error), remedy=remedies.get(error.errno or 0, "")) from error


def reason(error: OSError) -> str:
    """The system's own words for an error, without its number and path."""
    return error.strerror or str(error)
