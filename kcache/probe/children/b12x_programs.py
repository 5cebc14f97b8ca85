"""Child process: programs of the package b12x (fused MoE) for a described GPU, named, compiled or checked, with nothing launched.

b12x itself declares what to compile: an execution plan of `moe.fused_moe` gives, for each configuration of its contract
(`preparation/catalog.py`), jobs that hold metadata only (`_lib/compile_pool.py`, CompileJob). Weights are tensors without bytes.
The package is imported as `b12x`: PyPI's, or the one inside FlashInfer (`flashinfer/experimental/b12x`) where that is not
installed. Modes:

names   which programs each plan needs; nothing is compiled.
build   the same, then each job runs in a process that describes its GPU as b12x's own compiler workers do
        (`_initialize_worker`, `_run_job`). The processes are forked from this one (`forked.py`) instead of b12x's pool, which
        stops at the first job that fails.
check   a `PreparationSession` of b12x that may use caches only prepares every plan: its compile step looks for every program,
        and loads each. Or (`untuned`) one as b12x makes it for a plan that nobody prepared: no tuning, no workers, programs
        resolved as they are used. Compilers (CuTe-DSL's, Triton's) are trapped and counted. The GPU is described by
        `described_gpu.py` here, not by b12x's worker code: what is checked is what a server would compute.

Run by path with any Python >= 3.10 that has b12x, torch and triton; needs only these, the standard library and `b12x_plans.py`,
`described_gpu.py` and `forked.py` beside it. The request is one JSON object on stdin (see `REQUEST`), the answer a JSON file
named in it; logs and progress lines (`kcache-progress {json}`) go to stderr. The answer is always written; `error` says what
failed.

It is no proof that a program runs: nothing is launched.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

REQUEST = {
    "mode": "names, build or check",
    "answer": "file to write",
    "compile_cache": "B12X_COMPILE_CACHE_DIR of the run, or null to leave it to the environment",
    "triton_cache": "TRITON_CACHE_DIR of the run, or null to leave it to the environment",
    "gpu": "see described_gpu.FIELDS",
    "cuda": "CUDA release of the target, such as 13.0, or null for that of the installed torch",
    "configurations": "default (those that b12x takes untuned) or all (every candidate of its tuning too)",
    "untuned": "true for sessions that do not tune (check)",
    "jobs": "processes that compile at a time (build)",
    "seconds_per_job": "limit, after which a job's process is killed (build)",
    "only": "keys of programs to build, or null for all (build)",
    "cases": "list of CASE",
}
CASE = {
    "id": "name in the answer",
    "experts": "held by the rank",
    "top_k": "experts of a token",
    "hidden": "hidden size",
    "inter": "intermediate size of one expert on one rank",
    "activation": "silu, relu2, situ, swigluoai_uninterleave",
    "swiglu": "{alpha, beta, limit}, or null for b12x's own",
    "source": "modelopt_nvfp4, fp4_e8m0_k32: b12x's PackedSourceFormat",
    "mode": "a4, a8, a16, auto: b12x's ActivationMode",
    "w13_layout": "w13 or w31: order of the halves of the first projection in the checkpoint",
    "scales": "per_expert, shared (one for all) or uniform (one each, equal and never changed): the activations' scales",
    "logits": "dtype of the router's logits: float32, bfloat16, float16",
    "maximum": "most tokens of a call",
    "tokens": "token counts that have a plan of their own",
}


def _beside(name: str) -> Any:
    """A module that lies beside this script (which is run by path, and is in no package that could be imported)."""
    if name not in sys.modules:
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        importlib.import_module(name)
        sys.path.pop(0)
    return sys.modules[name]


class Run:
    """What one run found out."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.jobs: dict[str, Any] = {}
        """Name of a job -> b12x's CompilationPlan."""
        self.programs: dict[str, dict[str, Any]] = {}
        self.compiles: list[str] = []
        self.loads: list[str] = []

    def ask(self, plan: Any, case: str, tokens: int, default: bool) -> None:
        """A job that a plan needs, with its programs."""
        name = hashlib.sha256(repr(plan.job).encode()).hexdigest()[:16]
        self.jobs.setdefault(name, plan)
        for program in plan.programs:
            entry = self.programs.setdefault(
                f"{program.dialect}:{program.key}",
                {"dialect": program.dialect, "key": program.key, "name": program.name, "default": False, "cases": {}, "jobs": []},
            )
            entry["default"] = entry["default"] or default
            if name not in entry["jobs"]:
                entry["jobs"].append(name)
            if tokens not in (counts := entry["cases"].setdefault(case, [])):
                counts.append(tokens)


