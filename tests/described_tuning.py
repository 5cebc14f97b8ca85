"""Runs a child of kcache that tunes or replays, on a host without a GPU: `python described_tuning.py CHILDREN SCRIPT [PRETEND]`.

FlashInfer's tuner itself looks up, enumerates, picks, saves and publishes; what only a GPU can do is made up: the GPU is
described, and the time of each candidate is a number. The call `plain` is of an operation that is defined here. The request on
standard input, or a file, may hold `pretend`: {"timings": [milliseconds of tactic 0, 1, 2], "replayed": likewise, "fails":
[[tactic, error, text], ...], "dies": rank}.
"""

import builtins
import importlib
import io
import json
import os
import sys
from typing import Any


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    request = json.load(sys.stdin)
    pretend = request.pop("pretend", {})
    if sys.argv[3:]:
        with open(sys.argv[3], encoding="utf-8") as stream:
            pretend = json.load(stream)
    sys.stdin = io.StringIO(json.dumps(request))
    described_gpu = importlib.import_module("described_gpu")
    import torch

    version: Any = torch.version
    cuda = version.cuda
    described_gpu.describe(described_gpu.of_capability(9, 0) | {"name": "NVIDIA H200"}, "13.0")
    import flashinfer

    autotuner: Any = importlib.import_module("flashinfer.autotuner")

    version.cuda = cuda

    class PlainRunner(autotuner.TunableRunner):  # type: ignore[misc]
        def get_valid_tactics(self, inputs: Any, profile: Any) -> list[Any]:
            return [0, 1, 2]

        def forward(self, inputs: Any, tactic: Any = -1, do_preparation: bool = False, **kwargs: Any) -> Any:
            return inputs[0]

        def get_cache_key_extras(self, inputs: Any) -> tuple[Any, ...]:
            return (str(inputs[0].dtype),)

        def __hash__(self) -> int:
            return hash("PlainRunner")

    spec = autotuner.DynamicTensorSpec(
        (0,), (0,), (16, 32, 64), lambda m: max(bucket for bucket in (16, 32, 64) if bucket <= max(m, 16))
    )
    config = autotuner.TuningConfig(dynamic_tensor_specs=(spec,))

    def plain(call: dict[str, Any]) -> dict[str, Any]:
        if pretend.get("dies") == (request.get("group") or {}).get("rank", 0) and "dies" in pretend:
            os._exit(7)
        operation = call.get("named", "kcache::plain")
        chosen = autotuner.AutoTuner.get().choose_one(operation, [PlainRunner()], config, [torch.zeros(call["m"], 8)])
        told = {"tactic": chosen[1], "together": autotuner.get_autotune_process_group() is not None}
        measured = pretend.get("replayed", timings)
        return told | ({"milliseconds": measured[chosen[1]] if chosen[1] >= 0 else 9.0} if call.get("repeat") else {})

    timings = [float(one) for one in pretend.get("timings", [3.0, 1.0, 2.0])]

    def timed(self: Any, runner: Any, inputs: Any, tactic: Any, tuning_config: Any, **named: Any) -> float:
        for failing, name, text in pretend.get("fails", []):
            if failing == tactic:
                raise getattr(builtins, name)(text)
        mine = timings[tactic] if tactic >= 0 else 9.0
        if autotuner.get_autotune_process_group() is None:
            return mine
        mine += 0.5 * request["group"]["rank"] * (tactic == 1)  # each GPU measures something else
        whole = torch.tensor([mine])
        torch.distributed.all_reduce(whole, group=autotuner.get_autotune_process_group())
        return float(whole) / int(request["group"]["size"])

    calls = importlib.import_module("tuning_calls")
    calls.CALLS.update(plain=plain, mm_bf16=plain, moe_bf16=plain)
    autotuner.AutoTuner._profile_single_kernel = timed
    script: Any = importlib.import_module(sys.argv[2])
    if hasattr(script, "tuner_module") and not request.get("really"):
        script.tuner_module = lambda: ""
    del flashinfer
    script.main()


if __name__ == "__main__":
    main()
