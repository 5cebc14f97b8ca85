"""`kcache build --record -- CMD`: runs any program and makes entries of what it compiled.

What landed in the known caches is listed by kind (`kcache.workflows.recorded`); each nvcc module that is whole becomes an entry
of kind `modules`, as if `kcache build --modules` had made it. That is only true if it was made from FlashInfer's own recipe, so
FlashInfer is asked, in a child process, how it would build the module: the build file and every source that a generator wrote
must be the same to the last byte. Kernels, programs of the package b12x and tuning results have rules of their own. Failed and
partial ones, those that this cannot be shown of, and cubins are left out, each with its reason. The program's own failure keeps
nothing from being recorded.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcache import fsops
from kcache.archs import arch_list_entry, flashinfer_archs
from kcache.errors import CollectError, KcacheError, UsageError
from kcache.key import KIND_MODULES
from kcache.probe import ninja, packages
from kcache.probe.host import probe_host
from kcache.probe.specs import Question, ask
from kcache.probe.toolkit import FoundToolkit, find_toolkit, make_home
from kcache.values import dataclass, field
from kcache.workflows.build import work_directory
from kcache.workflows.build_entries import FAILED, UP_TO_DATE, Context, EntryReport, write_entry
from kcache.workflows.build_environ import flags_ingredient, kernel_environ
from kcache.workflows.compile import Compiled, ModuleFiles
from kcache.workflows.record_run import Ended, program_environ, run_program
from kcache.workflows.recorded import (
    AUTOTUNE,
    B12X,
    B12X_SELECTIONS,
    CUBIN,
    CUTE_DSL,
    NVCC,
    Module,
    Recorded,
    cache_directories,
    find_recorded,
    read_module,
)
from kcache.workflows.recorded_objects import RecordedObjects

if TYPE_CHECKING:
    from kcache.workflows.record_kernels import KernelRecorder

BUILT, PARTIAL, NOTHING = "built", "partial", "nothing"

_NOT_YET = "recorded, but not packed yet"

_LOCK_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRequest:
    """What to run, and where entries go.

    in_place: take what is new in the program's own caches, instead of giving it empty ones in the work directory.
    arch:     the architecture to compile for, as a person writes it; empty for the GPUs of this host.
    gpu:      the product that the program compiles CuTe-DSL kernels for; empty for the GPU of this host.
    python:   the interpreter that has the program's FlashInfer; None for this one.
    aside:    what the program prints goes to standard error, so that standard output is free for a report.
    """

    command: tuple[str, ...]
    output: Path
    work_dir: Path | None = None
    in_place: bool = False
    arch: str = ""
    gpu: str = ""
    python: str | None = None
    aside: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Something that landed and became no entry. `failed`: it is not whole; else it is of a sort that is not packed."""

    kind: str
    name: str
    arch: str
    reason: str
    failed: bool

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "name": self.name, "arch": self.arch, "reason": self.reason, "failed": self.failed}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordReport:
    """What was recorded. `status`: built, up-to-date, partial, failed or nothing; the program's own end does not enter it."""

    ended: Ended
    entries: tuple[EntryReport, ...]
    left_out: tuple[LeftOut, ...]
    warnings: tuple[str, ...]
    output: Path
    seconds: float

    @property
    def status(self) -> str:
        failed = any(one.failed for one in self.left_out)
        if not self.entries:
            return FAILED if failed else NOTHING
        if failed:
            return PARTIAL
        return UP_TO_DATE if all(entry.status == UP_TO_DATE for entry in self.entries) else BUILT

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "program": {"exit_code": self.ended.code, "left_running": self.ended.left},
            "output": str(self.output),
            "entries": [entry.to_json() for entry in self.entries],
            "left_out": [one.to_json() for one in self.left_out],
            "warnings": list(self.warnings),
            "seconds": round(self.seconds, 3),
        }


