"""`kcache build`: what manifests, kinds and modules ask for, each kind in its own way, in one report."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kcache import fsops
from kcache.archs import arch_list_entry
from kcache.errors import KcacheError, UsageError
from kcache.gpu_products import GpuProduct, product
from kcache.key import AUTOTUNE, Environment
from kcache.kinds.b12x_kinds import B12X_KINDS
from kcache.kinds.cute_kinds import CUTE_KINDS
from kcache.manifest import parse_manifest
from kcache.match import match_key
from kcache.probe.host import probe_host
from kcache.probe.limits import Jobs, build_jobs
from kcache.probe.wheels import compiler_wheels
from kcache.program_facts import MODULE
from kcache.recipe import Recipe
from kcache.workflows.build import KINDS, BuildReport, BuildRequest, Watch, build, work_directory
from kcache.workflows.build_entries import FAILED, EntryReport
from kcache.workflows.build_environ import kernel_environ
from kcache.workflows.build_kernels import KernelFarm, KernelReport, KernelWatch, build_kernels, targets
from kcache.workflows.resolve import SHOWN_CHECKS
from kcache.workflows.target import Target, TargetRequest, find_target

_LOCK_SECONDS = 5.0

_CAPABILITIES = {
    **{kind: about.capabilities for kind, about in CUTE_KINDS.items()},
    **{kind: about.capabilities for kind, about in B12X_KINDS.items()},
}
"""Kinds that are compiled for one GPU's facts, with the compute capabilities that have such kernels."""


def run_build(request: BuildRequest, environ: Mapping[str, str], watch: Watch, kernel_watch: KernelWatch) -> BuildReport:
    """Builds what manifests, kinds and modules name, for this farm's own environment or for a saved one.

    A farm may build for an environment that is not its own as long as what its entries depend on is equal there. Whether it is
    is asked of the rules that a restore applies: an entry that would be refused there counts as failed, with the reason.

    Raises:
        UsageError: nothing is left to build, or a manifest is for another FlashInfer. Otherwise as `build`.
    """
    if request.collect:
        return _collect(request, environ)
    there = request.environment
    if there is not None and not request.archs:
        request = replace(request, archs=tuple(arch_list_entry(arch) for arch in there.archs))
    report = _build_manifests(request, environ, watch, kernel_watch) if request.recipes else build(request, environ, watch)
    return report if there is None else replace(report, entries=tuple(_checked(entry, there) for entry in report.entries))


def _checked(entry: EntryReport, there: Environment) -> EntryReport:
    """The entry, failed if the environment that it was built for would refuse it."""
    if entry.status == FAILED:
        return entry
    manifest = parse_manifest(Path(entry.manifest).read_bytes(), entry.manifest)
    differs = (*match_key(manifest.key, there).differs, *Target(there).decide(manifest).differs)
    if not differs:
        return entry
    why = "; ".join(check.describe() for check in differs[:SHOWN_CHECKS])
    return replace(entry, status=FAILED, reason=f"the environment that it is for would refuse it: {why}")


def _build_manifests(request: BuildRequest, environ: Mapping[str, str], watch: Watch, kernel_watch: KernelWatch) -> BuildReport:
    """Everything that the manifests ask for; kinds, architectures and GPUs of the request narrow it."""
    started = time.monotonic()
    if request.modules:
        raise UsageError("--modules and --manifest do not go together", remedy="Build single modules in a command of their own.")
    asked = request.kinds or tuple(dict.fromkeys(kind for recipe in request.recipes for kind in recipe.kinds))
    gpus = [product(name) for name in request.gpus]
    tuned, warnings = _tuned(request, asked, environ, kernel_watch)
    kernels = _kernels(request, asked, gpus, environ, kernel_watch)
    modules = _modules(request, asked, gpus, environ, watch)
    if kernels is None and modules is None and not tuned:
        where = ", ".join(request.gpus or request.archs) or "what the manifests are for"
        raise UsageError(
            "nothing is left to build",
            why=f"kinds {', '.join(asked) or 'none'} for {where}",
            remedy="Compare --kinds, --arch and --gpu with what the manifests say.",
        )
    done = kernels or KernelReport(entries=(), modules=(), warnings=())
    return BuildReport(
        entries=(*tuned, *done.entries, *(modules.entries if modules else ())),
        modules=(*done.modules, *(modules.modules if modules else ())),
        warnings=(*warnings, *done.warnings, *(modules.warnings if modules else ())),
        output=request.output,
        jobs=modules.jobs if modules is not None else _jobs(request, environ),
        seconds=time.monotonic() - started,
        toolkit=modules.toolkit if modules else None,
        facts=modules.facts if modules else {},
    )


