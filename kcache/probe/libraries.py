"""Where the loader of a server's process would find a library, without loading it and without running ldconfig.

The rules are those of glibc's loader (elf/dl-load.c, _dl_map_object; ld.so(8)): what the process has already loaded under a
soname is taken first; else DT_RPATH of the asking library and of the executable, LD_LIBRARY_PATH, DT_RUNPATH of the asking
library, /etc/ld.so.cache, the system's directories. /etc/ld.so.conf is not read, because the loader does not read it either.
What the process has loaded before FlashInfer's modules is known from its imports: torch (with its CUDA libraries), then
tvm_ffi, whose libtvm_ffi.so is loaded by path. Libraries of wheels count only where torch loads them.
"""

# On the path of every restore strings and os.path take a fifth of pathlib's time.
# ruff: noqa: PTH119, PTH120
from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

from kcache.key import ABSENT, Fact, known, undetermined
from kcache.probe.elf import Library, NotElfError, machine_of, read_library
from kcache.values import dataclass, field

DRIVER_LIBRARY = "libcuda.so.1"
EXPECTED_FROM_DRIVER = "expected from the driver of the GPU host"
"""The value of `DRIVER_LIBRARY` where an architecture is described and there is no GPU: containers get it from their host."""

TVM_FFI_LIBRARY = "libtvm_ffi.so"

_CACHE = "/etc/ld.so.cache"
_CACHE_MAGIC = b"glibc-ld.so.cache1.1"
_CACHE_FLAGS = {"x86_64": 0x0303, "aarch64": 0x0A03}
"""glibc, elf/cache.c and sysdeps/generic/ldconfig.h: FLAG_ELF_LIBC6 with the machine's FLAG_*_LIB64."""

CUDA_MAJORS = ("13", "12")
"""Those that FlashInfer 0.6.18 to 0.7.4 is built with."""

_TORCH_LIBRARIES = (
    "libtorch_global_deps.so",
    "libtorch_cuda.so",
    "libc10_cuda.so",
    "libtorch_cpu.so",
    "libc10.so",
    "libtorch_python.so",
)
"""Loaded by `import torch`, in this order as far as their needs differ."""

