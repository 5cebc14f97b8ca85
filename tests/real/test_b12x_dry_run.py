"""The b12x dry run on the real FlashInfer and CuTe-DSL: kernels named, compiled by two processes, taken by FlashInfer's loader.

The model is made up and small; two kernels are compiled. Names with the real models' shapes cost no compilation.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kcache.gpu_products import GpuProduct, product
from kcache.kinds.cute_dsl import Target, expected_meta, relative_key_files
from kcache.kinds.cute_dsl_install import install_module
from kcache.probe.packages import interpreter_at, scan
from kcache.recipe import Recipe, read_recipe
from kcache.recipe_shapes import dry_run_cases
from kcache.workflows.cute_build import DryRun, DryRunAnswer, check_kernels, compile_kernels, name_kernels

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None or importlib.util.find_spec("cutlass") is None,
        reason="FlashInfer and CuTe-DSL are not installed",
    ),
]

MANIFESTS = Path(__file__).parents[2] / "manifests"
FLASHINFERS = [path for path in os.environ.get("KCACHE_TEST_FLASHINFERS", "").split(os.pathsep) if path]
"""Directories, each with another FlashInfer to put on PYTHONPATH; the installed one is always tested."""

PYTHONS = [path for path in os.environ.get("KCACHE_TEST_PYTHONS", "").split(os.pathsep) if path]
"""Other interpreters that have FlashInfer and all it needs (another minor version, installed with uv)."""

SMALL: dict[str, Any] = {
    "id": "small", "experts": 8, "local_experts": 8, "top_k": 2, "hidden": 256, "inter": 768, "activation": "silu",
    "swiglu": None, "quant": "nvfp4", "scales": "per_expert", "calls": "wrapper", "maximum": 64, "tokens": [1, 2],
}  # fmt: skip


def dry_run(workspace: Path, cases: Any, gpu: GpuProduct | None = None, path: str = "") -> DryRun:
    environ = {**os.environ, "PYTHONPATH": path}
    return DryRun(
        python=sys.executable,
        workspace=str(workspace),
        gpu=gpu or product("rtx-pro-6000"),
        cuda="13.0",
        cases=cases,
        environ=environ,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DryRunAnswer]:
    """Two kernels, compiled by two processes."""
    workspace = tmp_path_factory.mktemp("built")
    return workspace, compile_kernels(dry_run(workspace, [SMALL]), jobs=2)


def test_two_kernels_are_compiled_and_exported_by_flashinfer_itself(built: tuple[Path, DryRunAnswer]) -> None:
    workspace, answer = built
    assert [(kernel.status, kernel.reason) for kernel in answer.kernels] == [("built", "")] * 2
    assert not answer.errors
    for kernel in answer.kernels:
        data = Path(kernel.path).read_bytes()
        assert data.startswith(b"\x7fELF")
        assert len(data) == kernel.size > 50_000
        assert Path(kernel.path).is_relative_to(workspace)
        assert json.loads((Path(kernel.path).parent / "meta.json").read_text()) == answer.meta[kernel.module]
    assert {kernel.module for kernel in answer.kernels} == {"b12x_moe_sm120a_cute_dsl"}
    assert sorted(kernel.cases["small"] for kernel in answer.kernels) == [(1,), (2,)]


def test_flashinfers_own_loader_takes_them_and_compiles_nothing(built: tuple[Path, DryRunAnswer]) -> None:
    workspace, first = built
    answer = check_kernels(dry_run(workspace, [SMALL]))
    assert {kernel.name: kernel.status for kernel in answer.kernels} == {kernel.name: "accepted" for kernel in first.kernels}
    assert answer.compiles == 0


def test_a_second_build_finds_them_and_compiles_nothing(built: tuple[Path, DryRunAnswer]) -> None:
    workspace, _ = built
    assert {kernel.status for kernel in compile_kernels(dry_run(workspace, [SMALL]), jobs=2).kernels} == {"present"}


def test_a_missing_object_and_another_meta_are_refused_with_the_reason(built: tuple[Path, DryRunAnswer], tmp_path: Path) -> None:
    workspace, first = built
    copy = tmp_path / "copy"
    shutil.copytree(workspace, copy)
    objects = [copy / Path(kernel.path).relative_to(workspace) for kernel in first.kernels]
    objects[0].unlink()
    meta = objects[1].parent / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"source_sha256": "0"}))
    answer = check_kernels(dry_run(copy, [SMALL]))
    assert [(kernel.status, kernel.reason) for kernel in answer.kernels] == [
        ("refused", "object is not there"),
        ("refused", "meta.json differs in source_sha256"),
    ]
    assert answer.compiles >= 2


@pytest.mark.parametrize("path", ["", *FLASHINFERS], ids=lambda path: Path(path).name or "installed")
def test_every_mode_and_activation_is_named_and_what_is_not_kept_on_disk_is_told(path: str, tmp_path: Path) -> None:
    cases = [
        SMALL | {"id": "nvfp4", "tokens": [1, 64]},
        SMALL | {"id": "mxfp4", "quant": "mxfp4"},
        SMALL | {"id": "w4a16", "quant": "w4a16"},
        SMALL | {"id": "relu2", "activation": "relu2"},
        SMALL | {"id": "gelu", "activation": "gelu_tanh"},
        SMALL | {"id": "oai", "activation": "swigluoai_uninterleave", "swiglu": {"alpha": 1.7, "beta": 1.0, "limit": 7.0}},
        SMALL | {"id": "direct", "inter": 256},
        SMALL | {"id": "function", "calls": "function", "tokens": [64, 1]},
        SMALL | {"id": "shared", "scales": "shared", "activation": "relu2"},
    ]
    answer = name_kernels(dry_run(tmp_path, cases, path=path))
    assert not answer.errors
    asked = {case for kernel in answer.kernels for case in kernel.cases}
    assert asked == {case["id"] for case in cases} - {"w4a16"}
    assert all(kernel.status == "asked" for kernel in answer.kernels)
    told = {(item.kernel, case) for item in answer.left_out for case in item.cases}
    assert ("W4A16FusedMoeKernel", "w4a16") in told
    assert ("MoEDirectMicroKernel", "direct") in told
    assert any(item.kind == "triton" for item in answer.left_out)
    assert all(kernel.fallback for kernel in answer.kernels if set(kernel.cases) == {"direct"} and "micro_m1" in kernel.kernel)
    assert not any(Path(tmp_path).rglob("*.o"))


def place(answer: DryRunAnswer, run: DryRun) -> None:
    """Installs what was built for the Python of a run, below its workspace, with the meta.json that its FlashInfer expects."""
    interpreter = interpreter_at(run.python, run.environ)
    package = scan(interpreter.search_path).package("flashinfer")
    assert package is not None
    target = Target(
        package=package,
        search_path=interpreter.search_path,
        cache_tag=interpreter.cache_tag,
        soabi=interpreter.abi,
        arch="sm_120a",
        environ=run.environ,
    )
    built_for = str(Path(answer.key_files[0]).parents[3])
    meta = expected_meta(target, relative_key_files(built_for, answer.key_files))
    cached_ops = Path(run.workspace) / Path(answer.jit_dir).relative_to(Path(answer.jit_dir).parents[4])
    objects = {Path(kernel.path).name: Path(kernel.path) for kernel in answer.kernels}
    digests = {Path(kernel.path).name: kernel.sha256 for kernel in answer.kernels}
    install_module(cached_ops, answer.kernels[0].module, meta, objects, digests=digests, owned={}, timeout=60.0)


def other_path(tmp_path: Path) -> str:
    """The installed FlashInfer under another path."""
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None
    assert spec.origin is not None
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "flashinfer").symlink_to(Path(spec.origin).parent)
    return str(tmp_path / "elsewhere")


@pytest.mark.parametrize("python", [sys.executable, *PYTHONS], ids=lambda path: Path(path).parents[1].name)
def test_what_is_built_here_is_taken_under_another_path_and_another_python(
    built: tuple[Path, DryRunAnswer], tmp_path: Path, python: str
) -> None:
    """The farm's Python has a CPU build of torch, was filled by pip; a Python of KCACHE_TEST_PYTHONS differs in all of that."""
    run = replace(
        dry_run(tmp_path / "home", [SMALL], path=other_path(tmp_path) if python == sys.executable else ""), python=python
    )
    first = built[1]
    copied = tmp_path / "home" / Path(first.jit_dir).relative_to(built[0])
    shutil.copytree(first.jit_dir, copied)
    plain = check_kernels(run)
    assert {kernel.status for kernel in plain.kernels} == {"refused"}  # what a plain copy is worth
    assert all("source_sha256" in kernel.reason for kernel in plain.kernels)
    shutil.rmtree(copied)
    place(first, run)
    answer = check_kernels(run)
    assert {kernel.name: kernel.status for kernel in answer.kernels} == {kernel.name: "accepted" for kernel in first.kernels}
    assert answer.compiles == 0


