"""Entries that are fetched together: where a store has several of what is missing in one bundle, that is one request.

Only a way to the same bytes: a bundle is checked by its digest, what it holds like anything else that a store says, and whatever
goes wrong with it, the entries are fetched one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kcache import fsops
from kcache.errors import InstallError, IntegrityError, StoreError
from kcache.index import Bundle, IndexEntry
from kcache.local_cache import LocalCache
from kcache.store.base import Store
from kcache.store.bundle import BundleStore
from kcache.store.wrappers import Wrapper
from kcache.workflows.deadline import Deadline

SURPLUS = 2.0
"""A bundle of more bytes than this times those of the single entries is not worth the requests that it saves."""

IDLE = 3600.0
"""Seconds after which a bundle that is still there was left by a restore that was killed."""


class Bundled(Wrapper):
    """A store of which some objects lie in a bundle on this host. What cannot be read there is asked of the store."""

    def __init__(self, inner: Store, bundle: Path) -> None:
        super().__init__(inner)
        self._bundle = BundleStore(bundle)

    def read(self, name: str, *, offset: int = 0) -> Iterator[bytes]:
        with suppress(StoreError):  # another restore may have been done with it, and removed it
            return self._bundle.read(name, offset=offset)
        return self.inner.read(name, offset=offset)

    def read_bytes(self, name: str, limit: int) -> bytes:
        with suppress(StoreError):
            return self._bundle.read_bytes(name, limit)
        return self.inner.read_bytes(name, limit)


def best_bundle(missing: Sequence[IndexEntry], bundles: Sequence[Bundle]) -> tuple[Bundle, list[IndexEntry]] | None:
    """The bundle that has most of what is missing, and what that is; None where single entries are the better way."""
    found: tuple[Bundle, list[IndexEntry]] | None = None
    for bundle in sorted(bundles, key=lambda bundle: bundle.file.size):
        held = set(bundle.manifests)
        covered = [entry for entry in missing if entry.manifest.sha256 in held]
        single = sum(entry.archive.size + entry.manifest.size for entry in covered)
        if len(covered) > max(1, len(found[1]) if found else 0) and bundle.file.size <= SURPLUS * single:
            found = (bundle, covered)
    return found


def fetch_bundle(
    cache: LocalCache,
    store: Store,
    bundle: Bundle,
    deadline: Deadline,
    watch: Callable[[Iterator[bytes], str, int], Iterator[bytes]] | None,
) -> Path:
    """Brings a bundle into the cache, unless another restore of this host has it there. The caller holds the cache's lock.

    Raises:
        NoSpaceError: found before anything is written. IntegrityError: it is not the one that the index names.
        StoreError, InstallError: the store failed, or the file could not be written.
    """
    directory = cache.base / "bundles"
    fsops.ensure_directory(directory)
    fsops.check_root(directory)
    _sweep(directory)
    path = directory / bundle.file.path.rpartition("/")[2]
    if path.exists():  # it got its name when it was whole, and its digest right
        return path
    fsops.require_space(cache.base, bundle.file.size)
    chunks = deadline.watch(store.read(bundle.file.path), f"downloading {bundle.file.path}")
    if watch is not None:
        chunks = watch(chunks, f"{len(bundle.manifests)} entries", bundle.file.size)
    fsops.stage(directory, path.name, chunks, expected_size=bundle.file.size, expected_sha256=bundle.file.sha256).commit()
    return path


def _sweep(directory: Path) -> None:
    fsops.sweep(directory, idle=0)
    for path in directory.glob("*.tar"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > IDLE:
                path.unlink()


FAILURES = (StoreError, IntegrityError, InstallError)
"""What may go wrong with a bundle."""
