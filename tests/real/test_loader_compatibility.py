"""Evidence for the rule of tvm-ffi: within one major.minor, a module meets a loader at least as new as its headers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from builds import BuildModules
from container import Container

pytestmark = pytest.mark.real

OLDEST = "0.1.11"


@pytest.fixture(scope="module")
def older_tvm_ffi() -> Path:
    site = Path(os.environ.get("KCACHE_TEST_DIR", "")) / f"tvm-ffi-{OLDEST}"
    if not (site / "tvm_ffi").is_dir():
        pytest.skip(f"apache-tvm-ffi {OLDEST} is not installed (ci/other-versions)")
    return site


def test_a_module_built_with_an_older_tvm_ffi_is_used_by_a_newer_one(
    tmp_path: Path, older_tvm_ffi: Path, build_modules: BuildModules, build_store: Callable[[Path], Path]
) -> None:
    store = build_store(build_modules(("cascade",), flashinfer_site=older_tvm_ffi))
    container = Container(home=tmp_path / "home")
    restored = container.restore(store)
    assert restored.code == 0, restored.err
    proof = container.verify()
    assert (proof["status"], proof["compiler_runs"]) == ("proven", 0)
    assert container.restore(store, "--strict-match").code == 10


def test_a_module_built_with_a_newer_tvm_ffi_is_refused_by_an_older_one(
    tmp_path: Path, older_tvm_ffi: Path, cascade_store: Path
) -> None:
    refused = Container(home=tmp_path / "home", site=(older_tvm_ffi,)).restore(cascade_store)
    assert refused.code == 10
    assert "tvm_ffi.version" in refused.document["kinds"]["modules"]["reasons"][0]
