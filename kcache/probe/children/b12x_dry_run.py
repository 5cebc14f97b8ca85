"""Child process: FlashInfer's b12x MoE kernels for a described GPU, named, compiled or checked, with nothing launched.

FlashInfer's public API runs as it is, on tensors without bytes, and asks for its kernels as it would on the GPU. Modes:

names   which kernels would be asked for; nothing is compiled.
build   the same, then each kernel is compiled and exported by FlashInfer itself (`JitSpecCuteDsl.compile_and_persist`, which
        it keeps for "parallel precompilation workers", 0.6.18 to 0.7.4), in processes forked from this one after the
        import (`forked.py`): a kernel that fails, crashes or hangs loses only itself.
check   FlashInfer's own `build_and_load` looks for each kernel on disk; its compiler is trapped and every use of it counted.

Run by path (`PYTHON b12x_dry_run.py`) with any Python >= 3.10 that has flashinfer; needs only that, the standard library and
`described_gpu.py` and `forked.py` beside it. The request is one JSON object on stdin (see `REQUEST`), the answer a JSON file
named in it; logs and progress lines (`kcache-progress {json}`) go to stderr. The answer is always written, also when this
FlashInfer version is not as expected: then `error` says what was asked for and not found.

It is no proof that a kernel runs: nothing is launched. The names are right as far as the description of the GPU is.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import logging
import os
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

REQUEST = {
    "mode": "names, build or check",
    "answer": "file to write",
    "workspace": "FLASHINFER_WORKSPACE_BASE of the run",
    "gpu": "see described_gpu.FIELDS",
    "cuda": "CUDA release of the target, such as 13.0",
    "cute_dsl_arch": "CUTE_DSL_ARCH of the run, such as sm_120a",
    "arch_list": "FLASHINFER_CUDA_ARCH_LIST of the run, such as 12.0f",
    "jobs": "processes that compile at a time (build)",
    "seconds_per_kernel": "limit, after which a kernel's process is killed (build)",
    "only": "names of kernels to build, or null for all (build)",
    "cases": "list of CASE",
}
CASE = {
    "id": "name in the answer",
    "experts": "of the model",
    "local_experts": "held by one rank; below `experts` with expert parallelism",
    "top_k": "experts of a token",
    "hidden": "hidden size",
    "inter": "intermediate size of one expert on one rank",
    "activation": "silu, gelu_tanh, swigluoai_uninterleave, relu2",
    "swiglu": "{alpha, beta, limit} of swigluoai_uninterleave, or null for FlashInfer's own",
    "quant": "nvfp4, mxfp4, w4a16",
    "scales": "per_expert or shared: how the engine passes the activation scales",
    "calls": "wrapper (B12xMoEWrapper with CUDA graph buffers for `maximum`) or function (b12x_fused_moe)",
    "maximum": "most tokens of a call",
    "tokens": "token counts, in the order in which the engine makes its calls",
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
        self.not_persisted: dict[str, dict[str, Any]] = {}
        self.triton: dict[str, list[str]] = {}
        self.compiles: list[str] = []
        self.log: list[str] = []

    def ask(self, spec: Any) -> dict[str, Any]:
        """A kernel of FlashInfer's disk cache was asked for, in the present case."""
        self.specs[spec.name] = spec
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


