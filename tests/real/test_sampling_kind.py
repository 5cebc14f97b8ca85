"""The kind `sampling` whole: every public function of FlashInfer's sampling API finds its modules restored, with JIT disabled.

The modules are the real ones (topk alone compiles for nine minutes), loaded by FlashInfer itself; only the launch is left out, as
there is no GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from container import Container

from kcache.probe import host

# topk compiles for ten minutes on a free core, and longer beside other tests.
pytestmark = [pytest.mark.real, pytest.mark.large, pytest.mark.timeout(3000)]

CHILDREN = Path(host.__file__).parent / "children"

DRIVE = """
import ctypes, inspect, json, sys
sys.path.insert(0, sys.argv[1])
import described_gpu
described_gpu.describe(described_gpu.of_capability(9, 0), "13.0")
for path in sys.argv[2:]:
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
import flashinfer.jit.core as core, flashinfer.sampling as sampling, sampling_reach

loaded = {}
def loading(original):
    def build_and_load(spec):
        module = original(spec)  # FlashInfer's own way, JIT disabled: raises where nothing is restored
        loaded[spec.name] = [str(path) for path in spec.get_library_paths()]
        assert module is not None
        return sampling_reach.StandIn(0)
    return build_and_load
for item in list(vars(core).values()):
    if inspect.isclass(item) and "build_and_load" in vars(item):
        item.build_and_load = loading(item.build_and_load)
calls, problems = {}, {}
for name, function in sampling_reach.public_functions(sampling).items():
    sampling_reach._drive(name, function, calls, problems)
print(json.dumps({"loaded": loaded, "calls": calls, "problems": problems}))
"""


def drive(container: Container, env: dict[str, str], cuda_home: Path) -> dict[str, Any]:
    """Calls every public function of the sampling API with what it may be called with, in a container."""
    environ = {**env, "FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    cudart = str(cuda_home / "lib64" / "libcudart.so.13")
    done = container.run([container.python, "-c", DRIVE, str(CHILDREN), cudart], env=environ)
    assert done.code == 0, done.err
    answer = json.loads(done.out.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def test_every_public_sampling_function_finds_its_modules_restored(tmp_path: Path, sampling_store: Path, cuda_home: Path) -> None:
    container = Container(home=tmp_path / "home")
    restored = container.restore(sampling_store, "--kinds", "sampling")
    assert restored.code == 0, restored.err
    assert restored.document["compiles_avoided"] == 2
    answer = drive(container, restored.document["env"], cuda_home)
    assert sorted(answer["loaded"]) == ["sampling", "topk"]
    entries = str(container.home / ".cache" / "kcache" / "v1" / "entries")
    assert all(path.startswith(entries) for paths in answer["loaded"].values() for path in paths)
    assert min(answer["calls"].values()) > 0
    assert "MissingJITCacheError" not in str(answer["problems"])
    proof = container.verify()
    assert (proof["status"], proof["compiler_runs"]) == ("proven", 0)
    assert [module["via"] for module in proof["modules"]] == [
        "flashinfer.sampling.get_sampling_module",
        "flashinfer.topk.get_topk_module",
    ]


def test_without_the_whole_kind_a_function_is_left_to_compile(tmp_path: Path, cascade_store: Path, cuda_home: Path) -> None:
    """The same drive, with something else restored: it does notice a module that is not there."""
    container = Container(home=tmp_path / "home")
    answer = drive(container, container.restore(cascade_store).document["env"], cuda_home)
    assert not answer["loaded"]
    assert "MissingJITCacheError" in str(answer["problems"])
