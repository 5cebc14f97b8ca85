"""Runs the child that names, compiles or checks the fused-MoE programs of the package b12x for a described GPU.

The package is whatever `import b12x` gives in the child: PyPI's, or the copy inside FlashInfer. This module makes the cases from
a build manifest, runs the child within its time (`kcache.workflows.child`) and takes its answer apart. What its programs depend
on is `kcache.kinds.b12x_key`'s, collecting and installing them `kcache.kinds.b12x_compile`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kcache.errors import CollectError, ProbeError
from kcache.gpu_products import GpuProduct
from kcache.recipe import Recipe
from kcache.recipe_shapes import Shape, ShapeProblem, shapes
from kcache.workflows import child
from kcache.workflows.child import Progress

SECONDS_PER_JOB = 600.0
"""A job compiles up to a few programs one after another; 34 s was the longest seen, on two busy cores."""

SECONDS_BEFORE_JOBS = 900.0
"""For importing torch, Triton and b12x and naming every program: 18 s was the longest seen."""

DEFAULT = "default"
"""Only the configurations that b12x takes untuned: what a server with B12X_AUTOTUNE=0 needs."""

ALL = "all"
"""Every candidate of b12x's tuning too: what a server needs that races them when it starts."""

_MODES = {"nvfp4": ("modelopt_nvfp4", "a4"), "w4a16": ("modelopt_nvfp4", "a16"), "mxfp4": ("fp4_e8m0_k32", "a8")}
"""A build manifest's mode -> b12x's format of the weights and of the activations. It has no FP4 activations for MXFP4."""

_ACTIVATIONS = ("silu", "relu2", "swigluoai_uninterleave")
"""Of a build manifest's, those that b12x has (`moe/_shared/kernels/activations.py`, SUPPORTED_MOE_ACTIVATIONS, 1.5.1)."""


def program_cases(recipe: Recipe) -> tuple[dict[str, Any], ...]:
    """The cases of a build manifest (`CASE` in the child's script), without those of `refused_shapes`."""
    refused = {problem.shape for problem in refused_shapes(recipe)}
    return tuple(_case(recipe, shape) for shape in shapes(recipe) if shape not in refused)


def refused_shapes(recipe: Recipe) -> tuple[ShapeProblem, ...]:
    """The shapes that b12x's fused MoE is not asked for; the child has the last word on the others.

    Experts that are split over ranks are another operation of b12x (`moe.ep_moe`), which is not built.
    """
    found = []
    for shape in shapes(recipe):
        if shape.ep > 1:
            found.append(ShapeProblem(shape=shape, why="experts split over ranks are moe.ep_moe in b12x, which is not built"))
        if recipe.model.activation not in _ACTIVATIONS:
            found.append(ShapeProblem(shape=shape, why=f"b12x has no activation {recipe.model.activation}"))
    return tuple(found)


