"""Compiles the CuTe-DSL kernels of build manifests, and writes them down as entries: one for each model, layout of ranks and GPU.

The farm needs neither a GPU nor nvcc: a child process makes the calls on a described GPU, and FlashInfer itself compiles
and exports what they ask for (`kcache.workflows.cute_build`). What it does not allow or keep is reported by name. A kernel
that fails costs only itself: the entry holds the others, and the build is partial.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kcache import digest, fsops
from kcache.archs import cute_dsl_arch, flashinfer_arch
from kcache.errors import CollectError, KcacheError, UsageError
from kcache.gpu_products import GpuProduct
from kcache.kernel_facts import Wheel, kernel_artifact_path
from kcache.kinds.cute_dsl import module_directory
from kcache.kinds.cute_entry import BuiltKernel, KernelBuild, kernel_parts
from kcache.kinds.cute_kinds import CUTE_KINDS
from kcache.probe.binary import object_facts
from kcache.probe.host import Host, hash_sources
from kcache.recipe import Recipe
from kcache.recipe_cases import plan_cases
from kcache.workflows.build_entries import BUILT, FAILED, UP_TO_DATE, EntryReport, ModuleReport, write_parts
from kcache.workflows.cute_build import DryRun, DryRunAnswer, Kernel, compile_kernels

KernelWatch = Callable[[str, int, int], None]
"""Called after each kernel: for what, how many are done, and of how many."""

_SECONDS = "kcache-seconds.json"
"""In a work directory: what each kernel's compilation took, for runs that find it there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFarm:
    """What is equal for all kernels of one build.

    host:    the farm, as the Python that has FlashInfer sees it.
    wheels:  CuTe-DSL's compiler on it.
    environ: the compilers' environment.
    work:    where FlashInfer compiles, kept for the next build.
    """

    host: Host
    wheels: Mapping[str, Wheel]
    environ: Mapping[str, str]
    output: Path
    work: Path
    jobs: int
    watch: KernelWatch

    @property
    def flashinfer(self) -> str:
        return self.host.environment.fact("flashinfer.version").value or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelReport:
    """What became of one recipe's kernels. `modules` has a line for each kernel."""

    entries: tuple[EntryReport, ...]
    modules: tuple[ModuleReport, ...]
    warnings: tuple[str, ...]


def targets(
    recipe: Recipe, capabilities: Sequence[tuple[int, int]], archs: Sequence[str], gpus: Sequence[GpuProduct]
) -> list[GpuProduct]:
    """The GPUs of a recipe that a kind has kernels for.

    Args:
        capabilities: those of the kind.
        archs: capabilities with a dot, suffix or not, to which `--arch` narrows; all where empty.
        gpus: products to which `--gpu` narrows; all of the recipe where empty.
    """
    narrowed = [gpu for gpu in recipe.targets.gpus if not gpus or gpu in gpus]
    asked = [arch.rstrip("af") for arch in archs]
    return [gpu for gpu in narrowed if gpu.capability in capabilities and (not asked or gpu.arch in asked)]


def build_kernels(farm: KernelFarm, recipe: Recipe, kind: str, gpus: Sequence[GpuProduct]) -> KernelReport:
    """Builds the kernels of one recipe for some GPUs.

    Raises:
        UsageError: the recipe is for another FlashInfer than the farm has.
        ProbeError, CollectError: the dry run itself failed; see `compile_kernels`.
    """
    check_flashinfer(farm, recipe)
    name = recipe.model.name
    planned = plan_cases(recipe, kind, farm.flashinfer)
    problems = [f"{name} {problem}" for problem in planned.problems]
    if not planned.cases:
        entry = EntryReport(
            kind=kind, arch="", modules=(CUTE_KINDS[kind].module,), status=FAILED, reason="; ".join(problems), model=name
        )
        return KernelReport(entries=(entry,), modules=(), warnings=())
    done = [_build_for(farm, recipe, kind, gpu, planned.cases) for gpu in gpus]
    return KernelReport(
        entries=tuple(entry for one in done for entry in one.entries),
        modules=tuple(module for one in done for module in one.modules),
        warnings=tuple(dict.fromkeys([*problems, *(warning for one in done for warning in one.warnings)])),
    )


def check_flashinfer(farm: KernelFarm, recipe: Recipe) -> None:
    """Refuses a recipe for another FlashInfer than the farm has.

    Raises:
        UsageError
    """
    if farm.flashinfer not in recipe.targets.flashinfer:
        raise UsageError(
            f"{recipe.model.name} is to be built for FlashInfer {', '.join(recipe.targets.flashinfer)}",
            why=f"this Python has {farm.flashinfer or 'none'}",
            remedy="Name another Python with --python, or add the version to targets.flashinfer.",
        )


