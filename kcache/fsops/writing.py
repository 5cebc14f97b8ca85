"""Files written whole or not at all, and the directories that hold them."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kcache.errors import InstallError, IntegrityError, TrustError
from kcache.fsops.checks import Identity, check_root, kind_of
from kcache.fsops.failures import translated
from kcache.fsops.flushing import Flusher
from kcache.values import dataclass

TEMPORARY_PREFIX = ".tmp-"
"""Names that start so are unfinished files; readers skip them and `sweep` removes old ones."""

DAMAGED_PREFIX = ".damaged-"

_OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A file that is complete, on disk and under its name. `size` in bytes; `sha256` is a digest."""

    path: Path
    size: int
    sha256: str
    identity: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A file that is complete, verified and on disk under a temporary name: `commit` gives it its own, `discard` removes it.

    Several files become visible together, as far as a file system allows, by staging all before committing any. Nothing is
    held open meanwhile.
    """

    path: Path
    temporary: str
    size: int
    sha256: str

    def commit(self, *, durable: bool = True) -> Written:
        """Gives the file its name, in place of a regular file of that name.

        Args:
            durable: whether the name outlasts a power failure from now on. Without, it does some seconds later.

        Raises:
            TrustError: something that is no regular file has the name.
            NoSpaceError, InstallError: the file system refused; nothing is left behind.
        """
        try:
            with translated(self.path, "write"), _directory(self.path.parent) as parent:
                _refuse_irregular(parent, self.path)
                os.replace(self.temporary, self.path.name, src_dir_fd=parent, dst_dir_fd=parent)
                found = os.stat(self.path.name, dir_fd=parent, follow_symlinks=False)  # after the rename, which sets ctime
                if durable:
                    os.fsync(parent)
        except BaseException:
            self.discard()
            raise
        return Written(path=self.path, size=self.size, sha256=self.sha256, identity=Identity.from_stat(found))

    def discard(self) -> None:
        """Removes the file unless it was committed. Never fails, and may be called again."""
        with suppress(OSError):
            self.path.with_name(self.temporary).unlink()


def stage(
    directory: str | os.PathLike[str],
    name: str,
    chunks: Iterable[bytes],
    *,
    mode: int = 0o644,
    expected_size: int | None,
    expected_sha256: str | None,
    verified: str | None = None,
    durable: bool = True,
    flusher: Flusher | None = None,
) -> Staged:
    """Writes `chunks` beside `directory/name` under a temporary name.

    On any failure, an error raised by `chunks` included, nothing is left behind.

    Args:
        directory: an existing directory, not a symbolic link.
        name: one path segment.
        mode: the exact permission bits.
        expected_size: bytes; reading stops at the first byte too many. None where the caller made the bytes itself.
        expected_sha256: a digest; None where the caller made the bytes itself.
        verified: the digest of the bytes, where `chunks` itself ends in an error if they have another: they are not hashed again.
        durable: whether the file is on disk when this returns. Without, a power failure may leave any part of it under its
            name: only for what is checked whenever it is read, and can be made again.
        flusher: brings the file to disk instead; the caller calls its `finish` before `commit`.

    Raises:
        IntegrityError: the bytes are not the expected ones.
        TrustError: the directory is a symbolic link, or something that is no regular file has the name.
        NoSpaceError, InstallError: the file system refused.
    """
    if not name or "/" in name or name in (".", "..") or "\0" in name:
        raise InstallError(f"{name!r} is not a file name")
    path = Path(directory) / name
    temporary = TEMPORARY_PREFIX + os.urandom(8).hex()
    with translated(path, "write"), _directory(path.parent) as parent:
        _refuse_irregular(parent, path)
        descriptor = os.open(temporary, _OPEN_NEW, 0o600, dir_fd=parent)
    try:
        size, sha256 = _copy(descriptor, path, chunks, expected_size, verified=verified, flusher=flusher)
        if expected_size is not None and size != expected_size:
            raise IntegrityError(f"{name} ends after {size} bytes", why=f"{expected_size} were expected")
        if expected_sha256 is not None and sha256 != expected_sha256:
            raise IntegrityError(f"{name} has digest {sha256}", why=f"{expected_sha256} was expected")
        with translated(path, "write"):
            os.fchmod(descriptor, mode)
            if durable and flusher is None:
                os.fsync(descriptor)
    except BaseException:
        os.close(descriptor)
        with suppress(OSError):
            path.with_name(temporary).unlink()
        raise
    if flusher is not None:
        flusher.take(descriptor, path)
    else:
        os.close(descriptor)
    return Staged(path=path, temporary=temporary, size=size, sha256=sha256)


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
    Arguments and errors are those of `stage`.
    """
    return stage(directory, name, chunks, mode=mode, expected_size=expected_size, expected_sha256=expected_sha256).commit()


_EARLY = 4 << 20
"""Bytes after which a file that is being written is flushed as far as it is, so that little is left to wait for at its end."""


def _copy(
    descriptor: int, path: Path, chunks: Iterable[bytes], limit: int | None, *, verified: str | None, flusher: Flusher | None
) -> tuple[int, str]:
    hasher = hashlib.sha256() if verified is None else None
    size = flushed = 0
    for chunk in chunks:
        size += len(chunk)
        if limit is not None and size > limit:
            raise IntegrityError(f"{path.name} is larger than the {limit} bytes that were expected")
        if hasher is not None:
            hasher.update(chunk)
        with translated(path, "write"):
            rest = memoryview(chunk)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if flusher is not None and size - flushed >= _EARLY:
                flushed = size
                flusher.take(os.dup(descriptor), path)
    return size, "sha256:" + hasher.hexdigest() if hasher is not None else verified or ""


