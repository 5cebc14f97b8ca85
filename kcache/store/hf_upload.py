"""Writing to a repository on the Hub, by huggingface_hub: commits of up to `BATCH` files, repeated with care, checked afterwards.

- A commit is what makes objects visible, all of a batch at once.
- "Only if it is absent" and compare-and-swap hold against every other writer: the commit names the parent on which the decision
  was made, and the Hub refuses it (412) if the branch has moved on. Then the decision is made again on the new head.
- The library never repeats a commit (2.4.0, _commit_api.py, _send_commit), and one whose answer was lost may have landed. So
  before a commit is repeated, the branch is looked at: what is there already is not written again.
- What the Hub says it has is compared, digest by digest, with what was given.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kcache.errors import AccessDeniedError, ConflictError, IntegrityError, StoreError, UnavailableError
from kcache.store.base import CHUNK
from kcache.store.hub import COMMIT, HubSettings, Place
from kcache.store.web import BUSY, wait_asked

if TYPE_CHECKING:
    from huggingface_hub import HfApi

BATCH = 100
"""Files in a commit. The Hub counts commits by the hour."""

PATHS = 500
"""Paths asked about in one request; the Hub takes 1,000."""

SECONDS = 600.0
"""How long one call goes on repeating where other writers are always first."""

FAILING = 120.0
"""And where the Hub does not do it."""

WAIT = 60.0
"""Seconds of silence that end a request: huggingface_hub itself waits for ever (utils/_http.py, default_client_factory)."""

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 15.0
MOVED = (409, 412)

_T = TypeVar("_T")
Source = Path | bytes


class _Retry(Exception):
    """Try again: `error` is what to say if there is no time left. `moved`: another writer was first, nothing was written."""

    def __init__(self, error: StoreError, *, moved: bool = False, seconds: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.moved, self.seconds = error, moved, seconds


class Uploader:
    """Writes below one place. Paths are those in the repository."""

    def __init__(self, place: Place, settings: HubSettings, *, create: bool, private: bool) -> None:
        self._place, self._settings = place, settings
        self._create, self._private = create, private
        self._api: HfApi | None = None

    # what the store does ---------------------------------------------------------------------------------------------------

    def write_many(self, items: Sequence[tuple[str, Source]], *, if_absent: bool) -> list[bool]:
        """As `kcache.store.base.Store.write_many` says, with paths for names."""
        self._writable()
        written: list[bool] = []
        for start in range(0, len(items), BATCH):
            batch = {path: _measured(path, source) for path, source in items[start : start + BATCH]}
            done = self._until_done(_Batch(self, batch, if_absent=if_absent))
            written += [done[path] for path, _ in items[start : start + BATCH]]
        return written

    def replace(self, path: str, data: bytes, expected: bytes | None, current: Callable[[str, str], bytes | None]) -> None:
        """Compare and swap. `current(path, commit)` is what a path holds in a commit."""
        self._writable()
        self._until_done(_Swap(self, path, data, expected, current))

    def delete(self, paths: Sequence[str]) -> bool:
        """As `kcache.store.base.Store.delete` says, with paths for names."""
        self._writable()
        batches = [paths[start : start + BATCH] for start in range(0, len(paths), BATCH)]
        done = [self._until_done(_Removal(self, batch)) for batch in batches]
        return any(done)

    # how it talks to the Hub -----------------------------------------------------------------------------------------------

    def _writable(self) -> None:
        if COMMIT.fullmatch(self._place.revision):
            raise AccessDeniedError(
                f"{self._place.given} is a commit, which nothing can be changed in", remedy="Publish to a branch."
            )

    @property
    def api(self) -> HfApi:
        """The library's client; with `create`, the repository and the branch are there afterwards."""
        if self._api is None:
            from huggingface_hub import HfApi, logging, set_client_factory
            from huggingface_hub.utils import _http
            from huggingface_hub.utils.tqdm import disable_progress_bars

            def client() -> Any:
                made = _http.default_client_factory()
                made.timeout = WAIT
                return made

            set_client_factory(client)
            disable_progress_bars()
            logging.get_logger("huggingface_hub").setLevel("ERROR")
            api = HfApi(endpoint=self._settings.endpoint, token=self._settings.token or False)
            if self._create:
                self._until_done(lambda: self._make(api))
            self._api = api
        return self._api

    def _make(self, api: HfApi) -> None:
        with self.translated():
            api.create_repo(self._place.repo, private=self._private or None, exist_ok=True)
            if self._place.revision != "main":
                api.create_branch(self._place.repo, branch=self._place.revision, exist_ok=True)

    def head(self) -> str:
        """The commit that the branch names."""
        api = self.api
        with self.translated():
            found = api.repo_info(self._place.repo, revision=self._place.revision, timeout=WAIT).sha
        if found is None:
            raise StoreError(f"the Hub does not say which commit {self._place.given} is at")
        return found

    def listed(self, paths: Sequence[str], commit: str) -> dict[str, tuple[int, str]]:
        """Path -> size and digest (sha256 of an LFS file, git's of another), of those that are there."""
        from huggingface_hub.hf_api import RepoFile

        found = {}
        api = self.api
        for start in range(0, len(paths), PATHS):
            with self.translated():
                for info in api.get_paths_info(self._place.repo, list(paths[start : start + PATHS]), revision=commit):
                    if isinstance(info, RepoFile):
                        found[info.path] = (info.size, info.lfs.sha256 if info.lfs else info.blob_id)
        return found

    def commit(self, operations: list[Any], message: str, parent: str | None) -> str:
        """One commit; the new head.

        Raises:
            _Retry: it was not made, or nobody knows whether it was.
        """
        api = self.api
        with self.translated():
            made = api.create_commit(
                self._place.repo, operations, commit_message=message, revision=self._place.revision, parent_commit=parent
            )
        # Where the branch has the very same bytes by now, the library makes no commit and says nothing (2.4.0, hf_api.py,
        # create_commit, "No files have been modified"): somebody else wrote them, since the parent did not have them.
        if parent is not None and not all(getattr(operation, "_is_committed", True) for operation in operations):
            raise _Retry(self._moved(), moved=True)
        oid: str = made.oid
        return oid

    def _moved(self) -> ConflictError:
        return ConflictError(f"{self._place.given} was changed by others at every attempt", remedy="Publish again later.")

    def _until_done(self, attempt: Callable[[], _T]) -> _T:
        started, pause = time.monotonic(), FIRST_PAUSE
        while True:
            try:
                return attempt()
            except _Retry as retry:
                wait = max(pause * (0.5 + os.urandom(1)[0] / 255), retry.seconds)
                if time.monotonic() + wait - started > (SECONDS if retry.moved else FAILING):
                    raise retry.error from retry.__cause__
                time.sleep(wait)
                pause = min(pause * 2, LONGEST_PAUSE)

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Foreign exceptions as ours, or as `_Retry`."""
        try:
            yield
        except (StoreError, _Retry):
            raise
        except Exception as error:  # huggingface_hub and what is below it have no common base
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> Exception:
        from huggingface_hub import errors

        while isinstance(error, RuntimeError) and isinstance(error.__cause__, Exception):
            error = error.__cause__  # "Error while uploading ... to the Hub." (_commit_api.py, _upload_lfs_files)
        what, host = f"publishing to {self._place.given} failed", self._settings.host
        if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
            return self._missing(error) or self._refused(error, what, host)
        if isinstance(error, errors.OfflineModeIsEnabled):
            return StoreError(f"{self._place.given} is not asked for", why="HF_HUB_OFFLINE is set")
        if "xet" in str(error) and "client error" in str(error):
            # hf_xet's exceptions have no status. A Hub without xet answers 404; huggingface_hub never falls back to LFS.
            return StoreError(what, why=_one_line(error), remedy="Set HF_HUB_DISABLE_XET=1 if this Hub has no xet.")
        if isinstance(error, OSError | errors.HfHubHTTPError) or _is_network(error):
            return _Retry(UnavailableError(what, why=_one_line(error) or type(error).__name__, remedy="Publish again."))
        return StoreError(what, why=_one_line(error) or type(error).__name__)

    def _missing(self, error: Exception) -> StoreError | None:
        """What the Hub does not have, or does not show."""
        from huggingface_hub import errors

        repo, host = self._place.repo, self._settings.host
        if isinstance(error, errors.GatedRepoError):
            return AccessDeniedError(f"{repo} on {host} is gated", remedy="Ask for access, and set HF_TOKEN.")
        if isinstance(error, errors.RepositoryNotFoundError):
            return StoreError(
                f"there is no repository {repo} on {host}, or it is private",
                remedy="Publish with --create to make it; otherwise check the name and HF_TOKEN.",
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return StoreError(
                f"{repo} on {host} has no revision {self._place.revision}", remedy="Publish with --create to make it."
            )
        return None

    def _refused(self, error: Any, what: str, host: str) -> Exception:
        response = error.response
        status, why = response.status_code, error.server_message or f"{host} answered {response.status_code}"
        if status in MOVED:
            return _Retry(self._moved(), moved=True)
        if status in BUSY:
            headers = {name.lower(): value for name, value in response.headers.items()}
            seconds = wait_asked(status, headers) or 0.0
            return _Retry(UnavailableError(what, why=_line(why), remedy="Publish again later."), seconds=seconds)
        if status == 401:
            token = "does not know the token" if self._settings.token else "wants a token"
            return AccessDeniedError(f"{host} {token}", remedy="Set HF_TOKEN to one that may write.")
        kind = AccessDeniedError if status == 403 else StoreError
        return kind(what, why=_line(why), remedy="Check what the token may do." if status == 403 else "")


class _Measured:
    """What is to be written: its size, and its digest as LFS and as git give them."""

    __slots__ = ("git", "sha256", "size", "source")

    def __init__(self, source: Source, size: int, sha256: str, git: str) -> None:
        self.source, self.size, self.sha256, self.git = source, size, sha256, git

    def is_what(self, found: tuple[int, str] | None) -> bool:
        """Whether the Hub's word for a path is this content."""
        return found is not None and found[0] == self.size and found[1] in (self.sha256, self.git)


