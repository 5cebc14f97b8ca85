"""`kcache matrix`: what stores publish, by architecture, CUDA, FlashInfer, model and kind."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kcache.cli import exit_codes, messages
from kcache.cli.options import archs_option, from_option, json_option, kinds_option, models_option

if TYPE_CHECKING:
    from rich.console import Console

    from kcache.matrix import Cell, Matrix

_TITLE_COLUMNS, _ARCH_COLUMNS = 34, 13
"""Terminal columns that a row's title and one architecture need; where they are not there, a list is shown."""


@click.command(
    epilog="""\b
Examples:
  kcache matrix --from hf://owner/repo
  kcache matrix --from /mnt/kcache --html matrix.html
  kcache matrix --from /mnt/kcache --arch 9.0a --json"""
)
@from_option
@kinds_option
@models_option
@archs_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "markdown", "html"]),
    default="table",
    help="What to print; a table by default.",
)
@click.option("--markdown", "as_markdown", is_flag=True, help="The same as --format markdown.")
@click.option("--html", "html_file", metavar="FILE", help="Write a page that needs no network, with filters.")
@json_option
def command(
    stores: tuple[str, ...],
    kinds: tuple[str, ...],
    models: tuple[str, ...],
    archs: tuple[str, ...],
    form: str,
    as_markdown: bool,
    html_file: str | None,
    as_json: bool,
) -> None:
    """What is published: entries, sizes, dates, signers and compile time, read from the indexes alone.

    An index that cannot be used is said on stderr and costs only itself: then the exit code is 3.
    """
    from kcache.store.open import open_store
    from kcache.workflows.matrix import read_matrix
    from kcache.workflows.resolve import Wanted

    gc.disable()  # thousands of lines are read, nothing is thrown away, and the process ends with this: a third of its time
    wanted = Wanted(kinds=kinds, modules=(), models=models)
    matrix = read_matrix([open_store(store) for store in stores], takes=wanted.takes, archs=archs)
    if html_file is not None:
        from kcache import fsops
        from kcache.cli.matrix_html import render

        path = Path(html_file)
        fsops.write_bytes(path.parent.resolve() / path.name, render(matrix).encode())
        messages.say(f"{html_file} is written")
    if html_file is None or as_json or as_markdown or form != "table":
        _print(matrix, "json" if as_json else "markdown" if as_markdown else form)
    for problem in matrix.problems:
        messages.fail(problem)
    sys.exit(exit_codes.PARTIAL if matrix.problems else exit_codes.DONE)


def _print(matrix: Matrix, form: str) -> None:
    if form == "json":
        import json

        print(json.dumps(matrix.to_json()), flush=True)  # not indented: that takes three times as long
    elif form == "markdown":
        from kcache.matrix_text import markdown

        click.echo(markdown(matrix), nl=False)
    elif form == "html":
        from kcache.cli.matrix_html import render

        click.echo(render(matrix), nl=False)
    else:
        _show(matrix)


def _show(matrix: Matrix) -> None:
    from rich.console import Console

    from kcache.matrix import architectures, by_environment
    from kcache.matrix_text import environment_text

    console = Console(highlight=False)
    if not matrix.cells:
        console.print("Nothing that was asked for is published in " + ", ".join(matrix.stores), markup=False)
    for cells in by_environment(matrix.cells).values():
        archs = architectures(cells)
        heading = environment_text(cells[0].place)
        if console.width >= _TITLE_COLUMNS + _ARCH_COLUMNS * len(archs):
            _show_table(console, heading, cells, archs)
        else:
            _show_list(console, heading, cells)
        console.print()


def _show_table(console: Console, heading: str, cells: list[Cell], archs: list[str]) -> None:
    from rich.table import Table

    from kcache.matrix_text import rows

    table = Table(title=heading, title_justify="left", show_edge=False, pad_edge=False)
    table.add_column("kind", overflow="fold", ratio=1)
    for arch in archs:
        table.add_column(arch, justify="right", no_wrap=True)
    for title, found in rows(cells).items():
        table.add_row(title, *(_lines(found[arch]) if arch in found else "-" for arch in archs))
    console.print(table)


def _show_list(console: Console, heading: str, cells: list[Cell]) -> None:
    """For narrow terminals: what is served, and below it a line for each architecture."""
    from kcache.matrix_text import rows

    console.print(heading, style="bold", markup=False)
    for title, found in rows(cells).items():
        console.print(f"  {title}", markup=False)
        for arch, cell in found.items():
            console.print(f"    {arch}: {_lines(cell)}".replace("\n", ", "), markup=False)


def _lines(cell: Cell) -> str:
    from kcache.matrix_text import duration_text, size_text

    entries = f"{cell.entries} " + ("entries" if cell.entries != 1 else "entry")
    return f"{entries}\n{size_text(cell.size)}\n{duration_text(cell.build_seconds)}" + (
        f"\n{cell.last[:10]}" if cell.last else ""
    )
