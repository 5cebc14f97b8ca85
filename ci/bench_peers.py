"""`ci/bench --peers`: kcache beside what people use instead, in one run, on two real modules, in containers that differ.

For each way and each world: did the server's process get the modules without the compiler (`cicc`, counted by a wrapper in its
place), and how long from the first command to both modules loaded. Where a header's content changed, compiling is right.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ci.bench import Bench
from ci.peer_ways import BARE, CONTENT, HOME, SITE, TIMES, WORLDS, Way, WayFailedError, World, every_way
from kcache.probe.packages import this_interpreter
from kcache.probe.toolkit import find_toolkit, make_home

NEEDED = ("sh", "env", "tar", "zstd", "cat", "uname")
"""Programs that a container without a toolchain has."""


def counting_cuda(scratch: Path) -> tuple[Path, Path]:
    """A CUDA_HOME whose device compiler writes down each start, and CUDA's runtime library."""
    toolkit = make_home(
        find_toolkit(os.environ, [Path(path) for path in this_interpreter().search_path]), scratch / "cuda", os.uname().machine
    )
    real = (toolkit.home / "nvvm").resolve()
    (toolkit.home / "nvvm").unlink()
    shutil.copytree(real, toolkit.home / "nvvm", copy_function=lambda source, target: Path(target).symlink_to(source))
    wrapper = toolkit.home / "nvvm" / "bin" / "cicc"
    wrapper.unlink()
    wrapper.write_text(f'#!/bin/sh\necho cicc >> "$PEER_LOG"\nexec {real}/bin/cicc "$@"\n')
    wrapper.chmod(0o755)
    return toolkit.home, next((toolkit.home / "lib64").glob("libcudart.so.*"))


def site_copy(folder: Path) -> Path:
    """FlashInfer at a path of its own, with headers that may be changed without changing the installed ones."""
    from container import copy_flashinfer

    copy_flashinfer(folder)
    for part in ("include", "csrc"):
        for path in (folder / "flashinfer" / "data" / part).rglob("*"):
            if path.is_file():
                content, times = path.read_bytes(), path.stat()
                path.unlink()
                path.write_bytes(content)
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return folder


class Peers:
    """The farm, the worlds, and what was found."""

    def __init__(self, bench: Bench, hub: Any) -> None:
        self.scratch = bench.scratch
        self.cuda, self.runtime = counting_cuda(bench.scratch)
        self.site = site_copy(bench.scratch / "site")
        self.other = site_copy(bench.scratch / "elsewhere" / "site")
        tools = bench.scratch / "tools"
        tools.mkdir()
        for name in NEEDED:
            (tools / name).symlink_to(shutil.which(name) or sys.exit(f"ci/bench --peers needs {name}"))
        self.tools = tools
        self.ways = every_way(bench.scratch / "ways", hub)
        self.cells: dict[str, dict[str, dict[str, Any]]] = {}

    def world(self, name: str) -> World:
        home = self.scratch / ("homes/other" if name == HOME else "homes/farm")
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        log = self.scratch / "compiles"
        log.write_text("")
        site = self.other if name == SITE else self.site
        cuda = None if name == BARE else self.cuda
        return World(name=name, home=home, site=site, log=log, cuda=cuda, tools=self.tools, runtime=self.runtime)

    @contextmanager
    def changed(self, name: str) -> Iterator[None]:
        """The farm's headers, touched or changed while a world lasts."""
        headers = sorted((self.site / "flashinfer" / "data" / "include").rglob("*.cuh"))
        before = {path: (path.read_bytes(), path.stat()) for path in headers} if name in (TIMES, CONTENT) else {}
        for path in before:
            if name == CONTENT and path.name == "cascade.cuh":
                path.write_bytes(before[path][0] + b"\n// changed\n")
            os.utime(path)
        yield
        for path, (content, times) in before.items():
            path.write_bytes(content)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def cell(self, way: Way, name: str) -> dict[str, Any]:
        """One way in one world, from an empty home to both modules loaded."""
        with self.changed(name):
            world = self.world(name)
            started = time.perf_counter()
            try:
                environ = way.install(world)
                installed = time.perf_counter() - started
                loaded = world.child(*way.load, **environ)
            except WayFailedError as error:
                return {"failed": str(error), "compiles": _lines(world.log)}
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "install": installed, "compiles": _lines(world.log), **loaded}

    def all(self, runs: int) -> None:
        for way in self.ways:
            farm = self.world("farm")
            way.pack(farm)
            row = self.cells[way.name] = {}
            for name in way.worlds:
                row[name] = self.cell(way, name)
                print(way.name, "|", name, "|", row[name], file=sys.stderr, flush=True)
            again = [self.cell(way, HOME if HOME in way.worlds else way.worlds[0]) for _ in range(runs)]
            row["runs"] = {"seconds": [cell.get("seconds") for cell in again], "install": [cell.get("install") for cell in again]}
            if hasattr(way, "stop"):
                way.stop()


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def verdict(cell: dict[str, Any], name: str) -> str:
    """What a cell came to, in a word or two."""
    if "failed" in cell:
        return "fails"
    if name == CONTENT:
        return "notices" if cell["compiles"] else "does not notice"
    return "yes" if not cell["compiles"] else f"compiles ({cell['seconds']:.0f} s)"


def table(peers: Peers) -> Table:
    found = Table(title="without a compiler in a container that differs from the farm in one thing?")
    for column in ("way", "bytes", "ready in another HOME", *WORLDS):
        found.add_column(column)
    for way in peers.ways:
        row = peers.cells[way.name]
        seconds = [second for second in row["runs"]["seconds"] if second is not None]
        ready = f"{statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})" if seconds else "never"
        cells = [verdict(row[name], name) if name in row else "" for name in WORLDS]
        found.add_row(way.name, f"{way.carried:,}", ready, *cells)
    return found


def neuron() -> str:
    """Whether what the cache of optimum-neuron needs can be installed here; its synchronise does this for Neuron's compiler."""
    words = [sys.executable, "-m", "pip", "install", "--dry-run", "-q", "--no-deps", "libneuronxla"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return (
        "installs"
        if done.returncode == 0
        else "not run: libneuronxla, which its cache is written against, is not on the package index"
    )


def measure(bench: Bench) -> None:
    """The table, and the numbers behind it."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from hub.process import local_hub

    with local_hub(bench.scratch / "hub") as hub:
        peers = Peers(bench, hub)
        peers.all(bench.runs)
    Console(width=200).print(table(peers))
    said = neuron()
    print(f"optimum-neuron: {said}")
    ways = {way.name: {"bytes": way.carried, **peers.cells[way.name]} for way in peers.ways}
    bench.numbers["peers"] = {"ways": ways, "optimum-neuron": said}
