"""What kcache says on stderr beside its results. Not the logging module: importing that costs a start 10 ms."""

from __future__ import annotations

import sys
from contextlib import suppress

QUIET, NORMAL, VERBOSE, DEBUG = -1, 0, 1, 2

level = NORMAL
"""Set once, by the command line's -v and -q."""


def say(text: str, *, at: int = NORMAL) -> None:
    """One line, if the level in force lets lines of level `at` through."""
    if level >= at:
        fail(text)


def fail(text: str) -> None:
    """What went wrong: said however quiet. A standard error that is closed or full is no reason for anything else to fail."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"kcache: {text}", file=sys.stderr, flush=True)


def unexpected(what: str) -> None:
    """The exception being handled is one that kcache does not know: its traceback, for the report."""
    import traceback

    with suppress(OSError, ValueError):
        traceback.print_exc(file=sys.stderr)
    fail(f"{what} failed in a way that it does not know; please report this")