def _name_case(case: dict[str, Any], run: Run) -> dict[str, Any]:
    """Every program of one case; what b12x refuses is returned, and ends the case."""
    beside, pool = _beside("b12x_plans"), importlib.import_module("b12x._lib.compile_pool")
    device = importlib.import_module("b12x.preparation.device").detect_device()
    tokens, counted = 0, 0
    try:
        with beside.without_bytes():
            plans = beside.plans_of(case)
        for tokens, plan in plans.items():
            for config, default in beside.configurations_of(plan, device, run.request["configurations"]):
                counted += 1
                for job in plan._compile_jobs(config, device):
                    run.ask(pool.describe_compilation(job), case["id"], tokens, default)
    except Exception as error:  # noqa: BLE001 -- whatever the library raises is an answer to report, never the end of the other cases
        return {"id": case["id"], "configurations": counted, "errors": [_error(tokens, error)]}
    return {"id": case["id"], "configurations": counted, "errors": []}


def _error(tokens: int, error: BaseException) -> dict[str, Any]:
    return {"tokens": tokens, "error": _beside("answers").plain(error), "trace": _beside("answers").trace()}


def _available(run: Run) -> dict[str, bool]:
    """Program -> whether b12x itself finds its artifact on disk."""
    plan = importlib.import_module("b12x._lib.compile_plan")
    keys = {f"{p.dialect}:{p.key}": p for job in run.jobs.values() for p in job.programs}
    return {name: bool(plan.compiled_program_available(program)) for name, program in keys.items()}


def _build(run: Run) -> None:
    """Compile what is not there yet; results go into `run.programs`."""
    only = run.request.get("only")
    there = _available(run)
    wanted: list[str] = []
    taken: set[str] = set()
    for name, plan in run.jobs.items():
        missing = {
            f"{program.dialect}:{program.key}"
            for program in plan.programs
            if not there[f"{program.dialect}:{program.key}"] and (only is None or program.key in only)
        }
        if missing - taken:
            taken |= missing
            wanted.append(name)
    for name, entry in run.programs.items():
        entry.update(status="present" if there[name] else "skipped", seconds=0.0, error="")
    results: dict[str, dict[str, Any]] = {}
    pool = importlib.import_module("b12x._lib.compile_pool")
    evict = importlib.import_module("b12x._lib.compile_plan").evict_planning_artifacts
    import pickle

    def job(name: str) -> dict[str, Any]:
        plan = run.jobs[name]
        evict()  # what planning left in b12x's tables stands for programs, and would be taken for compiled ones
        try:
            _, cute, triton, _ = pool._run_job(pickle.dumps(plan.job, protocol=5), plan.programs)
        except Exception as error:  # noqa: BLE001 -- one job's failure is its result
            return {"status": "failed", "error": _beside("answers").plain(error)}
        return {"status": "built", "error": "", "compilations": cute + triton}

    def done(name: str, result: dict[str, Any]) -> None:
        results[name] = result
        event = {"done": len(results), "total": len(wanted), "kernel": name, "status": result["status"]}
        print("kcache-progress", json.dumps(event), file=sys.stderr, flush=True)

    # What takes longest goes first: dynamic kernels, then the others, then Triton's.
    wanted.sort(key=lambda name: _cost(run.jobs[name]))
    forked = _beside("forked")
    forked.run(wanted, job, jobs=int(run.request["jobs"]), limit=float(run.request["seconds_per_job"]), done=done)
    now = _available(run)
    for name, entry in run.programs.items():
        if entry["status"] == "present":
            continue
        tried = [results[job] for job in entry["jobs"] if job in results]
        entry["seconds"] = max((result["seconds"] for result in tried), default=0.0)
        if now[name]:
            entry["status"] = "built"
        elif tried:
            bad = [result for result in tried if result["status"] != "built"] or [{"status": "failed", "error": "not exported"}]
            entry["status"], entry["error"] = bad[0]["status"], bad[0]["error"]


def _cost(plan: Any) -> int:
    names = " ".join(program.name for program in plan.programs)
    return 0 if "dynamic" in names else 1 if any(program.dialect == "cute" for program in plan.programs) else 2


def _check(run: Run) -> list[dict[str, Any]]:
    """Prepare every plan in every configuration by a session that may use caches only."""
    program_cache: Any = importlib.import_module("b12x._lib.program_cache")
    program_cache.stack_limit_bytes = lambda: None
    return [_check_case(case, run) for case in run.request["cases"]]


