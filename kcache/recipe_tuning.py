"""What a recipe says of tuning (`[tuning]`), and the calls that tune it. Pure.

A call is what the children of `kcache.probe.children.tuning_calls` make; `covers` are smaller token counts that its tuning has to
have covered, since FlashInfer tunes a ladder of token counts up to the one that is called. One backend tunes the called count's
own bucket alone (`fused_moe/runners.py`, CuTileBf16Runner, 0.7.0 to 0.7.4): there every count is a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from kcache.recipe_fields import Choice, Field, Text, Whole

if TYPE_CHECKING:
    from kcache.recipe import Recipe

MATRICES = "mm-bf16-cublaslt"

OPERATIONS: Mapping[str, str] = {
    MATRICES: "cublaslt",
    "moe-bf16-cutile": "cutile",
    "moe-bf16-cutlass": "cutlass",
    "moe-bf16-cute-dsl": "cute-dsl",
    "moe-bf16-trtllm": "trtllm",
}
"""Operations that can be tuned -> the backend of FlashInfer behind each."""

OWN_BUCKET = ("moe-bf16-cutile",)
"""Operations whose tuner looks at the called token count's bucket and no other."""

FINALIZES_LATER = ("moe-bf16-trtllm",)
"""Operations that FlashInfer can be asked for without their last sum (`MoEFinalizeConfig.do_finalize`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The table `tuning`; empty where nothing is tuned.

    matrices: (n, k) of products of m x k by k x n.
    deferred: token counts of calls that leave the last sum over experts to the engine.
    skip:     operations, by FlashInfer's names, that keep their heuristics.
    vllm:     the name of the directory in which vLLM looks for results of its configuration; None where no file is wanted.
    """

    operations: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    deferred: tuple[int, ...] = ()
    skip: tuple[str, ...] = ()
    vllm: str | None = None


TUNING_FIELDS = (
    Field(path="tuning.operations", rule=Choice(*OPERATIONS), least=0, default=()),
    Field(
        path="tuning.matrices",
        rule=Text(pattern=r"[1-9][0-9]{0,6}x[1-9][0-9]{0,6}", wanted="a matrix's n and k such as 7168x2048"),
        least=0,
        default=(),
    ),
    Field(path="tuning.deferred", rule=Whole(1, 1 << 20), least=0, default=()),
    Field(
        path="tuning.skip",
        rule=Text(pattern=r"[A-Za-z0-9_:.]{1,100}", wanted="an operation such as fp4_gemm"),
        least=0,
        default=(),
    ),
    Field(path="tuning.vllm", rule=Text(pattern=r"[0-9a-f]{64}", wanted="64 hexadecimal digits"), default=None),
)


def tuning_of_nothing(found: Mapping[str, Any]) -> Iterator[str]:
    """Contradictions between fields of the table, and with the kinds."""
    operations = found.get("tuning.operations", (MATRICES,))
    if "autotune" in found.get("kinds", ()) and not operations:
        yield f"tuning.operations: missing; kind autotune needs it ({', '.join(OPERATIONS)})"
    if MATRICES in found.get("tuning.operations", ()) and found.get("tuning.matrices") == ():
        yield f"tuning.matrices: missing; {MATRICES} needs it"
    if found.get("tuning.matrices") and MATRICES not in operations:
        yield f"tuning.matrices: only with {MATRICES}"
    if found.get("tuning.deferred") and not set(operations) & set(FINALIZES_LATER):
        yield f"tuning.deferred: only with {', '.join(FINALIZES_LATER)}"


def all_calls(recipe: Recipe) -> tuple[dict[str, Any], ...]:
    """The calls of every layout of ranks, each once."""
    calls: list[dict[str, Any]] = []
    for tp, ep in product(recipe.parallel.tp, recipe.parallel.ep):
        calls += [call for call in tuning_calls(recipe, tp, ep) if call not in calls]
    return tuple(calls)


def tuning_calls(recipe: Recipe, tp: int, ep: int) -> tuple[dict[str, Any], ...]:
    """The calls of one layout of ranks, the largest token counts first.

    Args:
        tp: ranks that share each expert's columns. ep: ranks that share the experts.
    """
    counts = recipe.tokens.counts
    calls: list[dict[str, Any]] = []
    for operation in recipe.tuning.operations:
        backend = OPERATIONS[operation]
        if operation == MATRICES:
            shapes = [tuple(int(size) for size in text.split("x")) for text in recipe.tuning.matrices]
            calls += [_call("mm_bf16", backend, counts, n=n, k=k) for n, k in shapes]
            continue
        sizes = _sizes(recipe, tp, ep)
        if operation in OWN_BUCKET:
            calls += [_call("moe_bf16", backend, (count,), **sizes) for count in reversed(counts)]
        else:
            calls.append(_call("moe_bf16", backend, counts, **sizes))
        if operation in FINALIZES_LATER and recipe.tuning.deferred:
            calls.append(_call("moe_bf16", backend, sorted(recipe.tuning.deferred), **sizes, finalize=False))
    return tuple(calls)


def _call(operation: str, backend: str, counts: Any, **sizes: Any) -> dict[str, Any]:
    return {"operation": operation, "backend": backend, "m": counts[-1], "covers": list(counts[:-1]), **sizes}


def _sizes(recipe: Recipe, tp: int, ep: int) -> dict[str, Any]:
    model = recipe.model
    return {
        "maximum": recipe.tokens.maximum,
        "hidden": model.hidden_size,
        "intermediate": model.moe_intermediate_size // tp,
        "experts": model.experts,
        "top_k": model.top_k,
        "local_experts": model.experts // ep,
        "offset": 0,
    }
