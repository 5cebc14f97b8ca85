"""A warm-up from its beginning to its end: what is missing, who builds it, and what everybody is told.

All work is done in threads of its own, so that the caller's thread can say that it lives, and goes on when the deadline comes,
whatever hangs. Nothing but an interruption from outside is raised.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcache.warmup.ranks import Ranks, no_ranks
from kcache.warmup.report import FAILED, LATE, PRESENT, Beat, ModuleReport, WarmupReport
from kcache.warmup.stopping import GRACE, LateError, Stop
from kcache.workflows.boot_report import tell_boot

if TYPE_CHECKING:
    from kcache.recipe import Recipe

logger = logging.getLogger("kcache.warmup")

KINDS = ("sampling", "b12x-moe")

DEADLINE = 1800.0
"""Seconds, where the caller names none: no wait is without an end."""

Heartbeat = Callable[[Beat], object]

_ready: dict[str, int] = {}
"""What this process has, by name -> its pid: a forked child does not believe its parent's."""

_one_at_a_time = threading.Lock()


def warmup(
    kinds: Sequence[str] = ("sampling",),
    *,
    modules: Sequence[str] = (),
    model: str | None = None,
    recipe: Recipe | str | Path | None = None,
    variants: Sequence[str] = (),
    deadline: float | None = None,
    heartbeat: Heartbeat | None = None,
    beat_seconds: float = 5.0,
    jobs: int | None = None,
    group: Any = None,
    stall_seconds: float = 30.0,
    join_seconds: float = 120.0,
) -> WarmupReport:
    """Builds in this process what a restore left missing, and only that. Safe to call again; never the reason that a start fails.

    Args:
        kinds: `sampling` (every module that FlashInfer's sampling API reaches), `b12x-moe` (needs `recipe`).
        modules: single nvcc modules by FlashInfer's name.
        model: name of the model; a recipe for another one is refused.
        recipe: the build manifest, or its path.
        variants: of the recipe only these, such as `nvfp4-tp1-ep1`: what this rank serves. All where empty.
        deadline: seconds until the start goes on without what is not finished; 1800 where None. Finished modules are kept.
        heartbeat: called in the caller's thread, at most `beat_seconds` apart while anything works.
        jobs: compilers at once; None for MAX_JOBS, or what cores and memory allow.
        group: the `torch.distributed` group that serves together; None for all ranks, where it is initialised.
        stall_seconds: a rank whose pulse has stopped for so long is dead for the others.
        join_seconds: how long a rank that never called is waited for.

    Returns:
        What was done. `agreed` is the same on every rank that lives.
    """
    started = time.monotonic()
    stop = Stop(DEADLINE if deadline is None else deadline)
    plan = _Plan(kinds=tuple(kinds), modules=tuple(modules), model=model, recipe=recipe, variants=tuple(variants), jobs=jobs)
    work = _Work(plan, stop)
    try:
        if sys.modules.get("flashinfer", 0) is None or importlib.util.find_spec("flashinfer") is None:
            work.reasons.append("there is no FlashInfer in this Python")
    except Exception:  # a package that is broken
        logger.exception("FlashInfer could not be looked for; the start goes on")
        work.reasons.append("FlashInfer could not be looked for")
    ranks = no_ranks()
    try:
        ranks = Ranks.of(group, stall=stall_seconds, join=join_seconds)
    except Exception:
        logger.exception("the other ranks cannot be asked; this one goes on alone")
    thread = threading.Thread(target=work.run, args=(ranks,), name="kcache-warmup", daemon=True)
    thread.start()
    try:
        _watch(thread, work, stop, heartbeat=heartbeat, beat_seconds=beat_seconds, started=started)
    finally:
        stop.call()
        thread.join(0.0 if work.over else 4 * GRACE)
    report = replace(work.report(), seconds=time.monotonic() - started)
    logger.info("warm-up: %s in %.1f s", report.status, report.seconds)
    try:
        tell_boot(report.to_json(), os.environ)
    except OSError as error:  # the cache was taken away, or cannot be written by this user
        logger.info("the warm-up is not on record: %s", error)
    return report


