"""Compiles modules for one architecture in a work directory, and says what each one was made of.

The work directory outlives a build, so that a re-run goes on where the last one stopped. Ninja alone cannot be trusted with
that: it compares times, and a source that changed can be older than the object (case B21). So after every run, finished or not,
a record is kept of the digest of each file that went into each object, and before a run every object whose record does not hold
any more is removed. An object without a record is removed too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcache import digest
from kcache.errors import CollectError
from kcache.probe import ninja

_RECORD = "kcache-objects.json"
_RECORD_FORMAT = "kcache.objects/1"
_EDGE = re.compile(r"^build (\S+): (compile|cuda_compile|link|nvcc_link|embed_cubin) ", re.MULTILINE)

Progress = Callable[[int, int, str], None]
"""Called after each command: how many are done, how many there are, and the module of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFiles:
    """Where FlashInfer puts one module: its build file and its library; `recipe` are files inside the flashinfer package."""

    name: str
    ninja: Path
    library: Path
    recipe: tuple[str, ...]

    def edges(self) -> tuple[tuple[str, str], ...]:
        """(output, rule) of every command in the build file."""
        return tuple((output, rule) for output, rule in _EDGE.findall(self.ninja.read_text(encoding="utf-8")))

    @property
    def objects(self) -> tuple[str, ...]:
        """The outputs of compilers, which say what they read; links and embedded cubins do not."""
        return tuple(output for output, rule in self.edges() if rule in ("compile", "cuda_compile"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One module after a run: `failed` is empty, or says why in a line; `log` is its compiler's whole output in that case.

    read:    every file that its compilers read, absolute path -> digest.
    seconds: wall seconds during which it was being compiled, whenever that was.
    """

    module: ModuleFiles
    failed: str = ""
    log: Path | None = None
    read: Mapping[str, str]
    seconds: float = 0.0


def compile_modules(
    modules: Iterable[ModuleFiles], build: ninja.Ninja, toolchain: str, jobs: int, progress: Progress = lambda *_: None
) -> list[Compiled]:
    """Builds every module that is not built, all in one run of ninja; a failure costs only its own module.

    Args:
        build: its folder is the parent of the modules' directories.
        toolchain: names the compilers by version; objects made by others are removed.
        jobs: how many compilers may run at once.

    Raises:
        CollectError: ninja could not work at all.
        KeyboardInterrupt: after the compilers ended; what was finished is kept.
    """
    wanted = list(modules)
    hashed = _Digests()
    _discard_stale(build, toolchain, hashed)
    ninja.join(build, build.folder.glob("*/build.ninja"))

    def on_edge(done: int, total: int, command: str) -> None:
        progress(done, total, _module_of(command, build.folder))

    try:
        targets = [str(module.library) for module in wanted]
        failures = ninja.run(build, targets, jobs, build.folder / "kcache-ninja.log", on_edge)
    finally:
        made_of = _record(build, toolchain, hashed)
    log = build.folder / ".ninja_log"  # not there before the first command that did not fail
    spans = ninja.parse_log(log.read_text(encoding="utf-8", errors="replace") if log.exists() else "")
    return [_outcome(module, failures, made_of, spans, build.folder) for module in wanted]


class _Digests:
    """Digests of files, each read once in a run; None for a file that is not there."""

    def __init__(self) -> None:
        self._known: dict[str, str | None] = {}

    def of(self, path: str) -> str | None:
        if path not in self._known:
            try:
                self._known[path] = digest.of_file(path)[0]
            except OSError:
                self._known[path] = None
        return self._known[path]


def _read_record(path: Path, toolchain: str) -> dict[str, dict[str, str]]:
    try:
        document: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict) or (document.get("format"), document.get("toolchain")) != (_RECORD_FORMAT, toolchain):
        return {}
    objects = document.get("objects")
    return objects if isinstance(objects, dict) else {}


def _discard_stale(build: ninja.Ninja, toolchain: str, hashed: _Digests) -> None:
    """Removes every object that is not known to be made of what is there now, and what was linked from it."""
    record = _read_record(build.folder / _RECORD, toolchain)
    for found in build.folder.glob("*/*.o"):
        parts = record.get(str(found))
        if not parts or any(hashed.of(path) != wanted for path, wanted in parts.items()):
            found.unlink()
            for library in found.parent.glob("*.so"):
                library.unlink()


def _record(build: ninja.Ninja, toolchain: str, hashed: _Digests) -> dict[str, dict[str, str]]:
    """Writes down what every object that is there was made of."""
    made_of: dict[str, dict[str, str]] = {}
    for output, paths in ninja.dependencies(build).items():
        digests = {path: hashed.of(path) for path in paths}
        if Path(output).is_file() and None not in digests.values():
            made_of[output] = {path: value for path, value in digests.items() if value is not None}
    document = {"format": _RECORD_FORMAT, "toolchain": toolchain, "objects": made_of}
    temporary = build.folder / f"{_RECORD}.part"
    temporary.write_text(json.dumps(document), encoding="utf-8")
    temporary.replace(build.folder / _RECORD)
    return made_of


def _module_of(text: str, folder: Path) -> str:
    """The module whose directory below `folder` a command names first."""
    _, found, rest = text.partition(f"{folder}{os.sep}")
    return rest.partition(os.sep)[0] if found else ""


def _outcome(
    module: ModuleFiles,
    failures: list[ninja.Failure],
    made_of: Mapping[str, Mapping[str, str]],
    spans: Mapping[str, tuple[float, float]],
    folder: Path,
) -> Compiled:
    own = [failure for failure in failures if any(_module_of(output, folder) == module.name for output in failure.outputs)]
    if own:
        log = module.ninja.parent / "kcache-error.log"
        log.write_text("\n".join(failure.output for failure in own), encoding="utf-8")
        return Compiled(module=module, failed=own[0].first_error, log=log, read={})
    if not module.library.is_file():
        return Compiled(module=module, failed="the build ended without its library", log=folder / "kcache-ninja.log", read={})
    read: dict[str, str] = {}
    for output in module.objects:
        if output not in made_of:
            return Compiled(module=module, failed=f"it is not known what {Path(output).name} was compiled from", read={})
        read.update(made_of[output])
    outputs = [output for output, _ in module.edges()]
    return Compiled(module=module, read=read, seconds=ninja.busy_seconds(spans[o] for o in outputs if o in spans))


def package_sources(compiled: Compiled, package: Path) -> dict[str, str]:
    """The files of the flashinfer package that a module depends on: path inside the package -> digest.

    What the compilers read lies below the package, or where its `data` directory links to (an editable install). Files of the
    toolkit, of tvm-ffi and of the system are no part of it; nor are sources that a generator wrote: its recipe stands for them.

    Raises:
        CollectError: a file of the recipe cannot be read.
    """
    places = {os.path.realpath(package): ""}
    for item in (package / "data").iterdir():
        places[os.path.realpath(item)] = f"data/{item.name}"
    sources: dict[str, str] = {}
    for path, found in compiled.read.items():
        real = os.path.realpath(path)
        inside = next((place for place in places if real.startswith(place + os.sep)), None)
        if inside is not None:
            sources["/".join(part for part in (places[inside], real[len(inside) + 1 :].replace(os.sep, "/")) if part)] = found
    for recipe in compiled.module.recipe:
        try:
            sources[recipe] = digest.of_file(str(package / recipe))[0]
        except OSError as error:
            raise CollectError(f"{recipe} of FlashInfer cannot be read", why=error.strerror or "") from error
    return sources
