"""Entries of a store as one file, and back: for hosts without a network.

A bundle is a tar of the same objects that a store holds, verified while they are copied, with an index of what is in it. So it is
itself a store to restore from, and importing it is publishing what it holds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kcache import fsops
from kcache.errors import IntegrityError, UsageError
from kcache.index import Blob, Index, IndexEntry, index_path
from kcache.store.base import Store
from kcache.store.bundle import END, BundleStore, header, padding
from kcache.store.memory import MemoryStore
from kcache.trust.envelope import ENVELOPE_BYTES
from kcache.values import dataclass
from kcache.workflows.build_output import build_name
from kcache.workflows.catalog import list_environments, read_index_at, read_manifest, signatures_of
from kcache.workflows.publish import PublishReport, publish
from kcache.workflows.reindex import SignIndex
from kcache.workflows.resolve import Wanted

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What went into a bundle. `sha256` is the digest of the whole file."""

    path: str
    store: str
    sha256: str
    size: int
    entries: int
    environments: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "store": self.store,
            "sha256": self.sha256,
            "size": self.size,
            "entries": self.entries,
            "environments": list(self.environments),
        }


def export(
    store: Store,
    path: Path,
    *,
    asked: Wanted,
    archs: Sequence[str] = (),
    flashinfer: str = "",
    sign_index: SignIndex | None = None,
    progress: Progress = lambda line: None,
) -> ExportReport:
    """Writes the entries that are asked for into a new file, whole or not at all.

    Args:
        archs: GPU architectures in FlashInfer's spelling without the dot (`90a`); all if empty.
        flashinfer: only entries for this version.
        sign_index: signs the indexes of the file.

    Raises:
        UsageError: nothing was asked for that is there.
        StoreError, IntegrityError, ManifestError: the store failed, or what it holds is damaged.
        InstallError: the file cannot be written.
    """
    chosen = choose_entries(store, asked=asked, archs=archs, flashinfer=flashinfer)
    return ExportReport(
        path=str(path),
        store=store.describe(),
        sha256=write_bundle(store, chosen, path, progress, sign_index),
        size=path.stat().st_size,
        entries=sum(map(len, chosen.values())),
        environments=tuple(chosen),
    )


def choose_entries(store: Store, *, asked: Wanted, archs: Sequence[str], flashinfer: str) -> dict[str, list[IndexEntry]]:
    """The path of an index -> what of its entries is asked for; arguments and errors as for `export`."""
    chosen: dict[str, list[IndexEntry]] = {}
    for name in list_environments(store):
        for entry in read_index_at(store, name).entries:
            version = entry.key.ingredients["flashinfer.version"]
            if asked.takes(entry.key) and (not archs or entry.key.arch in archs) and flashinfer in ("", version):
                chosen.setdefault(name, []).append(entry)
    if not chosen:
        raise UsageError(f"{store.describe()} has nothing of what was asked for", remedy="`kcache lookup` lists what it has.")
    return chosen


def write_bundle(
    store: Store,
    chosen: Mapping[str, Sequence[IndexEntry]],
    path: Path,
    progress: Progress,
    sign_index: SignIndex | None = None,
) -> str:
    """Writes a new bundle, whole or not at all; its digest. Equal entries give equal bytes, as long as no index is signed. Raises
    as `export`."""
    whole = hashlib.sha256()
    blocks = _hashed(_blocks(store, chosen, progress, sign_index), whole)
    fsops.stage(path.parent, path.name, blocks, expected_size=None, expected_sha256=None).commit()
    return f"sha256:{whole.hexdigest()}"


def _hashed(blocks: Iterable[bytes], whole: hashlib._Hash) -> Iterator[bytes]:
    for block in blocks:
        whole.update(block)
        yield block


def _blocks(
    store: Store, chosen: Mapping[str, Sequence[IndexEntry]], progress: Progress, sign: SignIndex | None
) -> Iterator[bytes]:
    """The bundle's bytes: indexes, manifests, archives, signatures beside what they are about."""
    for name, entries in chosen.items():
        data = Index(entries=tuple(entries)).encode()
        yield from _object(name, data)
        if sign is not None:
            signed = MemoryStore()
            sign(signed, name, data, None)
            for path, envelope in sorted(signed.objects.items()):
                yield from _object(path, envelope)
    every = [entry for entries in chosen.values() for entry in entries]
    for entry in every:
        yield from _object(entry.manifest.path, read_manifest(store, entry).encode())
        for name in signatures_of(store, entry.manifest.sha256):
            yield from _object(name, store.read_bytes(name, ENVELOPE_BYTES))
    for blob in {entry.archive.path: entry.archive for entry in every}.values():
        progress(f"exporting {blob.path} ({blob.size / 1e6:.1f} MB)")
        yield header(blob.path, blob.size)
        yield from _verified(store, blob)
        yield padding(blob.size)
    yield END


def _object(name: str, data: bytes) -> Iterator[bytes]:
    yield header(name, len(data))
    yield data
    yield padding(len(data))


def _verified(store: Store, blob: Blob) -> Iterator[bytes]:
    """A blob's bytes; an error at its end if they are not what the index says."""
    found, size = hashlib.sha256(), 0
    for chunk in store.read(blob.path):
        size += len(chunk)
        if size > blob.size:
            break
        found.update(chunk)
        yield chunk
    if size != blob.size or f"sha256:{found.hexdigest()}" != blob.sha256:
        raise IntegrityError(f"{blob.path} of {store.describe()} is not what the index says", remedy="Publish the entry again.")


def import_bundle(
    path: Path,
    store: Store,
    *,
    replace: bool = False,
    dry_run: bool = False,
    page: bool = False,
    sign_index: SignIndex | None = None,
    progress: Progress = lambda line: None,
) -> PublishReport:
    """Publishes what a bundle holds, as `kcache.workflows.publish.publish` does: each entry verified to its last byte first.

    Raises:
        StoreError, IntegrityError, ManifestError, ConflictError, TrustError: as there; or the file is no bundle.
    """
    bundle = BundleStore(path)
    with TemporaryDirectory(prefix="kcache-import-") as scratch:
        directory = Path(scratch)
        signatures: list[tuple[str, Path | bytes]] = []
        for name in list_environments(bundle):
            for entry in read_index_at(bundle, name).entries:
                if index_path(entry.key.ingredients) != name:
                    raise IntegrityError(f"{name} of {path} lists an entry of another environment")
                manifest = read_manifest(bundle, entry)
                signatures += [
                    (name, bundle.read_bytes(name, ENVELOPE_BYTES)) for name in signatures_of(bundle, entry.manifest.sha256)
                ]
                (directory / f"{build_name(entry.key)}.json").write_bytes(manifest.encode())
                with (directory / f"{build_name(entry.key)}.tar.zst").open("wb") as stream:
                    stream.writelines(_verified(bundle, entry.archive))
        if signatures and not dry_run:
            store.write_many(signatures, if_absent=True)  # before the index that names what they are about
        return publish(directory, store, replace=replace, dry_run=dry_run, page=page, sign_index=sign_index, progress=progress)