def _case(recipe: Recipe, shape: Shape) -> dict[str, Any]:
    model, tokens = recipe.model, recipe.tokens
    source, mode = _MODES[shape.mode]
    swiglu = model.swiglu and {"alpha": model.swiglu.alpha, "beta": model.swiglu.beta, "limit": model.swiglu.limit}
    return {
        "id": shape.name,
        "experts": model.experts,
        "top_k": model.top_k,
        "hidden": model.hidden_size,
        "inter": shape.inter,
        "activation": model.activation,
        "swiglu": swiglu,
        "source": source,
        "mode": mode,
        "w13_layout": "w13",
        "scales": tokens.scales,
        "logits": "float32",
        "maximum": tokens.maximum,
        "tokens": list(tokens.counts),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRun:
    """One run of the child.

    python:         the interpreter that has b12x, torch and Triton.
    compile_cache:  B12X_COMPILE_CACHE_DIR of the run; None leaves it to the environment.
    triton_cache:   TRITON_CACHE_DIR of the run; None leaves it to the environment.
    cuda:           the CUDA release that torch says it is for, such as `13.0`; None for what the installed one says.
    cases:          see `program_cases`.
    environ:        of the child. What of it enters b12x's keys is `kcache.kinds.b12x_key.environment_key`'s to say.
    configurations: `DEFAULT` or `ALL`.
    only:           keys of the programs to build; all where None. The way to split one build over hosts.
    """

    python: str
    gpu: GpuProduct
    cases: Sequence[Mapping[str, Any]]
    environ: Mapping[str, str]
    compile_cache: str | None = None
    triton_cache: str | None = None
    cuda: str | None = None
    configurations: str = DEFAULT
    only: Sequence[str] | None = None

    def request(self, mode: str, answer: str, jobs: int, seconds_per_job: float) -> dict[str, Any]:
        """The child's request (`REQUEST` in its script)."""
        return {
            "mode": mode,
            "answer": answer,
            "compile_cache": self.compile_cache,
            "triton_cache": self.triton_cache,
            "gpu": self.gpu.describe(),
            "cuda": self.cuda,
            "configurations": self.configurations,
            "jobs": jobs,
            "seconds_per_job": seconds_per_job,
            "only": None if self.only is None else list(self.only),
            "cases": [dict(case) for case in self.cases],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltProgram:
    """One program that a plan needs.

    dialect: `cute` (an object in b12x's compile cache) or `triton` (a directory in Triton's).
    key:     b12x's or Triton's name of it: 64 hex digits.
    name:    what the compiler calls the kernel.
    path:    where its object or directory lies (or would lie).
    default: whether an untuned configuration needs it.
    cases:   case -> token counts that ask for it.
    status:  `asked` (mode names); `built`, `present` (was there already), `failed`, `crashed`, `timeout`, `skipped` (mode build);
             `found`, `missing` (mode check, by b12x's own look).
    """

    dialect: str
    key: str
    name: str
    path: str
    default: bool
    cases: Mapping[str, tuple[int, ...]]
    status: str
    reason: str = ""
    seconds: float = 0.0
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case: how many configurations were walked; in mode check, how many of them a session prepared to the end; and what
    b12x said where it refused, each with the token count (0: while the case was set up)."""

    case: str
    configurations: int
    prepared: int
    refused: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramAnswer:
    """What a run found.

    package:  directory of the b12x that was imported.
    compile_cache, triton_cache: where its programs lie.
    context:  what b12x itself says of its keys: package_fingerprint, toolchain, device_arch, compile_options,
              compile_environment.
    compiles: what its compilers were asked for, in mode check.
    loads:    how many programs were loaded, in mode check.
    seconds:  `import`, `walk`, `build`.
    """

    package: str
    compile_cache: str
    triton_cache: str
    context: Mapping[str, Any]
    programs: tuple[BuiltProgram, ...]
    cases: tuple[CaseResult, ...]
    compiles: tuple[str, ...]
    loads: int
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[BuiltProgram, ...]:
        return tuple(program for program in self.programs if program.status in ("failed", "crashed", "timeout", "missing"))

    @property
    def proven(self) -> bool:
        """Mode check: every configuration was prepared by b12x to the end, with no compiler asked."""
        whole = all(case.prepared == case.configurations and not case.refused for case in self.cases)
        return bool(self.programs) and whole and not self.compiles and not self.failed

    def triton_groups(self) -> dict[str, str]:
        """Directory in Triton's cache -> name of the group, of every Triton program (`kcache.kinds.triton_groups`)."""
        triton = (program for program in self.programs if program.dialect == "triton")
        return {program.path.rpartition("/")[2]: f"{program.name[:150]}.json" for program in triton}


def name_programs(run: ProgramRun) -> ProgramAnswer:
    """Which programs the plans need; compiles nothing. Raises as `compile_programs`."""
    return _run(run, "names", limit=SECONDS_BEFORE_JOBS)


def check_programs(run: ProgramRun, *, untuned: bool = False) -> ProgramAnswer:
    """Whether a `PreparationSession` of b12x that may use caches only prepares every plan. Raises as `compile_programs`.

    Args:
        untuned: ask a session that does not tune and has no workers instead, which resolves programs as they are used.
    """
    return _run(run, "check", limit=SECONDS_BEFORE_JOBS, untuned=untuned)


def compile_programs(
    run: ProgramRun,
    *,
    jobs: int,
    seconds_per_job: float = SECONDS_PER_JOB,
    limit: float | None = None,
    progress: Progress | None = None,
) -> ProgramAnswer:
    """Compile every program that the plans need and that is not there, at most `jobs` at a time.

    A program that fails, crashes or takes longer than `seconds_per_job` has that status in the answer; the others are built.

    Args:
        limit: seconds for the whole run; where None, enough for every job to take as long as it may.

    Raises:
        ProbeError: this b12x is not as the child expects, or cannot be imported.
        CollectError: the child ended without an answer, or took longer than `limit`.
    """
    return _run(run, "build", jobs=jobs, seconds_per_job=seconds_per_job, limit=limit, progress=progress)


def _run(
    run: ProgramRun,
    mode: str,
    *,
    jobs: int = 1,
    seconds_per_job: float = SECONDS_PER_JOB,
    limit: float | None,
    progress: Progress | None = None,
    untuned: bool = False,
) -> ProgramAnswer:
    document, ended = child.run(
        run.python,
        "b12x_programs.py",
        lambda answer: run.request(mode, answer, jobs, seconds_per_job) | {"untuned": untuned},
        environ=run.environ,
        jobs=jobs,
        seconds_before=SECONDS_BEFORE_JOBS,
        seconds_per_job=seconds_per_job,
        limit=limit,
        progress=progress,
    )
    if document is None:
        raise CollectError(
            "the process that compiles b12x programs gave no answer",
            why=ended,
            remedy="Programs that were finished lie in the compile cache and are taken over by the next run.",
        )
    if error := document.get("error"):
        expected = error["kind"] == "assumption"
        raise ProbeError(
            "this b12x is not as kcache expects" if expected else "the b12x programs could not be named",
            why=error["what"],
            remedy="Leave its kind out for this b12x, and report it with this message.",
        )
    return parse_answer(document)


def parse_answer(document: Mapping[str, Any]) -> ProgramAnswer:
    """The child's answer as values. The child is ours: a malformed answer is a defect, and raises KeyError."""
    return ProgramAnswer(
        package=document["package"],
        compile_cache=document["compile_cache"],
        triton_cache=document["triton_cache"],
        context=document["context"],
        programs=tuple(_program(item) for item in document["programs"]),
        cases=tuple(_case_result(item) for item in document["cases"]),
        compiles=tuple(document["compiles"]),
        loads=document["loads"],
        seconds=document["seconds"],
    )


def _program(item: Mapping[str, Any]) -> BuiltProgram:
    return BuiltProgram(
        dialect=item["dialect"],
        key=item["key"],
        name=item["name"],
        path=item["path"],
        default=item["default"],
        cases={case: tuple(tokens) for case, tokens in item["cases"].items()},
        status=item.get("status", "asked"),
        reason=item.get("error") or "",
        seconds=item.get("seconds", 0.0),
        size=item["size"],
    )


def _case_result(item: Mapping[str, Any]) -> CaseResult:
    refused = [*item["errors"], *item.get("missing", ())]
    return CaseResult(
        case=item["id"],
        configurations=item["configurations"],
        prepared=item.get("prepared", 0),
        refused=tuple((one["tokens"], one["error"]) for one in refused),
    )
