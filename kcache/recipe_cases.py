"""The dry run's cases of a recipe, whichever kind of CuTe-DSL kernels it is about. Pure: joins the rules of each kind."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kcache.recipe import Recipe
from kcache.recipe_gdn import GDN_KINDS, GdnModel, check_gdn, gdn_cases
from kcache.recipe_shapes import check_shapes, dry_run_cases


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What a build of one kind will try.

    cases:    for the dry run; each has a `variant`, which of the model's entries it belongs to.
    problems: what is left out, one line each.
    """

    cases: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...]


def plan_cases(recipe: Recipe, kind: str, flashinfer: str) -> Planned:
    """The cases of one kind for one FlashInfer version."""
    if kind in GDN_KINDS:
        return _linear_attention(recipe, kind, flashinfer)
    refused = check_shapes(recipe, flashinfer)
    return Planned(
        cases=dry_run_cases(recipe, flashinfer),
        problems=tuple(f"{one.shape.name} is not for {kind}: {one.why}" for one in refused),
    )


def _linear_attention(recipe: Recipe, kind: str, flashinfer: str) -> Planned:
    linear, since = recipe.linear, GDN_KINDS[kind].since
    if linear.heads is None or linear.value_heads is None or linear.head_dim is None:
        return Planned(cases=(), problems=(f"{kind}: the manifest has no table `linear`",))
    if tuple(int(part) for part in re.findall(r"[0-9]+", flashinfer)[:3]) < since:
        return Planned(cases=(), problems=(f"{kind}: FlashInfer keeps these kernels from {'.'.join(map(str, since))} on",))
    model = GdnModel(
        name=recipe.model.name,
        source=recipe.model.source,
        heads=linear.heads,
        value_heads=linear.value_heads,
        dim=linear.head_dim,
    )
    cases: list[Mapping[str, Any]] = []
    problems: list[str] = []
    for tp in recipe.parallel.tp:
        problems += [f"tp{tp} is not for {kind}: {why}" for why in check_gdn(model, tp)]
        own = gdn_cases(kind, model, tp=(tp,), counts=recipe.tokens.capture, drafted=linear.drafted)
        cases += [{**case, "variant": f"tp{tp}"} for case in own]
    return Planned(cases=tuple(cases), problems=tuple(problems))