def _collect(request: BuildRequest, environ: Mapping[str, str]) -> BuildReport:
    """Entries of directories with results of the tuner, which were made on this host or on one that --gpu describes."""
    from kcache.workflows.build_tunings import collect_tunings

    started = time.monotonic()
    if request.recipes or request.modules or request.environment or set(request.kinds) - {AUTOTUNE}:
        raise UsageError(
            "--collect makes entries of tuning results alone", remedy="Build everything else in a command of its own."
        )
    target = find_target(TargetRequest(python=request.python, archs=request.archs, gpus=request.gpus), environ)
    done = collect_tunings(request.collect, target, request.output)
    return BuildReport(
        entries=done.entries,
        modules=(),
        warnings=tuple(f"left out: {one.path}: {one.why}" for one in done.left_out),
        output=request.output,
        jobs=Jobs(jobs=1, reason="nothing is compiled"),
        seconds=time.monotonic() - started,
        toolkit=None,
        facts={"flashinfer": target.environment.fact("flashinfer.version").value},
    )


def _tuned(
    request: BuildRequest, asked: Sequence[str], environ: Mapping[str, str], watch: KernelWatch
) -> tuple[tuple[EntryReport, ...], list[str]]:
    """Tuning on this host's GPUs; where it has none, that is told, and an error only if nothing else was asked for."""
    recipes = [recipe for recipe in request.recipes if AUTOTUNE in recipe.kinds]
    if AUTOTUNE not in asked or not recipes:
        return (), []
    from kcache.workflows.build_tuned import TuningFarm, build_tuned, require_gpu
    from kcache.workflows.target import TargetRequest, find_target

    host = probe_host(python=request.python, described_archs=(), environ=environ)
    try:
        require_gpu(host)
    except UsageError as error:
        if set(asked) == {AUTOTUNE}:
            raise
        return (), [f"{error.what}; {error.remedy}"]
    directory = work_directory(request.output, request.work_dir) / "tuning"
    directory.mkdir(exist_ok=True)
    with fsops.locked(directory / "lock", _LOCK_SECONDS):
        farm = TuningFarm(
            host=host,
            target=find_target(TargetRequest(python=request.python), environ),
            environ=environ,
            output=request.output,
            work=Path(os.path.realpath(directory)),
            again=request.retune,
            watch=watch,
        )
        done = [build_tuned(farm, recipe) for recipe in recipes]
    return tuple(entry for entries, _ in done for entry in entries), [text for _, texts in done for text in texts]


def _jobs(request: BuildRequest, environ: Mapping[str, str]) -> Jobs:
    return build_jobs(environ) if request.jobs is None else Jobs(jobs=request.jobs, reason="--jobs")


def _modules(
    request: BuildRequest, asked: Sequence[str], gpus: Sequence[GpuProduct], environ: Mapping[str, str], watch: Watch
) -> BuildReport | None:
    """nvcc modules: a kind's are the same for every model, so each architecture is built once."""
    kinds = tuple(kind for kind in asked if kind in KINDS)
    archs: dict[str, None] = {}
    for recipe in request.recipes:
        if set(kinds) & set(recipe.kinds) or request.kinds:
            archs |= dict.fromkeys(
                (*recipe.targets.arches, *(gpu.arch for gpu in recipe.targets.gpus if not gpus or gpu in gpus))
            )
    if not kinds or not (request.archs or archs):
        return None
    return build(replace(request, kinds=kinds, archs=request.archs or tuple(archs)), environ, watch)


def _kernels(
    request: BuildRequest, asked: Sequence[str], gpus: Sequence[GpuProduct], environ: Mapping[str, str], watch: KernelWatch
) -> KernelReport | None:
    work = [
        (recipe, kind, found)
        for recipe in request.recipes
        for kind in asked
        if kind in _CAPABILITIES and (kind in recipe.kinds or request.kinds)
        if (found := targets(recipe, _CAPABILITIES[kind], request.archs, gpus))
    ]
    if not work:
        return None
    directory = work_directory(request.output, request.work_dir) / "kernels"
    directory.mkdir(exist_ok=True)
    with fsops.locked(directory / "lock", _LOCK_SECONDS):
        host = probe_host(python=request.python, described_archs=[work[0][2][0].arch], environ=environ)
        farm = KernelFarm(
            host=host,
            wheels=compiler_wheels(host.paths.packages),
            environ=kernel_environ(environ),
            output=request.output,
            work=Path(os.path.realpath(directory)),
            jobs=_jobs(request, environ).jobs,
            watch=watch,
        )
        done = [_one(farm, recipe, kind, found, alone=len(work) == 1) for recipe, kind, found in work]
    return KernelReport(
        entries=tuple(entry for one in done for entry in one.entries),
        modules=tuple(module for one in done for module in one.modules),
        warnings=tuple(dict.fromkeys(warning for one in done for warning in one.warnings)),
    )


def _one(farm: KernelFarm, recipe: Recipe, kind: str, gpus: Sequence[GpuProduct], *, alone: bool) -> KernelReport:
    """One recipe; among several, one that cannot be built at all does not stop the others."""
    try:
        if kind in CUTE_KINDS:
            return build_kernels(farm, recipe, kind, gpus)
        from kcache.workflows.build_programs import build_programs

        return build_programs(farm, recipe, kind, gpus)
    except KcacheError as error:
        if alone:
            raise
        module = CUTE_KINDS[kind].module if kind in CUTE_KINDS else MODULE
        entry = EntryReport(kind=kind, arch="", modules=(module,), status=FAILED, reason=str(error), model=recipe.model.name)
        return KernelReport(entries=(entry,), modules=(), warnings=())
