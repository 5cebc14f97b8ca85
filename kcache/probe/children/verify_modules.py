"""Child process: does FlashInfer load these modules as they were restored, without a compiler?

Run by path with the server's own Python. Request (JSON on standard input):

    {"modules": [name, ...], "preload": [path of a shared library, ...], "answer": path,
     "compilers": [program name, ...], "describe": null or {"major": 9, "minor": 0, "cuda_release": "13.0"}}

Answer (JSON in the file named by the request):

    {"flashinfer": version, "import_seconds": s, "modules": [{"module", "loaded", "seconds", "paths", "via", "error"}],
     "compiler_starts": [command, ...]}

Standard library and FlashInfer only, and the sibling that describes a GPU where there is none. The parent sets
FLASHINFER_DISABLE_JIT and puts traps in place of every compiler; this side also listens to Python's own audit events, so that a
compiler called by an absolute path counts too.
"""

import ctypes
import importlib
import inspect
import json
import os
import sys
import time
from typing import Any

compilers: set[str] = set()
"""Names of programs whose start counts; from the request, so that there is one list of them (kcache.workflows.verify)."""

compiler_starts: list[str] = []


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"):
        return
    program = arguments[0]
    command = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], (list, tuple)) else [program]
    name = os.path.basename(os.fsdecode(program if isinstance(program, (str, bytes)) else str(program)))  # noqa: PTH119
    words = [os.fsdecode(word) for word in command if isinstance(word, (str, bytes))]
    # `nvcc --version` is a question, not a compilation.
    if name in compilers and "--version" not in words:
        compiler_starts.append(" ".join(words)[:400])


def _preload(paths: list[str]) -> None:
    """Loads what a CUDA build of torch has loaded by the time that FlashInfer loads a module (libcudart and the like)."""
    for path in paths:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def accessor(module: str) -> tuple[Any, str] | None:
    """FlashInfer's own way to this module, such as `flashinfer.sampling.get_sampling_module`, if it takes no arguments."""
    wanted = f"get_{module}_module"
    for name in (f"flashinfer.{module}", "flashinfer"):
        try:
            holder = importlib.import_module(name)
        except ImportError:
            continue
        function = getattr(holder, wanted, None)
        if callable(function) and not inspect.signature(function).parameters:
            return function, f"{holder.__name__}.{wanted}"
    return None


def _load(module: str) -> dict[str, Any]:
    from flashinfer.jit.core import gen_jit_spec

    # Found by name alone: on the AOT path FlashInfer asks for nothing else (jit/core.py, JitSpecNvcc.try_load).
    spec = gen_jit_spec(module, [])
    found = accessor(module)
    answer: dict[str, Any] = {"module": module, "loaded": False, "seconds": 0.0, "error": ""}
    answer["via"] = found[1] if found else "JitSpec"
    paths = spec.get_library_paths() if hasattr(spec, "get_library_paths") else (spec.get_library_path(),)
    answer["paths"] = [str(path) for path in paths]
    started = time.perf_counter()
    try:
        if found:
            found[0]()
        else:
            spec.build_and_load()
    except Exception as error:  # reported, and the next module is tried  # noqa: BLE001
        answer["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:600]
    else:
        answer["loaded"] = True
    answer["seconds"] = time.perf_counter() - started
    return answer


def main() -> None:
    request = json.load(sys.stdin)
    compilers.update(request["compilers"])
    sys.addaudithook(_listen)
    started = time.perf_counter()
    if (gpu := request["describe"]) is not None:
        # FlashInfer 0.6.18 and 0.7.0 ask for device properties while they are imported.
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
        described_gpu = importlib.import_module("described_gpu")
        del sys.path[0]
        described_gpu.describe(described_gpu.of_capability(gpu["major"], gpu["minor"]), gpu["cuda_release"])
    import flashinfer

    answer: dict[str, Any] = {"flashinfer": flashinfer.__version__, "import_seconds": time.perf_counter() - started}
    _preload(request["preload"])
    answer["modules"] = [_load(module) for module in request["modules"]]
    answer["compiler_starts"] = compiler_starts
    with open(request["answer"], "w", encoding="utf-8") as stream:
        json.dump(answer, stream)


if __name__ == "__main__":
    main()
