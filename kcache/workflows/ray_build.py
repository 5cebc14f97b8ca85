"""`kcache build --engine ray`: the parts of a build on the machines of a Ray cluster. Ray runs it; this asks and collects.

Every machine of the cluster has kcache and a compiler (`kcache[build]`) of the same versions. Ray places a part where its
processors and its memory are free, and starts a part that was lost with its worker or machine again elsewhere, at most
`RETRIES` times (Ray: Tasks, fault tolerance, `max_retries`). A part that fails by itself is not started again.
Workers only compile. They have no store and no key: their files come back to the one process that asked, which publishes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kcache.errors import ProbeError
from kcache.gpu_products import find_product
from kcache.workflows.build import BuildReport
from kcache.workflows.spread_build import Done, Part, put_together, read_done

RETRIES = 3
"""How often a part that was lost with its worker is started again."""

_PR_SET_PDEATHSIG = 1


def build_on_ray(parts: Sequence[Part], output: Path, progress: Callable[[int, int, str], None]) -> BuildReport:
    """Builds parts on the cluster that RAY_ADDRESS names, else on the one of this machine, else on a new one of it alone.

    Raises:
        ProbeError: Ray is not installed, there is no cluster at that address, or no machine of it could ever hold a part.
    """
    started = time.monotonic()
    ray = _ray()
    with contextlib.redirect_stdout(sys.stderr):  # Ray prints what became of workers; stdout is the report's
        already = ray.is_initialized()
        try:
            if not already:
                ray.init(log_to_driver=False, configure_logging=False, include_dashboard=False)
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            remedy = "Set RAY_ADDRESS to that of its head."
            raise ProbeError("no Ray cluster was reached", why=str(error), remedy=remedy) from error
        try:
            _check_room(ray, parts)
            done = _run(ray, parts, progress)
        finally:
            if not already:
                ray.shutdown()
    return put_together(output, done, cores=parts[0].cores, seconds=time.monotonic() - started)


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise ProbeError("Ray is not installed", why=str(error), remedy="Install it with: pip install 'kcache[ray]'.") from error
    return ray


def _check_room(ray: Any, parts: Sequence[Part]) -> None:
    """Ray would wait for ever for a machine that is not there."""
    nodes = _machines(ray)
    for part in parts:
        if part.gpu:
            _accelerator(nodes, part)
            continue
        if not any(node.get("CPU", 0) >= part.cores and node.get("memory", 0) >= part.memory for node in nodes):
            most = max((node.get("memory", 0) for node in nodes), default=0)
            raise ProbeError(
                f"no machine of the Ray cluster can hold {part.name}",
                why=f"it needs {part.cores} CPUs and {part.memory / 2**30:.0f} GiB; the largest has {most / 2**30:.1f} GiB",
                remedy="Lower --jobs, or start a larger machine (`ray start --memory`).",
            )


def _machines(ray: Any) -> list[Mapping[str, float]]:
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _accelerator(nodes: Sequence[Mapping[str, float]], part: Part) -> str:
    """The cluster's own name of the GPU that a part tunes for, such as `H200` or `GeForce-RTX-5090`."""
    names = {name.partition(":")[2] for node in nodes for name in node if name.startswith("accelerator_type:")}
    for name in sorted(names):
        if (found := find_product(name)) is not None and found.slug == part.gpu:
            return name
    raise ProbeError(
        f"no machine of the Ray cluster has the GPU that {part.name} tunes for",
        why=f"it is a {part.gpu}, and the cluster has {', '.join(sorted(names)) or 'none'}",
        remedy="Add such a machine, or leave the kind autotune out with --kinds.",
    )


def _needs(ray: Any, part: Part) -> dict[str, Any]:
    """What Ray must set aside for a part: a GPU of the right type for one that tunes, memory for one that compiles."""
    if part.gpu:
        return {"num_gpus": 1, "accelerator_type": _accelerator(_machines(ray), part)}
    return {"num_cpus": part.cores, "memory": part.memory}


def _run(ray: Any, parts: Sequence[Part], progress: Callable[[int, int, str], None]) -> dict[str, Done]:
    remote = ray.remote(run_part)
    waiting: dict[Any, Part] = {}
    for part in parts:
        options = remote.options(name=part.name, max_retries=RETRIES, **_needs(ray, part))
        waiting[options.remote(part.words, part.cores, dict(part.files), bool(part.gpu))] = part
    done: dict[str, Done] = {}
    while waiting:
        (ready,), _ = ray.wait(list(waiting), num_returns=1)
        part = waiting.pop(ready)
        try:
            done[part.name] = ray.get(ready)
        except ray.exceptions.RayError as error:
            done[part.name] = Done(failed=f"its worker was lost, and so were {RETRIES} others: {str(error).splitlines()[0]}")
        progress(len(done), len(parts), part.name)
    return done


def run_part(words: tuple[str, ...], cores: int, files: Mapping[str, str], tunes: bool) -> Done:
    """On a worker: one `kcache build` in a directory of its own, which a worker that is killed leaves behind. `tunes`: on the GPU
    that it got."""
    with tempfile.TemporaryDirectory(prefix="kcache-part-") as place:
        for file, text in files.items():
            Path(place, file).write_text(text, encoding="utf-8")
        # Ray hides GPUs from what did not ask for one; which of them a host has is no matter for a compiler.
        environ = {name: value for name, value in os.environ.items() if tunes or name != "CUDA_VISIBLE_DEVICES"}
        command = [sys.executable, "-m", "kcache", "build", *words, "-o", "out", "--json"]
        ended = _call([*command, *([] if tunes else ["--jobs", str(cores)])], place, environ)
        return read_done(Path(place, "out"), ended.returncode, ended.stdout, ended.stderr)


def _call(command: Sequence[str], place: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command that does not outlive this worker."""
    return subprocess.run(
        command, cwd=place, env=dict(environ), capture_output=True, text=True, check=False, preexec_fn=_end_with_parent
    )


def _end_with_parent() -> None:
    """In the child: SIGTERM when the worker is killed, upon which `kcache build` stops its compilers; Ray may kill it first."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
