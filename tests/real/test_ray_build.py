"""`kcache build --engine ray` on a real Ray cluster of two workers: real compilers, one worker killed while it compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from builds import BuildModules

pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]
GIB = 1 << 30

KILLER = """
import os, signal, sys, time
from pathlib import Path

def parent(number):
    return int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])

flag, launcher = sys.argv[1], sys.argv[2:]
try:
    os.mkdir(flag)
except FileExistsError:
    os.execv(sys.executable, [sys.executable, "-I", "-S", *launcher])
worker = os.getpid()
while b"ray::" not in Path(f"/proc/{worker}/cmdline").read_bytes():
    worker = parent(worker)
Path(flag, "killed").write_text(str(worker))
os.kill(worker, signal.SIGKILL)
time.sleep(60)  # as a compiler works on for a while whose kcache build is gone
"""


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory, build_cache: Path) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """A directory, and what to set for a head without processors and two workers; the second one says that it has an H200.

    The first compiler that starts there kills its worker; all others are nvcc, whose output the build cache keeps.
    """
    from ray.cluster_utils import Cluster

    place = tmp_path_factory.mktemp("farm")
    keep = build_cache / "compiler-launcher"
    keep.mkdir(exist_ok=True)
    (place / "killer.py").write_text(KILLER)
    words = [sys.executable, "-I", "-S", place / "killer.py", place / "flag"]
    launcher = " ".join(map(str, [*words, ROOT / "tests" / "compiler_launcher.py", place / "compilers.log", keep]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHINFER_NVCC_LAUNCHER", launcher)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20})
        machine: dict[str, Any] = {"num_cpus": 1, "memory": 6 * GIB, "object_store_memory": 80 << 20}
        cluster.add_node(**machine)
        cluster.add_node(**machine, num_gpus=1, resources={"accelerator_type:H200": 1})
        yield place, {"RAY_ADDRESS": cluster.address}
        cluster.shutdown()


def build(farm: tuple[Path, Mapping[str, str]], *words: object) -> tuple[int, Any, str]:
    command = [sys.executable, "-m", "kcache", "build", "--engine", "ray", *map(str, words), "--json"]
    environ = {**os.environ, **farm[1]}
    done = subprocess.run(command, cwd=farm[0], env=environ, capture_output=True, text=True, check=False, timeout=1200)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


def test_parts_come_back_to_one_publisher_though_a_worker_is_killed(
    farm: tuple[Path, Mapping[str, str]], build_modules: BuildModules
) -> None:
    code, report, said = build(farm, "--modules", "cascade,nosuch", "--arch", "9.0a", "-o", "entries")
    found = {entry["modules"][0]: entry for entry in report["entries"]}
    assert (code, report["status"], found["cascade"]["status"], found["nosuch"]["status"]) == (3, "partial", "built", "failed"), (
        said
    )
    assert (farm[0] / "flag" / "killed").exists()
    assert not Path("/proc", (farm[0] / "flag" / "killed").read_text()).exists()
    # What was published is the entry that a build on this machine makes.
    (here,) = build_modules(("cascade",)).glob("*.json")
    command = [sys.executable, "-m", "kcache", "publish", "entries", "--to", "store", "--json"]
    published = subprocess.run(command, cwd=farm[0], capture_output=True, text=True, check=False, timeout=120)
    assert published.returncode == 0, published.stderr
    assert found["cascade"]["fingerprint"] == json.loads(here.read_bytes())["fingerprint"]


def test_a_part_that_tunes_gets_a_gpu_of_its_type(farm: tuple[Path, Mapping[str, str]]) -> None:
    manifest = (ROOT / "manifests" / "qwen3-30b-a3b.toml").read_text()
    path = farm[0] / "model.toml"
    manifest = manifest.replace('"rtx-pro-6000", "rtx-5090", "gb10"', '"h200"').replace('"sampling", "b12x-moe"', '"autotune"')
    path.write_text(manifest + '\n[tuning]\noperations = ["moe-bf16-cutlass"]\n')
    code, report, _ = build(farm, "--manifest", path, "--kinds", "autotune", "-o", "tuned")
    assert (code, report["status"]) == (1, "failed")
    assert "GPU" in report["entries"][0]["reason"]  # the machine only says that it has one
    path.write_text(path.read_text().replace('"h200"', '"b200"'))
    code, report, said = build(farm, "--manifest", path, "--kinds", "autotune", "-o", "tuned")
    assert code == 1 and "it is a b200, and the cluster has H200" in said + json.dumps(report)


def test_what_no_machine_could_hold_is_refused_at_once(farm: tuple[Path, Mapping[str, str]]) -> None:
    code, report, said = build(farm, "--modules", "cascade", "--arch", "9.0a", "--jobs", 2, "-o", "never")
    assert code == 1 and "no machine of the Ray cluster can hold cascade-9.0a" in said + json.dumps(report)
