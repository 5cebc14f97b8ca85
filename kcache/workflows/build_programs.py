"""Compiles the programs of the package b12x that build manifests ask for, and writes them down as entries: one for each model,
layout of ranks and GPU.

The farm needs b12x, torch and Triton, no GPU: a child process asks b12x's plans for their jobs and runs them on a described GPU
(`kcache.workflows.b12x_build`). A program that fails costs only itself: the entry holds the others, and the build is partial.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kcache.archs import cute_dsl_arch, flashinfer_arch
from kcache.errors import CollectError, KcacheError
from kcache.gpu_products import GpuProduct
from kcache.kinds.b12x_compile import Program, collect
from kcache.kinds.b12x_entry import ProgramBuild, program_parts
from kcache.kinds.b12x_key import TOOL_VARIABLES
from kcache.kinds.b12x_kinds import B12X_KINDS
from kcache.kinds.triton_groups import Group, collect_groups
from kcache.probe.binary import object_facts
from kcache.program_facts import MODULE, program_paths
from kcache.recipe import Recipe
from kcache.values import dataclass
from kcache.workflows.b12x_build import BuiltProgram, ProgramAnswer, ProgramRun, compile_programs, program_cases, refused_shapes
from kcache.workflows.b12x_host import triton_facts
from kcache.workflows.b12x_target import described_target, host_package
from kcache.workflows.build_entries import BUILT, FAILED, UP_TO_DATE, EntryReport, ModuleReport, write_parts
from kcache.workflows.build_environ import program_environ
from kcache.workflows.build_kernels import KernelFarm, KernelReport, check_flashinfer, kept_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """One recipe on one GPU: what was asked for, and what became of it."""

    farm: KernelFarm
    recipe: Recipe
    kind: str
    gpu: GpuProduct
    arch: str
    run: ProgramRun
    answer: ProgramAnswer
    seconds: Mapping[str, float]


def build_programs(farm: KernelFarm, recipe: Recipe, kind: str, gpus: Sequence[GpuProduct]) -> KernelReport:
    """Builds the programs of one recipe for some GPUs.

    Raises:
        UsageError: the recipe is for another FlashInfer than the farm has.
        ProbeError, CollectError: this b12x is not as expected, or the child gave no answer.
    """
    check_flashinfer(farm, recipe)
    name = recipe.model.name
    problems = [f"{name} {problem.shape.name} is not for {kind}: {problem.why}" for problem in refused_shapes(recipe)]
    cases = program_cases(recipe)
    if not cases:
        entry = EntryReport(kind=kind, arch="", modules=(MODULE,), status=FAILED, reason="; ".join(problems), model=name)
        return KernelReport(entries=(entry,), modules=(), warnings=())
    done = [_build_for(farm, recipe, kind, gpu, cases) for gpu in gpus]
    return KernelReport(
        entries=tuple(entry for one in done for entry in one.entries),
        modules=tuple(module for one in done for module in one.modules),
        warnings=tuple(dict.fromkeys([*problems, *(warning for one in done for warning in one.warnings)])),
    )


def _build_for(farm: KernelFarm, recipe: Recipe, kind: str, gpu: GpuProduct, cases: Sequence[dict[str, Any]]) -> KernelReport:
    what = f"{recipe.model.name} on {gpu.slug}"
    place = farm.work / f"b12x-{gpu.slug}"
    for directory in (place, place / "compile", place / "triton"):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    environ = program_environ(farm.environ, TOOL_VARIABLES)
    run = ProgramRun(
        python=farm.host.paths.interpreter.executable,
        gpu=gpu,
        cases=cases,
        environ=environ,
        compile_cache=str(place / "compile"),
        triton_cache=str(place / "triton"),
        cuda=recipe.targets.cuda,
        configurations=B12X_KINDS[kind].configurations,
    )
    answer = compile_programs(run, jobs=farm.jobs, progress=lambda event: farm.watch(what, event["done"], event["total"]))
    major, minor = (int(part) for part in recipe.targets.cuda.split("."))
    took = {program.key: program.seconds for program in answer.programs if program.status == "built"}
    work = _Work(
        farm=farm,
        recipe=recipe,
        kind=kind,
        gpu=gpu,
        arch=cute_dsl_arch(flashinfer_arch(gpu.arch, (major, minor))),
        run=run,
        answer=answer,
        seconds=kept_seconds(place, took),
    )
    refused = [(case.case, tokens, why) for case in answer.cases for tokens, why in case.refused]
    return KernelReport(
        entries=tuple(_entry(work, case) for case in cases),
        modules=tuple(_module(work, program) for program in answer.programs),
        warnings=tuple(f"{what}: {case} at {tokens} tokens: {why}" for case, tokens, why in refused),
    )


def _module(work: _Work, program: BuiltProgram) -> ModuleReport:
    return ModuleReport(
        module=f"{program.name} {program.key[:12]}",
        arch=work.arch.removeprefix("sm_"),
        kind=work.kind,
        status={"built": BUILT, "present": UP_TO_DATE}.get(program.status, FAILED),
        seconds=work.seconds.get(program.key, program.seconds),
        reason=program.reason,
    )


def _entry(work: _Work, case: Mapping[str, Any]) -> EntryReport:
    """One variant's entry."""
    variant = str(case["id"])
    asked = [program for program in work.answer.programs if variant in program.cases]
    finished = [program for program in asked if program.status in ("built", "present")]
    try:
        if not any(program.dialect == "cute" for program in finished):
            reasons = [f"{program.name}: {program.reason}" for program in asked if program.reason]
            reasons += [why for one in work.answer.cases if one.case == variant for _, why in one.refused]
            raise CollectError("no program was compiled", why="; ".join(dict.fromkeys(reasons)))
        return _write(work, case, finished)
    except KcacheError as error:
        return EntryReport(
            kind=work.kind,
            arch=work.arch.removeprefix("sm_"),
            modules=(MODULE,),
            status=FAILED,
            reason=str(error),
            model=work.recipe.model.name,
            variant=variant,
        )


