"""Runs any program so that what it compiles can be taken afterwards: its environment, its signals, what it leaves running.

The program is in this process's group and gets its standard streams, so that a terminal's keys reach it by themselves; signals
that were sent to this process are passed on. When it has ended, what it left running is ended too, compilers foremost: a program
that is killed leaves its ninja behind, which would go on writing into the caches that are being read.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from kcache.errors import UsageError
from kcache.probe.caches import home_directory
from kcache.values import dataclass
from kcache.workflows.build_environ import REMOVED

FORWARDED = frozenset(
    (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
)

STOP_SECONDS = 10.0
"""How long what a program left running may take to end when it is asked, before it is killed."""

_FROM_TERMINAL = 0x80
"""si_code SI_KERNEL (sigaction(2)): the terminal sent it, to the program as well."""

_SET_CHILD_SUBREAPER = 36
"""prctl(2)."""

_TAKEN_BACK = (*REMOVED, "FLASHINFER_DISABLE_JIT", "FLASHINFER_NVCC")
"""Variables that change code unseen, as in `kcache.workflows.build_environ`; and those that keep FlashInfer from compiling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended: the exit code that a shell would give (128 + signal), and how many processes it left running."""

    code: int
    left: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnviron:
    """The environment of a recorded program, and which of the caller's variables are not in it."""

    variables: Mapping[str, str]
    removed: tuple[str, ...]


def program_environ(environ: Mapping[str, str], given: Mapping[str, str], private: Path | None, uid: int) -> ProgramEnviron:
    """The environment of a program whose compilations are recorded.

    Args:
        given: variables that are set whatever the caller's are.
        private: where its caches go; None to leave them where they are.

    FlashInfer evaluates Path.home() even where FLASHINFER_WORKSPACE_BASE is set (`jit/env.py`, 0.6.18 to 0.7.4), so HOME is set
    where there is none; it is not changed, since credentials and model weights lie there. Those that XDG_CACHE_HOME moves stay
    where they are (huggingface_hub, constants.py; torch, hub.py).
    """
    variables = {name: value for name, value in environ.items() if name not in _TAKEN_BACK}
    home = home_directory(environ, uid)
    if private is not None:
        cache = environ.get("XDG_CACHE_HOME") or (f"{home}/.cache" if home else "")
        if cache:
            variables = {"HF_HOME": f"{cache}/huggingface", "TORCH_HOME": f"{cache}/torch", **variables}
        variables |= {
            "FLASHINFER_WORKSPACE_BASE": str(private),
            "FLASHINFER_AUTOTUNE_CACHE_DIR": str(private / "autotune"),
            "XDG_CACHE_HOME": str(private / "xdg"),
            "B12X_COMPILE_CACHE_DIR": str(private / "xdg" / "b12x" / "compile"),
        }
        if home is None:
            variables["HOME"] = str(private)
    removed = tuple(name for name in _TAKEN_BACK if environ.get(name))
    return ProgramEnviron(variables={**variables, **given}, removed=removed)


def run_program(command: Sequence[str], environ: Mapping[str, str], *, aside: bool = False) -> Ended:
    """Runs a program to its end; signals sent to this process go to it.

    Args:
        aside: its standard output goes where standard error goes.

    Raises:
        UsageError: it cannot be started.
    """
    _adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, children vanish without an exit status
    before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED | {signal.SIGCHLD})
    try:
        process = _start(command, environ, before, sys.stderr if aside else None)
        while process.poll() is None:
            arrived = signal.sigwaitinfo(FORWARDED | {signal.SIGCHLD})
            if arrived.si_signo in FORWARDED and arrived.si_code != _FROM_TERMINAL:
                process.send_signal(arrived.si_signo)
        code = process.returncode
        return Ended(code=code if code >= 0 else 128 - code, left=_end_orphans())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(
    command: Sequence[str], environ: Mapping[str, str], mask: set[signal.Signals | int], stdout: TextIO | None
) -> subprocess.Popen[bytes]:
    try:
        # A signal mask is inherited, and the program wants the one that we had. There is one thread, so preexec_fn is safe.
        unblock = lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # noqa: E731
        return subprocess.Popen(list(command), env=dict(environ), stdout=stdout, preexec_fn=unblock)  # noqa: PLW1509
    except (OSError, ValueError) as error:
        why = error.strerror or "" if isinstance(error, OSError) else str(error)
        raise UsageError(f"{command[0]} cannot be started", why=why) from error


def _adopt_orphans() -> None:
    """What a program leaves running becomes a child of this process; where that cannot be, it is not found."""
    import ctypes

    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _end_orphans() -> int:
    """Ends all children, which are those that were adopted, and theirs; how many there were."""
    seen: set[int] = set()
    deadline = time.monotonic() + STOP_SECONDS
    asked: set[int] = set()
    while children := _children():
        for child in children:
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
            elif child not in asked:
                os.kill(child, signal.SIGTERM)
                asked.add(child)
        seen |= children
        time.sleep(0.02)
    return len(seen)


def _children() -> set[int]:
    """The children of this process that still run; those that have ended are reaped."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == str(os.getpid()):
            child = int(path.parent.name)
            if os.waitpid(child, os.WNOHANG) == (0, 0):
                found.add(child)
    return found
