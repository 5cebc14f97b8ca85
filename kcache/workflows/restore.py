"""Restore: from a store into this environment's view, checked by the library's own rules.

resolve -> download -> verify -> extract -> place -> receipt -> view -> acceptance, without importing what the entries are for.
A second restore takes the same way and finds nothing to do. Where the store fails, what was installed earlier is still used.
A miss is part of the report; failures that leave nothing to use are raised as `KcacheError`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from kcache import fsops
from kcache.errors import (
    InstallError,
    IntegrityError,
    KcacheError,
    ManifestError,
    NotFoundError,
    StoreError,
    TrustError,
    UsageError,
)
from kcache.index import Index, IndexEntry, index_entry, index_path
from kcache.key import NVCC
from kcache.kinds.provider import python_path
from kcache.local_cache import Damage, InstalledEntry, LocalCache, Vouched
from kcache.manifest import Manifest
from kcache.report import HIT, RestoreReport
from kcache.store.base import Store
from kcache.values import dataclass, field, replace
from kcache.workflows.catalog import read_index, read_manifest
from kcache.workflows.deadline import Deadline
from kcache.workflows.outcome import Outcome, Placement, report
from kcache.workflows.resolve import Candidate, Choice, Wanted, ambiguous_models, candidates, choose, grouped, models_not_there
from kcache.workflows.target import Target
from kcache.workflows.views import offer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kcache.trust.policy import Policy
    from kcache.workflows.install import Watch
    from kcache.workflows.trusted import Guard


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreRequest:
    """What to restore.

    asked:          what is asked for.
    strict_match:   accept only entries whose every ingredient is equal.
    lock_timeout:   seconds to wait for another process that writes to the same cache; never beyond the deadline.
    into_package:   copy into `flashinfer/data/aot` instead of offering a provider package.
    python_path:    PYTHONPATH in force.
    policy:         which publishers are trusted; None trusts whoever can write to the store.
    watch:          hands on what is downloaded, for people to see; see `kcache.workflows.install.Watch`.
    """

    asked: Wanted = Wanted()
    strict_match: bool = False
    lock_timeout: float = 60.0
    into_package: bool = False
    python_path: str = ""
    policy: Policy | None = None
    watch: Watch | None = None


@dataclass(slots=True)
class _Run:
    """What one restore has come to know and done."""

    request: RestoreRequest
    cache: LocalCache
    target: Target
    deadline: Deadline
    guard: Guard | None = None
    vouched: dict[str, Vouched] = field(default_factory=dict)
    entries: dict[str, IndexEntry] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)  # of which a store has entries that were not asked for
    store_of: dict[str, Store] = field(default_factory=dict)
    found: dict[str, InstalledEntry | Damage | None] = field(default_factory=dict)
    actions: dict[str, str] = field(default_factory=dict)
    errors: dict[str, KcacheError] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    store_errors: list[KcacheError] = field(default_factory=list)


def restore(
    request: RestoreRequest, stores: Sequence[Callable[[], Store]], cache: LocalCache, target: Target, deadline: Deadline
) -> RestoreReport:
    """Restores into `cache` whatever fits `target`.

    Args:
        stores: opened in order until everything that was asked for, and that one of them has, is in place.
        deadline: bounds waiting and downloading.

    Raises:
        TrustError: the cache root cannot be trusted. LockTimeoutError: another writer holds it and nothing is in place.
        StoreError: no store could be read and nothing was installed before.
    """
    started = time.monotonic()
    cache.check()
    run = _Run(request=request, cache=cache, target=target, deadline=deadline)
    if request.policy is not None:
        from kcache.workflows.trusted import Guard

        run.guard = Guard(request.policy, cache)
    outcome = None
    for store, index in _published(run, stores):
        run.models.update(index.models)
        _prefer(run, store, index.entries)
        bundle = _fetch_together(run, store, index) if index.bundles else None
        outcome = _bring(run)
        if bundle is not None:
            bundle.unlink(missing_ok=True)
        if _whole(run, outcome):
            break
    if outcome is None:
        run.entries = _installed(run)
        if not run.entries and run.store_errors:
            raise run.store_errors[0]
        outcome = _bring(run)
    target.save_memory()
    env, refusals = _give(run, outcome.placed)
    outcome = replace(outcome, errors=run.errors, refusals=refusals)
    warnings = [*run.warnings, *models_not_there((entry.key for entry in run.entries.values()), request.asked, run.models)]
    return report(outcome, target, env=env, warnings=warnings, root=cache.root, seconds=time.monotonic() - started)


def _bring(run: _Run) -> Outcome:
    """Chooses among the entries that are known, and puts in place what is chosen. The report is made from what this comes to."""
    request = run.request
    unclear, decided = _decided(run)
    choices = _choices(run, decided)
    _put_in_place(run, choices)
    return Outcome(
        kinds=request.asked.kinds,
        modules=request.asked.modules,
        choices=choices,
        placed={fp: found for fp in run.actions if isinstance(found := run.found[fp], InstalledEntry)},
        actions=run.actions,
        errors=run.errors,
        refusals={},
        ambiguous=unclear,
        where=index_path(run.target.index_ingredients()),
        anything_published=bool(run.entries),
    )


def _whole(run: _Run, outcome: Outcome) -> bool:
    """Whether no other store need be asked."""
    so_far = report(outcome, run.target, env={}, warnings=(), root=run.cache.root, seconds=0.0)
    return so_far.status == HIT


def _prefer(run: _Run, store: Store, entries: Sequence[IndexEntry]) -> None:
    """Takes a store's lines, but for what is in place already: where an earlier store failed, or has not, this one is asked."""
    for entry in entries:
        fingerprint = entry.key.fingerprint
        if fingerprint not in run.actions:
            run.entries[fingerprint] = entry
            run.store_of[fingerprint] = store
            if (failed := run.errors.pop(fingerprint, None)) is not None:
                run.warnings.append(f"{failed}; {store.describe()} is asked")


