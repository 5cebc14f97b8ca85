"""nvcc modules of FlashInfer: from the facts of a build to the parts of a manifest. Pure: values in, values out.

Refuses what would be a lie: a binary that does not hold the architecture that it names, a key ingredient that could not be
found out, a module whose sources are not known. Nothing here runs a compiler or touches a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kcache.errors import CollectError
from kcache.kernel_facts import KernelFacts
from kcache.key import EntryKey, Fact
from kcache.manifest import Artifact, ElfFacts, module_artifact_path, sources_digest
from kcache.match import arch_score
from kcache.program_facts import ProgramFacts
from kcache.tuning_facts import TuningFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModule:
    """One module as it was built.

    size, sha256, elf: of its library, bytes and digest.
    sources:           path inside the flashinfer package -> digest: what the compilers read, and the recipe.
    seconds:           wall seconds during which it was being compiled.
    """

    name: str
    size: int
    sha256: str
    elf: ElfFacts
    sources: Mapping[str, str]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFacts:
    """What is equal for all modules of one build; see `kcache.key.INGREDIENTS`."""

    machine: Fact
    flashinfer: Fact
    cuda_release: Fact
    arch: str
    tvm_ffi: Fact
    flags: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryParts:
    """All of a manifest that does not depend on its archive. `kernels`, `programs` and `tunings` are None for nvcc modules."""

    key: EntryKey
    artifacts: tuple[Artifact, ...]
    sources: Mapping[str, str]
    build_seconds: Mapping[str, float]
    kernels: KernelFacts | None = None
    programs: ProgramFacts | None = None
    tunings: TuningFacts | None = None


def entry_parts(kind: str, facts: BuildFacts, modules: tuple[BuiltModule, ...]) -> EntryParts:
    """The parts of one entry.

    Raises:
        CollectError: an entry with this key would not be true; the message names the module and the field.
    """
    if not modules:
        raise CollectError(f"an entry of kind {kind} without modules")
    ordered = tuple(sorted(modules, key=lambda module: module.name))
    machine = required("platform.machine", facts.machine)
    for module in ordered:
        check_binary(module, facts.arch, machine)
    sources = _united(ordered)
    ingredients = {
        "platform.machine": machine,
        "flashinfer.version": required("flashinfer.version", facts.flashinfer),
        "flashinfer.sources": sources_digest(sources),
        "cuda.release": required("cuda.release", facts.cuda_release),
        "gpu.arch": facts.arch,
        "tvm_ffi.version": required("tvm_ffi.version", facts.tvm_ffi),
        "build.flags": required("build.flags", facts.flags),
    }
    return EntryParts(
        key=EntryKey(kind=kind, modules=tuple(module.name for module in ordered), ingredients=ingredients),
        artifacts=tuple(
            Artifact(path=module_artifact_path(module.name), size=module.size, sha256=module.sha256, elf=module.elf)
            for module in ordered
        ),
        sources=sources,
        build_seconds={module.name: round(module.seconds, 3) for module in ordered},
    )


def check_binary(module: BuiltModule, arch: str, machine: str) -> None:
    """A library must be for the machine that it is offered to, and hold machine code for the architecture that it names.

    PTX does not count: the driver would compile it at the first launch.

    Raises:
        CollectError: it does not.
    """
    if module.elf.machine != machine:
        raise CollectError(f"{module.name} was built for {module.elf.machine}, not for {machine}")
    targets = [name.removeprefix("sm_") for name in module.elf.gpu_archs if name.startswith("sm_")]
    if not any(holds(target, arch) for target in targets):
        raise CollectError(
            f"{module.name} does not hold code for {arch}",
            why=f"its library holds {', '.join(module.elf.gpu_archs) or 'no GPU code'}",
            remedy="Name the architecture that it holds, if that is meant; else this FlashInfer does not build it for this GPU.",
        )


def holds(target: str, arch: str) -> bool:
    """Whether code for `target` is code for every GPU that an entry for `arch` would be given to.

    A module may choose a wider target than it was asked for (`100f` for `103a`), never a narrower one (`120a` for `120f`, which
    is also given to 12.1), nor one without the features that a suffix stands for (`90` for `90a`). What runs where is
    FlashInfer's rule (`kcache.match.arch_score`).
    """
    if target == arch:
        return True
    if arch_score(target, arch) is None or target.endswith("a"):
        return False
    return target.endswith("f") or not arch.endswith(("a", "f"))


def required(name: str, fact: Fact) -> str:
    """The value of a key's ingredient.

    Raises:
        CollectError: it is absent, or could not be found out.
    """
    if not fact.known or fact.value is None:
        raise CollectError(
            f"the key's {name} is not known",
            why=fact.describe(),
            remedy="An entry must state everything that it depends on; nothing was written.",
        )
    return fact.value


def _united(modules: tuple[BuiltModule, ...]) -> dict[str, str]:
    """The sources of all modules; one path cannot have two contents within one build."""
    united: dict[str, str] = {}
    for module in modules:
        if not any(path.startswith("data/") for path in module.sources):
            raise CollectError(f"it is not known what {module.name} was compiled from", why="no compiler record names a source")
        for path, digest in module.sources.items():
            if united.setdefault(path, digest) != digest:
                raise CollectError(f"{path} changed while the modules were built", remedy="Run the build again.")
    return united
