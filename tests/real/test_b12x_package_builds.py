"""The real package b12x: fused-MoE programs compiled without a GPU, taken over to other homes, installations and keys, and found
by b12x's own session with no compiler asked. And its own words on what kcache works out without importing it.

The model is made up and small: a plan for one token (micro kernels) and one for sixteen (dynamic kernels).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kcache.errors import ProbeError
from kcache.gpu_products import GpuProduct, product
from kcache.kinds.b12x_compile import Collected, Program, accepted, collect, for_target, install
from kcache.kinds.b12x_key import Target, environment_key, expected_payload, match_program
from kcache.kinds.triton_groups import collect_groups, install_group
from kcache.probe.packages import interpreter_at
from kcache.workflows.b12x_build import (
    ProgramAnswer,
    ProgramRun,
    check_programs,
    compile_programs,
    name_programs,
)
from kcache.workflows.b12x_target import described_target, host_package

SITE = os.environ.get("KCACHE_TEST_B12X", "")
"""Directories for PYTHONPATH that hold b12x 1.5.1 and Triton: ci/other-versions makes them."""

PYTHONS = [path for path in os.environ.get("KCACHE_TEST_PYTHONS", "").split(os.pathsep) if path]
"""Other interpreters that have torch, Triton and CuTe-DSL (another minor version, a build of torch for CUDA)."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not SITE, reason="KCACHE_TEST_B12X does not say where b12x and Triton are (ci/other-versions)"),
]

GPU = product("rtx-pro-6000")
CASE: dict[str, Any] = {
    "id": "small", "experts": 16, "top_k": 2, "hidden": 256, "inter": 256, "activation": "silu", "swiglu": None,
    "source": "modelopt_nvfp4", "mode": "a4", "w13_layout": "w13", "scales": "per_expert", "logits": "float32",
    "maximum": 16, "tokens": [1],
}  # fmt: skip
MACHINE = os.uname().machine
CHILDREN = Path(__file__).parents[2] / "kcache" / "probe" / "children"


