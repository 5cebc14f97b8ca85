"""The shim, compiled once, and commands run under it."""

from __future__ import annotations

import functools
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("shim.c")


@functools.cache
def shim() -> Path:
    """The shim as a library. Tests are skipped where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    directory = tempfile.TemporaryDirectory(prefix="kcache-shim-")
    _kept.append(directory)
    library = Path(directory.name) / "shim.so"
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True, timeout=120)
    return library


_kept: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the process ends."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What goes wrong, and at which of a command's changes below a directory (from 1 on; 0: nothing does). See shim.c."""

    under: Path
    at: int = 0
    do: str = "kill"
    on: bool = False
    only: str = ""
    gone: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a command under the shim ended: its code (negative: the signal), its changes that were counted, its messages."""

    code: int
    calls: int
    out: str
    err: str


def run(command: Sequence[str], environ: Mapping[str, str], fault: Fault, *, cwd: Path, timeout: float = 120) -> Ended:
    """A command to which a fault happens."""
    with tempfile.NamedTemporaryFile(prefix="kcache-calls-") as counter:
        counter.write(bytes(8))
        counter.flush()
        given = {
            **environ,
            "LD_PRELOAD": str(shim()),
            "KCACHE_FAULT_UNDER": str(fault.under),
            "KCACHE_FAULT_COUNTER": counter.name,
            "KCACHE_FAULT_AT": str(fault.at),
            "KCACHE_FAULT_DO": fault.do,
            **({"KCACHE_FAULT_ON": "1"} if fault.on else {}),
            **({"KCACHE_FAULT_ONLY": fault.only} if fault.only else {}),
            **({"KCACHE_FAULT_GONE": str(fault.gone)} if fault.gone is not None else {}),
        }
        done = subprocess.run(command, env=given, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
        calls = struct.unpack("=Q", os.pread(counter.fileno(), 8, 0))[0]
    return Ended(code=done.returncode, calls=calls, out=done.stdout, err=done.stderr)
