"""What FlashInfer's tuner would write of this host, found out in a tenth of the time that importing FlashInfer takes.

Joins what the host's probe says with a short child process of the server's Python that asks the loader for cuBLAS and cuDNN.
Nothing here imports torch or FlashInfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kcache.errors import ProbeError
from kcache.key import ABSENT, Fact, known, undetermined
from kcache.kinds.autotune import DSL, metadata_fields
from kcache.kinds.cute_dsl import meta_rule, read_stack, stack_version
from kcache.tuning_facts import UNKNOWN, Stack, TuningHost

if TYPE_CHECKING:
    from kcache.probe.gpus import GpuReport
    from kcache.probe.host import Host

SECONDS = 60.0
"""That the child may take: half a second where nothing is in its way."""


def tuning_host(host: Host, *, gpu: Fact | None = None) -> TuningHost:
    """The fields that this host's FlashInfer compares, and the compiler behind them.

    Args:
        gpu: the product's name as CUDA gives it, for a GPU that is described; the one that NVML sees where None.

    Raises:
        ProbeError: there is no FlashInfer, or its rule is not known here.
    """
    from kcache.probe.wheels import compiler_wheels

    if host.paths.flashinfer is None:
        raise ProbeError("there is no FlashInfer to tune for", remedy="Name the server's Python with --python.")
    names = metadata_fields(host.paths.flashinfer)
    facts = host.environment.facts
    libraries = _libraries(host)
    every = {
        "flashinfer_version": facts["flashinfer.version"],
        "cuda_version": facts["torch.cuda"],
        "cublas_version": _cublas(libraries["cublas"], facts["torch.cuda"]),
        "cudnn_version": libraries["cudnn"],
        "cudnn_frontend_version": libraries["cudnn_frontend"],
        "gpu": gpu if gpu is not None else gpu_name(host.gpus, host.paths.process.environ),
        DSL: _stack_version(host) if DSL in names else ABSENT,
    }
    stack = Stack(
        wheels=compiler_wheels(host.paths.packages),
        python=facts["python.abi"].value or "",
        tvm_ffi=facts["tvm_ffi.version"].value or "",
    )
    return TuningHost(fields={name: every[name] for name in names}, stack=stack)


def gpu_name(report: GpuReport, environ: Mapping[str, str]) -> Fact:
    """The product's name, which CUDA and NVML give alike; undetermined where it may not be the one that FlashInfer asks."""
    if report.problem:
        return undetermined(report.problem)
    names = sorted({gpu.name for gpu in report.gpus})
    if not names:
        return undetermined("no GPU is visible: describe one with --gpu")
    if len(names) > 1:
        return undetermined(f"several products are visible ({', '.join(names)}), and each process asks its current one")
    if environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-"):
        return undetermined("a part of a GPU (MIG) is visible, for which CUDA has another name than NVML")
    return known(names[0])


def _cublas(found: Fact, torch_cuda: Fact) -> Fact:
    if found.absent and torch_cuda.known:
        return undetermined("no cuBLAS is found; FlashInfer writes the toolkit's release in its place, which is no version of it")
    return found


def _stack_version(host: Host) -> Fact:
    """`_get_cute_dsl_version` (jit/cute_dsl_core.py); FlashInfer writes `unknown` where there is no compiler (up to 0.7.2)."""
    interpreter = host.paths.interpreter
    try:
        rule = meta_rule(host.paths.flashinfer or "")
        text = stack_version(rule, read_stack(interpreter.search_path), interpreter.cache_tag, interpreter.abi)
    except ProbeError as error:
        return undetermined(str(error))
    return ABSENT if text == UNKNOWN else known(text)


def _libraries(host: Host) -> dict[str, Fact]:
    """cuBLAS, cuDNN and cuDNN's frontend, as the child sees them."""
    from kcache.workflows import child

    process = host.paths.process
    major = (process.torch_cuda or "").partition(".")[0]
    sonames = (f"libcublasLt.so.{major}", f"libcublas.so.{major}") if major else ()
    preload = [path for soname in sonames if (path := process.find(soname)) is not None]
    torch_cudnn = process.find("libcudnn.so.9") if major else None
    answer, how = child.run(
        host.paths.interpreter.executable,
        "tuning_libraries.py",
        lambda path: {"preload": preload, "torch_cudnn": torch_cudnn, "answer": path},
        environ=process.environ,
        jobs=1,
        seconds_before=SECONDS,
        seconds_per_job=0.0,
        limit=SECONDS,
        progress=None,
    )
    return {name: _fact((answer or {}).get(name), how) for name in ("cublas", "cudnn", "cudnn_frontend")}


def _fact(part: Any, how: str) -> Fact:
    from kcache.key import parse_fact

    return undetermined(f"the child that asks did not answer: {how}") if part is None else parse_fact(part, "answer", [])
