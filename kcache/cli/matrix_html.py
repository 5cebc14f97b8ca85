"""The matrix as one page that needs nothing else: no network, no server, no other file.

The page is `matrix_page.html`, which holds style and script, with the data put in as JSON. Its policy (`default-src 'none'`)
forbids every connection, so what a store says can neither load nor send anything; the script writes texts, never markup.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kcache.matrix import Matrix

_SLOT = "KCACHE_MATRIX_DATA"


def render(matrix: Matrix) -> str:
    """The page."""
    # `<` only occurs within JSON's texts. Written as an escape it ends no script element, whatever a name holds.
    data = json.dumps(_data(matrix), separators=(",", ":")).replace("<", "\\u003c")
    template = Path(__file__).with_name("matrix_page.html").read_text(encoding="utf-8")
    return template.replace(_SLOT, data)


def _data(matrix: Matrix) -> dict[str, Any]:
    """Cells as lists, in the order of `fields`: of 12,000 cells names would be most of the page."""
    cells = [cell.to_json() for cell in matrix.cells]
    fields = list(cells[0]) if cells else []
    document = matrix.to_json()
    return {**document, "fields": fields, "cells": [list(cell.values()) for cell in cells]}