def test_a_plain_copy_is_deleted_by_flashinfers_next_build_and_a_placed_one_is_kept(
    built: tuple[Path, DryRunAnswer], tmp_path: Path
) -> None:
    """Why our objects must never lie beside another meta.json: what the user had goes with them."""
    third = [SMALL | {"tokens": [4]}]
    run = dry_run(tmp_path / "home", third, path=other_path(tmp_path))
    place(built[1], run)
    answer = compile_kernels(run, jobs=1)
    (kernel,) = answer.kernels
    directory = Path(kernel.path).parent
    assert kernel.status == "built"
    assert len(list(directory.glob("*.o"))) == 3
    meta = directory / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"source_sha256": "another"}))
    Path(kernel.path).unlink()
    compile_kernels(run, jobs=1)
    assert [path.name for path in directory.glob("*.o")] == [Path(kernel.path).name]


def test_one_case_that_flashinfer_refuses_loses_nothing_of_the_others(tmp_path: Path) -> None:
    cases = [SMALL | {"id": "narrow", "hidden": 200}, SMALL | {"id": "split", "local_experts": 4}, SMALL]
    answer = name_kernels(dry_run(tmp_path, cases))
    assert len(answer.kernels) == 2
    assert {error.case for error in answer.errors} == {"narrow", "split"}
    assert any("multiple of 128" in error.error for error in answer.errors)
    assert any("Expert Parallelism only for" in error.error for error in answer.errors)


