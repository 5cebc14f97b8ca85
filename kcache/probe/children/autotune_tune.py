"""Child process: tunes calls of FlashInfer's operations on the GPU of this host, and says honestly what came of it.

Run by path with the Python that has FlashInfer. Request (JSON on standard input):

    {"calls": [call, ...], "root": path or null, "policy": {field: text}, "file": path or null, "answer": path}

`root` is that of the managed store (v2); with `file` results go to a JSON file (v1) instead. Calls: see `tuning_calls.py`. Answer
(JSON in the file named by the request):

    {"flashinfer", "metadata", "env_hash", "calls": [...], "counted": {...}, "total": {operation: profiles},
     "successful": {operation: profiles with a winner}, "problem": text, "seconds"}

`problem` is empty only if every profile of every operation has a winner and the tuner's own module could be loaded: FlashInfer
itself passes over candidates that fail, and raises nothing when all of them do. Standard library, torch and FlashInfer only.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any


def _beside(name: str) -> Any:
    """A script that lies beside this one."""
    return importlib.import_module(name)


def _tuner_module() -> str:
    """Why the tuner's own JIT module cannot be loaded; empty if it can. Without it every candidate fails in silence."""
    from flashinfer.tllm_utils import get_trtllm_utils_module

    try:
        get_trtllm_utils_module()
    except Exception as error:  # noqa: BLE001 - whatever it is, tuning cannot work
        return f"the module trtllm_utils, which the tuner needs, cannot be loaded: {type(error).__name__}: {error}"[:500]
    return ""


def _context(request: dict[str, Any]) -> Any:
    import flashinfer

    tuning_calls = _beside("tuning_calls")

    if request["file"] is not None:
        return flashinfer.autotune(True, cache=request["file"])
    policy = tuning_calls.policy_of(request["policy"])
    return flashinfer.autotune_v2(mode="tune", cache_root=request["root"], measurement_policy=policy)


def _problem(calls: list[dict[str, Any]], total: dict[str, int], successful: dict[str, int], failures: list[str]) -> str:
    if errors := [call["error"] for call in calls if "error" in call]:
        return f"a call failed: {errors[0]}"
    won = {name: successful.get(name, 0) for name in total}
    lacking = [f"{name}: {won[name]} of {count}" for name, count in total.items() if won[name] < count]
    if lacking or not total:
        return f"tuning left no winner for every profile ({', '.join(lacking) or 'nothing was tuned'}): {' / '.join(failures)}"
    return ""


def main() -> None:
    request = json.load(sys.stdin)
    started = time.monotonic()
    import flashinfer

    tuning_calls = _beside("tuning_calls")
    from flashinfer.autotuner import AutoTuner, _collect_metadata

    counted = tuning_calls.Counted()
    answer: dict[str, Any] = {"flashinfer": flashinfer.__version__, "metadata": _collect_metadata(), "env_hash": ""}
    answer["problem"] = _tuner_module()
    calls: list[dict[str, Any]] = []
    if not answer["problem"]:
        tuning = time.monotonic()
        with _context(request):
            store = getattr(AutoTuner.get(), "_active_managed_store", None)
            answer["env_hash"] = store.env_hash if store is not None else ""
            calls = [tuning_calls.run(call) for call in request["calls"]]
        answer["tuning_seconds"] = time.monotonic() - tuning
        stats = AutoTuner.get().stats
        total, successful = dict(stats.tuned_op_total_configs), dict(stats.tuned_op_successful_configs)
        answer |= {"total": total, "successful": successful}
        answer["problem"] = _problem(calls, total, successful, counted.failed[:3])
    answer["calls"], answer["counted"] = calls, counted.to_json()
    answer["seconds"] = time.monotonic() - started
    with open(request["answer"], "w", encoding="utf-8") as stream:
        json.dump(answer, stream, default=repr)


if __name__ == "__main__":
    main()
