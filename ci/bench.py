"""Measures `kcache restore` beside what it is compared with; see `ci/bench`. Prints medians, spreads and ratios of this run."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

MIB = 1 << 20
MAX_RSS_KIB = 1 << 10
SCRIPT = Path(sys.executable).with_name("kcache")
KCACHE = [str(SCRIPT)] if SCRIPT.exists() and "--module" not in sys.argv else [sys.executable, "-m", "kcache"]
"""What an entrypoint calls; with --module the checkout in the current directory, installed or not."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Wall seconds and peak resident bytes of one whole process."""

    seconds: float
    peak: int


def run(command: Sequence[str], environ: dict[str, str], *, directory: Path | None = None, codes: Sequence[int] = (0,)) -> Sample:
    """One process from start to end, which must end with one of `codes`."""
    started = time.perf_counter()
    process = subprocess.Popen(command, env=environ, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in codes:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}: {said.decode()}")
    return Sample(seconds=seconds, peak=usage.ru_maxrss * MAX_RSS_KIB)


def pairs(one: Callable[[], Sample], other: Callable[[], Sample], runs: int) -> tuple[list[Sample], list[Sample]]:
    """Both in turn, A B A B, after one of each that is not counted."""
    one()
    other()
    samples = [(one(), other()) for _ in range(runs)]
    return [a for a, _ in samples], [b for _, b in samples]


def median(samples: list[Sample]) -> float:
    return statistics.median(sample.seconds for sample in samples)


def spread(samples: list[Sample]) -> str:
    seconds = [sample.seconds * 1000 for sample in samples]
    return f"{statistics.median(seconds):.0f} ms ({min(seconds):.0f} to {max(seconds):.0f})"


class Bench:
    """One store, one architecture, one scratch directory."""

    def __init__(self, store: Path, arch: str, scratch: Path, runs: int) -> None:
        self.store, self.arch, self.scratch, self.runs = store, arch, scratch, runs
        self.count = 0
        self.rows: list[tuple[str, str, str, str, str]] = []
        self.numbers: dict[str, dict[str, Any]] = {}

    def environ(self, home: Path) -> dict[str, str]:
        return {"HOME": str(home), "PATH": os.environ["PATH"]}

    def fresh(self) -> Path:
        self.count += 1
        home = self.scratch / f"home-{self.count}"
        home.mkdir()
        return home

    def restore(self, home: Path) -> Sample:
        return run([*KCACHE, "restore", "--from", str(self.store), "--arch", self.arch], self.environ(home))

    def untar(self) -> Sample:
        """What anybody would do by hand with the same bytes: one pipe for each archive."""
        target = self.fresh()
        archives = sorted((self.store / "v1" / "archives").rglob("*.tar.zst"))
        lines = [f"zstd -dc '{archive}' | tar x -C '{target}'" for archive in archives]
        return run(["/bin/sh", "-c", " && ".join(lines)], self.environ(target))

    def python(self, code: str) -> Sample:
        return run([sys.executable, "-c", code], self.environ(self.scratch))

    def add(self, name: str, ours: list[Sample], theirs: list[Sample], goal: float, floor: float = 0.0) -> None:
        """A row. The goal is ours <= goal x theirs + floor (seconds)."""
        ratio = median(ours) / median(theirs)
        met = median(ours) <= goal * median(theirs) + floor
        text = f"{goal:g} x" + (f" + {floor * 1000:.0f} ms" if floor else "")
        self.rows.append((name, spread(ours), spread(theirs), f"{ratio:.2f} x", f"{text}: {'met' if met else 'MISSED'}"))
        self.numbers[name] = {"ours_s": median(ours), "theirs_s": median(theirs), "ratio": ratio, "met": float(met)}

    def all(self) -> None:
        first, by_hand = pairs(lambda: self.restore(self.fresh()), self.untar, self.runs)
        self.add("first restore / zstd -dc | tar x", first, by_hand, 1.25, 0.150)
        home = self.fresh()
        again, click = pairs(lambda: self.restore(home), lambda: self.python("import click"), self.runs)
        self.add("nothing to do / python -c 'import click'", again, click, 3.0)
        bare = self.python("pass")
        above = max(sample.peak for sample in first) - bare.peak
        met = "met" if above <= 64 * MIB else "MISSED"
        self.rows.append(("peak memory of a first restore above python", f"{above / MIB:.0f} MiB", "", "", f"64 MiB: {met}"))
        self.numbers["peak memory"] = {"bytes": above, "met": float(above <= 64 * MIB)}

    def kernels(self) -> None:
        """The b12x kernels of one model: builds from nothing on one core and on two, and the restore of its entry."""
        out, store = self.scratch / "kernel-entries", self.scratch / "kernel-store"
        store.mkdir()
        manifest = self.scratch / "model.toml"
        manifest.write_text(one_layout((MANIFESTS / "qwen3-30b-a3b.toml").read_text()))
        words = [*KCACHE, "build", "--manifest", str(manifest), "--kinds", "b12x-moe", "--gpu", KERNEL_GPU]
        alone = run([*words, "--jobs", "1", "-o", str(self.scratch / "alone")], self.environ(self.scratch))
        built = run([*words, "--jobs", "2", "-o", str(out)], self.environ(self.scratch))
        met = "met" if built.seconds <= BUILD_GOAL else "MISSED"
        self.rows.append(("build of Qwen3-30B-A3B's NVFP4 kernels", f"{built.seconds:.1f} s", "", "", f"{BUILD_GOAL:g} s: {met}"))
        gain = alone.seconds / built.seconds
        met = "met" if gain >= CORES_GOAL else "MISSED"
        one_core = f"{alone.seconds:.1f} s"
        self.rows.append(
            ("that build on one core / on two", one_core, f"{built.seconds:.1f} s", f"{gain:.2f} x", f"{CORES_GOAL:g} x: {met}")
        )
        run([*KCACHE, "publish", str(out), "--to", str(store)], self.environ(self.scratch))
        command = [*KCACHE, "restore", "--from", str(store), "--gpu", KERNEL_GPU]
        run(command, self.environ(self.fresh()))
        first = [run(command, self.environ(self.fresh())) for _ in range(self.runs)]
        met = "met" if median(first) <= RESTORE_GOAL else "MISSED"
        self.rows.append(("first restore of that entry", spread(first), "", "", f"{RESTORE_GOAL * 1000:.0f} ms: {met}"))
        self.numbers["kernels"] = {"build_s": built.seconds, "one_core_s": alone.seconds, "restore_s": median(first)}


