"""`kcache build` with the real nvcc and the real FlashInfer, in real processes: what it writes, refuses, keeps and survives."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from builds import BuildModules
from schemas import conforms

from kcache import digest
from kcache.manifest import Manifest, parse_manifest
from kcache.probe.packages import scan, this_interpreter
from kcache.workflows.build_output import read_build_output

pytestmark = pytest.mark.real

CASCADE_SOURCE = "flashinfer/data/csrc/cascade.cu"


def kcache_build(*words: object, **environ: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, JSON and stderr of one `kcache build --json`."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER_", "KCACHE_"))}
    command = [sys.executable, "-m", "kcache", "build", *map(str, words), "--json"]
    done = subprocess.run(command, env=given | environ, capture_output=True, text=True, check=False, timeout=1500)
    document = json.loads(done.stdout) if done.stdout else {}
    if document:
        conforms("error" if document["status"] == "error" else "build", document)
    return done.returncode, document, done.stderr


def only_manifest(output: Path) -> Manifest:
    (entry,) = read_build_output(output)
    return entry.manifest


@pytest.fixture
def own_flashinfer(tmp_path: Path, cascade_build: Path) -> Path:
    """The site directory of a FlashInfer that a test may change: hard links, and `cascade.cu` a file of its own."""
    package = scan(this_interpreter().search_path).package("flashinfer")
    assert package is not None
    site = tmp_path / "site"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, site / "flashinfer", copy_function=os.link, ignore=ignore)
    source = site / CASCADE_SOURCE
    text = source.read_bytes()
    source.unlink()
    source.write_bytes(text)
    return site


def test_an_entry_is_whole_and_says_what_it_is(cascade_build: Path) -> None:
    manifest = only_manifest(cascade_build)
    assert (manifest.key.kind, manifest.key.modules) == ("modules", ("cascade",))
    assert manifest.key.ingredients["gpu.arch"] == "90a"
    assert manifest.key.ingredients["build.flags"] == "default"
    (artifact,) = manifest.artifacts
    assert artifact.elf is not None
    assert artifact.elf.gpu_archs == ("sm_90a",)
    assert any(name.startswith("libcudart.so.") for name in artifact.elf.needed)
    assert set(artifact.elf.versions) >= {"GLIBC", "GLIBCXX"}
    assert manifest.build_seconds["cascade"] > 0


def test_the_sources_are_those_that_the_compiler_read_and_the_recipe(cascade_build: Path) -> None:
    sources = only_manifest(cascade_build).sources
    package = scan(this_interpreter().search_path).package("flashinfer")
    assert package is not None
    assert {"data/csrc/cascade.cu", "data/include/flashinfer/attention/cascade.cuh", "jit/core.py", "jit/cascade.py"} <= set(
        sources
    )
    assert "data/csrc/sampling.cu" not in sources
    assert {path: digest.of_file(f"{package}/{path}")[0] for path in sources} == sources


def test_a_manifest_names_no_path_of_the_farm_and_nobody(cascade_build: Path) -> None:
    text = next(cascade_build.glob("*.json")).read_text()
    for private in (str(Path.home()), sys.prefix, str(cascade_build)):
        assert private not in text


def test_a_second_build_finds_everything_up_to_date(cascade_build: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in cascade_build.iterdir() if path.is_file()}
    work = cascade_build.parent / "work"
    code, report, _ = kcache_build("--modules", "cascade", "--arch", "90a", "-o", cascade_build, "--work-dir", work)
    assert (code, report["status"]) == (0, "up-to-date")
    assert {path: path.stat().st_mtime_ns for path in cascade_build.iterdir() if path.is_file()} == before


def test_no_architecture_and_no_gpu_is_refused_with_the_remedy(tmp_path: Path) -> None:
    code, _, err = kcache_build("--modules", "cascade", "-o", tmp_path / "out", CUDA_VISIBLE_DEVICES="")
    assert code == 2
    assert "--arch 9.0a" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--arch", "9.0a"), "--kinds sampling"),
        (("--kinds", "nonsense", "--arch", "9.0a"), "sampling"),
        (("--modules", "../x", "--arch", "9.0a"), "module name"),
        (("--modules", "cascade", "--arch", "hopper"), "9.0a"),
    ],
)
def test_a_request_that_cannot_be_met_is_a_usage_error(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    code, _, err = kcache_build(*words, "-o", tmp_path / "out")
    assert code == 2
    assert said in err


def test_a_compiler_error_names_line_module_and_log_and_costs_no_other_module(tmp_path: Path, own_flashinfer: Path) -> None:
    binding = own_flashinfer / "flashinfer/data/csrc/flashinfer_quantization_binding.cu"
    binding.unlink()
    binding.write_text("#error this source is broken\n")
    words = ("--modules", "cascade,quantization,no_such_module", "--arch", "9.0a", "-o", tmp_path / "out")
    code, report, err = kcache_build(*words, "--work-dir", tmp_path / "work", PYTHONPATH=str(own_flashinfer))
    assert (code, report["status"]) == (3, "partial")
    modules = {module["module"]: module for module in report["modules"]}
    assert modules["cascade"]["status"] == "built"
    assert "this source is broken" in modules["quantization"]["reason"]
    assert "flashinfer_quantization_binding.cu" in modules["quantization"]["reason"]
    assert "this source is broken" in Path(modules["quantization"]["log"]).read_text()
    assert modules["quantization"]["log"] in err
    assert "no nvcc module of this name" in modules["no_such_module"]["reason"]
    assert only_manifest(tmp_path / "out").key.modules == ("cascade",)


def test_b21_a_changed_source_with_an_older_time_is_compiled_again(tmp_path: Path, own_flashinfer: Path) -> None:
    words = ("--modules", "cascade", "--arch", "9.0a", "-o", tmp_path / "out", "--work-dir", tmp_path / "work")
    assert kcache_build(*words, PYTHONPATH=str(own_flashinfer))[0] == 0
    first = only_manifest(tmp_path / "out")
    source = own_flashinfer / CASCADE_SOURCE
    old = source.stat()
    source.write_bytes(source.read_bytes().replace(b"num_heads", b"num_h3ads"))
    os.utime(source, ns=(old.st_atime_ns, old.st_mtime_ns - 10**12))
    library = next((tmp_path / "work").rglob("cascade.so"))
    before = library.stat().st_mtime_ns
    code, report, _ = kcache_build(*words, PYTHONPATH=str(own_flashinfer))
    assert (code, report["status"]) == (0, "built")
    assert next((tmp_path / "work").rglob("cascade.so")).stat().st_mtime_ns > before
    second = parse_manifest(Path(report["entries"][0]["manifest"]).read_bytes())
    assert second.fingerprint != first.fingerprint
    assert second.sources["data/csrc/cascade.cu"] == digest.of_file(str(source))[0] != first.sources["data/csrc/cascade.cu"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_build_leaves_no_compiler_and_no_half_entry(
    tmp_path: Path, build_modules: BuildModules, number: int
) -> None:
    words = ["--modules", "page", "--arch", "9.0a", "-o", str(tmp_path / "out"), "--work-dir", str(tmp_path / "work")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER_", "KCACHE_"))}
    command = [sys.executable, "-m", "kcache", "build", *words, "--jobs", "1"]
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 300
    while not compilers(tmp_path / "work") and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.2)
    assert compilers(tmp_path / "work"), "the build never started a compiler"
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert compilers(tmp_path / "work") == []
    assert [path.name for path in (tmp_path / "out").iterdir()] == []


def compilers(work: Path) -> list[str]:
    """Command lines of running processes that work below `work`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(work) in line and ("cicc" in line or "cudafe" in line or "ptxas" in line or "nvcc" in line):
            found.append(line)
    return found


