"""A made-up program of b12x's compile cache, with the payload of a real one (1.5.1), and the host that it was made on."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kcache.kernel_facts import Wheel
from kcache.kinds.b12x_compile import Program, verify_program
from kcache.kinds.b12x_key import Target, environment_key, key_of

FINGERPRINT = "98" * 32
VERSIONS = {
    "torch": "2.13.0+cpu",
    "nvidia-cutlass-dsl": "4.8.0",
    "nvidia-cutlass-dsl-libs-base": "4.8.0",
    "nvidia-cutlass-dsl-libs-core": "4.8.0",
    "nvidia-cutlass-dsl-libs-cu12": "4.8.0",
    "nvidia-cutlass-dsl-libs-cu13": "4.8.0",
    "cuda-python": "13.4.4",
    "cuda-bindings": "13.4.4",
}
WHEELS = {"nvidia-cutlass-dsl": Wheel(version="4.8.0", content="sha256:" + "1" * 64, portable="sha256:" + "2" * 64)}
ABI = "cpython-311-x86_64-linux-gnu"
FARM = {"HOME": "/home/farm", "PATH": "/bin"}


def target(**changes: Any) -> Target:
    values: dict[str, Any] = {
        "machine": "x86_64",
        "implementation": "cpython",
        "python": (3, 11, 7),
        "abi": ABI,
        "versions": VERSIONS,
        "torch_cuda": "13.0",
        "wheels": WHEELS,
        "fingerprint": FINGERPRINT,
        "capability": (12, 0),
        "sm_count": 188,
        "environ": FARM,
    }
    return Target(**(values | changes))


def payload_values(facts: str = "0", environ: dict[str, str] | None = None) -> tuple[Any, ...]:
    """As `_compile_disk_cache_payload` makes them on the host that `target()` describes."""
    spec = json.dumps({"facts": facts, "kernel": "integration.tp_moe.dynamic", "version": 9})
    names = ("torch", "torch_cuda", "cutlass_dsl", "cutlass_dsl_libs_base", "cutlass_dsl_libs_core", "cutlass_dsl_libs_cu12")
    texts = ("2.13.0+cpu", "13.0", "4.8.0", "4.8.0", "4.8.0", "4.8.0")
    patches = (("compile_only_warning", True), ("memory_debug", True), ("direct_frameinfo", True))
    return (
        "b12x_cute_compile_cache_v7_explicit_spec",
        ("callable_instance", "b12x.moe", "Launch", ("b12x.moe", "Launch.__call__", f"b12x:{FINGERPRINT}")),
        FINGERPRINT,
        (
            ("python", "cpython", (3, 11, 7)),
            *zip(names, texts, strict=True),
            ("cutlass_dsl_libs_cu13", "4.8.0"),
            ("cuda_python", "13.4.4"),
            ("cuda_bindings", "13.4.4"),
            ("b12x_runtime_patches", patches),
        ),
        ("cuda", (12, 0), 188),
        hashlib.sha256(spec.encode()).hexdigest(),
        spec,
        "",
        "",
        ("opt-level=3",),
        environment_key(FARM if environ is None else environ),
    )


def files(facts: str = "0", environ: dict[str, str] | None = None) -> tuple[str, bytes, dict[str, Any]]:
    """(key, object, manifest) of a made-up program."""
    values = payload_values(facts, environ)
    key = key_of(values)
    data = b"\x7fELF code " + facts.encode() + f" b12x_cute_{key}_run b12x_cute_{key}_load".encode()
    manifest = {
        "schema": "b12x._lib.compile_manifest.v3",
        "cache_key": key,
        "cache_payload_repr": repr(values),
        "object_sha256": hashlib.sha256(data).hexdigest(),
        "object_bytes": len(data),
        "kernel_id": "integration.tp_moe.dynamic",
        "semantic_payload": {"compile_environment": [], "device_arch": []},
        "launch_metadata": {"status": "exact"},
    }
    return key, data, manifest


def program(facts: str = "0", environ: dict[str, str] | None = None) -> Program:
    key, data, manifest = files(facts, environ)
    return verify_program(key, data, json.dumps(manifest).encode())
