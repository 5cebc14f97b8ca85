"""CuTe-DSL kernels of FlashInfer: from the facts of a build to the parts of a manifest. Pure: values in, values out.

Refuses what would be a lie: an object for another machine or architecture than its key says, an ingredient that could not be
found out. Nothing here compiles or touches a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kcache.errors import CollectError
from kcache.kernel_facts import COMPILER, KernelFacts, Wheel, kernel_artifact_path, kernels_digest, wheels_digest
from kcache.key import CUTE_DSL, EntryKey, Environment
from kcache.kinds.cute_kinds import CUTE_KINDS
from kcache.kinds.nvcc_modules import EntryParts, required
from kcache.manifest import Artifact, ElfFacts, sources_digest


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltKernel:
    """One kernel as it was compiled.

    name:    of its object file, without `.o`.
    size, sha256, elf: of the object, bytes and digest.
    seconds: that its compilation took.
    """

    name: str
    size: int
    sha256: str
    elf: ElfFacts
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelBuild:
    """What all kernels of one entry share.

    farm:      the environment that compiled: version of FlashInfer, tvm-ffi, machine, Python.
    wheels:    the compiler's distributions on it, by normalised name.
    cuda:      the CUDA release that the kernels are named for, such as `13.0`.
    cute_arch: such as `sm_120a`.
    gpu:       the described GPU.
    sources:   FlashInfer's key sources, inside its package -> digest; `key_files` the same, as often as it lists them.
    meta:      the `meta.json` of the farm.
    cases:     the calls that asked for the kernels.
    left_out:  kernels that the calls need and that FlashInfer keeps nowhere.
    """

    kind: str
    model: str
    variant: str
    farm: Environment
    wheels: Mapping[str, Wheel]
    cuda: str
    cute_arch: str
    gpu: Mapping[str, Any]
    sources: Mapping[str, str]
    key_files: tuple[str, ...]
    meta: Mapping[str, Any]
    cases: tuple[Mapping[str, Any], ...]
    left_out: tuple[str, ...]


def kernel_parts(build: KernelBuild, kernels: Sequence[BuiltKernel]) -> EntryParts:
    """The parts of one entry.

    Raises:
        CollectError: an entry with this key would not be true; the message names the kernel and the field.
    """
    module = CUTE_KINDS[build.kind].module
    if not kernels:
        raise CollectError(f"an entry of kind {build.kind} without kernels")
    machine = required("platform.machine", build.farm.fact("platform.machine"))
    ordered = sorted(kernels, key=lambda kernel: kernel.name)
    for kernel in ordered:
        _check_object(kernel, machine, build.cute_arch)
    _check_compiler(build)
    paths = tuple(kernel_artifact_path(module, kernel.name) for kernel in ordered)
    ingredients = {
        "platform.machine": machine,
        "flashinfer.version": required("flashinfer.version", build.farm.fact("flashinfer.version")),
        "flashinfer.sources": sources_digest(build.sources),
        "cuda.release": build.cuda,
        "gpu.cute_arch": build.cute_arch,
        "gpu.sm_count": str(build.gpu["sm_count"]),
        "tvm_ffi.version": required("tvm_ffi.version", build.farm.fact("tvm_ffi.version")),
        "cutlass_dsl.wheels": wheels_digest(build.wheels),
        "kernels": kernels_digest(paths),
    }
    return EntryParts(
        key=EntryKey(
            kind=build.kind,
            modules=(module,),
            ingredients=ingredients,
            layout=CUTE_DSL,
            model=build.model,
            variant=build.variant,
        ),
        artifacts=tuple(
            Artifact(path=path, size=kernel.size, sha256=kernel.sha256, elf=kernel.elf)
            for path, kernel in zip(paths, ordered, strict=True)
        ),
        sources=build.sources,
        build_seconds={module: round(sum(kernel.seconds for kernel in ordered), 3)},
        kernels=KernelFacts(
            module=module,
            tvm_ffi=build.meta.get("tvm_ffi", True) is True,
            key_files=build.key_files,
            wheels=build.wheels,
            python=required("python.abi", build.farm.fact("python.abi")),
            meta=build.meta,
            gpu=build.gpu,
            cases=build.cases,
            left_out=build.left_out,
        ),
    )


def _check_object(kernel: BuiltKernel, machine: str, cute_arch: str) -> None:
    if kernel.elf.machine != machine:
        raise CollectError(f"{kernel.name} was compiled for {kernel.elf.machine}, not for {machine}")
    if cute_arch not in kernel.elf.gpu_archs:
        found = ", ".join(kernel.elf.gpu_archs) or "no GPU code"
        raise CollectError(f"{kernel.name} does not hold code for {cute_arch}", why=f"its object holds {found}")


def _check_compiler(build: KernelBuild) -> None:
    unknown = [name for name, wheel in build.wheels.items() if not wheel.content]
    if unknown or not build.wheels:
        raise CollectError(
            f"it is not known what compiled: the content of {', '.join(unknown) or COMPILER} could not be found out",
            remedy="Install it from a wheel, not editable; nothing was written.",
        )
