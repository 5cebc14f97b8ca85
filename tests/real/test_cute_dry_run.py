"""The dry run of the gated delta rule on the real FlashInfer and CuTe-DSL, for a Hopper GPU that is not there.

Two small kernels are compiled. What the same names are on a real H200, and that the kernels run there, is shown by hand
(docs/decisions/0005-cute-dsl-ingredients.md); here the names are held against the rules that `kcache.recipe_gdn` states.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kcache.gpu_products import product
from kcache.kinds.cute_dsl import Target, expected_meta, module_directory
from kcache.kinds.cute_dsl_install import install_module
from kcache.probe import host
from kcache.probe.packages import interpreter_at
from kcache.recipe_gdn import GDN_KINDS, GdnModel, gdn_cases
from kcache.workflows.cute_build import DryRun, DryRunAnswer, check_kernels, compile_kernels, name_kernels

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None or importlib.util.find_spec("cutlass") is None,
        reason="FlashInfer and CuTe-DSL are not installed",
    ),
]

FLASHINFERS = [path for path in os.environ.get("KCACHE_TEST_FLASHINFERS", "").split(os.pathsep) if path]
"""Directories, each with another FlashInfer to put on PYTHONPATH; the installed one is always tested."""

MODEL = GdnModel(name="Qwen/Qwen3-Next-80B-A3B-Instruct", source="config.json", heads=16, value_heads=32)

SMALL: list[dict[str, Any]] = [
    {"id": "prefill", "calls": "prefill", "tokens": [64]},
    {"id": "decode", "calls": "decode", "tokens": [1, 8]},
]
SMALL = [
    {"heads": 2, "value_heads": 4, "dim": 128, "state": "float32", "dt_bias": "float32", "drafted": 1} | case for case in SMALL
]


def every_case(counts: tuple[int, ...] = (1, 8, 64)) -> list[dict[str, Any]]:
    """Every kind's cases, with the kind in the name."""
    return [
        case | {"id": f"{kind}/{case['id']}"}
        for kind in GDN_KINDS
        for case in gdn_cases(kind, MODEL, tp=(1, 4), counts=counts, drafted=(2, 4))
    ]


def dry_run(workspace: Path, cases: Any, path: str = "", gpu: str = "h200") -> DryRun:
    environ = {**os.environ, "PYTHONPATH": path}
    return DryRun(
        python=sys.executable,
        workspace=str(workspace),
        gpu=product(gpu),
        cuda="13.0",
        cases=cases,
        environ=environ,
        operation="gdn",
    )


def target(answer: DryRunAnswer, run: DryRun) -> Target:
    return Target(
        package=answer.package,
        search_path=interpreter_at(run.python, run.environ).search_path,
        cache_tag=answer.cache_tag,
        soabi=answer.soabi,
        arch="sm_90a",
        environ=run.environ,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DryRunAnswer]:
    """Two kernels of two modules, compiled by two processes."""
    workspace = tmp_path_factory.mktemp("built")
    return workspace, compile_kernels(dry_run(workspace, SMALL), jobs=2)


def test_kernels_for_hopper_are_compiled_without_a_gpu(built: tuple[Path, DryRunAnswer]) -> None:
    _, answer = built
    assert not answer.errors
    assert [(kernel.module, kernel.status, kernel.reason) for kernel in answer.kernels] == [
        ("gdn_decode_pretranspose_sm90a_cute_dsl", "built", ""),
        ("gdn_qk_l2norm_sm90a_cute_dsl", "built", ""),
    ]
    for kernel in answer.kernels:
        assert len(Path(kernel.path).read_bytes()) == kernel.size > 20_000
        assert json.loads((Path(kernel.path).parent / "meta.json").read_text()) == answer.meta[kernel.module]
    assert answer.kernels[0].cases == {"decode": (1, 8)}