def _write(work: _Work, case: Mapping[str, Any], finished: Sequence[BuiltProgram]) -> EntryReport:
    programs, groups = _collected(work, finished)
    root, cache = Path(work.answer.compile_cache), Path(work.answer.triton_cache)
    host = work.farm.host
    package = host_package(host.paths.interpreter)
    target = described_target(host.paths.interpreter, package, work.gpu, machine=os.uname().machine, environ=work.run.environ)
    triton = triton_facts(target, host.paths.packages)
    build = ProgramBuild(
        kind=work.kind,
        model=work.recipe.model.name,
        variant=str(case["id"]),
        farm=host.environment,
        target=target,
        package=package.files,
        cuda=work.recipe.targets.cuda,
        cute_arch=work.arch,
        gpu=work.gpu.describe(),
        cases=(case,),
        configurations=work.run.configurations,
        triton=triton.triton,
        switches=triton.switches,
        # Programs of one job are compiled one after another, and each is told the job's time: a time counts once.
        seconds=sum({work.seconds.get(program.key, 0.0) for program in finished}),
    )
    parts = program_parts(build, programs, {one.key: object_facts(root / one.path) for one in programs}, groups)
    files = {f"{group.directory}/{name}": cache / group.directory / name for group in groups for name in group.files}
    for program in programs:
        object_path, manifest_path = program_paths(program.key)
        files[object_path], files[manifest_path] = root / program.path, (root / program.path).with_suffix(".json")
    provenance = {"gpu": work.gpu.slug, "b12x": package.root, "jobs": work.farm.jobs, "recipe": work.recipe.model.source}
    return write_parts(work.farm.output, parts, files, provenance)


def _collected(work: _Work, finished: Sequence[BuiltProgram]) -> tuple[tuple[Program, ...], tuple[Group, ...]]:
    """The finished programs' files, verified.

    Raises:
        CollectError: one of them is not what it was said to be.
    """
    keys = {program.key for program in finished if program.dialect == "cute"}
    found = collect(Path(work.answer.compile_cache), only=keys)
    names = {program.key for program in finished}
    wanted = work.answer.triton_groups()
    own = {program.path.rpartition("/")[2] for program in finished if program.dialect == "triton" and program.key in names}
    groups, left_out = collect_groups(Path(work.answer.triton_cache), {d: name for d, name in wanted.items() if d in own})
    if lost := [*found.left_out, *left_out]:
        raise CollectError(f"{lost[0].path} was compiled and cannot be collected", why=lost[0].why)
    return found.programs, groups
