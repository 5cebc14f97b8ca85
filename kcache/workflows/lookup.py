"""Lookup: hit or miss for each kind, and for each published candidate the fields that differ. Installs nothing.

Where a store has nothing for this very environment, the candidates of its other environments are listed instead, so that a miss
says what it missed by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kcache.advice import Advice, advise
from kcache.errors import KcacheError, StoreError
from kcache.index import IndexEntry
from kcache.key import AUTOTUNE
from kcache.manifest import Manifest
from kcache.match import Check, match_key
from kcache.report import ERROR, HIT, MISS, PARTIAL, KindReport, overall
from kcache.store.base import Store
from kcache.workflows.catalog import list_environments, read_index, read_index_at, read_manifest
from kcache.workflows.resolve import Choice, Wanted, by_kind, candidates, choose, grouped, why_missing
from kcache.workflows.target import Target

if TYPE_CHECKING:
    from kcache.trust.policy import Policy
    from kcache.tuning_facts import TuningFacts
    from kcache.workflows.trusted import Guard


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidateReport:
    """One published entry: whether it may be used here, and otherwise which fields differ.

    explained: of programs of the package b12x, every rule that was applied, what is only recorded among them: what enters b12x's
               own key is in no document of b12x.
    """

    entry: IndexEntry
    differs: tuple[Check, ...]
    error: str = ""
    explained: tuple[Check, ...] = ()

    @property
    def accepted(self) -> bool:
        return not self.differs and not self.error

    @property
    def advice(self) -> Advice | None:
        """Why not, in a sentence, and what would make it a hit; None where nothing differs."""
        return advise(self.entry.key, self.differs) if self.differs else None

    def to_json(self) -> dict[str, Any]:
        key = self.entry.key
        return {
            "fingerprint": key.fingerprint,
            "kind": key.kind,
            "modules": list(key.modules),
            "model": key.model,
            "variant": key.variant,
            "ingredients": dict(key.ingredients),
            "bytes": self.entry.archive.size,
            "build_seconds": round(self.entry.build_seconds, 1),
            "accepted": self.accepted,
            "differs": [check.to_json() for check in self.differs],
            "error": self.error,
            "why": advice.why if (advice := self.advice) else self.error,
            "to_hit": list(advice.to_hit) if advice else [],
        } | ({"explained": [check.to_json() for check in self.explained]} if self.explained else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupReport:
    """The answer to "would a restore hit here?". `candidates` are nearest first: fewest differing fields.

    lacking:   where the tuner's results or the modules that they choose kernels of are there without the other, sentences.
    exit_code: the command's, where the status is none of hit, partial and miss.
    """

    status: str
    kinds: dict[str, KindReport]
    candidates: tuple[CandidateReport, ...]
    environments: tuple[str, ...]
    lacking: tuple[str, ...] = ()
    exit_code: int = 1

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "kinds": {name: kind.to_json() for name, kind in sorted(self.kinds.items())},
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "environments": list(self.environments),
            "lacking": list(self.lacking),
        }


def lookup(store: Store, target: Target, *, asked: Wanted, strict: bool = False, policy: Policy | None = None) -> LookupReport:
    """Decides about every published entry that was asked for.

    Args:
        policy: which publishers are trusted; None trusts whoever can write to the store.

    Raises:
        StoreError, IntegrityError, ManifestError: the store cannot be read, or what it says cannot be used.
    """
    guard = _guard(policy)
    check = None if guard is None else guard.check_index
    index = read_index(store, target.index_ingredients(), check=check, environment=target.environment, asked=asked)
    try:
        environments = tuple(list_environments(store))
    except StoreError:
        environments = ()  # a mirror cannot say what it has; the answer does not need it
    own = index.entries if index is not None else ()
    found = [entry for entry in own if asked.takes(entry.key)]
    decided = candidates(found, target.environment, strict=strict)
    read = _reading_once(store, guard)
    choices = [
        choose(group, target.environment, read_manifest=read, decide=lambda manifest: target.decide(manifest, strict=strict))
        for group in grouped(decided).values()
    ]
    reports = by_kind(
        choices,
        partial(_kind, target),
        kinds=asked.kinds,
        modules=asked.modules,
        no_kind="nothing of this kind is published for this environment",
        no_module="not published for this environment",
    )
    others = [] if found else [entry for entry in _elsewhere(store, environments, own, target, asked) if asked.takes(entry.key)]
    listed = [_candidate(read, target, entry, strict=strict) for entry in [*found, *others]]
    listed.sort(key=lambda c: (len(c.differs) + bool(c.error), c.entry.key.kind, c.entry.key.modules, c.entry.key.fingerprint))
    failed = [error for choice in choices for error in choice.failed]
    return LookupReport(
        status=overall(reports),
        kinds=reports,
        candidates=tuple(listed),
        environments=environments,
        lacking=tuple(_lacking(target, own, listed, read, strict=strict)),
        exit_code=failed[0].exit_code if failed else 1,
    )


def _guard(policy: Policy | None) -> Guard | None:
    if policy is None:
        return None
    from kcache.workflows.trusted import Guard

    return Guard(policy, None)


def _reading_once(store: Store, guard: Guard | None) -> Callable[[IndexEntry], Manifest]:
    """`read_manifest`, once for each entry: a manifest is decided about by group and as a candidate."""
    known: dict[str, Manifest] = {}

    def read(entry: IndexEntry) -> Manifest:
        if entry.manifest.path not in known:
            if guard is not None:
                guard.admit(entry, store)
            known[entry.manifest.path] = read_manifest(store, entry)
        return known[entry.manifest.path]

    return read


def _kind(target: Target, choices: Sequence[Choice]) -> KindReport:
    archs = target.environment.archs
    whole = bool(archs) and not any(choice.missing for choice in choices)
    reasons = [line for choice in choices if choice.missing or not archs for line in why_missing(choice)]
    hits = any(choice.chosen for choice in choices)
    failed = any(choice.failed for choice in choices)
    status = HIT if whole else PARTIAL if hits else ERROR if failed else MISS
    return KindReport(status=status, reasons=tuple(dict.fromkeys(reasons)))


def _elsewhere(
    store: Store, environments: Sequence[str], own: Sequence[IndexEntry], target: Target, asked: Wanted
) -> list[IndexEntry]:
    """Entries of the store's other environments, for explanation only."""
    entries: list[IndexEntry] = []
    known = {entry.key.fingerprint for entry in own}
    for path in environments:
        with suppress(KcacheError):  # what is wrong with another environment's index is no answer about this one
            index = read_index_at(store, path, environment=target.environment, asked=asked)
            entries += [entry for entry in index.entries if entry.key.fingerprint not in known]
    return entries


