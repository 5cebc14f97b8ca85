"""`kcache warmup` and `kcache restore --fallback warmup`: real builds by the command line; then a server compiles nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from container import REPOSITORY, Container
from schemas import conforms
from small_models import small_manifest
from warmup_processes import running_below

pytestmark = pytest.mark.real

SERVER = ["--", sys.executable, "-c"]
SERVES = "from flashinfer.cascade import get_cascade_module; get_cascade_module(); print('served')"
"""A server that may not compile (FLASHINFER_DISABLE_JIT is in its environment)."""


@pytest.fixture
def container(tmp_path: Path, build_cache: Path) -> Container:
    """A host with compilers and no GPU."""
    keep = build_cache / "compiler-launcher"
    keep.mkdir(exist_ok=True)
    launcher = f"{sys.executable} -I -S {REPOSITORY}/tests/compiler_launcher.py {tmp_path}/compilers.log {keep}"
    environ = {"PATH": "/usr/bin:/bin", "CUDA_HOME": "", "FLASHINFER_NVCC_LAUNCHER": launcher, "MAX_JOBS": "2"}
    return Container(home=tmp_path / "home", environ=environ)


def compilers(container: Container) -> int:
    log = container.home.parent / "compilers.log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def warm(container: Container, *words: str, **environ: str) -> dict[str, Any]:
    done = container.kcache("warmup", "--modules", "cascade", "--arch", "9.0a", "--json", *words, env=environ)
    assert done.out, done.err
    conforms("warmup", done.document)
    return {"code": done.code, **done.document}


def status(document: dict[str, Any]) -> str:
    (module,) = document["modules"]
    return str(module["status"])


def test_what_was_warmed_up_is_proven_and_built_once(container: Container) -> None:
    first = warm(container)
    assert (first["code"], first["status"], status(first)) == (0, "warm", "built")
    assert container.verify()["compiler_runs"] == 0
    again = warm(container, PATH="/nowhere")
    assert (again["code"], status(again)) == (0, "present")
    assert compilers(container) == 2


def test_two_at_once_build_once(container: Container) -> None:
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda _: warm(container), range(2)))
    assert sorted(map(status, done)) == ["built", "present"]
    assert compilers(container) == 2


def start(container: Container, *words: str, pause: float = 0.0) -> subprocess.Popen[str]:
    variables = {**container.variables, "PYTHONPATH": str(REPOSITORY), "KCACHE_TEST_PAUSE": str(pause)}
    command = [container.python, "-m", "kcache", "warmup", "--modules", "cascade", "--arch", "9.0a", *words]
    return subprocess.Popen(command, env=variables, cwd=container.home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_what_a_kill_left_is_finished_by_the_next(container: Container) -> None:
    process = start(container, pause=600)
    until = time.monotonic() + 200
    while not compilers(container):
        assert time.monotonic() < until
        time.sleep(0.1)
    process.kill()
    process.communicate(timeout=30)
    assert not running_below(container.home)
    assert status(warm(container)) == "built"


def test_the_deadline_ends_it(container: Container) -> None:
    process = start(container, "--deadline", "20s", "--json", pause=600)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 1, err
    assert status(json.loads(out)) == "late"
    assert not running_below(container.home)


def broken(tmp_path: Path) -> str:
    """A CUDA_HOME whose nvcc fails."""
    nvcc = tmp_path / "broken" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\necho 'nvcc: internal error' >&2\nexit 3\n")
    nvcc.chmod(0o755)
    return str(nvcc.parent.parent)


def test_a_broken_compiler_is_told(container: Container, tmp_path: Path) -> None:
    document = warm(container, CUDA_HOME=broken(tmp_path))
    assert (document["code"], status(document)) == (1, "failed")


def test_without_a_gpu_and_an_architecture_the_remedy_is_named(container: Container) -> None:
    if Path("/dev/nvidia0").exists():
        pytest.skip("this host has a GPU")
    done = container.kcache("warmup")
    assert done.code == 1
    assert "--arch" in done.err


def test_a_kind_that_needs_a_manifest_is_refused(container: Container) -> None:
    done = container.kcache("warmup", "--kinds", "b12x-moe", "--arch", "9.0a")
    assert done.code == 2
    assert "--manifest" in done.err


def restore(container: Container, store: Path, *words: str, code: str = SERVES, **environ: str) -> tuple[int, str, str]:
    line = ["restore", "--from", str(store), "--modules", "cascade", "--arch", "9.0a", *words, *SERVER, code]
    given = {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", **environ}
    done = container.kcache(*line, env=given)
    return done.code, done.out, done.err


def test_fallback_compiles_what_no_store_has_before_the_server_starts(container: Container, tmp_path: Path) -> None:
    empty = tmp_path / "store"
    empty.mkdir()
    code = "import os; os.environ['FLASHINFER_DISABLE_JIT'] = '1'; " + SERVES
    returned, out, err = restore(container, empty, "--fallback", "warmup", "--deadline", "5m", "--strict", code=code)
    assert (returned, out.strip().splitlines()[-1]) == (0, "served"), err
    assert compilers(container) == 2
    # The next start finds it, whatever the store has, and compiles nothing.
    returned, out, err = restore(container, empty, "--fallback", "warmup", "--deadline", "5m", code=code, PATH="/nowhere")
    assert (returned, out.strip().splitlines()[-1]) == (0, "served"), err
    assert compilers(container) == 2


def test_fallback_is_off_unless_it_is_asked_for(container: Container, tmp_path: Path) -> None:
    empty = tmp_path / "store"
    empty.mkdir()
    assert restore(container, empty, "--deadline", "5m", code="print('served')")[1] == "served\n"
    assert compilers(container) == 0


def test_a_hit_warms_up_nothing(container: Container, cascade_store: Path) -> None:
    returned, out, err = restore(container, cascade_store, "--fallback", "warmup", "--json", code="print('served')")
    assert returned == 0, err
    assert out.endswith("served\n")
    assert "warmup" not in json.loads(out[: out.rindex("}") + 1])
    assert compilers(container) == 0


def test_b01_with_a_broken_compiler_the_server_starts_after_the_fallback(container: Container, tmp_path: Path) -> None:
    empty = tmp_path / "store"
    empty.mkdir()
    words = ("--fallback", "warmup", "--deadline", "5m")
    home = broken(tmp_path)
    returned, out, err = restore(container, empty, *words, code="print('served')", CUDA_HOME=home)
    assert (returned, out) == (0, "served\n"), err
    assert "cascade is not warm" in err
    returned, out, err = restore(container, empty, *words, "--strict", code="print('served')", CUDA_HOME=home)
    assert (returned, out) == (10, "")


def test_where_a_policy_wants_signatures_nothing_is_compiled_in_vain(container: Container, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('format = "kcache.policy/1"\n')
    empty = tmp_path / "store"
    empty.mkdir()
    words = ("--fallback", "warmup", "--deadline", "5m", "--policy", str(policy))
    returned, out, err = restore(container, empty, *words, code="print('served')")
    assert (returned, out) == (0, "served\n"), err
    assert "nothing is warmed up: a policy is in force" in err
    assert compilers(container) == 0


def test_a_fallback_that_does_not_exist_starts_the_server_all_the_same(container: Container, tmp_path: Path) -> None:
    returned, out, err = restore(container, tmp_path, "--fallback", "wramup", code="print('served')")
    assert (returned, out) == (0, "served\n")
    assert "--fallback" in err


def test_a_models_kernels_are_compiled_once_and_a_changed_manifest_is_another(container: Container, tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    manifest, kept = tmp_path / "model.toml", tmp_path / "kept"
    manifest.write_text(small_manifest(name="test/one-token"))
    words = ["warmup", "--manifest", str(manifest), "--gpu", "rtx-pro-6000", "--json"]
    first = container.kcache(*words, "--keep", str(kept), timeout=600)
    assert first.code == 0, first.err
    assert status(first.document) == "built"
    assert [json.loads(path.read_text())["key"]["model"] for path in kept.glob("*.json")] == ["test/one-token"]
    again = container.kcache(*words, env={"PATH": "/nowhere"})
    assert (again.code, status(again.document)) == (0, "present")
    manifest.write_text(small_manifest(name="test/one-token") + "# another\n")
    late = container.kcache(*words, "--deadline", "0s")
    assert status(late.document) == "late"


@pytest.mark.large
@pytest.mark.timeout(3000)  # as tests/real/test_sampling_kind.py: whichever comes first waits for the build of topk
def test_a_restored_sampling_leaves_nothing_to_warm_up(container: Container, sampling_store: Path) -> None:
    assert container.restore(sampling_store).code == 0
    done = container.kcache("warmup", "--arch", "9.0a", "--json", env={"PATH": os.devnull})
    assert done.code == 0, done.err
    assert [module["status"] for module in done.document["modules"]] == ["present", "present"]