def recipe(name: str) -> Recipe:
    return read_recipe(str(MANIFESTS / f"{name}.toml"))


def test_the_names_depend_on_the_sm_count_and_not_on_the_products_name(tmp_path: Path) -> None:
    cases = [case for case in dry_run_cases(recipe("qwen3-30b-a3b"), "0.7.4") if case["id"] == "nvfp4-tp1-ep1-wrapper"]

    def names(slug: str) -> set[str]:
        answer = name_kernels(dry_run(tmp_path, cases, product(slug)))
        assert not answer.errors
        return {kernel.kernel for kernel in answer.kernels}

    large, small = names("rtx-pro-6000"), names("rtx-5070-ti")
    assert len(large) >= 8
    assert large != small


def test_every_allowed_shape_of_every_shipped_manifest_is_taken_by_flashinfer(tmp_path: Path) -> None:
    cases = {}
    for path in sorted(MANIFESTS.glob("*.toml")):
        for case in dry_run_cases(read_recipe(str(path)), "0.7.4"):
            cases[f"{path.stem}: {case['id']}"] = case
    answer = name_kernels(dry_run(tmp_path, [case | {"id": name} for name, case in cases.items()]))
    assert not answer.errors
    met = {case for kernel in answer.kernels for case in kernel.cases} | {case for item in answer.left_out for case in item.cases}
    assert met == set(cases)


def test_a_shipped_model_whose_shape_no_mode_allows_is_reported_by_the_build(tmp_path: Path) -> None:
    words = ["build", "--manifest", str(MANIFESTS / "gpt-oss-120b.toml"), "--kinds", "b12x-moe", "--gpu", "rtx-pro-6000"]
    command = [sys.executable, "-m", "kcache", *words, "-o", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    report = json.loads(done.stdout)
    assert (done.returncode, report["status"]) == (1, "failed")
    assert "mxfp4-tp1-ep1 is not for b12x-moe: hidden size 2880 is not a multiple of 128" in report["entries"][0]["reason"]
    assert "Traceback" not in done.stderr
