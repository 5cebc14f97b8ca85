"""The calls of FlashInfer's b12x fused MoE (SM12x), for the dry run `cute_dry_run.py`, which says what an operation's file holds.

Which kernel a call asks for depends on the model, the quantisation mode, the token count, and on what the call before it left in
the workspace; whether a direct micro kernel can be launched only the compiled kernel itself says, on the GPU. For a case that has
one, both answers are walked, and what is asked for under the second is marked as fallback.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

LABEL = "b12x MoE"

_HERE = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x"
_DISPATCH = f"{_HERE}.moe_dispatch"
_API = "flashinfer.fused_moe.cute_dsl.b12x_moe"

NEEDS = {
    _DISPATCH: ("clear_sm120_moe_caches",),
    f"{_HERE}.triton_compact": (),
    _API: ("B12xMoEWrapper", "b12x_fused_moe"),
}

CASE = {
    "id": "name in the answer",
    "experts": "of the model",
    "local_experts": "held by one rank; below `experts` with expert parallelism",
    "top_k": "experts of a token",
    "hidden": "hidden size",
    "inter": "intermediate size of one expert on one rank",
    "activation": "silu, gelu_tanh, swigluoai_uninterleave, relu2",
    "swiglu": "{alpha, beta, limit} of swigluoai_uninterleave, or null for FlashInfer's own",
    "quant": "nvfp4, mxfp4, w4a16",
    "scales": "per_expert or shared: how the engine passes the activation scales",
    "calls": "wrapper (B12xMoEWrapper with CUDA graph buffers for `maximum`) or function (b12x_fused_moe)",
    "maximum": "most tokens of a call",
    "tokens": "token counts, in the order in which the engine makes its calls",
}


def patch(run: Any) -> None:
    """Answer what FlashInfer asks of a compiled direct micro kernel on the GPU: its register count. See `walk`."""
    dispatch = sys.modules[_DISPATCH]
    if hasattr(dispatch, "compiled_direct_micro_accepts_block_dim"):
        setattr(dispatch, "compiled_direct_micro_accepts_block_dim", lambda compiled, block: not run.fallback)  # noqa: B010


def forget() -> None:
    """Empty FlashInfer's in-process tables of kernels, so that every call asks the disk cache and is counted."""
    for name, table in vars(sys.modules[_DISPATCH]).items():
        if name.endswith(("_KERNEL_CACHE", "_LAUNCH_CACHE")) and isinstance(table, dict):
            table.clear()


def _scout(case: dict[str, Any]) -> dict[str, Any]:
    """The same case with few experts. Preparing W4A16 weights takes 50 ms for each expert, bytes or not."""
    few = max(8, case["top_k"])
    return case | {"local_experts": few, "experts": few if case["experts"] == case["local_experts"] else 2 * few}


def walk(case: dict[str, Any], run: Any, make_calls: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One case, all its token counts; the errors."""
    asked = dict(run.asked)
    if case["quant"] == "w4a16" and case["local_experts"] > 16:
        errors = make_calls(_scout(case))
        if run.asked != asked:  # this FlashInfer keeps W4A16 kernels on disk: only the real shape has the right names
            run.asked = asked
            errors = make_calls(case)
    else:
        errors = make_calls(case)
    if any(case["id"] in e["cases"] and "DirectMicro" in e["kernel"] for e in run.not_persisted.values()):
        run.fallback = True
        errors += make_calls(case)
        run.fallback = False
    return errors


def _scale_blocks(experts: int, rows: int, columns: int, vector: int) -> Any:
    """Block scales without bytes, in the 6-D layout that `convert_sf_to_mma_layout` gives."""
    import torch

    kind = torch.float8_e4m3fn if vector == 16 else torch.float8_e8m0fnu
    tiles = (experts, -(-rows // 128), -(-(columns // vector) // 4), 32, 4, 4)
    return torch.empty(tiles, dtype=kind, device="cuda").permute(3, 4, 1, 5, 2, 0)


def _weights(case: dict[str, Any]) -> dict[str, Any]:
    """The weight arguments of one layer on one rank."""
    import torch

    experts, hidden, inter = case["local_experts"], case["hidden"], case["inter"]
    branches = 1 if case["activation"] == "relu2" else 2
    vector = 32 if case["quant"] == "mxfp4" else 16
    alpha = torch.empty(experts, dtype=torch.float32, device="cuda")
    weights = {
        "w1_weight": torch.empty(experts, branches * inter, hidden // 2, dtype=torch.uint8, device="cuda"),
        "w1_weight_sf": _scale_blocks(experts, branches * inter, hidden, vector),
        "w2_weight": torch.empty(experts, hidden, inter // 2, dtype=torch.uint8, device="cuda"),
        "w2_weight_sf": _scale_blocks(experts, hidden, inter, vector),
        "w1_alpha": alpha,
        "w2_alpha": torch.empty(experts, dtype=torch.float32, device="cuda"),
        "fc2_input_scale": None,
    }
    if case["quant"] == "nvfp4":
        size = experts if case["scales"] == "per_expert" else 1
        weights["fc2_input_scale"] = torch.empty(size, dtype=torch.float32, device="cuda")
        if case["scales"] == "shared":
            weights["input_global_scale"] = torch.empty(1, dtype=torch.float32, device="cuda")
    return weights


def _options(case: dict[str, Any], function: Any) -> dict[str, Any]:
    """The options of a call, refused by name where this FlashInfer's function does not have one that the case needs."""
    import torch

    options: dict[str, Any] = {"activation": case["activation"], "quant_mode": case["quant"]}
    for name, value in (case.get("swiglu") or {}).items():
        options[f"swiglu_{name}"] = value
    if case["local_experts"] != case["experts"]:
        local, total = case["local_experts"], case["experts"]
        places = list(range(local)) + [-1] * (total - local)
        options["num_local_experts"] = local
        options["expert_map"] = torch.tensor(places, dtype=torch.int32)
    known = inspect.signature(inspect.unwrap(function)).parameters
    if unknown := sorted(name for name in options if name not in known):
        raise ValueError(f"this FlashInfer's {function.__name__} takes no {', '.join(unknown)}")
    return options


def calls(case: dict[str, Any]) -> Callable[[int], object]:
    """A function of the token count that makes one call of the public API."""
    import torch

    b12x_moe = sys.modules[_API]
    sys.modules[_DISPATCH].clear_sm120_moe_caches()
    weights = _weights(case)
    experts, top_k, hidden = case["experts"], case["top_k"], case["hidden"]

    def routed(tokens: int) -> dict[str, Any]:
        return {
            "x": torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda"),
            "token_selected_experts": torch.empty(tokens, top_k, dtype=torch.int32, device="cuda"),
            "token_final_scales": torch.empty(tokens, top_k, dtype=torch.float32, device="cuda"),
        }

    if case["calls"] == "function":
        options = _options(case, b12x_moe.b12x_fused_moe)
        return lambda tokens: b12x_moe.b12x_fused_moe(**routed(tokens), **weights, num_experts=experts, top_k=top_k, **options)
    wrapper_type = b12x_moe.B12xMoEWrapper
    wrapper = wrapper_type(
        experts,
        top_k,
        hidden,
        case["inter"],
        use_cuda_graph=True,
        max_num_tokens=case["maximum"],
        **_options(case, wrapper_type.__init__),
    )
    return lambda tokens: wrapper.run(**routed(tokens), **weights)
