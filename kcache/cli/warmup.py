"""`kcache warmup`: compiles what is missing here, in a process of its own, and installs it."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from kcache.cli import exit_codes, messages
from kcache.cli.options import archs_option, gpus_option, json_option, kinds_option, modules_option, python_option

if TYPE_CHECKING:
    from kcache.warmup.report import Beat
    from kcache.warmup.standalone import StandaloneReport

_SAID_EVERY = 15.0
"""Seconds between two lines that say that it still works."""


@click.command(
    epilog="""\b
Examples:
  kcache warmup                                    # sampling, on a host with a GPU and a compiler
  eval "$(kcache warmup --deadline 20m --shell)"   # and the variables that the server needs
  kcache warmup --arch 9.0a                        # in an image build, no GPU needed"""
)
@kinds_option
@modules_option
@click.option("--manifest", "manifests", multiple=True, metavar="FILE", help="A build manifest: the kernels of a model.")
@archs_option
@gpus_option
@python_option
@click.option("--deadline", default="30m", metavar="TIME", help="Stop after this long, and keep what is finished (90s, 20m).")
@click.option("--jobs", type=click.IntRange(1), help="Compilers at once; by default what cores and memory allow.")
@click.option("--keep", metavar="DIR", help="Keep what is built, as entries for `kcache publish`.")
@click.option("--shell", is_flag=True, help="Print `export` lines for eval.")
@json_option
def command(
    kinds: tuple[str, ...],
    modules: tuple[str, ...],
    manifests: tuple[str, ...],
    archs: tuple[str, ...],
    gpus: tuple[str, ...],
    python: str | None,
    deadline: str,
    jobs: int | None,
    keep: str | None,
    shell: bool,
    as_json: bool,
) -> None:
    """Compile what no restore brought, and install it, so that the next start accepts it and no compiler runs.

    \b
    Only what is missing is built: by default every module that FlashInfer's sampling API reaches. Each is installed when it
    is done; after a deadline or a kill the next run goes on from there. Engines call `kcache.warmup.warmup()` instead.
    """
    from kcache.cli.restoring import seconds_of
    from kcache.warmup.standalone import StandaloneRequest, warm_here
    from kcache.workflows.target import TargetRequest

    if as_json and shell:
        raise click.UsageError("--json and --shell both want standard output: give one of them.")
    if unknown := [kind for kind in kinds if kind != "sampling"]:
        raise click.UsageError(f"kind {', '.join(unknown)} is asked for by a build manifest: --manifest FILE.")
    chosen = kinds or (() if modules or manifests else ("sampling",))
    request = StandaloneRequest(kinds=chosen, modules=modules, manifests=manifests, jobs=jobs, keep=keep)
    where = TargetRequest(python=python, archs=archs, gpus=gpus)
    seconds = seconds_of(deadline, "--deadline")
    report = warm_here(request, where, os.environ, deadline_seconds=seconds, heartbeat=told_now_and_then())
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(report.to_json())
    if shell:
        import shlex

        for name, value in report.env.items():
            print(f"export {name}={shlex.quote(value)}")
    say(report)
    for line in report.warnings:
        messages.fail(line)
    codes = {"partial": exit_codes.PARTIAL, "failed": exit_codes.FAILED}
    sys.exit(codes.get(report.warmup.status, exit_codes.DONE))


def told_now_and_then() -> TellBeat:
    """A heartbeat for people: a line when what is in work changes, and every quarter of a minute."""
    return TellBeat()


class TellBeat:
    """Says what is in work, on standard error."""

    def __init__(self) -> None:
        self._doing: tuple[str, ...] = ()
        self._said = 0.0

    def __call__(self, beat: Beat) -> None:
        if beat.doing and (beat.doing != self._doing or beat.elapsed - self._said >= _SAID_EVERY):
            self._doing, self._said = beat.doing, beat.elapsed
            messages.say(f"warming up: {', '.join(beat.doing)}; {beat.done} of {beat.total} done after {beat.elapsed:.0f} s")


def say(report: StandaloneReport) -> None:
    """What became of it, on standard error."""
    for module in report.warmup.modules:
        if not module.ready:
            messages.fail(f"{module.name} is not warm ({module.status}): {module.reason}")
    for reason in report.warmup.reasons:
        messages.fail(reason)
    ready = [module.name for module in report.warmup.modules if module.ready]
    new = [module.name for module in report.warmup.modules if module.status == "built"]
    if ready:
        what = f"built {', '.join(new)}" if new else f"nothing to build: {', '.join(ready)} in place"
        messages.say(f"{what}; {report.warmup.seconds:.1f} s")
