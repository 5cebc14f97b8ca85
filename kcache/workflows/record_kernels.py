"""Record mode's CuTe-DSL kernels: what a program left in FlashInfer's cache, made into entries as if it had been built.

The files alone do not say which sources FlashInfer keys a module by, only their digest. So FlashInfer is asked, by the dry run of
a kind that has the module, what it expects in the module's `meta.json`: if that is what lies there, the sources are known and
the objects are theirs. Kernels are then asked for by name (`recorded_calls.py`), since the calls that made them are not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kcache import digest
from kcache.archs import arch_list_entry, cute_dsl_arch
from kcache.errors import CollectError, KcacheError
from kcache.gpu_products import GpuProduct, find_product, product
from kcache.kernel_facts import kernel_artifact_path, kernels_digest
from kcache.key import ARCH
from kcache.kinds.cute_dsl import module_directory
from kcache.kinds.cute_entry import BuiltKernel, KernelBuild, kernel_parts
from kcache.kinds.cute_kinds import CUTE_KINDS
from kcache.probe.binary import object_facts
from kcache.probe.host import Host, hash_sources
from kcache.probe.wheels import compiler_wheels
from kcache.recipe_gdn import GDN_KINDS, GdnModel, gdn_cases
from kcache.values import dataclass
from kcache.workflows.build_entries import EntryReport, write_parts
from kcache.workflows.cute_build import DryRun, DryRunAnswer, name_kernels
from kcache.workflows.recorded import Recorded

RECORDED = "recorded"
"""The dry run's operation for kernels that are asked for by name."""

