"""Which builds manifests ask for, which of them a store lacks, and how they are spread over machines. Pure.

A job is one `kcache build`. What it costs is what farms recorded for the same kind and model, else for the kind, else a figure
that was measured once. Shards are a function of the jobs alone: the dearest job first, each to the shard with the least to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kcache.index import IndexEntry
from kcache.key import AUTOTUNE
from kcache.values import dataclass

DEFAULT_SECONDS: Mapping[str, float] = {"sampling": 645.0}
"""Measured: sampling (80 s) and topk (565 s) for sm_90a on two cores, FlashInfer 0.7.4, CUDA 13.0."""

KERNEL_SECONDS = 66.0
"""A kind of kernels that nothing was recorded of: twenty of them at 3.3 s, as b12x MoE kernels took on one core."""

MODEL, KIND, DEFAULT = "recorded for this model", "recorded for this kind", "nothing recorded: a measured default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One build.

    name:     unique in a plan, such as `b12x-moe-rtx-5090-qwen3-30b-a3b`.
    gpu:      the product that kernels are described for; empty for nvcc modules. Only a job that tunes needs the GPU itself.
    variants: entries that it makes, as their keys name them; empty where there is one without a variant.
    command:  words of the command line.
    after:    names of jobs whose entries it should find published: tuning calls kernels, and would compile what is missing.
    """

    name: str
    kind: str
    model: str
    flashinfer: str
    cuda: str
    machine: str
    arch: str
    gpu: str
    sm_count: str
    variants: tuple[str, ...]
    command: tuple[str, ...]
    after: tuple[str, ...] = ()

    @property
    def needs(self) -> str:
        """The GPU that a machine must have for it; empty where it needs none."""
        return self.gpu if self.kind == AUTOTUNE else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Seconds on one machine, and where the figure comes from."""

    seconds: float
    source: str


def is_missing(job: Job, entries: Iterable[IndexEntry]) -> bool:
    """Whether any entry of a job is not among those that are published."""
    there = {entry.key.variant for entry in entries if _serves(job, entry)}
    return not set(job.variants or there) <= there or not there


def _serves(job: Job, entry: IndexEntry) -> bool:
    key = entry.key
    facts = key.ingredients
    same = (key.kind, key.model, facts["flashinfer.version"], facts["platform.machine"], key.arch)
    return (
        same == (job.kind, job.model, job.flashinfer, job.machine, job.arch)
        and facts["cuda.release"].partition(".")[0] == job.cuda.partition(".")[0]
        and facts.get("gpu.sm_count", "") == job.sm_count
    )


def cost(job: Job, entries: Sequence[IndexEntry]) -> Cost:
    """What a job will take, from whatever was recorded anywhere."""
    of_kind = [entry for entry in entries if entry.key.kind == job.kind and entry.build_seconds > 0]
    number = max(len(job.variants), 1)
    of_model = [entry for entry in of_kind if job.model and entry.key.model == job.model]
    for found, source in ((of_model, MODEL), (of_kind, KIND)):
        if found:
            return Cost(seconds=round(number * sum(e.build_seconds for e in found) / len(found), 1), source=source)
    return Cost(seconds=DEFAULT_SECONDS.get(job.kind, KERNEL_SECONDS * number), source=DEFAULT)


def spread(costs: Mapping[str, float], shards: int) -> list[list[str]]:
    """Names by shard: never more shards than names, none empty; the longest is at most 4/3 of the best (Graham, 1969)."""
    count = min(shards, len(costs))
    made: list[list[str]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for name in sorted(costs, key=lambda one: (-costs[one], one)):
        least = min(range(count), key=lambda number: (loads[number], len(made[number])))
        made[least].append(name)
        loads[least] += costs[name]
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Jobs with their costs, in shards. `left_out`: what is asked for and no job builds, each with the reason."""

    jobs: tuple[Job, ...]
    costs: Mapping[str, Cost]
    shards: tuple[tuple[str, ...], ...]
    left_out: tuple[str, ...]
    present: int

    def shard_seconds(self, shard: Sequence[str]) -> float:
        return round(sum(self.costs[name].seconds for name in shard), 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": "kcache.plan/1",
            "jobs": [self._job(job) for job in self.jobs],
            "shards": [{"jobs": list(shard), "seconds": self.shard_seconds(shard)} for shard in self.shards],
            "seconds": round(sum(one.seconds for one in self.costs.values()), 1),
            "present": self.present,
            "left_out": list(self.left_out),
        }

    def _job(self, job: Job) -> dict[str, Any]:
        about = self.costs[job.name]
        return {
            "name": job.name,
            "kind": job.kind,
            "model": job.model,
            "flashinfer": job.flashinfer,
            "cuda": job.cuda,
            "machine": job.machine,
            "arch": job.arch,
            "gpu": job.gpu,
            "needs_gpu": bool(job.needs),
            "after": list(job.after),
            "variants": list(job.variants),
            "command": list(job.command),
            "seconds": about.seconds,
            "seconds_source": about.source,
        }
