"""Every public function of FlashInfer's sampling API on this GPU, with given seeds: digests of the results, and what was slow.

`python check.py OUT [--without-topk]`: a result that needs the module `topk` is left out with `--without-topk`: the cold side of
a comparison, which does not wait for that module's minutes of compiling. Times of first calls are milliseconds of wall time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, VOCABULARY = 32, 128256
SEED, OFFSET = 20260, 7


def calls(torch: Any, sampling: Any) -> dict[str, Callable[[], Any]]:
    """Name -> one call with fixed inputs."""
    torch.manual_seed(3)
    logits = torch.randn(ROWS, VOCABULARY, device="cuda") * 3
    probs = torch.softmax(logits, dim=-1)
    draft = torch.softmax(torch.randn(ROWS, 4, 1024, device="cuda"), dim=-1)
    target = torch.softmax(torch.randn(ROWS, 5, 1024, device="cuda"), dim=-1)
    ids = torch.randint(0, 1024, (ROWS, 4), device="cuda", dtype=torch.int32)
    seeds = {"seed": SEED, "offset": OFFSET}
    both, joint = sampling.top_k_top_p_sampling_from_probs, {"filter_apply_order": "joint"}
    exact = {"is_deterministic": True}  # without it floating-point sums depend on the order in which blocks end
    return {
        "softmax": lambda: sampling.softmax(logits),
        "sampling_from_logits": lambda: sampling.sampling_from_logits(logits, **seeds),
        "sampling_from_probs": lambda: sampling.sampling_from_probs(probs, **seeds),
        "top_p_sampling_from_probs": lambda: sampling.top_p_sampling_from_probs(probs, 0.9, **seeds),
        "top_k_sampling_from_probs": lambda: sampling.top_k_sampling_from_probs(probs, 50, **seeds),
        "min_p_sampling_from_probs": lambda: sampling.min_p_sampling_from_probs(probs, 0.02, **seeds),
        "top_k_top_p_sampling_from_probs, joint": lambda: both(probs, 50, 0.9, **joint, **seeds),
        "top_k_top_p_sampling_from_probs, k first": lambda: both(probs, 50, 0.9, **seeds),
        "top_k_top_p_sampling_from_probs, k first, large k": lambda: both(probs, 5000, 0.9, **seeds),
        "top_k_top_p_sampling_from_logits, joint": lambda: sampling.top_k_top_p_sampling_from_logits(
            logits, 50, 0.9, **joint, **seeds
        ),
        "top_k_top_p_sampling_from_logits, k first": lambda: sampling.top_k_top_p_sampling_from_logits(logits, 50, 0.9, **seeds),
        "top_k_top_p_sampling_from_logits, k first, large k": lambda: sampling.top_k_top_p_sampling_from_logits(
            logits, 5000, 0.9, **seeds
        ),
        "top_p_renorm_probs": lambda: sampling.top_p_renorm_probs(probs, 0.9, **exact),
        "top_k_renorm_probs": lambda: sampling.top_k_renorm_probs(probs, 50, **exact),
        "top_k_mask_logits": lambda: sampling.top_k_mask_logits(logits, 50),
        "chain_speculative_sampling": lambda: sampling.chain_speculative_sampling(draft, ids, target, **seeds),
    }


def digest_of(torch: Any, result: Any) -> str:
    """Digest of all tensors of a result."""
    whole = hashlib.sha256()
    for tensor in result if isinstance(result, tuple) else (result,):
        if isinstance(tensor, torch.Tensor):
            whole.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return whole.hexdigest()[:16]


def milliseconds(torch: Any, call: Callable[[], Any]) -> tuple[Any, float]:
    torch.cuda.synchronize()
    started = time.perf_counter()
    result = call()
    torch.cuda.synchronize()
    return result, round((time.perf_counter() - started) * 1000, 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--without-topk", action="store_true")
    arguments = parser.parse_args()
    import torch
    from flashinfer import sampling, topk

    if arguments.without_topk:

        def refuse() -> None:
            raise LookupError("the module topk is not compiled here")

        topk.get_topk_module = refuse
    torch.zeros(1, device="cuda")
    document: dict[str, Any] = {"device": torch.cuda.get_device_name(0), "jit": not os.environ.get("FLASHINFER_DISABLE_JIT")}
    _, document["get_sampling_module_ms"] = milliseconds(torch, sampling.get_sampling_module)
    results: dict[str, str] = {}
    errors: dict[str, str] = {}
    first: dict[str, float] = {}
    for name, call in calls(torch, sampling).items():
        try:
            value, first[name] = milliseconds(torch, call)
            results[name] = digest_of(torch, value)
        except Exception as error:  # the others are still told  # noqa: BLE001
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    document |= {"results": results, "errors": errors, "first_call_ms": first}
    arguments.out.write_text(json.dumps(document), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