def test_what_kcache_installs_for_another_path_is_taken_by_flashinfer(built: tuple[Path, DryRunAnswer], tmp_path: Path) -> None:
    workspace, first = built
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None
    assert spec.origin is not None
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "flashinfer").symlink_to(Path(spec.origin).parent)
    run = dry_run(tmp_path / "home", SMALL, path=str(tmp_path / "elsewhere"))
    cached_ops = tmp_path / "home" / Path(first.jit_dir).relative_to(workspace)
    shutil.copytree(first.jit_dir, cached_ops)
    plain = check_kernels(run)
    assert {(kernel.status, kernel.reason) for kernel in plain.kernels} == {("refused", "meta.json differs in source_sha256")}
    shutil.rmtree(cached_ops)
    for kernel in first.kernels:
        name = Path(kernel.path).name
        meta = expected_meta(target(plain, run), first.sources[kernel.module])
        objects, digests = {name: Path(kernel.path)}, {name: kernel.sha256}
        install_module(cached_ops, kernel.module, meta, objects, digests=digests, owned={}, timeout=60.0)
    answer = check_kernels(run)
    assert {kernel.name: kernel.status for kernel in answer.kernels} == {kernel.name: "accepted" for kernel in first.kernels}
    assert answer.compiles == 0


@pytest.mark.parametrize("path", ["", *FLASHINFERS], ids=lambda path: Path(path).name or "installed")
def test_each_kind_asks_for_its_module_alone_and_meta_json_is_worked_out_for_it(path: str, tmp_path: Path) -> None:
    run = dry_run(tmp_path, every_case(), path=path)
    answer = name_kernels(run)
    assert not answer.errors
    release = tuple(int(part) for part in answer.flashinfer.split(".")[:3])
    kept = {kind: about for kind, about in GDN_KINDS.items() if release >= about.since}
    asked = {(case.partition("/")[0], kernel.module) for kernel in answer.kernels for case in kernel.cases}
    assert asked == {(kind, module_directory(about.module, "sm_90a")) for kind, about in kept.items()}
    met = {case for kernel in answer.kernels for case in kernel.cases} | {case for item in answer.left_out for case in item.cases}
    assert met == {case["id"] for case in run.cases}  # what is not kept is told
    for module, sources in answer.sources.items():
        assert expected_meta(target(answer, run), sources) == answer.meta[module]
    assert answer.stack["nvidia-cutlass-dsl"]


def test_names_hold_heads_and_types_and_for_bfloat16_states_the_sm_count(tmp_path: Path) -> None:
    large, small = (name_kernels(dry_run(tmp_path, every_case(), gpu=gpu)) for gpu in ("h200", "h100-pcie"))
    table: list[set[tuple[str, str, tuple[int, ...]]]] = [
        {(kernel.name, case, counts) for kernel in answer.kernels for case, counts in kernel.cases.items()}
        for answer in (large, small)
    ]
    assert {name.partition("/")[0] for name, _, _ in table[0] ^ table[1]} == {"gdn_decode_bf16_state_sm90a_cute_dsl"}
    names = {kernel.name for kernel in large.kernels if any("gdn-decode/decode" in case for case in kernel.cases)}
    assert len(names) == 4  # two splits, two types of dt_bias; every batch has the same kernel
    (norm,) = (kernel for kernel in large.kernels if kernel.module.startswith("gdn_qk_l2norm"))
    assert set(norm.cases) == {"gdn-prefill/prefill-tp1", "gdn-prefill/prefill-tp4"}
    assert {item.kernel for item in large.left_out} >= {"CPDeltaRulePrefillSm90"}


CAPSULE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import described_gpu
described_gpu.install(json.loads(sys.argv[2]), "13.0")
import torch, tvm_ffi
with described_gpu.OnMeta():
    whole = torch.empty(4, 6, 8, dtype=torch.bfloat16, device="cuda")
    part = whole[1:, :3]
    taken = tvm_ffi.from_dlpack(part)
    found = [tuple(taken.shape), tuple(taken.strides), str(taken.dtype), str(taken.device)]
    found += [part.data_ptr() - whole.data_ptr(), whole.device.type, whole.data_ptr() % 256]
    try:
        torch.empty(1, dtype=torch.float8_e4m3fn, device="cuda").__dlpack__()
    except BufferError as error:
        found.append(str(error))
