"""How many compilers may run at once here: cores and memory of this process, limits of its control groups included.

FlashInfer lets ninja start one compiler per core unless MAX_JOBS is set (`jit/cpp_ext.py`, _get_num_workers, 0.7.4), and ninja
counts the host's cores, not the container's memory. A container with many cores and little memory is then killed while it
compiles (case B03). Reads /proc and /sys only; what cannot be read sets no limit.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from kcache.values import dataclass

BYTES_PER_JOB = 6 << 30
"""Memory to allow for each nvcc, bytes.

The largest of FlashInfer 0.7.4's sampling modules: `cub_topk.cu` for sm_90a with nvcc 13.0.88 was measured at 5.4 GiB resident
(5,799,124,992 bytes, in ptxas). Most other sources need 0.5 to 2 GiB, so this is the figure at which no mix of them fails.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """How many compilers may run at once, and why that many, in a line for people."""

    jobs: int
    reason: str


def build_jobs(environ: Mapping[str, str], root: str = "") -> Jobs:
    """The number of compilers to run at once.

    A MAX_JOBS that FlashInfer would follow is kept as it is. Otherwise the smaller of cores and memory, at least 1.

    Args:
        environ: the environment; read is MAX_JOBS.
        root: prefix of /proc and /sys, for tests.
    """
    given = environ.get("MAX_JOBS", "")
    if given.isdigit() and int(given) > 0:
        return Jobs(jobs=int(given), reason=f"MAX_JOBS={given}")
    cores, memory = available_cores(root), available_memory(root)
    if memory is None or cores <= memory // BYTES_PER_JOB:
        return Jobs(jobs=cores, reason=f"{cores} cores")
    jobs = max(1, memory // BYTES_PER_JOB)
    return Jobs(jobs=jobs, reason=f"{memory / 2**30:.1f} GiB of memory, {BYTES_PER_JOB >> 30} GiB for each compiler")


def available_cores(root: str = "") -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its control groups, rounded up; at least 1."""
    cores = len(os.sched_getaffinity(0))
    for quota in _cpu_quotas(root):
        cores = min(cores, max(1, -(-quota[0] // quota[1])))
    return max(1, cores)


def available_memory(root: str = "") -> int | None:
    """Bytes that this process may still use: what the kernel calls available, and each limit of its control groups.

    A group's limit counts less what its processes hold and cannot give back (usage less file pages). None where nothing is
    known.
    """
    found = [value for value in (_meminfo(root), *_memory_rooms(root)) if value is not None]
    return min(found) if found else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as stream:
            return stream.read().strip()
    except OSError:
        return ""


def _number(path: str) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None


def _meminfo(root: str) -> int | None:
    for line in _read(f"{root}/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def _mounts(root: str) -> Iterator[tuple[str, str, str, frozenset[str]]]:
    """Control group file systems: (type, mount point, what of the file system is mounted there, super options)."""
    for line in _read(f"{root}/proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, rest = left.split(), right.split()
        if len(fields) > 4 and rest and rest[0] in ("cgroup", "cgroup2"):
            yield rest[0], fields[4], fields[3], frozenset(rest[-1].split(","))


def _directories(controller: str, root: str) -> Iterator[tuple[str, int]]:
    """The directories of this process's group and of all groups above it, as far as they are visible: (path, version)."""
    groups: dict[str, str] = {}
    for line in _read(f"{root}/proc/self/cgroup").splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        groups.update(dict.fromkeys(names.split(","), path))
    for kind, point, shown, options in _mounts(root):
        name = "" if kind == "cgroup2" else controller
        if name not in groups or (kind == "cgroup" and controller not in options):
            continue
        # In a container that shares the host's names, the group's path goes on from what is mounted here.
        path = groups[name]
        inside = path[len(shown) :] if shown != "/" and path.startswith(shown) else path
        parts = [part for part in inside.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            yield "/".join([f"{root}{point}", *parts[:depth]]), 2 if kind == "cgroup2" else 1


def _cpu_quotas(root: str) -> Iterator[tuple[int, int]]:
    """(quota, period) in microseconds of every group that has a quota."""
    for directory, version in _directories("cpu", root):
        if version == 2:
            quota, _, period = _read(f"{directory}/cpu.max").partition(" ")
        else:
            quota, period = _read(f"{directory}/cpu.cfs_quota_us"), _read(f"{directory}/cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            yield int(quota), int(period)


def _memory_rooms(root: str) -> Iterator[int]:
    for directory, version in _directories("memory", root):
        limit = _number(f"{directory}/{'memory.max' if version == 2 else 'memory.limit_in_bytes'}")
        if limit is None:  # version 2 says `max`; version 1 a number near 2^63, which bounds nothing
            continue
        usage = _number(f"{directory}/{'memory.current' if version == 2 else 'memory.usage_in_bytes'}") or 0
        yield max(0, limit - max(0, usage - _file_pages(directory, version)))


def _file_pages(directory: str, version: int) -> int:
    """Bytes of a group that are cache of files, which the kernel takes back before it kills."""
    wanted = ("inactive_file ", "active_file ") if version == 2 else ("total_inactive_file ", "total_active_file ")
    lines = _read(f"{directory}/memory.stat").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(wanted))