_B12X: Mapping[str, Any] = {
    "id": "probe", "experts": 8, "local_experts": 8, "top_k": 2, "hidden": 256, "inter": 768, "activation": "silu",
    "swiglu": None, "quant": "nvfp4", "scales": "per_expert", "calls": "wrapper", "maximum": 64, "tokens": [1],
}  # fmt: skip
"""A call that asks for one kernel of the module; which one does not matter, its module's sources are wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecorder:
    """What is equal for all kernels of one recording.

    host:    the Python that has the program's FlashInfer. gpu: the GPU that the program compiled for.
    environ: the program's. work: where FlashInfer is asked, empty of kernels.
    cuda:    the CUDA release of the host.
    """

    host: Host
    gpu: GpuProduct
    environ: Mapping[str, str]
    work: Path
    output: Path
    cuda: str


def kernel_recorder(host: Host, gpu: str, *, environ: Mapping[str, str], work: Path, output: Path) -> KernelRecorder:
    """What a recording asks with.

    Args:
        gpu: the product that somebody named; empty for the GPU of this host.

    Raises:
        CollectError: the GPU or the CUDA release is not known. UsageError: there is no such product.
    """
    found = product(gpu) if gpu else recorded_gpu(host)
    return KernelRecorder(host=host, gpu=found, environ=environ, work=work, output=output, cuda=cuda_release(host))


def recorded_gpu(host: Host) -> GpuProduct:
    """The GPU of this host, as far as kernels depend on it.

    Raises:
        CollectError: it is not known: several kinds of GPU, none, or one whose SM count the driver does not say.
    """
    kinds = {(gpu.name, gpu.capability, gpu.sm_count) for gpu in host.gpus.gpus}
    if len(kinds) == 1:
        ((name, capability, sm_count),) = kinds
        if (known := find_product(name)) is not None:
            return known
        if sm_count is not None:
            return GpuProduct(
                slug="recorded", name=name, capability=capability, sm_count=sm_count, memory_bytes=0, l2_bytes=0, source="NVML"
            )
    found = "; ".join(sorted(name for name, _, _ in kinds)) or "none"
    raise CollectError(
        "it is not known for which GPU the kernels were compiled", why=f"GPUs here: {found}", remedy="Name it with --gpu."
    )


def cuda_release(host: Host) -> str:
    """The CUDA release of the program's runtime, such as `13.0`.

    Raises:
        CollectError: it is not known to its minor version.
    """
    found = re.match(r"\d+\.\d+", host.environment.fact("cuda.runtime").value or "")
    if found is None:
        raise CollectError("the CUDA release is not known", why=host.environment.fact("cuda.runtime").describe())
    return found[0]


def pack_kernels(
    recorder: KernelRecorder, found: Sequence[Recorded], leave: Callable[[Recorded, str, bool], None]
) -> list[EntryReport]:
    """The entries of modules that are whole.

    Args:
        leave: takes one that is left out: why, and whether it is broken rather than not known.
    """
    entries = []
    for one in found:
        kind = _kind(one)
        if kind is None:
            leave(one, "kcache does not know which sources FlashInfer keys this module by", False)
            continue
        try:
            entries.append(_pack(recorder, one, kind))
        except (KcacheError, OSError) as error:
            leave(one, str(error), True)
    return entries


def _kind(one: Recorded) -> str | None:
    names = {module_directory(about.module, cute_dsl_arch(one.arch)): kind for kind, about in CUTE_KINDS.items()}
    return names.get(one.name) if ARCH.fullmatch(one.arch) else None


def _pack(recorder: KernelRecorder, one: Recorded, kind: str) -> EntryReport:
    module, arch = CUTE_KINDS[kind].module, cute_dsl_arch(one.arch)
    answer = _ask(recorder, kind, one.arch)
    if one.name not in answer.meta:
        raise CollectError(f"this FlashInfer keeps no kernels of {module} on disk")
    _check_meta(one.path, answer.meta[one.name])
    kernels = [_read(path) for path in sorted(one.path.glob("*.o")) if path.is_file() and not path.is_symlink()]
    paths = tuple(kernel_artifact_path(module, kernel.name) for kernel in kernels)
    names = [kernel.name for kernel in kernels]
    case = {
        "id": RECORDED,
        "operation": RECORDED,
        "module": module,
        "key_files": list(answer.sources[one.name]),
        "kernels": names,
        "tvm_ffi": answer.meta[one.name].get("tvm_ffi", True),
        "tokens": list(range(len(names))),
    }
    sources = hash_sources(recorder.host.paths.flashinfer, dict.fromkeys(answer.sources[one.name]))
    build = KernelBuild(
        kind=kind,
        model="",
        # Each recording is an entry of its own: none stands for another.
        variant=f"{RECORDED}-{kernels_digest(paths).removeprefix('sha256:')[:8]}",
        farm=recorder.host.environment,
        wheels=compiler_wheels(recorder.host.paths.packages),
        cuda=recorder.cuda,
        cute_arch=arch,
        gpu=recorder.gpu.describe(),
        sources={path: fact.value or "" for path, fact in sources.items()},
        key_files=answer.sources[one.name],
        meta=answer.meta[one.name],
        cases=(case,),
        left_out=(),
    )
    files = {path: one.path / f"{kernel.name}.o" for path, kernel in zip(paths, kernels, strict=True)}
    provenance = {"gpu": recorder.gpu.name, "stack": dict(answer.stack), RECORDED: True}
    return write_parts(recorder.output, kernel_parts(build, kernels), files, provenance)


def _ask(recorder: KernelRecorder, kind: str, arch: str) -> DryRunAnswer:
    """What FlashInfer expects in the `meta.json` of a kind's module, and which sources that is made of."""
    cases: Sequence[Mapping[str, Any]] = [_B12X]
    if kind in GDN_KINDS:
        model = GdnModel(name="probe", source="probe", heads=16, value_heads=32)
        cases = gdn_cases(kind, model, counts=(1,), drafted=(2,), dt_bias=("float32",))
    return name_kernels(
        DryRun(
            python=recorder.host.paths.interpreter.executable,
            workspace=str(recorder.work),
            gpu=recorder.gpu,
            cuda=recorder.cuda,
            cases=cases,
            environ=recorder.environ,
            operation=CUTE_KINDS[kind].operation,
            arch_list=arch_list_entry(arch),
        )
    )


def _check_meta(directory: Path, expected: Mapping[str, Any]) -> None:
    try:
        found = json.loads((directory / "meta.json").read_bytes())
    except (OSError, ValueError) as error:
        raise CollectError("it has no meta.json that can be read", why=str(error)) from error
    if found != dict(expected):
        differing = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise CollectError("its meta.json is not what this FlashInfer expects", why=f"differs: {', '.join(differing)}")


def _read(path: Path) -> BuiltKernel:
    sha256, size = digest.of_file(str(path))
    return BuiltKernel(name=path.stem, size=size, sha256=sha256, elf=object_facts(path), seconds=0.0)
