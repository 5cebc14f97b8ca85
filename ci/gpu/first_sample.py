"""The first top-k-top-p sample of a process, `python first_sample.py OUT`: milliseconds from an imported FlashInfer to tokens."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> int:
    import torch
    from flashinfer import sampling

    probs = torch.softmax(torch.randn(32, 128256, device="cuda"), dim=-1)
    torch.cuda.synchronize()
    started = time.perf_counter()
    sampling.top_k_top_p_sampling_from_probs(probs, 50, 0.9).tolist()
    took = (time.perf_counter() - started) * 1000
    Path(sys.argv[1]).write_text(json.dumps({"first_top_k_top_p_ms": round(took, 3)}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