def _measured(path: str, source: Source) -> _Measured:
    sha256 = hashlib.sha256()
    if isinstance(source, bytes):
        sha256.update(source)
        size = len(source)
        git = hashlib.sha1(b"blob %d\0" % size + source, usedforsecurity=False)
    else:
        try:
            with source.open("rb", buffering=0) as stream:
                size = os.fstat(stream.fileno()).st_size
                git = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
                while chunk := stream.read(CHUNK):
                    sha256.update(chunk)
                    git.update(chunk)
        except OSError as error:
            raise StoreError(f"cannot read {source}", why=error.strerror or "") from error
    return _Measured(source, size, sha256.hexdigest(), git.hexdigest())


class _Batch:
    """Writes some files in one commit. Called until it is done; remembers between calls what it does not know."""

    def __init__(self, uploader: Uploader, files: Mapping[str, _Measured], *, if_absent: bool) -> None:
        self._uploader, self._files, self._if_absent = uploader, files, if_absent
        self._uncertain = False

    def __call__(self) -> dict[str, bool]:
        uploader, files = self._uploader, self._files
        head = uploader.head()
        there = uploader.listed(list(files), head)
        ours = {path for path, file in files.items() if file.is_what(there.get(path))}
        todo = [path for path in files if path not in (there if self._if_absent else ours)]
        if todo:
            self._commit(todo, head if self._if_absent else None)
        # A file that is there with our content after an attempt of unknown outcome is that attempt's, as far as anyone can tell.
        kept = set() if not self._if_absent else there.keys() - (ours if self._uncertain else set())
        return {path: path not in kept for path in files}

    def _commit(self, todo: Sequence[str], parent: str | None) -> None:
        from huggingface_hub import CommitOperationAdd

        uploader, files = self._uploader, self._files
        with uploader.translated():
            operations = [CommitOperationAdd(path, files[path].source) for path in todo]
        message = f"kcache: {todo[0].rpartition('/')[2]}" if len(todo) == 1 else f"kcache: {len(todo)} files"
        try:
            commit = uploader.commit(operations, message, parent)
        except _Retry as retry:
            self._uncertain |= not retry.moved
            raise
        there = uploader.listed(todo, commit)
        if wrong := [path for path in todo if not files[path].is_what(there.get(path))]:
            raise IntegrityError(
                f"the Hub has other bytes for {wrong[0]} than were given to it",
                why=f"{len(wrong)} of {len(todo)} files; it says {there.get(wrong[0])}",
                remedy="Publish again.",
            )


