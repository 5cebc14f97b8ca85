"""Child of `ci/bench --peers`: `python peer_load.py ROLE [FILE]`, in a world's environment. One JSON object on stdout.

ROLE `load` loads both modules as FlashInfer's own API does; `aot` is FlashInfer's own ahead-of-time build of both into the
directory FILE. `mega-save` compiles a function with torch.compile, loads the modules too, and writes what torch's mega-cache then
holds to FILE; `mega-load` gives FILE to torch, and does the same again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def load() -> dict[str, Any]:
    """Seconds from here to each loaded module, the import of FlashInfer first."""
    started = time.perf_counter()
    from flashinfer.cascade import get_cascade_module
    from flashinfer.concat_ops import get_concat_mla_module

    seconds = {"import": time.perf_counter() - started}
    for name, get in (("cascade", get_cascade_module), ("concat_mla", get_concat_mla_module)):
        began = time.perf_counter()
        get()
        seconds[name] = time.perf_counter() - began
    return seconds


def aot(folder: Path) -> dict[str, Any]:
    from flashinfer.aot import copy_built_kernels
    from flashinfer.jit import build_jit_specs
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.dsv3_optimizations import gen_concat_mla_module

    specs = [gen_cascade_module(), gen_concat_mla_module()]
    build_jit_specs(specs, verbose=False, skip_prebuilt=False)
    copy_built_kernels(specs, folder)
    return {}


def compiled_function() -> dict[str, Any]:
    """A function of torch's own through inductor, on the CPU: how often its cache was hit, and seconds."""
    import torch
    from torch._dynamo.utils import counters

    started = time.perf_counter()
    torch.compile(lambda x: torch.softmax(torch.relu(x) * 2.5, dim=-1))(torch.ones(64, 64))
    return {"torch_function": time.perf_counter() - started, "torch_hits": counters["inductor"]["fxgraph_cache_hit"]}


def main() -> None:
    role = sys.argv[1]
    found: dict[str, Any] = {}
    if role == "aot":
        found = aot(Path(sys.argv[2]))
    elif role == "load":
        found = load()
    else:
        import torch

        file = Path(sys.argv[2])
        if role == "mega-load":
            torch.compiler.load_cache_artifacts(file.read_bytes())
        found = compiled_function() | load()
        if role == "mega-save":
            saved = torch.compiler.save_cache_artifacts()
            file.write_bytes(saved[0] if saved is not None else b"")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
