"""`kcache plan`: what is missing, what it costs, how it is spread, and that each form is what its own tool takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcache.cli.build import command as build
from kcache.index import Blob, Index, IndexEntry, index_path
from kcache.key import EntryKey
from kcache.plan import spread

ROOT = Path(__file__).parents[2]
MANIFEST = "manifests/qwen3-30b-a3b.toml"
SHA = "sha256:" + "0" * 64


def plan(*words: object) -> str:
    command = [sys.executable, "-m", "kcache", "plan", "--manifest", MANIFEST, "--machine", "x86_64", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def published(directory: Path, job: Mapping[str, Any], seconds: float) -> Path:
    """A store that has what a job of kind sampling makes."""
    ingredients = {
        **{"platform.machine": job["machine"], "flashinfer.version": job["flashinfer"], "flashinfer.sources": SHA},
        **{"cuda.release": job["cuda"], "gpu.arch": job["arch"], "tvm_ffi.version": "0.1.15", "build.flags": "default"},
    }
    key = EntryKey(kind=job["kind"], modules=("sampling", "topk"), ingredients=ingredients)
    blob = Blob(path="v1/x", size=1, sha256=SHA)
    path = directory / index_path(ingredients)
    path.parent.mkdir(parents=True)
    entry = IndexEntry(key=key, manifest=blob, archive=blob, unpacked_size=1, build_seconds=seconds)
    path.write_bytes(Index(entries=(entry,)).encode())
    return directory


@given(st.dictionaries(st.text(min_size=1, max_size=6), st.floats(0, 1e6), min_size=1, max_size=30), st.integers(1, 8))
def test_shards_hold_every_job_once_and_are_balanced(costs: dict[str, float], shards: int) -> None:
    made = spread(costs, shards)
    assert sorted(name for shard in made for name in shard) == sorted(costs)
    assert len(made) == min(shards, len(costs)) and all(made)
    assert made == spread(dict(reversed(costs.items())), shards)
    loads = [sum(costs[name] for name in shard) for shard in made]
    assert max(loads) <= sum(costs.values()) / len(made) + max(costs.values()) + 1e-6


def test_what_a_store_has_is_left_out_and_its_times_are_the_costs(tmp_path: Path) -> None:
    whole = json.loads(plan("--json"))
    job = next(job for job in whole["jobs"] if job["name"] == "sampling-120f-flashinfer-0.7.4")
    assert (job["seconds"], job["seconds_source"]) == (645.0, "nothing recorded: a measured default")
    store = published(tmp_path / "store", job, 300.0)
    rest = json.loads(plan("--json", "--missing-from", store))
    assert {one["name"] for one in whole["jobs"]} - {one["name"] for one in rest["jobs"]} == {job["name"]}
    assert rest["present"] == 1
    other = next(one for one in rest["jobs"] if one["kind"] == "sampling")
    assert (other["arch"], other["seconds"], other["seconds_source"]) == ("121a", 300.0, "recorded for this kind")
    assert not any(one["needs_gpu"] for one in rest["jobs"])


def test_every_command_line_is_one_that_build_takes() -> None:
    jobs = json.loads(plan("--json"))["jobs"]
    assert len(jobs) == 5
    for job in jobs:
        assert job["command"][:2] == ["kcache", "build"]
        context = build.make_context("kcache build", job["command"][2:], parent=click.Context(build))
        assert context.params["output"] == f"entries/{job['name']}"
        assert context.params["kinds"] == (job["kind"],)
        assert all((ROOT / name).is_file() for name in context.params["manifests"])


def test_a_github_workflow_is_valid_and_its_matrix_runs_every_job(tmp_path: Path) -> None:
    path = tmp_path / "build.json"
    path.write_text(plan("--format", "github", "--shards", "2"))
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["jobs"]["build"]["strategy"]["matrix"]["include"]
    assert len(rows) == 2
    check_runs(tmp_path, [row["run"] for row in rows], "")


def test_a_slurm_array_is_a_script_that_runs_every_job(tmp_path: Path) -> None:
    script = plan("--format", "slurm", "--shards", "3")
    assert "#SBATCH --array=0-2" in script
    check_runs(tmp_path, [script] * 3, "SLURM_ARRAY_TASK_ID")


def test_a_kubernetes_job_is_valid_and_runs_every_job(tmp_path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    job = json.loads(plan("--format", "k8s", "--shards", "4", "--image", "farm:1"))
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"]) == ("Indexed", 4)
    shell = spec["template"]["spec"]["containers"][0]["command"]
    assert shell[:2] == ["/bin/bash", "-c"]
    check_runs(tmp_path, [shell[2]] * 4, "JOB_COMPLETION_INDEX")


def check_runs(directory: Path, scripts: list[str], variable: str) -> None:
    """Runs each shard with a `kcache` that writes down how it was called and fails: all jobs are called all the same."""
    log = directory / "calls"
    fake = directory / "bin" / "kcache"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/bash\nprintf "kcache %s\\n" "$*" >> {log}\nexit 1\n')
    fake.chmod(0o755)

    def run(script: str, number: int) -> int:
        environ = {"PATH": f"{fake.parent}:{os.environ['PATH']}"} | ({variable: str(number)} if variable else {})
        return subprocess.run(["bash", "-c", script], env=environ, capture_output=True, check=False, timeout=60).returncode

    assert [run(script, number) for number, script in enumerate(scripts)] == [1] * len(scripts)
    wanted = [" ".join(job["command"]) for job in json.loads(plan("--json"))["jobs"]]
    assert sorted(log.read_text().splitlines()) == sorted(wanted)
    if variable:
        assert run(scripts[0], 99) == 2


def test_tuning_waits_for_its_kernels_on_its_own_gpu_and_needs_it(tmp_path: Path) -> None:
    manifest = tmp_path / "model.toml"
    text = (ROOT / MANIFEST).read_text().replace('"sampling", "b12x-moe"', '"sampling", "b12x-moe", "autotune"')
    manifest.write_text(text + '\n[tuning]\noperations = ["moe-bf16-cutlass"]\n')
    words = ("--manifest", manifest, "--kinds", "b12x-moe,autotune")
    jobs = {job["name"]: job for job in json.loads(plan(*words, "--json"))["jobs"]}
    tuning = [job for job in jobs.values() if job["kind"] == "autotune" and job["gpu"] == "rtx-5090"]
    assert [job["needs_gpu"] for job in jobs.values()] == [job["kind"] == "autotune" for job in jobs.values()]
    assert len(tuning) == 1 and tuning[0]["after"]
    assert {(jobs[name]["kind"], jobs[name]["gpu"]) for name in tuning[0]["after"]} <= {
        ("b12x-moe", "rtx-5090"),
        ("sampling", ""),
    }
    script = plan(*words, "--needs", "rtx-5090", "--format", "slurm")
    assert "#SBATCH --gpus-per-task=rtx-5090:1" in script and "b12x-moe-rtx-5090-model" not in script
    environ = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "0"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=120
    )
    # The real `kcache build` is reached: it says that this host has no such GPU.
    assert done.returncode == 1 and "GPU" in done.stderr, done.stderr