def _build_for(farm: KernelFarm, recipe: Recipe, kind: str, gpu: GpuProduct, cases: Sequence[Mapping[str, Any]]) -> KernelReport:
    what = f"{recipe.model.name} on {gpu.slug}"
    workspace = farm.work / f"{kind}-{gpu.slug}"
    workspace.mkdir(parents=True, exist_ok=True)
    run = DryRun(
        python=farm.host.paths.interpreter.executable,
        workspace=str(workspace),
        gpu=gpu,
        cuda=recipe.targets.cuda,
        cases=cases,
        environ=farm.environ,
        operation=CUTE_KINDS[kind].operation,
    )
    answer = compile_kernels(run, jobs=farm.jobs, progress=lambda event: farm.watch(what, event["done"], event["total"]))
    kernels = _with_seconds(workspace, answer.kernels)
    arch = cute_dsl_arch(flashinfer_arch(gpu.arch, _pair(recipe.targets.cuda)))
    variants: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        variants.setdefault(str(case["variant"]), []).append(case)
    entries = [_entry(farm, recipe, kind, gpu, arch, answer, kernels, name, own) for name, own in variants.items()]
    return KernelReport(
        entries=tuple(entry for entry in entries if entry is not None),
        modules=tuple(_module(kernel, arch, kind) for kernel in kernels),
        warnings=(
            *(f"{what}: {one.case} at {one.tokens} tokens: {one.error}" for one in answer.errors),
            *(f"{kind} leaves {one.kernel} ({one.where}) to warmup: FlashInfer keeps it nowhere" for one in answer.left_out),
        ),
    )


def _pair(release: str) -> tuple[int, int]:
    major, _, minor = release.partition(".")
    return int(major), int(minor)


def _with_seconds(workspace: Path, kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels with the time that each took, also where an earlier run compiled it."""
    known = kept_seconds(workspace, {kernel.name: kernel.seconds for kernel in kernels if kernel.status == "built"})
    return [replace(kernel, seconds=known.get(kernel.name, kernel.seconds)) for kernel in kernels]


def kept_seconds(workspace: Path, new: Mapping[str, float]) -> dict[str, float]:
    """What each kernel's compilation took, by name, that of earlier runs in this work directory included."""
    path = workspace / _SECONDS
    try:
        known = {str(name): float(seconds) for name, seconds in dict(json.loads(path.read_text())).items()}
    except (OSError, ValueError):
        known = {}
    known |= new
    fsops.write_bytes(path, digest.canonical_json(known))
    return known


def _module(kernel: Kernel, arch: str, kind: str) -> ModuleReport:
    status = {"built": BUILT, "present": UP_TO_DATE}.get(kernel.status, FAILED)
    return ModuleReport(
        module=kernel.kernel,
        arch=arch.removeprefix("sm_"),
        kind=kind,
        status=status,
        seconds=kernel.seconds,
        reason=kernel.reason,
    )


def _entry(  # noqa: PLR0917 -- what one entry is made of
    farm: KernelFarm,
    recipe: Recipe,
    kind: str,
    gpu: GpuProduct,
    arch: str,
    answer: DryRunAnswer,
    kernels: Sequence[Kernel],
    variant: str,
    cases: Sequence[Mapping[str, Any]],
) -> EntryReport | None:
    """One variant's entry; None where nothing of it is kept on disk and so there is nothing to write."""
    ids = {case["id"] for case in cases}
    own = module_directory(CUTE_KINDS[kind].module, arch)
    asked = [kernel for kernel in kernels if ids & kernel.cases.keys() and kernel.module == own]
    finished = [kernel for kernel in asked if kernel.status in ("built", "present")]
    name, module = recipe.model.name, CUTE_KINDS[kind].module
    failed = EntryReport(kind=kind, arch=arch.removeprefix("sm_"), modules=(module,), status=FAILED, model=name, variant=variant)
    if not finished:
        reasons = [f"{kernel.kernel}: {kernel.reason}" for kernel in asked] + [e.error for e in answer.errors if e.case in ids]
        return replace(failed, reason="; ".join(reasons)) if reasons else None
    try:
        sources = {path: fact.value or "" for path, fact in _sources(farm, answer.sources[own]).items()}
        build = KernelBuild(
            kind=kind,
            model=name,
            variant=variant,
            farm=farm.host.environment,
            wheels=farm.wheels,
            cuda=recipe.targets.cuda,
            cute_arch=arch,
            gpu=gpu.describe(),
            sources=sources,
            key_files=answer.sources[own],
            meta=answer.meta[own],
            cases=tuple(cases),
            left_out=tuple(f"{one.kernel} ({one.where})" for one in answer.left_out if ids & set(one.cases)),
        )
        parts = kernel_parts(build, [_built(kernel) for kernel in finished])
        files = {kernel_artifact_path(module, kernel.kernel): Path(kernel.path) for kernel in finished}
        provenance = {"gpu": gpu.slug, "stack": dict(answer.stack), "jobs": farm.jobs, "recipe": recipe.model.source}
        return write_parts(farm.output, parts, files, provenance)
    except KcacheError as error:
        return replace(failed, reason=str(error))


def _sources(farm: KernelFarm, key_files: Sequence[str]) -> Mapping[str, Any]:
    found = hash_sources(farm.host.paths.flashinfer, dict.fromkeys(key_files))
    if unread := [path for path, fact in found.items() if not fact.known]:
        raise CollectError(f"{unread[0]} of FlashInfer could not be read", why=found[unread[0]].describe())
    return found


def _built(kernel: Kernel) -> BuiltKernel:
    return BuiltKernel(
        name=kernel.kernel,
        size=kernel.size,
        sha256=kernel.sha256,
        elf=object_facts(Path(kernel.path)),
        seconds=kernel.seconds,
    )