MANIFESTS = Path(__file__).parents[1] / "manifests"
KERNEL_GPU = "rtx-pro-6000"
BUILD_GOAL, RESTORE_GOAL = 20.0, 0.3
"""Seconds, on two cores."""
CORES_GOAL = 1.8
"""What a second core is worth to a build."""


def one_layout(text: str) -> str:
    """A shipped manifest narrowed to NVFP4 on one rank, with its ten token counts."""
    import re

    text = re.sub(r"^quantization = .*$", 'quantization = ["nvfp4"]', text, flags=re.MULTILINE)
    text = re.sub(r"^tp = .*$", "tp = [1]", text, flags=re.MULTILINE)
    return re.sub(r"^maximum = .*$", "maximum = 2048", text, flags=re.MULTILINE)


def small_store(scratch: Path, arch: str) -> Path:
    out, store = scratch / "entries", scratch / "store"
    store.mkdir()
    for words in (["build", "--modules", "cascade", "--arch", arch, "-o", str(out)], ["publish", str(out), "--to", str(store)]):
        subprocess.run([sys.executable, "-m", "kcache", *words], check=True)
    return store


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path)
    parser.add_argument("--arch", default="9.0a")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--module", action="store_true", help="run python -m kcache instead of the installed command")
    parser.add_argument("--kernels", action="store_true", help="build and restore b12x kernels instead of modules")
    parser.add_argument("--hub", action="store_true", help="restore from a local Hub, and from stores of many entries")
    parser.add_argument("--curves", action="store_true", help="cost against entries, modules, bytes and containers")
    parser.add_argument("--peers", action="store_true", help="what people use instead, in containers that differ from the farm")
    options = parser.parse_args()
    if shutil.which("zstd") is None:
        sys.exit("ci/bench compares with the zstd program; install it first")
    with tempfile.TemporaryDirectory(prefix="kcache-bench-") as name:
        scratch = Path(name)
        store = options.store or (
            scratch if options.kernels or options.peers or options.curves else small_store(scratch, options.arch)
        )
        bench = Bench(store, options.arch, scratch, options.runs)
        sys.path.insert(0, str(Path(__file__).parents[1]))
        if options.hub:
            from ci import bench_hub

            bench_hub.measure(bench)
        elif options.peers:
            from ci import bench_peers

            bench_peers.measure(bench)
        elif options.curves:
            from ci import bench_curves

            bench_curves.measure(bench)
        elif options.kernels:
            bench.kernels()
        else:
            bench.all()
    table = Table(title=f"medians of {options.runs} runs (smallest to largest)")
    for column in ("measured", "kcache", "compared with", "ratio", "goal"):
        table.add_column(column)
    for row in bench.rows:
        table.add_row(*row)
    Console(width=150).print(table)
    if options.json:
        options.json.write_text(json.dumps(bench.numbers, indent=2))


if __name__ == "__main__":
    main()
