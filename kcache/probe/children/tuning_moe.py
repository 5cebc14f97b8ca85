"""Calls of FlashInfer's mixtures of experts in bfloat16, for `tuning_calls.py`: weights, routing and the call itself.

A call is {"operation": "moe_bf16", "backend": "cutile", "m": tokens, "maximum": tokens, "hidden": 2048, "intermediate": 768,
"experts": 128, "top_k": 8, "local_experts": 128, "offset": 0, "finalize": true}; `intermediate` and `local_experts` are of one
rank. Backends `cutile`, `cutlass` and `trtllm` are those of FlashInfer's `MoELayer` (`fused_moe/layer.py`, 0.7.0 to 0.7.4), and
`cute-dsl` is its Hopper kernel in CuTe-DSL (`fused_moe/cute_dsl/sm90_fused_moe.py`, 0.7.0 to 0.7.4). FlashInfer's function is
called, and no engine's layer: nothing counts the load of experts (EPLB) here.

Torch and FlashInfer only.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

CHECKED = 4
"""Tokens that are compared with torch's own result."""

CONFIGURATIONS = {"cutile": "CuTileBf16Config", "cutlass": "CutlassBf16Config", "trtllm": "TrtllmBf16Config"}
WEIGHT_VIEWS = {"cutile": "cutile_bf16", "cutlass": "cutlass_bf16", "trtllm": "trtllm_bf16_routed"}


