"""The jobs that build manifests ask for, less those whose entries a store has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath

from kcache.archs import arch_list_entry, cute_dsl_arch, flashinfer_arch
from kcache.gpu_products import GpuProduct
from kcache.index import IndexEntry
from kcache.key import AUTOTUNE
from kcache.kinds.b12x_kinds import B12X_KINDS
from kcache.kinds.cute_kinds import CUTE_KINDS
from kcache.plan import Job, Plan, cost, is_missing, spread
from kcache.recipe import Recipe
from kcache.recipe_cases import plan_cases
from kcache.store.base import Store
from kcache.values import dataclass, replace
from kcache.workflows.build import KINDS
from kcache.workflows.build_kernels import targets
from kcache.workflows.catalog import list_environments, read_index_at


def make_plan(
    recipes: Sequence[tuple[str, Recipe]],
    store: Store | None,
    *,
    machine: str,
    kinds: Sequence[str] = (),
    flashinfer: str = "",
    shards: int | None = None,
    needs: str = "",
) -> Plan:
    """The plan of some manifests.

    Args:
        recipes: path, as commands name it, and recipe.
        store: leave out what it has, and learn costs from it; None to plan everything.
        machine: of the servers, as `uname -m` says it.
        kinds, flashinfer: only these, where they are given.
        shards: into how many parts; None for one for each job. Jobs that need a GPU share none with others.
        needs: `cpu` for jobs that need no GPU, or the product that they need; empty for all.

    Raises:
        StoreError, IntegrityError, ManifestError: the store cannot be read, or what it says cannot be used.
    """
    entries = _published(store) if store is not None else []
    found: dict[str, Job] = {}
    left_out: list[str] = []
    for path, recipe in recipes:
        for version in recipe.targets.flashinfer:
            if not flashinfer or version == flashinfer:
                asked = [kind for kind in recipe.kinds if not kinds or kind in kinds]
                made, reasons = _jobs(_Source(path=path, recipe=recipe, flashinfer=version, machine=machine), asked)
                found |= {job.name: job for job in made}
                left_out += reasons
    missing = [job for _, job in sorted(found.items()) if is_missing(job, entries)]
    present = len(found) - len(missing)
    costs = {job.name: cost(job, entries) for job in missing}
    missing = [replace(job, after=tuple(name for name in job.after if name in costs)) for job in missing]
    missing = [job for job in missing if needs in ("", job.needs or "cpu")]
    costs = {job.name: costs[job.name] for job in missing}
    parts = []
    for gpu in sorted({job.needs for job in missing}):
        alike = {job.name: costs[job.name].seconds for job in missing if job.needs == gpu}
        parts += spread(alike, shards or len(alike))
    return Plan(
        jobs=tuple(missing),
        costs=costs,
        shards=tuple(tuple(part) for part in parts),
        left_out=tuple(dict.fromkeys(left_out)),
        present=present,
    )


def _published(store: Store) -> list[IndexEntry]:
    paths = list_environments(store)
    return [entry for path in paths for entry in read_index_at(store, path).entries]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """One manifest, at its path, for one FlashInfer version and one machine."""

    path: str
    recipe: Recipe
    flashinfer: str
    machine: str

    @property
    def release(self) -> tuple[int, int]:
        major, minor = (int(part) for part in self.recipe.targets.cuda.split("."))
        return major, minor


def _jobs(source: _Source, kinds: Sequence[str]) -> tuple[list[Job], list[str]]:
    """The jobs of these kinds, and what none of them builds."""
    recipe = source.recipe
    jobs: list[Job] = []
    left_out: list[str] = []
    for kind in kinds:
        if kind in KINDS:  # the same for every model: a job for each architecture
            names = (*recipe.targets.arches, *(gpu.arch for gpu in recipe.targets.gpus))
            jobs += [_module_job(source, kind, arch) for arch in sorted({flashinfer_arch(n, source.release) for n in names})]
        elif kind in CUTE_KINDS:
            planned = plan_cases(recipe, kind, source.flashinfer)
            left_out += [f"{kind} of {recipe.model.name}: {problem}" for problem in planned.problems]
            variants = tuple(sorted({str(case["variant"]) for case in planned.cases if "variant" in case}))
            gpus = targets(recipe, CUTE_KINDS[kind].capabilities, (), ()) if planned.cases else []
            jobs += [_kernel_job(source, kind, gpu, variants) for gpu in gpus]
        elif kind in B12X_KINDS:
            jobs += [_kernel_job(source, kind, gpu, ()) for gpu in targets(recipe, B12X_KINDS[kind].capabilities, (), ())]
    if AUTOTUNE in kinds:
        jobs += [_tuning_job(source, gpu, jobs) for gpu in recipe.targets.gpus]
    return jobs, left_out


def _module_job(source: _Source, kind: str, arch: str) -> Job:
    name = f"{kind}-{arch}-flashinfer-{source.flashinfer}"
    return Job(
        name=name,
        kind=kind,
        model="",
        flashinfer=source.flashinfer,
        cuda=source.recipe.targets.cuda,
        machine=source.machine,
        arch=arch,
        gpu="",
        sm_count="",
        variants=(),
        command=("kcache", "build", "--kinds", kind, "--arch", arch_list_entry(arch), "-o", f"entries/{name}"),
    )


def _kernel_job(source: _Source, kind: str, gpu: GpuProduct, variants: tuple[str, ...]) -> Job:
    name = _name(source, kind, gpu)
    return Job(
        name=name,
        kind=kind,
        model=source.recipe.model.name,
        flashinfer=source.flashinfer,
        cuda=source.recipe.targets.cuda,
        machine=source.machine,
        arch=cute_dsl_arch(flashinfer_arch(gpu.arch, source.release)).removeprefix("sm_"),
        gpu=gpu.slug,
        sm_count=str(gpu.sm_count),
        variants=variants,
        command=("kcache", "build", "--manifest", source.path, "--kinds", kind, "--gpu", gpu.slug, "-o", f"entries/{name}"),
    )


def _name(source: _Source, kind: str, gpu: GpuProduct) -> str:
    stem = re.sub(r"[^A-Za-z0-9.-]", "-", PurePath(source.path).stem)
    return f"{kind}-{gpu.slug}-{stem}-flashinfer-{source.flashinfer}"


def _tuning_job(source: _Source, gpu: GpuProduct, others: Sequence[Job]) -> Job:
    """Measuring on one GPU, after what compiles for it."""
    name = _name(source, AUTOTUNE, gpu)
    arch = flashinfer_arch(gpu.arch, source.release)
    return Job(
        name=name,
        kind=AUTOTUNE,
        model=source.recipe.model.name,
        flashinfer=source.flashinfer,
        cuda=source.recipe.targets.cuda,
        machine=source.machine,
        arch=cute_dsl_arch(arch).removeprefix("sm_"),
        gpu=gpu.slug,
        sm_count=str(gpu.sm_count),
        variants=(),
        command=("kcache", "build", "--manifest", source.path, "--kinds", AUTOTUNE, "-o", f"entries/{name}"),
        after=tuple(job.name for job in others if job.gpu == gpu.slug or (not job.gpu and job.arch == arch)),
    )