_TORCH_PRELOADS = {
    "libcublasLt": "cublas",
    "libcublas": "cublas",
    "libcudnn": "cudnn",
    "libnvrtc": "cuda_nvrtc",
    "libnvrtc-builtins": "cuda_nvrtc",
    "libcudart": "cuda_runtime",
    "libcupti": "cuda_cupti",
    "libcufft": "cufft",
    "libcurand": "curand",
    "libnvJitLink": "nvjitlink",
    "libcusparse": "cusparse",
    "libcusparseLt": "cusparselt",
    "libcusolver": "cusolver",
    "libnccl": "nccl",
    "libnvshmem_host": "nvshmem",
    "libcufile": "cufile",
}
"""What a CUDA build of torch loads from wheels, and the wheels' folders (torch/__init__.py, _preload_cuda_deps, 2.13)."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """A Python process that imports FlashInfer, as far as its loader is concerned.

    executable:  the interpreter.
    machine:     as `uname -m` says it.
    environ:     its environment; read are LD_LIBRARY_PATH and LD_PRELOAD.
    search_path: its `sys.path`.
    torch:       the directory of its torch, or None.
    torch_cuda:  the CUDA release of that torch, or None for a CPU build.
    tvm_ffi:     the directory of its tvm_ffi, or None.
    root:        the root directory of an image that is only looked at, as a real path; empty for this host. Paths above
                 are within it as they are seen from here; those that the loader itself names are looked up below it.
    """

    executable: str
    machine: str
    environ: Mapping[str, str] = field(repr=False)
    search_path: Sequence[str] = ()
    torch: str | None = None
    torch_cuda: str | None = None
    tvm_ffi: str | None = None
    root: str = ""

    def find(self, soname: str) -> str | None:
        """The file that the loader takes for a library that one of FlashInfer's modules needs; None where it finds none.

        FlashInfer's modules have no search path of their own (flashinfer/jit/cpp_ext.py, ldflags, 0.7.4).
        """
        if soname == TVM_FFI_LIBRARY:
            return self._tvm_ffi_library()
        return self._preloaded(soname) or self._by_torch(soname) or self._search(soname, None, "")

    def _tvm_ffi_library(self) -> str | None:
        """tvm_ffi/__init__.py loads its library by path before any module is loaded (tvm_ffi/libinfo.py, 0.1.15)."""
        if self.tvm_ffi is None:
            return None
        return self._first(f"{self.tvm_ffi}/{part}/{TVM_FFI_LIBRARY}" for part in ("lib", "build/lib"))

    def _preloaded(self, soname: str) -> str | None:
        names = re.split(r"[:\s]+", self.environ.get("LD_PRELOAD", ""))
        return self._first(name for name in names if name.startswith("/") and os.path.basename(name) == soname)

    def _by_torch(self, soname: str) -> str | None:
        for path, library in self._torch_libraries:
            if soname in library.needed and (found := self._search(soname, library, path)):
                return found
        return self._in_wheels(soname, (self.torch_cuda.partition(".")[0],)) if self.torch_cuda is not None else None

    def expected_from_wheels(self, soname: str) -> str | None:
        """Where this Python has a CPU build of torch: the wheel's library that a CUDA build on the GPU host would load."""
        return self._in_wheels(soname, CUDA_MAJORS) if self.torch_cuda is None else None

    def _in_wheels(self, soname: str, majors: Sequence[str]) -> str | None:
        folder = _TORCH_PRELOADS.get(soname.partition(".so")[0])
        if folder is None:
            return None
        folders = (f"nvidia/{folder}", *(f"nvidia/cu{major}" for major in majors), folder)
        return self._first(f"{entry}/{part}/lib/{soname}" for entry in self.search_path for part in folders)

    @cached_property
    def _torch_libraries(self) -> tuple[tuple[str, Library], ...]:
        found = []
        for name in _TORCH_LIBRARIES if self.torch is not None else ():
            path = f"{self.torch}/lib/{name}"
            try:
                found.append((path, read_library(path)))
            except (OSError, NotElfError):
                continue
        return tuple(found)

    def _search(self, soname: str, asking: Library | None, path: str) -> str | None:
        return self._first(f"{directory}/{soname}" for directory in self._before_cache(asking, path)) or self._first(
            self._after_cache(soname)
        )

    def _before_cache(self, asking: Library | None, path: str) -> Iterator[str]:
        if asking is None or not asking.runpath:
            yield from _expand(asking.rpath if asking else (), path)
            yield from self._executable_rpath
        yield from (part for part in re.split("[:;]", self.environ.get("LD_LIBRARY_PATH", "")) if part)
        yield from _expand(asking.runpath if asking else (), path)

    def _after_cache(self, soname: str) -> Iterator[str]:
        if cached := self._cache.get(soname):
            yield cached
        triplet = f"{self.machine}-linux-gnu"
        for directory in (f"/lib/{triplet}", f"/usr/lib/{triplet}", "/lib64", "/usr/lib64", "/lib", "/usr/lib"):
            yield f"{directory}/{soname}"

    @cached_property
    def _executable_rpath(self) -> tuple[str, ...]:
        """DT_RPATH of the interpreter, which serves every library of the process: how conda's libstdc++ comes first."""
        executable = self.seen(self.executable) if self.root else os.path.realpath(self.executable)
        try:
            library = read_library(executable)
        except (OSError, NotElfError):
            return ()
        return () if library.runpath else tuple(_expand(library.rpath, executable))

    @cached_property
    def _cache(self) -> Mapping[str, str]:
        return read_loader_cache(self.seen(_CACHE), self.machine)

    def _first(self, paths: Iterable[str]) -> str | None:
        """The first path that holds a library of this machine; the loader passes over those of others."""
        return next((path for path in paths if machine_of(self.seen(path)) == self.machine), None)

    def seen(self, path: str) -> str:
        """Where a path of the process is seen from here. Links of an image are followed within it, never out of it."""
        return path if not self.root else inside(self.root, path.removeprefix(f"{self.root}/"))


_LINKS = 40
"""Links in one path, as Linux has it (ELOOP)."""