class _Swap:
    """One compare-and-swap."""

    def __init__(
        self, uploader: Uploader, path: str, data: bytes, expected: bytes | None, current: Callable[[str, str], bytes | None]
    ) -> None:
        self._uploader, self._path, self._data, self._expected, self._current = uploader, path, data, expected, current
        self._uncertain = False

    def __call__(self) -> None:
        from huggingface_hub import CommitOperationAdd

        uploader, path = self._uploader, self._path
        head = uploader.head()
        found = self._current(path, head)
        if found == self._data and (self._uncertain or found == self._expected):
            return
        if found != self._expected:
            raise ConflictError(f"{path} of the repository was changed by another writer", remedy="Read it again and repeat.")
        try:
            commit = uploader.commit([CommitOperationAdd(path, self._data)], f"kcache: {path}", head)
        except _Retry as retry:
            self._uncertain |= not retry.moved
            raise
        if not _measured(path, self._data).is_what(uploader.listed([path], commit).get(path)):
            raise IntegrityError(f"the Hub has other bytes for {path} than were given to it", remedy="Publish again.")


class _Removal:
    """Removes some files in one commit."""

    def __init__(self, uploader: Uploader, paths: Sequence[str]) -> None:
        self._uploader, self._paths = uploader, paths
        self._uncertain = False

    def __call__(self) -> bool:
        from huggingface_hub import CommitOperationDelete

        head = self._uploader.head()
        listed = self._uploader.listed(self._paths, head)
        there = [path for path in self._paths if path in listed]
        if not there:
            return self._uncertain
        what = there[0] if len(there) == 1 else f"{len(there)} files"
        try:
            operations = [CommitOperationDelete(path, is_folder=False) for path in there]
            self._uploader.commit(operations, f"kcache: remove {what}", head)
        except _Retry as retry:
            self._uncertain |= not retry.moved
            raise
        return True


def _is_network(error: Exception) -> bool:
    """Whether an exception is the HTTP library's (huggingface_hub uses httpx in 1.x and httpx2 in 2.x) or hf_xet's."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & {"TransportError", "RequestError"}) or (type(error).__module__ or "").startswith("hf_xet")


def _one_line(error: Exception) -> str:
    return _line(str(error))


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
