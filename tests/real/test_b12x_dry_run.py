"""The b12x dry run on the real FlashInfer and CuTe-DSL: kernels named, compiled by two processes, taken by FlashInfer's loader.

The model is made up and small; two kernels are compiled. Names with the real models' shapes cost no compilation.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from kcache.gpu_products import GpuProduct, product
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


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_allowed_shape_of_every_shipped_manifest_is_taken_by_flashinfer(path: Path, tmp_path: Path) -> None:
    made = read_recipe(str(path))
    if not dry_run_cases(made, "0.7.4"):
        pytest.skip("this FlashInfer has nothing for the model, as the file says")
    answer = name_kernels(dry_run(tmp_path, dry_run_cases(made, "0.7.4"), made.targets.gpus[0]))
    assert not answer.errors
    assert answer.kernels or answer.left_out
