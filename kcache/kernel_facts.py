"""What a manifest says of CuTe-DSL kernels beyond their files: what FlashInfer keys them by, and how to prove them.

FlashInfer keeps such kernels beside one `meta.json` and takes them only if that file is what it works out itself. An entry
therefore says what that file is made of, so that it can be worked out again for another host (`kcache.kinds.cute_dsl`), and which
calls ask for its kernels, so that a fresh process can make them again. Pure; part of the manifest's format.
"""

from __future__ import annotations

from collections.abc import Mapping

from kcache import digest
from kcache.documents import Reader
from kcache.values import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

COMPILER = "nvidia-cutlass-dsl"
"""The compiler is every distribution whose name begins so: which of its backends are installed is part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One distribution of the compiler on the farm.

    content:  digest of what the wheel held, installer-made lines left out.
    portable: the same without what is compiled for one Python; empty where it could not be found out.
    """

    version: str
    content: str
    portable: str

    def to_json(self) -> dict[str, str]:
        return {"version": self.version, "content": self.content, "portable": self.portable}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """The kernels of one entry.

    module:    FlashInfer's module, whose directory below `cached_ops` they go to, such as `b12x_moe`.
    tvm_ffi:   whether they are exported as TVM-FFI functions.
    key_files: the sources that FlashInfer keys the module by, inside its package, as often as it lists them.
    wheels:    normalised name -> the compiler's distributions.
    python:    the farm's Python ABI, such as `cpython-311-x86_64-linux-gnu`: says which of a wheel's two digests counts.
    meta:      the `meta.json` of the farm; what `--strict-match` compares.
    gpu:       the described GPU (`kcache.gpu_products.GpuProduct.describe`).
    cases:     the calls that ask for the kernels (`CASE` in the dry run's script).
    left_out:  kernels that the same calls need and that FlashInfer keeps nowhere, each with where it is compiled.
    """

    module: str
    tvm_ffi: bool
    key_files: tuple[str, ...]
    wheels: Mapping[str, Wheel]
    python: str
    meta: Mapping[str, Any]
    gpu: Mapping[str, Any]
    cases: tuple[Mapping[str, Any], ...]
    left_out: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "tvm_ffi": self.tvm_ffi,
            "key_files": list(self.key_files),
            "wheels": {name: wheel.to_json() for name, wheel in sorted(self.wheels.items())},
            "python": self.python,
            "meta": dict(self.meta),
            "gpu": dict(self.gpu),
            "cases": [dict(case) for case in self.cases],
            "left_out": list(self.left_out),
        }


def kernel_artifact_path(module: str, kernel: str) -> str:
    """Where a kernel's object lies below its entry. `kernel` is the name that FlashInfer gives the file, without `.o`."""
    return f"{module}/{kernel}.o"


def wheels_digest(wheels: Mapping[str, Wheel]) -> str:
    """The key ingredient `cutlass_dsl.wheels`."""
    return digest.of_document({name: [wheel.version, wheel.content] for name, wheel in wheels.items()})


def kernels_digest(paths: tuple[str, ...]) -> str:
    """The key ingredient `kernels`, from the paths of the entry's artifacts."""
    return digest.of_document(sorted(paths))


def parse_kernel_facts(value: Any, path: str, reader: Reader) -> KernelFacts:
    """The facts from their JSON form; what is wrong is added to the reader's problems."""
    document = reader.object(value, path)
    wheels = {
        name: parse_wheel(wheel, f"{path}.wheels.{name}", reader)
        for name, wheel in reader.object(document.get("wheels"), f"{path}.wheels").items()
    }
    tvm_ffi = document.get("tvm_ffi")
    if not isinstance(tvm_ffi, bool):
        reader.problems.append(f"{path}.tvm_ffi: not true or false")
    cases = document.get("cases")
    if not isinstance(cases, list) or not cases or not all(isinstance(case, dict) for case in cases):
        reader.problems.append(f"{path}.cases: not a list of objects, or empty")
        cases = []
    for number, case in enumerate(cases):
        _check_case(case, f"{path}.cases[{number}]", reader)
    key_files = reader.texts(document.get("key_files"), f"{path}.key_files")
    for number, name in enumerate(key_files):
        reader.path(name, f"{path}.key_files[{number}]")
    return KernelFacts(
        module=reader.text(document.get("module"), f"{path}.module"),
        tvm_ffi=tvm_ffi is True,
        key_files=key_files,
        wheels=wheels,
        python=reader.text(document.get("python"), f"{path}.python"),
        meta=reader.object(document.get("meta"), f"{path}.meta"),
        gpu=reader.object(document.get("gpu"), f"{path}.gpu"),
        cases=tuple(cases),
        left_out=reader.texts(document.get("left_out"), f"{path}.left_out"),
    )


def _check_case(case: Mapping[str, Any], path: str, reader: Reader) -> None:
    """What every operation's cases have; the rest is between the operation's own file and FlashInfer."""
    reader.text(case.get("id"), f"{path}.id")
    if "operation" in case:
        reader.text(case["operation"], f"{path}.operation")
    tokens = case.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(type(count) is int and count >= 0 for count in tokens):
        reader.problems.append(f"{path}.tokens: not a list of counts, or empty")


def parse_wheel(value: Any, path: str, reader: Reader) -> Wheel:
    """A distribution from its JSON form; what is wrong is added to the reader's problems."""
    document = reader.object(value, path)
    portable = document.get("portable")
    if portable != "":
        reader.sha256(portable, f"{path}.portable")
    return Wheel(
        version=reader.text(document.get("version"), f"{path}.version"),
        content=reader.sha256(document.get("content"), f"{path}.content"),
        portable=str(portable),
    )
