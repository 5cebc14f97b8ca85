"""Tuning results as FlashInfer writes them, and hosts that tune, for tests."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kcache.kernel_facts import Wheel
from kcache.key import ABSENT, Fact, known
from kcache.kinds.autotune import DSL
from kcache.kinds.autotune_v1 import TuningFile, parse_file
from kcache.kinds.autotune_v2 import Entry, TuningStore, verify_entry
from kcache.tuning_facts import Stack, TuningHost

STACK = Stack(
    wheels={"nvidia-cutlass-dsl": Wheel(version="4.8.0", content="sha256:" + "1" * 64, portable="sha256:" + "2" * 64)},
    python="cpython-312-x86_64-linux-gnu",
    tvm_ffi="0.1.15.post2",
)

FIELDS: Mapping[str, Fact] = {
    "flashinfer_version": known("0.7.4"),
    "cuda_version": known("13.0"),
    "cublas_version": known("13.1.0"),
    "cudnn_version": known("91501"),
    "cudnn_frontend_version": known("1.26.0"),
    "gpu": known("NVIDIA H200"),
    DSL: known("cpython-312;pip"),
}


def a_host(*, stack: Any = STACK, **changed: Any) -> TuningHost:
    """A host that tunes. Changed fields are facts, or texts that are known."""
    facts = {name: known(value) if isinstance(value, str) else value for name, value in changed.items()}
    return TuningHost(fields={**FIELDS, **facts}, stack=stack)


def key_of(m: int) -> tuple[str, Any]:
    """A key of `mm_bf16`, as text and in its encoded form."""
    shapes = f"(({m}, 2048), (2048, 7168), (0,), ({m}, 7168))"
    text = f"('bf16_gemm', 'CublasltBf16GemmRunner', {shapes}, (torch.bfloat16, True, None))"
    encoded = {"__tuple__": [{"__tuple__": [m, 2048]}, {"__tuple__": [2048, 7168]}, {"__tuple__": [0]}, {"__tuple__": [m, 7168]}]}
    extras = {"__tuple__": [{"__dtype__": "bfloat16"}, True, None]}
    return text, {"__tuple__": ["bf16_gemm", "CublasltBf16GemmRunner", encoded, extras]}


def entry_document(m: int, tactic: Any = 3) -> dict[str, Any]:
    text, fields = key_of(m)
    return {
        "key": text,
        "runner": "CublasltBf16GemmRunner",
        "tactic": tactic,
        "key_fields": fields,
        "profiling_policy": [1, False],
    }


def name_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def an_entry(m: int, tactic: Any = 3) -> Entry:
    document = entry_document(m, tactic)
    return verify_entry(name_of(document["key"]), json.dumps(document, indent=2, sort_keys=True).encode())


def a_store(sizes: list[int], host: Any = None, tactic: Any = 3, **policy: str) -> TuningStore:
    environment = (host or a_host()).written() | policy | {"cache_schema": "v2"}
    return TuningStore(environment=environment, entries=tuple(an_entry(m, tactic) for m in sizes))


def file_document(sizes: list[int], host: Any = None, tactic: Any = 3, **metadata: Any) -> dict[str, Any]:
    selection = {"time_ms": 0.25, "runner_up_ms": 0.3, "margin": 0.2, "candidates": 8}
    results = {key_of(m)[0]: ["CublasltBf16GemmRunner", tactic, [1, False], selection] for m in sizes}
    return {"_metadata": (host or a_host()).written() | metadata, **results}


def a_file(sizes: list[int], host: Any = None, tactic: Any = 3, **metadata: Any) -> TuningFile:
    return parse_file(json.dumps({**file_document(sizes, host, tactic, **metadata), "_generation": "x"}).encode())


__all__ = ["ABSENT", "FIELDS", "STACK", "a_file", "a_host", "a_store", "an_entry", "entry_document", "file_document", "key_of"]
