"""The hooks into engines, found and loaded as each engine does it, with the real FlashInfer behind them.

No engine is installed here. What stands in for one is the few lines of it that load a plug-in and call the method that a hook is
put before (read in vLLM's vllm/plugins/__init__.py, SGLang's srt/plugins/ and TensorRT-LLM's commands); the rest is real.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from container import REPOSITORY
from warmup_processes import Node

pytestmark = pytest.mark.real

LOADS = """
import importlib.metadata, json, os, sys
def load(group):
    for plugin in importlib.metadata.entry_points(group=group):
        if plugin.name == "kcache":
            plugin.load()()
"""
CALL_SITE = """
os.environ["PATH"] = "/nowhere"
import flashinfer.cascade
try:
    flashinfer.cascade.get_cascade_module()
    print(json.dumps({"served": True, "order": order}))
except Exception as error:
    print(json.dumps({"served": False, "order": order, "error": str(error)}))
"""
VLLM = (
    LOADS
    + """
load("vllm.general_plugins")
load("vllm.general_plugins")
from vllm.v1.worker.gpu_worker import Worker, order
Worker().compile_or_warm_up_model()
"""
    + CALL_SITE
)
SGLANG = (
    LOADS
    + """
load("sglang.srt.plugins")
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry.apply_hooks()
from sglang.srt.model_executor.model_runner import ModelRunner, order
ModelRunner().kernel_warmup()
"""
    + CALL_SITE
)
TRTLLM = (
    LOADS
    + """
import kcache.engines, importlib.util
directory = os.path.join(os.path.dirname(kcache.engines.__file__), "tensorrt_llm_module")
sys.path.insert(0, os.path.dirname(directory))
importlib.import_module(os.path.basename(directory))
from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine, order
PyTorchModelEngine().warmup()
"""
    + CALL_SITE
)
STANDS_IN = {
    "vllm/v1/worker/gpu_worker.py": """
order = []
class Worker:
    def compile_or_warm_up_model(self):
        order.append("engine")
""",
    "sglang/srt/model_executor/model_runner.py": """
order = []
class ModelRunner:
    def kernel_warmup(self):
        order.append("engine")
""",
    "sglang/srt/plugins/hook_registry.py": """
import enum, pkgutil
HookType = enum.Enum("HookType", ["BEFORE", "AFTER"])
class HookRegistry:
    hooks = []
    @classmethod
    def register(cls, target, hook, hook_type):
        assert hook_type is HookType.BEFORE
        cls.hooks.append((target, hook))
    @classmethod
    def apply_hooks(cls):
        for target, hook in cls.hooks:
            place, name = target.rsplit(".", 1)
            owner = pkgutil.resolve_name(place)
            setattr(owner, name, cls.wrapped(getattr(owner, name), hook))
    @staticmethod
    def wrapped(original, hook):
        def call(*args, **kwargs):
            assert hook(*args, **kwargs) is None
            return original(*args, **kwargs)
        return call
""",
    "tensorrt_llm/_torch/pyexecutor/model_engine.py": """
order = []
class PyTorchModelEngine:
    def warmup(self):
        order.append("engine")
""",
}


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    """A site with kcache's entry points as an installer writes them, and the stand-ins."""
    site = tmp_path / "site"
    for name, text in STANDS_IN.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    project = toml.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    info = site / "kcache_entry_points-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kcache-entry-points\nVersion: 0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in names.items()) for group, names in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return site


def run(node: Node, engines: Path, code: str, *, asked: str) -> tuple[dict[str, object], str]:
    code = f"import sys; sys.path.insert(0, {str(engines)!r})\n" + code
    process = node.start(code, environ={"KCACHE_WARMUP": asked})
    return process.document(), process.err


@pytest.mark.parametrize("code", [VLLM, SGLANG, TRTLLM], ids=["vllm", "sglang", "tensorrt-llm"])
def test_the_hook_warms_up_before_the_engine_does(node: Node, engines: Path, code: str) -> None:
    document, err = run(node, engines, code, asked="cascade")
    assert document == {"served": True, "order": ["engine"]}, err  # served without ninja: it was ready before
    assert len(node.compilers) == 2


@pytest.mark.parametrize("code", [VLLM, SGLANG, TRTLLM], ids=["vllm", "sglang", "tensorrt-llm"])
def test_the_hook_is_off_unless_it_is_asked_for(node: Node, engines: Path, code: str) -> None:
    document, _ = run(node, engines, code, asked="")
    assert (document["served"], document["order"]) == (False, ["engine"])
    assert not node.compilers


@pytest.mark.parametrize("name", sorted(set(STANDS_IN) - {"sglang/srt/plugins/hook_registry.py"}))
def test_an_engine_of_another_shape_starts(node: Node, engines: Path, name: str) -> None:
    (engines / name).write_text("raise RuntimeError('of another shape')\n")
    code = LOADS + 'load("vllm.general_plugins"); load("sglang.srt.plugins")\nimport kcache.engines.tensorrt_llm_module\n'
    document, _ = run(node, engines, code + "print(json.dumps({'started': True}))", asked="cascade")
    assert document == {"started": True}
