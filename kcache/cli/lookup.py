"""`kcache lookup`: would a restore hit here, and why not?"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from kcache.cli import exit_codes, messages
from kcache.cli.options import (
    archs_option,
    env_option,
    from_option,
    gpus_option,
    json_option,
    kinds_option,
    models_option,
    modules_option,
    policy_option,
    python_option,
)
from kcache.errors import KcacheError
from kcache.report import HIT, MISS, PARTIAL

if TYPE_CHECKING:
    from kcache.workflows.lookup import CandidateReport, LookupReport

SHOWN = 10
"""Candidates, and fields of one that differ, listed for people; --json lists all."""


@click.command(
    epilog="""\b
Examples:
  kcache lookup --from /mnt/kcache
  kcache lookup --from /mnt/kcache --env container.json --json"""
)
@from_option
@kinds_option
@modules_option
@models_option
@archs_option
@gpus_option
@python_option
@env_option
@policy_option
@click.option("--strict-match", is_flag=True, help="Accept only entries whose every ingredient is equal.")
@json_option
def command(
    stores: tuple[str, ...],
    kinds: tuple[str, ...],
    modules: tuple[str, ...],
    models: tuple[str, ...],
    archs: tuple[str, ...],
    gpus: tuple[str, ...],
    python: str | None,
    env_file: str | None,
    policy: str | None,
    strict_match: bool,
    as_json: bool,
) -> None:
    """Hit or miss for each kind; for each candidate why it does not fit, and what would make it fit. Installs nothing.

    \b
    --env FILE asks for an environment that is not here: `kcache env --save` on another host, or `kcache env --image-root DIR`
    for a container image that is not running.
    """
    from kcache.store.open import open_store
    from kcache.workflows.entrypoint import policy_in_force
    from kcache.workflows.lookup import lookup
    from kcache.workflows.resolve import Wanted
    from kcache.workflows.target import TargetRequest, find_target

    target = find_target(TargetRequest(python=python, archs=archs, gpus=gpus, env_file=env_file), os.environ)
    trusted = policy_in_force(policy, os.environ)
    asked = Wanted(kinds=kinds, modules=modules, models=models)
    reports: list[LookupReport] = []
    errors: list[KcacheError] = []
    for store in stores:  # one that is down does not stop the next: as restore does
        try:
            reports.append(lookup(open_store(store), target, asked=asked, strict=strict_match, policy=trusted))
        except KcacheError as error:
            errors.append(error)
    if not reports:
        raise errors[0]
    for passed_over in errors:
        messages.fail(str(passed_over))
    order = {HIT: 0, PARTIAL: 1, MISS: 2}
    best = min(reports, key=lambda report: order.get(report.status, 3))
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(best.to_json())
    else:
        _tell(best)
    sys.exit({HIT: exit_codes.DONE, PARTIAL: exit_codes.PARTIAL, MISS: exit_codes.MISS}.get(best.status, best.exit_code))


def _tell(report: LookupReport) -> None:
    for name, kind in sorted(report.kinds.items()):
        click.echo(f"{name}: {kind.status}")
        for reason in kind.reasons:
            click.echo(f"  {reason}")
    for line in report.lacking:
        click.echo(f"  {line}")
    if not report.candidates:
        click.echo("Nothing is published for this environment. The store has: " + (", ".join(report.environments) or "nothing"))
    for candidate in report.candidates[:SHOWN]:
        key = candidate.entry.key
        name = f"{key.kind} {key.title} {key.arch} {key.fingerprint[7:19]}"
        click.echo(f"  {name}: {'fits' if candidate.accepted else candidate.error or 'differs'}")
        if (advice := candidate.advice) is not None:
            click.echo(f"    {advice.why}")
            for step in advice.to_hit:
                click.echo(f"    to make it a hit{', also' if step != advice.to_hit[0] else ''}: {step}")
        for check in candidate.differs[:SHOWN]:
            click.echo(f"    {check.describe()}")
        _explain(candidate)
    if len(report.candidates) > SHOWN:
        click.echo(f"  and {len(report.candidates) - SHOWN} more (--json lists all)")


def _explain(candidate: CandidateReport) -> None:
    """What enters the names that the package b12x gives its programs, and what of it is other here without mattering."""
    passed = [check for check in candidate.explained if check not in candidate.differs]
    if passed:
        click.echo(f"    b12x names programs by: {', '.join(check.field for check in candidate.explained)}")
    for check in passed:
        if check.wanted != check.found:
            click.echo(
                f"    other here, and no matter ({check.rule}): {check.field}: built with {check.wanted}, here {check.found}"
            )
