"""Tunes what build manifests ask for on the GPUs of this host, and makes entries of it.

The last good tuning of a manifest is kept in the work directory. A build takes it as it is; asked to tune again, it replays both,
measures them in turn and keeps the better one, and the entry's provenance says so. A tuning that is no good leaves nothing: it is
an entry that failed, with the reason.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kcache import digest, fsops
from kcache.archs import arch_list_entry
from kcache.errors import KcacheError, UsageError
from kcache.gpu_products import find_product
from kcache.key import AUTOTUNE
from kcache.kinds.autotune import check_store_rule
from kcache.probe.host import Host
from kcache.recipe import Recipe
from kcache.recipe_tuning import all_calls
from kcache.values import dataclass
from kcache.workflows import child
from kcache.workflows.build_entries import FAILED, UP_TO_DATE, EntryReport
from kcache.workflows.build_tunings import TuningsReport, collect_tunings
from kcache.workflows.target import Target
from kcache.workflows.tune import Tuned, TuningRun, tune

REPEATS = 30
"""Runs of a call whose median is taken when two tunings are compared."""

ROUNDS = 2
"""Times that each of two tunings is replayed, in turn."""

_STORE, _FILES, _FACTS = "store", "files", "tuned.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningFarm:
    """The host that tunes.

    target: the same host as a restore sees it. environ: of the children. again: tune even where a good tuning is kept.
    """

    host: Host
    target: Target
    environ: Mapping[str, str]
    output: Path
    work: Path
    again: bool
    watch: Callable[[str, int, int], None]


def require_gpu(host: Host) -> None:
    """Refuses to tune on a host without a GPU.

    Raises:
        UsageError
    """
    if not host.gpus.gpus:
        raise UsageError(
            "kind autotune needs the GPU itself, and this host has none",
            why=host.gpus.problem or "no GPU is visible",
            remedy="Run this build on a host with the GPU that the results are for; other kinds are built without one (--kinds).",
        )


def build_tuned(farm: TuningFarm, recipe: Recipe) -> tuple[tuple[EntryReport, ...], tuple[str, ...]]:
    """Entries of one recipe's tuning, and warnings.

    Raises:
        UsageError: the recipe is for another GPU or another FlashInfer than this host has.
    """
    _check(farm, recipe)
    calls = all_calls(recipe)
    place = farm.work / digest.of_document({"calls": list(calls), "skip": list(recipe.tuning.skip)}).removeprefix("sha256:")[:16]
    kept, fresh = place / "kept", place / "new"
    facts = _facts(kept)
    measured = facts is not None and farm.again
    if facts is None or farm.again:
        shutil.rmtree(fresh, ignore_errors=True)
        tuned = _tune(farm, recipe, calls, fresh)
        if tuned.problem:
            return (_failed(farm, recipe, tuned.problem),), ()
        facts = _better(farm, calls, kept, fresh, facts, tuned.facts())
    try:
        done = _collect(farm, recipe, kept, calls, facts)
        if measured and any(entry.status == UP_TO_DATE for entry in done.entries):  # what was measured of them is told anew
            for entry in done.entries:
                Path(entry.manifest).unlink(missing_ok=True)
            done = _collect(farm, recipe, kept, calls, facts)
    except KcacheError as error:
        return (_failed(farm, recipe, str(error)),), ()
    return done.entries, tuple(f"left out: {one.path}: {one.why}" for one in done.left_out)


def _collect(
    farm: TuningFarm, recipe: Recipe, kept: Path, calls: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> TuningsReport:
    return collect_tunings(
        [directory for directory in (kept / _STORE, kept / _FILES) if directory.is_dir()],
        farm.target,
        farm.output,
        model=recipe.model.name,
        modules=[str(name) for name in facts["modules"]],
        calls=calls,
        seconds=sum(facts["seconds"].values()),
        provenance={"tuning": facts, "recipe": recipe.model.source},
    )


def _check(farm: TuningFarm, recipe: Recipe) -> None:
    names = sorted({gpu.name for gpu in farm.host.gpus.gpus})
    wanted = [gpu.slug for gpu in recipe.targets.gpus]
    here = [find_product(name) for name in names]
    if wanted and (len(here) != 1 or here[0] is None or here[0].slug not in wanted):
        raise UsageError(
            f"{recipe.model.name} is to be tuned for {', '.join(wanted)}",
            why=f"this host has {', '.join(names)}",
            remedy="Results are keyed by the product's name: run the build on such a host, or add the product to targets.gpus.",
        )
    found = farm.target.environment.fact("flashinfer.version").value or "none"
    if found not in recipe.targets.flashinfer:
        raise UsageError(
            f"{recipe.model.name} is to be built for FlashInfer {', '.join(recipe.targets.flashinfer)}",
            why=f"this Python has {found}",
            remedy="Name another Python with --python, or add the version to targets.flashinfer.",
        )


def _tune(farm: TuningFarm, recipe: Recipe, calls: Sequence[Mapping[str, Any]], place: Path) -> Tuned:
    try:
        check_store_rule(farm.host.paths.flashinfer or "")
        root: Path | None = place / _STORE
    except KcacheError:  # up to 0.6.18 there is none
        root = None
    hashed = recipe.tuning.vllm
    run = TuningRun(
        python=farm.host.paths.interpreter.executable,
        environ=farm.environ,
        calls=calls,
        root=root,
        file=place / _FILES / hashed / "autotune_configs.json" if hashed else None,
        skip=recipe.tuning.skip,
        ranks=len(farm.host.gpus.gpus),
    )
    if run.root is None and run.file is None:
        return Tuned(problem="this FlashInfer keeps results in files alone: name vLLM's directory in tuning.vllm", answer={})
    what = f"tuning of {recipe.model.name}"
    return tune(run, lambda event: farm.watch(what, int(event["done"]), int(event["total"])))


def _facts(place: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads((place / _FACTS).read_text()))
    except (OSError, ValueError):
        return None


def _better(  # noqa: PLR0917 -- two of everything
    farm: TuningFarm,
    calls: Sequence[Mapping[str, Any]],
    kept: Path,
    fresh: Path,
    old: Mapping[str, Any] | None,
    new: Mapping[str, Any],
) -> dict[str, Any]:
    """Moves the better of two tunings to `kept`; its facts, with what was measured."""
    facts = dict(new)
    if old is not None:
        measured = [
            {name: _milliseconds(farm, calls, place) for name, place in (("before", kept), ("now", fresh))} for _ in range(ROUNDS)
        ]
        comparison = compared(measured)
        facts = {**(new if comparison["kept"] == "now" else old), "compared": comparison}
        if comparison["kept"] == "before":
            fsops.write_bytes(kept / _FACTS, digest.canonical_json(facts))
            shutil.rmtree(fresh)
            return facts
    fsops.write_bytes(fresh / _FACTS, digest.canonical_json(facts))
    shutil.rmtree(kept, ignore_errors=True)
    fresh.rename(kept)
    return facts


def compared(measured: Sequence[Mapping[str, float | None]]) -> dict[str, Any]:
    """Which of two tunings is kept, `before` or `now`: the one whose calls took less in sum, in its best round.

    Args:
        measured: a round each: milliseconds, None where the replay failed.
    """
    best = {
        name: min((milliseconds for one in measured if (milliseconds := one[name]) is not None), default=None)
        for name in ("before", "now")
    }
    before, now = best["before"], best["now"]
    kept = "now" if now is not None and (before is None or now < before) else "before"
    return {"kept": kept, "milliseconds": best, "rounds": len(measured)}


def _milliseconds(farm: TuningFarm, calls: Sequence[Mapping[str, Any]], place: Path) -> float | None:
    """What all calls take in sum when the results of one tuning are replayed; None where that did not work."""
    store = place / _STORE
    request = {
        "stores": [{"root": str(store), "policy": {}, "keys": []}] if store.is_dir() else [],
        "files": [] if store.is_dir() else [str(path) for path in sorted((place / _FILES).glob("*/*.json"))],
        "calls": [{**call, "repeat": REPEATS} for call in calls],
        "describe": None,
    }
    answer, _ = child.run(
        farm.host.paths.interpreter.executable,
        "autotune_replay.py",
        lambda path: {**request, "answer": path},
        environ=farm.environ,
        jobs=1,
        seconds_before=0.0,
        seconds_per_job=0.0,
        limit=900.0,
        progress=None,
    )
    if answer is None or any("milliseconds" not in call for call in answer["calls"]):
        return None
    return round(sum(float(call["milliseconds"]) for call in answer["calls"]), 6)


def _failed(farm: TuningFarm, recipe: Recipe, reason: str) -> EntryReport:
    archs = farm.target.environment.archs
    return EntryReport(
        kind=AUTOTUNE,
        arch=arch_list_entry(archs[0]) if archs else "",
        modules=(AUTOTUNE,),
        status=FAILED,
        reason=reason,
        model=recipe.model.name,
    )
