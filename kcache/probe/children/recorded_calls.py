"""Kernels that a program left on disk, asked for by name, for the dry run `cute_dry_run.py` (there: what this file has to hold).

Nothing is known of the calls that made them. FlashInfer's own function looks for each one under the same name and the same key
sources (`build_and_load_cute_dsl_kernel`, jit/cute_dsl_core.py), which is all that its loader goes by.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

LABEL = "recorded CuTe-DSL kernels"

NEEDS = {"flashinfer.jit.cute_dsl_core": ("build_and_load_cute_dsl_kernel",)}

CASE = {
    "id": "name in the answer",
    "module": "FlashInfer's name of the module, such as b12x_moe",
    "key_files": "its key sources, inside the flashinfer package, as often as FlashInfer lists them",
    "kernels": "names of the kernels, as their files are called",
    "tvm_ffi": "whether they are exported as TVM-FFI functions",
    "tokens": "numbers of kernels: here a call is about one kernel",
}


def patch(run: Any) -> None:
    """Nothing here is answered by a compiled kernel."""


def forget() -> None:
    """No table of FlashInfer's keeps kernels that are asked for by name."""


def walk(case: dict[str, Any], run: Any, make_calls: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One case, all its kernels; the errors."""
    return make_calls(case)


def calls(case: dict[str, Any]) -> Callable[[int], None]:
    """A function of a kernel's number that asks FlashInfer's disk cache for it."""
    import flashinfer
    import flashinfer.jit.cute_dsl_core as core

    package = os.path.dirname(flashinfer.__file__)  # noqa: PTH120 -- spelt as FlashInfer spells it: that text is hashed
    files = tuple(f"{package}/{path}" for path in case["key_files"])
    options = {} if case["tvm_ffi"] else {"enable_tvm_ffi": False}

    def nobody_compiles() -> None:
        raise AssertionError("a recorded kernel is loaded, never compiled")

    def call(number: int) -> None:
        core.build_and_load_cute_dsl_kernel(case["module"], case["kernels"][number], nobody_compiles, files, **options)

    return call
