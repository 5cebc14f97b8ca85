"""Bounds on compilers (case B03): tables of control group files, and a real group around a real process where one can be made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kcache.probe.limits import BYTES_PER_JOB, available_cores, available_memory, build_jobs

GIB = 1 << 30
CORES = len(os.sched_getaffinity(0))

V2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MEMORY = "30 23 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V1_CPU = "31 23 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


def _host(tmp_path: Path, cgroup: str, mountinfo: str, files: Mapping[str, str], available: int = 512 * GIB) -> str:
    for name, text in {
        "proc/meminfo": f"MemTotal: 9999999999 kB\nMemAvailable: {available >> 10} kB\n",
        "proc/self/cgroup": cgroup,
        "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/root rw\n" + mountinfo,
        **files,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(tmp_path)


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "files", "wanted"),
    [
        ("0::/\n", V2, {}, 512 * GIB),
        ("0::/a/b\n", V2, {"sys/fs/cgroup/a/b/memory.max": "max"}, 512 * GIB),
        ("0::/a/b\n", V2, {"sys/fs/cgroup/a/b/memory.max": f"{8 * GIB}"}, 8 * GIB),
        ("0::/a/b\n", V2, {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/memory.max": f"{3 * GIB}"}, 3 * GIB),
        ("0::/a/b\n", V2, {"sys/fs/cgroup/c/memory.max": f"{GIB}"}, 512 * GIB),
        ("0::/\n", V2, {"sys/fs/cgroup/memory.max": f"{4 * GIB}", "sys/fs/cgroup/memory.current": f"{GIB}"}, 3 * GIB),
        (
            "0::/\n",
            V2,
            {
                "sys/fs/cgroup/memory.max": f"{4 * GIB}",
                "sys/fs/cgroup/memory.current": f"{3 * GIB}",
                "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB}\nactive_file {GIB}\n",
            },
            3 * GIB,
        ),
        ("9:memory:/x\n", V1_MEMORY, {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{4 * GIB}"}, 4 * GIB),
        ("9:memory:/x/y\n", V1_MEMORY, {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{4 * GIB}"}, 4 * GIB),
        ("9:memory:/x\n", V1_MEMORY, {"sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{(1 << 63) - 4096}"}, 512 * GIB),
        # A container that sees the host's names: its own group is what is mounted.
        (
            "9:memory:/docker/abc\n",
            V1_MEMORY.replace("0:27 / ", "0:27 /docker/abc "),
            {"sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}"},
            4 * GIB,
        ),
        (
            "9:memory:/docker/abc/build\n",
            V1_MEMORY.replace("0:27 / ", "0:27 /docker/abc "),
            {"sys/fs/cgroup/memory/build/memory.limit_in_bytes": f"{2 * GIB}"},
            2 * GIB,
        ),
    ],
)
def test_memory_is_bounded_by_every_group_above(
    tmp_path: Path, cgroup: str, mountinfo: str, files: Mapping[str, str], wanted: int
) -> None:
    assert available_memory(_host(tmp_path, cgroup, mountinfo, files)) == wanted


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "files", "wanted"),
    [
        ("0::/a\n", V2, {"sys/fs/cgroup/a/cpu.max": "max 100000"}, CORES),
        ("0::/a\n", V2, {"sys/fs/cgroup/a/cpu.max": "50000 100000"}, 1),
        ("0::/a/b\n", V2, {"sys/fs/cgroup/a/cpu.max": "100000 100000"}, 1),
        ("0::/a\n", V2, {"sys/fs/cgroup/a/cpu.max": "9900000 100000"}, CORES),
        (
            "4:cpu,cpuacct:/a\n",
            V1_CPU,
            {"sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "70000", "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            1,
        ),
        (
            "4:cpu,cpuacct:/a\n",
            V1_CPU,
            {"sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000"},
            CORES,
        ),
    ],
)
def test_cores_are_bounded_by_every_quota(
    tmp_path: Path, cgroup: str, mountinfo: str, files: Mapping[str, str], wanted: int
) -> None:
    assert available_cores(_host(tmp_path, cgroup, mountinfo, files)) == wanted


def test_b03_four_gib_and_no_max_jobs_give_one_job_and_the_reason(tmp_path: Path) -> None:
    root = _host(tmp_path, "0::/\n", V2, {"sys/fs/cgroup/memory.max": f"{4 * GIB}"})
    jobs = build_jobs({}, root)
    assert jobs.jobs == 1
    assert "4.0 GiB" in jobs.reason or CORES == 1


def test_b03_a_given_max_jobs_is_kept(tmp_path: Path) -> None:
    root = _host(tmp_path, "0::/\n", V2, {"sys/fs/cgroup/memory.max": f"{4 * GIB}"})
    assert build_jobs({"MAX_JOBS": "7"}, root).jobs == 7


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "3.5"])
def test_a_max_jobs_that_means_nothing_is_not_followed(tmp_path: Path, text: str) -> None:
    root = _host(tmp_path, "0::/\n", V2, {"sys/fs/cgroup/memory.max": f"{4 * GIB}"})
    assert build_jobs({"MAX_JOBS": text}, root).jobs == 1


def test_with_memory_for_all_cores_every_core_compiles(tmp_path: Path) -> None:
    root = _host(tmp_path, "0::/\n", V2, {}, available=CORES * BYTES_PER_JOB)
    assert build_jobs({}, root).jobs == CORES


def test_nothing_that_can_be_read_sets_no_memory_limit(tmp_path: Path) -> None:
    assert available_memory(str(tmp_path)) is None
    assert build_jobs({}, str(tmp_path)).jobs == CORES


@pytest.fixture
def group() -> Iterator[Path]:
    """A real control group of version 1 or 2 with a memory limit of 4 GiB."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        path = Path(base) / f"kcache-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        try:
            (path / limit).write_text(str(4 * GIB))
        except OSError:
            path.rmdir()
            continue
        yield path
        path.rmdir()
        return
    pytest.skip("no control group with a memory limit can be made here (not root, or no writable cgroup file system)")


@pytest.mark.root
def test_b03_a_real_process_in_a_real_group_of_four_gib(group: Path) -> None:
    program = (
        "import json, os, sys; open(sys.argv[1] + '/cgroup.procs', 'w').write(str(os.getpid()))\n"
        "from kcache.probe.limits import available_memory, build_jobs\n"
        "print(json.dumps([available_memory(), build_jobs({}).jobs, build_jobs({'MAX_JOBS': '9'}).jobs]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(group)], capture_output=True, text=True, check=True, timeout=60)
    memory, jobs, kept = json.loads(done.stdout)
    assert 3 * GIB < memory <= 4 * GIB
    assert (jobs, kept) == (1, 9)
