"""What a program left in the caches of FlashInfer and its companions: listed by kind, and whether a module of it is whole.

Listing looks at names only; judging a module asks ninja, by whose own rule FlashInfer builds again or does not. Nothing here
packs anything, and nothing that is found is changed.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kcache.key import ARCH
from kcache.kinds.b12x_selections import selections_directory
from kcache.probe import ninja
from kcache.probe.caches import home_directory
from kcache.values import dataclass

NVCC, CUTE_DSL, CUBIN, AUTOTUNE = "nvcc-module", "cute-dsl", "cubin", "autotune"
B12X, B12X_SELECTIONS = "b12x-compile", "b12x-selections"

_CUTE_DSL = re.compile(r".+_cute_dsl")
_ASSIGNED = r"^{} = (.*)$"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDirectories:
    """Where a process with some environment keeps its caches. None of them need be there.

    b12x: the compile cache of the package b12x; its choices lie below it.
    """

    flashinfer: Path
    autotune: Path
    b12x: Path

    @property
    def b12x_selections(self) -> Path:
        return Path(selections_directory(str(self.b12x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One thing that landed.

    kind:       `nvcc-module`, `cute-dsl`, `cubin`, `autotune`, `b12x-compile` or `b12x-selections`.
    path:       its file or directory.
    flashinfer: the version whose directory it lies in, and
    arch:       the architecture (FlashInfer's spelling; several are joined by `_`); both empty where there is none.
    """

    kind: str
    name: str
    path: Path
    flashinfer: str = ""
    arch: str = ""

    def stamp(self) -> frozenset[tuple[str, int, int, int]]:
        """Name, inode, time and size of each of its files: another one means that it was made or changed meanwhile."""
        found = set()
        for path in self.path.rglob("*") if self.path.is_dir() else [self.path]:
            with suppress(OSError):  # others may use the same cache
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    found.add((str(path), status.st_ino, status.st_mtime_ns, status.st_size))
        return frozenset(found)


def cache_directories(environ: Mapping[str, str], uid: int) -> CacheDirectories:
    """The caches of a process with this environment.

    `jit/env.py` (FLASHINFER_WORKSPACE_BASE), `autotune_cache.py` (FLASHINFER_AUTOTUNE_CACHE_DIR), b12x `_lib/compiler.py`
    (B12X_COMPILE_CACHE_DIR, XDG_CACHE_HOME), all of FlashInfer 0.7.4.
    """
    home = home_directory(environ, uid) or "/nonexistent"
    flashinfer = Path(environ.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer"
    b12x = environ.get("B12X_COMPILE_CACHE_DIR") or (environ.get("XDG_CACHE_HOME") or f"{home}/.cache") + "/b12x/compile"
    autotune = Path(environ.get("FLASHINFER_AUTOTUNE_CACHE_DIR") or flashinfer / "autotune")
    return CacheDirectories(flashinfer=flashinfer, autotune=autotune, b12x=Path(b12x))


def find_recorded(directories: CacheDirectories) -> tuple[Recorded, ...]:
    """Everything that lies in these caches, by kind, sorted. What is still locked or half-written is listed too."""
    return tuple(sorted(_all(directories), key=lambda one: (one.kind, one.flashinfer, one.arch, one.name)))


def _all(directories: CacheDirectories) -> Iterator[Recorded]:
    for folder in directories.flashinfer.glob("*/*/cached_ops/*/"):
        version, arch = folder.parts[-4], folder.parts[-3]
        kind = CUTE_DSL if _CUTE_DSL.fullmatch(folder.name) else NVCC if (folder / "build.ninja").is_file() else ""
        if kind:
            yield Recorded(kind=kind, name=folder.name, path=folder, flashinfer=version, arch=arch)
    for kind, place, pattern in (
        (CUBIN, directories.flashinfer / "cubins", "*"),
        (AUTOTUNE, directories.autotune, "v*/*/"),
        (B12X_SELECTIONS, directories.b12x_selections, "*.json"),
    ):
        for path in place.glob(pattern):
            yield Recorded(kind=kind, name=str(path.relative_to(place)), path=path)
    for path in {found.parent / f"{found.name.partition('.')[0]}.o" for found in directories.b12x.glob("[0-9a-f][0-9a-f]/[!.]*")}:
        # A program that failed, or whose compilation was stopped, leaves its lock alone.
        yield Recorded(kind=B12X, name=str(path.relative_to(directories.b12x)), path=path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """An nvcc module as it was built by a program's own FlashInfer.

    base:   FLASHINFER_WORKSPACE_BASE of that program, links resolved, as its build file spells it.
    build:  the run of ninja that made it: FlashInfer builds in the module's directory, or several at once in the one above.
    """

    name: str
    arch: str
    file: Path
    library: Path
    base: Path
    cuda_home: str
    build: ninja.Ninja


def read_module(recorded: Recorded, environ: Mapping[str, str], program: str) -> tuple[Module | None, str]:
    """The module, or None and why it is left out.

    Args:
        environ, program: for ninja.

    It is whole if ninja has nothing to do for it: a library that is missing, cut short by a kill, older than an object or than
    a source, or left over from before a build that failed, is none of a finished build.
    """
    folder = Path(os.path.realpath(recorded.path))
    if not ARCH.fullmatch(recorded.arch):
        return None, f"it was built for several architectures at once ({recorded.arch}); set FLASHINFER_CUDA_ARCH_LIST to one"
    library = folder / f"{recorded.name}.so"
    if not library.is_file():
        return None, "it has no library: its build failed or was stopped"
    file = folder / "build.ninja"
    text = file.read_text(encoding="utf-8", errors="replace")
    found = re.search(_ASSIGNED.format("cuda_home"), text, re.MULTILINE)
    if found is None:
        return None, "its build file names no CUDA toolkit"
    last = "ninja has no record of it"
    for place in (folder, folder.parent):
        if (place / ".ninja_log").is_file():
            build = ninja.Ninja(program=program, folder=place, file=file, environ=environ)
            if not (last := ninja.unfinished(build, str(library))):
                module = Module(
                    name=recorded.name,
                    arch=recorded.arch,
                    file=file,
                    library=library,
                    base=folder.parents[5],
                    cuda_home=found[1].strip(),
                    build=build,
                )
                return module, ""
    return None, f"its last build did not finish: {last}"
