"""A recipe as the TOML file that a person goes on with. Pure; what is written parses to the same recipe."""

from __future__ import annotations

import json
from typing import Any

from kcache.recipe import FIELDS, FORMAT, Recipe
from kcache.recipe_fields import tables


def render_recipe(recipe: Recipe, *, note: str = "", remarks: dict[str, str] | None = None) -> str:
    """The text of a recipe, in the form that `kcache.recipe.parse_recipe` takes.

    Args:
        note: becomes a comment at the top.
        remarks: path of a field -> comment in the line before it.
    """
    lines = [f"# {line}".rstrip() for line in note.splitlines()]
    values = _values(recipe)
    for table in tables(FIELDS):
        if table and not any(values[field.path] for field in FIELDS if field.table == table):
            continue  # a model without it
        lines += ["", f"[{table}]"] if table else []
        for field in FIELDS:
            if field.table == table and values[field.path] is not None:
                lines += [f"# {line}" for line in (remarks or {}).get(field.path, "").splitlines()]
                lines.append(f"{field.name} = {_toml(values[field.path])}")
    return "\n".join(lines) + "\n"


def _values(recipe: Recipe) -> dict[str, Any]:
    """Path -> value in the file's own terms; None for what is left out."""
    swiglu = recipe.model.swiglu
    special = {
        "format": FORMAT,
        "kinds": recipe.kinds,
        "targets.gpus": tuple(gpu.slug for gpu in recipe.targets.gpus),
        **{f"model.swiglu_{name}": swiglu and getattr(swiglu, name) for name in ("alpha", "beta", "limit")},
    }
    return {
        field.path: special[field.path] if field.path in special else getattr(getattr(recipe, field.table), field.name)
        for field in FIELDS
    }


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's basic string is JSON's, but for DEL
    return repr(value)
