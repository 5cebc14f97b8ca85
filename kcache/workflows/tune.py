"""Runs FlashInfer's own tuner on the GPUs of this host, in child processes: one for each GPU of a group that tunes together.

What is tuned and how is the child's affair (`kcache.probe.children.autotune_tune`), which also says honestly whether it worked.
Here: the processes, their meeting point, and one verdict for all of them. Results lie where the request wanted them, and are
collected elsewhere.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kcache.values import dataclass, field
from kcache.workflows import child

SECONDS_BEFORE = 300.0
"""That a child may take before its first call is tuned, beyond that call: importing, building the tuner's own module."""

SECONDS_PER_CALL = 1800.0
"""That one call's tuning may take: some operations compile every candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRun:
    """What to tune.

    python:  the interpreter that has FlashInfer.
    calls:   see `kcache.recipe_tuning.tuning_calls`.
    root:    of the managed store (v2); None where this FlashInfer has none.
    file:    the JSON file (v1); None for none.
    policy:  fields of the measurement policy that v2 names; empty for FlashInfer's default.
    skip:    operations that are not tuned.
    ranks:   processes that tune together, each on a GPU of its own.
    limit:   seconds for all of it; None for as long as every call may take.
    """

    python: str
    environ: Mapping[str, str]
    calls: Sequence[Mapping[str, Any]]
    root: Path | None
    file: Path | None
    policy: Mapping[str, str] = field(default_factory=dict)
    skip: Sequence[str] = ()
    ranks: int = 1
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """What came of it. `problem` is empty only if every process found a winner for every look-up; `answer` is the leader's."""

    problem: str
    answer: Mapping[str, Any]

    def facts(self) -> dict[str, Any]:
        """What an entry's provenance says of the tuning."""
        counted = self.answer.get("counted", {})
        return {
            "device": self.answer.get("device", ""),
            "seconds": self.answer.get("tuning_seconds", {}),
            "profiled": counted.get("profiled", 0),
            "failed_candidates": counted.get("failed", 0),
            "covered": self.answer.get("covered", {}),
            "modules": counted.get("modules", []),
        }


def tune(run: TuningRun, progress: Callable[[Mapping[str, Any]], None] | None = None) -> Tuned:
    """Tunes, and says what came of it; never raises for a tuning that failed.

    Args:
        progress: called after each call of the leader.
    """
    for path in (run.root, None if run.file is None else run.file.parent):
        if path is not None:
            path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kcache-tune-") as folder, ThreadPoolExecutor(run.ranks) as threads:
        init = f"file://{folder}/meet"
        started = [threads.submit(_rank, run, rank, init, progress if rank == 0 else None) for rank in range(run.ranks)]
        done = [one.result() for one in started]
    problems = [
        (f"rank {rank}: " if run.ranks > 1 else "") + (how if answer is None else str(answer["problem"]))
        for rank, (answer, how) in enumerate(done)
        if answer is None or answer["problem"]
    ]
    leader = done[0][0]
    return Tuned(problem="; ".join(problems), answer=leader if leader is not None else {})


def _rank(
    run: TuningRun, rank: int, init: str, progress: Callable[[Mapping[str, Any]], None] | None
) -> tuple[dict[str, Any] | None, str]:
    request = {
        "calls": list(run.calls),
        "root": None if run.root is None else str(run.root),
        "file": None if run.file is None else str(run.file),
        "policy": dict(run.policy),
        "skip": list(run.skip),
        "group": {"rank": rank, "size": run.ranks, "init": init} if run.ranks > 1 else None,
    }
    return child.run(
        run.python,
        "autotune_tune.py",
        lambda path: {**request, "answer": path},
        environ=run.environ,
        jobs=1,
        seconds_before=SECONDS_BEFORE,
        seconds_per_job=SECONDS_PER_CALL,
        limit=run.limit,
        progress=progress,
    )
