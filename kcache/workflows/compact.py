"""Several entries of one environment as one file in the store itself, so that a container fetches them with one request.

The file is a bundle as `kcache export` writes it; what is in it stands beside it, and the environment's index names it. It adds
nothing that the store does not have: a restore that needs little of it, or a kcache that does not know it, takes single entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kcache import digest
from kcache.errors import UsageError
from kcache.index import Blob, Bundle, IndexEntry, bundle_path
from kcache.store.base import Store
from kcache.values import dataclass
from kcache.workflows.bundle import choose_entries, write_bundle
from kcache.workflows.reindex import SignIndex, rebuild_index, require_signer
from kcache.workflows.resolve import Wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """One bundle: the index that names it, how many entries it holds, its bytes, and whether it was there already."""

    index: str
    entries: int
    size: int
    sha256: str
    present: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "index": self.index,
            "entries": self.entries,
            "size": self.size,
            "sha256": self.sha256,
            "status": "present" if self.present else "uploaded",
        }


def compact(
    store: Store,
    *,
    asked: Wanted,
    archs: Sequence[str] = (),
    flashinfer: str = "",
    sign_index: SignIndex | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[Compacted]:
    """Makes a bundle of what is asked for, one for each environment that has several entries of it.

    Args:
        archs: GPU architectures in FlashInfer's spelling without the dot (`90a`); all if empty.
        flashinfer: only entries for this version.
        sign_index: signs each index that is written.

    Raises:
        UsageError: no environment has several entries of what was asked for.
        TrustError: an index is signed, and `sign_index` was not given.
        StoreError, IntegrityError, ManifestError: the store failed, or what it holds is damaged.
    """
    chosen = choose_entries(store, asked=asked, archs=archs, flashinfer=flashinfer)
    several = {name: entries for name, entries in chosen.items() if len(entries) > 1}
    if not several:
        raise UsageError(
            f"{store.describe()} has one entry of what was asked for in each environment",
            remedy="A bundle saves requests from two entries on; a single one is fetched as it is.",
        )
    require_signer(store, [name.rpartition("/")[0] for name in several], sign_index)
    return [_one(store, name, entries, sign_index, progress) for name, entries in several.items()]


def _one(
    store: Store, name: str, entries: Sequence[IndexEntry], sign: SignIndex | None, progress: Callable[[str], None]
) -> Compacted:
    directory = name.rpartition("/")[0]
    with TemporaryDirectory(prefix="kcache-compact-") as scratch:
        file = Path(scratch) / "bundle.tar"
        sha256 = write_bundle(store, {name: entries}, file, progress)
        blob = Blob(path=bundle_path(directory, sha256), size=file.stat().st_size, sha256=sha256)
        bundle = Bundle(file=blob, manifests=tuple(entry.manifest.sha256 for entry in entries))
        progress(f"uploading {blob.path} ({blob.size / 1e6:.1f} MB)")
        written = store.write(blob.path, file, if_absent=True)
    described = blob.path.removesuffix(".tar") + ".json"
    store.write(described, digest.canonical_json(bundle.to_json()), if_absent=True)
    rebuild_index(store, directory, sign=sign)
    return Compacted(index=name, entries=len(entries), size=blob.size, sha256=sha256, present=not written)
