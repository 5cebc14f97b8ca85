"""b12x MoE in a warm-up: its calls ask for the kernels that the farm compiles. On a described GPU; nothing is launched."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from container import REPOSITORY
from warmup_processes import Node

from kcache.gpu_products import product
from kcache.recipe import read_recipe
from kcache.recipe_shapes import dry_run_cases
from kcache.workflows.cute_build import DryRun, name_kernels

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None or importlib.util.find_spec("cutlass") is None,
        reason="FlashInfer and CuTe-DSL are not installed",
    ),
]

MANIFEST = REPOSITORY / "manifests" / "qwen3-30b-a3b.toml"
VARIANT = "nvfp4-tp1-ep1"

CALLS = """
import json, sys
request = json.loads(sys.argv[1])
import kcache.probe.children as children
sys.path.insert(0, children.__path__[0])
import cute_dry_run, b12x_calls, described_gpu
run = cute_dry_run.Run(request)
core, _ = cute_dry_run._import(request, run, b12x_calls)
cute_dry_run._patch(run, core)
b12x_calls.patch(run)
from kcache.recipe import read_recipe
from kcache.warmup import kernels, stopping
with described_gpu.OnMeta():
    report = kernels.warm_kernels("moe", read_recipe(sys.argv[2]), [sys.argv[3]], stopping.Stop(600))
print(json.dumps({"status": report.status, "reason": report.reason, "asked": sorted(run.asked)}))
"""


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> DryRun:
    recipe = read_recipe(str(MANIFEST))
    cases = [case for case in dry_run_cases(recipe, "0.7.4") if case["variant"] == VARIANT]
    return DryRun(
        python=sys.executable,
        workspace=str(tmp_path_factory.mktemp("names")),
        gpu=product("rtx-pro-6000"),
        cuda="13.0",
        cases=cases,
        environ=dict(os.environ),
    )


def test_the_calls_ask_for_the_kernels_that_the_farm_compiles(dry_run: DryRun, tmp_path: Path) -> None:
    farm = name_kernels(dry_run)
    request = dry_run.request("names", str(tmp_path / "answer"), 1, 60.0)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(request), str(MANIFEST), VARIANT],
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["status"] == "present", told
    assert told["asked"] == sorted(kernel.name for kernel in farm.kernels)
    assert len(told["asked"]) > 5


def test_without_a_gpu_kernels_are_left_out_with_the_reason(node: Node) -> None:
    code = "import json, sys\nfrom kcache.warmup import warmup\n"
    code += "print(json.dumps(warmup(kinds=('b12x-moe',), recipe=sys.argv[1]).to_json()))"
    document = node.start(code, str(MANIFEST)).document()
    assert [(module["status"], "no GPU" in module["reason"]) for module in document["modules"]] == [("skipped", True)]


def test_a_recipe_of_another_model_is_refused(node: Node) -> None:
    code = "import json, sys\nfrom kcache.warmup import warmup\n"
    code += "print(json.dumps(warmup(kinds=('b12x-moe',), recipe=sys.argv[1], model='other').to_json()))"
    document = node.start(code, str(MANIFEST)).document()
    assert "Qwen/Qwen3-30B-A3B" in document["reasons"][0]
    assert document["modules"] == []