def inside(root: str, path: str) -> str:
    """The real path, below the directory `root`, of what a process whose root directory that is would find at `path`.

    A link's target that is absolute, or climbs, stays below the root, as in chroot(2). What is not there is its own path.
    """
    left = [part for part in reversed(path.split("/")) if part]
    found: list[str] = []
    links = 0
    while left:
        part = left.pop()
        if part == "..":
            del found[-1:]
            continue
        here = "/".join((root, *found, part))
        try:
            target = os.readlink(here) if links < _LINKS else ""  # noqa: PTH115 - strings, as everywhere here
        except OSError:
            target = ""
        if not target:
            if part != ".":
                found.append(part)
            continue
        links += 1
        if target.startswith("/"):
            found.clear()
        left += [one for one in reversed(target.split("/")) if one]
    return "/".join((root, *found))


def _expand(paths: Iterable[str], owner: str) -> Iterator[str]:
    origin = os.path.dirname(owner)
    for path in paths:
        yield os.path.normpath(path.replace("${ORIGIN}", origin).replace("$ORIGIN", origin))


def read_loader_cache(path: str, machine: str) -> dict[str, str]:
    """soname -> path from ld.so.cache (glibc, sysdeps/generic/dl-cache.h, struct cache_file_new); empty if it cannot be read.

    Entries for particular processors (glibc-hwcaps) are passed over: they are other builds of a library that is also there.
    """
    wanted = _CACHE_FLAGS.get(machine)
    try:
        with open(path, "rb") as stream:
            data = stream.read()
        start = data.index(_CACHE_MAGIC)
        (count,) = struct.unpack_from("<I", data, start + 20)
        found: dict[str, str] = {}
        for flags, key, value, _, hwcap in struct.iter_unpack("<iIIIQ", data[start + 48 : start + 48 + count * 24]):
            if flags == wanted and not hwcap:
                found.setdefault(_c_text(data, start + key), _c_text(data, start + value))
    except (OSError, ValueError, struct.error):
        return {}
    return found


def _c_text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode("utf-8", "surrogateescape")


def library_facts(process: Process, sonames: Iterable[str], *, driver_expected: bool) -> dict[str, Fact]:
    """A fact for each soname: the path that the loader would take, or absent.

    Args:
        driver_expected: the architecture is described and no GPU is here, so the driver's library comes with the GPU host, and
            so does a torch that loads the CUDA libraries of wheels.
    """
    facts: dict[str, Fact] = {}
    for soname in sonames:
        path = process.find(soname) or (process.expected_from_wheels(soname) if driver_expected else None)
        if path is not None:
            facts[soname] = known(path)
        elif soname == DRIVER_LIBRARY and driver_expected:
            facts[soname] = known(EXPECTED_FROM_DRIVER)
        else:
            facts[soname] = ABSENT
    return facts


def libc_facts(confstr: str) -> dict[str, Fact]:
    """`libc.name` and `libc.version` from what `confstr(CS_GNU_LIBC_VERSION)` says; another libc than glibc is undetermined."""
    name, _, version = confstr.partition(" ")
    if name == "glibc" and re.fullmatch(r"\d+(\.\d+)+", version):
        return {"libc.name": known(name), "libc.version": known(version)}
    why = "the C library is not glibc"
    return {"libc.name": undetermined(why), "libc.version": undetermined(why)}


def libstdcxx_facts(path: str | None) -> dict[str, Fact]:
    """`libstdcxx.GLIBCXX` and `libstdcxx.CXXABI`: the highest symbol versions that a libstdc++ defines."""
    names = ("GLIBCXX", "CXXABI")
    if path is None:
        return {f"libstdcxx.{name}": ABSENT for name in names}
    try:
        defines = read_library(path).defines
    except (OSError, NotElfError) as error:
        return {f"libstdcxx.{name}": undetermined(str(error)) for name in names}
    return {f"libstdcxx.{name}": _highest(name, defines) for name in names}


def _highest(prefix: str, names: Iterable[str]) -> Fact:
    """The highest `<prefix>_<numbers>`; names such as CXXABI_TM_1 or GLIBCXX_LDBL_3.4 are of other series."""
    found = [
        tuple(map(int, match[1].split("."))) for name in names if (match := re.fullmatch(rf"{prefix}_(\d+(?:\.\d+)*)", name))
    ]
    return known(".".join(map(str, max(found)))) if found else undetermined(f"libstdc++ defines no version of {prefix}")