def _candidate(read: Callable[[IndexEntry], Manifest], target: Target, entry: IndexEntry, *, strict: bool) -> CandidateReport:
    decision = match_key(entry.key, target.environment, strict=strict)
    if not decision.accepted:
        return CandidateReport(entry=entry, differs=decision.differs)
    try:
        manifest = read(entry)
    except KcacheError as error:
        return CandidateReport(entry=entry, differs=(), error=str(error))
    try:
        decision = target.decide(manifest, strict=strict)
    except KcacheError as error:
        return CandidateReport(entry=entry, differs=(), error=str(error))
    explained = decision.checks if manifest.programs is not None else ()
    return CandidateReport(entry=entry, differs=decision.differs, explained=explained)


def _lacking(
    target: Target,
    own: Sequence[IndexEntry],
    listed: Sequence[CandidateReport],
    read: Callable[[IndexEntry], Manifest],
    *,
    strict: bool,
) -> list[str]:
    """Where results of the tuner and the modules that they choose kernels of are not published together for this environment."""
    tuned = [candidate for candidate in listed if candidate.entry.key.layout == AUTOTUNE and not candidate.error]
    if not tuned:
        return []
    from kcache.workflows.tunings import lacking_modules

    fitting = [entry.key for entry in own if match_key(entry.key, target.environment, strict=strict).accepted]
    there = {module for key in fitting if key.layout != AUTOTUNE for module in key.modules}
    facts = [(one.accepted, tunings) for one in tuned if (tunings := _tunings(read, one)) is not None]
    said = lacking_modules([tunings for accepted, tunings in facts if accepted], there)
    untuned = {module for accepted, tunings in facts if not accepted for module in tunings.modules} & there
    untuned -= {module for accepted, tunings in facts if accepted for module in tunings.modules}
    if untuned:
        names = ", ".join(sorted(untuned))
        said.append(f"{names} are there, and no tuning results that fit here: FlashInfer tunes, or takes its defaults")
    return list(dict.fromkeys(said))


def _tunings(read: Callable[[IndexEntry], Manifest], candidate: CandidateReport) -> TuningFacts | None:
    with suppress(KcacheError):
        return read(candidate.entry).tunings
    return None
