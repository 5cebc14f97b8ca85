"""A small engine whose start returns early, as TensorRT-LLM's does (`PyTorchModelEngine.warmup`, NVIDIA/TensorRT-LLM, PR 17286).

It serves sampling through FlashInfer's module `cascade`, which stands for `sampling` because it compiles in seconds, and greedy
requests without any module. Run as a program: `engine.py SETTING...` starts it, says "ready", and then serves both.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from kcache.warmup import WarmupReport, warmup


class Engine:
    """`settings`: names of what this engine has switched off or on."""

    def __init__(self, *settings: str) -> None:
        self.settings = settings
        self.kv_cache_manager = None if "no-kv-cache" in settings else object()
        self.report: WarmupReport | None = None
        self.captured = False

    def start(self) -> None:
        # First of all: each of the returns below is a way in which an engine has left a build to its first request.
        self.report = warmup(kinds=(), modules=("cascade",))
        if self.kv_cache_manager is None:
            return
        if "context-parallel" in self.settings:
            return
        if "no-speculation" in self.settings:
            return
        self._capture()

    def _capture(self) -> None:
        if "no-cuda-graphs" in self.settings:
            return
        self.captured = True

    def greedy(self, logits: list[float]) -> int:
        return max(range(len(logits)), key=logits.__getitem__)

    def sample(self) -> Any:
        from flashinfer.cascade import get_cascade_module

        return get_cascade_module()


def main() -> None:
    engine = Engine(*sys.argv[1:])
    engine.start()
    assert engine.report is not None
    print("ready", flush=True)
    told: dict[str, Any] = {"warmup": engine.report.to_json(), "greedy": engine.greedy([0.1, 0.7, 0.2]), "sampling": ""}
    try:
        engine.sample()
    except Exception as error:  # noqa: BLE001
        told["sampling"] = f"{type(error).__name__}: {error}"
    print(json.dumps(told))


if __name__ == "__main__":
    main()
