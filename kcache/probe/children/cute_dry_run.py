"""Child process: an operation's CuTe-DSL kernels for a described GPU, named, compiled or checked, with nothing launched.

FlashInfer's public API runs as it is, on tensors without bytes, and asks for its kernels as it would on the GPU. Modes:

names   which kernels would be asked for; nothing is compiled.
build   the same, then each kernel is compiled and exported by FlashInfer itself (`JitSpecCuteDsl.compile_and_persist`, which
        it keeps for "parallel precompilation workers", 0.6.18 to 0.7.4), in processes forked from this one after the
        import (`forked.py`): a kernel that fails, crashes or hangs loses only itself.
check   FlashInfer's own `build_and_load` looks for each kernel on disk; its compiler is trapped and every use of it counted.

What is called is the operation's: `<operation>_calls.py` beside this script (see `OPERATION`).

Run by path (`PYTHON cute_dry_run.py`) with any Python >= 3.10 that has flashinfer; needs only that, the standard library and
the scripts beside it. The request is one JSON object on stdin (see `REQUEST`), the answer a JSON file named in it; logs and
progress lines (`kcache-progress {json}`) go to stderr. The answer is always written, also when this FlashInfer version is not
as expected: then `error` says what was asked for and not found.

It is no proof that a kernel runs: nothing is launched. The names are right as far as the description of the GPU is.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

REQUEST = {
    "mode": "names, build or check",
    "operation": "b12x, ...: whose calls",
    "answer": "file to write",
    "workspace": "FLASHINFER_WORKSPACE_BASE of the run",
    "gpu": "see described_gpu.FIELDS",
    "cuda": "CUDA release of the target, such as 13.0",
    "cute_dsl_arch": "CUTE_DSL_ARCH of the run, such as sm_120a",
    "arch_list": "FLASHINFER_CUDA_ARCH_LIST of the run, such as 12.0f",
    "jobs": "processes that compile at a time (build)",
    "seconds_per_kernel": "limit, after which a kernel's process is killed (build)",
    "only": "names of kernels to build, or null for all (build)",
    "cases": "list of the operation's CASE: `id` and `tokens` (token counts, in the order of the calls) are this script's too",
}
OPERATION = {
    "LABEL": "what people call it",
    "NEEDS": "module of FlashInfer -> names that it must have; all are imported, in this order, before anything is called",
    "CASE": "what a case holds",
    "patch": "(run): answers what only a GPU would",
    "forget": "(): empties FlashInfer's in-process tables, so that the next call asks the disk cache again",
    "calls": "(case) -> a function of a token count that makes one call of the public API",
    "walk": "(case, run, make_calls) -> errors: makes the calls of a case, once or under several conditions",
}


class Assumption(Exception):
    """This FlashInfer is not as this script expects; the message says what was asked for."""


class _Nothing:
    """Stands in for a compiled kernel: may be called, asked for anything, and does nothing."""

    def __call__(self, *args: object, **kwargs: object) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _need(thing: Any, names: tuple[str, ...], where: str) -> None:
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise Assumption(f"{where} has no {', '.join(missing)}")


class Run:
    """What one run found out; all the state that the patches write to."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.case = ""
        self.tokens = 0
        self.fallback = False
        self.inside = False
        self.specs: dict[str, Any] = {}
        self.asked: dict[str, dict[str, Any]] = {}
        self.modules: dict[str, dict[str, Any]] = {}
        self.hashed: dict[str, tuple[str, ...]] = {}
        self.not_persisted: dict[str, dict[str, Any]] = {}
        self.triton: dict[str, list[str]] = {}
        self.compiles: list[str] = []
        self.log: list[str] = []

    def ask(self, spec: Any) -> dict[str, Any]:
        """A kernel of FlashInfer's disk cache was asked for, in the present case."""
        self.specs[spec.name] = spec
        self._meet_module(spec)
        entry = self.asked.setdefault(
            spec.name,
            {
                "name": spec.name,
                "kernel": spec.kernel_name,
                "module": spec.module_dir.name,
                "object": str(spec.object_path),
                "fallback": self.fallback,
                "cases": {},
            },
        )
        if self.tokens not in (counts := entry["cases"].setdefault(self.case, [])):
            counts.append(self.tokens)
        return entry

    def _meet_module(self, spec: Any) -> None:
        """All kernels of one module must expect one `meta.json`: else each deletes what the other has built."""
        sources = self.hashed.get(spec.expected_meta["source_sha256"])
        if sources is None:
            raise Assumption(f"{spec.name} is keyed on a digest that FlashInfer's _hash_source_files did not make")
        module = {"meta": spec.expected_meta, "key_files": list(sources)}
        if self.modules.setdefault(spec.module_dir.name, module)["meta"] != spec.expected_meta:
            raise Assumption(f"two kernels of {spec.module_dir.name} expect different meta.json files")

    def met_triton(self, name: str) -> None:
        self.triton.setdefault(name, [])
        if self.case not in self.triton[name]:
            self.triton[name].append(self.case)

    def met_compile(self, function: Any) -> None:
        """`cute.compile` was called outside FlashInfer's disk cache: this kernel is compiled in every process."""
        name = getattr(function, "__name__", None) or type(function).__name__
        frame: Any = sys._getframe(2)
        while frame and "flashinfer" not in frame.f_code.co_filename:
            frame = frame.f_back
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" if frame else "unknown"
        entry = self.not_persisted.setdefault(f"{name} ({where})", {"kernel": name, "where": where, "cases": {}})
        if self.tokens not in (counts := entry["cases"].setdefault(self.case, [])):
            counts.append(self.tokens)


