"""What `b12x_programs.py` says to b12x: a described GPU, a layer's plan, and that no compiler may run.

For child processes that compile or check b12x's programs. Whatever patches the process is never undone. Stdlib, torch, Triton and
b12x only; imports nothing of kcache.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Assumption(Exception):
    """This b12x is not as this script expects; the message says what was asked for."""


def need(thing: Any, names: tuple[str, ...], where: str) -> None:
    missing = [name for name in names if not hasattr(thing, name)]
    if missing:
        raise Assumption(f"{where} has no {', '.join(missing)}")


def _beside(name: str) -> Any:
    """A module that lies beside this script (which is run by path, and is in no package that could be imported)."""
    if name not in sys.modules:
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        importlib.import_module(name)
        sys.path.pop(0)
    return sys.modules[name]


def describe_as_worker(gpu: dict[str, Any], cuda: str | None) -> None:
    """Describe the GPU to this process as b12x describes it to its compiler workers, for the rest of its life."""
    import multiprocessing

    import torch

    if cuda:
        version: Any = torch.version
        version.cuda = cuda
    pool = importlib.import_module("b12x._lib.compile_pool")
    need(pool, ("_initialize_worker", "_run_job", "describe_compilation"), "b12x._lib.compile_pool")
    pool._initialize_worker(
        0,
        (gpu["major"], gpu["minor"]),
        "GPU-described",
        gpu["name"],
        gpu["sm_count"],
        gpu["shared_block_bytes"],
        gpu["shared_sm_bytes"],
        multiprocessing.get_context("spawn").Array("q", (0, 0)),
    )


@contextmanager
def without_bytes() -> Iterator[None]:
    """Tensors on the described GPU that have shapes and no bytes, as b12x's workers make them."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


def describe_as_server(gpu: dict[str, Any], release: str | None) -> None:
    """Describe the GPU to this process as a server finds it: torch, CuTe-DSL's and Triton's own questions are answered."""
    import torch

    _beside("described_gpu").install(gpu, release or torch.version.cuda)
    cuda: Any = torch.cuda
    properties = cuda.get_device_properties(0)
    properties.uuid = "GPU-described"
    here = torch.device("cuda", 0)

    @contextmanager
    def scope(device: Any) -> Iterator[None]:
        yield

    cuda.device = scope
    stream = type("_Stream", (), {"cuda_stream": 0, "device": here, "synchronize": lambda self: None})()
    cuda.current_stream = cuda.default_stream = lambda device=None: stream
    driver: Any = importlib.import_module("triton.runtime").driver
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", gpu["major"] * 10 + gpu["minor"], 32)
    methods = {
        "get_current_device": lambda self: 0,
        "get_device_capability": lambda self, device: (gpu["major"], gpu["minor"]),
        "get_current_target": lambda self: target,
        "get_current_stream": lambda self, device: 0,
    }
    driver.set_active(type("_Driver", (), methods)())


def _experts(case: dict[str, Any], api: Any) -> Any:
    """One layer's experts on one rank, without bytes.

    b12x's own preparation of weights is left out: it computes with their bytes, with kernels of its own where the layout asks for
    it, and a plan asks the result for nothing but what is set here.
    """
    import torch

    weights_type = importlib.import_module("b12x.moe.fused_moe._impl").B12XFP4ExpertWeights
    experts, hidden, inter = case["experts"], case["hidden"], case["inter"]
    swiglu = {f"swiglu_{name}": value for name, value in (case.get("swiglu") or {}).items()}
    plan = api.plan_weights(
        source=api.PackedSource(format=case["source"], w13_layout=case["w13_layout"]),
        activation=api.ActivationSpec(mode=case["mode"], nonlinearity=case["activation"], io_dtype=torch.bfloat16, **swiglu),
        geometry=api.MoEGeometry(num_experts=experts, hidden_size=hidden, intermediate_size=inter),
    )
    unit_scales = case["mode"] == "a16" or case["source"] != "modelopt_nvfp4"  # `prepare_weights` (planning.py) makes its own
    count = 1 if case["scales"] == "shared" and not unit_scales else experts
    scale = torch.empty(count, dtype=torch.float32, device="cuda:0")
    uniform = case["scales"] == "uniform" and not unit_scales
    values = {"a1_gscale": scale, "a2_gscale": scale, "immutable_input_scales": uniform, "_uniform_a1_scale": uniform}
    fields = {"plan": plan._impl, "representation": None, "_a1_scale_version": None} | values
    fields["w1_fp4"] = torch.empty(experts, inter, hidden // 2, dtype=torch.uint8, device="cuda:0")
    need(weights_type, ("can_share_input", "num_experts"), weights_type.__name__)
    weights = object.__new__(weights_type)
    for name, value in fields.items():
        object.__setattr__(weights, name, value)
    return api.PreparedExperts(plan=plan, _impl=weights)


def plans_of(case: dict[str, Any]) -> dict[int, Any]:
    """Token count -> b12x's plan of this case."""
    import torch

    api = importlib.import_module("b12x.moe.fused_moe.api")
    need(api, ("plan_weights", "PreparedExperts", "plan_execution", "ExecutionCapacity", "RoutingSpec"), api.__name__)
    experts = _experts(case, api)
    plan = api.plan_execution(
        experts=experts,
        capacity=api.ExecutionCapacity(
            max_tokens=case["maximum"], top_k=case["top_k"], warmup_token_counts=tuple(case["tokens"])
        ),
        routing=api.RoutingSpec(logits_dtype=getattr(torch, case["logits"])),
    )
    variants = getattr(plan, "variants", None)
    return {case["maximum"]: plan} if variants is None else dict(variants)


def configurations_of(plan: Any, device: Any, which: str) -> list[tuple[Any, bool]]:
    """The configurations that a session may take for a plan, each with whether it is the untuned one."""
    configuration = plan.contract.configure(plan.query, device=device.identity)
    found = [(configuration.default, True)]
    if which == "all":
        payload = plan.contract.config_payload
        seen = {payload(configuration.default)}
        for _, candidate in plan.contract.iterate(configuration):
            if payload(candidate) not in seen:
                seen.add(payload(candidate))
                found.append((candidate, False))
    return found


def trap(compiles: list[str], loads: list[str]) -> None:
    """Refuse and count every use of a compiler, CuTe-DSL's `cute.compile` and Triton's lowering, and count programs loaded."""
    from cutlass import cute

    compiler: Any = importlib.import_module("b12x._lib.compiler")
    compile_type: Any = type(cute.compile)

    def trapped(self: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        compiles.append(f"cute:{getattr(function, '__name__', type(function).__name__)}")
        raise RuntimeError("the compiler was asked, in a process that may not compile")

    compile_type.__call__ = trapped
    triton: Any = importlib.import_module("triton.compiler.compiler")

    def lowered(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiles.append(f"triton:{self.name}")
        raise RuntimeError("Triton was asked to compile, in a process that may not compile")

    triton.ASTSource.make_ir = lowered
    # On a GPU its driver would take the cubin; here that it was found and read is all that can be seen.
    triton.CompiledKernel._init_handles = lambda self: loads.append(f"triton:{self.hash}")
    load = compiler._load_cute_compile_from_disk

    def loaded(key: str) -> Any:
        value = load(key)
        if value is not None:
            loads.append(f"cute:{key}")
        return value

    compiler._load_cute_compile_from_disk = loaded
