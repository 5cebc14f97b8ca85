"""Which of a recipe's shapes FlashInfer's b12x MoE kernels allow, and the calls that a build makes for those.

Pure decisions, with the rules of FlashInfer's own checks, so that a build can say beforehand what it will leave out. The dry run
(`probe/children/b12x_calls.py`) has the last word: what FlashInfer refuses there is reported too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Any

from kcache.recipe import Recipe

_BLOCK = {"nvfp4": 16, "mxfp4": 32}
"""Elements that share a scale (`moe_dispatch.py`, _sf_params_for_quant_mode, 0.7.4)."""

_DIRECT_MICRO_INTER = 512
"""Largest intermediate size of a rank for the direct micro kernel (`moe_dispatch.py`, _DIRECT_MICRO_MAX_N, 0.7.4)."""

_W4A16_ACTIVATIONS = ("silu", "relu2")
"""`moe_w4a16_activations.py`, SUPPORTED_MOE_ACTIVATIONS, 0.6.18 to 0.7.4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One mode on one rank of a layout.

    inter:         intermediate size of one expert on the rank, elements: the model's, divided by tp.
    local_experts: experts that the rank holds: the model's, divided by ep.
    """

    mode: str
    tp: int
    ep: int
    inter: int
    local_experts: int

    @property
    def name(self) -> str:
        return f"{self.mode}-tp{self.tp}-ep{self.ep}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeProblem:
    """A shape that these kernels do not take: which, and why in one line."""

    shape: Shape
    why: str


def shapes(recipe: Recipe) -> tuple[Shape, ...]:
    """Every mode with every pair of tp and ep, in the order of the recipe."""
    model = recipe.model
    return tuple(
        Shape(mode=mode, tp=tp, ep=ep, inter=model.moe_intermediate_size // tp, local_experts=model.experts // ep)
        for mode, tp, ep in product(model.quantization, recipe.parallel.tp, recipe.parallel.ep)
    )


def check_shapes(recipe: Recipe, flashinfer: str) -> tuple[ShapeProblem, ...]:
    """The shapes of a recipe that the b12x MoE of a FlashInfer version does not allow; empty if it allows all.

    Rules: `moe_dispatch.py` _validate_w4a4_dimensions (hidden 128, intermediate one scale block), `b12x_moe.py` (expert
    parallelism only for w4a16, and only from 0.7.2 on), `moe_w4a16_prepare.py` _repack_weight (multiples of 16 and 64). Up to
    0.7.2 FlashInfer compiles nvfp4 for other hidden sizes too; 0.7.4 says that its kernels never supported them.
    """
    found = []
    for shape in shapes(recipe):
        found += [ShapeProblem(shape=shape, why=why) for why in _problems(recipe, shape, flashinfer)]
    return tuple(found)


def in_memory_only(shape: Shape) -> str:
    """Which kernels of an allowed shape FlashInfer up to 0.7.4 keeps in no file, so that they are left to warmup; or nothing.

    `moe_w4a16_kernel.py` (W4A16FusedMoeKernel), `moe_dispatch.py` (_get_direct_micro_kernel). The dry run names each of them.
    """
    if shape.mode == "w4a16":
        return "all kernels, which FlashInfer keeps in memory only"
    if shape.mode == "nvfp4" and shape.inter <= _DIRECT_MICRO_INTER:
        return "the direct micro kernel that small batches may take, which FlashInfer keeps in memory only"
    return ""


def _problems(recipe: Recipe, shape: Shape, flashinfer: str) -> list[str]:
    model = recipe.model
    problems = []
    if shape.mode == "w4a16":
        if model.activation not in _W4A16_ACTIVATIONS:
            problems.append(f"activation {model.activation} is not for w4a16")
        columns = shape.inter * (1 if model.activation == "relu2" else 2)
        if model.hidden_size % 64:
            problems.append(f"hidden size {model.hidden_size} is not a multiple of 64")
        if shape.inter % 16 or columns % 64:
            problems.append(f"intermediate size {shape.inter} of a rank does not fill tiles of 16 by 64")
    else:
        if model.hidden_size % 128:
            problems.append(f"hidden size {model.hidden_size} is not a multiple of 128")
        if shape.inter % (block := _BLOCK[shape.mode]):
            problems.append(f"intermediate size {shape.inter} of a rank is not a multiple of {block}, its scale block")
    if shape.ep > 1 and shape.mode != "w4a16":
        problems.append("expert parallelism is only for w4a16")
    elif shape.ep > 1 and _release(flashinfer) < (0, 7, 2):
        problems.append(f"FlashInfer {flashinfer} has no expert parallelism")
    return problems


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"[0-9]+", version)[:3])


def dry_run_cases(recipe: Recipe, flashinfer: str) -> tuple[dict[str, Any], ...]:
    """The cases for the b12x dry run (`CASE` in that file): every allowed shape, called in every way that the recipe names."""
    refused = {problem.shape for problem in check_shapes(recipe, flashinfer)}
    model, tokens = recipe.model, recipe.tokens
    swiglu = model.swiglu and {"alpha": model.swiglu.alpha, "beta": model.swiglu.beta, "limit": model.swiglu.limit}
    cases = []
    for shape, calls in product(shapes(recipe), tokens.calls):
        if shape in refused:
            continue
        case = {
            "id": f"{shape.name}-{calls}",
            "variant": shape.name,
            "experts": model.experts,
            "local_experts": shape.local_experts,
            "top_k": model.top_k,
            "hidden": model.hidden_size,
            "inter": shape.inter,
            "activation": model.activation,
            "swiglu": swiglu,
            "quant": shape.mode,
            "scales": tokens.scales,
            "calls": "wrapper" if calls == "wrapper" else "function",
            "maximum": tokens.maximum,
            "tokens": list(tokens.counts) if calls != "function" else list(reversed(tokens.counts)),
        }
        cases.append(case)
    return tuple(cases)
