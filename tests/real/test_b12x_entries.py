"""The package b12x through the command line: built without a GPU, published, restored into other homes, found by b12x's own
session in a fresh process with no compiler asked. Compiled and loaded, not launched.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from container import Container
from schemas import conforms
from small_models import small_manifest

from kcache.fsops import Identity

SITE = tuple(Path(part) for part in os.environ.get("KCACHE_TEST_B12X", "").split(os.pathsep) if part)
"""Directories that hold b12x 1.5.1 and Triton: ci/other-versions makes them."""

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not SITE, reason="KCACHE_TEST_B12X does not say where b12x and Triton are (ci/other-versions)"),
]

GPU = "rtx-pro-6000"
KIND = "b12x-programs"


@pytest.fixture(scope="module")
def store(build_cache: Path, build_store: Callable[[Path], Path]) -> Path:
    """A local store with the entry of one small model."""
    place = build_cache / "b12x-entries"
    place.mkdir(exist_ok=True)
    (place / "model.toml").write_text(small_manifest(kind=KIND, intermediate=256, experts=16))
    (entry,) = build(place, "model.toml", KIND)["entries"]
    assert (entry["kind"], entry["variant"]) == (KIND, "nvfp4-tp1-ep1")
    shutil.rmtree(place / "one", ignore_errors=True)
    for suffix in (".json", ".tar.zst"):
        shutil.copy(entry["manifest"].removesuffix(".json") + suffix, fresh(place / "one"))
    return build_store(place / "one")


def fresh(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    return directory


def build(place: Path, manifest: str, kind: str, *more: str, code: int = 0) -> dict[str, Any]:
    """`kcache build`; what it left of an earlier session is looked at again."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, SITE))}
    words = [
        "build",
        "--manifest",
        str(place / manifest),
        "--kinds",
        kind,
        "--gpu",
        GPU,
        "-o",
        str(place / "out"),
        "--json",
        *more,
    ]
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "kcache", *words]
        built = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=900)
    assert built.returncode == code, built.stderr
    document: dict[str, Any] = json.loads(built.stdout)
    return document


def restore(container: Container, store: Path, *words: str) -> tuple[int, dict[str, object], str]:
    done = container.kcache("restore", "--from", str(store), "--gpu", GPU, "--model", "small", "--json", *words)
    assert done.out, done.err
    kind = done.document["kinds"][KIND]
    action = kind["entries"][0]["action"] if kind["entries"] else " ".join(kind["reasons"])
    return done.code, done.document, action


def test_in_another_home_they_are_found_and_again_nothing_is_done(tmp_path: Path, store: Path) -> None:
    container = Container(home=tmp_path / "home", site=SITE)
    code, report, action = restore(container, store)
    assert (code, action, report["compiles_avoided"]) == (0, "installed", 3)
    assert len(list((tmp_path / "home/.cache/b12x/compile").glob("*/*.o"))) == 2
    before = {path: Identity.of(path) for path in (tmp_path / "home").rglob("*")}
    assert restore(container, store)[2] == "in-place"
    assert {path: Identity.of(path) for path in (tmp_path / "home").rglob("*")} == before
    verified = container.kcache("verify", "--gpu", GPU, "--json")
    assert verified.code == 0, verified.out + verified.err
    conforms("verify", verified.document)
    programs = verified.document["programs"]
    assert (programs["status"], programs["compiler_runs"], programs["prepared"]) == ("proven", 0, True)
    assert [program["accepted"] for program in programs["programs"]] == [True, True, True]
    # The proof can fail: without one program b12x would compile.
    next((tmp_path / "home/.cache/b12x/compile").glob("*/*.o")).unlink()
    failed = container.kcache("verify", "--gpu", GPU, "--json")
    assert failed.code != 0
    assert sorted(program["accepted"] for program in failed.document["programs"]["programs"]) == [False, True, True]
    assert restore(container, store)[2] == "installed"
    assert container.kcache("verify", "--gpu", GPU).code == 0


def test_what_keeps_programs_from_being_placed_is_an_error_not_a_miss(tmp_path: Path, store: Path) -> None:
    container = Container(home=tmp_path / "home", site=SITE)
    place = tmp_path / "home/.cache/b12x"
    place.mkdir(parents=True)
    (place / "compile").write_text("no directory")
    done = container.kcache("restore", "--from", str(store), "--gpu", GPU, "--model", "small", "--json")
    assert (done.document["status"], done.document["compiles_avoided"]) == ("error", 0), done.err
    assert done.code in (1, 12)
    assert "Traceback" not in done.err
    assert str(place / "compile") in done.err


