"""Proof in a fresh process: the library loads what was restored, and no compiler ran.

The process runs the server's own Python with the server's variables, with JIT disabled, with a trap in place of every compiler on
PATH and in CUDA_HOME, and with an ear on Python's own audit events. Importing FlashInfer costs 2 to 13 s, so this is for image
builds, first boots and tests, never for the hot path. On a host without a driver a stand-in for libcuda is loaded: nothing is
launched.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcache.archs import arch_list_entry, capability
from kcache.errors import ProbeError
from kcache.probe.stub_libcuda import write_stub

CHILD = Path(__file__).parent.parent / "probe" / "children" / "verify_modules.py"

# Names under which a build reaches a compiler; every one becomes a trap. The child listens for the same names.
TRAPPED = tuple(
    """nvcc cicc ptxas fatbinary cudafe++ nvlink ninja cc c++ gcc g++ clang clang++ cc1 cc1plus
    ld ld.gold ld.lld as cmake make""".split()  # noqa: SIM905 (read as the words they are)
)

_TRAP = """#!/bin/sh
for word in "$@"; do
  # A question, not a compilation: answered as on a host that has no such program.
  [ "$word" = --version ] && exit 127
done
echo "$0 $*" >>{log}
echo "kcache verify: $0 was called although everything was restored" >&2
exit 97
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProof:
    """One module in the fresh process.

    loaded:  whether FlashInfer handed it out.
    ours:    whether the library that it loaded is a restored one.
    seconds: from asking for the module to having it.
    via:     the function of FlashInfer that was asked.
    """

    module: str
    loaded: bool
    ours: bool
    seconds: float
    via: str
    paths: tuple[str, ...]
    error: str

    def to_json(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "loaded": self.loaded,
            "ours": self.ours,
            "seconds": round(self.seconds, 6),
            "via": self.via,
            "paths": list(self.paths),
            "error": self.error,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What a fresh process showed. `compiler_runs` counts starts of a compiler or of ninja, trapped or heard."""

    modules: tuple[ModuleProof, ...]
    compiler_runs: int
    compiler_commands: tuple[str, ...]
    flashinfer: str
    import_seconds: float
    seconds: float

    @property
    def proven(self) -> bool:
        return bool(self.modules) and self.compiler_runs == 0 and all(m.loaded and m.ours for m in self.modules)

    def to_json(self) -> dict[str, Any]:
        return {
            "status": "proven" if self.proven else "failed",
            "compiler_runs": self.compiler_runs,
            "compiler_commands": list(self.compiler_commands),
            "flashinfer": self.flashinfer,
            "import_seconds": round(self.import_seconds, 3),
            "seconds": round(self.seconds, 3),
            "modules": [module.to_json() for module in self.modules],
        }


def verify(
    modules: Sequence[str],
    *,
    python: str,
    environ: Mapping[str, str],
    described: Sequence[str],
    cuda_release: str,
    preload: Sequence[str],
    restored: Sequence[Path],
    timeout: float = 600.0,
) -> Proof:
    """Loads `modules` in a fresh process.

    Args:
        python: the server's interpreter.
        environ: the server's variables, restored exports included.
        described: architectures in FlashInfer's spelling (`90a`) of GPUs that are not here; empty where the GPUs speak.
        cuda_release: such as `13.0`; what a described GPU's torch says.
        preload: libraries that a CUDA build of torch would have loaded by then.
        restored: directories in which a restored library lies.
        timeout: seconds for the whole process.

    Raises:
        ProbeError: the process gave no answer (FlashInfer does not import, or took too long).
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kcache-verify-") as name:
        scratch = Path(name)
        log, builds, answer = scratch / "compilers", scratch / "builds", scratch / "answer.json"
        trapped = trap_compilers(scratch, log)
        variables = {**environ, **trapped, "FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_JIT_BUILD_LOG": str(builds)}
        gpu = None
        if described:
            variables["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(map(arch_list_entry, described))
            major, minor = capability(described[0])
            gpu = {"major": major, "minor": minor, "cuda_release": cuda_release}
        with _driver(scratch) as stand_in:
            request = {
                "modules": list(modules),
                "preload": [*stand_in, *preload],
                "answer": str(answer),
                "compilers": TRAPPED,
                "describe": gpu,
            }
            document = _run(python, request, variables, answer, timeout)
        trap_lines = trapped_starts(log)
        build_lines = builds.read_text().splitlines() if builds.exists() else []
    heard = [str(command) for command in document["compiler_starts"]]
    return Proof(
        modules=tuple(_module_proof(item, restored) for item in document["modules"]),
        # One start may be trapped and heard: the larger count is the number of starts.
        compiler_runs=max(len(trap_lines), len(heard), len(build_lines)),
        compiler_commands=tuple(heard or trap_lines or build_lines),
        flashinfer=str(document["flashinfer"]),
        import_seconds=float(document["import_seconds"]),
        seconds=time.monotonic() - started,
    )


def _module_proof(item: Mapping[str, Any], restored: Sequence[Path]) -> ModuleProof:
    paths = tuple(str(path) for path in item["paths"])
    ours = bool(paths) and all(any(Path(path).is_relative_to(directory) for directory in restored) for path in paths)
    return ModuleProof(
        module=str(item["module"]),
        loaded=bool(item["loaded"]),
        ours=ours,
        seconds=float(item["seconds"]),
        via=str(item["via"]),
        paths=paths,
        error=str(item["error"]),
    )


def trapped_starts(log: Path) -> list[str]:
    """The command lines that fell into the traps of `trap_compilers`."""
    return log.read_text().splitlines() if log.exists() else []


def trap_compilers(scratch: Path, log: Path) -> dict[str, str]:
    """Puts traps in place and returns the variables that lead every build into them."""
    traps, cuda = scratch / "bin", scratch / "cuda" / "bin"
    for directory in (traps, cuda):
        directory.mkdir(parents=True)
        for name in TRAPPED:
            trap = directory / name
            trap.write_text(_TRAP.format(log=log))
            trap.chmod(0o755)
    return {
        "PATH": f"{traps}:{os.environ.get('PATH', '/usr/bin:/bin')}",
        "CUDA_HOME": str(cuda.parent),
        "CUDA_PATH": str(cuda.parent),
        "FLASHINFER_NVCC": str(cuda / "nvcc"),
        "CC": str(traps / "cc"),
        "CXX": str(traps / "c++"),
    }


@contextmanager
def _driver(scratch: Path) -> Iterator[list[str]]:
    """The stand-in for libcuda to load first, where this host has no driver of its own."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        stub = scratch / "libcuda.so.1"
        write_stub(stub, os.uname().machine, ())
        yield [str(stub)]
    else:
        yield []


def _run(python: str, request: Mapping[str, Any], environ: Mapping[str, str], answer: Path, timeout: float) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [python, str(CHILD)],
            input=json.dumps(request).encode(),
            env=dict(environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"the fresh process did not answer within {timeout:g} s") from error
    except OSError as error:
        raise ProbeError(f"{python} cannot be run", why=str(error), remedy="Name the server's Python with --python.") from error
    try:
        document = json.loads(answer.read_bytes())
    except (OSError, ValueError) as error:
        tail = done.stdout.decode("utf-8", "replace").strip().splitlines()[-1:]
        why = tail[0] if tail else f"exit status {done.returncode}"
        remedy = "Run `python -c 'import flashinfer'` with the same Python to see the whole message."
        raise ProbeError("the fresh process ended without an answer", why=why, remedy=remedy) from error
    assert isinstance(document, dict)
    return document
