"""Files written whole or not at all, and the directories that hold them."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kcache.errors import InstallError, IntegrityError, TrustError
from kcache.fsops.checks import Identity, check_root, kind_of
from kcache.fsops.failures import translated

TEMPORARY_PREFIX = ".tmp-"
"""Names that start so are unfinished files; readers skip them and `sweep` removes those of dead writers."""

DAMAGED_PREFIX = ".damaged-"

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_SWEEP_AGE = 60.0
"""Seconds: a temporary file younger than this may belong to a writer that has not locked it yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file that is complete, on disk and under its name. `size` in bytes; `sha256` is a digest."""

    path: Path
    size: int
    sha256: str
    identity: Identity


def write_stream(
    directory: str | os.PathLike[str],
    name: str,
    chunks: Iterable[bytes],
    *,
    mode: int = 0o644,
    expected_size: int | None,
    expected_sha256: str | None,
) -> Written:
    """Writes `chunks` as `directory/name`, replacing a regular file of that name, only if size and digest are as expected.

    On any failure, an error raised by `chunks` included, nothing is left behind and what was there before is untouched.

    Args:
        directory: an existing directory, not a symbolic link.
        name: one path segment.
        mode: the exact permission bits.
        expected_size: bytes; reading stops at the first byte too many. None where the caller made the bytes itself.
        expected_sha256: a digest; None where the caller made the bytes itself.

    Raises:
        IntegrityError: the bytes are not the expected ones.
        TrustError: the directory is a symbolic link, or something that is no regular file has the name.
        NoSpaceError, InstallError: the file system refused.
    """
    if not name or "/" in name or name in (".", "..") or "\0" in name:
        raise InstallError(f"{name!r} is not a file name")
    path = Path(directory) / name
    with translated(path, "write"):
        parent = _open_directory(directory)
    try:
        return _write_in(parent, path, chunks, mode=mode, expected_size=expected_size, expected_sha256=expected_sha256)
    finally:
        os.close(parent)


def _write_in(
    parent: int, path: Path, chunks: Iterable[bytes], *, mode: int, expected_size: int | None, expected_sha256: str | None
) -> Written:
    temporary = TEMPORARY_PREFIX + os.urandom(8).hex()
    with translated(path, "write"):
        _refuse_irregular(parent, path)
        descriptor = os.open(temporary, _OPEN_NEW, 0o600, dir_fd=parent)
    try:
        with suppress(OSError):  # only tells `sweep` that the writer lives; some network file systems have no flock
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        size, sha256 = _copy(descriptor, path, chunks, expected_size)
        if expected_size is not None and size != expected_size:
            raise IntegrityError(f"{path.name} ends after {size} bytes", why=f"{expected_size} were expected")
        if expected_sha256 is not None and sha256 != expected_sha256:
            raise IntegrityError(f"{path.name} has digest {sha256}", why=f"{expected_sha256} was expected")
        with translated(path, "write"):
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
            os.replace(temporary, path.name, src_dir_fd=parent, dst_dir_fd=parent)
            identity = Identity.from_stat(os.fstat(descriptor))  # after the rename, which sets ctime
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=parent)
        raise
    finally:
        os.close(descriptor)
    with translated(path, "write"):
        os.fsync(parent)
    return Written(path=path, size=size, sha256=sha256, identity=identity)


def _copy(descriptor: int, path: Path, chunks: Iterable[bytes], limit: int | None) -> tuple[int, str]:
    hasher = hashlib.sha256()
    size = 0
    for chunk in chunks:
        size += len(chunk)
        if limit is not None and size > limit:
            raise IntegrityError(f"{path.name} is larger than the {limit} bytes that were expected")
        hasher.update(chunk)
        with translated(path, "write"):
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    return size, "sha256:" + hasher.hexdigest()


def _refuse_irregular(parent: int, path: Path) -> None:
    try:
        found = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise TrustError(f"{path} is {kind_of(found.st_mode)}, not a regular file", remedy="Remove it and run again.")


def write_bytes(path: str | os.PathLike[str], data: bytes, mode: int = 0o644) -> Written:
    """Writes `data` as the file `path`, whole or not at all. Raises as `write_stream`."""
    target = Path(path)
    return write_stream(target.parent, target.name, (data,), mode=mode, expected_size=None, expected_sha256=None)


def ensure_directory(path: str | os.PathLike[str], mode: int = 0o755, *, root: str | os.PathLike[str] | None = None) -> Path:
    """Makes `path` and whatever is missing above it, and returns it.

    Each level that is made has exactly `mode`. `path` itself, and every level from `root` (a directory above it) down, must
    pass `check_root`; above `root`, or where none is given, symbolic links are the host's own arrangement.

    Raises:
        TrustError: a level that must be trusted is not.
        NoSpaceError, InstallError: the file system refused.
    """
    target = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow the links that must be seen
    trusted = target if root is None else Path(os.path.abspath(root))  # noqa: PTH100
    if trusted != target and trusted not in target.parents:
        raise InstallError(f"{target} is not below {trusted}")
    for level in (*reversed(target.parents), target):
        checked = level == trusted or trusted in level.parents
        with translated(level, "make the directory"):
            if not (os.path.lexists(level) if checked else level.exists()):
                _make_directory(level, mode)
        if checked:
            check_root(level)
    return target


def _make_directory(path: Path, mode: int) -> None:
    try:
        path.mkdir(mode)
    except FileExistsError:
        return  # another process was first; the caller checks what it made
    descriptor = os.open(path, _OPEN_DIRECTORY)
    try:
        os.fchmod(descriptor, mode)
    finally:
        os.close(descriptor)
    _sync_directory(path.parent)


def set_aside(path: str | os.PathLike[str]) -> Path:
    """Renames a damaged file to a `.damaged-` name beside it and returns that; an earlier one of the same name is replaced.

    One is kept for a person to look at, and repeated damage does not fill the disk.

    Raises:
        InstallError: it cannot be renamed.
    """
    target = Path(path)
    aside = target.with_name(DAMAGED_PREFIX + target.name[: 255 - len(DAMAGED_PREFIX)])
    with translated(target, "set aside"):
        target.replace(aside)
        _sync_directory(target.parent)
    return aside


def sweep(directory: str | os.PathLike[str]) -> int:
    """Removes unfinished files of dead writers from `directory` and returns how many. Never fails.

    A living writer holds a lock on its temporary file, whatever container it runs in; ages alone could not tell.
    """
    removed = 0
    with suppress(OSError), os.scandir(directory) as listing:
        for item in listing:
            if item.name.startswith(TEMPORARY_PREFIX):
                with suppress(OSError):
                    removed += _remove_if_dead(item)
    return removed


def _remove_if_dead(item: os.DirEntry[str]) -> bool:
    descriptor = os.open(item.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or time.time() - found.st_mtime < _SWEEP_AGE:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(item.path).unlink()
        return True
    finally:
        os.close(descriptor)


def _open_directory(path: str | os.PathLike[str]) -> int:
    try:
        return os.open(path, _OPEN_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and Path(path).is_symlink():
            raise TrustError(f"{path} is a symbolic link, not a directory", remedy="Remove it and run again.") from error
        raise


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
