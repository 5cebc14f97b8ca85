"""`kcache doctor`: why a restored cache would not be used here, and what to do about it."""

from __future__ import annotations

import os
import sys

import click

from kcache.cli import exit_codes
from kcache.cli.options import archs_option, gpus_option, json_option, python_option


@click.command(
    epilog="""\b
Examples:
  kcache doctor
  kcache doctor --python /opt/venv/bin/python --json"""
)
@archs_option
@gpus_option
@python_option
@json_option
def command(archs: tuple[str, ...], gpus: tuple[str, ...], python: str | None, as_json: bool) -> None:
    """Every known reason why a restored cache would not be used here, each with its remedy.

    Ends with 0 when nothing stops its use, with 1 otherwise.
    """
    from kcache.workflows.doctor import examine
    from kcache.workflows.findings import ERROR
    from kcache.workflows.target import TargetRequest

    findings = examine(TargetRequest(python=python, archs=archs, gpus=gpus), os.environ)
    stopped = any(finding.severity == ERROR for finding in findings)
    if as_json:
        from kcache.cli.main import echo_json

        echo_json({"status": "stopped" if stopped else "usable", "findings": [finding.to_json() for finding in findings]})
    else:
        for finding in findings:
            click.secho(f"{finding.severity} {finding.code}", fg="red" if finding.severity == ERROR else "yellow", nl=False)
            click.echo(f": {finding.what}\n    {finding.remedy}")
        if not findings:
            click.echo("Nothing that would keep a restored cache from being used here.")
    sys.exit(exit_codes.FAILED if stopped else exit_codes.DONE)
