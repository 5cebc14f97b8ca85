"""`kcache build`: compile entries on a host that needs no GPU."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from kcache.cli import exit_codes
from kcache.cli.options import archs_option, json_option, kinds_option, modules_option, python_option

if TYPE_CHECKING:
    from kcache.workflows.build import BuildReport, Watch


@click.command(
    epilog="""\b
Examples:
  kcache build --kinds sampling --arch 9.0a,12.0f -o entries
  kcache build --modules cascade,page --arch 9.0a -o entries --jobs 4
Then: kcache publish entries --to STORE"""
)
@kinds_option
@modules_option
@archs_option
@click.option("-o", "--output", required=True, metavar="DIR", help="Where entries are written; made if needed.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compilers at once; by default as many as cores and memory allow.")
@python_option
@click.option("--work-dir", metavar="DIR", help="Where compilers work, kept for the next build; DIR/.build by default.")
@json_option
def command(
    kinds: tuple[str, ...],
    modules: tuple[str, ...],
    archs: tuple[str, ...],
    output: str,
    jobs: int | None,
    python: str | None,
    work_dir: str | None,
    as_json: bool,
) -> None:
    """Compile every module that a kind needs, for each architecture, and write one entry per kind and key.

    A module that fails costs only its own entry: the rest is built, and the exit code is 3. A second run goes on where the
    first one stopped.
    """
    from kcache.workflows.build import PARTIAL, BuildRequest, build
    from kcache.workflows.build_entries import FAILED

    request = BuildRequest(
        kinds=kinds,
        modules=modules,
        archs=archs,
        output=Path(output),
        jobs=jobs,
        python=python,
        work_dir=None if work_dir is None else Path(work_dir),
    )
    try:
        with _stopped_by_sigterm(), _progress() as watch:
            report = build(request, os.environ, watch)
    except KeyboardInterrupt as error:
        raise click.Abort from error
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(report.to_json())
    _tell(report, quiet=as_json)
    sys.exit({FAILED: exit_codes.FAILED, PARTIAL: exit_codes.PARTIAL}.get(report.status, exit_codes.DONE))


def _tell(report: BuildReport, *, quiet: bool) -> None:
    """Warnings and failures on stderr; on stdout what was built, unless JSON is there."""
    from kcache.workflows.build_entries import FAILED

    for warning in report.warnings:
        click.echo(f"kcache: {warning}", err=True)
    for module in report.modules:
        if module.status == FAILED:
            click.echo(f"kcache: {module.module} for {module.arch} failed: {module.reason}", err=True)
            if module.log:
                click.echo(f"        the compiler's whole output: {module.log}", err=True)
        elif not quiet:
            click.echo(f"{module.status:>10}  {module.arch:>5}  {module.seconds:8.1f} s  {module.module}")
    for entry in report.entries:
        if entry.status == FAILED and not any(module.status == FAILED for module in report.modules if module.kind == entry.kind):
            click.echo(f"kcache: entry {entry.kind} for {entry.arch} failed: {entry.reason}", err=True)
        elif entry.status != FAILED and not quiet:
            click.echo(f"{entry.status}: {entry.archive}")


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Within: SIGTERM stops the compilers and ends the command as ^C does, instead of leaving compilers behind."""

    def stop(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress() -> Iterator[Watch]:
    """A bar for each architecture on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda arch, modules: lambda done, total, module: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def watch(arch: str, modules: tuple[str, ...]) -> Callable[[int, int, str], None]:
            task = bars.add_task(f"{arch}: {', '.join(modules)}"[:60], total=None)

            def progress(done: int, total: int, module: str) -> None:
                bars.update(task, completed=done, total=total, description=f"{arch}: {module}"[:60])

            return progress

        yield watch