def _import(request: dict[str, Any], run: Run) -> tuple[Any, Any, Any, str]:
    """Describe the GPU, import FlashInfer, and check what the patches lean on."""
    os.environ["FLASHINFER_WORKSPACE_BASE"] = request["workspace"]
    os.environ["CUTE_DSL_ARCH"] = request["cute_dsl_arch"]
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = request["arch_list"]
    os.environ.pop("FLASHINFER_CUTE_DSL_DISABLE_CACHE", None)
    described_gpu = _beside("described_gpu")
    described_gpu.install(request["gpu"], request["cuda"])
    described_gpu.install_cute_dsl(request["gpu"])
    import flashinfer
    import flashinfer.jit.cute_dsl_core as core

    here = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x"
    with described_gpu.triton_recorded(run.met_triton) as triton:
        try:
            dispatch = importlib.import_module(f"{here}.moe_dispatch")
            importlib.import_module(f"{here}.triton_compact")
            b12x_moe = importlib.import_module("flashinfer.fused_moe.cute_dsl.b12x_moe")
        except ImportError as error:
            raise Assumption(f"flashinfer {flashinfer.__version__} has no b12x MoE that can be imported: {error}") from error
    wanted = ("build_and_load", "build", "compile_and_persist", "try_load", "load", "is_compiled")
    _need(core.JitSpecCuteDsl, wanted, "flashinfer.jit.cute_dsl_core.JitSpecCuteDsl")
    _need(core, ("build_and_load_cute_dsl_kernel", "_read_meta"), "flashinfer.jit.cute_dsl_core")
    _need(b12x_moe, ("B12xMoEWrapper", "b12x_fused_moe"), "flashinfer.fused_moe.cute_dsl.b12x_moe")
    _need(dispatch, ("clear_sm120_moe_caches",), f"{here}.moe_dispatch")
    return core, b12x_moe, dispatch, triton


def _patch(run: Run, core: Any, dispatch: Any) -> None:
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
    spec_type: Any = core.JitSpecCuteDsl
    if run.request["mode"] == "check":
        real = spec_type.build_and_load

        def trapped(spec: Any) -> None:
            run.compiles.append(spec.name)

        def check(spec: Any) -> Any:
            entry, before = run.ask(spec), len(run.compiles)
            real(spec)
            if "accepted" not in entry or len(run.compiles) > before:
                entry["accepted"] = len(run.compiles) == before
                entry["reason"] = "" if entry["accepted"] else _why_not(spec, core)
            return _Nothing()

        spec_type.build = trapped
        spec_type.load = lambda spec: _Nothing()
        spec_type.build_and_load = check
    else:

        def ask(spec: Any) -> Any:
            run.ask(spec)
            return _Nothing()

        spec_type.build_and_load = ask
    if hasattr(dispatch, "compiled_direct_micro_accepts_block_dim"):
        # On a GPU, the compiled kernel's register count answers. Both answers are walked: see `_run_case`.
        dispatch.compiled_direct_micro_accepts_block_dim = lambda compiled, block: not run.fallback


def _why_not(spec: Any, core: Any) -> str:
    """Why FlashInfer would compile this kernel again, by its own rule (`JitSpecCuteDsl.try_load`)."""
    if not spec.object_path.exists():
        return "object is not there"
    found = core._read_meta(spec.meta_path)
    if not isinstance(found, dict):
        return "meta.json is not there, or is not JSON"
    differing = [key for key in sorted({*found, *spec.expected_meta}) if found.get(key) != spec.expected_meta.get(key)]
    return f"meta.json differs in {', '.join(differing)}" if differing else "object could not be loaded"


