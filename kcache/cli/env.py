"""`kcache env`: what this host is, as far as a cache is concerned."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kcache.cli.options import archs_option, env_option, gpus_option, json_option, python_option

if TYPE_CHECKING:
    from rich.table import Table

    from kcache.workflows.environment import Description


_DIGEST = re.compile(r"(sha256:[0-9a-f]{12})[0-9a-f]{52}")
"""A digest, cut short for people; --json has all of it."""


@click.command(
    epilog="""\b
Examples:
  kcache env
  kcache env --python /opt/venv/bin/python --save container.json
  kcache env --image-root ./rootfs --gpu rtx-pro-6000 --save container.json
  kcache lookup --from /mnt/kcache --env container.json"""
)
@archs_option
@gpus_option
@python_option
@env_option
@click.option("--image-root", metavar="DIR", help="An unpacked container image instead of this host; nothing of it is run.")
@click.option("--save", "save_file", metavar="FILE", help="Write the environment to FILE, for --env of other commands.")
@json_option
def command(
    archs: tuple[str, ...],
    gpus: tuple[str, ...],
    python: str | None,
    env_file: str | None,
    image_root: str | None,
    save_file: str | None,
    as_json: bool,
) -> None:
    """Every ingredient of a key on this host, by kind. Imports neither torch nor FlashInfer.

    \b
    --save writes everything that matching can ask for, a digest of each FlashInfer source among it.
    --image-root takes --python as a path in the image, and --arch or --gpu for the host to come. Variables of the image's
    configuration, such as LD_LIBRARY_PATH, are not in its file system and are taken as unset.
    """
    from kcache.workflows.environment import describe, describe_image, save
    from kcache.workflows.target import TargetRequest

    if image_root is not None and env_file is not None:
        raise click.UsageError("--image-root and --env both name an environment: give one of them.")
    request = TargetRequest(python=python, archs=archs, gpus=gpus, env_file=env_file)
    description = describe(request, os.environ) if image_root is None else describe_image(Path(image_root), request)
    if save_file is not None:
        save(description.environment, Path(save_file))
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(description.to_json())
    else:
        _show(description)


def _show(description: Description) -> None:
    from rich.console import Console

    from kcache.workflows.environment import arch_names, sections

    console = Console()
    environment = description.environment
    for title, rows in sections(environment).items():
        table = _table(title, "fact", "value", "matched")
        for row in rows:
            style = "yellow" if row.fact.undetermined else "dim" if row.fact.absent else ""
            table.add_row(row.name, _DIGEST.sub(r"\1...", row.fact.describe()), row.rule, style=style)
        console.print(table)
        console.print()
    table = _table("places", "place", "path")
    for names in arch_names(environment):
        table.add_row("architecture", "   ".join(f"{name} {value}" for name, value in names.items()))
    for name, place in description.places.items():
        table.add_row(name, place)
    missing = [name for name, fact in environment.libraries.items() if fact.absent]
    table.add_row("libraries not found", ", ".join(sorted(missing)) or "none")
    table.add_row("FlashInfer sources", f"{len(environment.sources)} files")
    if (cache := description.cache) is not None:
        table.add_row("cache root", f"{cache.path or 'none'} ({cache.reason})")
        for line in cache.rejected:
            table.add_row("  passed over", line)
        for name, value in cache.exports.items():
            table.add_row("  the server needs", f"{name}={value}")
    console.print(table)


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