def _check_case(case: dict[str, Any], run: Run) -> dict[str, Any]:
    from dataclasses import replace

    preparation = importlib.import_module("b12x.preparation")
    beside, pool = _beside("b12x_plans"), importlib.import_module("b12x._lib.compile_pool")
    device = importlib.import_module("b12x.preparation.device").detect_device()
    tokens, found = 0, {"id": case["id"], "configurations": 0, "prepared": 0, "missing": [], "errors": []}
    try:
        with _beside("described_gpu").OnMeta():
            plans = beside.plans_of(case)
            for tokens, plan in plans.items():
                for config, default in beside.configurations_of(plan, device, run.request["configurations"]):
                    found["configurations"] += 1
                    for job in plan._compile_jobs(config, device):
                        run.ask(pool.describe_compilation(job), case["id"], tokens, default)
                    pinned = replace(plan, override=config)
                    options = {"autotune": False, "compile_workers": 0} if run.request.get("untuned") else {"cache_only": True}
                    session = preparation.PreparationSession(**options)
                    found["prepared"] += _prepare(preparation, session, pinned, tokens, found)
    except Exception as error:  # noqa: BLE001 -- whatever the library raises is an answer to report, never the end of the other cases
        found["errors"].append(_error(tokens, error))
    return found


def _prepare(preparation: Any, session: Any, plan: Any, tokens: int, found: dict[str, Any]) -> int:
    """One plan through a session of its own, to the end: compile step, loading, priming (of nothing). 1 if it got there."""
    request = plan.request(name=f"m{tokens}", prepare_call=lambda state: preparation.PreparedCall(run=lambda: None))
    try:
        result = session.prepare((request,))
        return int(result.compilation is None and plan.prepared is not None)
    except Exception as error:  # noqa: BLE001 -- a refusal is the answer
        found["missing"].append({"tokens": tokens, "error": _beside("answers").plain(error), "trace": _beside("answers").trace()})
        return 0
    finally:
        session.close()


def _finish(run: Run) -> list[dict[str, Any]]:
    """The programs, with where b12x keeps each."""
    compiler = importlib.import_module("b12x._lib.compiler")
    knobs: Any = importlib.import_module("triton").knobs
    for entry in run.programs.values():
        if entry["dialect"] == "cute":
            path = compiler._cache_object_path(entry["key"])
        else:
            path = Path(knobs.cache.dir) / _triton_directory(entry["key"])
        entry["path"] = str(path)
        try:
            entry["size"] = (
                path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.iterdir() if p.is_file())
            )
        except OSError:
            entry["size"] = 0
    return [run.programs[name] for name in sorted(run.programs)]


def _triton_directory(key: str) -> str:
    """Triton's own spelling of a key in the file system."""
    get_cache_manager: Any = importlib.import_module("triton.runtime.cache").get_cache_manager
    return Path(get_cache_manager(key).cache_dir).name


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what the request says."""
    started = time.monotonic()
    run = Run(request)
    for variable, field in (("B12X_COMPILE_CACHE_DIR", "compile_cache"), ("TRITON_CACHE_DIR", "triton_cache")):
        if request.get(field):
            os.environ[variable] = request[field]
    checking = request["mode"] == "check"
    beside = _beside("b12x_plans")
    (beside.describe_as_server if checking else beside.describe_as_worker)(request["gpu"], request.get("cuda"))
    b12x = importlib.import_module("b12x")
    compiler = importlib.import_module("b12x._lib.compiler")
    if checking:
        beside.trap(run.compiles, run.loads)
    imported = time.monotonic()
    cases = _check(run) if checking else [_name_case(case, run) for case in request["cases"]]
    walked = time.monotonic()
    if request["mode"] == "build":
        _build(run)
    elif checking:
        there = _available(run)
        for name, entry in run.programs.items():
            entry.update(status="found" if there[name] else "missing", error="")
    from cutlass import cute

    (fingerprint, toolchain, arch, options, environment) = compiler._device_compile_cache_context(cute.compile)
    return {
        "package": str(compiler._PACKAGE_ROOT),
        "version": str(getattr(b12x, "__version__", "")),
        "compile_cache": str(compiler._cute_compile_cache_dir()),
        "triton_cache": str(importlib.import_module("triton").knobs.cache.dir),
        "context": {
            "package_fingerprint": fingerprint,
            "toolchain": toolchain,
            "device_arch": arch,
            "compile_options": options,
            "compile_environment": environment,
        },
        "programs": _finish(run),
        "cases": cases,
        "jobs": len(run.jobs),
        "compiles": run.compiles,
        "loads": len(run.loads),
        "seconds": {
            "import": round(imported - started, 3),
            "walk": round(walked - imported, 3),
            "build": round(time.monotonic() - walked, 3),
        },
    }


def main() -> int:
    return int(_beside("answers").serve(answer, lambda request: {}))


if __name__ == "__main__":
    sys.exit(main())
