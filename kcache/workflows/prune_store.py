"""Prunes a store: index lines first, files after a grace time.

Order: a marker beside the manifest (`kcache.workflows.reindex`), then the index without the line; readers of the old index
still find all that it names. A file that no index and no manifest that counts has named for `grace` is deleted, the manifest
before its archive. A call that dies at any point leaves a store that restores, and the next call goes on. Publishing an entry
again brings it back.

Stores do not say how old things are, so a ledger in the store (`v1/prune.json`) says since when prunes have known each file: ages
count from the first prune that saw an entry. Losing it only starts the times anew.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kcache import digest
from kcache.documents import LIMITS
from kcache.errors import IntegrityError, ManifestError, NotFoundError, UsageError
from kcache.index import Index, IndexEntry, archive_path
from kcache.store.base import Store
from kcache.workflows.catalog import list_environments, read_index_at
from kcache.workflows.page import keep_page
from kcache.workflows.prune_rules import Candidate, Rules, Verdict, decide
from kcache.workflows.reindex import (
    SignIndex,
    gone_path,
    newest_manifests,
    read_published,
    rebuild_index,
    require_signer,
)

GRACE = 7 * 86400.0
"""Seconds that a file stays after the last index that named it: longer than any restore runs or an old index is kept."""

LEDGER = "v1/prune.json"
_FORMAT = "kcache.prune/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedStore:
    """What one call did, or with `dry_run` would do. `deleted` are objects, `waiting` those whose grace time is not over."""

    store: str
    verdicts: tuple[Verdict, ...]
    deleted: tuple[str, ...]
    waiting: tuple[str, ...]
    warnings: tuple[str, ...]
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "store": self.store,
            "entries": [verdict.to_json() for verdict in self.verdicts],
            "deleted": list(self.deleted),
            "waiting": list(self.waiting),
            "warnings": list(self.warnings),
            "dry_run": self.dry_run,
        }


def prune_store(
    store: Store,
    rules: Rules,
    *,
    grace: float = GRACE,
    dry_run: bool = False,
    page: bool = False,
    sign_index: SignIndex | None = None,
    now: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> PrunedStore:
    """Removes what may go.

    Args:
        page: keep the README.md that people see in agreement (see `kcache.workflows.page`).
        sign_index: signs each index that is written.

    Raises:
        UsageError: a rule that no store can follow.
        TrustError: an index that has to be written again is signed, and `sign_index` was not given.
        ManifestError, IntegrityError: an index is damaged or of a newer kcache: nothing was touched.
        StoreError: the store failed. Pruning again goes on from there.
    """
    if rules.unused_for is not None:
        raise UsageError("a store does not know when an entry was last used", remedy="Use --older-than, --max-size or --version.")
    moment = time.time() if now is None else now
    indexes = {path: read_index_at(store, path) for path in list_environments(store)}
    ledger, seen, unused = _read_ledger(store)
    lines = [entry for index in indexes.values() for entry in index.entries]
    seen = {entry.manifest.path: min(seen.get(entry.manifest.path, moment), moment) for entry in lines}
    verdicts = decide([_candidate(entry, seen[entry.manifest.path]) for entry in lines], rules, moment)
    going = {verdict.candidate.fingerprint for verdict in verdicts if verdict.remove}
    warnings: list[str] = []
    if not dry_run:
        indexes, warnings = _take_out(store, indexes, going, sign_index, progress)
        if page and going:
            warnings += keep_page(store, changed=True).warnings
    idle = _idle(store, indexes, going if dry_run else set(), warnings)
    unused = {name: min(unused.get(name, moment), moment) for name in idle}
    over = [name for name in idle if moment - unused[name] >= grace]
    waiting = tuple(name for name in idle if name not in over)
    if not dry_run:
        # The times before any deletion, so that a call that dies loses none of them.
        _write_ledger(store, ledger, seen, unused)
        if over:
            progress(f"deleting {len(over)} files")
            store.delete(*over)
    return PrunedStore(
        store=store.describe(),
        verdicts=tuple(verdicts),
        deleted=tuple(over),
        waiting=waiting,
        warnings=tuple(warnings),
        dry_run=dry_run,
    )


def _candidate(entry: IndexEntry, seen: float) -> Candidate:
    return Candidate(
        fingerprint=entry.key.fingerprint,
        title=entry.key.title,
        version=entry.key.ingredients.get("flashinfer.version", ""),
        size=entry.archive.size,
        made=seen,
        used=None,
    )


def _take_out(
    store: Store,
    indexes: dict[str, Index],
    going: set[str],
    sign: SignIndex | None,
    progress: Callable[[str], None],
) -> tuple[dict[str, Index], list[str]]:
    """Markers, then indexes; the indexes as they are afterwards, and warnings."""
    warnings: list[str] = []
    gone = {path: [entry for entry in index.entries if entry.key.fingerprint in going] for path, index in indexes.items()}
    marked = {path for path, entries in gone.items() if entries}
    require_signer(store, [path.removesuffix("/index.json") for path in sorted(marked)], sign)
    markers = [(gone_path(entry.manifest.path), b"{}") for entries in gone.values() for entry in entries]
    if markers:
        store.write_many(markers, if_absent=True)
    for path in sorted(indexes):  # all: an earlier call may have died after its markers
        rebuilt = rebuild_index(store, path.removesuffix("/index.json"), sign=sign)
        warnings += rebuilt.warnings
        if path in marked:
            progress(f"taken out of {path}")
    return {path: read_index_at(store, path) for path in indexes}, warnings


def _idle(store: Store, indexes: dict[str, Index], leaving: set[str], warnings: list[str]) -> list[str]:
    """What nothing names any more, in the order in which it may be deleted. `leaving`: fingerprints taken to be out already."""
    needed: set[str] = set()
    blind = False
    for path, index in indexes.items():
        kept = [entry for entry in index.entries if entry.key.fingerprint not in leaving]
        needed |= {name for entry in kept for name in (entry.manifest.path, entry.archive.path)}
        needed.update(index.parts)
        needed |= {
            name for bundle in index.bundles for name in (bundle.file.path, f"{bundle.file.path.removesuffix('.tar')}.json")
        }
        shelf = path.removesuffix("/index.json")
        for fingerprint, newest in newest_manifests(store, shelf).items():
            if fingerprint in leaving or newest.path in needed:
                continue
            needed.add(newest.path)  # published just now, or the marker of what was pruned
            if newest.gone:
                continue
            try:
                needed.add(archive_path(read_published(store, newest.path, fingerprint)[0].archive.sha256))
            except NotFoundError:
                continue
            except (IntegrityError, ManifestError) as error:
                blind = True
                warnings.append(f"no archive is deleted while a manifest cannot be read: {error}")
    return [name for name in _deletable(store) if name not in needed and not (blind and name.startswith("v1/archives/"))]


def _deletable(store: Store) -> Iterator[str]:
    """Manifests, bundles, parts of indexes, then archives: a half-done call then never leaves a manifest without its archive."""
    for name in store.list("v1/env"):
        if name.count("/") > 4 and name.split("/")[4] in ("entries", "bundles", "parts"):
            yield name
    yield from store.list("v1/archives")


def _read_ledger(store: Store) -> tuple[bytes | None, dict[str, float], dict[str, float]]:
    try:
        data = store.read_bytes(LEDGER, LIMITS.index_bytes)
    except NotFoundError:
        return None, {}, {}
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        document = None
    parts = [document.get(name) if isinstance(document, dict) else None for name in ("seen", "unused")]
    seen, unused = (
        {str(k): float(v) for k, v in part.items() if _is_time(v)} if isinstance(part, dict) else {} for part in parts
    )
    return data, seen, unused


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e11


def _write_ledger(store: Store, current: bytes | None, seen: dict[str, float], unused: dict[str, float]) -> None:
    document = {
        "format": _FORMAT,
        "seen": {name: int(moment) for name, moment in seen.items()},
        "unused": {name: int(moment) for name, moment in unused.items()},
    }
    data = digest.canonical_json(document)
    if data != current:
        store.replace(LEDGER, data, current)
