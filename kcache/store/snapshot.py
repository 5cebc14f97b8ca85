"""What huggingface_hub downloaded, as a store for reading: `<cache>/models--owner--repo/snapshots/<commit>`.

Its files are links to `blobs` beside `snapshots` (huggingface_hub 2.4.0, file_download.py, _create_symlink). These links, and no
others, are followed; where there are no links the files lie there themselves.
"""

from __future__ import annotations

import os
from pathlib import Path

from kcache.store.file import FileStore

COMMIT = 40
"""Hexadecimal digits in the name of a snapshot."""


class SnapshotStore(FileStore):
    """A snapshot, or a directory in it. What would change it is for `kcache.store.wrappers.ReadOnlyStore` to refuse."""

    def __init__(self, root: Path, blobs: Path) -> None:
        super().__init__(root)
        self._blobs = str(blobs)

    def _path(self, name: str) -> Path:
        path = super()._path(name)
        return self._blob(path) or path

    def _is_object(self, item: os.DirEntry[str]) -> bool:
        return self._blob(Path(item.path)) is not None or super()._is_object(item)

    def _blob(self, path: Path) -> Path | None:
        """The blob that a path is a link to."""
        try:
            to = os.path.normpath(path.parent / path.readlink())
        except OSError:  # no link, or nothing at all
            return None
        return Path(to) if os.path.dirname(to) == self._blobs else None  # noqa: PTH120 - of a normalized text


def blobs_of(path: str) -> str | None:
    """Where the files of the snapshot lie that an absolute path is in; None where it is in none."""
    parts = path.split("/")
    for number in range(len(parts) - 1):
        name = parts[number + 1]
        if parts[number] == "snapshots" and len(name) == COMMIT and not name.strip("0123456789abcdef"):
            blobs = "/".join([*parts[:number], "blobs"])
            return blobs if os.path.isdir(blobs) else None  # noqa: PTH112 - the host's own links
    return None