def routing(tokens: int, experts: int, top_k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Which experts each token goes to, [tokens, top_k] int32, and their scales, [tokens, top_k] float32 with sum 1.

    Drawn at random, so that experts are loaded unevenly as at work, but none is left without a token where there are enough
    of them: a rank of an expert-parallel group without tokens would not call its kernels, and the others would wait for it
    (vLLM draws its inputs at random for this reason, `model_executor/warmup/kernel_warmup.py`, flashinfer_autotune).
    """
    generator = torch.Generator(device=device).manual_seed(11)
    drawn = torch.rand(tokens, experts, device=device, generator=generator).topk(top_k, dim=-1).indices
    forced = min(tokens, -(-experts // top_k))
    order = torch.randperm(experts, device=device, generator=generator)
    drawn[:forced] = order[torch.arange(forced * top_k, device=device) % experts].reshape(forced, top_k)
    scales = torch.rand(tokens, top_k, device=device, generator=generator) + 0.1
    return drawn.to(torch.int32), scales / scales.sum(dim=-1, keepdim=True)


@functools.lru_cache(maxsize=1)
def weights(local: int, hidden: int, intermediate: int) -> tuple[torch.Tensor, torch.Tensor]:
    """w1 [local, 2 * intermediate, hidden], its rows in the order up, gate, and w2 [local, hidden, intermediate]."""
    generator = torch.Generator(device="cuda").manual_seed(12)
    shapes = ((local, 2 * intermediate, hidden), (local, hidden, intermediate))
    made = [torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator) for shape in shapes]
    return made[0] / hidden**0.5, made[1] / intermediate**0.5


def moe_bf16(call: Mapping[str, Any]) -> dict[str, Any]:
    """One call, and how far its first tokens are from torch's."""
    generator = torch.Generator(device="cuda").manual_seed(13)
    x = torch.randn(call["m"], call["hidden"], device="cuda", dtype=torch.bfloat16, generator=generator)
    ids, scales = routing(call["m"], call["experts"], call["top_k"], "cuda")
    w1, w2 = weights(call["local_experts"], call["hidden"], call["intermediate"])
    made = (_cute_dsl if call["backend"] == "cute-dsl" else _layer)(call, w1, w2)
    found = made(x, ids, scales)
    if not call.get("finalize", True):
        return {"tensors": len(found)}
    wanted = reference(x[:CHECKED], (ids[:CHECKED] - call["offset"], scales[:CHECKED]), (w1, w2))
    error = (found[:CHECKED].float() - wanted).abs().max() / wanted.abs().max()
    timed: Callable[..., dict[str, Any]] = importlib.import_module("tuning_calls").timed
    return {"relative_error": float(error), **timed(call, lambda: made(x, ids, scales))}


def reference(
    x: torch.Tensor, routed: tuple[torch.Tensor, torch.Tensor], weights: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """SwiGLU experts, summed by their scales, in float32; experts of other ranks add nothing."""
    (ids, scales), (w1, w2) = routed, weights
    out = torch.zeros(x.shape, device=x.device, dtype=torch.float32)
    for token in range(x.shape[0]):
        for slot in range(ids.shape[1]):
            expert = int(ids[token, slot])
            if 0 <= expert < w1.shape[0]:
                up, gate = (w1[expert].float() @ x[token].float()).chunk(2)
                inner = torch.nn.functional.silu(gate) * up
                out[token] += scales[token, slot] * (w2[expert].float() @ inner)
    return out


def _cute_dsl(call: Mapping[str, Any], w1: torch.Tensor, w2: torch.Tensor) -> Callable[..., Any]:
    import flashinfer

    # Up and gate in turns of 32 columns: what the kernel's documentation asks for.
    columns = call["intermediate"] // 32
    interleaved = w1.reshape(w1.shape[0], 2, columns, 32, w1.shape[2]).transpose(1, 2).reshape(w1.shape).contiguous()
    function: Any = getattr(flashinfer, "cute_dsl_fused_moe_bf16", None)
    if function is None:
        from flashinfer.cute_dsl.availability import is_cute_dsl_available

        why = "is too old for it" if is_cute_dsl_available() else "cannot use CuTe-DSL's compiler here (nvidia-cutlass-dsl)"
        raise LookupError(f"there is no cute_dsl_fused_moe_bf16: FlashInfer {flashinfer.__version__} {why}")
    return functools.partial(
        _in_order,
        functools.partial(
            function,
            w1_weight=interleaved,
            w2_weight=w2,
            num_experts=call["experts"],
            top_k=call["top_k"],
            num_local_experts=call["local_experts"],
            local_expert_offset=call["offset"],
        ),
    )


def _in_order(function: Callable[..., Any], x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor) -> Any:
    return function(x, ids, scales)


def _layer(call: Mapping[str, Any], w1: torch.Tensor, w2: torch.Tensor) -> Callable[..., Any]:
    """FlashInfer's layer with one backend. A new one each time: a layer remembers winners, and would not ask the tuner again."""
    import flashinfer
    from flashinfer.fused_moe import api

    layers: Any = api
    name = CONFIGURATIONS[call["backend"]]
    if not hasattr(layers, name) or not hasattr(layers, "QuantFormat"):
        raise LookupError(f"FlashInfer {flashinfer.__version__} has no {name} for its MoELayer")
    from flashinfer.fused_moe.layer import MoELayer

    configuration = getattr(layers, name)()
    config = layers.MoEConfig(
        routing=layers.RoutingConfig(num_experts=call["experts"], top_k=call["top_k"]),
        quant=layers.QuantConfig(),
        experts=layers.ExpertConfig(
            intermediate_size=call["intermediate"],
            local_expert_offset=call["offset"],
            local_num_experts=call["local_experts"],
        ),
        activation=layers.SwiGLU(),
        backend=layers.BackendOptions(candidates=(configuration,)),
        execution=layers.ExecutionConfig(tune_max_num_tokens=call["maximum"]),
        finalize=layers.MoEFinalizeConfig(do_finalize=call.get("finalize", True)),
    )
    layer: Any = MoELayer(config)
    pack = layers.MoEWeightPack()
    sizes = {"hidden_size": call["hidden"], "intermediate_size": call["intermediate"]}
    view = configuration.prepare_weights(w1, w2, num_local_experts=call["local_experts"], **sizes)
    pack.prepare_for(WEIGHT_VIEWS[call["backend"]], view)

    def run(x: torch.Tensor, ids: torch.Tensor, scales: torch.Tensor) -> Any:
        return layer(layers.MoEActivationPack(x, None, ids, scales), pack)

    return run
