"""Child process: does FlashInfer's own tuner find these results, without measuring anything?

Run by path with the server's own Python. Request (JSON on standard input):

    {"stores": [{"root": path or null, "policy": {field: text}, "keys": [key, ...]}, ...],      managed stores (v2)
     "files": [path, ...],                                                                     JSON files (v1)
     "calls": [call, ...], "describe": null or {"gpu": {...}, "cuda_release": text or null}, "answer": path}

`root` null means where FlashInfer itself looks. `describe` is for hosts without a GPU: results are looked up there by their keys,
and nothing is called. With a GPU, `calls` are made (see the sibling `tuning_calls.py`) while the first store is replayed, else
after the files were loaded. Answer (JSON in the file named by the request):

    {"flashinfer", "metadata", "stores": [{"env_hash", "directory", "loaded", "total", "skipped", "hits", "missed": [key, ...]}],
     "files": [{"path", "loaded": bool, "results": n, "error"}], "calls": [...], "counted": {...}, "coverage": {...} or null,
     "seconds"}

Standard library, torch and FlashInfer only. FlashInfer decides: its own classes work out the environment, read and judge.
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


def _store(said: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, Any]:
    """One store as FlashInfer finds it: all at once (`preload`), and each key for itself (`lookup`)."""
    tuning_calls = _beside("tuning_calls")
    from flashinfer.autotune_cache import ManagedAutotuneCache

    policy = tuning_calls.policy_of(said["policy"])
    fields = policy.manifest_fields() if policy is not None else {}
    found: Any = ManagedAutotuneCache(dict(metadata) | fields, said["root"])
    loaded, total, skipped = found.preload()
    found.clear_memo()
    missed = [key for key in said["keys"] if found.lookup(key) is None]
    return {
        "env_hash": found.env_hash,
        "directory": str(found.env_dir),
        "loaded": len(loaded),
        "total": total,
        "skipped": skipped,
        "hits": len(said["keys"]) - len(missed),
        "missed": missed,
    }


def _file(path: str) -> dict[str, Any]:
    from flashinfer.autotuner import AutoTuner

    tuner = AutoTuner.get()
    before = dict(tuner._file_configs)
    tuner._file_configs.clear()  # files of ranks hold the same keys: each is counted for itself
    try:
        taken = tuner.load_configs(path)
    except Exception as error:  # noqa: BLE001 - FlashInfer raises what it likes for a file that is none
        tuner._file_configs.update(before)
        return {"path": path, "loaded": False, "results": 0, "error": f"{type(error).__name__}: {error}"[:300]}
    found = len(tuner._file_configs)
    for key, value in before.items():
        tuner._file_configs.setdefault(key, value)
    return {"path": path, "loaded": bool(taken), "results": found, "error": ""}


def _calls(request: Mapping[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """The calls, made while the first store is replayed; and FlashInfer's own report of it where it gives one (0.7.4)."""
    tuning_calls = _beside("tuning_calls")

    if not request["stores"]:
        return [tuning_calls.run(call) for call in request["calls"]], None
    from flashinfer import autotune_cache

    first = request["stores"][0]
    given: dict[str, Any] = {"cache_root": first["root"], "measurement_policy": tuning_calls.policy_of(first["policy"])}
    report = autotune_cache.ReplayCoverage() if hasattr(autotune_cache, "ReplayCoverage") else None
    if report is not None:
        given["replay_report"] = report
    with autotune_cache.autotune_v2(mode="replay", **given):
        done = [tuning_calls.run(call) for call in request["calls"]]
    return done, report


def main() -> None:
    request = json.load(sys.stdin)
    started = time.monotonic()
    described = request.get("describe")
    if described is not None:
        described_gpu = _beside("described_gpu")
        import torch

        release = described["cuda_release"]
        version: Any = torch.version
        really = version.cuda
        described_gpu.describe(described["gpu"], release or "13.0")  # FlashInfer asks for a release while it is imported
    import flashinfer

    tuning_calls = _beside("tuning_calls")
    from flashinfer.autotuner import _collect_metadata

    if described is not None and release is None:
        version.cuda = really
    counted = tuning_calls.Counted()
    metadata = _collect_metadata()
    answer: dict[str, Any] = {"flashinfer": flashinfer.__version__, "metadata": metadata}
    answer["stores"] = [_store(store, metadata) for store in request["stores"]]
    answer["files"] = [_file(path) for path in request["files"]]
    done, report = _calls(request) if described is None else ([], None)
    answer["calls"], answer["counted"] = done, counted.to_json()
    answer["coverage"] = None if report is None else {"hits": report.hits, "misses": report.misses, "records": report.records}
    answer["seconds"] = time.monotonic() - started
    with open(request["answer"], "w", encoding="utf-8") as stream:
        json.dump(answer, stream, default=repr)


if __name__ == "__main__":
    main()
