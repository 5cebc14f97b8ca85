"""`kcache build`: compiles modules of FlashInfer on a host that needs no GPU, and writes them down as entries.

For each architecture in turn: FlashInfer is asked, in a child process, which modules a kind has and how they are built; one run
of ninja builds them all; what was built is checked, keyed and packed. One module that fails costs only the entries that hold it.
An entry's archive is written before its manifest, so that a manifest in the output directory always has its archive.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcache import fsops
from kcache.archs import flashinfer_archs
from kcache.errors import CollectError, UsageError
from kcache.key import KIND_MODULES, NAME, Environment
from kcache.probe import packages
from kcache.probe.limits import Jobs, build_jobs
from kcache.probe.ninja import Ninja, find_ninja
from kcache.probe.specs import Question, ask
from kcache.probe.toolkit import FoundToolkit, find_toolkit, make_home
from kcache.recipe import Recipe
from kcache.workflows.build_entries import BUILT, FAILED, UP_TO_DATE, Context, EntryReport, ModuleReport, write_entry
from kcache.workflows.build_environ import BuildEnviron, build_environ
from kcache.workflows.compile import Compiled, ModuleFiles, Progress, compile_modules

KINDS = ("sampling",)
"""Kinds whose set of modules FlashInfer can be asked for."""

PARTIAL = "partial"

_LOCK_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to build.

    kinds, modules: kinds give one entry each; a module named by itself gives one entry of kind `modules`.
    recipes:   build manifests, which kinds, archs and gpus then narrow.
    retune:    tune again what an earlier build tuned well, and keep the better of the two.
    collect:   directories with results of the tuner, of which entries are made; nothing is compiled then.
    archs:     names as a person writes them; empty for the GPUs of this host, or for what the recipes are for.
    gpus:      names of GPU products.
    environment: what the entries are for, where that is not the farm.
    output:    the directory for entries.
    jobs:      compilers at once; None to decide by cores and memory.
    python:    the interpreter that has FlashInfer; None for this one.
    work_dir:  where compilers work, kept for the next build; None for `.build` in the output directory.
    """

    kinds: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    recipes: tuple[Recipe, ...] = ()
    retune: bool = False
    collect: tuple[Path, ...] = ()
    archs: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    environment: Environment | None = None
    output: Path
    jobs: int | None = None
    python: str | None = None
    work_dir: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildReport:
    """What a build did. `toolkit` is None where no nvcc module was built."""

    entries: tuple[EntryReport, ...]
    modules: tuple[ModuleReport, ...]
    warnings: tuple[str, ...]
    output: Path
    jobs: Jobs
    seconds: float
    toolkit: FoundToolkit | None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> str:
        """`built`, `up-to-date`, `partial` or `failed`; a kernel that failed leaves its entry in place without it."""
        found = {entry.status for entry in self.entries}
        if found == {UP_TO_DATE} and all(module.status != FAILED for module in self.modules):
            return UP_TO_DATE
        if FAILED in found:
            return FAILED if found == {FAILED} else PARTIAL
        return PARTIAL if any(module.status == FAILED for module in self.modules) else BUILT

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "output": str(self.output),
            "entries": [entry.to_json() for entry in self.entries],
            "modules": [module.to_json() for module in self.modules],
            "warnings": list(self.warnings),
            "jobs": self.jobs.jobs,
            "jobs_reason": self.jobs.reason,
            "cuda": self.toolkit and {"release": self.toolkit.release, "nvcc": self.toolkit.nvcc, "source": self.toolkit.source},
            "flashinfer": self.facts.get("flashinfer"),
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Farm:
    """What is equal for all architectures of one build."""

    request: BuildRequest
    interpreter: packages.Interpreter
    toolkit: FoundToolkit
    home: Path
    work: Path
    jobs: Jobs


Watch = Callable[[str, tuple[str, ...]], Progress]
"""Called before the compilers start, with architecture and modules; what it returns is told of each command that ended."""


