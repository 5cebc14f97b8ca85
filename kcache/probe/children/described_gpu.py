"""Makes torch and CuTe-DSL believe in a GPU that is only described, so that a library's own dispatch runs without one.

For child processes that launch nothing. `describe` tells torch of the GPU; `install` makes tensors "on cuda" of meta tensors too,
which say they lie on `cuda:0`: shapes, types and strides are real, bytes are not, and any build of torch (CPU or CUDA) does.
Everything here patches the process as a whole and is never undone: it is no library for a process that also does real work.
Stdlib and torch only; imports nothing of kcache. To be called before FlashInfer is imported: 0.6.18 and 0.7.0 ask for device
properties while they are imported (`gdn_kernels/gdn_decode_bf16_state.py`).
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

FIELDS = ("name", "major", "minor", "sm_count", "memory_bytes", "l2_bytes", "shared_block_bytes", "shared_sm_bytes")
"""What a description must hold; `max_active_clusters` ({cluster size as text: count}) may be added."""

_ADDRESS_STEP = 1 << 36
"""Bytes between two made-up storages: more than any workspace, so that no two overlap."""


_SHARED = {12: (101376, 102400)}
"""Shared memory (bytes) of one block and of one SM by major capability; others as on Hopper (CUDA C++ Guide, table of compute
capabilities)."""


def of_capability(major: int, minor: int) -> dict[str, Any]:
    """A description of some GPU of this capability, for a process that asks for no more than that."""
    block, whole = _SHARED.get(major, (232448, 233472))
    return {
        "name": f"described sm{major}{minor}",
        "major": major,
        "minor": minor,
        "sm_count": 132,
        "memory_bytes": 80 << 30,
        "l2_bytes": 50 << 20,
        "shared_block_bytes": block,
        "shared_sm_bytes": whole,
    }


class _Stream:
    cuda_stream = stream_id = device_index = 0


class _Generator:
    """A random number generator of a described GPU: a state of seed and offset, as `get_seed_and_offset` unpacks it."""

    def get_state(self) -> _Generator:
        return self

    def view(self, dtype: Any) -> tuple[int, int]:
        return (0, 0)

    def set_state(self, state: Any) -> None:
        pass


def _properties(gpu: dict[str, Any]) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=gpu["name"],
        major=gpu["major"],
        minor=gpu["minor"],
        multi_processor_count=gpu["sm_count"],
        total_memory=gpu["memory_bytes"],
        L2_cache_size=gpu["l2_bytes"],
        warp_size=32,
        max_threads_per_multi_processor=1536 if gpu["major"] == 12 else 2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=gpu["shared_block_bytes"],
        shared_memory_per_multiprocessor=gpu["shared_sm_bytes"],
    )


def _addresses() -> Callable[[torch.Tensor], int]:
    """Stands in for `Tensor.data_ptr`: storages apart from each other and aligned, views of one storage inside it."""
    table: dict[int, int] = {}

    def data_ptr(tensor: Any) -> int:
        storage = tensor.untyped_storage()._cdata
        base = table.setdefault(storage, (len(table) + 1) * _ADDRESS_STEP)
        return base + int(tensor.storage_offset()) * int(tensor.element_size())

    return data_ptr


class _DLTensor(ctypes.Structure):
    """`DLManagedTensor` of DLPack 0.8 (dlpack.h), the form that an unversioned capsule holds; its last two members stay null."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_INT, _UNSIGNED, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_DLPACK_CODES = {
    torch.bfloat16: _BFLOAT,
    torch.bool: _BOOL,
    torch.uint8: _UNSIGNED,
    **dict.fromkeys((torch.float64, torch.float32, torch.float16), _FLOAT),
    **dict.fromkeys((torch.int64, torch.int32, torch.int16, torch.int8), _INT),
}
_CUDA = 2
_given_out: list[Any] = []
"""What capsules point to; whoever takes one does not say when it is done with it."""


