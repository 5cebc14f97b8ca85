"""`kcache report` beside real servers: the real FlashInfer builds, or is restored, and its own log says which."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from container import REPOSITORY, Container
from prometheus_client.parser import text_string_to_metric_families
from schemas import conforms
from warmup_processes import environment

pytestmark = pytest.mark.real

SERVES = "from flashinfer.cascade import get_cascade_module; get_cascade_module(); print('served')"
WARMS = "from kcache.warmup import warmup; warmup(kinds=(), modules=('cascade',)); " + SERVES


@pytest.fixture
def host(tmp_path: Path, build_cache: Path, cuda_home: Path) -> Container:
    """A host whose FlashInfer can compile."""
    keep = build_cache / "compiler-launcher"
    keep.mkdir(exist_ok=True)
    launcher = f"{sys.executable} -I -S {REPOSITORY}/tests/compiler_launcher.py {tmp_path}/compilers.log {keep}"
    given = environment(cuda_home)
    chosen = {name: given[name] for name in ("CUDA_HOME", "FLASHINFER_CUDA_ARCH_LIST", "MAX_JOBS")}
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    return Container(home=tmp_path / "home", environ={**chosen, "PATH": path, "FLASHINFER_NVCC_LAUNCHER": launcher})


def served(host: Container, store: Path, code: str, *words: str, **environ: str) -> str:
    store.mkdir(exist_ok=True)
    line = ["restore", "--from", str(store), "--modules", "cascade", "--deadline", "5m", *words, "--", sys.executable, "-c", code]
    done = host.kcache(*line, env=environ)
    assert done.out.endswith("served\n"), done.err
    return done.err


def reported(host: Container, **environ: str) -> tuple[int, dict[str, Any]]:
    done = host.kcache("report", "--json", "--textfile", str(host.home / "kcache.prom"), env=environ)
    assert done.out, done.err
    conforms("report", done.document)
    return done.code, done.document


def metric(host: Container, name: str) -> float:
    families = {family.name: family for family in text_string_to_metric_families((host.home / "kcache.prom").read_text())}
    return float(families[name].samples[0].value)


def test_the_serving_process_says_what_it_built_and_the_farm_builds_it(
    host: Container, tmp_path: Path, cascade_store: Path
) -> None:
    served(host, tmp_path / "store", SERVES)
    code, document = reported(host)
    assert (code, document["status"], document["logged"]) == (3, "built", True)
    assert [build["name"] for build in document["builds"]] == ["cascade"]
    assert metric(host, "kcache_built_since_boot") == 1
    missing = host.kcache("report", "--missing")
    assert missing.out == "cascade\n"  # a word for `kcache build --modules`, as the store below was built
    served(host, cascade_store, SERVES)
    code, document = reported(host)
    assert (code, document["status"], document["builds"]) == (0, "nothing-built", [])
    assert (metric(host, "kcache_built_since_boot"), metric(host, "kcache_compiler_runs_avoided")) == (0, 1)
    assert metric(host, "kcache_saved_seconds") > 0


def test_a_module_that_is_built_already_is_not_built_since_boot(host: Container, tmp_path: Path) -> None:
    served(host, tmp_path / "store", SERVES)
    served(host, tmp_path / "store", SERVES)  # ninja runs, is logged, and finds nothing to do
    assert reported(host)[1]["status"] == "nothing-built"


def test_what_the_engines_own_warm_up_built_is_told_apart(host: Container, tmp_path: Path) -> None:
    served(host, tmp_path / "store", WARMS)
    code, document = reported(host)
    assert (code, document["status"], document["builds"][0]["warmup"]) == (0, "warmed-up", True)
    assert document["warmups"][0]["modules"][0]["status"] == "built"
    assert document["missing"]["modules"] == ["cascade"]


DESCRIBED = """
import sys, kcache.probe.children
sys.path.insert(0, kcache.probe.children.__path__[0])
import described_gpu
described_gpu.install(described_gpu.of_capability(9, 0), "13.0")
"""
"""For FlashInfer 0.6.18 and 0.7.0, which ask for the GPU's properties while they are imported."""
OTHERS = [Path(path).name for path in os.environ.get("KCACHE_TEST_FLASHINFERS", "").split(":") if path]


@pytest.mark.parametrize("version", sorted({*OTHERS[:1], *OTHERS[-1:]}))
def test_a_flashinfer_without_a_log_is_known_by_its_libraries(
    version: str, tmp_path: Path, build_cache: Path, cuda_home: Path, host: Container
) -> None:
    site = Path(os.environ["KCACHE_TEST_DIR"]) / "flashinfer" / version
    other = Container(home=tmp_path / "other", site=(site,), environ=host.environ)
    served(other, tmp_path / "store", DESCRIBED + WARMS)
    _, document = reported(other)
    assert (document["logged"], document["status"]) == (False, "warmed-up")
    assert [build["name"] for build in document["builds"]] == ["cascade"]


def test_without_a_start_on_record_the_remedy_is_named(host: Container) -> None:
    done = host.kcache("report")
    assert done.code == 1
    assert "kcache restore" in done.err


def test_what_a_fallback_built_is_kept_and_the_next_container_hits(host: Container, tmp_path: Path) -> None:
    kept, store = tmp_path / "kept", tmp_path / "store"
    words = ("--fallback", "warmup", "--keep", str(kept), "--publish-missing")
    served(host, store, SERVES, *words, PATH="/usr/bin:/bin", CUDA_HOME="")
    assert reported(host)[1]["missing"]["modules"] == ["cascade"]
    until = time.monotonic() + 120
    while not (log := kept / "publish.log").exists() or "uploaded" not in log.read_text():  # after the server's start
        assert time.monotonic() < until, "it was not published"
        time.sleep(0.1)
    assert len(list(kept.glob("*.tar.zst"))) == 1
    fresh = Container(home=tmp_path / "fresh", environ={"FLASHINFER_CUDA_ARCH_LIST": "9.0a"})
    done = fresh.restore(store)
    assert done.document["kinds"]["modules"]["entries"][0]["modules"] == ["cascade"]
    assert fresh.verify()["compiler_runs"] == 0


def test_a_store_that_takes_nothing_does_not_delay_the_start(host: Container, tmp_path: Path) -> None:
    full = tmp_path / "full"
    full.write_text("no directory")
    store = "https://store.invalid/"
    line = [
        "restore",
        "--from",
        store,
        "--modules",
        "cascade",
        "--deadline",
        "5m",
        "--fallback",
        "warmup",
        "--publish-missing",
    ]
    line += ["--keep", str(full), "--json", "--", sys.executable, "-c", "print('served')"]
    done = host.kcache(*line, env={"CUDA_HOME": "", "PATH": "/usr/bin:/bin"}, timeout=500)
    assert done.out.endswith("served\n"), done.err
    document = json.loads(done.out[: done.out.rindex("}") + 1])
    assert any("could not be kept" in line for line in document["warnings"])


def test_keeping_is_for_what_a_fallback_builds(host: Container, tmp_path: Path) -> None:
    done = host.kcache("restore", "--from", str(tmp_path), "--keep", "x", "--", sys.executable, "-c", "print('served')")
    assert done.out == "served\n"
    assert "--fallback" in done.err
