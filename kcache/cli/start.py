"""Becoming the server: the last thing that `kcache restore -- CMD` does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

from kcache.cli import messages

NOT_FOUND = 127
NOT_EXECUTABLE = 126


def start(server: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replaces this process by `server`, with `env` added to the environment.

    Only a command that cannot be run at all comes back, with the exit code that a shell would give.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # closed (then it is None), full, or nobody reads it
            stream.flush()
    _leave_nothing_behind()
    try:
        os.execvpe(server[0], list(server), {**os.environ, **env})
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "that is no name of a program"
        messages.fail(f"{server[0] or repr('')} cannot be started: {why}")
        sys.exit(NOT_EXECUTABLE if isinstance(error, OSError) and not isinstance(error, FileNotFoundError) else NOT_FOUND)


def _leave_nothing_behind() -> None:
    """A timer, and signals that are ignored, would outlive exec. Python itself ignores these two when it starts (Python
    3.10 to 3.13, Modules/posixmodule.c and Python/pylifecycle.c, signals_init); subprocess gives them back as well."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
