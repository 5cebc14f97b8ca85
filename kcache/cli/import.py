"""`kcache import`: what an exported file holds, published into a store."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from kcache.cli.publish import publish_into, store_options


@click.command(
    epilog="""\b
Examples:
  kcache import kernels.tar --to /mnt/kcache
  kcache import kernels.tar --to hf://owner/repo --create""",
)
@click.argument("bundle", metavar="FILE", type=click.Path(path_type=Path))
@store_options
def command(bundle: Path, **options: Any) -> None:
    """Publish the entries in FILE, which `kcache export` wrote. Every one is verified first."""
    from kcache.workflows.bundle import import_bundle

    publish_into(partial(import_bundle, bundle), **options)
