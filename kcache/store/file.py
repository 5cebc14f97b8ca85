"""A directory as a store: a local disk, a network mount, a volume that is baked into an image.

Objects are files of mode 0644 in directories of mode 0755, so that any user can read what one publishes. An object appears by a
rename (or a hard link, where it must not replace another) after it was written and flushed under a hidden name beside it.
Hidden names are not objects. Several processes of one user may publish at once.

Nothing is trusted because of where it lies: owners and modes are not checked here, digests are checked by whoever reads.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kcache import fsops
from kcache.errors import (
    AccessDeniedError,
    ConflictError,
    InstallError,
    LockTimeoutError,
    NotFoundError,
    StoreError,
    TrustError,
    UnavailableError,
)
from kcache.store.base import CHUNK, StoredObject, check_name, collect, is_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO, NoReturn

_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_ABSENT = (errno.ENOENT, errno.ENOTDIR)
_TRANSIENT = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN, errno.EBUSY, errno.EHOSTDOWN)
_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


ABANDONED = 24 * 3600.0
"""Seconds without a write after which an unfinished file has no writer any more: far more than any object takes."""


class FileStore:
    """The store in the directory `root`. Implements `kcache.store.base.Store`."""

    def __init__(self, root: Path, *, create: bool = False, lock_timeout: float = 60.0) -> None:
        """
        Args:
            create: whether the first write may make `root`.
            lock_timeout: seconds that `replace` waits for another writer.
        """
        self._root = root
        self._create = create
        self._lock_timeout = lock_timeout

    def describe(self) -> str:
        return str(self._root)

    def stat(self, name: str) -> StoredObject | None:
        path = self._path(name)
        with self._translated(name):
            try:
                found = path.lstat()
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                self._require_root()
                return None
            if stat.S_ISDIR(found.st_mode):
                return None
            self._require_regular(name, found)
        return StoredObject(size=found.st_size)

    def read(self, name: str, *, offset: int = 0) -> Iterator[bytes]:
        return self._chunks(name, self._open(name), offset)

    def _open(self, name: str) -> BinaryIO:
        path = self._path(name)
        with self._translated(name):
            descriptor = os.open(path, _OPEN)
            try:
                self._require_regular(name, os.fstat(descriptor))
            except BaseException:
                os.close(descriptor)
                raise
        return os.fdopen(descriptor, "rb", buffering=0)

    def _chunks(self, name: str, stream: BinaryIO, offset: int) -> Iterator[bytes]:
        with stream, self._translated(name):
            stream.seek(offset)
            while chunk := stream.read(CHUNK):
                yield chunk

    def read_bytes(self, name: str, limit: int) -> bytes:
        return collect(self.read(name), name, limit)

    def list(self, prefix: str, *, depth: int | None = None) -> Iterator[str]:
        prefix = prefix.rstrip("/")
        if prefix:
            check_name(prefix)
        with self._translated(prefix):
            self._require_root()
        return self._walk(prefix, depth)

    def _walk(self, directory: str, depth: int | None) -> Iterator[str]:
        with self._translated(directory):
            try:
                with os.scandir(self._root / directory) as listing:
                    found = sorted((item.name, item.is_dir(follow_symlinks=False), self._is_object(item)) for item in listing)
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                return
        for name, is_directory, is_file in found:
            path = f"{directory}/{name}" if directory else name
            if not is_name(name):
                continue
            if is_directory and (depth is None or depth > 1):
                yield from self._walk(path, None if depth is None else depth - 1)
            elif is_file:
                yield path

    def _is_object(self, item: os.DirEntry[str]) -> bool:
        return item.is_file(follow_symlinks=False)

    def write(self, name: str, source: Path | bytes, *, if_absent: bool) -> bool:
        if if_absent and self.stat(name) is not None:
            return False
        with self._translated(name):
            path = self._prepared(name)
            staged = fsops.stage(path.parent, path.name, _source(source), expected_size=None, expected_sha256=None)
            if not if_absent:
                staged.commit()
                return True
            try:
                return self._link(staged)
            finally:
                staged.discard()

    def _link(self, staged: fsops.Staged) -> bool:
        """Gives a staged file its name only if nothing has it: what a rename cannot do."""
        try:
            os.link(staged.path.with_name(staged.temporary), staged.path, follow_symlinks=False)
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            # No hard links here. Two writers of one name may both rename: whole objects, the later one stays.
            if os.path.lexists(staged.path):
                return False
            staged.commit()
            return True
        fsops.sync_directory(staged.path.parent)
        return True

    def write_many(self, items: Sequence[tuple[str, Path | bytes]], *, if_absent: bool) -> Sequence[bool]:
        return [self.write(name, source, if_absent=if_absent) for name, source in items]

    def replace(self, name: str, data: bytes, expected: bytes | None) -> None:
        with self._translated(name):
            path = self._prepared(name)
            with fsops.locked(path.with_name(f".lock-{path.name}"), self._lock_timeout):
                try:
                    found = self.read_bytes(name, 1 << 40)
                except NotFoundError:
                    found = None
                if found != expected:
                    raise ConflictError(
                        f"{name} in {self.describe()} was changed by another writer", remedy="Read it again and repeat."
                    )
                written = fsops.write_bytes(path, data)
        self._sweep(written.identity.mtime_ns / 1e9)

    def _sweep(self, now: float) -> None:
        """Removes what killed writers left, once for each index that is written: files that are older than any publisher lives.

        Args:
            now: the time by the clock that stamps the files, which on a network mount is not this host's.
        """
        for directory, folders, _ in os.walk(self._root):
            folders[:] = [folder for folder in folders if is_name(folder)]
            fsops.sweep(directory, ABANDONED, now=now)

    def delete(self, *names: str) -> bool:
        there = [name for name in names if self.stat(name) is not None]
        for name in there:
            path = self._path(name)
            with self._translated(name):
                path.unlink(missing_ok=True)
                fsops.sync_directory(path.parent)
        return bool(there)

    def _path(self, name: str) -> Path:
        check_name(name)
        return self._root / name

    def _prepared(self, name: str) -> Path:
        """The path of an object that is about to be written, with the directories above it made."""
        path = self._path(name)
        if self._create and not self._root.is_dir():
            self._make_root()
        self._require_root()
        level = self._root
        for segment in name.split("/")[:-1]:
            level = level / segment
            fsops.make_directory(level)
        return path

    def _make_root(self) -> None:
        try:
            for level in [*reversed(self._root.parents), self._root]:
                if not level.exists():
                    fsops.make_directory(level)
        except InstallError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in _ABSENT:
                raise
            # Otherwise it would be the object that is not there.
            raise StoreError(
                f"{self._root} cannot be made", why=cause.strerror or "", remedy="Name another directory."
            ) from error

    def _require_root(self) -> None:
        """A store whose place is missing is not one without objects, unless the first write may make it."""
        if not self._root.is_dir() and not (self._create and not self._root.exists()):
            reason = "it is not a directory" if self._root.exists() else "no such directory"
            raise StoreError(
                f"there is no store at {self._root}",
                why=reason,
                remedy="Check the path, and whether its file system is mounted.",
            )

    def _require_regular(self, name: str, found: os.stat_result) -> None:
        if stat.S_ISDIR(found.st_mode):
            raise NotFoundError(f"there is no {name} in {self.describe()}", why="a directory has this name")
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"{name} in {self.describe()} is not a regular file", remedy="Remove it and publish again.")

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._raise(name, error)
        except (InstallError, TrustError) as error:
            cause = error.__cause__
            if isinstance(cause, OSError):
                self._raise(name, cause)
            kind = UnavailableError if isinstance(error, LockTimeoutError) else StoreError
            raise kind(f"cannot write {name} in {self.describe()}", why=error.what, remedy=error.remedy) from error

    def _raise(self, name: str, error: OSError) -> NoReturn:
        where = f"{name} in {self.describe()}" if name else self.describe()
        why = error.strerror or str(error)
        if error.errno in _ABSENT:
            self._require_root()
            raise NotFoundError(f"there is no {where}") from error
        if error.errno in _DENIED:
            raise AccessDeniedError(f"no access to {where}", why=why, remedy="Check the directory's owner and mode.") from error
        if error.errno in _FULL:
            raise StoreError(f"no room for {where}", why=why, remedy="Free some space there.") from error
        if error.errno == errno.ELOOP:
            raise StoreError(f"{where} is a symbolic link", remedy="Remove it and publish again.") from error
        if error.errno in _TRANSIENT:
            raise UnavailableError(f"{where} cannot be reached", why=why) from error
        raise StoreError(f"{where} failed", why=why) from error


def _source(source: Path | bytes) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield source
        return
    try:
        stream = source.open("rb", buffering=0)
    except OSError as error:
        raise StoreError(f"cannot read {source}", why=error.strerror or "") from error
    with stream:
        while chunk := stream.read(CHUNK):
            yield chunk
