"""Child process: tunes calls of FlashInfer's operations on the GPU of this host, and says honestly what came of it.

Run by path with the Python that has FlashInfer. Request (JSON on standard input):

    {"calls": [call, ...], "root": path or null, "file": path or null, "policy": {field: text}, "skip": [operation, ...],
     "group": null or {"rank", "size", "init": URL of torch.distributed}, "answer": path}

`root` is that of the managed store (v2, from 0.7.0 on), `file` a JSON file (v1); one of them at least. A call (`tuning_calls.py`)
may hold `covers`: smaller token counts that its tuning must have covered. What is done is what vLLM does at its start
(vllm-project/vllm, `model_executor/warmup/kernel_warmup.py`, flashinfer_autotune, of 2026-11): the largest token count is called,
operations to skip keep their heuristics, every process of a group times the same candidates and FlashInfer takes the group's mean
(`set_autotune_process_group`), and after a barrier the first one alone saves. Then every call is made again outside of tuning,
with its smaller token counts: each has to find a winner. Answer (JSON in the file named by the request):

    {"flashinfer", "metadata", "env_hash", "calls": [...], "counted": {...}, "covered": {"hits", "misses", "missed"},
     "total": {operation: profiles}, "successful": {operation: profiles with a winner}, "tuning_seconds": {"v2", "v1"},
     "device", "problem": text, "seconds"}

`problem` is empty only if every look-up found a winner, no candidate was left out because something is missing on this host, and
the tuner's own module could be loaded: FlashInfer itself passes over candidates that fail, and raises nothing when all of
them do. Standard library, torch and FlashInfer only.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any


def _beside(name: str) -> Any:
    """A script that lies beside this one."""
    return importlib.import_module(name)


class Group:
    """The processes that tune together; one alone is its own leader."""

    def __init__(self, said: Mapping[str, Any] | None) -> None:
        self.rank, self.group = 0, None
        if said is None or said["size"] == 1:
            return
        import torch
        from torch import distributed

        self.rank = int(said["rank"])
        if torch.cuda.device_count() > 1:
            torch.cuda.set_device(self.rank)
        distributed.init_process_group("gloo", init_method=said["init"], rank=self.rank, world_size=said["size"])
        self.group = distributed.group.WORLD

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def time_together(self, together: bool) -> None:
        from flashinfer.autotuner import set_autotune_process_group

        if self.group is not None:
            set_autotune_process_group(self.group if together else None)

    def barrier(self) -> None:
        if self.group is not None:
            from torch import distributed

            distributed.barrier()

    def close(self) -> None:
        if self.group is not None:
            from torch import distributed

            distributed.destroy_process_group()


def tuner_module() -> str:
    """Why the tuner's own JIT module cannot be loaded; empty if it can. Without it every candidate fails in silence."""
    from flashinfer.tllm_utils import get_trtllm_utils_module

    try:
        get_trtllm_utils_module()
    except Exception as error:  # noqa: BLE001 - whatever it is, tuning cannot work
        return f"the module trtllm_utils, which the tuner needs, cannot be loaded: {type(error).__name__}: {error}"[:500]
    return ""


def _context(layout: str, request: Mapping[str, Any], leads: bool) -> Any:
    """FlashInfer's tuning context; only the leader's writes."""
    import flashinfer

    skip = set(request["skip"]) or None
    if layout == "v1":
        return flashinfer.autotune(True, skip_ops=skip)
    policy = _beside("tuning_calls").policy_of(request["policy"])
    return flashinfer.autotune_v2(
        mode="tune", persistent_cache=leads, cache_root=request["root"], measurement_policy=policy, skip_ops=skip
    )


def _tune(layout: str, request: Mapping[str, Any], group: Group, answer: dict[str, Any]) -> None:
    """One tuning of all calls in one layout."""
    from flashinfer.autotuner import AutoTuner

    started = time.monotonic()
    group.time_together(True)
    try:
        with _context(layout, request, group.leads):
            store = getattr(AutoTuner.get(), "_active_managed_store", None)
            answer["env_hash"] = answer["env_hash"] or (store.env_hash if store is not None else "")
            for number, call in enumerate(request["calls"]):
                answer["calls"].append({"layout": layout, **_beside("tuning_calls").run(call)})
                _progress(number + 1, len(request["calls"]), f"{layout} {call['operation']} {call['backend']} {call['m']}")
    finally:
        group.time_together(False)
    group.barrier()
    if layout == "v1" and group.leads:
        AutoTuner.get().save_configs(request["file"])
    answer["tuning_seconds"][layout] = round(time.monotonic() - started, 3)


def _progress(done: int, total: int, kernel: str) -> None:
    line = json.dumps({"done": done, "total": total, "kernel": kernel, "status": "tuned"})
    print(f"kcache-progress {line}", file=sys.stderr, flush=True)


def _covered(request: Mapping[str, Any], counted: Any) -> dict[str, Any]:
    """Every call once more, outside of tuning, at its own token count and at the smaller ones."""
    hits, misses = len(counted.hits), len(counted.misses)
    for call in request["calls"]:
        for tokens in (call["m"], *call.get("covers", ())):
            _beside("tuning_calls").run({**call, "m": tokens})
    skipped = [name for name in counted.misses[misses:] if name in request["skip"]]
    missed = sorted(set(counted.misses[misses:]) - set(request["skip"]))
    return {
        "hits": len(counted.hits) - hits,
        "misses": len(counted.misses) - misses - len(skipped),
        "missed": missed,
    }


def problem(calls: list[dict[str, Any]], total: Mapping[str, int], covered: Mapping[str, Any], counted: Mapping[str, Any]) -> str:
    """Why this tuning is no good; empty if it is."""
    if errors := [call["error"] for call in calls if "error" in call]:
        return f"a call failed: {errors[0]}"
    failures = " / ".join(counted["first_failures"])
    if counted["lacking"]:
        some = " / ".join(counted["first_lacking"])
        return f"{counted['lacking']} candidates were left out because something is missing here: {some}"
    if not total:
        return f"nothing was tuned: no call asked the tuner {failures}".strip()
    if covered["misses"] or not covered["hits"]:
        lost = ", ".join(covered["missed"]) or "no look-up at all"
        return f"tuning left no winner for every look-up ({lost}: {covered['misses']} without one): {failures}"
    return ""


def main() -> None:
    request = json.load(sys.stdin)
    started = time.monotonic()
    import flashinfer
    import torch

    counted = _beside("tuning_calls").Counted()
    from flashinfer.autotuner import AutoTuner, _collect_metadata

    group = Group(request["group"])
    answer: dict[str, Any] = {"flashinfer": flashinfer.__version__, "metadata": _collect_metadata(), "env_hash": "", "calls": []}
    answer |= {"tuning_seconds": {}, "device": torch.cuda.get_device_name(), "problem": tuner_module()}
    if not answer["problem"]:
        with torch.inference_mode():
            for layout, wanted in (("v1", request["file"]), ("v2", request["root"])):
                if wanted is not None:
                    _tune(layout, request, group, answer)
            stats = AutoTuner.get().stats
            total = dict(stats.tuned_op_total_configs)
            answer |= {"total": total, "successful": dict(stats.tuned_op_successful_configs)}
            answer["covered"] = _covered(request, counted)
        answer["problem"] = problem(answer["calls"], total, answer["covered"], counted.to_json())
    group.close()
    answer["counted"] = counted.to_json()
    answer["seconds"] = time.monotonic() - started
    with open(request["answer"], "w", encoding="utf-8") as stream:
        json.dump(answer, stream, default=repr)


if __name__ == "__main__":
    main()
