"""Which GPUs a process started here would see, and for which architectures FlashInfer would compile.

NVML is asked through ctypes: the nvidia-ml-py module takes 30 ms to import, as long as the whole probe may take. No CUDA
context is made, and where there is no NVML nothing is loaded at all. What a variable says is read as CUDA and FlashInfer read
it; what they would stumble over is undetermined here, never guessed.
"""

# On the path of every restore strings and os.path take a fifth of pathlib's time.
# ruff: noqa: PTH110
from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from kcache import archs
from kcache.errors import UsageError
from kcache.key import ABSENT, Fact, known, undetermined
from kcache.values import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes

NVML_LIBRARY = "libnvidia-ml.so.1"
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")
"""The driver's control device; the second is that of Windows' Linux subsystem."""

_SUCCESS = 0
_NO_DRIVER = 9
"""nvml.h: NVML_SUCCESS, NVML_ERROR_DRIVER_NOT_LOADED."""

ARCH_LIST = "FLASHINFER_CUDA_ARCH_LIST"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU. `index` is NVML's, in the order of PCI bus numbers; `sm_count` is None where the driver does not say it."""

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    sm_count: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """The GPUs that a process would see.

    gpus:    visible ones, in the order of the variable or of NVML.
    driver:  the driver's version; absent where there is none.
    problem: why `gpus` could not be found out; empty when they could (an empty list is an answer).
    """

    gpus: tuple[Gpu, ...] = ()
    driver: Fact = ABSENT
    problem: str = ""

    @property
    def names(self) -> Fact:
        """The distinct names, separated by `; `; absent where no GPU is visible."""
        if self.problem:
            return undetermined(self.problem)
        return known("; ".join(sorted({gpu.name for gpu in self.gpus}))) if self.gpus else ABSENT


