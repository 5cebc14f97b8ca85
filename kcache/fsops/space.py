"""How much room there is, found out before anything is written (case B13)."""

from __future__ import annotations

import os
from pathlib import Path

from kcache.errors import NoSpaceError


def free_bytes(path: str | os.PathLike[str]) -> int | None:
    """Bytes that this user may still write on the file system of `path` (or of the nearest directory above that exists).

    None where the file system does not say (some FUSE mounts report no blocks at all).
    """
    level = Path(os.path.abspath(path))  # noqa: PTH100
    while True:
        try:
            found = os.statvfs(level)
        except (FileNotFoundError, NotADirectoryError):
            if level == level.parent:
                return None
            level = level.parent
            continue
        except OSError:
            return None
        return found.f_bavail * found.f_frsize if found.f_blocks else None


def require_space(path: str | os.PathLike[str], needed: int) -> None:
    """Refuses before anything is written if fewer than `needed` bytes are free.

    Raises:
        NoSpaceError: too little room.
    """
    free = free_bytes(path)
    if free is not None and free < needed:
        raise NoSpaceError(
            f"{path} has room for {free} bytes, {needed} are needed",
            remedy="Free some space, or set KCACHE_DIR to a larger file system.",
        )
