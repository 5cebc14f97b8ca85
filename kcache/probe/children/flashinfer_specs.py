"""Child process: asks FlashInfer itself which nvcc modules there are, which ones an API reaches, and how they are built.

Run by path with the Python that has FlashInfer, so that nothing here may import kcache: request as one JSON object on stdin,
answer as JSON in the file that the request names, logs on stderr.

    request  {"answer": FILE, "arch": "90a", "cuda_release": "13.0", "offline": false,
              "kinds": ["sampling"], "modules": ["cascade"], "list": false}
    answer   {"facts": {...}, "kinds": {"sampling": {"modules": [...], "problems": [...], "warnings": [...]}},
              "modules": {"cascade": {...} or {"error": text}}, "list": {...}}

The environment (FLASHINFER_WORKSPACE_BASE, FLASHINFER_CUDA_ARCH_LIST, CUDA_HOME, PATH) is the caller's to set. torch is told
of a GPU that is only described (`described_gpu.py`), before FlashInfer is imported: 0.6.18.post1 asks for device properties while
it is imported, and generators may ask later. Nothing is compiled and nothing is launched here.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import pkgutil
import platform
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

NO_NETWORK = "cannot be built on a host with no network: its setup fetches from a server"

RECIPE = ("jit/core.py", "jit/cpp_ext.py", "jit/env.py", "compilation_context.py")
"""What every module's recipe is made of, inside the flashinfer package."""


class Network:
    """Notes every attempt to reach another host, and refuses it where there is no network: said by the caller, or found out.

    FlashInfer waits between the retries of a download, with growing pauses (`jit/cubin_loader.py`, download_file, 0.7.4): for a
    module of many headers that is ten minutes on a host where no retry can help. After `RETRIES` pauses, each cut to `PAUSE`
    seconds, the network counts as absent for the rest of this process.
    """

    RETRIES, PAUSE = 3, 5.0

    def __init__(self, offline: bool) -> None:
        self.offline = offline
        self.tried = False
        self.pauses = 0
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.getaddrinfo" or (event == "socket.connect" and isinstance(arguments[1], tuple)):
            self.tried = True
            if self.offline:
                raise OSError("no network is allowed in this step")

    @contextlib.contextmanager
    def attempt(self, name: str, problems: dict[str, str]) -> Iterator[None]:
        """Within: any failure becomes a line in `problems` under this name, in other words where the network was asked for."""
        self.tried, sleep = False, time.sleep

        def pause(seconds: Any, /) -> None:
            self.pauses += self.tried
            self.offline = self.offline or self.pauses > self.RETRIES
            if not (self.tried and self.offline):
                sleep(min(seconds, self.PAUSE) if self.tried else seconds)

        time.sleep = pause
        try:
            yield
        except Exception as error:  # noqa: BLE001  FlashInfer's code for one module: the others still count
            traceback.print_exc()
            problems[name] = NO_NETWORK if self.tried else reason(error)
        finally:
            time.sleep = sleep