def environ_of(home: Path, path: str = SITE, **changes: str) -> dict[str, str]:
    home.mkdir(parents=True, exist_ok=True)
    return {"PATH": os.environ["PATH"], "HOME": str(home), "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **changes}


def run_of(
    home: Path,
    cases: list[dict[str, Any]] | None = None,
    *,
    path: str = SITE,
    gpu: GpuProduct = GPU,
    changes: Mapping[str, str] | None = None,
) -> ProgramRun:
    """A run that keeps everything below a home, as a server would."""
    environ = environ_of(home, path, **(changes or {}))
    return ProgramRun(python=sys.executable, gpu=gpu, cases=cases or [CASE], environ=environ)


def target_of(run: ProgramRun) -> Target:
    interpreter = interpreter_at(run.python, run.environ)
    return described_target(interpreter, host_package(interpreter), run.gpu, machine=MACHINE, environ=run.environ)


@pytest.fixture(scope="module")
def built(build_cache: Path) -> tuple[ProgramRun, ProgramAnswer]:
    """Four CuTe-DSL programs and one of Triton, compiled by two processes; kept between sessions. Nothing may change them."""
    run = run_of(build_cache / "b12x-package")
    with (build_cache / "b12x-package.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return run, compile_programs(run, jobs=2)


@pytest.fixture(scope="module")
def collected(built: tuple[ProgramRun, ProgramAnswer]) -> Collected:
    return collect(Path(built[1].compile_cache))


def move(built: tuple[ProgramRun, ProgramAnswer], collected: Collected, run: ProgramRun) -> tuple[Program, ...]:
    """What was built, installed for another run, renamed where its keys are others."""
    source, target = target_of(built[0]), target_of(run)
    for program in collected.programs:
        decision = match_program(program.payload, target, machine=MACHINE, abi=source.abi, wheels=source.wheels)
        assert decision.accepted, [check.describe() for check in decision.differs]
    programs = tuple(for_target(program, target) for program in collected.programs)
    home = Path(run.environ["HOME"])
    install(home / ".cache/b12x/compile", programs, timeout=10)
    groups, left_out = collect_groups(Path(built[1].triton_cache), built[1].triton_groups())
    assert len(groups) == 1
    assert not left_out
    for group in groups:
        install_group(home / ".triton/cache", group, timeout=10)
    return programs


def test_programs_are_compiled_without_a_gpu_where_b12x_keeps_them(
    built: tuple[ProgramRun, ProgramAnswer], collected: Collected
) -> None:
    run, answer = built
    home = run.environ["HOME"]
    assert (answer.compile_cache, answer.triton_cache) == (f"{home}/.cache/b12x/compile", f"{home}/.triton/cache")
    assert {program.reason for program in answer.programs} == {""}
    assert {program.status for program in answer.programs} <= {"built", "present"}
    names = sorted(program.name for program in answer.programs)
    micro, dynamic = "integration.tp_moe.micro_direct", "integration.tp_moe.dynamic"
    assert names == ["_route_topk_kernel", dynamic, dynamic, micro, micro]
    assert not [case.refused for case in answer.cases if case.refused]
    assert not collected.left_out
    assert {program.key for program in collected.programs} == {p.key for p in answer.programs if p.dialect == "cute"}
    assert not any(home.encode() in program.object for program in collected.programs)


def test_what_kcache_works_out_without_importing_is_what_b12x_says(
    built: tuple[ProgramRun, ProgramAnswer], tmp_path: Path
) -> None:
    switches = {"CUDA_HOME": "/usr/local/cuda", "CUTE_DSL_LINEINFO": "0", "B12X_TIMING": "0", "B12X_X": "1", "CC": "clang"}
    for run in (built[0], run_of(tmp_path, changes=switches)):
        said = name_programs(run).context
        target = target_of(run)
        assert said["package_fingerprint"] == target.fingerprint
        assert said["device_arch"] == ["cuda", list(target.capability), target.sm_count]
        assert [tuple(pair) for pair in said["compile_environment"]] == list(environment_key(run.environ))
        payload = collect(Path(built[1].compile_cache)).programs[0].payload
        assert json.loads(json.dumps(expected_payload(payload, target).values[3])) == said["toolchain"]


def test_b12x_finds_every_program_in_a_fresh_process_and_asks_no_compiler(built: tuple[ProgramRun, ProgramAnswer]) -> None:
    for untuned in (False, True):
        answer = check_programs(built[0], untuned=untuned)
        assert answer.compiles == ()
        assert answer.proven, answer.cases
        assert answer.loads >= 5
        assert {program.status for program in answer.programs} == {"found"}


def test_a_second_build_compiles_nothing(built: tuple[ProgramRun, ProgramAnswer]) -> None:
    events: list[Any] = []
    answer = compile_programs(built[0], jobs=2, progress=events.append)
    assert {program.status for program in answer.programs} == {"present"}
    assert events == []


def test_in_another_home_with_another_package_path_and_other_tools_they_are_found_too(
    built: tuple[ProgramRun, ProgramAnswer], collected: Collected, tmp_path: Path
) -> None:
    """What only b12x's key counts is other: CUDA_HOME, CC, torch's version, a switch that compiles nothing. So are its paths."""
    elsewhere = tmp_path / "site"
    parts = SITE.split(os.pathsep)
    package = next(Path(part) for part in parts if (Path(part) / "b12x" / "_lib").is_dir())
    shutil.copytree(package / "b12x", elsewhere / "b12x", ignore=shutil.ignore_patterns("__pycache__"))
    (elsewhere / "torch-2.99.0.dist-info").mkdir()
    (elsewhere / "torch-2.99.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0\n")
    others = [part for part in parts if Path(part) != package] + [str(package)]
    path = os.pathsep.join([str(elsewhere), *others])
    changes = {"CUDA_HOME": "/opt/cuda-13", "CC": "/usr/bin/clang", "B12X_COMPILE_WORKERS": "3", "CUTE_DSL_ARCH": "sm_120a"}
    run = run_of(tmp_path / "home", path=path, changes=changes)
    assert not check_programs(run).proven
    programs = move(built, collected, run)
    assert not {program.key for program in programs} & {program.key for program in collected.programs}
    for untuned in (False, True):
        answer = check_programs(run, untuned=untuned)
        assert answer.package.startswith(str(elsewhere))
        assert answer.compiles == ()
        assert answer.proven, answer.cases


def test_in_another_home_alone_they_keep_their_names(
    built: tuple[ProgramRun, ProgramAnswer], collected: Collected, tmp_path: Path
) -> None:
    run = run_of(tmp_path / "home", changes={"XDG_CACHE_HOME": ""})
    assert move(built, collected, run) == collected.programs
    groups = list((tmp_path / "home/.triton/cache").glob("*/__grp__*"))
    assert len(groups) == 1
    assert built[1].triton_cache not in groups[0].read_text()
    assert check_programs(run).proven


def test_a_renamed_program_is_byte_for_byte_what_a_compilation_there_gives(
    built: tuple[ProgramRun, ProgramAnswer], collected: Collected, tmp_path: Path
) -> None:
    tools = {name: f"/else/{name}" for name in ("CC", "CXX", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDA_TOOLKIT_PATH")}
    flags = {"NVCC_APPEND_FLAGS": "-lineinfo", "NVCC_PREPEND_FLAGS": "-G", "B12X_COMPILE_WORKERS": "2"}
    run = run_of(tmp_path, [CASE | {"maximum": 1}], changes=tools | flags)
    run = replace(run, cuda="12.8")
    there = {program.key: program for program in collect(Path(compile_programs(run, jobs=1).compile_cache)).programs}
    assert len(there) == 2
    target = replace(target_of(run), torch_cuda="12.8")
    renamed = {program.key: program for program in (for_target(one, target) for one in collected.programs)}
    assert {key: renamed[key] for key in there} == there


@pytest.mark.parametrize("python", PYTHONS)
def test_under_another_python_and_torch_every_object_is_found_and_only_triton_compiles(
    built: tuple[ProgramRun, ProgramAnswer], collected: Collected, tmp_path: Path, python: str
) -> None:
    """Triton's key covers its own extension module, so that one program is not found; the objects are."""
    package = next(part for part in SITE.split(os.pathsep) if (Path(part) / "b12x" / "_lib").is_dir())
    run = replace(run_of(tmp_path, path=package), python=python)
    programs = move(built, collected, run)
    assert not {program.key for program in programs} & {program.key for program in collected.programs}
    answer = check_programs(run)
    assert {program.key for program in programs} == {p.key for p in answer.programs if p.dialect == "cute"}
    assert {(p.dialect, p.status) for p in answer.programs} == {("cute", "found"), ("triton", "missing")}
    done = compile_programs(run, jobs=1).programs
    assert {(p.dialect, p.status) for p in done} == {("cute", "present"), ("triton", "built")}
    assert check_programs(run).proven


def test_another_gpu_or_compiler_is_refused_and_would_not_be_found(
    built: tuple[ProgramRun, ProgramAnswer], collected: Collected, tmp_path: Path
) -> None:
    source = target_of(built[0])
    smaller = replace(source, sm_count=product("rtx-5090").sm_count)
    decision = match_program(collected.programs[0].payload, smaller, machine=MACHINE, abi=source.abi, wheels=source.wheels)
    assert [check.field for check in decision.differs] == ["gpu.sm_count"]
    run = replace(built[0], gpu=product("rtx-5090"))
    keys = {program.key for program in name_programs(run).programs if program.dialect == "cute"}
    assert not keys & {program.key for program in collected.programs}


def test_b12x_misses_damaged_programs_as_kcache_says_and_takes_the_repaired_ones(
    built: tuple[ProgramRun, ProgramAnswer], collected: Collected, tmp_path: Path
) -> None:
    """Case B43: bytes swapped under a stale manifest; an object that was cut; a manifest that is gone."""
    run = run_of(tmp_path)
    move(built, collected, run)
    root = tmp_path / ".cache/b12x/compile"
    swapped, cut, alone, whole = collected.programs
    (root / swapped.path).write_bytes(swapped.object[:-1] + bytes([swapped.object[-1] ^ 1]))
    (root / cut.path).write_bytes(cut.object[:-1])
    (root / alone.path).with_suffix(".json").unlink()
    damaged = {swapped.key, cut.key, alone.key}
    assert {program.key for program in collected.programs if accepted(root, program.key)} == damaged
    answer = check_programs(run)
    assert {program.key for program in answer.programs if program.status == "missing"} == damaged
    assert not answer.proven
    placed = install(root, collected.programs, timeout=10)
    assert set(placed.written) == damaged
    assert placed.kept == (whole.key,)
    assert check_programs(run).proven


def test_a_program_that_cannot_be_compiled_loses_only_itself(tmp_path: Path) -> None:
    """Here it cannot be written: a file has the name of its directory."""
    cases = [CASE | {"maximum": 1}, CASE | {"id": "other", "maximum": 1, "scales": "shared"}]
    run = run_of(tmp_path, [*cases, CASE | {"id": "refused", "activation": "tanh"}])
    named = [program for program in name_programs(run).programs if program.dialect == "cute"]
    shards = [{program.key[:2] for program in named if case["id"] in program.cases} for case in cases]
    assert not shards[0] & shards[1]
    for shard in shards[0]:
        (tmp_path / ".cache/b12x/compile").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".cache/b12x/compile" / shard).write_text("in the way")
    answer = compile_programs(run, jobs=2)
    statuses = [{p.status for p in answer.programs if case["id"] in p.cases and p.dialect == "cute"} for case in cases]
    assert statuses == [{"failed"}, {"built"}]
    assert all(program.reason for program in answer.failed)
    refused = {case.case: case.refused for case in answer.cases}
    assert not refused["small"]
    assert "tanh" in refused["refused"][0][1]


def test_every_precision_and_activation_can_be_named(tmp_path: Path) -> None:
    base = CASE | {"maximum": 8, "tokens": [1, 8]}
    cases = [
        base | {"id": "a4-shared", "scales": "shared"},
        base | {"id": "a4-uniform", "scales": "uniform"},
        base | {"id": "a8", "mode": "a8"},
        base | {"id": "a16", "mode": "a16"},
        base | {"id": "auto", "mode": "auto"},
        base | {"id": "mx8", "source": "fp4_e8m0_k32", "mode": "a8"},
        base | {"id": "mx16", "source": "fp4_e8m0_k32", "mode": "a16"},
        base | {"id": "relu2", "activation": "relu2"},
        base | {"id": "oai", "activation": "swigluoai_uninterleave", "swiglu": {"alpha": 1.7, "beta": 1.0, "limit": 7.0}},
    ]
    answer = name_programs(run_of(tmp_path, cases))
    assert {case.case: case.refused for case in answer.cases} == {case["id"]: () for case in cases}
    for case in cases:
        assert {program.dialect for program in answer.programs if case["id"] in program.cases} == {"cute", "triton"}
    assert not list(tmp_path.rglob("*.o"))


def test_candidates_of_the_tuning_are_named_beyond_the_untuned_configurations(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    few, many = name_programs(run), name_programs(replace(run, configurations="all"))
    keys = {program.key for program in few.programs}
    assert keys < {program.key for program in many.programs}
    assert {program.key for program in many.programs if program.default} == keys


def test_flashinfers_copy_is_compiled_and_found_in_the_same_way(tmp_path: Path) -> None:
    parts = [part for part in SITE.split(os.pathsep) if not (Path(part) / "b12x").is_dir()]
    run = run_of(tmp_path, [CASE | {"maximum": 1}], path=os.pathsep.join(parts))
    interpreter = interpreter_at(run.python, run.environ)
    try:
        package = host_package(interpreter)
    except ProbeError:
        pytest.skip("the installed FlashInfer has no b12x inside")
    assert package.embedded
    answer = compile_programs(run, jobs=1)
    assert answer.package == package.root
    assert answer.context["package_fingerprint"] == package.fingerprint
    assert not answer.failed
    assert check_programs(run).proven
    assert not collect(Path(answer.compile_cache)).left_out
