"""Becoming the server: the last thing that `kcache restore -- CMD` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

import click

NOT_FOUND = 127
NOT_EXECUTABLE = 126


def start(server: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Replaces this process by `server`, with `env` added to the environment.

    Only a command that cannot be run at all comes back, with the exit code that a shell would give.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(server[0], list(server), {**os.environ, **env})
    except OSError as error:
        click.echo(f"kcache: {server[0]} cannot be started: {error.strerror}", err=True)
        sys.exit(NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE)