def record(request: RecordRequest, environ: Mapping[str, str]) -> RecordReport:
    """Runs the program, then packs what it compiled.

    Raises:
        UsageError: there is no program, or it cannot be started.
        ProbeError: a toolchain is needed and there is none.
        LockTimeoutError: another build uses the work directory.
    """
    started = time.monotonic()
    if not request.command:
        raise UsageError("nothing to record", remedy="Name a program: kcache build --record -o DIR -- python serve.py")
    interpreter = packages.this_interpreter() if request.python is None else packages.interpreter_at(request.python, environ)
    work = work_directory(request.output, request.work_dir)
    with fsops.locked(work / "lock", _LOCK_SECONDS):
        private = None if request.in_place else work / "recorded"
        given = program_environ(environ, _toolchain(request, environ, interpreter, work), private, os.getuid())
        directories = cache_directories(given.variables, os.getuid())
        before = {one.path: one.stamp() for one in find_recorded(directories)} if request.in_place else {}
        ended = run_program(request.command, given.variables, aside=request.aside)
        found = [one for one in find_recorded(directories) if before.get(one.path) != one.stamp()]
        flashinfer = packages.scan(interpreter.search_path).distribution("flashinfer-python")
        wheels = [Path(flashinfer.metadata)] if flashinfer is not None else []
        objects = RecordedObjects(work / "recorded-objects.json", wheels)
        packer = _Packer(request=request, environ=given.variables, interpreter=interpreter, work=work, objects=objects)
        packer.pack([one for one in found if one.kind == NVCC])
        objects.write()
        packer.pack_kernels([one for one in found if one.kind == CUTE_DSL])
        packer.pack_programs([one for one in found if one.kind == B12X], directories.b12x)
        for kind, place in ((AUTOTUNE, directories.autotune), (B12X_SELECTIONS, directories.b12x_selections)):
            packer.pack_tunings([one for one in found if one.kind == kind], place)
    others = [
        LeftOut(kind=one.kind, name=one.name, arch=one.arch, reason=f"{_NOT_YET}: kind {one.kind}", failed=False)
        for one in found
        if one.kind == CUBIN
    ]
    return RecordReport(
        ended=ended,
        entries=tuple(packer.entries),
        left_out=(*packer.left_out, *others),
        warnings=_warnings(given.removed, ended),
        output=request.output,
        seconds=time.monotonic() - started,
    )


def _warnings(removed: Sequence[str], ended: Ended) -> tuple[str, ...]:
    found = []
    if removed:
        why = "they would change its code unseen, or keep it from compiling"
        found.append(f"not passed on to the program, since {why}: {', '.join(removed)}")
    if ended.left:
        found.append(f"the program left {ended.left} processes running, which were ended")
    return tuple(found)


def _toolchain(
    request: RecordRequest, environ: Mapping[str, str], interpreter: packages.Interpreter, work: Path
) -> dict[str, str]:
    """Variables for a program on a farm: CUDA from wheels where FlashInfer finds no whole toolkit; the named architecture."""
    given: dict[str, str] = {}
    own = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if not own and not (_toolkit_of_flashinfer(environ) / "include" / "cuda_runtime.h").is_file():
        found = find_toolkit(environ, [Path(path) for path in interpreter.search_path])
        given["CUDA_HOME"] = str(make_home(found, work / "cuda", os.uname().machine).home)
    if request.arch:
        # Which suffix an architecture gets depends on the toolkit; a person who names one with its suffix gets that.
        found = find_toolkit({**environ, **given}, [Path(path) for path in interpreter.search_path])
        archs = flashinfer_archs(request.arch, found.release_pair)
        if len(archs) > 1:
            remedy = "Record once for each: FlashInfer compiles for all at once."
            raise UsageError("a recording is for one architecture", remedy=remedy)
        given["FLASHINFER_CUDA_ARCH_LIST"] = arch_list_entry(archs[0])
    return given


def _toolkit_of_flashinfer(environ: Mapping[str, str]) -> Path:
    """Where FlashInfer looks without CUDA_HOME: above nvcc on PATH, else at the usual place (`jit/cpp_ext.py`, get_cuda_path)."""
    import shutil

    nvcc = shutil.which("nvcc", path=environ.get("PATH", os.defpath))
    return Path(nvcc).parent.parent if nvcc else Path("/usr/local/cuda")


