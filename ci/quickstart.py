"""The main job from end to end on one machine; see `ci/quickstart`. Every figure printed was measured in this run."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

console = Console()

MODEL = Path(__file__).parent / "quickstart-model.toml"
GPU = "rtx-pro-6000"


def kcache(*words: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """Runs one kcache command as a user would and returns its JSON."""
    console.print(f"[bold]$ kcache {' '.join(words)}[/bold]", highlight=False)
    done = subprocess.run(
        [sys.executable, "-m", "kcache", *words, "--json"], env=env, stdout=subprocess.PIPE, check=False, text=True
    )
    if done.returncode != 0:
        console.print(done.stdout, highlight=False)
        sys.exit(f"kcache {words[0]} ended with exit code {done.returncode}")
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def bare_host(home: Path) -> dict[str, str]:
    """The environment of a container that has no compiler: an empty home, and a PATH that leads to nothing."""
    empty = home / "no-programs"
    empty.mkdir(parents=True)
    return {"HOME": str(home), "PATH": str(empty), "CUDA_HOME": str(home / "no-cuda")}


def plain_copy(work: Path, home: Path, modules: list[str], arch: str) -> str:
    """What a plain copy of FlashInfer's cache directory does in another home: FlashInfer's own answer with JIT disabled."""
    built = next(work.rglob("cached_ops"), None)
    if built is None:
        return "not tried: the build directory is gone"
    target = home / ".cache" / "flashinfer" / built.relative_to(next(p for p in built.parents if p.name == "flashinfer"))
    shutil.copytree(built, target, symlinks=True)
    code = "import sys; from flashinfer.jit.core import gen_jit_spec\nfor m in sys.argv[1:]: gen_jit_spec(m, []).build_and_load()"
    environ = bare_host(home) | {"FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_CUDA_ARCH_LIST": arch}
    done = subprocess.run([sys.executable, "-c", code, *modules], env=environ, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return "loaded"
    return done.stderr.strip().splitlines()[-1].partition(":")[0].rpartition(".")[2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="9.0a")
    parser.add_argument("--sampling-kind", action="store_true")
    options = parser.parse_args()
    sys.exit(0 if all([kernels(), modules(options)]) else 1)


def kernels() -> bool:
    """CuTe-DSL kernels of a real model, for a GPU that is not here."""
    with tempfile.TemporaryDirectory(prefix="kcache-quickstart-") as name:
        scratch = Path(name)
        out, store, home = scratch / "entries", scratch / "store", scratch / "home"
        store.mkdir()
        started = time.monotonic()
        built = kcache("build", "--manifest", str(MODEL), "-o", str(out))
        build_seconds = time.monotonic() - started
        kcache("publish", str(out), "--to", str(store))
        restored = kcache("restore", "--from", str(store), "--gpu", GPU, "--prove", env=bare_host(home))
        again = kcache("restore", "--from", str(store), "--gpu", GPU, env={**bare_host(home / "x"), "HOME": str(home)})
    return report_kernels(built, build_seconds, restored, again)


def report_kernels(built: dict[str, Any], build_seconds: float, restored: dict[str, Any], again: dict[str, Any]) -> bool:
    proof = restored["proof"]["kernels"]
    table = Table(title=f"b12x MoE kernels of Qwen3-30B-A3B for {GPU}: compiled, loaded by FlashInfer, not launched")
    for column in ("kernel", "cold compilation", "in a fresh process"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    seconds = {module["module"]: module["seconds"] for module in built["modules"]}
    for kernel in proof["kernels"]:
        short = kernel["kernel"].rpartition("/")[2]
        table.add_row(short, f"{seconds[short]:.1f} s", "loaded" if kernel["accepted"] else kernel["reason"])
    console.print(table)
    console.print(
        f"build of everything: {build_seconds:.1f} s; restore: {restored['seconds'] * 1000:.0f} ms, "
        f"again: {again['seconds'] * 1000:.0f} ms; compilations in the fresh process: {proof['compiler_runs']}",
        highlight=False,
    )
    return verdict(proof["status"] == "proven" and len(proof["kernels"]) == 2 and again["status"] == "hit")


def verdict(ok: bool) -> bool:
    console.print("[bold green]proven[/bold green]" if ok else "[bold red]NOT proven[/bold red]")
    return ok


def modules(options: argparse.Namespace) -> bool:
    """nvcc modules of the sampling API."""
    wanted = ["--kinds", "sampling"] if options.sampling_kind else ["--modules", "cascade,sampling"]
    with tempfile.TemporaryDirectory(prefix="kcache-quickstart-") as name:
        scratch = Path(name)
        out, store, work = scratch / "entries", scratch / "store", scratch / "work"
        store.mkdir()
        started = time.monotonic()
        built = kcache("build", *wanted, "--arch", options.arch, "-o", str(out), "--work-dir", str(work))
        build_seconds = time.monotonic() - started
        kcache("publish", str(out), "--to", str(store))
        home = scratch / "home"
        restored = kcache("restore", "--from", str(store), "--arch", options.arch, "--prove", env=bare_host(home))
        names = [module["module"] for module in restored["proof"]["modules"]]
        copied = plain_copy(work, scratch / "copied", names, options.arch)
        again = kcache("restore", "--from", str(store), "--arch", options.arch, env={**bare_host(home / "x"), "HOME": str(home)})
    return report(built, build_seconds, restored, again, copied)


def report(built: dict[str, Any], build_seconds: float, restored: dict[str, Any], again: dict[str, Any], copied: str) -> bool:
    proof = restored["proof"]
    table = Table(title="Cold build against restore, this machine, no GPU, no nvcc and no ninja at restore")
    for column in ("module", "cold build", "load in a fresh process"):
        table.add_column(column, justify="left" if column == "module" else "right")
    seconds = {m["module"]: m["seconds"] for m in built["modules"]}
    for module in proof["modules"]:
        cold = seconds.get(module["module"])
        table.add_row(module["module"], f"{cold:.1f} s" if cold else "-", f"{module['seconds'] * 1000:.2f} ms")
    console.print(table)
    console.print(
        f"build of everything: {build_seconds:.1f} s; restore: {restored['seconds'] * 1000:.0f} ms, ", end="", highlight=False
    )
    console.print(f"again: {again['seconds'] * 1000:.0f} ms; bytes read: {restored['bytes_downloaded']:,}", highlight=False)
    console.print(f"a plain copy of the cache directory, in another home: {copied}", highlight=False)
    console.print(f"compiler runs in the fresh process: {proof['compiler_runs']}", highlight=False)
    return verdict(proof["status"] == "proven" and proof["compiler_runs"] == 0 and again["status"] == "hit")


if __name__ == "__main__":
    main()
