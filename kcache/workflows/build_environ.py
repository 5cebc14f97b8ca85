"""The environment of a build: what FlashInfer and the compilers may see of the caller's variables. Pure.

Three rules, so that a key tells the truth about the code:
- What a user sets to change FlashInfer's flags is kept and enters the key's `build.flags` as a digest. Such an entry is never
  chosen by a restore (`kcache.match`), but it is what was asked for.
- What changes the code behind FlashInfer's back (include paths, flags that nvcc adds on its own) is removed, and named in a
  warning.
- What decides where things lie (workspace, toolkit, architectures) is set here and by nobody else.

Compilers (CC, CXX) and launchers (ccache, sccache) are the user's to choose: the compiler's version is recorded, not matched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kcache import digest
from kcache.archs import arch_list_entry, cute_dsl_arch

FLAGS = (
    "FLASHINFER_EXTRA_CFLAGS",
    "FLASHINFER_EXTRA_CUDAFLAGS",
    "FLASHINFER_EXTRA_LDFLAGS",
    "FLASHINFER_JIT_DEBUG",
    "FLASHINFER_JIT_LINEINFO",
    "FLASHINFER_JIT_VERBOSE",
)
"""Variables that change FlashInfer's flags (`jit/core.py`, `jit/cpp_ext.py`, 0.6.18 to 0.7.4). JIT_VERBOSE stands for JIT_DEBUG
where that is not set."""

REMOVED = (
    "CFLAGS",
    "COMPILER_PATH",
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "CPPFLAGS",
    "CXXFLAGS",
    "C_INCLUDE_PATH",
    "GCC_EXEC_PREFIX",
    "LDFLAGS",
    "LIBRARY_PATH",
    "NVCC_APPEND_FLAGS",
    "NVCC_CCBIN",
    "NVCC_PREPEND_FLAGS",
    "SOURCE_DATE_EPOCH",
)
"""Variables that change code without FlashInfer knowing (gcc manual, "Environment Variables"; nvcc manual, "NVCC Environment
Variables")."""

_OURS = (
    "CUDA_PATH",
    "FLASHINFER_DISABLE_JIT",
    "FLASHINFER_JIT_BUILD_LOG",
    "FLASHINFER_LOGGING_LEVEL",
    "FLASHINFER_LOGLEVEL",
    "FLASHINFER_NVCC",
    "FLASHINFER_NVCC_THREADS",
    "MAX_JOBS",
    "NINJA_STATUS",
)
"""Removed without a word: this build sets their like itself, or they have no meaning for it."""

DEFAULT_FLAGS = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildEnviron:
    """variables: the whole environment. flags: the key's `build.flags`. removed: variables that were set and are kept back."""

    variables: Mapping[str, str]
    flags: str
    removed: tuple[str, ...]


def build_environ(environ: Mapping[str, str], *, arch: str, cuda_home: str, workspace: str, python: str) -> BuildEnviron:
    """The environment of FlashInfer and of the compilers for one architecture.

    Args:
        environ: the caller's.
        arch: in FlashInfer's spelling, such as `90a`.
        cuda_home: the scratch CUDA_HOME.
        workspace: where FlashInfer puts its `.cache`.
        python: the interpreter; programs beside it, such as ninja, are found first.
    """
    kept = {name: value for name, value in environ.items() if name not in REMOVED and name not in _OURS}
    ours = {
        "CUDA_HOME": cuda_home,
        "CUTE_DSL_ARCH": cute_dsl_arch(arch),
        "FLASHINFER_CUDA_ARCH_LIST": arch_list_entry(arch),
        "FLASHINFER_WORKSPACE_BASE": workspace,
        "LC_ALL": "C",
        "PATH": os.pathsep.join([os.path.dirname(python), environ.get("PATH") or os.defpath]),  # noqa: PTH120
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return BuildEnviron(
        variables={**kept, **ours},
        flags=flags_ingredient(environ),
        removed=tuple(name for name in REMOVED if environ.get(name)),
    )


_KERNEL_SWITCHES = (
    "CUTE_DSL_ARCH",
    "FLASHINFER_CUDA_ARCH_LIST",
    "FLASHINFER_CUTE_DSL_DISABLE_CACHE",
    "FLASHINFER_CUTE_DSL_STRICT_CACHE_KEY",
    "FLASHINFER_DISABLE_JIT",
    "FLASHINFER_JIT_BUILD_LOG",
    "FLASHINFER_WORKSPACE_BASE",
)
"""What decides where kernels go and under which key; the dry run sets what it needs of them."""


def kernel_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which CuTe-DSL kernels are compiled: the caller's, without what would change them unseen.

    nvidia-cutlass-dsl reads its options from variables that begin with CUTE_DSL_ (base_dsl/env_manager.py, 4.8.0), among them
    ones that keep intermediate files, print, or compile another way. None of them is for a farm.
    """
    return {name: value for name, value in environ.items() if name not in _KERNEL_SWITCHES and not name.startswith("CUTE_DSL_")}


_PROGRAM_PREFIXES = ("B12X_", "CUTE_", "CUTLASS_", "TRITON_", "MLIR_", "LLVM_", "NVPTX_")
"""Of variables that enter the keys of b12x and Triton, or say where programs lie."""


def program_environ(environ: Mapping[str, str], without: Iterable[str]) -> dict[str, str]:
    """The environment in which programs of the package b12x are compiled: the caller's, without what would enter their keys.

    Args:
        without: variables that enter b12x's keys whatever they do (`kcache.kinds.b12x_key.TOOL_VARIABLES`).
    """
    dropped = {*without, *_KERNEL_SWITCHES}
    return {name: value for name, value in environ.items() if name not in dropped and not name.startswith(_PROGRAM_PREFIXES)}


def flags_ingredient(environ: Mapping[str, str]) -> str:
    """The key's `build.flags`: `default`, or the digest of the variables in `FLAGS` that say something else than the default."""
    given = {name: environ[name] for name in FLAGS if environ.get(name, "") not in ("", "0")}
    return digest.of_document(given) if given else DEFAULT_FLAGS