@pytest.mark.skipif(not Path("/usr/local/cuda/bin/nvcc").exists(), reason="no toolkit at /usr/local/cuda")
def test_a_toolkit_in_cuda_home_builds_the_same_entry_as_wheels_of_its_release(tmp_path: Path, cascade_build: Path) -> None:
    words = ("--modules", "cascade", "--arch", "9.0a", "-o", tmp_path / "out", "--work-dir", tmp_path / "work")
    code, report, err = kcache_build(*words, CUDA_HOME="/usr/local/cuda")
    assert code == 0, err
    assert report["cuda"]["source"] == "CUDA_HOME"
    wheels = only_manifest(cascade_build)
    if report["cuda"]["release"] == wheels.key.ingredients["cuda.release"]:
        assert only_manifest(tmp_path / "out").key == wheels.key
    assert kcache_build(*words, CUDA_HOME="/usr/local/cuda")[1]["status"] == "up-to-date"


def test_user_flags_enter_the_key_and_flags_behind_flashinfers_back_are_kept_out(tmp_path: Path, cascade_build: Path) -> None:
    words = ("--modules", "cascade", "--arch", "9.0a", "-o", tmp_path / "out", "--work-dir", tmp_path / "work")
    hidden = {"NVCC_APPEND_FLAGS": "-this-would-fail", "CPATH": "/nowhere"}
    code, report, err = kcache_build(*words, FLASHINFER_EXTRA_CUDAFLAGS="-DKCACHE_TEST=1", **hidden)
    assert code == 0, err
    assert any("NVCC_APPEND_FLAGS" in warning and "CPATH" in warning for warning in report["warnings"])
    flags = only_manifest(tmp_path / "out").key.ingredients["build.flags"]
    assert digest.is_digest(flags)


def test_the_sampling_api_reaches_what_flashinfer_chooses(tmp_path: Path, build_modules: BuildModules) -> None:
    reached = {arch: sampling(tmp_path, arch, listed) for arch, listed in (("90a", "9.0a"), ("100a", "10.0a"))}
    assert reached["90a"]["modules"] == ["sampling", "topk"]
    assert reached["90a"]["warnings"] == reached["100a"]["warnings"] == []
    assert reached["100a"]["modules"] == ["blackwell_softmax", "sampling", "topk"]
    assert min(reached["90a"]["calls"].values()) > 10
    assert {"top_k_top_p_sampling_from_probs", "softmax", "chain_speculative_sampling", "min_p_sampling_from_probs"} <= set(
        reached["90a"]["calls"]
    )


def sampling(folder: Path, arch: str, listed: str) -> dict[str, Any]:
    from kcache.probe.specs import Question, ask
    from kcache.probe.toolkit import find_toolkit, make_home

    (folder / arch).mkdir()
    found = find_toolkit(os.environ, [Path(path) for path in this_interpreter().search_path])
    home = make_home(found, folder / arch / "cuda", os.uname().machine).home
    environ = dict(
        os.environ, CUDA_HOME=str(home), FLASHINFER_CUDA_ARCH_LIST=listed, FLASHINFER_WORKSPACE_BASE=str(folder / arch)
    )
    question = Question(arch=arch, cuda_release=found.release, kinds=("sampling",), offline=True)
    reached = ask(sys.executable, question, environ, folder / arch)["kinds"]["sampling"]
    assert isinstance(reached, dict)
    return reached