def reason(error: Exception) -> str:
    """One line for people: class and first line of the message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def facts(package: Path) -> dict[str, str | None]:
    """What FlashInfer and its companions say of themselves."""
    version = importlib.import_module("flashinfer.version")
    commit = getattr(version, "__git_commit__", None) or getattr(version, "__git_version__", None)
    return {
        "flashinfer": version.__version__,
        "flashinfer_root": str(package),
        "flashinfer_commit": commit if commit not in (None, "unknown") else None,
        "tvm_ffi": _version("apache-tvm-ffi"),
        "torch": importlib.import_module("torch").__version__,
        "python": platform.python_version(),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


class Recorder:
    """Remembers every spec that FlashInfer makes, and which files inside the package made it: code, templates, copied sources."""

    def __init__(self, package: Path, core: Any) -> None:
        self.package, self.core = package, core
        self.specs: dict[str, Any] = {}
        self.makers: dict[str, set[str]] = {}
        self.ran: set[str] = set()
        self.ran_for: dict[str, set[str]] = {}
        self.noting: set[str] | None = None
        sys.addaudithook(self._opened)
        register = core.jit_spec_registry.register

        def noted(spec: Any) -> None:
            self._note(spec)
            register(spec)

        core.jit_spec_registry.register = noted

    def _note(self, spec: Any) -> None:
        self.specs[spec.name] = spec
        frame: types.FrameType | None = sys._getframe(1)
        files: set[str] = set()
        while frame is not None:
            files.add(frame.f_code.co_filename)
            frame = frame.f_back
        self.makers[spec.name] = files

    def _opened(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and self.noting is not None and isinstance(arguments[0], str | os.PathLike):
            self.noting.add(os.path.abspath(os.fspath(arguments[0])))  # noqa: PTH100  pathlib costs more, and links stay

    @contextlib.contextmanager
    def profiled(self, ran: set[str]) -> Iterator[None]:
        """Within: notes the file of every Python function that runs and every file that is opened, for generators that write
        sources: they fill in templates and copy sources of the package."""
        sys.setprofile(lambda frame, event, argument: ran.add(frame.f_code.co_filename) if event == "call" else None)
        self.noting = ran
        try:
            yield
        finally:
            self.noting = None
            sys.setprofile(None)

    def inside(self, files: set[str]) -> list[str]:
        """The files below `jit/` and `data/` as sorted paths inside the package."""
        root = str(self.package) + os.sep
        paths = {file[len(root) :].replace(os.sep, "/") for file in files if file.startswith(root)}
        return sorted(path for path in paths if path.startswith("data/") or (path.startswith("jit/") and path.endswith(".py")))

    def is_nvcc(self, spec: Any) -> bool:
        return isinstance(spec, self.core.JitSpecNvcc) if hasattr(self.core, "JitSpecNvcc") else hasattr(spec, "write_ninja")


def generators(network: Network, problems: dict[str, str]) -> dict[str, Callable[[], Any]]:
    """Every `gen_*_module` of `flashinfer.jit` that needs no argument: name -> function."""
    found: dict[str, Callable[[], Any]] = {}
    jit = importlib.import_module("flashinfer.jit")
    for info in pkgutil.walk_packages(jit.__path__, "flashinfer.jit."):
        with network.attempt(info.name, problems):
            for name, function in vars(importlib.import_module(info.name)).items():
                if name.startswith("gen_") and name.endswith("_module") and _no_arguments(function):
                    found.setdefault(name, function)
    return found


def _no_arguments(function: Callable[..., Any]) -> bool:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return inspect.isfunction(function) and all(
        p.default is not p.empty or p.kind in kinds for p in inspect.signature(function).parameters.values()
    )


class Missing:
    """Stands for what a generator failed to make: a spec of no use, and an empty list of specs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def all_modules(network: Network, problems: dict[str, str]) -> None:
    """Runs FlashInfer's own list for its wheels, `flashinfer.aot.gen_all_modules`; one generator that fails costs only itself."""
    aot = importlib.import_module("flashinfer.aot")

    def guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with network.attempt(name, problems):
                return function(*arguments, **options)
            return Missing(f"missing {name}")

        return call

    for module in [aot, *(m for name, m in list(sys.modules.items()) if name.startswith("flashinfer.jit.comm"))]:
        for name, function in list(vars(module).items()):
            ours = name.startswith("gen_") and name != "gen_all_modules" and inspect.isfunction(function)
            if ours and not inspect.isgeneratorfunction(function):
                setattr(module, name, guarded(name, function))
    given = {**aot.get_default_config(), "sm_capabilities": aot.detect_sm_capabilities()}
    wanted = inspect.signature(aot.gen_all_modules).parameters
    aot.gen_all_modules(**{name: given[name.rstrip("_") if name.rstrip("_") in given else name] for name in wanted})


def _run(candidates: dict[str, Callable[[], Any]], network: Network, problems: dict[str, str]) -> None:
    """Calls generators; one that fails costs only itself."""
    for name, function in candidates.items():
        with network.attempt(name, problems):
            function()


