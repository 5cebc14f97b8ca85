"""Record mode's programs of the package b12x: what a program left in b12x's compile cache, made into entries.

b12x's own manifest vouches for each program's bytes, and the program's key says in what environment it was named: programs of
one environment are one entry. What the key does not hold, the content of package and compiler, is read of the Python that has
b12x; a program that another package, Python or compiler made is left out. Which plans ask for the programs is not known, so an
entry names none, and `kcache verify` asks by b12x's loading rule alone. Triton's programs are left to warmup: nothing in Triton's
cache says which of them are b12x's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kcache.archs import cute_dsl_arch, flashinfer_arch
from kcache.errors import KcacheError
from kcache.kernel_facts import kernels_digest
from kcache.kinds.b12x_compile import Program, collect
from kcache.kinds.b12x_entry import ProgramBuild, host_part, program_parts
from kcache.kinds.b12x_key import Target, expected_payload
from kcache.kinds.b12x_package import B12xPackage
from kcache.probe.binary import object_facts
from kcache.program_facts import program_paths
from kcache.values import dataclass
from kcache.workflows.b12x_host import triton_facts
from kcache.workflows.b12x_target import described_target, host_package
from kcache.workflows.build_entries import FAILED, EntryReport, write_parts
from kcache.workflows.record_kernels import RECORDED, KernelRecorder
from kcache.workflows.recorded import Recorded

KIND = "b12x-programs"

_OWN = ("b12x_runtime_patches", "torch_cuda")
"""Parts of the toolchain in a key that are the program's own: variables decide about the one, and who describes a GPU describes
torch too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recording:
    """What is equal for all programs of one recording. `root`: b12x's compile cache."""

    recorder: KernelRecorder
    root: Path
    package: B12xPackage
    target: Target


def pack_programs(
    recorder: KernelRecorder, root: Path, found: Sequence[Recorded], leave: Callable[[Recorded, str, bool], None]
) -> list[EntryReport]:
    """An entry for each environment in which programs were named.

    Args:
        recorder: its environ is the program's own.
        root: b12x's compile cache.
        leave: takes one that is left out: why, and whether it is broken rather than not known.

    Raises:
        ProbeError: there is no b12x that kcache knows, or its Python or torch does not say its version.
        TrustError: someone else could change the compile cache.
    """
    package = host_package(recorder.host.paths.interpreter)
    target = described_target(
        recorder.host.paths.interpreter, package, recorder.gpu, machine=os.uname().machine, environ=recorder.environ
    )
    recording = _Recording(recorder=recorder, root=root, package=package, target=target)
    by_key = {one.path.stem: one for one in found}
    collected = collect(root, only=by_key)
    reasons = {Path(one.path).stem: one.why for one in collected.left_out}
    groups: dict[tuple[Any, ...], list[Program]] = {}
    for program in collected.programs:
        if strange := _strange(program, target):
            reasons[program.key] = strange
        else:
            groups.setdefault(host_part(program.payload), []).append(program)
    entries = []
    for programs in groups.values():
        try:
            entry = _pack(recording, programs)
            why = entry.reason if entry.status == FAILED else ""
        except (KcacheError, OSError) as error:
            why = str(error)
        if why:
            reasons |= {program.key: why for program in programs}
        else:
            entries.append(entry)
    kept = {program.key for program in collected.programs} - reasons.keys()
    for key in sorted(by_key.keys() - kept):
        leave(by_key[key], reasons.get(key, "it is not finished: its compilation failed or was stopped"), True)
    return entries


def _strange(program: Program, target: Target) -> str:
    """Why a program is not of the Python that is described; empty if it is."""
    if program.payload.fingerprint != target.fingerprint:
        return f"it was compiled by another b12x ({program.payload.fingerprint[:12]})"
    here, there = expected_payload(program.payload, target).toolchain, program.payload.toolchain
    differing = sorted(name for name in there if name not in _OWN and there[name] != here[name])
    if differing:
        told = ", ".join(f"{name}: {there[name]}, here {here[name]}" for name in differing)
        return f"it was compiled by another Python than this one (name it with --python): {told}"
    if (program.payload.capability, program.payload.sm_count) != (target.capability, target.sm_count):
        major, minor = program.payload.capability
        return f"it was compiled for another GPU ({major}.{minor}, {program.payload.sm_count} SMs); name it with --gpu"
    return ""


def _pack(recording: _Recording, programs: Sequence[Program]) -> EntryReport:
    recorder, root = recording.recorder, recording.root
    cuda = str(programs[0].payload.toolchain["torch_cuda"] or recorder.cuda)
    major, minor = (int(part) for part in cuda.split(".")[:2])
    files = {}
    for program in programs:
        object_path, manifest_path = program_paths(program.key)
        files[object_path], files[manifest_path] = root / program.path, (root / program.path).with_suffix(".json")
    triton = triton_facts(recording.target, recorder.host.paths.packages)
    build = ProgramBuild(
        kind=KIND,
        model="",
        # Each recording is an entry of its own: none stands for another.
        variant=f"{RECORDED}-{kernels_digest(tuple(files)).removeprefix('sha256:')[:8]}",
        farm=recorder.host.environment,
        target=recording.target,
        package=recording.package.files,
        cuda=cuda,
        cute_arch=cute_dsl_arch(flashinfer_arch(recorder.gpu.arch, (major, minor))),
        gpu=recorder.gpu.describe(),
        cases=(),
        configurations=RECORDED,
        triton=triton.triton,
        switches=triton.switches,
        seconds=0.0,
    )
    parts = program_parts(build, programs, {one.key: object_facts(root / one.path) for one in programs}, ())
    provenance = {"gpu": recorder.gpu.name, "b12x": recording.package.root, RECORDED: True}
    return write_parts(recorder.output, parts, files, provenance)
