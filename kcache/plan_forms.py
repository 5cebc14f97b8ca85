"""A plan as what schedulers read: a GitHub Actions workflow, a Slurm array, a Kubernetes Indexed Job. Pure texts.

Every shard writes into a directory of its own; publishing comes after all of them and is the reader's to add, since it needs
credentials. JSON is YAML, so workflow and Job are written as JSON. All jobs of a form are for machines of one sort: those without
a GPU, or those with the one that is tuned for.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from kcache.plan import Plan


def shard_lines(plan: Plan) -> list[list[str]]:
    """The command lines of each shard. One that fails does not stop the next; the shard then fails at its end."""
    commands = {job.name: shlex.join(job.command) for job in plan.jobs}
    return [[commands[name] for name in shard] for shard in plan.shards]


def gpu_of(plan: Plan) -> str:
    """The GPU that every job of a plan needs; empty for none."""
    return plan.jobs[0].needs


def _script(lines: list[str]) -> str:
    """Runs all lines; fails if any did."""
    return "\n".join(["failed=0", *(f"{line} || failed=1" for line in lines), "exit $failed"])


def github(plan: Plan) -> str:
    """A workflow with a matrix: a row for each shard."""
    rows = [
        {"shard": number, "jobs": " ".join(shard), "seconds": plan.shard_seconds(shard), "run": _script(lines)}
        for number, (shard, lines) in enumerate(zip(plan.shards, shard_lines(plan), strict=True))
    ]
    upload = {"name": "entries-${{ matrix.shard }}", "path": "entries"}
    workflow: dict[str, Any] = {
        "name": "kcache build",
        "on": {"workflow_dispatch": {}},
        "jobs": {
            "build": {
                "runs-on": ["self-hosted", gpu_of(plan)] if gpu_of(plan) else "ubuntu-latest",
                "strategy": {"fail-fast": False, "matrix": {"include": rows}},
                "steps": [
                    {"uses": "actions/checkout@v4"},
                    {"run": "pip install 'kcache[build]'"},
                    {"run": "${{ matrix.run }}", "shell": "bash"},
                    {"uses": "actions/upload-artifact@v4", "with": upload},
                ],
            }
        },
    }
    return json.dumps(workflow, indent=2) + "\n"


def _cases(plan: Plan, variable: str) -> str:
    """A shell script that runs the shard whose number a variable holds."""
    parts = [f'case "${{{variable}:?is not set: this script is for an array of jobs}}" in']
    for number, lines in enumerate(shard_lines(plan)):
        parts += [f"{number})", _script(lines), ";;"]
    return "\n".join([*parts, f'*) echo "there is no shard ${variable}" >&2; exit 2 ;;', "esac"])


def slurm(plan: Plan) -> str:
    """A batch script for `sbatch`. Its time limit is three times the longest shard's estimate."""
    longest = max((plan.shard_seconds(shard) for shard in plan.shards), default=0.0)
    head = [
        "#!/bin/bash",
        "#SBATCH --job-name=kcache-build",
        f"#SBATCH --array=0-{len(plan.shards) - 1}",
        f"#SBATCH --time={int(longest * 3 / 60) + 10}",
        "#SBATCH --cpus-per-task=4",
        "#SBATCH --mem=24G",
        *([f"#SBATCH --gpus-per-task={gpu_of(plan)}:1", "#SBATCH --ntasks=1"] if gpu_of(plan) else []),
    ]
    return "\n".join([*head, _cases(plan, "SLURM_ARRAY_TASK_ID"), ""])


def kubernetes(plan: Plan, image: str) -> str:
    """An Indexed Job; its pods write to the volume claim `kcache-entries`."""
    resources = {"cpu": "4", "memory": "24Gi"}
    if gpu_of(plan):
        resources["nvidia.com/gpu"] = "1"
    selector = {"nodeSelector": {"kcache/gpu": gpu_of(plan)}} if gpu_of(plan) else {}
    container = {
        "name": "build",
        "image": image,
        "command": ["/bin/bash", "-c", _cases(plan, "JOB_COMPLETION_INDEX")],
        "workingDir": "/work",
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "entries", "mountPath": "/work/entries"}],
    }
    job: dict[str, Any] = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "kcache-build"},
        "spec": {
            "completionMode": "Indexed",
            "completions": len(plan.shards),
            "parallelism": len(plan.shards),
            "backoffLimit": 3 * len(plan.shards),
            "template": {
                "spec": {
                    **selector,
                    "restartPolicy": "Never",
                    "containers": [container],
                    "volumes": [{"name": "entries", "persistentVolumeClaim": {"claimName": "kcache-entries"}}],
                }
            },
        },
    }
    return json.dumps(job, indent=2) + "\n"
