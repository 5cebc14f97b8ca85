"""`kcache build --kinds autotune` from a manifest to a store, by the command line.

There is no GPU: NVML is a library that names one, and the child that tunes has FlashInfer's real tuner measure made-up timings
(`described_tuning.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tuning_children import CHILDREN, environ_of

from kcache.kinds.autotune_v1 import parse_file

NVML = """
#include <stdio.h>
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "error"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "580.65.06"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { *out = (void *)1; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
int nvmlDeviceGetName(void *gpu, char *out, unsigned size) { snprintf(out, size, "NVIDIA H200"); return 0; }
int nvmlDeviceGetUUID(void *gpu, char *out, unsigned size) { snprintf(out, size, "GPU-1"); return 0; }
int nvmlDeviceGetNumGpuCores(void *gpu, unsigned *out) { *out = 132 * 128; return 0; }
"""

MANIFEST = """
format = "kcache.recipe/1"
kinds = ["autotune"]
model = { name = "a/model", source = "a test", hidden_size = 2048, moe_intermediate_size = 768, experts = 128, top_k = 8, \
activation = "silu", quantization = ["nvfp4"] }
parallel = { tp = [1], ep = [1] }
tokens = { capture = [16, 32], maximum = 64 }
tuning = { operations = ["mm-bf16-cublaslt"], matrices = ["7168x2048"], vllm = "%s" }
targets = { gpus = ["%s"], cuda = "13.0", flashinfer = ["%s"] }
"""

VLLM = "5" * 64


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a host that seems to have an H200, and a Python that pretends to measure."""
    top = tmp_path_factory.mktemp("host")
    (top / "nvml.c").write_text(NVML)
    library = str(top / "libnvidia-ml.so.1")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(top / "nvml.c")], check=True, timeout=60)
    driver = Path(__file__).parents[1] / "described_tuning.py"
    (top / "sitecustomize.py").write_text(
        "import os, sys\n"
        "name = os.path.basename(sys.orig_argv[-1])\n"
        "if name in ('autotune_tune.py', 'autotune_replay.py'):\n"
        f"    words = [{str(driver)!r}, {str(CHILDREN)!r}, name[:-3], {str(top / 'pretend.json')!r}]\n"
        "    os.execv(sys.executable, [sys.executable, *words])\n"
    )
    environ = {**environ_of(str(top), top / "farm", {}), "LD_LIBRARY_PATH": str(top), "TOP": str(top)}
    return {name: text for name, text in environ.items() if not name.startswith(("KCACHE_", "VLLM_"))}


def build(
    host: Mapping[str, str], output: Path, *words: str, gpu: str = "h200", **pretend: Any
) -> tuple[int, dict[str, Any], str]:
    from importlib.metadata import version

    top = Path(host["TOP"])
    (top / "pretend.json").write_text(json.dumps(pretend))
    (top / "model.toml").write_text(MANIFEST % (VLLM, gpu, version("flashinfer-python")))
    command = [
        "build",
        "--manifest",
        str(top / "model.toml"),
        "-o",
        str(output),
        "--json",
        *words,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "kcache", *command], env=dict(host), capture_output=True, text=True, check=False, timeout=300
    )
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def tunings(output: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text())["provenance"]["tuning"] for path in sorted(output.glob("*.json"))]


@pytest.mark.real
def test_a_manifest_is_tuned_kept_and_tuned_again_and_the_better_tuning_stays(host: dict[str, str], tmp_path: Path) -> None:
    code, said, errors = build(host, tmp_path)
    assert (code, said.get("status")) == (0, "built"), errors
    assert sorted(entry["variant"] for entry in said["entries"]) == ["flashinfer", f"vllm-{VLLM[:16]}"]
    (first, other) = tunings(tmp_path)
    assert first == other
    assert (first["covered"], first["device"], "compared" in first) == (
        {"hits": 3, "misses": 0, "missed": []},
        "NVIDIA H200",
        False,
    )

    code, said, errors = build(host, tmp_path)  # nothing is tuned that was
    assert (code, said.get("status")) == (0, "up-to-date"), errors

    # Tuned again, another tactic wins, and is better when it is replayed.
    code, said, errors = build(host, tmp_path, "--retune", timings=[3.0, 1.0, 0.9])
    assert (code, said.get("status")) == (0, "built"), errors
    kept = [one["compared"] for one in tunings(tmp_path) if "compared" in one]
    assert {one["kept"] for one in kept} == {"now"}
    assert {tuple(one["milliseconds"].values()) for one in kept} == {(1.0, 0.9)}

    file = next((tmp_path / ".build" / "tuning").glob(f"*/kept/files/{VLLM}/autotune_configs.json"))
    assert {one.tactic for one in parse_file(file.read_bytes()).results.values()} == {2}


@pytest.mark.real
def test_a_tuning_that_is_no_good_makes_no_entry_and_fails_with_the_reason(host: dict[str, str], tmp_path: Path) -> None:
    lacking = [[2, "FileNotFoundError", "a module's library is missing"]]
    code, said, errors = build(host, tmp_path, fails=lacking)
    assert (code, said["status"], said["entries"][0]["model"]) == (1, "failed", "a/model")
    assert (
        "something is missing here: PlainRunner 2: FileNotFoundError: a module's library is missing"
        in said["entries"][0]["reason"]
    )
    assert "failed" in errors
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.real
def test_another_gpu_than_the_manifests_is_refused(host: dict[str, str], tmp_path: Path) -> None:
    code, _, errors = build(host, tmp_path, gpu="h100")
    assert code == 2
    assert "a/model is to be tuned for h100" in errors
    assert "this host has NVIDIA H200" in errors


@pytest.mark.real
def test_without_a_gpu_there_is_one_error_with_a_remedy(host: dict[str, str], tmp_path: Path) -> None:
    code, said, errors = build({**host, "LD_LIBRARY_PATH": ""}, tmp_path)
    assert (code, said.get("entries", [])) == (2, [])
    assert errors.count("kind autotune needs the GPU itself") == 1
    assert "Run this build on a host with the GPU" in errors
    assert not list(tmp_path.iterdir())
