"""Names of GPU architectures: one GPU, spelled in the ways that FlashInfer, its environment variable and CuTe-DSL want.

The normal form in kcache is FlashInfer's own without the dot, such as `90a` or `120f` (the names of its cache directories).
Pure functions; nothing here looks at a GPU or at a toolkit. The rules are those of FlashInfer's
`compilation_context.py`, `CompilationContext._normalize_cuda_arch` (0.7.4), where the suffix depends on the CUDA release.
"""

from __future__ import annotations

import re

from kcache.errors import UsageError

_SPELLING = re.compile(r"(?:sm_?|compute_?)?(?P<major>[0-9]{1,2})(?P<dot>\.?)(?P<minor>[0-9])(?P<suffix>[af]?)", re.IGNORECASE)

_REMEDY = "Name it like 9.0a, 90a or 9.0; several are separated by commas."

OLDEST = (7, 5)
"""FlashInfer needs sm75 or newer (`jit/core.py`, check_cuda_arch, 0.7.4)."""


def _parts(text: str) -> tuple[int, int, str]:
    """Major, minor and suffix (may be empty) of an architecture in any spelling."""
    found = _SPELLING.fullmatch(text.strip())
    if found is None or (int(found["major"]), int(found["minor"])) < OLDEST:
        raise UsageError(f"{text!r} is not a GPU architecture that FlashInfer knows", remedy=_REMEDY)
    return int(found["major"]), int(found["minor"]), found["suffix"].lower()


def _needs(text: str, wanted: tuple[int, int], release: tuple[int, int]) -> UsageError:
    return UsageError(
        f"architecture {text} needs CUDA {wanted[0]}.{wanted[1]} or newer",
        why=f"the toolkit in use is {release[0]}.{release[1]}",
        remedy="Point CUDA_HOME at a newer toolkit, or install newer CUDA wheels.",
    )


def flashinfer_arch(text: str, cuda_release: tuple[int, int]) -> str:
    """The architecture that FlashInfer compiles for, such as `90a`, from a name that a person gave.

    Args:
        text: `9.0a`, `90a`, `9.0`, `90`, `sm_90a`; a suffix that is given is kept.
        cuda_release: major and minor of the toolkit; it decides between `120a` (12.8) and `120f` (12.9 and newer).

    Raises:
        UsageError: not an architecture, or one that this CUDA release cannot compile for.
    """
    major, minor, suffix = _parts(text)
    if suffix or major < 9:
        return f"{major}{minor}{suffix}"
    if major == 12:
        oldest = (12, 8) if minor == 0 else (12, 9)
        if cuda_release < oldest:
            raise _needs(text, oldest, cuda_release)
        if minor == 0 and cuda_release >= (12, 9):
            return "120f"
    return f"{major}{minor}a"


def flashinfer_archs(text: str, cuda_release: tuple[int, int]) -> tuple[str, ...]:
    """Every architecture of a list separated by commas or spaces, each once, in the order given.

    Raises:
        UsageError: the list is empty, or a name in it is wrong.
    """
    names = [name for name in re.split(r"[,;\s]+", text) if name]
    if not names:
        raise UsageError("no GPU architecture is named", remedy=_REMEDY)
    return tuple(dict.fromkeys(flashinfer_arch(name, cuda_release) for name in names))


def cute_dsl_arch(arch: str) -> str:
    """The architecture as `CUTE_DSL_ARCH` names it, such as `sm_90a`, from FlashInfer's `90a`.

    From 9.0 on CuTe-DSL is given the `a` target of the GPU itself (`jit/cute_dsl_core.py`, _get_compile_arch, 0.7.4), also
    where nvcc modules are compiled for the family (`120f` becomes `sm_120a`).
    """
    major, minor, suffix = _parts(arch)
    return f"sm_{major}{minor}{'a' if major >= 9 else suffix}"


def arch_list_entry(arch: str) -> str:
    """The architecture as `FLASHINFER_CUDA_ARCH_LIST` names it, such as `9.0a`, from FlashInfer's `90a`."""
    major, minor, suffix = _parts(arch)
    return f"{major}.{minor}{suffix}"


def capability(arch: str) -> tuple[int, int]:
    """Major and minor compute capability, such as (9, 0) of `90a`."""
    major, minor, _ = _parts(arch)
    return major, minor