def find_gpus(environ: Mapping[str, str], library: str | None) -> GpuReport:
    """Asks NVML.

    Args:
        environ: read are CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
        library: where the loader finds `NVML_LIBRARY`, or None where it does not.
    """
    if library is None:
        if not any(os.path.exists(device) for device in _DEVICES):
            return GpuReport()
        why = f"there is a driver, but no {NVML_LIBRARY}: give the container the driver capability `utility`"
        return GpuReport(driver=undetermined(why), problem=why)
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    try:
        every, driver, parents = _ask_nvml(library, _mig_names(wanted))
    except _NvmlError as error:
        if error.code == _NO_DRIVER:
            return GpuReport()
        why = f"NVML: {error}"
        return GpuReport(driver=undetermined(why), problem=why)
    visible = select_visible(every, wanted, by_bus=environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID", mig_parents=parents)
    if isinstance(visible, str):
        return GpuReport(driver=known(driver), problem=visible)
    return GpuReport(gpus=visible, driver=known(driver))


class _NvmlError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def _ask_nvml(library: str, migs: Sequence[str]) -> tuple[tuple[Gpu, ...], str, dict[str, int]]:
    """Every GPU, the driver's version, and the index of the GPU behind each MIG device named."""
    import ctypes

    try:
        nvml = ctypes.CDLL(library)
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        _call(nvml, "nvmlInit_v2")
    except (OSError, AttributeError) as error:
        raise _NvmlError(-1, str(error)) from error
    try:
        version = ctypes.create_string_buffer(96)
        _call(nvml, "nvmlSystemGetDriverVersion", version, ctypes.c_uint(len(version)))
        count = ctypes.c_uint()
        _call(nvml, "nvmlDeviceGetCount_v2", ctypes.byref(count))
        gpus = tuple(_ask_gpu(nvml, index) for index in range(count.value))
        parents = {mig: uuid for mig in migs if (uuid := _ask_mig_parent(nvml, mig)) is not None}
    except AttributeError as error:
        raise _NvmlError(-1, str(error)) from error
    finally:
        nvml.nvmlShutdown()
    by_uuid = {gpu.uuid: gpu.index for gpu in gpus}
    return gpus, version.value.decode(), {mig: by_uuid[uuid] for mig, uuid in parents.items() if uuid in by_uuid}


def _call(nvml: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(nvml, name)(*arguments)
    if code != _SUCCESS:
        raise _NvmlError(code, f"{name}: {(nvml.nvmlErrorString(code) or b'').decode(errors='replace')}")


def _text(nvml: ctypes.CDLL, name: str, device: ctypes.c_void_p) -> str:
    import ctypes

    buffer = ctypes.create_string_buffer(96)
    _call(nvml, name, device, buffer, ctypes.c_uint(len(buffer)))
    return buffer.value.decode(errors="replace")


def _ask_gpu(nvml: ctypes.CDLL, index: int) -> Gpu:
    import ctypes

    device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    _call(nvml, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device))
    _call(nvml, "nvmlDeviceGetCudaComputeCapability", device, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(
        index=index,
        name=_text(nvml, "nvmlDeviceGetName", device),
        uuid=_text(nvml, "nvmlDeviceGetUUID", device),
        capability=(major.value, minor.value),
        sm_count=_ask_sm_count(nvml, device, (major.value, minor.value)),
    )


_CORES = {(7, 5): 64, (8, 0): 64}
"""Cores of one SM, 128 on every other one from 7.5 on: CUDA C++ Programming Guide 13.0, "Compute Capabilities" (FP32 cores)."""


def _ask_sm_count(nvml: ctypes.CDLL, device: ctypes.c_void_p, capability: tuple[int, int]) -> int | None:
    """NVML counts cores; without a CUDA context nothing else says how many SMs a GPU has."""
    import ctypes

    cores = ctypes.c_uint()
    try:
        _call(nvml, "nvmlDeviceGetNumGpuCores", device, ctypes.byref(cores))
    except (_NvmlError, AttributeError):  # a driver before 465
        return None
    count, rest = divmod(cores.value, _CORES.get(capability, 128))
    return count if count and not rest else None


def _ask_mig_parent(nvml: ctypes.CDLL, mig: str) -> str | None:
    """The UUID of the GPU that a MIG device is a part of, or None if there is no such device."""
    import ctypes

    device, parent = ctypes.c_void_p(), ctypes.c_void_p()
    try:
        _call(nvml, "nvmlDeviceGetHandleByUUID", mig.encode(), ctypes.byref(device))
        _call(nvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", device, ctypes.byref(parent))
        return _text(nvml, "nvmlDeviceGetUUID", parent)
    except _NvmlError:
        return None


def _mig_names(wanted: str | None) -> list[str]:
    return [name for name in (wanted or "").split(",") if name.startswith("MIG-")]


def select_visible(
    gpus: Sequence[Gpu], wanted: str | None, *, by_bus: bool, mig_parents: Mapping[str, int]
) -> tuple[Gpu, ...] | str:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, or why that cannot be told.

    As CUDA reads it (and torch/cuda/__init__.py, _parse_visible_devices, 2.13): unset leaves all; the list ends at the first
    element that names no GPU; one named twice leaves none; a UUID may be cut short as long as it is unique.

    Args:
        by_bus: whether CUDA counts in PCI order, as NVML does. By default it puts the fastest first, so on a host with
            different GPUs an index alone does not tell which one is meant.
    """
    if wanted is None:
        return tuple(gpus)
    if wanted.startswith("MIG-"):
        # A process sees one MIG device at most, so the first one named decides.
        first = wanted.split(",")[0]
        # A part of a GPU has a part of its SMs.
        return tuple(replace(gpu, sm_count=None) for gpu in gpus if gpu.index == mig_parents.get(first))
    if wanted.startswith("GPU-"):
        return _by_uuid(gpus, wanted.split(","))
    indices = _indices(wanted, len(gpus))
    alike = len({gpu.capability for gpu in gpus}) <= 1
    if not by_bus and not alike and 0 < len(indices) < len(gpus):
        return (
            "CUDA_VISIBLE_DEVICES picks by number among different GPUs, which CUDA counts by speed: "
            "set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID"
        )
    return tuple(gpus[index] for index in indices)


def _by_uuid(gpus: Sequence[Gpu], names: Sequence[str]) -> tuple[Gpu, ...]:
    chosen: list[Gpu] = []
    for name in names:
        found = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
        if len(found) != 1:
            break
        if found[0] in chosen:
            return ()
        chosen.append(found[0])
    return tuple(chosen)


def _indices(wanted: str, count: int) -> list[int]:
    chosen: list[int] = []
    for element in wanted.split(","):
        index = _leading_number(element.strip())
        if index in chosen:
            return []
        if not 0 <= index < count:
            break
        chosen.append(index)
    return chosen


def _leading_number(text: str) -> int:
    """The number that a text starts with, as C's strtoul reads it (`2ampere` is 2); -1 if there is none."""
    end = 1 if text[:1] in ("+", "-") else 0
    while end < len(text) and text[end] in "0123456789":
        end += 1
    digits = text[:end]
    return int(digits) if digits.strip("+-") else -1


def sm_counts(gpus: Iterable[Gpu], arch: str) -> Fact:
    """The SM counts of the GPUs of one architecture, ascending, separated by spaces."""
    counts = {gpu.sm_count for gpu in gpus if gpu.capability == archs.capability(arch)}
    if not counts:
        return undetermined("no GPU of this architecture is here: describe one with --gpu")
    if None in counts:
        return undetermined("the driver does not say how many SMs the GPU has: describe it with --gpu")
    return known(" ".join(str(count) for count in sorted(count for count in counts if count is not None)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchChoice:
    """Architectures in FlashInfer's spelling without a dot, in the order of its directory names.

    source: who named them: `described`, `FLASHINFER_CUDA_ARCH_LIST` or `gpu`; absent when there is no GPU and no list, and
            undetermined, with the reason, when they could not be told. Then `archs` is empty.
    """

    archs: tuple[str, ...]
    source: Fact


def choose_archs(
    *, described: Sequence[str], listed: str | None, gpus: GpuReport, release: Callable[[], tuple[int, int] | None]
) -> ArchChoice:
    """The architectures to match for.

    Args:
        described: names from `--arch`; they stand for GPUs that are not here, so they come first.
        listed: the value of FLASHINFER_CUDA_ARCH_LIST; FlashInfer puts it over the GPUs (compilation_context.py, 0.7.4).
        release: the CUDA release that 12.x is named by; only asked when a name without suffix needs it.

    Raises:
        UsageError: a described architecture is none.
    """
    if described:
        return ArchChoice(archs=_in_order(_named(name, release) for name in described), source=known("described"))
    if listed is not None:
        try:
            names = _in_order(_named(_checked_entry(entry), release) for entry in listed.split(" "))
        except (UsageError, ValueError) as error:
            return ArchChoice(archs=(), source=undetermined(f"{ARCH_LIST}={listed!r}: {error}"))
        return ArchChoice(archs=names, source=known(ARCH_LIST))
    if gpus.problem:
        return ArchChoice(archs=(), source=undetermined(gpus.problem))
    try:
        names = _in_order(_named(f"{major}.{minor}", release) for major, minor in {gpu.capability for gpu in gpus.gpus})
    except UsageError as error:
        return ArchChoice(archs=(), source=undetermined(str(error)))
    return ArchChoice(archs=names, source=known("gpu") if names else ABSENT)


def _checked_entry(entry: str) -> str:
    """An element of FLASHINFER_CUDA_ARCH_LIST that FlashInfer would take: `major.minor` and a suffix; it splits at one space."""
    major, dot, minor = entry.partition(".")
    if not (major.isdigit() and dot and minor):
        raise ValueError("FlashInfer reads names such as 9.0a, with one space between two")
    return entry


def _named(name: str, release: Callable[[], tuple[int, int] | None]) -> str:
    """`kcache.archs.flashinfer_arch`, which needs the CUDA release only for a 12.x without suffix."""
    if name[-1:].isalpha() or archs.capability(name)[0] != 12:
        return archs.flashinfer_arch(name, (0, 0))
    found = release()
    if found is None:
        raise UsageError(
            f"architecture {name} has another name on CUDA 12.8 than on newer ones, and the CUDA release is not known here",
            remedy="Name it with its suffix, such as 12.0f.",
        )
    return archs.flashinfer_arch(name, found)


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    """Each once, sorted as FlashInfer sorts them in the names of its directories (jit/env.py, 0.7.4)."""
    return tuple(sorted(set(names), key=lambda name: (archs.capability(name)[0], archs.arch_list_entry(name).partition(".")[2])))