def _dlpack(tensor: Any, **options: Any) -> Any:
    """Stands in for `Tensor.__dlpack__`: a capsule that says it lies on the GPU. CuTe-DSL takes layout and type from it."""
    if tensor.dtype not in _DLPACK_CODES:
        raise BufferError(f"no capsule is made for {tensor.dtype}")
    numbers = ctypes.c_int64 * max(1, tensor.dim())
    shape, strides = numbers(*tensor.shape), numbers(*tensor.stride())
    managed = _DLTensor(
        data=tensor.data_ptr(),
        device_type=_CUDA,
        ndim=tensor.dim(),
        code=_DLPACK_CODES[tensor.dtype],
        bits=8 * tensor.element_size(),
        lanes=1,
        shape=shape,
        strides=strides,
    )
    _given_out.append((managed, shape, strides))
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return make(ctypes.addressof(managed), b"dltensor", None)


def describe(gpu: dict[str, Any], cuda_release: str) -> None:
    """Tell torch of one GPU, for the rest of this process; tensors stay what they are.

    Args:
        gpu: see `FIELDS`; byte counts in bytes.
        cuda_release: such as `13.0`; what `torch.version.cuda` says from now on.

    Raises:
        KeyError: a field is missing.
    """
    properties = _properties(gpu)
    cuda: Any = torch.cuda
    cuda.is_available = cuda.is_initialized = lambda: True
    cuda.init = cuda._lazy_init = lambda: None
    cuda.device_count = lambda: 1
    cuda.current_device = lambda: 0
    cuda.get_device_capability = lambda device=None: (gpu["major"], gpu["minor"])
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_name = lambda device=None: gpu["name"]
    cuda.is_current_stream_capturing = lambda: False
    cuda.current_stream = lambda device=None: _Stream()
    cuda.synchronize = lambda device=None: None
    cuda.default_generators = (_Generator(),)
    cuda.device = lambda device: nullcontext()
    cuda.MemPool = types.SimpleNamespace
    cuda.use_mem_pool = lambda pool, device=None: nullcontext()
    core: Any = torch._C
    core._cuda_getCurrentRawStream = lambda device: 0
    version: Any = torch.version
    version.cuda = cuda_release


def install(gpu: dict[str, Any], cuda_release: str) -> None:
    """Describe one GPU to torch, and make tensors "on cuda" of meta tensors. Arguments and errors as of `describe`."""
    describe(gpu, cuda_release)
    # Zeros are looked for in weights while these are prepared (W4A16, FlashInfer 0.6.18 to 0.7.2); there are no bytes to look at.
    config: Any = importlib.import_module("torch.fx.experimental._config")
    config.meta_nonzero_assume_all_nonzero = True
    here = torch.device("cuda", 0)
    _plain_checks()
    tensor: Any = torch.Tensor
    tensor.is_cuda = property(lambda self: True)
    really = torch._C.TensorBase.device.__get__
    tensor.device = property(lambda self: really(self) if OnMeta.inside else here)
    tensor.data_ptr = _addresses()
    tensor.item = lambda self: 1  # values are made up: weights are prepared from them, kernels are not chosen by them
    tensor.__dlpack__ = _dlpack
    tensor.__dlpack_device__ = lambda self: (_CUDA, 0)
    try:  # tvm-ffi compiles the way past Python where torch has none; it looks once, when it is imported
        importlib.import_module("tvm_ffi")
    except ImportError:
        pass
    if hasattr(tensor, "__dlpack_c_exchange_api__"):  # that way is taken first, and knows nothing of described GPUs
        del tensor.__dlpack_c_exchange_api__


def _plain_checks() -> None:
    """Let torch take a plain True for true at once.

    Its Python for meta tensors asks a module that imports SymPy, a third of a second of the start (torch 2.13, `_check_with`).
    """
    real = getattr(torch, "_check_with", None)
    if real is not None:
        checked: Any = lambda error, condition, message: None if condition is True else real(error, condition, message)  # noqa: E731
        torch._check_with = checked


