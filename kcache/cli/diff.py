"""`kcache diff`: what differs between two environments, and what a bump would cost to build."""

from __future__ import annotations

import click

from kcache.cli.options import json_option, kinds_option, models_option


@click.command(
    epilog="""\b
Examples:
  kcache diff old.json new.json
  kcache diff old.json new.json --from hf://owner/repo
  kcache diff old.json --bump flashinfer=0.7.5 --bump cuda=13.1 --from /mnt/kcache --json
Environments are files that `kcache env --save` wrote, on a host or for an image (--image-root)."""
)
@click.argument("before", metavar="ENV_A")
@click.argument("after", metavar="[ENV_B]", required=False)
@click.option(
    "--bump",
    "bumps",
    multiple=True,
    metavar="NAME=VERSION",
    help="Instead of ENV_B: ENV_A with another flashinfer, cuda, torch, tvm-ffi, glibc or machine.",
)
@click.option("--from", "store", metavar="STORE", help="Say what of this store the change would miss, and the build hours.")
@kinds_option
@models_option
@json_option
def command(
    before: str,
    after: str | None,
    bumps: tuple[str, ...],
    store: str | None,
    kinds: tuple[str, ...],
    models: tuple[str, ...],
    as_json: bool,
) -> None:
    """What differs between two environments, and with a store what would be missed, per kind and model, in build hours.

    The hours are those that the farm recorded for ENV_A's entries. What the store has for the new environment already is not
    missed.
    """
    from kcache.store.open import open_store
    from kcache.workflows.diff import bumped, diff
    from kcache.workflows.resolve import Wanted
    from kcache.workflows.target import read_environment

    if (after is None) == (not bumps):
        raise click.UsageError("Give ENV_B, or --bump: one of them.")
    first = read_environment(before)
    second = bumped(first, bumps) if after is None else read_environment(after)
    opened = open_store(store) if store is not None else None
    report = diff(first, second, opened, takes=Wanted(kinds=kinds, models=models).takes, bump=after is None)
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(report.to_json())
        return
    for change in report.changes:
        rule = f"matched: {change.matched}" if change.matched else "only recorded"
        click.echo(f"{change.name}: {change.before.describe()} -> {change.after.describe()} ({rule})")
    if not report.changes:
        click.echo("Nothing differs.")
    if (preview := report.preview) is not None:
        from kcache.matrix_text import duration_text

        click.echo(f"{preview.usable} entries are used before, {preview.kept} of them after.")
        for one in preview.missed:
            what = f"{one.kind} of {one.model}" if one.model else one.kind
            click.echo(f"  {what}: {one.entries} to build for {', '.join(one.archs)}, {duration_text(one.seconds)}")
        if preview.missed:
            click.echo(f"To build in all: {duration_text(preview.seconds)}, one after another.")
        if preview.undecided:
            click.echo(f"{preview.undecided} entries of b12x or of tuning results are not counted: only a host can tell.")
