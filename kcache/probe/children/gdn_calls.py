"""The calls of FlashInfer's gated delta rule (GDN), for the dry run `cute_dry_run.py`, which says what an operation's file holds.

Linear attention of Qwen3-Next and its kin. FlashInfer keeps on disk the kernels of decode, of verifying drafted tokens, and of
normalising q and k before prefill; prefill's own kernels (`delta_rule_dsl`) it compiles in every process, and the dry run names
them as left out. Which kernel is asked for depends on heads, types, strides and, in steps, on the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

LABEL = "gated delta rule"

_DECODE = "flashinfer.gdn_decode"
_PREFILL = "flashinfer.gdn_prefill"

NEEDS = {
    _DECODE: ("gated_delta_rule_decode_pretranspose", "gated_delta_rule_mtp"),
    _PREFILL: ("chunk_gated_delta_rule",),
}

CASE = {
    "id": "name in the answer",
    "calls": "prefill, decode (state of the batch), pool (states by index), verify (drafted tokens)",
    "heads": "of q and k on one rank",
    "value_heads": "of v on one rank",
    "dim": "elements of a head of q, k and v",
    "state": "float32 or bfloat16: type of the recurrent state (decode, pool)",
    "dt_bias": "float32 or bfloat16: type of that parameter as the engine holds it",
    "drafted": "tokens that one sequence verifies in a call (verify), else 1",
    "tokens": "sequences of a call (decode, pool, verify) or tokens of its one sequence (prefill), in the order of the calls",
}

_POOL = 64
"""States in the pool (more where the batch is larger). Kernels take contiguous pools of any size, so it enters no name."""


def patch(run: Any) -> None:
    """Nothing here is answered by a compiled kernel."""


def forget() -> None:
    """Empty the in-process tables of every module of the operation, so that every call asks the disk cache and is counted."""
    for name, module in list(sys.modules.items()):
        if name.startswith("flashinfer.gdn_"):
            for item_name, item in list(vars(module).items()):
                if hasattr(item, "cache_clear"):
                    item.cache_clear()
                elif isinstance(item, dict) and ("cache" in item_name.lower() or item_name.startswith("_compiled_kernels")):
                    item.clear()


def walk(case: dict[str, Any], run: Any, make_calls: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One case, all its token counts; the errors."""
    return make_calls(case)


def _inputs(case: dict[str, Any], batch: int, length: int) -> dict[str, Any]:
    """What all calls of decode take."""
    import torch

    heads, value_heads, dim = case["heads"], case["value_heads"], case["dim"]

    def half(*shape: int) -> Any:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda")

    return {
        "q": half(batch, length, heads, dim),
        "k": half(batch, length, heads, dim),
        "v": half(batch, length, value_heads, dim),
        "a": half(batch, length, value_heads),
        "b": half(batch, length, value_heads),
        "A_log": torch.empty(value_heads, dtype=torch.float32, device="cuda"),
        "dt_bias": torch.empty(value_heads, dtype=getattr(torch, case["dt_bias"]), device="cuda"),
        "use_qk_l2norm": True,
    }


def _states(case: dict[str, Any], *leading: int) -> Any:
    import torch

    shape = (*leading, case["value_heads"], case["dim"], case["dim"])
    return torch.empty(shape, dtype=getattr(torch, case["state"]), device="cuda")


def _indices(batch: int) -> Any:
    import torch

    return torch.empty(batch, dtype=torch.int32, device="cuda")


def _decode(case: dict[str, Any], batch: int) -> object:
    function = sys.modules[_DECODE].gated_delta_rule_decode_pretranspose
    return function(**_inputs(case, batch, 1), state=_states(case, batch))


def _pool(case: dict[str, Any], batch: int) -> object:
    function = sys.modules[_DECODE].gated_delta_rule_decode_pretranspose
    pool = {"initial_state": _states(case, max(_POOL, batch)), "initial_state_indices": _indices(batch)}
    return function(**_inputs(case, batch, 1), state=None, **pool)


def _verify(case: dict[str, Any], batch: int) -> object:
    function, drafted = sys.modules[_DECODE].gated_delta_rule_mtp, case["drafted"]
    pool = {"initial_state": _states(case, max(_POOL, batch)), "initial_state_indices": _indices(batch)}
    steps = _states(case, batch, drafted)
    options = {"intermediate_states_buffer": steps, "disable_state_update": True}
    return function(**_inputs(case, batch, drafted), **pool, **options)


def _prefill(case: dict[str, Any], tokens: int) -> object:
    import torch

    inputs = _inputs(case, 1, tokens)
    gates = torch.empty(tokens, case["value_heads"], dtype=torch.float32, device="cuda")
    return sys.modules[_PREFILL].chunk_gated_delta_rule(
        q=inputs["q"][0],
        k=inputs["k"][0],
        v=inputs["v"][0],
        g=gates,
        beta=gates,
        initial_state=_states(case | {"state": "float32"}, 1),
        output_final_state=True,
        cu_seqlens=torch.empty(2, dtype=torch.int64, device="cuda"),
        use_qk_l2norm_in_kernel=True,
    )


def calls(case: dict[str, Any]) -> Callable[[int], object]:
    """A function of the token count that makes one call of the public API."""
    make = {"decode": _decode, "pool": _pool, "verify": _verify, "prefill": _prefill}[case["calls"]]
    return lambda tokens: make(case, tokens)
