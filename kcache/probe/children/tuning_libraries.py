"""Child process: which cuBLAS and cuDNN would FlashInfer's tuner find in this Python's process?

Run by path with the server's own Python and environment. Request (JSON on standard input):

    {"preload": [path of a shared library, ...], "torch_cudnn": path or null, "answer": path}

`preload` is what `import torch` has loaded by then, `torch_cudnn` the libcudnn that a CUDA build of torch loads. Answer (JSON in
the file named by the request), each part {"value": text}, {"absent": true} or {"undetermined": why}:

    {"cublas": ..., "cudnn": ..., "cudnn_frontend": ...}

It repeats `_get_cublas_version`, `_get_cudnn_backend_version` and the frontend's part of `_collect_metadata`
(flashinfer/autotuner/autotuner.py, 0.6.18 to 0.7.4), whose text `kcache.kinds.autotune` knows by digest, without importing torch
and FlashInfer, which takes seconds. Standard library and cuDNN's frontend only.
"""

import ctypes
import ctypes.util
import importlib
import importlib.util
import json
import sys
from typing import Any

Part = dict[str, Any]


def _load(paths: list[str]) -> None:
    for path in paths:
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            print(f"{path}: {error}", file=sys.stderr)


def cublas() -> Part:
    """The library that the loader finds under four names, in FlashInfer's order; else the wheel's version to the patch."""
    names = [("libcublas.so", "cublasGetProperty"), ("libcublasLt.so", "cublasLtGetProperty")]
    for base, function in (("cublas", "cublasGetProperty"), ("cublasLt", "cublasLtGetProperty")):
        if found := ctypes.util.find_library(base):
            names.append((found, function))
    for name, function in names:
        try:
            ask = getattr(ctypes.cdll.LoadLibrary(name), function)
            numbers = [ctypes.c_int() for _ in range(3)]
            for index, number in enumerate(numbers):
                ask(index, ctypes.byref(number))
            return {"value": ".".join(str(number.value) for number in numbers)}
        except (OSError, AttributeError):
            continue
    return _cublas_wheel()


def _cublas_wheel() -> Part:
    from importlib import metadata

    try:
        names = [one.metadata["Name"] or "" for one in metadata.distributions()]
        for name in sorted((name for name in names if name.startswith("nvidia-cublas")), reverse=True):
            try:
                return {"value": ".".join(metadata.version(name).split(".")[:3])}
            except metadata.PackageNotFoundError:
                continue
    except Exception as error:  # noqa: BLE001 - FlashInfer passes over it too, and writes the toolkit's release instead
        return {"undetermined": f"the installed packages cannot be listed: {error}"}
    return {"absent": True}


def cudnn_frontend() -> tuple[Part, Any]:
    """The version of the frontend's package, and the package."""
    try:
        if importlib.util.find_spec("cudnn") is None:
            return {"absent": True}, None
        package = importlib.import_module("cudnn")
    except Exception as error:  # noqa: BLE001 - whatever it is, FlashInfer writes `unknown` for it
        return {"undetermined": f"importing cudnn fails: {type(error).__name__}: {error}"[:300]}, None
    version = getattr(package, "__version__", None)
    return ({"value": version} if isinstance(version, str) else {"undetermined": "the package cudnn has no version"}), package


def cudnn(torch_cudnn: str | None, frontend: Any) -> Part:
    """What torch would say, else what the frontend says; absent where no library is to be found at all."""
    if torch_cudnn is not None:
        try:
            return {"value": str(_cudnn_version(ctypes.CDLL(torch_cudnn)))}
        except (OSError, AttributeError) as error:
            print(f"{torch_cudnn}: {error}", file=sys.stderr)
    try:
        if frontend is not None and (version := frontend.backend_version()):
            return {"value": str(version)}
    except Exception as error:  # noqa: BLE001 - FlashInfer writes `unknown` then
        why = f"{type(error).__name__}: {error}"
    else:
        why = "the frontend does not say"
    for name in ("libcudnn.so.9", "libcudnn.so"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return {"undetermined": f"there is a {name}, and neither torch nor the frontend says its version ({why})"[:300]}
    return {"absent": True} if torch_cudnn is None else {"undetermined": f"{torch_cudnn} cannot be asked"}


def _cudnn_version(library: ctypes.CDLL) -> int:
    ask = library.cudnnGetVersion
    ask.restype = ctypes.c_size_t
    return int(ask())


def main() -> None:
    request = json.load(sys.stdin)
    del sys.path[0]  # this script's own directory
    _load(request["preload"])
    frontend, package = cudnn_frontend()
    answer = {"cublas": cublas(), "cudnn": cudnn(request["torch_cudnn"], package), "cudnn_frontend": frontend}
    with open(request["answer"], "w", encoding="utf-8") as stream:
        json.dump(answer, stream)


if __name__ == "__main__":
    main()
