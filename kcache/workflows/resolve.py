"""Which entries fit this environment, and why the others do not.

Candidates come from an index; each gets a decision by key. For every group (a kind and its modules) and every architecture of
the environment the best accepted candidate is taken whose manifest also passes; where kernels are for one SM count and the GPUs
of an architecture differ in it, one is taken for every SM count. Decisions are `kcache.match`'s; this module brings them the
manifests and the facts that they ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from kcache.errors import KcacheError, RefusedError
from kcache.index import IndexEntry
from kcache.key import KIND_MODULES, EntryKey, Environment
from kcache.manifest import Manifest
from kcache.match import Check, Decision, match_key, rank, sm_count_fact
from kcache.report import HIT, MISS, PARTIAL, KindReport
from kcache.values import dataclass, field

GroupName = tuple[str, tuple[str, ...], str, str]
"""What entries have in common of which one is chosen: kind, modules, model, variant."""


Slot = tuple[str, str]
"""What one entry serves: an architecture and, where that decides, the SM count of the GPUs that it is for; else empty."""


def slots_of(keys: Iterable[EntryKey], environment: Environment) -> tuple[Slot, ...]:
    """What entries of one group are needed for: GPUs of one architecture need kernels each for their own SM count."""
    counted = any("gpu.sm_count" in key.ingredients for key in keys)
    slots: list[Slot] = []
    for arch in environment.archs:
        counts = (environment.fact(sm_count_fact(arch)).value or "").split() if counted else []
        slots += [(arch, count) for count in counts] if len(counts) > 1 else [(arch, "")]
    return tuple(slots)


def slot_text(slot: Slot) -> str:
    """A slot for people."""
    arch, count = slot
    return f"{arch} with {count} SMs" if count else arch


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One published entry and what was decided about it."""

    entry: IndexEntry
    decision: Decision

    @property
    def name(self) -> GroupName:
        key = self.entry.key
        return (key.kind, key.modules, key.model, key.variant)

    @property
    def built_for_this_gpu(self) -> bool:
        return bool(self.decision.archs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen for one group.

    title:   the group for messages.
    slots:   what an entry is needed for: an architecture, and its SM count where that decides (see `slots_of`).
    chosen:  slot -> the entry and its manifest.
    refused: (fingerprint, reasons) for candidates of this GPU that were refused.
    failed:  errors met on the way; candidates that could not be looked at.
    untrusted: why the policy does not let candidates in: misses, not failures.
    """

    name: GroupName
    title: str
    slots: tuple[Slot, ...] = ()
    chosen: Mapping[Slot, tuple[IndexEntry, Manifest]] = field(default_factory=dict)
    refused: tuple[tuple[str, tuple[Check, ...]], ...] = ()
    failed: tuple[KcacheError, ...] = ()
    untrusted: tuple[RefusedError, ...] = ()
    for_this_gpu: bool = True

    @property
    def missing(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot not in self.chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a command asks for.

    kinds, modules: both empty ask for everything.
    models:         names of models, with `*` and `?` as in file names; they narrow only the entries that belong to a model.
    """

    kinds: Sequence[str] = ()
    modules: Sequence[str] = ()
    models: Sequence[str] = ()

    def takes(self, key: EntryKey) -> bool:
        """Whether an entry was asked for."""
        if not (self.kinds or self.modules) or key.kind in self.kinds:
            return not (key.model and self.models) or any(is_model(key.model, name) for name in self.models)
        return key.kind == KIND_MODULES and all(module in self.modules for module in key.modules)


def is_model(model: str, name: str) -> bool:
    """Whether a name, perhaps with `*` and `?`, means a model."""
    from fnmatch import fnmatchcase

    # People know a model by its name on the Hub, with or without who owns it.
    return any(fnmatchcase(text.lower(), name.lower()) for text in (model, model.rpartition("/")[2]))


def ambiguous_models(keys: Iterable[EntryKey], asked: Wanted, others: Iterable[str] = ()) -> tuple[str, ...]:
    """The models among which a command has to choose: where none was named and entries of several are there. `others`: models of
    which entries are there that were not read."""
    models = sorted({key.model for key in keys if key.model} | {*others})
    return tuple(models) if len(models) > 1 and not asked.models else ()


def models_not_there(keys: Iterable[EntryKey], asked: Wanted, others: Iterable[str] = ()) -> list[str]:
    """For each model that was named and of which nothing is published here, though of others: a sentence, with what is near.
    `others` as for `ambiguous_models`."""
    if not asked.models:
        return []
    there = sorted({key.model for key in keys if key.model} | {*others})
    said = []
    for name in asked.models:
        if there and not any(is_model(model, name) for model in there):
            from difflib import get_close_matches

            by_text = {text.lower(): model for model in there for text in (model.rpartition("/")[2], model)}
            near = get_close_matches(name.lower(), by_text, n=1)
            hint = f"did you mean {by_text[near[0]]}?" if near else f"published are {', '.join(there[:5])}"
            said.append(f"nothing is published here for the model {name}: {hint}")
    return said


def candidates(entries: Iterable[IndexEntry], environment: Environment, *, strict: bool) -> list[Candidate]:
    """Every entry with its decision by key, in the order given."""
    return [Candidate(entry=entry, decision=match_key(entry.key, environment, strict=strict)) for entry in entries]


def choose(
    group: Sequence[Candidate],
    environment: Environment,
    *,
    read_manifest: Callable[[IndexEntry], Manifest],
    decide: Callable[[Manifest], Decision],
) -> Choice:
    """The best usable entry of one group for each architecture.

    Args:
        group: candidates of one group, not empty.
        read_manifest: brings an entry's verified manifest; raises `KcacheError`, and `RefusedError` where the policy refuses it.
        decide: the decision by manifest (`Target.decide`); may raise `KcacheError`.
    """
    slots = slots_of((candidate.entry.key for candidate in group), environment)
    chosen: dict[Slot, tuple[IndexEntry, Manifest]] = {}
    refused = {c.entry.key.fingerprint: c.decision.differs for c in group if not c.decision.accepted and c.built_for_this_gpu}
    failed: dict[str, KcacheError] = {}
    untrusted: dict[str, RefusedError] = {}
    passed: dict[str, Manifest] = {}
    for slot in slots:
        fitting = [candidate for candidate in group if _serves(candidate, slot)]
        for candidate in sorted(fitting, key=lambda c: _preference(c, environment, slot[0]), reverse=True):
            fingerprint = candidate.entry.key.fingerprint
            if fingerprint in refused or fingerprint in failed or fingerprint in untrusted:
                continue
            if fingerprint not in passed:
                try:
                    manifest = read_manifest(candidate.entry)
                    decision = decide(manifest)
                except RefusedError as error:
                    untrusted[fingerprint] = error
                    continue
                except KcacheError as error:
                    failed[fingerprint] = error
                    continue
                if not decision.accepted:
                    refused[fingerprint] = decision.differs
                    continue
                passed[fingerprint] = manifest
            chosen[slot] = (candidate.entry, passed[fingerprint])
            break
    return Choice(
        name=group[0].name,
        title=group[0].entry.key.title,
        slots=slots,
        chosen=chosen,
        refused=tuple(sorted(refused.items())),
        failed=tuple(failed.values()),
        untrusted=tuple(untrusted.values()),
        for_this_gpu=any(candidate.built_for_this_gpu for candidate in group),
    )


def _serves(candidate: Candidate, slot: Slot) -> bool:
    arch, count = slot
    decision = candidate.decision
    return decision.accepted and arch in decision.archs and count in ("", candidate.entry.key.ingredients.get("gpu.sm_count"))


def _preference(candidate: Candidate, environment: Environment, arch: str) -> tuple[int, int, int, int, str]:
    return rank(candidate.entry.key, environment, arch, size=candidate.entry.unpacked_size)


def grouped(found: Iterable[Candidate]) -> dict[GroupName, list[Candidate]]:
    """Candidates by kind and modules, in a stable order."""
    groups: dict[GroupName, list[Candidate]] = {}
    for candidate in sorted(found, key=lambda candidate: candidate.name):
        groups.setdefault(candidate.name, []).append(candidate)
    return groups


SHOWN_CHECKS = 3
"""Fields shown for each refused candidate; `kcache lookup` shows all."""


def why_missing(choice: Choice) -> list[str]:
    """One line for everything that keeps a group from being used everywhere; GPUs of one architecture are told apart."""
    modules = choice.title
    lines = [f"{modules}: {error}" for error in choice.failed] + [str(error) for error in choice.untrusted]
    for fingerprint, checks in choice.refused:
        shown = "; ".join(check.describe() for check in checks[:SHOWN_CHECKS])
        more = f"; and {len(checks) - SHOWN_CHECKS} more" if len(checks) > SHOWN_CHECKS else ""
        lines.append(f"{modules} {fingerprint[7:19]}: {shown}{more}")
    if not lines or any(count for _, count in choice.missing):
        where = ", ".join(map(slot_text, choice.missing)) or "a GPU that is not known"
        lines.append(f"{modules}: nothing {'usable' if lines else 'published'} for {where}")
    return lines


def by_kind(
    choices: Sequence[Choice],
    report: Callable[[list[Choice]], KindReport],
    *,
    kinds: Sequence[str],
    modules: Sequence[str],
    no_kind: str,
    no_module: str,
) -> dict[str, KindReport]:
    """A report for each kind. Groups built only for other GPUs count only if there is nothing else.

    Args:
        report: makes the report of one kind from its choices.
        kinds, modules: asked for by name; what of them is not published is a miss, with the reason `no_kind` or `no_module`.
    """
    relevant = [choice for choice in choices if choice.for_this_gpu] or list(choices)
    reports = {
        kind: report([choice for choice in relevant if choice.name[0] == kind])
        for kind in sorted({choice.name[0] for choice in relevant})
    }
    for kind in kinds:
        reports.setdefault(kind, KindReport(status=MISS, reasons=(no_kind,)))
    published = {module for choice in choices if choice.name[0] == KIND_MODULES for module in choice.name[1]}
    if lacking := [module for module in modules if module not in published]:
        found = reports.get(KIND_MODULES, KindReport(status=MISS))
        reasons = (*found.reasons, *(f"{module}: {no_module}" for module in lacking))
        status = PARTIAL if found.status == HIT else found.status
        reports[KIND_MODULES] = KindReport(status=status, entries=found.entries, reasons=reasons)
    return reports
