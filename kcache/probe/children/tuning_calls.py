"""Calls of FlashInfer's tuned operations, for the children that tune and that replay; and what both count.

A call is {"operation": "mm_bf16", "backend": "cublaslt", "m": 4096, "n": 7168, "k": 2048} or one of `tuning_moe.py`. `m` is a
number of tokens: a tuner covers the smaller ones by its own buckets. Torch and FlashInfer only.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

LACKING = ("MissingJITCacheError", "FileNotFoundError", "ModuleNotFoundError", "ImportError", "CalledProcessError", "OSError")
"""Errors of a candidate that mean that something is missing on this host, not that the kernel is not for this shape."""

LACKING_WORDS = ("ninja", "nvcc", "disable_jit", "jit cache", "cannot open shared object")


def mm_bf16(call: Mapping[str, Any]) -> dict[str, Any]:
    """One product of matrices, m x k by k x n in bfloat16, and how far it is from torch's."""
    import flashinfer

    torch.manual_seed(7)
    a = torch.randn(call["m"], call["k"], device="cuda", dtype=torch.bfloat16)
    b = torch.randn(call["n"], call["k"], device="cuda", dtype=torch.bfloat16).transpose(-2, -1)
    found = flashinfer.mm_bf16(a, b, backend=call["backend"])
    wanted = a @ b
    error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    return {"relative_error": float(error), **timed(call, lambda: flashinfer.mm_bf16(a, b, backend=call["backend"]))}


def timed(call: Mapping[str, Any], function: Callable[[], Any]) -> dict[str, Any]:
    """The median of `repeat` runs on the GPU, in milliseconds; nothing where the call does not ask for it."""
    times = []
    for _ in range(call.get("repeat", 0)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return {"milliseconds": sorted(times)[len(times) // 2]} if times else {}


def moe_bf16(call: Mapping[str, Any]) -> dict[str, Any]:
    """A mixture of experts: `tuning_moe.py`, which lies beside this script."""
    found: dict[str, Any] = importlib.import_module("tuning_moe").moe_bf16(call)
    return found


CALLS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"mm_bf16": mm_bf16, "moe_bf16": moe_bf16}


def run(call: Mapping[str, Any]) -> dict[str, Any]:
    """Make a call; its own findings, or the error."""
    if call["operation"] not in CALLS:
        return {"call": dict(call), "error": f"no call of {call['operation']} is known here"}
    try:
        return {"call": dict(call), **CALLS[call["operation"]](call)}
    except Exception as error:  # noqa: BLE001 - one call that fails does not end the others
        return {"call": dict(call), "error": f"{type(error).__name__}: {error}"[:500]}


def policy_of(fields: Mapping[str, str]) -> Any:
    """A `MeasurementPolicy` from the fields that it writes into a store's environment (`manifest_fields`); None for none."""
    if not fields:
        return None
    from flashinfer.autotune_cache import MeasurementPolicy

    names = {"measure_execution_mode": "execution_mode", "measure_timer": "_timer", "measure_graph_timing": "graph_timing"}
    given: dict[str, Any] = {names[name]: text for name, text in fields.items() if name in names}
    if "measure_cold_l2" in fields:
        given["cold_l2"] = fields["measure_cold_l2"] == "True"
    policy = MeasurementPolicy(**given)
    if policy.manifest_fields() != dict(fields):
        raise ValueError(f"this FlashInfer has no measurement policy {dict(fields)}")
    return policy


def lacks(error: BaseException | None) -> bool:
    """Whether an error, or one that it came of, says that a module, tool or file is missing here."""
    while error is not None:
        names = {one.__name__ for one in type(error).__mro__}
        if names & set(LACKING) or any(word in str(error).lower() for word in LACKING_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


class Counted:
    """What a tuner does from now on: look-ups by outcome, candidates that it measured, JIT modules that were loaded."""

    def __init__(self) -> None:
        from flashinfer.autotuner import AutoTuner
        from flashinfer.jit import core

        self.hits: list[str] = []
        self.misses: list[str] = []
        self.profiled = 0
        self.failed: list[str] = []
        self.lacking: list[str] = []
        self.modules: list[str] = []
        self._count_lookups(AutoTuner)
        self._count_profiles(AutoTuner)
        for name in ("JitSpec", "JitSpecNvcc", "JitSpecCuteDsl"):
            if hasattr(core, name) and "build_and_load" in vars(getattr(core, name)):
                self._count_modules(getattr(core, name))

    def _count_lookups(self, tuner: Any) -> None:
        really = tuner.search_cache

        def search_cache(this: Any, custom_op: str, *arguments: Any, **named: Any) -> Any:
            found = really(this, custom_op, *arguments, **named)
            if not this.is_tuning_mode:
                (self.hits if found[0] else self.misses).append(custom_op)
            return found

        tuner.search_cache = search_cache

    def _count_profiles(self, tuner: Any) -> None:
        really = tuner._profile_single_kernel

        def profile(this: Any, runner: Any, inputs: Any, tactic: Any, *arguments: Any, **named: Any) -> Any:
            self.profiled += 1
            try:
                return really(this, runner, inputs, tactic, *arguments, **named)
            except Exception as error:
                told = f"{type(runner).__name__} {tactic}: {type(error).__name__}: {error}"[:300]
                self.failed.append(told)
                if lacks(error):
                    self.lacking.append(told)
                raise

        tuner._profile_single_kernel = profile

    def _count_modules(self, spec: Any) -> None:
        really = spec.build_and_load

        def build_and_load(this: Any, *arguments: Any, **named: Any) -> Any:
            loaded = really(this, *arguments, **named)
            if this.name not in self.modules:
                self.modules.append(this.name)
            return loaded

        spec.build_and_load = build_and_load

    def to_json(self) -> dict[str, Any]:
        return {
            "hits": len(self.hits),
            "misses": len(self.misses),
            "missed": sorted(set(self.misses)),
            "profiled": self.profiled,
            "failed": len(self.failed),
            "lacking": len(self.lacking),
            "first_lacking": self.lacking[:3],
            "first_failures": self.failed[:3],
            "modules": list(self.modules),
        }