def make(names: list[str], recorder: Recorder, network: Network) -> dict[str, str]:
    """Makes the specs of these modules, the cheap way first. Returns problems by generator."""
    problems: dict[str, str] = {}

    def missing() -> list[str]:
        return [name for name in names if name not in recorder.specs and f"gen_{name}_module" not in problems]

    by_name = importlib.import_module("attention_specs").candidates  # beside this file, which Python puts on its path
    for name, functions in by_name(missing()).items():
        with recorder.profiled(recorder.ran_for.setdefault(name, set())):
            _run(functions, network, problems)
    with recorder.profiled(recorder.ran):
        if missing():
            found = generators(network, problems)
            _run(
                {f"gen_{name}_module": found[f"gen_{name}_module"] for name in missing() if f"gen_{name}_module" in found},
                network,
                problems,
            )
            if missing():
                _run(found, network, problems)
        if missing():
            all_modules(network, problems)
    return problems


def write_ninja(names: list[str], recorder: Recorder, network: Network) -> dict[str, Any]:
    """Writes build.ninja for each module: name -> what was written, or {"error": why not}."""
    problems = make(names, recorder, network)
    answer: dict[str, Any] = {}
    for name in names:
        spec = recorder.specs.get(name)
        if spec is None:
            why = problems.get(
                f"gen_{name}_module", "this FlashInfer version has no nvcc module of this name for this architecture"
            )
            answer[name] = {"error": why}
        elif not recorder.is_nvcc(spec):
            answer[name] = {"error": "not built by nvcc"}
        else:
            with network.attempt(name, problems):
                spec.write_ninja()
                answer[name] = _described(spec, recorder)
            answer.setdefault(name, {"error": problems.get(name, "")})
    return answer


def _described(spec: Any, recorder: Recorder) -> dict[str, Any]:
    root = str(recorder.package) + os.sep
    sources = [str(Path(source).resolve()) for source in spec.sources]
    written = [source for source in sources if not source.startswith(root)]
    makers = recorder.inside(recorder.makers[spec.name] | (recorder.ran_for.get(spec.name, recorder.ran) if written else set()))
    return {
        "ninja": str(spec.ninja_path),
        "library": str(getattr(spec, "jit_library_path", None) or spec.ninja_path.parent / f"{spec.name}.so"),
        "sources": sources,
        "recipe": sorted({*RECIPE, *makers}),
    }


def list_modules(recorder: Recorder, network: Network) -> dict[str, Any]:
    """Every nvcc module of this FlashInfer version for this architecture: name -> the files that make it."""
    problems: dict[str, str] = {}
    with recorder.profiled(recorder.ran):
        _run(generators(network, problems), network, problems)
        all_modules(network, problems)
    specs = {name: spec for name, spec in recorder.specs.items() if recorder.is_nvcc(spec)}
    modules = {name: [path for path in recorder.inside(recorder.makers[name]) if path not in RECIPE] for name in sorted(specs)}
    return {"modules": modules, "problems": problems}


def main() -> None:
    request = json.load(sys.stdin)
    arch = request["arch"].rstrip("af")
    network = Network(request.get("offline", False))
    described_gpu = importlib.import_module("described_gpu")  # beside this file, which Python puts on its path
    described_gpu.describe(described_gpu.of_capability(int(arch[:-1]), int(arch[-1])), request["cuda_release"])
    import flashinfer

    package = Path(flashinfer.__file__).resolve().parent
    recorder = Recorder(package, importlib.import_module("flashinfer.jit.core"))
    answer: dict[str, Any] = {"facts": facts(package), "kinds": {}, "modules": {}}
    modules = list(request.get("modules", ()))
    for kind in request.get("kinds", ()):
        reach = importlib.import_module(f"{kind}_reach").reach
        answer["kinds"][kind] = reach(recorder)
        modules += answer["kinds"][kind]["modules"]
    if modules:
        answer["modules"] = write_ninja(list(dict.fromkeys(modules)), recorder, network)
    if request.get("list"):
        answer["list"] = list_modules(recorder, network)
    temporary = Path(request["answer"] + ".part")
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    temporary.replace(request["answer"])


if __name__ == "__main__":
    main()
