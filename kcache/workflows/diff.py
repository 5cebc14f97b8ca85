"""What differs between two environments, and what of a store one of them could use and the other could not.

The second environment is a saved one, or the first with some versions raised: a preview of a bump. What it misses is counted in
the build seconds that a farm recorded for the first. Entries that only a host can decide about (programs of the package b12x)
count for neither, and are said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kcache.errors import UsageError
from kcache.index import IndexEntry
from kcache.key import AUTOTUNE, B12X, EntryKey, Environment, Fact, known, undetermined
from kcache.manifest import Manifest
from kcache.match import Decision
from kcache.store.base import Store
from kcache.values import replace
from kcache.workflows.catalog import read_index, read_manifest
from kcache.workflows.environment import RECORDED, sections
from kcache.workflows.resolve import GroupName, candidates, choose, grouped, slot_text
from kcache.workflows.target import Target

BUMPS: Mapping[str, tuple[str, ...]] = {
    "flashinfer": ("flashinfer.version",),
    "cuda": ("cuda.runtime", "torch.cuda"),
    "torch": ("torch.version",),
    "tvm-ffi": ("tvm_ffi.version",),
    "glibc": ("libc.version",),
    "machine": ("platform.machine",),
}
"""What a bump may name, and the facts that it changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One fact that differs; `matched` is the rule it is compared by, empty where it is only recorded."""

    name: str
    before: Fact
    after: Fact
    matched: str

    def to_json(self) -> dict[str, Any]:
        return {"fact": self.name, "before": self.before.to_json(), "after": self.after.to_json(), "matched": self.matched}


@dataclass(frozen=True, slots=True, kw_only=True)
class Missed:
    """What one kind, of one model, would miss. `seconds`: what its builds took for the first environment, as recorded."""

    kind: str
    model: str
    entries: int
    seconds: float
    titles: tuple[str, ...]
    archs: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "model": self.model,
            "entries": self.entries,
            "build_seconds": round(self.seconds, 1),
            "titles": list(self.titles),
            "archs": list(self.archs),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a store has for the first environment, and which of it the second would miss. `undecided`: only a host can tell."""

    usable: int
    kept: int
    missed: tuple[Missed, ...]
    undecided: int

    @property
    def seconds(self) -> float:
        return sum(one.seconds for one in self.missed)

    def to_json(self) -> dict[str, Any]:
        return {
            "usable_before": self.usable,
            "usable_after": self.kept,
            "missed": [one.to_json() for one in self.missed],
            "build_seconds": round(self.seconds, 1),
            "build_hours": round(self.seconds / 3600, 3),
            "undecided": self.undecided,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """`changes` that matching looks at come first. `preview` is None where no store was named."""

    changes: tuple[Change, ...]
    preview: Preview | None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "kcache.diff/1",
            "changes": [change.to_json() for change in self.changes],
            "preview": self.preview.to_json() if self.preview else None,
        }


def bumped(environment: Environment, bumps: Sequence[str]) -> Environment:
    """The environment with `NAME=VERSION` for each of these. FlashInfer's sources then are those of a wheel that is not here.

    Raises:
        UsageError: a bump cannot be understood.
    """
    facts = dict(environment.facts)
    sources = environment.sources
    for bump in bumps:
        name, _, version = bump.partition("=")
        if name not in BUMPS or not version:
            raise UsageError(f"{bump!r} is no bump", remedy=f"Write NAME=VERSION; known names: {', '.join(BUMPS)}.")
        facts |= {fact: known(version) for fact in BUMPS[name]}
        if name == "flashinfer":
            facts |= dict.fromkeys(("flashinfer.commit", "flashinfer.tree"), undetermined(f"FlashInfer {version} is not here"))
            sources = {}
    return replace(environment, facts=facts, sources=sources)


def changes(before: Environment, after: Environment) -> tuple[Change, ...]:
    """Every fact that differs, an undetermined one among them, those that matching looks at first."""
    found: dict[str, Change] = {}
    shown = [sections(one) for one in (before, after)]
    for title in shown[0]:
        rows = [{row.name: row for row in one[title]} for one in shown]
        for name in dict.fromkeys([*rows[0], *rows[1]]):
            one, other = (side[name].fact if name in side else Fact() for side in rows)
            if one != other:
                rule = next(side[name].rule for side in rows if name in side)
                found[name] = Change(name=name, before=one, after=other, matched="" if title == RECORDED else rule)
    return tuple(sorted(found.values(), key=lambda change: not change.matched))


def diff(
    before: Environment, after: Environment, store: Store | None, *, takes: Callable[[EntryKey], bool], bump: bool
) -> DiffReport:
    """What differs, and with a store what would be missed.

    Args:
        takes: which entries count.
        bump: whether `after` was made by `bumped`: then nothing is known of its FlashInfer's sources, and an entry of its version
            is taken to be of the same ones.

    Raises:
        ProbeError: an environment lacks what an index is named by.
        StoreError, IntegrityError, ManifestError: the store cannot be read.
    """
    preview = None
    if store is not None:
        preview = _preview(before, after, store, takes, bump=bump)
    return DiffReport(changes=changes(before, after), preview=preview)


def _preview(before: Environment, after: Environment, store: Store, takes: Callable[[EntryKey], bool], *, bump: bool) -> Preview:
    had, undecided = _usable(before, store, takes, sources=True)
    has, _ = _usable(after, store, takes, sources=not (bump and not after.sources))
    missed: dict[tuple[str, str], list[tuple[str, str, float]]] = {}
    kept = 0
    for name, chosen in had.items():
        seconds = max(entry.build_seconds for entry in chosen.values())
        there = has.get(name, {})
        kept += sum(1 for arch in chosen if arch in there)
        for arch in after.archs:
            if arch not in there:
                title = next(iter(chosen.values())).key.title
                missed.setdefault((name[0], name[2]), []).append((title, arch, seconds))
    return Preview(
        usable=sum(map(len, had.values())),
        kept=kept,
        missed=tuple(
            Missed(
                kind=kind,
                model=model,
                entries=len(lines),
                seconds=sum(seconds for _, _, seconds in lines),
                titles=tuple(sorted({title for title, _, _ in lines})),
                archs=tuple(sorted({arch for _, arch, _ in lines})),
            )
            for (kind, model), lines in sorted(missed.items())
        ),
        undecided=undecided,
    )


def _usable(
    environment: Environment, store: Store, takes: Callable[[EntryKey], bool], *, sources: bool
) -> tuple[dict[GroupName, Mapping[str, IndexEntry]], int]:
    """Group -> architecture (and SM count) -> the entry that a restore would take, and how many only a host can decide about."""
    target = Target(environment)
    index = read_index(store, target.index_ingredients())
    asked = [entry for entry in index.entries if takes(entry.key)] if index is not None else []
    entries = [entry for entry in asked if entry.key.layout not in (B12X, AUTOTUNE)]
    found: dict[GroupName, Mapping[str, IndexEntry]] = {}
    for name, group in grouped(candidates(entries, environment, strict=False)).items():
        choice = choose(
            group, environment, read_manifest=partial(read_manifest, store), decide=partial(_decide, target, sources=sources)
        )
        if choice.chosen:
            found[name] = {slot_text(slot): entry for slot, (entry, _) in choice.chosen.items()}
    return found, len(asked) - len(entries)


def _decide(target: Target, manifest: Manifest, *, sources: bool) -> Decision:
    decision = target.decide(manifest)
    if sources:
        return decision
    checks = tuple(check for check in decision.checks if not check.field.startswith("flashinfer.sources"))
    return Decision(checks=checks, archs=decision.archs)
