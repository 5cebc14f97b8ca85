"""`kcache build --record -- CMD`: entries of what a program compiles. The options are those of `kcache.cli.build`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from kcache.cli import exit_codes, messages

if TYPE_CHECKING:
    from kcache.workflows.record import RecordReport


def record(
    command: tuple[str, ...],
    *,
    output: str,
    work_dir: str | None,
    in_place: bool,
    archs: tuple[str, ...],
    gpus: tuple[str, ...],
    python: str | None,
    as_json: bool,
) -> NoReturn:
    """Runs the program and packs what it compiled; ends with the program's exit code, or if that is 0 with the recording's."""
    from kcache.workflows.build_entries import FAILED
    from kcache.workflows.record import NOTHING, PARTIAL, RecordRequest
    from kcache.workflows.record import record as run

    request = RecordRequest(
        command=command,
        output=Path(output),
        work_dir=None if work_dir is None else Path(work_dir),
        in_place=in_place,
        arch=",".join(archs),
        gpu=gpus[0] if gpus else "",
        python=python,
        aside=as_json,
    )
    report = run(request, os.environ)
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(report.to_json())
    _tell(report, quiet=as_json)
    ours = {FAILED: exit_codes.FAILED, NOTHING: exit_codes.FAILED, PARTIAL: exit_codes.PARTIAL}
    sys.exit(report.ended.code or ours.get(report.status, exit_codes.DONE))


def _tell(report: RecordReport, *, quiet: bool) -> None:
    for warning in report.warnings:
        messages.fail(warning)
    for one in report.left_out:
        where = f" for {one.arch}" if one.arch else ""
        messages.say(f"left out: {one.kind} {one.name}{where}: {one.reason}")
    if not report.entries:
        messages.fail("no entry was recorded")
    if not quiet:
        for entry in report.entries:
            click.echo(f"{entry.status}: {entry.archive}")
