"""Publishing: built entries into a store, the pointer last.

Order of writes: every archive, then every manifest, then the index of each environment that was touched (`kcache.workflows.
reindex`), then the page that people see. Whatever a store takes at once goes to it at once. What an index names is whole, so a
reader sees an entry or does not; a call that died at any point left nothing that harms, and the next one, whoever makes it,
completes it. Publishing the same again uploads nothing.

Replacing, only if asked for, writes a manifest of the next generation beside the old one. Readers that hold the old index go on
reading what it names.

Not here: what is in an entry, and how to build one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcache.errors import ConflictError, IntegrityError, ManifestError
from kcache.index import archive_path, index_directory
from kcache.store.base import Store
from kcache.workflows.build_output import BuiltEntry, read_build_output
from kcache.workflows.page import keep_page
from kcache.workflows.reindex import (
    Newest,
    archive_in_place,
    generation_path,
    newest_manifests,
    read_published,
    rebuild_index,
    require_signer,
)

if TYPE_CHECKING:
    from kcache.trust.keys import PrivateKey
    from kcache.workflows.reindex import SignIndex

UPLOADED, REPLACED, PRESENT = "uploaded", "replaced", "present"

Progress = Callable[[str], None]
"""Told one line for each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedEntry:
    """What became of one entry: `uploaded`, `replaced`, or `present` when the store had its files already."""

    fingerprint: str
    kind: str
    modules: tuple[str, ...]
    arch: str
    status: str
    archive_sha256: str

    def to_json(self) -> dict[str, Any]:
        return {
            "fingerprint": self.fingerprint,
            "kind": self.kind,
            "modules": list(self.modules),
            "arch": self.arch,
            "status": self.status,
            "archive": self.archive_sha256,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What one call did, or with `dry_run` would do.

    indexes:        paths of the indexes that changed.
    bytes_uploaded: archives, manifests and indexes; with `dry_run` without indexes.
    """

    store: str
    entries: tuple[PublishedEntry, ...]
    indexes: tuple[str, ...]
    bytes_uploaded: int
    dry_run: bool
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "entries": [entry.to_json() for entry in self.entries],
            "indexes": list(self.indexes),
            "bytes_uploaded": self.bytes_uploaded,
            "dry_run": self.dry_run,
            "warnings": list(self.warnings),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What to do with one entry: the generation of the manifest to write, and what is in its way, for a message."""

    entry: BuiltEntry
    status: str
    generation: int = 0
    theirs: str = ""

    @property
    def directory(self) -> str:
        return index_directory(self.entry.manifest.key.ingredients)


def publish(
    directory: Path,
    store: Store,
    *,
    replace: bool = False,
    dry_run: bool = False,
    page: bool = False,
    key: PrivateKey | None = None,
    sign_index: SignIndex | None = None,
    progress: Progress = lambda line: None,
) -> PublishReport:
    """Publishes every entry of a build output directory. Nothing is written unless all of them may be.

    Args:
        directory: what `kcache build -o` wrote.
        replace: let an entry take the place of a published one of the same key whose files are different.
        dry_run: only find out what would be done.
        key: signs the entries, those among them that are published already.
        sign_index: signs each index that is written.
        page: keep a README.md that says what the store holds (see `kcache.workflows.page`).

    Raises:
        UsageError: no entries there.
        IntegrityError, ManifestError: an entry is damaged.
        ConflictError: other files are published under the same key, and `replace` was not given.
        TrustError: an index that has to be written again is signed, and `sign_index` was not given.
        StoreError: the store failed. Publishing again goes on from there.
    """
    built = read_build_output(directory, progress)
    shelves = sorted({index_directory(entry.manifest.key.ingredients) for entry in built})
    newest = {fingerprint: found for shelf in shelves for fingerprint, found in newest_manifests(store, shelf).items()}
    plans = [_plan(store, entry, newest.get(entry.manifest.fingerprint)) for entry in built]
    todo = [plan for plan in plans if plan.status != PRESENT]
    if not replace:
        _refuse([plan for plan in plans if plan.status == REPLACED], store)
    if dry_run:
        size = sum(plan.entry.manifest.archive.size + len(plan.entry.encoded) for plan in todo)
        return _report(store, plans, sorted({f"{plan.directory}/index.json" for plan in todo}), size, dry_run=True)
    require_signer(store, sorted({plan.directory for plan in todo}), sign_index)
    uploaded = _upload(store, todo, replace=replace, progress=progress)
    indexes: list[str] = []
    warnings: list[str] = []
    if key is not None:
        from kcache.workflows.signing import sign_published

        signed, left_out = sign_published(store, [entry.manifest for entry in built], shelves, key)
        progress(f"{signed} signatures added")
        warnings += left_out
    for shelf in shelves:
        rebuilt = rebuild_index(store, shelf, sign=sign_index)
        warnings += rebuilt.warnings
        if rebuilt.size:
            progress(f"made visible in {shelf}/index.json")
            uploaded += rebuilt.size
            indexes.append(f"{shelf}/index.json")
    if page:
        kept = keep_page(store, changed=bool(indexes))
        uploaded += kept.size
        warnings += kept.warnings
    return _report(store, plans, indexes, uploaded, dry_run=False, warnings=warnings)


def _plan(store: Store, entry: BuiltEntry, newest: Newest | None) -> _Plan:
    """How an entry stands to what is published under its key."""
    if newest is None:
        return _Plan(entry=entry, status=UPLOADED)
    if newest.gone:  # pruned, and asked for again
        return _Plan(entry=entry, status=UPLOADED, generation=newest.generation + 1)
    try:
        theirs, _ = read_published(store, newest.path, entry.manifest.fingerprint)
    except (IntegrityError, ManifestError) as error:
        return _Plan(entry=entry, status=REPLACED, generation=newest.generation + 1, theirs=f"something unusable ({error.what})")
    if theirs.artifacts != entry.manifest.artifacts:
        return _Plan(entry=entry, status=REPLACED, generation=newest.generation + 1, theirs=f"archive {theirs.archive.sha256}")
    # The same files. Build times and other provenance differ from build to build, and are no reason to publish again.
    if archive_in_place(store, theirs):
        return _Plan(entry=entry, status=PRESENT)
    same = theirs.archive == entry.manifest.archive
    return _Plan(entry=entry, status=UPLOADED, generation=newest.generation + (0 if same else 1))


def _refuse(conflicts: list[_Plan], store: Store) -> None:
    if not conflicts:
        return
    lines = [
        f"{plan.entry.manifest.key.kind} {plan.entry.manifest.fingerprint} is published with {plan.theirs}, "
        f"here it has archive {plan.entry.manifest.archive.sha256}"
        for plan in conflicts
    ]
    raise ConflictError(
        f"{store.describe()} has other files under {len(conflicts)} of these keys",
        why="; ".join(lines),
        remedy="Publish with --replace if the ones here are right.",
    )


def _upload(store: Store, plans: list[_Plan], *, replace: bool, progress: Progress) -> int:
    """Archives, then manifests, as one list, so that a store can take both in one step; the number of bytes that went up."""
    archives = {}
    for plan in plans:
        facts = plan.entry.manifest.archive
        path, found = archive_path(facts.sha256), store.stat(archive_path(facts.sha256))
        if found is None:
            archives[path] = plan.entry.archive
            progress(f"uploading {plan.entry.archive.name} ({facts.size / 1e6:.1f} MB)")
        elif found.size != facts.size:
            store.write(path, plan.entry.archive, if_absent=False)
    manifests = [(generation_path(plan.entry.manifest.key, plan.generation), plan) for plan in plans]
    items: list[tuple[str, Path | bytes]] = [*archives.items(), *((path, plan.entry.encoded) for path, plan in manifests)]
    written = store.write_many(items, if_absent=True) if items else []
    size = sum(_size(source) for (_, source), done in zip(items, written, strict=True) if done)
    for (path, plan), done in zip(manifests, written[len(archives) :], strict=True):
        if done:
            progress(f"uploaded {path}")
        else:
            size += _upload_manifest(store, plan, replace=replace, progress=progress)
    return size


def _size(source: Path | bytes) -> int:
    return len(source) if isinstance(source, bytes) else source.stat().st_size


def _upload_manifest(store: Store, plan: _Plan, *, replace: bool, progress: Progress) -> int:
    """A manifest whose name was taken."""
    entry, generation = plan.entry, plan.generation
    key, fingerprint = entry.manifest.key, entry.manifest.fingerprint
    while not store.write(path := generation_path(key, generation), entry.encoded, if_absent=True):
        # Another publisher, or an earlier call that died, was first.
        try:
            theirs, _ = read_published(store, path, fingerprint)
            if theirs.artifacts == entry.manifest.artifacts and archive_in_place(store, theirs):
                return 0
            found = f"archive {theirs.archive.sha256}"
        except (IntegrityError, ManifestError) as error:
            found = f"something unusable ({error.what})"
        generation += 1
        if not replace:
            _refuse([_Plan(entry=entry, status=REPLACED, generation=generation, theirs=found)], store)
    progress(f"uploaded {path}")
    return len(entry.encoded)


def _report(
    store: Store, plans: Iterable[_Plan], indexes: Iterable[str], size: int, *, dry_run: bool, warnings: Iterable[str] = ()
) -> PublishReport:
    entries = [
        PublishedEntry(
            fingerprint=plan.entry.manifest.fingerprint,
            kind=plan.entry.manifest.key.kind,
            modules=plan.entry.manifest.key.modules,
            arch=plan.entry.manifest.key.arch,
            status=plan.status,
            archive_sha256=plan.entry.manifest.archive.sha256,
        )
        for plan in plans
    ]
    return PublishReport(
        store=store.describe(),
        entries=tuple(entries),
        indexes=tuple(indexes),
        bytes_uploaded=size,
        dry_run=dry_run,
        warnings=tuple(warnings),
    )
