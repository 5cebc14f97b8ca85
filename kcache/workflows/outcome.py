"""What a restore comes to: the report, made from what was chosen, placed, refused and failed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from kcache.errors import KcacheError
from kcache.key import EntryKey
from kcache.local_cache import InstalledEntry
from kcache.report import ERROR, HIT, MISS, PARTIAL, EntryReport, KindReport, RestoreReport, overall
from kcache.values import dataclass
from kcache.workflows.resolve import Choice, by_kind, why_missing
from kcache.workflows.target import Target

SHOWN_MODELS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What became of the artifacts of some entries where a library looks for them.

    refusals: fingerprint -> why the library will not use them, by its own rules: a miss.
    failures: fingerprint -> what kept them from being placed: an error.
    new:      fingerprints of entries that were not all in place.
    notes:    what a person should know, such as kernels of the user's that were set aside, or programs left to warmup.
    """

    refusals: Mapping[str, str]
    failures: Mapping[str, KcacheError]
    new: frozenset[str]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Everything that the report is made of.

    kinds:     those that were asked for by name.
    modules:   likewise.
    choices:   one for each group of published entries that was asked for.
    placed:    fingerprint -> entry, for everything that is in place.
    actions:   fingerprint -> how it came to be in place.
    errors:    fingerprint -> why it is not.
    refusals:  fingerprint -> why FlashInfer will not use what was restored, one line each.
    ambiguous: models among which the command would have had to choose.
    where:     the index that was asked for.
    """

    kinds: Sequence[str]
    modules: Sequence[str]
    choices: Sequence[Choice]
    placed: Mapping[str, InstalledEntry]
    actions: Mapping[str, str]
    errors: Mapping[str, KcacheError]
    refusals: Mapping[str, Sequence[str]]
    ambiguous: Sequence[str]
    where: str
    anything_published: bool

    @property
    def nothing(self) -> str:
        """The reason where no group was there to choose from."""
        if self.anything_published:
            return f"nothing that was asked for is published in {self.where}"
        return f"no store publishes {self.where}"


def report(
    outcome: Outcome, target: Target, *, env: Mapping[str, str], warnings: Sequence[str], root: Path, seconds: float
) -> RestoreReport:
    """The report of one restore."""
    kinds = by_kind(
        outcome.choices,
        lambda choices: _kind_report(outcome, target, choices),
        kinds=outcome.kinds,
        modules=outcome.modules,
        no_kind=outcome.nothing,
        no_module=outcome.nothing,
    )
    used = [entry for fingerprint, entry in outcome.placed.items() if fingerprint not in {*outcome.refusals, *outcome.errors}]
    errors = [*outcome.errors.values(), *(error for choice in outcome.choices for error in choice.failed)]
    return RestoreReport(
        status=overall(kinds),
        kinds=kinds,
        reasons=_reasons(outcome, kinds),
        warnings=tuple(warnings),
        seconds=seconds,
        compiles_avoided=sum(entry.manifest.compiles for entry in used),
        seconds_saved=sum(sum(entry.manifest.build_seconds.values()) for entry in used),
        env=env,
        cache_root=str(root),
        exit_code=errors[0].exit_code if errors else 1,
    )


def _reasons(outcome: Outcome, kinds: Mapping[str, KindReport]) -> tuple[str, ...]:
    if outcome.ambiguous:
        models = ", ".join(outcome.ambiguous[:SHOWN_MODELS]) + (", ..." if len(outcome.ambiguous) > SHOWN_MODELS else "")
        return (f"kernels are published for {len(outcome.ambiguous)} models; name yours with --model: {models}",)
    return () if kinds else (outcome.nothing,)


def _entry(key: EntryKey, arch: str, action: str) -> EntryReport:
    return EntryReport(
        fingerprint=key.fingerprint, modules=key.modules, arch=arch, action=action, model=key.model, variant=key.variant
    )


def _kind_report(outcome: Outcome, target: Target, choices: Sequence[Choice]) -> KindReport:
    entries: list[EntryReport] = []
    reasons: list[str] = []
    failed = False
    for choice in choices:
        for (arch, _count), (line, _) in sorted(choice.chosen.items()):
            fingerprint = line.key.fingerprint
            bad = outcome.refusals.get(fingerprint, ())
            if fingerprint in outcome.errors:
                failed = True
                reasons.append(f"{choice.title}: {outcome.errors[fingerprint]}")
            elif bad:
                reasons += bad
            else:
                action = outcome.actions[fingerprint]
                entries.append(_entry(line.key, arch, action))
        if choice.missing or not choice.chosen:
            failed = failed or bool(choice.failed)
            reasons += why_missing(choice)
    status = HIT if not reasons else PARTIAL if entries else ERROR if failed else MISS
    return KindReport(status=status, entries=tuple(entries), reasons=tuple(dict.fromkeys(reasons)))
