"""Counts and stops whatever would compile a CuTe-DSL kernel by another way than FlashInfer's own, for `cute_dry_run.py`'s proof.

In nvidia-cutlass-dsl (4.8.0) NVVM and the PTX compiler are linked into its one native library, without names that could be taken
from outside; Python reaches them by the methods of `DOORS` only: `Compiler.compile` (base_dsl/compiler.py) runs a pass pipeline
whose last step, `CudaToBinaryPass`, makes PTX and from it machine code; `PassManager.run` is that pipeline's own door, and
`compile_to` that of the library's driver. Programs (ptxas, nvcc) are heard of through Python's audit events.
Stdlib and CuTe-DSL only; imports nothing of kcache. Never undone.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

DOORS = (
    ("cutlass.base_dsl.compiler", "Compiler", "compile"),
    ("cutlass._mlir.passmanager", "PassManager", "run"),
    ("cutlass._mlir._mlir_libs._cutlass_ir", "Compiler", "compile_to"),
    ("cutlass._mlir._mlir_libs._cutlass_ir", "CuteCompiler", "compile_to"),
)
"""Module, class, method. Older compilers have no driver; without the first two nobody could say that nothing was compiled."""

NEEDED = DOORS[:2]

PROGRAMS = frozenset(("ptxas", "nvcc", "cicc", "nvlink", "fatbinary", "cudafe++"))


class Assumption(Exception):
    """This CuTe-DSL is not as this script expects; the message says what was asked for."""


def close(compiles: list[str]) -> None:
    """Every use of a door, from now on, is a line in `compiles` and an error.

    Raises:
        Assumption: CuTe-DSL has no such door, so that its uses could not be counted.
    """
    for module, kind, method in DOORS:
        owner: Any = getattr(_module(module), kind, None)
        if hasattr(owner, method):
            setattr(owner, method, _trap(compiles, f"{kind}.{method}"))
        elif (module, kind, method) in NEEDED:
            raise Assumption(f"nvidia-cutlass-dsl has no {module}.{kind}.{method}: its compilations could not be counted")
    sys.addaudithook(lambda event, args: _started(compiles, event, args))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _trap(compiles: list[str], door: str) -> Any:
    def trapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiles.append(door)
        raise RuntimeError("kcache: a kernel was compiled although everything was restored")

    return trapped


def _started(compiles: list[str], event: str, args: tuple[Any, ...]) -> None:
    """A program is about to be started: its path and its words are the first arguments of all three events."""
    if event in ("subprocess.Popen", "os.exec", "os.posix_spawn") and args[0] is not None:
        name = os.path.basename(os.fsdecode(args[0]))  # noqa: PTH119 -- may be bytes, a path, or a bare name
        if name in PROGRAMS and "--version" not in args[1]:  # FlashInfer asks nvcc for its version, which is no compilation
            compiles.append(name)
            raise RuntimeError(f"kcache: {name} was started although everything was restored")