def _watch(
    thread: threading.Thread, work: _Work, stop: Stop, *, heartbeat: Heartbeat | None, beat_seconds: float, started: float
) -> None:
    """Waits for the work, saying that it lives, until it is over or its end came."""
    beat_at = time.monotonic() + beat_seconds
    while thread.is_alive() and not stop.come:
        thread.join(min(0.1, max(0.0, beat_at - time.monotonic()) + 0.001))
        if heartbeat is not None and thread.is_alive() and time.monotonic() >= beat_at:
            beat_at = time.monotonic() + beat_seconds
            try:
                heartbeat(work.beat(time.monotonic() - started))
            except Exception:  # a watchdog that cannot be told is no reason to stop
                logger.exception("the heartbeat failed")


class _Plan:
    """What was asked for."""

    def __init__(
        self,
        *,
        kinds: tuple[str, ...],
        modules: tuple[str, ...],
        model: str | None,
        recipe: Recipe | str | Path | None,
        variants: tuple[str, ...],
        jobs: int | None,
    ) -> None:
        self.kinds, self.modules, self.model, self.recipe, self.variants = kinds, modules, model, recipe, variants
        self.jobs = jobs


class _Work:
    """What is done in the working threads; the caller's thread reads it at any time."""

    def __init__(self, plan: _Plan, stop: Stop) -> None:
        self.plan, self.stop = plan, stop
        self.reasons: list[str] = []
        self.over = False
        self._broken = ""
        """What ended the whole work, such as a FlashInfer that cannot be imported."""
        self._lock = threading.Lock()
        self._names: list[str] = []
        self._doing: set[str] = set()
        self._done: dict[str, ModuleReport] = {}
        self._ranks: Ranks = no_ranks()

    def beat(self, elapsed: float) -> Beat:
        with self._lock:
            return Beat(elapsed=elapsed, doing=tuple(sorted(self._doing)), done=len(self._done), total=len(self._names))

    def report(self) -> WarmupReport:
        """What is known now; what is not finished is late."""
        with self._lock:
            status, reason = (FAILED, self._broken) if self._broken else (LATE, "the deadline came first")
            late = [ModuleReport(name=name, status=status, reason=reason) for name in self._names if name not in self._done]
            done = [self._done[name] for name in self._names if name in self._done]
            if not self.over and not self._names and not self.reasons:
                self.reasons.append("the deadline came before it was known what is missing")
        ready = tuple(sorted(module.name for module in done if module.ready))
        agreed, ranks = self._ranks.verdict(ready)
        return WarmupReport(modules=(*done, *late), reasons=tuple(self.reasons), ranks=ranks, agreed=agreed)

    def run(self, ranks: Ranks) -> None:
        """Everything, in the working thread."""
        self._ranks = ranks
        try:
            with _one_at_a_time, ranks:
                self._try(ranks)
                ranks.finish(self.stop)
        except Exception as error:  # a server's start is at stake
            logger.exception("the ranks could not agree; the start goes on")
            self.reasons.append(_line(error))
        finally:
            self.over = True

    def _try(self, ranks: Ranks) -> None:
        try:
            if not self.reasons:
                self._run(ranks)
        except LateError:
            logger.warning("the deadline of the warm-up came; the start goes on")
        except Exception as error:  # a server's start is at stake
            logger.exception("the warm-up failed; the start goes on")
            self._broken = _line(error)
            self.reasons.append(self._broken)

    def _run(self, ranks: Ranks) -> None:
        if unknown := [kind for kind in self.plan.kinds if kind not in KINDS]:
            self.reasons.append(f"kind {', '.join(unknown)} is not known here; known are {', '.join(KINDS)}")
        names = list(dict.fromkeys([*self._sampling(), *self.plan.modules]))
        kernels = self._kernels()
        with self._lock:
            self._names = [*names, *kernels]
        for name in (*names, *kernels):
            if _ready.get(name) == os.getpid():
                self._finish(ModuleReport(name=name, status=PRESENT))
        missing = [name for name in self._names if name not in self._done]
        if not missing:
            return
        self._import()
        failed = ranks.lead(_place(), self.stop)
        self._modules([name for name in missing if name in names], failed)
        for name in missing:
            if name in kernels:
                self._do(name, kernels[name])

    def _import(self) -> None:
        importlib.import_module("flashinfer.jit.core")

    def _sampling(self) -> list[str]:
        if "sampling" not in self.plan.kinds:
            return []
        from kcache.warmup.reach import sampling_modules

        try:
            return sampling_modules(self.stop)
        except LateError:
            raise
        except Exception as error:
            logger.exception("FlashInfer could not be asked which modules sampling reaches; `sampling` and `topk` are taken")
            self.reasons.append(f"FlashInfer could not be asked which modules sampling reaches: {_line(error)}")
            return ["sampling", "topk"]

    def _kernels(self) -> dict[str, Callable[[], ModuleReport]]:
        """Name -> what makes the kernels ready."""
        if "b12x-moe" not in self.plan.kinds:
            return {}
        if self.plan.recipe is None:
            self.reasons.append("b12x-moe needs a recipe: which shapes and token counts the model has")
            return {}
        from kcache.warmup.kernels import warm_kernels

        plan, recipe = self.plan, self._recipe(self.plan.recipe)
        if plan.model is not None and recipe.model.name != plan.model:
            self.reasons.append(f"the recipe is for {recipe.model.name}, and the model is {plan.model}")
            return {}
        name = f"b12x-moe {recipe.model.name}" + "".join(f" {variant}" for variant in plan.variants)
        return {name: lambda: warm_kernels(name, recipe, plan.variants, self.stop)}

    @staticmethod
    def _recipe(given: Recipe | str | Path) -> Recipe:
        from kcache.recipe import read_recipe

        return read_recipe(str(given)) if isinstance(given, str | Path) else given

    def _modules(self, names: Sequence[str], failed: dict[str, str]) -> None:
        """Builds modules beside each other as far as compilers may run; one that fails costs only itself."""
        from kcache.probe.limits import build_jobs
        from kcache.warmup.modules import warm_module

        jobs = self.plan.jobs or build_jobs(os.environ).jobs
        width = max(1, min(len(names), jobs))
        waiting, lock = list(names), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    name = waiting.pop(0)
                if name in failed:
                    self._finish(ModuleReport(name=name, status=FAILED, reason=failed[name]))
                    continue
                self._do(name, lambda name=name: warm_module(name, max(1, jobs // width), self.stop))  # type: ignore[misc]

        threads = [threading.Thread(target=work, name=f"kcache-warmup-{number}", daemon=True) for number in range(width)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _do(self, name: str, action: Callable[[], ModuleReport]) -> None:
        """One module; whatever it raises is its result."""
        started = time.monotonic()
        with self._lock:
            self._doing.add(name)
        try:
            report = action()
        except LateError as error:
            report = ModuleReport(name=name, status=LATE, reason=str(error))
        except Exception as error:  # a server's start is at stake
            logger.exception("%s could not be warmed up; the start goes on, and its first use will fail or build it", name)
            report = ModuleReport(name=name, status=FAILED, reason=_line(error))
        if report.seconds == 0.0:
            report = replace(report, seconds=time.monotonic() - started)
        self._finish(report)

    def _finish(self, report: ModuleReport) -> None:
        with self._lock:
            self._doing.discard(report.name)
            self._done[report.name] = report
            if report.ready:
                _ready[report.name] = os.getpid()
            ready = tuple(sorted(name for name, module in self._done.items() if module.ready))
            problems = {name: module.reason for name, module in self._done.items() if module.status == FAILED}
        self._ranks.tell(ready, problems)


def _place() -> str:
    """Where modules are built: ranks with the same place build each thing once."""
    from flashinfer.jit import env

    return f"{os.uname().nodename}:{os.path.realpath(env.FLASHINFER_JIT_DIR)}"


def _line(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__
