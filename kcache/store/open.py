"""A store from what a user wrote after `--from` or `--to`."""

from __future__ import annotations

import os
from pathlib import Path

from kcache.errors import StoreError, UsageError
from kcache.store.base import Store

KNOWN = "file:///directory, or a plain directory"


def open_store(url: str, *, create: bool = False) -> Store:
    """The store at `url`. Nothing is read or made yet.

    Args:
        url: `file:///dir` or a plain directory.
        create: whether writing may make a store that is not there.

    Raises:
        UsageError: no such kind of store. StoreError: a relative path in a directory that is gone.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url:
            raise UsageError("a store has no name", remedy=f"Known are: {KNOWN}.")
        return _directory(url, create=create)
    if scheme == "file":
        return _directory(_local_path(url, rest), create=create)
    if scheme == "hf":
        raise UsageError(
            f"{url}: stores on the Hugging Face Hub come with a later version of kcache",
            remedy=f"Until then use {KNOWN}.",
        )
    raise UsageError(f"{url}: there are no stores of the kind {scheme}://", remedy=f"Known are: {KNOWN}.")


def _local_path(url: str, rest: str) -> str:
    from urllib.parse import unquote

    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash or "?" in path or "#" in path:
        raise UsageError(f"{url} does not name a directory of this host", remedy="Write file:///directory, with three slashes.")
    return "/" + unquote(path)


def _directory(path: str, *, create: bool) -> Store:
    from kcache.store.file import FileStore

    if "\0" in path:
        raise UsageError("a directory's name cannot hold a NUL")
    try:
        absolute = os.path.abspath(path)  # noqa: PTH100 - links are the host's own business
    except OSError as error:
        raise StoreError(
            f"{path} cannot be found", why=f"the working directory: {error.strerror}", remedy="Give an absolute path."
        ) from error
    return FileStore(Path(absolute), create=create)
