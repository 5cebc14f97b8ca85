"""`ci/bench --curves`: what a first restore costs against entries, modules, bytes and containers, each beside its physical limit.

The limit is `zstd -dc | tar x` of the same archives: bytes, decompression and names, nothing else, in as many processes.
Libraries are arbitrary bytes, half of them zeros, so that any size can be had; everything else about the entries is real.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from ci.bench import KCACHE, Bench, Sample, pairs, run, spread

MODULES = (1, 10, 50, 100, 250, 500)
SIZES = (1, 10, 100, 1000)
"""MB of libraries."""
CONTAINERS = (1, 2, 4, 8, 16, 32, 64)
ENTRIES = (10, 1_000, 10_000, 100_000)
MODULE_BYTES = 64 << 10


def content(size: int, seed: int) -> bytes:
    """Bytes that compress by half, as those of a library do."""
    block = 32 << 10
    made = random.Random(seed)
    blocks = [made.randbytes(block) + bytes(block) for _ in range(max(1, size // (2 * block)))]
    return b"".join(blocks)[:size]


class Curves:
    """Stores of a size, and what restoring from them costs."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.found: dict[str, list[dict[str, Any]]] = {}

    def store(self, name: str, modules: int, size: int) -> Path:
        """A local store with one entry of so many modules, of so many bytes each."""
        from entries import make_fitting_entry, publish

        place = self.bench.scratch / f"{name}-entries"
        make_fitting_entry(place, {f"module_{number}": content(size, number) for number in range(modules)})
        publish(place, self.bench.scratch / name)
        shutil.rmtree(place)
        return self.bench.scratch / name

    def restore(self, store: Path) -> Sample:
        """Into an empty home, which is removed again."""
        home = self.bench.fresh()
        sample = run([*KCACHE, "restore", "--from", str(store), "--arch", self.bench.arch], self.bench.environ(home))
        shutil.rmtree(home)
        return sample

    def untar(self, store: Path) -> Sample:
        home = self.bench.fresh()
        lines = [f"zstd -dc '{path}' | tar x -C '{home}'" for path in sorted((store / "v1" / "archives").rglob("*.tar.zst"))]
        sample = run(["/bin/sh", "-c", " && ".join(lines)], self.bench.environ(home))
        shutil.rmtree(home)
        return sample

    def point(self, curve: str, x: int, ours: list[Sample], limit: list[Sample]) -> None:
        def seconds(samples: list[Sample]) -> list[float]:
            return [round(sample.seconds, 4) for sample in samples]

        self.found.setdefault(curve, []).append({"x": x, "kcache": seconds(ours), "limit": seconds(limit)})
        name = f"{curve}: {x:,}"
        self.bench.rows.append((name, spread(ours), spread(limit), f"{_median(ours) / _median(limit):.2f} x", ""))
        print(name, spread(ours), spread(limit), file=sys.stderr, flush=True)

    def by_size(self) -> None:
        runs = max(3, self.bench.runs // 3)
        for curve, sizes in (
            ("modules", [(count, count, MODULE_BYTES) for count in MODULES]),
            ("MB", [(mb, 1, mb * 10**6) for mb in SIZES]),
        ):
            for x, modules, size in sizes:
                store = self.store(f"{curve}-{x}", modules, size)
                self.point(curve, x, *pairs(partial(self.restore, store), partial(self.untar, store), runs))
                shutil.rmtree(store)

    def by_containers(self) -> None:
        """All at once: each sample is one container's own time."""
        store = self.store("containers", 2, 5 * 10**6)
        for count in CONTAINERS:
            with ThreadPoolExecutor(count) as pool:
                ours = list(pool.map(lambda _: self.restore(store), range(count)))
                limit = list(pool.map(lambda _: self.untar(store), range(count)))
            self.point("containers", count, ours, limit)

    def by_entries(self) -> None:
        """The others are of other environments; the limit knows nothing of them."""
        from ci.bench_hub import crowd
        from kcache import index, manifest

        for count in ENTRIES:
            store = self.store(f"entries-{count}", 2, 5 * 10**6)
            lines = index.parse_index(next((store / "v1" / "env").glob("*/*/index.json")).read_bytes()).entries
            crowd(store, manifest.parse_manifest((store / lines[0].manifest.path).read_bytes()), count)
            self.point(
                "entries",
                count,
                *pairs(partial(self.restore, store), partial(self.untar, store), self.bench.runs),
            )
            shutil.rmtree(store)


def _median(samples: list[Sample]) -> float:
    return statistics.median(sample.seconds for sample in samples)


def measure(bench: Bench) -> None:
    """Every curve. The numbers are under `curves` in the JSON file."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    curves = Curves(bench)
    started = time.perf_counter()
    curves.by_size()
    curves.by_containers()
    curves.by_entries()
    bench.numbers["curves"] = curves.found
    bench.numbers["curves seconds"] = {"all": time.perf_counter() - started}
