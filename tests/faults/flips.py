"""One byte changed in what a store or a cache holds: nothing that is not right to the last byte is ever offered.

Everything goes through the code that a restore runs; each flip is written into the file, looked at, and taken back.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from entries import INGREDIENTS, make_entry, publish, restored

from kcache.errors import KcacheError
from kcache.index import Index
from kcache.local_cache import InstalledEntry, LocalCache
from kcache.store.file import FileStore
from kcache.workflows.catalog import read_index, read_manifest
from kcache.workflows.deadline import Deadline
from kcache.workflows.install import install_entry

FILES = {"cascade": b"\x7fELF cascade" * 60, "page": bytes(range(256)) * 5}
PATHS = {f"{name}/{name}.so": data for name, data in FILES.items()}
REFUSED, HARMLESS, LOADED = "refused", "harmless", "loaded"
"""`harmless`: the files that come out are right to the last byte all the same (a build time, say, was changed)."""


class Ward:
    """A store with one entry, and a cache with the same installed."""

    def __init__(self, directory: Path) -> None:
        make_entry(directory / "entries", FILES)
        publish(directory / "entries", directory / "store")
        self.store = FileStore(directory / "store")
        self.root = directory / "cache"
        self.index = self._index()
        [line] = self.index.entries
        self.fingerprint = line.key.fingerprint
        manifest = read_manifest(self.store, line)
        install_entry(LocalCache(self.root), self.store, line, manifest, Deadline.after(60))
        entry = LocalCache(self.root).entry_directory(self.fingerprint)
        names = {"archive": "store/v1/archives/*/*.zst", "manifest": "store/v1/env/*/*/entries/*/*.json"}
        self.parts: dict[str, tuple[Path, Callable[[], str]]] = {
            **{name: (next(directory.glob(where)), self._from_store) for name, where in names.items()},
            "index": (next(directory.glob("store/v1/env/*/*/index.json")), self._from_store),
            "receipt": (entry / "receipt.json", self._from_cache),
            "installed manifest": (entry / "manifest.json", self._from_cache),
            "installed file": (entry / "page" / "page.so", self._from_cache),
        }

    def _index(self) -> Index:
        found = read_index(self.store, INGREDIENTS)
        assert found is not None
        return found

    def _from_store(self) -> str:
        try:
            files = restored(self.store)
        except KcacheError:
            return REFUSED
        return HARMLESS if all(found == PATHS for found in files.values()) else LOADED

    def _from_cache(self) -> str:
        found = LocalCache(self.root).find(self.fingerprint)
        if not isinstance(found, InstalledEntry):
            return REFUSED
        right = all((found.directory / path).read_bytes() == data for path, data in PATHS.items())
        return HARMLESS if right else LOADED

    def flip(self, part: str, position: int, mask: int) -> str:
        """What comes of one byte changed; afterwards everything is as it was."""
        path, look = self.parts[part]
        kept = path.with_name(path.name + ".kept")
        shutil.copy2(path, kept)
        try:
            with path.open("r+b", buffering=0) as stream:
                stream.seek(position)
                old = stream.read(1)
                stream.seek(position)
                stream.write(bytes([old[0] ^ mask]))
            return look()
        finally:
            kept.replace(path)
            if part in ("receipt", "installed file"):  # the identity is another one now
                LocalCache(self.root).find(self.fingerprint)


def flip_bytes(directory: Path, count: int, seed: int) -> dict[str, dict[str, int]]:
    """Part -> what came of its flips. Every part gets the same share of `count`."""
    ward = Ward(directory)
    chance = random.Random(seed)
    figures = {part: {REFUSED: 0, HARMLESS: 0, LOADED: 0} for part in ward.parts}
    for number in range(count):
        part = list(ward.parts)[number % len(ward.parts)]
        position = chance.randrange(ward.parts[part][0].stat().st_size)
        figures[part][ward.flip(part, position, 1 << chance.randrange(8))] += 1
    return figures
