"""Programs of the package b12x: from what a build left in its caches to the parts of a manifest. Pure: values in, values out.

Refuses what would be a lie: a program of another package, GPU or environment than the others of its entry, an object for another
machine or architecture than its key says, a compiler whose content could not be found out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kcache import digest
from kcache.errors import CollectError
from kcache.kernel_facts import kernels_digest, wheels_digest
from kcache.key import B12X, EntryKey, Environment
from kcache.kinds.b12x_compile import Program
from kcache.kinds.b12x_key import Payload, Target
from kcache.kinds.nvcc_modules import EntryParts, required
from kcache.kinds.triton_groups import Group
from kcache.manifest import Artifact, ElfFacts
from kcache.program_facts import MODULE, ProgramFacts, program_paths


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramBuild:
    """What all programs of one entry share.

    farm:      the environment that compiled: version of FlashInfer, machine, Python.
    target:    the farm as b12x's keys see it, with the described GPU.
    package:   path inside its b12x -> SHA-256, hex digits.
    cuda:      the CUDA release that torch was described for, such as `13.0`.
    cute_arch: such as `sm_120a`.
    gpu, cases, configurations, triton, switches: see `kcache.program_facts.ProgramFacts`.
    seconds:   that all compilations took.
    """

    kind: str
    model: str
    variant: str
    farm: Environment
    target: Target
    package: Mapping[str, str]
    cuda: str
    cute_arch: str
    gpu: Mapping[str, Any]
    cases: tuple[Mapping[str, Any], ...]
    configurations: str
    triton: str
    switches: Mapping[str, str]
    seconds: float


def host_part(payload: Payload) -> tuple[Any, ...]:
    """What of a program's tuple is its host's, not its own: package, toolchain, GPU and environment."""
    return (*payload.values[2:5], payload.values[-1])


def program_parts(
    build: ProgramBuild, programs: Sequence[Program], elf: Mapping[str, ElfFacts], groups: Sequence[Group]
) -> EntryParts:
    """The parts of one entry.

    Args:
        elf: of each program's object, by key.

    Raises:
        CollectError: an entry with this key would not be true; the message names the program and the field.
    """
    if not programs:
        raise CollectError(f"an entry of kind {build.kind} without programs")
    machine = required("platform.machine", build.farm.fact("platform.machine"))
    ordered = sorted(programs, key=lambda program: program.key)
    for program in ordered:
        _check_program(build, program, ordered[0], elf[program.key], machine)
    if unknown := [name for name, wheel in build.target.wheels.items() if not wheel.content]:
        raise CollectError(f"it is not known what compiled: the content of {', '.join(unknown)} could not be found out")
    artifacts = _artifacts(ordered, elf, groups)
    return EntryParts(
        key=EntryKey(
            kind=build.kind,
            modules=(MODULE,),
            ingredients={
                "platform.machine": machine,
                "flashinfer.version": required("flashinfer.version", build.farm.fact("flashinfer.version")),
                "cuda.release": build.cuda,
                "gpu.cute_arch": build.cute_arch,
                "gpu.sm_count": str(build.target.sm_count),
                "cutlass_dsl.wheels": wheels_digest(build.target.wheels),
                "b12x.package": build.target.fingerprint,
                "programs": kernels_digest(tuple(artifact.path for artifact in artifacts)),
            },
            layout=B12X,
            model=build.model,
            variant=build.variant,
        ),
        artifacts=artifacts,
        sources={},
        build_seconds={MODULE: round(build.seconds, 3)},
        programs=ProgramFacts(
            kernels={program.key: program.kernel for program in ordered},
            payload=repr(ordered[0].payload.values),
            package={path: f"sha256:{sha256}" for path, sha256 in build.package.items()},
            abi=build.target.abi,
            wheels=build.target.wheels,
            gpu=build.gpu,
            cases=build.cases,
            configurations=build.configurations,
            groups={group.directory: group.name for group in groups},
            triton=build.triton,
            switches=build.switches,
        ),
    )


def _check_program(build: ProgramBuild, program: Program, first: Program, elf: ElfFacts, machine: str) -> None:
    name = f"{program.kernel} {program.key[:16]}"
    if program.payload.fingerprint != build.target.fingerprint:
        raise CollectError(f"{name} was compiled by another b12x", why=program.payload.fingerprint)
    if host_part(program.payload) != host_part(first.payload):
        raise CollectError(f"{name} was compiled in another environment than {first.key[:16]}")
    if (program.payload.capability, program.payload.sm_count) != (build.target.capability, build.target.sm_count):
        raise CollectError(f"{name} was compiled for another GPU")
    if elf.machine != machine:
        raise CollectError(f"{name} was compiled for {elf.machine}, not for {machine}")
    if build.cute_arch not in elf.gpu_archs:
        found = ", ".join(elf.gpu_archs) or "no GPU code"
        raise CollectError(f"{name} does not hold code for {build.cute_arch}", why=f"its object holds {found}")


def _artifacts(programs: Sequence[Program], elf: Mapping[str, ElfFacts], groups: Sequence[Group]) -> tuple[Artifact, ...]:
    artifacts = []
    for program in programs:
        object_path, manifest_path = program_paths(program.key)
        artifacts.append(_artifact(object_path, program.object, elf[program.key]))
        artifacts.append(_artifact(manifest_path, program.manifest, None))
    for group in groups:
        artifacts += [_artifact(f"{group.directory}/{name}", data, None) for name, data in group.files.items()]
    return tuple(sorted(artifacts, key=lambda artifact: artifact.path))


def _artifact(path: str, data: bytes, elf: ElfFacts | None) -> Artifact:
    return Artifact(path=path, size=len(data), sha256=digest.of_bytes(data), elf=elf)