print(json.dumps(found))
"""


def test_a_tensor_without_bytes_is_taken_as_one_on_the_gpu() -> None:
    children = Path(host.__file__).parent / "children"
    command = [sys.executable, "-c", CAPSULE, str(children), json.dumps(product("h200").describe())]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == [
        [3, 3, 8], [48, 8, 1], "bfloat16", "cuda:0", 96, "cuda", 0, "no capsule is made for torch.float8_e4m3fn",
    ]  # fmt: skip
    assert "torch c dlpack extension" not in done.stderr  # nothing was compiled for it


def test_a_flashinfer_without_the_operation_is_told(tmp_path: Path) -> None:
    from kcache.errors import ProbeError

    package = tmp_path / "flashinfer"
    (package / "jit").mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "9.9.9"\n')
    (package / "jit" / "__init__.py").touch()
    names = "build_and_load build compile_and_persist try_load load is_compiled"
    methods = "".join(f"    def {name}(self): ...\n" for name in names.split())
    core = f"class JitSpecCuteDsl:\n{methods}def build_and_load_cute_dsl_kernel(): ...\ndef _read_meta(): ...\n"
    (package / "jit" / "cute_dsl_core.py").write_text(f"{core}def _hash_source_files(): ...\n")
    with pytest.raises(ProbeError) as caught:
        name_kernels(dry_run(tmp_path / "home", SMALL, path=str(tmp_path)))
    assert caught.value.what == "this FlashInfer's gated delta rule is not as kcache expects"
    assert "9.9.9" in caught.value.why
    assert "decode at [1, 8] tokens" in caught.value.why


def test_a_compilation_by_another_way_than_flashinfers_is_stopped_and_counted(tmp_path: Path) -> None:
    """The proof's traps are below `cute.compile`, at every door to MLIR's passes, NVVM and ptxas: here each is walked into."""
    code = """
import json, os, subprocess, sys
sys.path.insert(0, sys.argv[1])
os.environ["CUTE_DSL_ARCH"] = "sm_90a"
import compiler_doors, described_gpu
gpu = json.loads(sys.argv[2])
described_gpu.install(gpu, "13.0")
described_gpu.install_cute_dsl(gpu)
import cutlass
from cutlass import cute
from cutlass._mlir import ir, passmanager
from cutlass._mlir._mlir_libs import _cutlass_ir
from cutlass.base_dsl.compiler import Compiler
@cute.jit
def kernel(a: cutlass.Int32):
    cute.printf("{}", a)
def passes():
    with ir.Context():
        passmanager.PassManager.parse("builtin.module(canonicalize)").run(ir.Module.parse("module {}").operation)
def attempt(way):
    try:
        way()
    except Exception as error:
        return type(error).__name__
compile_, doors = Compiler.compile, []
print(attempt(lambda: cute.compile(kernel, cutlass.Int32(1))), attempt(passes))
compiler_doors.close(doors)
attempt(lambda: cute.compile(kernel, cutlass.Int32(1)))
Compiler.compile = compile_  # what is below it is a door of its own
attempt(lambda: cute.compile(kernel, cutlass.Int32(1)))
attempt(passes)
attempt(lambda: _cutlass_ir.CuteCompiler().compile_to(None, None))
attempt(lambda: subprocess.run(["/no/nvcc", "--version"]))
attempt(lambda: subprocess.run(["/no/ptxas", "-arch=sm_120a"]))
print(json.dumps(doors))
del passmanager.PassManager.run
print(attempt(lambda: compiler_doors.close(doors)))
"""
    children = Path(__file__).parents[2] / "kcache" / "probe" / "children"
    script = tmp_path / "walk_into_it.py"  # CuTe-DSL reads its functions' source from a file
    script.write_text(code)
    command = [sys.executable, str(script), str(children), json.dumps(product("h200").describe())]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    doors = ["Compiler.compile", "PassManager.run", "PassManager.run", "CuteCompiler.compile_to", "ptxas"]
    assert done.stdout.splitlines() == ["None None", json.dumps(doors), "Assumption"], done.stderr
