"""Who could change a file or directory that kcache is about to trust (case B43).

`owner` means this process's effective user or root; anyone else's file is refused, and so is one that a group or everyone may
write. Nothing is opened or changed here.
"""

from __future__ import annotations

import os
import stat

from kcache.errors import TrustError
from kcache.fsops.failures import reason
from kcache.values import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_GROUP_OR_WORLD_WRITABLE = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What `stat` says of a file; equal as long as nobody wrote, replaced or touched it. Times in nanoseconds, size in bytes."""

    size: int
    mtime_ns: int
    ctime_ns: int
    ino: int
    dev: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Identity | None:
        """The identity of what lies at `path` itself (a symbolic link is not followed), or None if there is nothing."""
        try:
            return cls.from_stat(os.lstat(path))
        except OSError:
            return None

    @classmethod
    def from_stat(cls, result: os.stat_result) -> Identity:
        return cls(
            size=result.st_size,
            mtime_ns=result.st_mtime_ns,
            ctime_ns=result.st_ctime_ns,
            ino=result.st_ino,
            dev=result.st_dev,
        )

    def to_json(self) -> dict[str, int]:
        return {
            "size": self.size,
            "mtime_ns": self.mtime_ns,
            "ctime_ns": self.ctime_ns,
            "ino": self.ino,
            "dev": self.dev,
        }

    @classmethod
    def from_json(cls, document: Any) -> Identity | None:
        """The identity that `to_json` wrote, or None for anything else."""
        names = cls.__slots__
        if not isinstance(document, dict) or set(document) != set(names):
            return None
        if not all(isinstance(value, int) and not isinstance(value, bool) for value in document.values()):
            return None
        return cls(**document)


def check_root(path: str | os.PathLike[str]) -> None:
    """Refuses a cache root, or a directory below it, that someone else could change.

    Raises:
        TrustError: missing, a symbolic link, no directory, owned by neither this user nor root, or writable by group or world.
    """
    found = _lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise TrustError(
            f"{path} is {kind_of(found.st_mode)}, not a directory",
            why="a link can be pointed elsewhere after it was checked" if stat.S_ISLNK(found.st_mode) else "",
            remedy="Set KCACHE_DIR to the directory itself.",
        )
    _check_owner(path, found, f"Set KCACHE_DIR to a directory that only you can write, for example {path}/kcache (it is made).")


def check_regular(path: str | os.PathLike[str]) -> Identity:
    """Refuses a file that is about to be loaded or trusted if someone else could change it; returns what was checked.

    Raises:
        TrustError: missing, a symbolic link, no regular file, hard-linked elsewhere, owned by neither this user nor root, or
            writable by group or world.
    """
    return check_regular_stat(path, _lstat(path))


def check_regular_stat(path: str | os.PathLike[str], found: os.stat_result) -> Identity:
    remedy = "Remove it and run again."
    if not stat.S_ISREG(found.st_mode):
        raise TrustError(f"{path} is {kind_of(found.st_mode)}, not a regular file", remedy=remedy)
    if found.st_nlink > 1:
        raise TrustError(f"{path} has {found.st_nlink} hard links", why="it can be changed under another name", remedy=remedy)
    _check_owner(path, found, remedy)
    return Identity.from_stat(found)


def _check_owner(path: str | os.PathLike[str], found: os.stat_result, remedy: str) -> None:
    user = os.geteuid()
    if found.st_uid not in (user, 0):
        raise TrustError(
            f"{path} belongs to uid {found.st_uid}",
            why=f"its owner can change what uid {user} would load",
            remedy=remedy,
        )
    if found.st_mode & _GROUP_OR_WORLD_WRITABLE:
        raise TrustError(
            f"{path} can be written by its group or by everyone (mode {stat.S_IMODE(found.st_mode):04o})",
            why="they can change what this user would load",
            remedy=f"Run `chmod go-w {path}` if it holds nothing foreign. {remedy}",
        )


def _lstat(path: str | os.PathLike[str]) -> os.stat_result:
    try:
        return os.lstat(path)
    except OSError as error:
        raise TrustError(f"{path} cannot be checked", why=reason(error)) from error


def kind_of(mode: int) -> str:
    kinds = (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISREG, "a regular file"),
        (stat.S_ISFIFO, "a named pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISBLK, "a block device"),
        (stat.S_ISCHR, "a character device"),
    )
    return next((text for test, text in kinds if test(mode)), "of an unknown kind")