def _give(run: _Run, placed: Mapping[str, InstalledEntry]) -> tuple[dict[str, str], dict[str, Sequence[str]]]:
    """Gives FlashInfer what is in place, each layout in its own way.

    Returns:
        The variables that the server needs, and fingerprint -> why FlashInfer will not use an entry.
    """
    request, target = run.request, run.target
    modules = [entry for entry in placed.values() if entry.manifest.key.layout == NVCC]
    offered = offer(run.cache, target, modules, into_package=request.into_package, admits=partial(_admits, run))
    refusals: dict[str, Sequence[str]] = {}
    for entry in modules:
        refused = [f"{module}: {why}" for module in entry.manifest.key.modules if (why := offered.refusals.get(module))]
        if refused:
            refusals[entry.manifest.fingerprint] = refused
    if kernels := [entry for entry in placed.values() if entry.manifest.kernels is not None]:
        from kcache.workflows.kernels import place_kernels

        done = place_kernels(run.cache, target, kernels, strict=request.strict_match, timeout=_lock_seconds(run))
        refusals |= _taken_in(run, kernels, done)
    if programs := [entry for entry in placed.values() if entry.manifest.programs is not None]:
        from kcache.workflows.programs import place_programs

        refusals |= _taken_in(run, programs, place_programs(run.cache, target, programs, timeout=_lock_seconds(run)))
    if tunings := [entry for entry in placed.values() if entry.manifest.tunings is not None]:
        from kcache.workflows.tunings import lacking_modules, place_tunings

        refusals |= _taken_in(run, tunings, place_tunings(run.cache, target, tunings, timeout=_lock_seconds(run)))
        there = {module for entry in placed.values() for module in entry.manifest.key.modules}
        run.warnings += lacking_modules([facts for entry in tunings if (facts := entry.manifest.tunings) is not None], there)
    env = dict(target.exports)
    if offered.view is not None and len(offered.refusals) < sum(len(entry.manifest.key.modules) for entry in modules):
        if not target.is_here:
            run.warnings.append("restored for the environment that --env names: a server of this host is not pointed at it")
            return env, refusals
        env["PYTHONPATH"] = python_path(request.python_path, str(run.cache.site), str(offered.view))
    return env, refusals


