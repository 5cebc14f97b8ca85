"""When a warm-up has to end: its deadline, and whoever calls it off. And a command that ends with it, or with this process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

GRACE = 5.0
"""Seconds that compilers have to end after they were asked to."""

_GUARD = Path(__file__).with_name("guard.py")


class LateError(Exception):
    """The deadline came, or the warm-up was called off."""


class Stop:
    """The end of a warm-up.

    Args:
        seconds: from now; None for no deadline.
    """

    def __init__(self, seconds: float | None) -> None:
        self._until = None if seconds is None else time.monotonic() + max(0.0, seconds)
        self._called = threading.Event()

    def call(self) -> None:
        """Ends it now."""
        self._called.set()

    @property
    def come(self) -> bool:
        return self._called.is_set() or self.left() <= 0

    def left(self) -> float:
        """Seconds that are left, at most a week."""
        if self._called.is_set():
            return 0.0
        return 604800.0 if self._until is None else max(0.0, self._until - time.monotonic())

    def check(self) -> None:
        """Raises LateError once the end has come."""
        if self.come:
            raise LateError("the deadline came")

    def pause(self, seconds: float) -> None:
        """Sleeps, at most until the end."""
        self._called.wait(min(seconds, self.left()))


def run_guarded(
    command: Sequence[str], folder: Path, stop: Stop, environ: Mapping[str, str] | None = None, grace: float = GRACE
) -> tuple[int, str]:
    """Runs a command to its end; it ends early with `stop`, and with this process, whatever kills that.

    Args:
        environ: its variables; this process's where None.
        grace: seconds that it has to end after it was asked to.

    Returns:
        Its exit code, and what it printed.

    Raises:
        LateError: `stop` came first; the command and all it started have ended.
        OSError: it cannot be started.
    """
    words = [sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), str(grace), *command]
    # What it prints goes into a file: a pipe that nobody reads stops compilers.
    with tempfile.TemporaryFile() as output:
        guard = subprocess.Popen(
            words,
            cwd=folder,
            env=None if environ is None else dict(environ),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert guard.stdin is not None
        try:
            code = _wait(guard, stop)
        finally:
            guard.stdin.close()  # the guard stops the command, if it still runs
            try:
                guard.wait(2 * grace + GRACE)
            except subprocess.TimeoutExpired:
                guard.kill()
                guard.wait()
        output.seek(0)
        return code, output.read().decode("utf-8", "replace")


def _wait(guard: subprocess.Popen[bytes], stop: Stop) -> int:
    pause = 0.005
    while (code := guard.poll()) is None:
        stop.check()
        stop.pause(pause)
        pause = min(pause * 1.5, 0.1)
    return code