def _beside(name: str) -> Any:
    """A module that lies beside this script (which is run by path, and is in no package that could be imported)."""
    if name not in sys.modules:
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        importlib.import_module(name)
        sys.path.pop(0)
    return sys.modules[name]


def _import(request: dict[str, Any], run: Run, operation: Any) -> tuple[Any, str]:
    """Describe the GPU, import FlashInfer, and check what the patches and the operation lean on."""
    os.environ["FLASHINFER_WORKSPACE_BASE"] = request["workspace"]
    os.environ["CUTE_DSL_ARCH"] = request["cute_dsl_arch"]
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = request["arch_list"]
    os.environ.pop("FLASHINFER_CUTE_DSL_DISABLE_CACHE", None)
    described_gpu = _beside("described_gpu")
    described_gpu.install(request["gpu"], request["cuda"])
    described_gpu.install_cute_dsl(request["gpu"])
    import flashinfer
    import flashinfer.jit.cute_dsl_core as core

    wanted = ("build_and_load", "build", "compile_and_persist", "try_load", "load", "is_compiled")
    _need(core.JitSpecCuteDsl, wanted, "flashinfer.jit.cute_dsl_core.JitSpecCuteDsl")
    _need(core, ("build_and_load_cute_dsl_kernel", "_read_meta", "_hash_source_files"), "flashinfer.jit.cute_dsl_core")
    with described_gpu.triton_recorded(run.met_triton) as triton:
        for name, names in operation.NEEDS.items():
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                raise Assumption(
                    f"flashinfer {flashinfer.__version__} has no {operation.LABEL} that can be imported: {error}"
                ) from error
            _need(module, names, name)
    return core, triton


