"""`kcache import`: what an exported file holds, published into a store."""

from __future__ import annotations

from pathlib import Path

import click

from kcache.cli import messages
from kcache.cli.options import json_option
from kcache.cli.publish import describe


@click.command(
    epilog="""\b
Examples:
  kcache import kernels.tar --to /mnt/kcache""",
)
@click.argument("bundle", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--to", "store", required=True, metavar="STORE", help="Where to publish: a directory, or hf://owner/repo.")
@click.option("--replace", is_flag=True, help="Replace entries of the same key whose files are different.")
@click.option("--dry-run", is_flag=True, help="Only say what would be uploaded.")
@json_option
def command(bundle: Path, store: str, replace: bool, dry_run: bool, as_json: bool) -> None:
    """Publish the entries in FILE, which `kcache export` wrote. Every one is verified first."""
    from kcache.store.open import open_store
    from kcache.workflows.bundle import import_bundle

    on_hub = store.startswith("hf://")
    report = import_bundle(
        bundle,
        open_store(store, create=not on_hub, writing=True),
        replace=replace,
        dry_run=dry_run,
        page=on_hub,
        progress=lambda line: messages.say(line, at=messages.VERBOSE),
    )
    for line in report.warnings:
        messages.say(line)
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(report.to_json())
    click.echo(f"kcache: {describe(report)}", err=True)