def _scale_blocks(experts: int, rows: int, columns: int, vector: int) -> Any:
    """Block scales without bytes, in the 6-D layout that `convert_sf_to_mma_layout` gives."""
    import torch

    kind = torch.float8_e4m3fn if vector == 16 else torch.float8_e8m0fnu
    tiles = (experts, -(-rows // 128), -(-(columns // vector) // 4), 32, 4, 4)
    return torch.empty(tiles, dtype=kind, device="cuda").permute(3, 4, 1, 5, 2, 0)


def _weights(case: dict[str, Any]) -> dict[str, Any]:
    """The weight arguments of one layer on one rank."""
    import torch

    experts, hidden, inter = case["local_experts"], case["hidden"], case["inter"]
    branches = 1 if case["activation"] == "relu2" else 2
    vector = 32 if case["quant"] == "mxfp4" else 16
    alpha = torch.empty(experts, dtype=torch.float32, device="cuda")
    weights = {
        "w1_weight": torch.empty(experts, branches * inter, hidden // 2, dtype=torch.uint8, device="cuda"),
        "w1_weight_sf": _scale_blocks(experts, branches * inter, hidden, vector),
        "w2_weight": torch.empty(experts, hidden, inter // 2, dtype=torch.uint8, device="cuda"),
        "w2_weight_sf": _scale_blocks(experts, hidden, inter, vector),
        "w1_alpha": alpha,
        "w2_alpha": torch.empty(experts, dtype=torch.float32, device="cuda"),
        "fc2_input_scale": None,
    }
    if case["quant"] == "nvfp4":
        size = experts if case["scales"] == "per_expert" else 1
        weights["fc2_input_scale"] = torch.empty(size, dtype=torch.float32, device="cuda")
        if case["scales"] == "shared":
            weights["input_global_scale"] = torch.empty(1, dtype=torch.float32, device="cuda")
    return weights


def _options(case: dict[str, Any], function: Any) -> dict[str, Any]:
    """The options of a call, refused by name where this FlashInfer's function does not have one that the case needs."""
    import torch

    options: dict[str, Any] = {"activation": case["activation"], "quant_mode": case["quant"]}
    for name, value in (case.get("swiglu") or {}).items():
        options[f"swiglu_{name}"] = value
    if case["local_experts"] != case["experts"]:
        local, total = case["local_experts"], case["experts"]
        places = list(range(local)) + [-1] * (total - local)
        options["num_local_experts"] = local
        options["expert_map"] = torch.tensor(places, dtype=torch.int32)
    known = inspect.signature(inspect.unwrap(function)).parameters
    if unknown := sorted(name for name in options if name not in known):
        raise ValueError(f"this FlashInfer's {function.__name__} takes no {', '.join(unknown)}")
    return options


def _calls(case: dict[str, Any], b12x_moe: Any) -> Any:
    """A function of the token count that makes one call of the public API."""
    import torch

    weights = _weights(case)
    experts, top_k, hidden = case["experts"], case["top_k"], case["hidden"]

    def routed(tokens: int) -> dict[str, Any]:
        return {
            "x": torch.empty(tokens, hidden, dtype=torch.bfloat16, device="cuda"),
            "token_selected_experts": torch.empty(tokens, top_k, dtype=torch.int32, device="cuda"),
            "token_final_scales": torch.empty(tokens, top_k, dtype=torch.float32, device="cuda"),
        }

    if case["calls"] == "function":
        options = _options(case, b12x_moe.b12x_fused_moe)
        return lambda tokens: b12x_moe.b12x_fused_moe(**routed(tokens), **weights, num_experts=experts, top_k=top_k, **options)
    wrapper_type = b12x_moe.B12xMoEWrapper
    wrapper = wrapper_type(
        experts,
        top_k,
        hidden,
        case["inter"],
        use_cuda_graph=True,
        max_num_tokens=case["maximum"],
        **_options(case, wrapper_type.__init__),
    )
    return lambda tokens: wrapper.run(**routed(tokens), **weights)


def _walk(case: dict[str, Any], run: Run, b12x_moe: Any, dispatch: Any) -> list[dict[str, Any]]:
    """All calls of one case; an error ends the walk and is returned."""
    run.tokens = 0
    dispatch.clear_sm120_moe_caches()
    with _beside("described_gpu").OnMeta():
        try:
            call = _calls(case, b12x_moe)
            for run.tokens in case["tokens"]:
                _forget_kernels(dispatch)
                call(run.tokens)
        except Exception as error:  # noqa: BLE001 -- whatever the library raises is an answer to report, never the end of the other cases
            return [{"tokens": run.tokens, "error": _plain(error), "trace": _trace()}]
    return []


def _scout(case: dict[str, Any]) -> dict[str, Any]:
    """The same case with few experts. Preparing W4A16 weights takes 50 ms for each expert, bytes or not."""
    few = max(8, case["top_k"])
    return case | {"local_experts": few, "experts": few if case["experts"] == case["local_experts"] else 2 * few}


def _run_case(case: dict[str, Any], run: Run, b12x_moe: Any, dispatch: Any) -> dict[str, Any]:
    """One case, all its token counts."""
    run.case, run.fallback = case["id"], False
    asked = dict(run.asked)
    if case["quant"] == "w4a16" and case["local_experts"] > 16:
        errors = _walk(_scout(case), run, b12x_moe, dispatch)
        if run.asked != asked:  # this FlashInfer keeps W4A16 kernels on disk: only the real shape has the right names
            run.asked = asked
            errors = _walk(case, run, b12x_moe, dispatch)
    else:
        errors = _walk(case, run, b12x_moe, dispatch)
    if any(case["id"] in e["cases"] and "DirectMicro" in e["kernel"] for e in run.not_persisted.values()):
        # Whether a direct micro kernel can be launched is asked of the compiled kernel on the GPU; if not, these are wanted.
        run.fallback = True
        errors += _walk(case, run, b12x_moe, dispatch)
        run.fallback = False
    kernels = sorted(name for name, entry in run.asked.items() if case["id"] in entry["cases"])
    return {"id": case["id"], "status": "error" if errors else "ok", "errors": errors, "kernels": kernels}


def _forget_kernels(dispatch: Any) -> None:
    """Empty FlashInfer's in-process tables of kernels, so that every call asks the disk cache and is counted."""
    for name, table in vars(dispatch).items():
        if name.endswith(("_KERNEL_CACHE", "_LAUNCH_CACHE")) and isinstance(table, dict):
            table.clear()


def _trace() -> list[str]:
    return traceback.format_exc().strip().splitlines()[-7:]


def _plain(error: BaseException) -> str:
    """An error in one line, without a terminal's colours (CuTe-DSL writes them into its messages)."""
    return " ".join(re.sub("\x1b\\[[0-9;]*m", "", f"{type(error).__name__}: {error}").split())[:600]


def _compile(spec: Any, run: Run) -> dict[str, Any]:
    """In a worker: compile and export one kernel."""
    run.log.clear()
    if spec.is_compiled:  # a run that was broken off, or another host's share; objects appear whole, with meta.json after them
        return {"status": "present", "error": ""}
    try:
        spec.compile_and_persist()
    except Exception as error:  # noqa: BLE001 -- one kernel's failure is its result
        return {"status": "failed", "error": _plain(error)}
    if not spec.object_path.exists():
        return {"status": "failed", "error": "; ".join(run.log[-2:]) or "compiled, but not exported"}
    return {"status": "built", "error": ""}


def _cost(name: str) -> int:
    """Dynamic kernels take longest to compile, then static ones; what takes longest goes first."""
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
    forked.run(wanted, job, jobs=int(run.request["jobs"]), limit=float(run.request["seconds_per_kernel"]), done=done)


def _finish(run: Run) -> list[dict[str, Any]]:
    """The kernels, with the size and digest of each object that lies on disk."""
    for entry in run.asked.values():
        try:
            data = Path(entry["object"]).read_bytes()
        except OSError:
            continue
        entry["size"], entry["sha256"] = len(data), "sha256:" + hashlib.sha256(data).hexdigest()
    return [run.asked[name] for name in sorted(run.asked)]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Do what the request says."""
    started = time.monotonic()
    run = Run(request)
    core, b12x_moe, dispatch, triton = _import(request, run)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: run.log.append(record.getMessage())  # type: ignore[method-assign]
    core.logger.addHandler(handler)
    imported = time.monotonic()
    _patch(run, core, dispatch)
    cases = [_run_case(case, run, b12x_moe, dispatch) for case in request["cases"]]
    walked = time.monotonic()
    if request["mode"] == "build":
        _build(run)
    import flashinfer

    return {
        "flashinfer": flashinfer.__version__,
        "jit_dir": str(core.jit_env.FLASHINFER_JIT_DIR),
        "meta": {spec.module_dir.name: spec.expected_meta for spec in run.specs.values()},
        "key_files": [os.fspath(path) for path in getattr(dispatch, "_kernel_source_files", tuple)()],
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
    request = json.load(sys.stdin)
    try:
        result = answer(request)
    except Exception as error:  # noqa: BLE001 -- the parent must learn why, whatever it was
        kind = "assumption" if isinstance(error, Assumption) else "failed"
        asked = [{"case": case["id"], "tokens": case["tokens"]} for case in request.get("cases", [])]
        result = {"error": {"kind": kind, "what": f"{type(error).__name__}: {error}", "trace": _trace(), "asked": asked}}
    temporary = Path(request["answer"] + ".tmp")
    temporary.write_text(json.dumps(result, indent=1))
    temporary.replace(request["answer"])
    return 1 if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