def _patch(run: Run, core: Any) -> None:
    """Put this run between FlashInfer and its compiler."""
    from cutlass import cute

    compile_type: Any = type(cute.compile)
    real_compile = compile_type.__call__

    def compile_(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if run.inside:
            return real_compile(self, function, *args, **kwargs)
        run.met_compile(function)
        return _Nothing()

    compile_type.__call__ = compile_
    real_hash = core._hash_source_files

    def hash_(paths: tuple[str, ...]) -> str:
        found = str(real_hash(paths))
        run.hashed.setdefault(found, tuple(map(os.fspath, paths)))
        return found

    core._hash_source_files = hash_
    spec_type: Any = core.JitSpecCuteDsl
    if run.request["mode"] != "check":

        def ask(spec: Any) -> Any:
            run.ask(spec)
            return _Nothing()

        spec_type.build_and_load = ask
        return
    real = spec_type.build_and_load

    def trapped(spec: Any) -> None:
        run.compiles.append(spec.name)

    def check(spec: Any) -> Any:
        entry, before, error = run.ask(spec), len(run.compiles), ""
        try:
            real(spec)
        except Exception as raised:  # noqa: BLE001 -- such as a lock that may not be written: FlashInfer does not take the kernel
            error = _beside("answers").plain(raised)
        if "accepted" not in entry or error or len(run.compiles) > before:
            entry["accepted"] = not error and len(run.compiles) == before
            entry["reason"] = "" if entry["accepted"] else error or _why_not(spec, core)
        return _Nothing()

    spec_type.build = trapped
    spec_type.load = lambda spec: _Nothing()
    spec_type.build_and_load = check
    _beside("compiler_doors").close(run.compiles)


def _why_not(spec: Any, core: Any) -> str:
    """Why FlashInfer would compile this kernel again, by its own rule (`JitSpecCuteDsl.try_load`)."""
    if not spec.object_path.exists():
        return "object is not there"
    found = core._read_meta(spec.meta_path)
    if not isinstance(found, dict):
        return "meta.json is not there, or is not JSON"
    differing = [key for key in sorted({*found, *spec.expected_meta}) if found.get(key) != spec.expected_meta.get(key)]
    return f"meta.json differs in {', '.join(differing)}" if differing else "object could not be loaded"


def _make_calls(case: dict[str, Any], run: Run, operation: Any) -> list[dict[str, Any]]:
    """All calls of one case; an error ends them and is returned."""
    run.tokens = 0
    with _beside("described_gpu").OnMeta():
        try:
            call = operation.calls(case)
            for run.tokens in case["tokens"]:
                operation.forget()
                call(run.tokens)
        except Assumption:
            raise
        except Exception as error:  # noqa: BLE001 -- whatever the library raises is an answer to report, never the end of the other cases
            return [{"tokens": run.tokens, "error": _beside("answers").plain(error), "trace": _beside("answers").trace()}]
    return []


def _run_case(case: dict[str, Any], run: Run, operation: Any) -> dict[str, Any]:
    """One case, all its token counts."""
    run.case, run.fallback = case["id"], False
    errors = operation.walk(case, run, lambda some: _make_calls(some, run, operation))
    kernels = sorted(name for name, entry in run.asked.items() if case["id"] in entry["cases"])
    return {"id": case["id"], "status": "error" if errors else "ok", "errors": errors, "kernels": kernels}


def _compile(spec: Any, run: Run) -> dict[str, Any]:
    """In a worker: compile and export one kernel."""
    run.log.clear()
    if spec.is_compiled:  # a run that was broken off, or another host's share; objects appear whole, with meta.json after them
        return {"status": "present", "error": ""}
    try:
        spec.compile_and_persist()
    except Exception as error:  # noqa: BLE001 -- one kernel's failure is its result
        return {"status": "failed", "error": _beside("answers").plain(error)}
    if not spec.object_path.exists():
        return {"status": "failed", "error": "; ".join(run.log[-2:]) or "compiled, but not exported"}
    return {"status": "built", "error": ""}


def _kind(name: str) -> str:
    """Kernels of one kind are traced from the same Python functions, which CuTe-DSL rewrites once in a process (over 0.5 s)."""
    return name.partition("/")[2].partition("_")[0]


def _cost(name: str) -> int:
    """Of the b12x kernels dynamic ones take longest to compile, then static ones; what takes longest goes first."""
    return [kind in name for kind in ("/dynamic_", "/static_", "")].index(True)


def _build(run: Run) -> None:
    """Compile every kernel that was asked for (or of `only`); results go into `run.asked`."""
    only = run.request.get("only")
    wanted = sorted((name for name in run.asked if only is None or name in only), key=_cost)
    for entry in run.asked.values():
        entry.update(status="skipped", seconds=0.0, error="")
    finished: list[str] = []

    def job(name: str) -> dict[str, Any]:
        run.inside = True
        return _compile(run.specs[name], run)

    def done(name: str, result: dict[str, Any]) -> None:
        finished.append(name)
        run.asked[name].update(result)
        event = {"done": len(finished), "total": len(wanted), "kernel": name, "status": result["status"]}
        print("kcache-progress", json.dumps(event), file=sys.stderr, flush=True)

    forked = _beside("forked")
    jobs, limit = int(run.request["jobs"]), float(run.request["seconds_per_kernel"])
    forked.run(wanted, job, jobs=jobs, limit=limit, done=done, kind=_kind)


def _finish(run: Run) -> list[dict[str, Any]]:
    """The kernels, with the size and digest of each object that lies on disk."""
    for entry in run.asked.values():
        try:
            data = Path(entry["object"]).read_bytes()
        except OSError:
            continue
        entry["size"], entry["sha256"] = len(data), "sha256:" + hashlib.sha256(data).hexdigest()
    return [run.asked[name] for name in sorted(run.asked)]


def _stack() -> dict[str, str]:
    """The compiler and what FlashInfer keys its kernels on beside it: normalised name -> version, the first of a name."""
    from importlib.metadata import distributions

    found: dict[str, str] = {}
    for one in distributions():
        name = re.sub(r"[-_.]+", "-", one.metadata["Name"] or "").lower()
        if name in ("torch", "apache-tvm-ffi", "triton") or name.startswith("nvidia-cutlass-dsl"):
            found.setdefault(name, one.version)
    return found


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what the request says."""
    started = time.monotonic()
    run = Run(request)
    operation = _beside(f"{request['operation']}_calls")
    core, triton = _import(request, run, operation)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: run.log.append(record.getMessage())  # type: ignore[method-assign]
    core.logger.addHandler(handler)
    imported = time.monotonic()
    _patch(run, core)
    operation.patch(run)
    cases = [_run_case(case, run, operation) for case in request["cases"]]
    walked = time.monotonic()
    if request["mode"] == "build":
        _build(run)
    import flashinfer

    return {
        "flashinfer": flashinfer.__version__,
        "package": os.path.dirname(flashinfer.__file__),  # noqa: PTH120 -- spelt as FlashInfer spells it: that text is hashed
        "python": {"cache_tag": sys.implementation.cache_tag, "soabi": sysconfig.get_config_var("SOABI")},
        "stack": _stack(),
        "jit_dir": str(core.jit_env.FLASHINFER_JIT_DIR),
        "modules": run.modules,
        "triton": triton,
        "kernels": _finish(run),
        "not_persisted": [run.not_persisted[name] for name in sorted(run.not_persisted)],
        "triton_kernels": [{"kernel": name, "cases": cases} for name, cases in sorted(run.triton.items())],
        "cases": cases,
        "compiles": len(run.compiles),
        "seconds": {
            "import": round(imported - started, 3),
            "walk": round(walked - imported, 3),
            "build": round(time.monotonic() - walked, 3),
        },
    }


def main() -> int:
    return int(
        _beside("answers").serve(
            answer,
            lambda request: {"asked": [{"case": case["id"], "tokens": case["tokens"]} for case in request.get("cases", [])]},
        )
    )


if __name__ == "__main__":
    sys.exit(main())