def _lock_seconds(run: _Run) -> float:
    return min(run.request.lock_timeout, run.deadline.left())


def _taken_in(run: _Run, entries: Sequence[InstalledEntry], done: Placement) -> dict[str, Sequence[str]]:
    """Takes what placing came to into the run; fingerprint -> why the library will not use an entry."""
    run.warnings += done.notes
    run.errors |= done.failures
    # Whole in the cache, and yet not where the library looks: for the report that is an installation.
    run.actions |= {fp: "installed" for fp in done.new if run.actions[fp] == "in-place"}
    titles = {entry.manifest.fingerprint: entry.manifest.key.title for entry in entries}
    return {fingerprint: (f"{titles[fingerprint]}: {why}",) for fingerprint, why in done.refusals.items()}


def _published(run: _Run, stores: Sequence[Callable[[], Store]]) -> Iterator[tuple[Store, Index]]:
    """Each store that has an index for this environment, with it. One bad store does not stop the next."""
    for make in stores:
        try:
            store = make()
            index = read_index(
                store,
                run.target.index_ingredients(),
                check=partial(_check_index, run),
                environment=run.target.environment,
                asked=run.request.asked,
            )
        except NotFoundError:
            continue
        except (StoreError, IntegrityError, ManifestError, TrustError, UsageError) as error:
            run.store_errors.append(error)
            run.warnings.append(str(error))
            continue
        if index is not None and index.entries:
            yield store, index


def _fetch_together(run: _Run, store: Store, index: Index) -> Path | None:
    """Fetches several of the missing entries as one bundle, if the store has one; where it lies."""
    from kcache.workflows.bundled import FAILURES, Bundled, best_bundle, fetch_bundle

    missing = _missing(run, store)
    if best_bundle(missing, index.bundles) is None:
        return None
    try:
        run.cache.prepare()
        with fsops.locked(run.cache.lock_path, _lock_seconds(run)):
            for entry in missing:  # whoever held the lock before us may have installed them
                run.found.pop(entry.key.fingerprint, None)
            best = best_bundle(_missing(run, store), index.bundles)
            if best is None:
                return None
            path = fetch_bundle(run.cache, store, best[0], run.deadline, run.request.watch)
    except FAILURES as error:
        run.warnings.append(f"entries are fetched one by one: {error}")
        return None
    for entry in best[1]:
        run.store_of[entry.key.fingerprint] = Bundled(store, path)
    return path


def _missing(run: _Run, store: Store) -> list[IndexEntry]:
    """What of a store's lines will be chosen among and is not in place, as far as keys tell."""
    fitting = [one.entry for one in _decided(run)[1] if one.decision.accepted]
    return [entry for entry in fitting if run.store_of[entry.key.fingerprint] is store and not _is_installed(run, entry)]


def _decided(run: _Run) -> tuple[tuple[str, ...], list[Candidate]]:
    """The models that are not chosen among, and every other entry that was asked for, decided about by key."""
    unclear = ambiguous_models((entry.key for entry in run.entries.values()), run.request.asked, run.models)
    asked = [e for e in run.entries.values() if e.key.model not in unclear and run.request.asked.takes(e.key)]
    return unclear, candidates(asked, run.target.environment, strict=run.request.strict_match)


def _find(run: _Run, fingerprint: str) -> InstalledEntry | Damage | None:
    """What the cache has, looked for once."""
    if fingerprint not in run.found:
        run.found[fingerprint] = run.cache.find(fingerprint)
    return run.found[fingerprint]


def _is_installed(run: _Run, entry: IndexEntry) -> bool:
    found = _find(run, entry.key.fingerprint)
    return isinstance(found, InstalledEntry) and found.manifest_sha256 == entry.manifest.sha256


def _check_index(run: _Run, store: Store, path: str, data: bytes) -> None:
    if run.guard is not None:
        run.warnings += run.guard.check_index(store, path, data)


