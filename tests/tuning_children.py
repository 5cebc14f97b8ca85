"""Environments in which FlashInfer's tuner is asked, and what kcache works out for them, for tests with real FlashInfers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kcache.key import known
from kcache.probe.host import Host, probe_host
from kcache.tuning_facts import TuningHost
from kcache.workflows import child
from kcache.workflows.tuning_host import tuning_host

FLASHINFERS = [path for path in os.environ.get("KCACHE_TEST_FLASHINFERS", "").split(os.pathsep) if path]

CHILDREN = Path(__file__).parents[1] / "kcache" / "probe" / "children"

GPU = "NVIDIA H200"


def environ_of(path: str, home: Path, extra: Mapping[str, str]) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("CUTE_DSL_ARCH", "LD_LIBRARY_PATH")}
    return environ | {"PYTHONPATH": path, "HOME": str(home)} | dict(extra)


def host_of(environ: Mapping[str, str], python: str = sys.executable) -> Host:
    return probe_host(python=python, described_archs=["9.0a"], environ=environ)


def worked_out(environ: Mapping[str, str], python: str = sys.executable) -> TuningHost:
    return tuning_host(host_of(environ, python), gpu=known(GPU))


DESCRIBED = {
    "name": GPU, "major": 9, "minor": 0, "sm_count": 132, "memory_bytes": 141 << 30, "l2_bytes": 60 << 20,
    "shared_block_bytes": 227 << 10, "shared_sm_bytes": 228 << 10,
}  # fmt: skip

TUNE = """
import json, sys
request = json.load(sys.stdin)
sys.path.insert(0, request["children"])
import described_gpu
import torch
cuda = torch.version.cuda
described_gpu.describe(request["gpu"], "13.0")
import flashinfer
torch.version.cuda = cuda
from flashinfer.autotuner import AutoTuner, TunableRunner, TuningConfig
class PlainRunner(TunableRunner):
    def get_valid_tactics(self, inputs, profile): return [0, 1, 2]
    def forward(self, inputs, tactic=-1, do_preparation=False, **kwargs): return inputs[0]
    def get_cache_key_extras(self, inputs): return (inputs[0].dtype, True, None, 1.5)
tuner, runner, config = AutoTuner.get(), PlainRunner(), TuningConfig()
keys = [AutoTuner._get_cache_key(request["operation"], runner, (torch.Size((m, 64)), torch.Size((64, 32))), config,
    runner.get_cache_key_extras([torch.empty(m, 64, dtype=torch.bfloat16)])) for m in request["sizes"]]
if request["wait"]:
    import os
    print("ready", flush=True)
    while not os.path.exists(request["wait"]): pass
if request["file"]:
    for key in keys:
        tuner.profiling_cache[key] = ((128, request["tactic"]), None)
    tuner.save_configs(request["file"])
else:
    from flashinfer.autotune_cache import autotune_v2
    sys.path.insert(0, request["children"])
    import tuning_calls
    with autotune_v2(mode="tune", measurement_policy=tuning_calls.policy_of(request["policy"])):
        for key in keys:
            tuner._active_managed_store.publish(key.file_key, "PlainRunner", [128, request["tactic"]], key_fields=key.key_fields)
print()
print(json.dumps({"keys": [key.file_key for key in keys]}))
"""


def request_of(sizes: list[int], **changed: Any) -> dict[str, Any]:
    plain = {"children": str(CHILDREN), "gpu": DESCRIBED, "operation": "kcache::plain", "sizes": sizes, "tactic": 3}
    return {**plain, "file": "", "policy": {}, "wait": "", **changed}


def tuned(environ: Mapping[str, str], sizes: list[int], **changed: Any) -> list[str]:
    """Has FlashInfer write results; their keys."""
    done = subprocess.run(
        [sys.executable, "-c", TUNE], input=json.dumps(request_of(sizes, **changed)), check=True, capture_output=True, text=True,
        env=dict(environ), timeout=600,
    )  # fmt: skip
    return list(json.loads(done.stdout.splitlines()[-1])["keys"])


def replayed(environ: Mapping[str, str], **request: Any) -> dict[str, Any]:
    """What FlashInfer finds, asked by the child that kcache ships."""
    whole = {"stores": [], "files": [], "calls": [], "describe": {"gpu": DESCRIBED, "cuda_release": None}, **request}
    answer, how = child.run(
        sys.executable, "autotune_replay.py", lambda path: {**whole, "answer": path}, environ=dict(environ), jobs=1,
        seconds_before=600, seconds_per_job=0, limit=600, progress=None,
    )  # fmt: skip
    assert answer is not None, how
    return answer