def _refuse_irregular(parent: int, path: Path) -> None:
    try:
        found = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(found.st_mode):
        raise TrustError(f"{path} is {kind_of(found.st_mode)}, not a regular file", remedy="Remove it and run again.")


def write_bytes(path: str | os.PathLike[str], data: bytes, mode: int = 0o644, *, durable: bool = True) -> Written:
    """Writes `data` as the file `path`, whole or not at all. `durable` is that of `stage`; raises as `write_stream`."""
    target = Path(path)
    staged = stage(target.parent, target.name, (data,), mode=mode, expected_size=None, expected_sha256=None, durable=durable)
    return staged.commit(durable=durable)


def write_link(path: str | os.PathLike[str], target: str, *, durable: bool = True) -> None:
    """Makes the symbolic link `path` to `target`, in place of another link of that name; readers see the old or the new one.

    Args:
        durable: whether it outlasts a power failure from now on.

    Raises:
        TrustError: something that is no link has the name, or its directory is a link.
        NoSpaceError, InstallError: the file system refused.
    """
    link = Path(path)
    temporary = TEMPORARY_PREFIX + os.urandom(8).hex()
    with translated(link, "make the link"), _directory(link.parent) as parent:
        if link.exists() and not link.is_symlink():
            raise TrustError(f"{link} is {kind_of(link.lstat().st_mode)}, not a symbolic link", remedy="Remove it and run again.")
        os.symlink(target, temporary, dir_fd=parent)
        try:
            os.replace(temporary, link.name, src_dir_fd=parent, dst_dir_fd=parent)
            if durable:
                os.fsync(parent)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=parent)
            raise


def ensure_directory(path: str | os.PathLike[str], mode: int = 0o755, *, root: str | os.PathLike[str] | None = None) -> Path:
    """Makes `path` and whatever is missing above it, and returns it.

    Each level that is made has exactly `mode`. `path` itself, and every level from `root` (a directory above it) down, must
    pass `check_root`; above `root`, or where none is given, symbolic links are the host's own arrangement.

    Raises:
        TrustError: a level that must be trusted is not.
        NoSpaceError, InstallError: the file system refused.
    """
    target = os.path.abspath(path)  # noqa: PTH100 - resolve() would follow the links that must be seen
    trusted = target if root is None else os.path.abspath(root)  # noqa: PTH100
    inside = target[len(trusted.rstrip("/")) :]
    if trusted.rstrip("/") + inside != target or inside[:1] not in ("", "/"):
        raise InstallError(f"{target} is not below {trusted}")
    if not os.path.lexists(trusted):
        for level in reversed(Path(trusted).parents):
            with translated(level, "make the directory"):
                present = level.exists()
            if not present:
                make_directory(level, mode, durable=False)
    level_of = trusted
    for segment in ("", *inside.split("/")[1:]):
        level_of = f"{level_of.rstrip('/')}/{segment}" if segment else level_of
        with translated(Path(level_of), "make the directory"):
            present = os.path.lexists(level_of)
        if not present:
            make_directory(level_of, mode, durable=False)
        check_root(level_of)
    return Path(target)


def make_directory(path: str | os.PathLike[str], mode: int = 0o755, *, durable: bool = True) -> None:
    """Makes one level, with exactly `mode`, unless something has that name already; what that is, is not checked.

    Args:
        durable: whether it outlasts a power failure from now on.

    Raises:
        NoSpaceError, InstallError: the file system refused.
    """
    target = Path(path)
    with translated(target, "make the directory"):
        try:
            target.mkdir(mode)
        except FileExistsError:
            return
        with _directory(target) as descriptor:
            os.fchmod(descriptor, mode)
        if durable:
            sync_directory(target.parent)


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
        sync_directory(target.parent)
    return aside


def sweep(directory: str | os.PathLike[str], idle: float = 3600.0, *, now: float | None = None) -> int:
    """Removes unfinished files that nobody has written to for `idle` seconds, and returns how many. Never fails.

    They are what a killed writer leaves. No writer of kcache lives that long: each has a deadline.

    Args:
        now: seconds since the epoch by the clock that stamps these files, where that may be another host's.
    """
    removed = 0
    with suppress(OSError), os.scandir(directory) as listing:
        for item in listing:
            if item.name.startswith(TEMPORARY_PREFIX):
                with suppress(OSError):
                    age = (time.time() if now is None else now) - item.stat(follow_symlinks=False).st_mtime
                    if item.is_file(follow_symlinks=False) and age > idle:
                        Path(item.path).unlink()
                        removed += 1
    return removed


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    descriptor = _open_directory(path)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open_directory(path: str | os.PathLike[str]) -> int:
    try:
        return os.open(path, _OPEN_DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and Path(path).is_symlink():
            raise TrustError(f"{path} is a symbolic link, not a directory", remedy="Remove it and run again.") from error
        raise


def sync_directory(path: str | os.PathLike[str]) -> None:
    """Makes names that were given or taken in a directory durable.

    Raises:
        NoSpaceError, InstallError: the file system refused.
    """
    target = Path(path)
    with translated(target, "flush"):
        descriptor = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
