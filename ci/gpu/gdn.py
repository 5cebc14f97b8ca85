"""CuTe-DSL kernels that FlashInfer keeps on Hopper: the gated delta rule of Qwen3-Next's linear attention, on this GPU.

`python gdn.py OUT`: decode, decode from a pool of states and the verification of drafted tokens, for some batch sizes. Of each
call: milliseconds of the first one, a digest of the result, and whether it is right: within bfloat16's rounding of the rule
itself, token by token, in float32 and plain torch. Uses of `cute.compile` are counted. Inputs come from a seed, on the CPU.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HEADS, VALUE_HEADS, DIM, DRAFTED, POOL = 16, 32, 128, 4, 64
BATCHES = (1, 8, 16, 64)
TOLERANCE = 2e-2


def count_compilations() -> list[str]:
    """A list that grows by a kernel's name whenever CuTe-DSL is asked to compile one."""
    from cutlass import cute

    kind, seen = type(cute.compile), []
    real = kind.__call__

    def compile_(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(getattr(function, "__name__", None) or type(function).__name__)
        return real(self, function, *args, **kwargs)

    kind.__call__ = compile_
    return seen


def inputs(torch: Any, batch: int, length: int, random: Any) -> dict[str, Any]:
    def half(*shape: int) -> Any:
        return torch.randn(shape, generator=random).to(torch.bfloat16).cuda()

    return {
        "q": half(batch, length, HEADS, DIM),
        "k": half(batch, length, HEADS, DIM),
        "v": half(batch, length, VALUE_HEADS, DIM),
        "a": half(batch, length, VALUE_HEADS),
        "b": half(batch, length, VALUE_HEADS),
        "A_log": (0.5 * torch.randn(VALUE_HEADS, generator=random)).cuda(),
        "dt_bias": (0.5 * torch.randn(VALUE_HEADS, generator=random)).cuda(),
        "use_qk_l2norm": True,
    }


def expected(torch: Any, given: dict[str, Any], state: Any) -> Any:
    """The outputs [batch, tokens, heads, dim] by the rule itself. state: [batch, heads, dim of v, dim of k], float32."""

    def unit(x: Any) -> Any:
        x = x.float()
        return (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)).repeat_interleave(VALUE_HEADS // HEADS, dim=2)

    q, k = unit(given["q"]) * DIM**-0.5, unit(given["k"])
    softplus = torch.nn.functional.softplus(given["a"].float() + given["dt_bias"].float())
    decay, beta = torch.exp(-torch.exp(given["A_log"]) * softplus), torch.sigmoid(given["b"].float())
    outs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None]
        change = (given["v"][:, t].float() - torch.einsum("bhvk,bhk->bhv", state, k[:, t])) * beta[:, t, :, None]
        state = state + change[..., None] * k[:, t, :, None, :]
        outs.append(torch.einsum("bhvk,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1)


def one(torch: Any, gdn: Any, how: str, batch: int) -> dict[str, Any]:
    """One call of the public API."""
    random = torch.Generator().manual_seed(batch)
    given = inputs(torch, batch, DRAFTED if how == "verify" else 1, random)
    size = batch if how == "decode" else max(POOL, batch + 1)
    state = (0.1 * torch.randn((size, VALUE_HEADS, DIM, DIM), generator=random)).cuda()
    where = torch.arange(size - batch, size, dtype=torch.int32).cuda()
    want = expected(torch, given, state[where.long()].clone())
    pool = {"initial_state": state, "initial_state_indices": where}
    steps = torch.zeros(batch, DRAFTED, VALUE_HEADS, DIM, DIM, device="cuda")
    calls: dict[str, Callable[[], Any]] = {
        "decode": lambda: gdn.gated_delta_rule_decode_pretranspose(**given, state=state),
        "pool": lambda: gdn.gated_delta_rule_decode_pretranspose(**given, state=None, **pool),
        "verify": lambda: gdn.gated_delta_rule_mtp(**given, **pool, intermediate_states_buffer=steps, disable_state_update=True),
    }
    torch.cuda.synchronize()
    started = time.perf_counter()
    out = calls[how]()[0]
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    difference = (out.float().reshape(want.shape) - want).abs()
    return {
        "first_ms": round(seconds * 1000, 3),
        "digest": hashlib.sha256(out.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16],
        "right": bool((difference <= TOLERANCE + TOLERANCE * want.abs()).all()),
        "largest_difference": float(difference.max()),
    }


def main() -> int:
    import torch
    from flashinfer import gdn_decode

    started = time.perf_counter()
    compiled = count_compilations()
    results: dict[str, Any] = {}
    for how in ("decode", "pool", "verify"):
        for batch in BATCHES:
            try:
                results[f"{how}, {batch}"] = one(torch, gdn_decode, how, batch)
            except Exception as error:  # noqa: BLE001  one call that fails is told, and does not hide the others
                results[f"{how}, {batch}"] = {"error": f"{type(error).__name__}: {error}"[:400]}
    document = {"results": results, "compiled": compiled, "seconds": round(time.perf_counter() - started, 3)}
    Path(sys.argv[1]).write_text(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
