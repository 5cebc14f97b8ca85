"""The matrix in words and in Markdown: how sizes and durations are written, and the tables of a store's page. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kcache.matrix import Cell, Matrix, Place, architectures, by_environment

_LISTED = 300
"""Rows of a page on the Hub; a page of thousands is read by nobody, and `kcache matrix --html` has all of them."""


def size_text(size: float) -> str:
    """Bytes for people: `2.4 MB`."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def duration_text(seconds: float) -> str:
    """Seconds for people: `78 s`, `12 min`, `3.4 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def rows(cells: Iterable[Cell]) -> dict[str, dict[str, Cell]]:
    """What is served -> architecture -> cell, of the cells of one environment."""
    found: dict[str, dict[str, Cell]] = {}
    for cell in cells:
        found.setdefault(cell.place.title, {})[cell.place.arch] = cell
    return found


def environment_text(place: Place) -> str:
    """For people: `FlashInfer 0.7.4, CUDA 13.0, x86_64`."""
    return f"FlashInfer {place.flashinfer}, CUDA {place.cuda}, {place.machine}"


def markdown(matrix: Matrix, *, most: int | None = None) -> str:
    """A table for each environment: a row for what is served, a column for each architecture.

    Args:
        most: rows in all, after which the rest is only counted; None for all.
    """
    parts: list[str] = []
    left = most
    for cells in by_environment(matrix.cells).values():
        table = rows(cells)
        shown = dict(list(table.items())[:left])
        if shown:
            parts += [f"### {environment_text(cells[0].place)}", "", *_table(shown, architectures(cells)), ""]
        if left is not None and len(shown) < len(table):
            parts += [f"{len(table) - len(shown)} more rows of {environment_text(cells[0].place)} are not listed here.", ""]
        left = None if left is None else left - len(shown)
    return "\n".join(parts) or "Nothing is published yet.\n"


def page_section(matrix: Matrix) -> str:
    """What a page on the Hub has of the matrix."""
    return markdown(matrix, most=_LISTED)


def _table(table: dict[str, dict[str, Cell]], archs: Sequence[str]) -> list[str]:
    lines = [f"| kind | {' | '.join(archs)} |", f"|---|{'---|' * len(archs)}"]
    for title, cells in table.items():
        lines.append(f"| {title} | {' | '.join(_summary(cells.get(arch)) for arch in archs)} |")
    return lines


def _summary(cell: Cell | None) -> str:
    if cell is None:
        return ""
    entries = f"{cell.entries} entries, " if cell.entries != 1 else ""
    return f"{entries}{size_text(cell.size)}, {duration_text(cell.build_seconds)}"