def test_where_only_recorded_things_differ_they_are_renamed_and_lookup_says_what_enters_the_key(
    tmp_path: Path, store: Path
) -> None:
    environ = {"CUDA_HOME": "/opt/else", "CC": "clang", "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    (tmp_path / "xdg").mkdir()
    container = Container(home=tmp_path / "home", site=SITE, environ=environ)
    told = container.kcache("lookup", "--from", str(store), "--gpu", GPU).out
    assert "b12x names programs by: " in told
    assert "env CUDA_HOME: built with unset, here /opt/else" in told
    assert restore(container, store)[2] == "installed"
    names = {path.name for path in (tmp_path / "xdg/b12x/compile").glob("*/*.o")}
    built = {path.name for path in (tmp_path / "home/.cache/kcache/v1/entries").glob("*/programs/*.o")}
    assert len(names) == len(built) == 2
    assert not names & built
    assert container.kcache("verify", "--gpu", GPU).code == 0
    strict = Container(home=tmp_path / "strict", site=SITE, environ={"CUDA_HOME": "/opt/else"})
    code, _, reasons = restore(strict, store, "--strict-match")
    assert code == 10
    assert "env CUDA_HOME" in reasons


def test_one_changed_byte_of_the_package_is_refused_by_name(tmp_path: Path, store: Path) -> None:
    package = next(part for part in SITE if (part / "b12x" / "_lib").is_dir())
    shutil.copytree(package / "b12x", tmp_path / "site" / "b12x", ignore=shutil.ignore_patterns("__pycache__"))
    changed = tmp_path / "site" / "b12x" / "moe" / "__init__.py"
    changed.write_bytes(changed.read_bytes() + b"\n")
    container = Container(home=tmp_path / "home", site=(tmp_path / "site", *SITE))
    code, _, reasons = restore(container, store)
    assert code == 10
    assert "b12x.package: moe/__init__.py" in reasons
    assert not (tmp_path / "home/.cache/b12x").exists()


def test_a_saved_environment_is_answered_for_as_its_host_would_be(tmp_path: Path, store: Path, build_cache: Path) -> None:
    """`kcache env --save` says what b12x's names hold; a farm and a lookup elsewhere need no b12x of that host."""
    there = Container(home=tmp_path / "there", site=SITE)
    switched = Container(home=tmp_path / "there", site=SITE, environ={"CUTE_DSL_LINEINFO": "1"})
    copy = Container(home=tmp_path / "there", site=SITE[1:])  # FlashInfer's own copy of the package
    for container, name in ((there, "good"), (switched, "switched"), (copy, "copy")):
        saved = container.kcache("env", "--gpu", GPU, "--save", str(tmp_path / name))
        assert saved.code == 0, saved.err
    elsewhere = Container(home=tmp_path / "elsewhere")
    lookup = ("lookup", "--from", str(store), "--model", "small", "--env")
    assert elsewhere.kcache(*lookup, str(tmp_path / "good")).code == 0
    assert "env CUTE_DSL_LINEINFO" in elsewhere.kcache(*lookup, str(tmp_path / "switched")).out
    assert "b12x.package: wanted" in elsewhere.kcache(*lookup, str(tmp_path / "copy")).out
    place = build_cache / "b12x-entries"
    assert build(place, "model.toml", KIND, "--env", str(tmp_path / "good"))["status"] in ("built", "up-to-date")
    refused = build(place, "model.toml", KIND, "--env", str(tmp_path / "switched"), code=1)
    assert "env CUTE_DSL_LINEINFO" in refused["entries"][0]["reason"]


def test_programs_that_a_program_compiled_itself_are_recorded_restored_and_taken(
    tmp_path: Path, store: Path, build_cache: Path, build_store: Callable[[Path], Path]
) -> None:
    """`kcache build --record`: a program leaves what b12x wrote, one program cut short and one whose compilation was stopped."""
    place = build_cache / "b12x-entries"
    (manifest,) = (place / "one").glob("*.json")
    whole, cut = sorted(json.loads(manifest.read_text())["programs"]["kernels"])
    script = f"""
import os, shutil
from pathlib import Path
source = Path({str(place / "out/.build/kernels" / f"b12x-{GPU}" / "compile")!r})
target = Path(os.environ["B12X_COMPILE_CACHE_DIR"])
for key in ({whole!r}, {cut!r}):
    for path in (source / key[:2]).glob(key + ".*"):
        (target / key[:2]).mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target / key[:2])
os.truncate(target / {cut[:2]!r} / {cut + ".o"!r}, 1000)
(target / "ab").mkdir(exist_ok=True)
(target / "ab" / ("ab" * 32 + ".lock")).touch()
"""
    farm = Container(home=tmp_path / "farm", site=SITE)
    words = ("build", "--record", "-o", str(tmp_path / "entries"), "--json")
    recorded = farm.kcache(*words, "--gpu", GPU, "--", sys.executable, "-c", script)
    assert recorded.document["status"] == "partial", recorded.err
    conforms("build", recorded.document)
    (entry,) = recorded.document["entries"]
    assert (entry["kind"], entry["model"], entry["variant"][:9]) == (KIND, "", "recorded-")
    left = {one["name"]: one["reason"] for one in recorded.document["left_out"]}
    assert set(left) == {f"{cut[:2]}/{cut}.o", f"ab/{'ab' * 32}.o"}
    assert "the object has 1000" in left[f"{cut[:2]}/{cut}.o"]
    assert "failed or was stopped" in left[f"ab/{'ab' * 32}.o"]
    other = farm.kcache(*words, "--gpu", "rtx-5090", "--", sys.executable, "-c", script)
    assert other.document["entries"] == []
    assert "another GPU (12.0, 188 SMs)" in json.dumps(other.document["left_out"])

    container = Container(home=tmp_path / "home", site=SITE, environ={"CUDA_HOME": "/opt/else"})
    code, _, action = restore(container, build_store(tmp_path / "entries"))
    assert (code, action) == (0, "installed")
    verified = container.kcache("verify", "--gpu", GPU, "--json")
    assert verified.code == 0, verified.out + verified.err
    conforms("verify", verified.document)
    programs = verified.document["programs"]
    assert (programs["status"], programs["by_rule"], programs["configurations"]) == ("proven", 1, 0)
    os.truncate(next((tmp_path / "home/.cache/b12x/compile").glob("*/*.o")), 1000)
    failed = container.kcache("verify", "--gpu", GPU)
    assert failed.code != 0
    assert "1 of them were recorded" in failed.out


def test_another_gpu_or_a_switch_of_the_compiler_is_refused_by_name(tmp_path: Path, store: Path) -> None:
    done = Container(home=tmp_path / "home", site=SITE).kcache("lookup", "--from", str(store), "--gpu", "rtx-5090")
    assert "gpu.sm_count: wanted 188 (equal), found 170" in done.out
    switched = Container(home=tmp_path / "switch", site=SITE, environ={"CUTE_DSL_LINEINFO": "1"})
    code, _, reasons = restore(switched, store)
    assert code == 10
    assert "env CUTE_DSL_LINEINFO" in reasons
    told = switched.kcache("lookup", "--from", str(store), "--gpu", GPU).out
    assert "to make it a hit: unset CUTE_DSL_LINEINFO where the server starts" in told


def test_every_candidate_of_the_tuning_is_there_for_a_session_that_tunes(
    tmp_path: Path, store: Path, build_cache: Path, build_store: Callable[[Path], Path]
) -> None:
    """A server that tunes when it starts compiles nothing: b12x's own session finds a program for each configuration."""
    place = build_cache / "b12x-entries"
    (place / "candidates.toml").write_text(small_manifest(kind="b12x-candidates", intermediate=256, experts=16))
    built = build(place, "candidates.toml", "b12x-candidates")
    candidates = build_store(place / "out")
    container = Container(home=tmp_path / "home", site=SITE)
    done = container.kcache("restore", "--from", str(candidates), "--gpu", GPU, "--kinds", "b12x-candidates", "--json")
    assert done.code == 0, done.err
    assert len(list((tmp_path / "home/.cache/b12x/compile").glob("*/*.o"))) > 2
    assert done.document["compiles_avoided"] == sum(module["kind"] == "b12x-candidates" for module in built["modules"])
    verified = container.kcache("verify", "--gpu", GPU, "--json")
    assert verified.code == 0, verified.out + verified.err
    programs = verified.document["programs"]
    assert (programs["status"], programs["compiler_runs"], programs["prepared"]) == ("proven", 0, True)