def build(request: BuildRequest, environ: Mapping[str, str], watch: Watch = lambda arch, modules: lambda *_: None) -> BuildReport:
    """Builds everything that the request names.

    Raises:
        UsageError: the request cannot be met as it stands, such as no architecture on a host without a GPU.
        ProbeError: toolchain, ninja or FlashInfer are missing or do not fit together.
        LockTimeoutError: another build uses the work directory.
        KeyboardInterrupt: after the compilers ended; finished modules stay in the work directory.
    """
    started = time.monotonic()
    _check_request(request)
    interpreter = packages.this_interpreter() if request.python is None else packages.interpreter_at(request.python, environ)
    toolkit = find_toolkit(environ, [Path(path) for path in interpreter.search_path])
    archs = _archs(request, toolkit, environ)
    jobs = build_jobs(environ) if request.jobs is None else Jobs(jobs=request.jobs, reason="--jobs")
    work = work_directory(request.output, request.work_dir)
    with fsops.locked(work / "lock", _LOCK_SECONDS):
        made = make_home(toolkit, work / "cuda", os.uname().machine)
        farm = _Farm(request=request, interpreter=interpreter, toolkit=toolkit, home=made.home, work=work, jobs=jobs)
        done = [_build_arch(farm, arch, environ, watch) for arch in archs]
    return BuildReport(
        entries=tuple(entry for one in done for entry in one.entries),
        modules=tuple(module for one in done for module in one.modules),
        warnings=tuple(dict.fromkeys(warning for one in done for warning in one.warnings)),
        output=request.output,
        jobs=jobs,
        seconds=time.monotonic() - started,
        toolkit=toolkit,
        facts=done[0].facts,
    )


def _check_request(request: BuildRequest) -> None:
    if not request.kinds and not request.modules:
        raise UsageError("nothing to build", remedy="Name kinds (--kinds sampling) or modules (--modules cascade,page).")
    if unknown := [kind for kind in request.kinds if kind not in KINDS]:
        raise UsageError(
            f"kind {', '.join(unknown)} cannot be built here", remedy=f"Known kinds: {', '.join(KINDS)}; others need --manifest."
        )
    if wrong := [name for name in request.modules if not NAME.fullmatch(name)]:
        raise UsageError(f"{wrong[0]!r} is no module name")
    if request.jobs is not None and request.jobs < 1:
        raise UsageError("--jobs must be at least 1")


def _archs(request: BuildRequest, toolkit: FoundToolkit, environ: Mapping[str, str]) -> tuple[str, ...]:
    if request.archs:
        return flashinfer_archs(",".join(request.archs), toolkit.release_pair)
    from kcache.probe.host import probe_host

    host = probe_host(python=request.python, described_archs=(), environ={**environ, "CUDA_HOME": str(toolkit.root)})
    if not host.environment.archs:
        raise UsageError(
            "no GPU architecture is named, and this host has no GPU to ask",
            why=host.environment.fact("gpu.source").undetermined,
            remedy="Name the architectures of the servers: --arch 9.0a,12.0f (9.0 is Hopper, 10.0 and 12.0 are Blackwell).",
        )
    return host.environment.archs


def work_directory(output: Path, work_dir: Path | None) -> Path:
    """The work directory, made if needed; FlashInfer writes its path unquoted into build files.

    Raises:
        UsageError: build files cannot hold its path.
    """
    work = (work_dir or output / ".build").absolute()
    if set(str(work)) & set(" $:'\"\\"):
        raise UsageError(
            f"the work directory {str(work)!r} has a character that build files cannot hold",
            remedy="Name another one with --work-dir, without spaces, $ and colons.",
        )
    output.mkdir(parents=True, exist_ok=True)
    work.mkdir(parents=True, exist_ok=True)
    return Path(os.path.realpath(work))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    entries: tuple[EntryReport, ...]
    modules: tuple[ModuleReport, ...]
    warnings: tuple[str, ...]
    facts: Mapping[str, Any]