@dataclass(slots=True, kw_only=True)
class _Packer:
    """Makes entries of modules; collects them, and what is left out."""

    request: RecordRequest
    environ: Mapping[str, str]
    interpreter: packages.Interpreter
    work: Path
    objects: RecordedObjects
    entries: list[EntryReport] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def pack(self, found: Sequence[Recorded]) -> None:
        groups: dict[tuple[str, str, str], list[tuple[Recorded, Module]]] = {}
        program = ninja.find_ninja(self._path()) if found else ""
        for one in found:
            try:
                module, why = read_module(one, self.environ, program)
            except OSError as error:
                module, why = None, _unreadable(error)
            if module is None:
                self._leave(one, why, failed=True)
            else:
                groups.setdefault((one.flashinfer, one.arch, module.cuda_home), []).append((one, module))
        for (version, arch, cuda_home), members in groups.items():
            try:
                self._pack_group(version, arch, cuda_home, members)
            except KcacheError as error:
                for one, _ in members:
                    self._leave(one, str(error), failed=True)

    def pack_kernels(self, found: Sequence[Recorded]) -> None:
        """CuTe-DSL kernels, a module's directory each; what they depend on is asked of this host once."""
        from kcache.workflows.record_kernels import pack_kernels

        with self._or_leave(found):
            self.entries += pack_kernels(self._recorder(kernel_environ(self.environ)), found, self._leave_kernel) if found else []

    def pack_programs(self, found: Sequence[Recorded], root: Path) -> None:
        """Programs of the package b12x in its compile cache."""
        from kcache.workflows.record_programs import pack_programs

        with self._or_leave(found):
            self.entries += pack_programs(self._recorder(self.environ), root, found, self._leave_kernel) if found else []

    def pack_tunings(self, found: Sequence[Recorded], place: Path) -> None:
        """FlashInfer's tuning results, or b12x's choices, as `kcache build --collect` takes them: a store is taken as a whole."""
        if not found:
            return
        from kcache.workflows.build_tunings import collect_tunings
        from kcache.workflows.target import TargetRequest, find_target

        gpus, archs = ((self.request.gpu,), ()) if self.request.gpu else ((), (self.request.arch,) if self.request.arch else ())
        with self._or_leave(found):
            target = find_target(TargetRequest(python=self.interpreter.executable, gpus=gpus, archs=archs), self.environ)
            done = collect_tunings([place], target, self.request.output, provenance={"recorded": True})
            self.entries += [entry for entry in done.entries if entry.status != FAILED]
            failed = [(entry.variant, entry.reason) for entry in done.entries if entry.status == FAILED]
            for name, reason in [*failed, *((one.path, one.why) for one in done.left_out)]:
                self.left_out.append(LeftOut(kind=found[0].kind, name=name, arch="", reason=reason, failed=True))

    @contextmanager
    def _or_leave(self, found: Sequence[Recorded]) -> Iterator[None]:
        """Leaves all of these out where nothing could be asked about any."""
        try:
            yield
        except KcacheError as error:
            for one in found:
                self._leave(one, str(error), failed=True)

    def _recorder(self, environ: Mapping[str, str]) -> KernelRecorder:
        from kcache.workflows.record_kernels import kernel_recorder

        host = probe_host(python=self.interpreter.executable, described_archs=(), environ=self.environ)
        return kernel_recorder(host, self.request.gpu, environ=environ, work=self.work / "asked", output=self.request.output)

    def _leave_kernel(self, one: Recorded, reason: str, failed: bool) -> None:
        self._leave(one, reason if failed else f"{_NOT_YET}: {reason}", failed=failed)

    def _path(self) -> str:
        own = str(Path(self.interpreter.executable).parent)
        return os.pathsep.join([self.environ.get("PATH") or os.defpath, own])

    def _leave(self, one: Recorded, reason: str, *, failed: bool) -> None:
        self.left_out.append(LeftOut(kind=one.kind, name=one.name, arch=one.arch, reason=reason, failed=failed))

    def _pack_group(self, version: str, arch: str, cuda_home: str, members: Sequence[tuple[Recorded, Module]]) -> None:
        """Modules of one FlashInfer version, architecture and toolkit."""
        toolkit = find_toolkit({**self.environ, "CUDA_HOME": cuda_home}, [Path(path) for path in self.interpreter.search_path])
        asked = self._ask(arch, cuda_home, toolkit, [one.name for one, _ in members])
        facts = asked.answer["facts"]
        if facts["flashinfer"] != version:
            why = f"the program used FlashInfer {version}, and {self.interpreter.executable} has {facts['flashinfer']}"
            raise UsageError(why, remedy="Name the program's Python with --python.")
        context = Context(
            output=self.request.output,
            arch=arch,
            package=Path(facts["flashinfer_root"]),
            facts=facts,
            cuda_release=toolkit.release,
            flags=flags_ingredient(self.environ),
            provenance={
                "recorded": True,
                "nvcc": toolkit.nvcc,
                "toolkit": toolkit.source,
                "torch": facts["torch"],
                "python": facts["python"],
                "libc": self.interpreter.libc,
                "flashinfer_commit": facts["flashinfer_commit"],
            },
        )
        for one, module in members:
            self._pack(one, module, asked, context)

    def _ask(self, arch: str, cuda_home: str, toolkit: FoundToolkit, names: Sequence[str]) -> _Asked:
        """How FlashInfer would build these modules itself, in a workspace of its own."""
        base = self.work / "asked"
        base.mkdir(exist_ok=True)
        own = {"FLASHINFER_WORKSPACE_BASE": str(base), "FLASHINFER_CUDA_ARCH_LIST": arch_list_entry(arch), "CUDA_HOME": cuda_home}
        environ = {**self.environ, **own, "PYTHONDONTWRITEBYTECODE": "1"}
        question = Question(arch=arch, cuda_release=toolkit.release, modules=tuple(names))
        return _Asked(base=base, answer=ask(self.interpreter.executable, question, environ, base))

    def _pack(self, one: Recorded, module: Module, asked: _Asked, context: Context) -> None:
        recipe, why = asked.recipe(module)
        if why:
            self._leave(one, f"{_NOT_YET}: {why}", failed=False)
            return
        try:
            compiled = _compiled(module, recipe, asked, self.objects)
        except (OSError, CollectError) as error:
            self._leave(one, _unreadable(error) if isinstance(error, OSError) else str(error), failed=True)
            return
        entry = write_entry(context, KIND_MODULES, {module.name: compiled}, {})
        if entry.status == FAILED:
            self._leave(one, entry.reason, failed=True)
        else:
            self.entries.append(entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """FlashInfer's answer, and the workspace in which it wrote build files and generated sources."""

    base: Path
    answer: Mapping[str, Any]

    def recipe(self, module: Module) -> tuple[tuple[str, ...], str]:
        """The files that define a module's recipe; or why it is not known to be FlashInfer's own."""
        found = self.answer["modules"].get(module.name, {"error": "FlashInfer was not asked for it"})
        if "error" in found:
            return (), str(found["error"])
        line = first_difference(self.ours(Path(found["ninja"]), module), module.file.read_bytes())
        if line:
            return (), f"its build file is not the one that FlashInfer writes with these variables: {line}"
        return tuple(found["recipe"]), ""

    def ours(self, path: Path, module: Module) -> bytes:
        """A file that FlashInfer wrote when it was asked, with the workspace of the module for its own."""
        return path.read_bytes().replace(str(self.base).encode(), str(module.base).encode())

    def strange(self, paths: Iterable[str], module: Module) -> str:
        """The first file of a module's workspace that FlashInfer did not write the same when it was asked; empty if none."""
        for path in paths:
            inside = os.path.relpath(path, module.base)
            if not inside.startswith(".."):
                mine = self.base / inside
                if not mine.is_file() or self.ours(mine, module) != Path(path).read_bytes():
                    return path
        return ""


def _unreadable(error: OSError) -> str:
    return f"{error.filename} cannot be read: {error.strerror}"


def first_difference(wanted: bytes, found: bytes) -> str:
    """What the build file `found` has that `wanted` has not, in a line; empty if they are equal."""
    if wanted == found:
        return ""
    # A list of flags goes on over lines that end with $; what follows a flag does not make it another one.
    ours, theirs = ([line.strip(" $") for line in text.decode(errors="replace").splitlines()] for text in (wanted, found))
    more, fewer = [line for line in theirs if line not in ours], [line for line in ours if line not in theirs]
    told = f"it has {more[0][:200]!r}" if more else f"it lacks {fewer[0][:200]!r}" if fewer else "its lines are in another order"
    return told + (f" for {fewer[0][:200]!r}" if more and fewer else "")


def _compiled(module: Module, recipe: tuple[str, ...], asked: _Asked, objects: RecordedObjects) -> Compiled:
    """A module with the digests of what its compilers read, or why it cannot be used."""
    files = ModuleFiles(name=module.name, ninja=module.file, library=module.library, recipe=recipe)
    read: dict[str, str] = {}
    failed = ""
    made_of = ninja.dependencies(module.build)
    for output in files.objects:
        paths = made_of.get(output)
        if paths is None:
            failed = f"it is not known what {Path(output).name} was compiled from"
        elif strange := asked.strange(paths, module):
            failed = f"{Path(strange).name} is not what FlashInfer generates for this name"
        else:
            found, late = objects.made_of(Path(output), paths)
            failed = failed or (f"{Path(late).name} changed after it was compiled" if late else "")
            read |= found
    log = (module.build.folder / ".ninja_log").read_text(encoding="utf-8", errors="replace")
    spans = ninja.parse_log(log)
    seconds = ninja.busy_seconds(spans[output] for output, _ in files.edges() if output in spans)
    return Compiled(module=files, failed=failed, read={} if failed else read, seconds=seconds)
