"""A bar for a download that takes long enough to be wondered about. Terminals only: who calls this has looked.

What draws it is imported when it is first drawn, so that a download that is over by then pays nothing. A bar that cannot be drawn
is no reason for a download to fail.
"""

from __future__ import annotations

import sys
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress, TaskID

PATIENCE = 1.0
"""Seconds before anybody wonders."""


def is_wanted() -> bool:
    """Whether somebody looks at standard error, and wants to be told."""
    from kcache.cli import messages

    return messages.level >= messages.NORMAL and sys.stderr is not None and sys.stderr.isatty()


def drawn(chunks: Iterator[bytes], what: str, size: int) -> Iterator[bytes]:
    """The same chunks. `size` is what they come to, in bytes."""
    began, done = time.monotonic(), 0
    bar: Progress | None = None
    task: TaskID | None = None
    try:
        for chunk in chunks:
            yield chunk
            done += len(chunk)
            if bar is None and time.monotonic() - began > PATIENCE:
                with suppress(Exception):
                    bar, task = _start(what, size)
            if bar is not None and task is not None:
                with suppress(Exception):
                    bar.update(task, completed=done)
    finally:
        if bar is not None:
            with suppress(Exception):
                bar.stop()


def _start(what: str, size: int) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.start()
    return bar, bar.add_task(what, total=size)