def _build_arch(farm: _Farm, arch: str, environ: Mapping[str, str], watch: Watch) -> _Done:
    request = farm.request
    given = build_environ(
        environ, arch=arch, cuda_home=str(farm.home), workspace=str(farm.work), python=farm.interpreter.executable
    )
    question = Question(arch=arch, cuda_release=farm.toolkit.release, kinds=request.kinds, modules=request.modules)
    answer = ask(farm.interpreter.executable, question, given.variables, farm.work)
    files, refused = _module_files(answer["modules"])
    compiled = {one.module.name: one for one in _compile(farm, arch, files, given, watch)}
    context = _context(farm, arch, given, answer["facts"])
    entries, modules = [], []
    for kind, names in _entries(request, answer):
        missing = {name: refused[name] for name in names if name in refused}
        entry = write_entry(context, kind, {name: compiled[name] for name in names if name in compiled}, missing)
        entries.append(entry)
        modules += [_module_report(arch, entry, name, compiled.get(name), missing.get(name, "")) for name in names]
    warnings = [f"{arch}: {text}" for kind in answer["kinds"].values() for text in kind["warnings"]]
    if given.removed:
        warnings.append(f"not passed on to the compilers, since they would change the code unseen: {', '.join(given.removed)}")
    return _Done(entries=tuple(entries), modules=tuple(modules), warnings=tuple(warnings), facts=answer["facts"])


def _module_files(answer: Mapping[str, Any]) -> tuple[list[ModuleFiles], dict[str, str]]:
    """The modules that can be built, and why the others cannot."""
    refused = {name: str(found["error"]) for name, found in answer.items() if "error" in found}
    files = [
        ModuleFiles(name=name, ninja=Path(found["ninja"]), library=Path(found["library"]), recipe=tuple(found["recipe"]))
        for name, found in answer.items()
        if name not in refused
    ]
    return files, refused


def _entries(request: BuildRequest, answer: Mapping[str, Any]) -> list[tuple[str, tuple[str, ...]]]:
    """(kind, modules) of each entry."""
    kinds = [(kind, tuple(answer["kinds"][kind]["modules"])) for kind in request.kinds]
    return kinds + [(KIND_MODULES, (module,)) for module in request.modules]


def _compile(farm: _Farm, arch: str, files: list[ModuleFiles], given: BuildEnviron, watch: Watch) -> list[Compiled]:
    if not files:
        return []
    ninja = Ninja(
        program=find_ninja(given.variables["PATH"]),
        folder=files[0].ninja.parent.parent,
        file=files[0].ninja.parent.parent / "kcache.ninja",
        environ=given.variables,
    )
    toolchain = f"nvcc {farm.toolkit.nvcc} at {os.path.realpath(farm.toolkit.root)}; {_host_compiler(given.variables)}"
    progress = watch(arch, tuple(file.name for file in files))
    return compile_modules(files, ninja, toolchain, farm.jobs.jobs, progress)


def _host_compiler(variables: Mapping[str, str]) -> str:
    """First line of what the host compiler says of itself.

    Raises:
        CollectError: there is none; nvcc cannot work without it.
    """
    import subprocess

    compiler = variables.get("CXX") or "c++"
    try:
        done = subprocess.run(
            [compiler, "--version"], env=dict(variables), capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError) as error:
        remedy = "Install g++ (for example: apt-get install g++), or name the compiler in CXX."
        raise CollectError(f"the C++ compiler {compiler} does not work", why=str(error), remedy=remedy) from error
    return (done.stdout.splitlines() or ["unknown"])[0]


def _context(farm: _Farm, arch: str, given: BuildEnviron, facts: Mapping[str, Any]) -> Context:
    return Context(
        output=farm.request.output,
        arch=arch,
        package=Path(facts["flashinfer_root"]),
        facts=facts,
        cuda_release=farm.toolkit.release,
        flags=given.flags,
        provenance={
            "nvcc": farm.toolkit.nvcc,
            "toolkit": farm.toolkit.source,
            "toolkit_wheels": dict(farm.toolkit.wheels),
            "host_compiler": _host_compiler(given.variables),
            "torch": facts["torch"],
            "python": facts["python"],
            "libc": farm.interpreter.libc,
            "flashinfer_commit": facts["flashinfer_commit"],
            "jobs": farm.jobs.jobs,
        },
    )


def _module_report(arch: str, entry: EntryReport, name: str, compiled: Compiled | None, refused: str) -> ModuleReport:
    reason = refused or (compiled.failed if compiled else "") or (entry.reason if entry.status == FAILED else "")
    return ModuleReport(
        module=name,
        arch=arch,
        kind=entry.kind,
        status=FAILED if refused or (compiled and compiled.failed) else entry.status,
        seconds=compiled.seconds if compiled else 0.0,
        reason=reason,
        log=str(compiled.log) if compiled and compiled.log else "",
    )