def install_cute_dsl(gpu: dict[str, Any]) -> None:
    """Describe the GPU to CuTe-DSL's own hardware probe (`cutlass.utils.HardwareInfo`). After `install`.

    One cluster of one block lies on every SM; for larger clusters the count depends on how the product's SMs are grouped, so
    it must be given in `max_active_clusters`.
    """
    import cutlass.utils
    from cutlass.cutlass_dsl.cutlass import CuTeDSL

    clusters = {1: gpu["sm_count"]} | {int(size): count for size, count in gpu.get("max_active_clusters", {}).items()}

    def max_active_clusters(self: object, cluster_size: int, stream: object = None) -> int:
        if cluster_size not in clusters:
            raise RuntimeError(f"asked for active clusters of {cluster_size} blocks, which the described GPU does not hold")
        return int(clusters[cluster_size])

    dsl: Any = CuTeDSL
    # What is compiled here is exported and never run. CuTe-DSL has a rule for that, compiling for a GPU that is not this host's:
    # it makes no engine to run it (nvidia-cutlass-dsl 4.8.0, base_dsl/compile_backend.py, _build_compiled_function).
    dsl._runtime_can_run_compiled = lambda self, runtime_arch, compiled_arch: False
    info: Any = cutlass.utils.HardwareInfo
    info.__init__ = lambda self, device_id=0: None
    info.get_max_active_clusters = max_active_clusters
    info.get_l2_cache_size_in_bytes = lambda self: gpu["l2_bytes"]
    info.get_device_multiprocessor_count = lambda self: gpu["sm_count"]


class OnMeta(TorchFunctionMode):  # type: ignore[misc]
    """While active, whatever is asked for on `cuda` (or moved to the CPU) is made on `meta`."""

    inside = False
    """Inside an operation tensors tell the truth: torch's own Python for meta tensors makes its results where its inputs are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.device:
            return func(*args, **kwargs)
        if (device := kwargs.get("device")) is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "meta"
        if func in (torch.Tensor.cpu, torch.Tensor.cuda):
            return args[0]
        args = tuple("meta" if isinstance(a, torch.device) and a.type == "cuda" else a for a in args)
        if func is torch.Tensor.to:
            args = args[:1] + tuple("meta" if isinstance(a, str) and a.startswith("cuda") else a for a in args[1:])
        outside, OnMeta.inside = OnMeta.inside, True
        try:
            return func(*args, **kwargs)
        finally:
            OnMeta.inside = outside


@contextmanager
def triton_recorded(met: Callable[[str], None]) -> Iterator[str]:
    """Have every launch of a Triton kernel that is defined inside reported to `met`, not compiled; yields Triton's version.

    Where Triton is not installed (a CPU build of torch brings none), `stand-in` is yielded, and a module that lets the library's
    own code define and "launch" its kernels is there until the end of the block, no longer: torch asks whether there is Triton.
    """
    try:
        triton = importlib.import_module("triton")
        jit: Any = importlib.import_module("triton.runtime.jit")
    except ImportError:
        _stand_in(met)
        yield "stand-in"
        del sys.modules["triton"], sys.modules["triton.language"]
        return
    run: Any = lambda self, *args, **kwargs: met(self.__name__)  # noqa: E731
    jit.JITFunction.run = run
    yield str(triton.__version__)


class _Anything(types.ModuleType):
    """A module of which every attribute exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *a, **k: None})


def _stand_in(met: Callable[[str], None]) -> None:
    class Kernel:
        def __init__(self, function: Any) -> None:
            self.__name__ = function.__name__

        def __getitem__(self, grid: object) -> Any:
            return lambda *args, **kwargs: met(self.__name__)

    def jit(function: Any = None, **options: object) -> Any:
        return Kernel(function) if function is not None else Kernel

    triton: Any = _Anything("triton")
    triton.jit = jit
    triton.cdiv = lambda a, b: -(-a // b)
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()
    triton.language = _Anything("triton.language")
    sys.modules["triton"] = triton
    sys.modules["triton.language"] = triton.language
