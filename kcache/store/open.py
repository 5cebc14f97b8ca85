"""A store from what a user wrote after `--from` or `--to`."""

from __future__ import annotations

import os
from pathlib import Path

from kcache.errors import StoreError, UsageError
from kcache.store.base import Store

KNOWN = (
    "hf://owner/repo[@revision][/directory], https://host/path (for reading), file:///directory, a plain directory, "
    "or a file that `kcache export` wrote"
)


def open_store(
    url: str,
    *,
    create: bool = False,
    writing: bool = False,
    private: bool = False,
    deadline: float | None = None,
    stall: float = 30.0,
) -> Store:
    """The store at `url`. Nothing is read or made yet.

    Args:
        url: `file:///dir`, a plain directory, `hf://owner/repo`, or `https://host/path`.
        create: whether writing may make a store that is not there; `private`: for its members only, where a store knows such.
        writing: whether it will be written to. Otherwise a store that changes may be read as it was when it was first asked.
        deadline: a moment of the monotonic clock after which a store that is far away is not waited for.
        stall: seconds without a byte after which it is given up, retries included.

    Raises:
        UsageError: no such kind of store. StoreError: a relative path in a directory that is gone, or HF_ENDPOINT is no address.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url:
            raise UsageError("a store has no name", remedy=f"Known are: {KNOWN}.")
        return _directory(url, create=create)
    if scheme == "file":
        return _directory(_local_path(url, rest), create=create)
    if scheme in ("hf", "http", "https"):
        return _remote(url, scheme, create=create, writing=writing, private=private, deadline=deadline, stall=stall)
    raise UsageError(f"{_without_secrets(url)}: there are no stores of the kind {scheme}://", remedy=f"Known are: {KNOWN}.")


def at_revision(url: str, revision: str | None) -> str:
    """A repository's address with a revision, which must not have another one.

    Raises:
        UsageError: it has another one.
    """
    if revision is None:
        return url
    owner, slash, rest = url.removeprefix("hf://").partition("/")
    repo, other, directory = rest.partition("/")
    name, _, given = repo.partition("@")
    quoted = revision.replace("/", "%2F")
    if given and given != quoted:
        raise UsageError(f"{url} is of another revision than {revision}", remedy="Give one of them.")
    return f"hf://{owner}{slash}{name}@{quoted}{other}{directory}"


def is_pinned(url: str) -> bool:
    """Whether a store can never change: a commit of a repository."""
    if not url.startswith("hf://"):
        return False
    revision = url.partition("@")[2].partition("/")[0]
    return len(revision) == 40 and not revision.strip("0123456789abcdef")


def _remote(url: str, scheme: str, *, create: bool, writing: bool, private: bool, deadline: float | None, stall: float) -> Store:
    from kcache.store.dial import Patience
    from kcache.store.wire import Address

    # Two silences and three failures to connect fit in.
    patience = Patience(silence=min(10.0, stall / 2), connect=min(5.0, stall / 3), until=deadline or float("inf"))
    if scheme == "hf":
        from kcache.store.hf import HfStore
        from kcache.store.hub import downloaded

        store = HfStore(url, settle=not writing, create=create, private=private, patience=patience, stall=stall)
        if store.settings.offline and not writing and (kept := downloaded(store.place, store.settings.environ)) is not None:
            return _directory(kept, create=False)
        return store
    from kcache.store.mirror import MirrorStore

    if "?" in url or "#" in url or "@" in url:
        raise UsageError(
            f"{_without_secrets(url)} does not name a directory on a web server",
            remedy="Write https://host/path, without a user, a query or a fragment.",
        )
    if scheme == "http" and not _is_loopback(Address(url).host):
        raise UsageError(
            f"{url}: stores over http:// are for this host only, as anybody in between could change what servers run",
            remedy="Use https://.",
        )
    return MirrorStore(url, patience=patience, stall=stall)


def _without_secrets(url: str) -> str:
    """An address without its user, query and fragment, in which passwords and tokens stand."""
    scheme, mark, rest = url.partition("://")
    authority, slash, path = rest.partition("?")[0].partition("#")[0].partition("/")
    return f"{scheme}{mark}{authority.rpartition('@')[2]}{slash}{path}"


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _local_path(url: str, rest: str) -> str:
    from urllib.parse import unquote

    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash or "?" in path or "#" in path:
        raise UsageError(f"{url} does not name a directory of this host", remedy="Write file:///directory, with three slashes.")
    return "/" + unquote(path)


def _directory(path: str, *, create: bool) -> Store:
    if "\0" in path:
        raise UsageError("a directory's name cannot hold a NUL")
    try:
        absolute = os.path.abspath(path)  # noqa: PTH100 - links are the host's own business
    except OSError as error:
        raise StoreError(
            f"{path} cannot be found", why=f"the working directory: {error.strerror}", remedy="Give an absolute path."
        ) from error
    if os.path.isfile(absolute):  # noqa: PTH113 - the same
        from kcache.store.bundle import BundleStore

        return BundleStore(Path(absolute))
    if "/snapshots/" in absolute:
        from kcache.store.snapshot import SnapshotStore, blobs_of
        from kcache.store.wrappers import ReadOnlyStore

        if (blobs := blobs_of(absolute)) is not None:
            return ReadOnlyStore(SnapshotStore(Path(absolute), Path(blobs)))
    from kcache.store.file import FileStore

    return FileStore(Path(absolute), create=create)