def _admits(run: _Run, entry: InstalledEntry) -> bool:
    """Whether the policy lets in what an earlier restore put in place."""
    if run.guard is None:
        return True
    try:
        vouched = run.guard.admit(index_entry(entry.manifest, entry.manifest.encode()), None)
    except KcacheError as error:
        run.warnings.append(f"no longer offered: {error}")
        return False
    run.cache.keep_vouched(entry, vouched)
    return True


def _installed(run: _Run) -> dict[str, IndexEntry]:
    """Index lines of what is installed already: what is left when no store answers, or none has this environment."""
    entries = {}
    for fingerprint in run.cache.fingerprints():
        if isinstance(found := _find(run, fingerprint), InstalledEntry):
            entries[fingerprint] = index_entry(found.manifest, found.manifest.encode())
    return entries


def _choices(run: _Run, decided: Sequence[Candidate]) -> list[Choice]:
    return [
        choose(
            group,
            run.target.environment,
            read_manifest=lambda e: _manifest(run, e),
            decide=lambda manifest: run.target.decide(manifest, strict=run.request.strict_match),
        )
        for group in grouped(decided).values()
    ]


def _manifest(run: _Run, entry: IndexEntry) -> Manifest:
    """The verified manifest of an entry that the policy lets in: the installed copy where it is the same, else the store's."""
    fingerprint = entry.key.fingerprint
    if run.guard is not None:
        run.vouched[fingerprint] = run.guard.admit(entry, run.store_of.get(fingerprint))
    found = _find(run, fingerprint)
    if isinstance(found, InstalledEntry) and _is_installed(run, entry):
        return found.manifest
    return read_manifest(run.store_of[fingerprint], entry)


def _put_in_place(run: _Run, choices: Sequence[Choice]) -> None:
    """Installs what was chosen and is not in place, under the cache's lock; nothing to do takes no lock."""
    chosen = {e.key.fingerprint: (e, m) for choice in choices for e, m in choice.chosen.values()}
    todo = {fp: pair for fp, pair in chosen.items() if fp not in run.errors and not _is_installed(run, pair[0])}
    for fingerprint in chosen.keys() - todo.keys() - run.errors.keys():
        run.actions.setdefault(fingerprint, "in-place")
        if (vouched := run.vouched.get(fingerprint)) is not None and isinstance(found := run.found[fingerprint], InstalledEntry):
            run.cache.keep_vouched(found, vouched)
    if not todo:
        return
    try:
        run.cache.prepare()
        with fsops.locked(run.cache.lock_path, _lock_seconds(run)):
            for fingerprint, (entry, manifest) in sorted(todo.items()):
                _place(run, fingerprint, entry, manifest)
    except InstallError as error:  # a lock that is held for too long among them
        if not run.actions:
            raise
        run.errors |= dict.fromkeys(todo.keys() - run.actions.keys(), error)


def _place(run: _Run, fingerprint: str, entry: IndexEntry, manifest: Manifest) -> None:
    """Installs one entry, unless whoever held the lock before us has done it. One that fails does not stop the others."""
    run.cache.sweep(manifest)
    run.found[fingerprint] = run.cache.find(fingerprint)
    if _is_installed(run, entry):
        run.actions[fingerprint] = "in-place"
        return
    try:
        run.actions[fingerprint] = _install(run, entry, manifest)
    except (IntegrityError, StoreError, InstallError, TrustError) as error:
        run.errors[fingerprint] = error


def _install(run: _Run, entry: IndexEntry, manifest: Manifest) -> str:
    found = run.found.get(manifest.fingerprint)
    action = "installed"
    if isinstance(found, Damage):
        run.warnings.append(f"{found.path} is damaged ({found.reason}); it was set aside")
        run.cache.set_aside(manifest.fingerprint, found)
        action = "repaired"
    # Imported where there is something to install: a start with nothing to do need not pay for it.
    from kcache.workflows.install import install_entry

    store = run.store_of.get(manifest.fingerprint)
    if store is None:
        raise NotFoundError(f"no store has {manifest.fingerprint}")
    vouched = run.vouched.get(manifest.fingerprint)
    run.found[manifest.fingerprint] = install_entry(
        run.cache, store, entry, manifest, run.deadline, watch=run.request.watch, vouched=vouched
    )
    return action
