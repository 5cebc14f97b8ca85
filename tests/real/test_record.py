"""`kcache build --record`: real programs that call FlashInfer's own JIT, without a GPU. What they compile is published, restored
and proven like any other entry; what they leave half-made is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from container import Container, copy_flashinfer

from kcache.probe import ninja
from kcache.probe.packages import this_interpreter
from kcache.workflows.build_output import read_build_output
from kcache.workflows.recorded import cache_directories, find_recorded, read_module

pytestmark = pytest.mark.real

DECODE = (
    "single_decode_with_kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16_head_dim_qk_64_head_dim_vo_64_posenc_0_"
    "use_swa_False_use_logits_cap_False"
)
"""A module that FlashInfer generates from arguments, and that its own wheels do not hold."""

PROGRAM = """
import torch
from flashinfer.jit.attention import gen_single_decode_module
from flashinfer.jit.cascade import gen_cascade_module
gen_cascade_module().build()
gen_single_decode_module(torch.float16, torch.float16, torch.float16, 64, 64, 0, False, False).build()
print("the program is done")
"""

KILLED = """
import os, signal, threading, time
from pathlib import Path
from flashinfer.jit import env
from flashinfer.jit.cascade import gen_cascade_module
from flashinfer.jit.page import gen_page_module
gen_cascade_module().build()

def compiles(process):
    try:
        return b"cicc" in (process / "cmdline").read_bytes() and Path(os.readlink(process / "cwd")).is_relative_to(here)
    except OSError:  # it has ended
        return False

def kill():
    while not any(map(compiles, Path("/proc").glob("[0-9]*"))):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)

here = Path(env.FLASHINFER_JIT_DIR).resolve()  # other programs compile on this machine too

threading.Thread(target=kill, daemon=True).start()
gen_page_module().build()
"""

OWN_FLAGS = """
import os
os.environ["FLASHINFER_EXTRA_CUDAFLAGS"] = "-DUNSEEN=1"
from flashinfer.jit.cascade import gen_cascade_module
from flashinfer.jit.quantization import gen_quantization_module
gen_cascade_module().build()
gen_quantization_module().build()
"""


class Recording:
    """What one `kcache build --record --json` did."""

    def __init__(self, output: Path, done: subprocess.CompletedProcess[str]) -> None:
        self.output, self.code, self.err = output, done.returncode, done.stderr
        self.report: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}

    @property
    def modules(self) -> list[str]:
        return sorted(module for entry in self.report["entries"] for module in entry["modules"])

    @property
    def left_out(self) -> dict[str, str]:
        return {one["name"]: one["reason"] for one in self.report["left_out"]}


def record(folder: Path, program: str, *options: str, output: Path | None = None, **environ: str) -> Recording:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "program.py").write_text(program)
    output = output or folder / "out"
    words = ["build", "--record", "--arch", "9.0a", "-o", str(output), "--json", *options]
    given = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER_", "KCACHE_", "CUDA_"))}
    given |= {"PATH": os.pathsep.join([str(Path(sys.executable).parent), given["PATH"]]), **environ}
    command = [sys.executable, "-m", "kcache", *words, "--", sys.executable, str(folder / "program.py")]
    return Recording(output, subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=1500))


@pytest.fixture(scope="module")
def recording(cascade_build: Path, build_cache: Path) -> Recording:
    """A program that ran to its end; kept between sessions as other builds are."""
    place = build_cache / f"recorded-{sys.version_info[0]}.{sys.version_info[1]}"
    recording = record(place, PROGRAM)
    assert recording.code == 0, recording.err
    return recording


def test_a_program_that_ran_to_its_end_is_recorded_whole(recording: Recording) -> None:
    assert "the program is done" in recording.err
    assert recording.modules == ["cascade", DECODE]
    assert recording.left_out == {}
    assert recording.report["status"] in ("built", "up-to-date")


def test_a_recorded_module_is_the_entry_that_a_build_makes(recording: Recording, cascade_build: Path) -> None:
    (built,) = read_build_output(cascade_build)
    recorded = {entry.manifest.key.modules: entry.manifest for entry in read_build_output(recording.output)}
    mine = recorded["cascade",]
    assert mine.key == built.manifest.key
    assert mine.sources == built.manifest.sources
    assert mine.artifacts[0].elf == built.manifest.artifacts[0].elf
    assert mine.provenance["recorded"] is True
    assert mine.build_seconds["cascade"] > 0


def test_a_module_that_was_generated_is_recorded_with_its_recipe(recording: Recording) -> None:
    recorded = {entry.manifest.key.modules: entry.manifest for entry in read_build_output(recording.output)}
    sources = recorded[DECODE,].sources
    code = {"jit/attention/modules.py", "jit/attention/utils.py", "jit/core.py"}
    copied_or_filled_in = {"data/csrc/single_decode.cu", "data/csrc/single_decode_customize_config.jinja"}
    assert code | copied_or_filled_in <= set(sources)
    assert {path.partition("/")[0] for path in sources} == {"compilation_context.py", "data", "jit"}
    assert not {path for path in sources if path.startswith("jit/") and "/cake" in path}  # recipes of other modules


def test_what_was_recorded_is_published_restored_and_used(
    tmp_path: Path, recording: Recording, build_store: Callable[[Path], Path]
) -> None:
    container = Container(home=tmp_path / "home")
    restored = container.restore(build_store(recording.output))
    assert restored.code == 0, restored.err
    assert restored.document["status"] == "hit"
    proof = container.verify()
    assert proof["status"] == "proven", proof
    assert proof["compiler_runs"] == 0
    assert sorted(module["module"] for module in proof["modules"]) == ["cascade", DECODE]


def test_a_program_killed_in_the_middle_of_a_compile_loses_only_that(tmp_path: Path, cascade_build: Path) -> None:
    recording = record(tmp_path, KILLED)
    assert recording.code == recording.report["program"]["exit_code"] == 128 + 9
    assert recording.report["program"]["left_running"] >= 1
    assert recording.modules == ["cascade"]
    assert list(recording.left_out) == ["page"]
    assert "its build failed or was stopped" in recording.left_out["page"]
    assert recording.report["status"] == "partial"
    assert [entry.manifest.key.modules for entry in read_build_output(recording.output)] == [("cascade",)]
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in readable(path)]


def readable(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_flags_of_the_programs_own_and_a_compile_that_failed_are_left_out(tmp_path: Path, cascade_build: Path) -> None:
    site = copy_flashinfer(tmp_path / "site")
    binding = site / "flashinfer/data/csrc/flashinfer_quantization_binding.cu"
    binding.unlink()  # the copy is hard-linked
    binding.write_text("#error this source is broken\n")
    recording = record(tmp_path, OWN_FLAGS, PYTHONPATH=str(site))
    assert recording.code == 1
    assert recording.modules == []
    told = "its build file is not the one that FlashInfer writes with these variables: it has '-DUNSEEN=1'"
    assert told in recording.left_out["cascade"]
    assert "its build failed or was stopped" in recording.left_out["quantization"]
    assert list(recording.output.glob("*.json")) == []


def test_in_place_what_was_there_before_is_not_taken(tmp_path: Path, recording: Recording, cascade_build: Path) -> None:
    program = "from flashinfer.jit.quantization import gen_quantization_module\ngen_quantization_module().build()\n"
    base = recording.output / ".build" / "recorded"
    cuda = recording.output / ".build" / "cuda"
    done = record(tmp_path, program, "--in-place", FLASHINFER_WORKSPACE_BASE=str(base), CUDA_HOME=str(cuda))
    shutil.rmtree(base / ".cache/flashinfer/0.7.4/90a/cached_ops/quantization")  # the next session's recording starts as this one
    assert done.code == 0, done.err
    assert done.modules == ["quantization"]
    assert done.left_out == {}


@pytest.fixture
def cascade_folder(recording: Recording) -> Iterator[Path]:
    """The directory in which the program's FlashInfer built `cascade`; times are put back afterwards."""
    folder = recording.output / ".build" / "recorded" / ".cache/flashinfer/0.7.4/90a/cached_ops/cascade"
    before = {path: path.stat() for path in folder.iterdir()}
    contents = {path: path.read_bytes() for path in folder.iterdir()}
    yield folder
    for path, status in before.items():
        if not path.exists() or path.read_bytes() != contents[path]:
            path.write_bytes(contents[path])
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def why(folder: Path) -> str:
    base = folder.parents[5]
    (found,) = [one for one in find_recorded(cache_directories({"HOME": str(base)}, 0)) if one.name == "cascade"]
    own = str(Path(this_interpreter().executable).parent)
    program = ninja.find_ninja(os.pathsep.join([own, os.environ["PATH"]]))
    module, reason = read_module(found, os.environ, program)
    assert (module is None) == bool(reason)
    return reason


def test_a_module_as_its_program_left_it_is_whole(cascade_folder: Path) -> None:
    assert why(cascade_folder) == ""


def test_a_library_older_than_an_object_is_left_out(cascade_folder: Path) -> None:
    library = cascade_folder / "cascade.so"
    newer = library.stat().st_mtime + 50
    for path in cascade_folder.glob("*.o"):
        os.utime(path, (newer, newer))
    assert "its last build did not finish: ninja would run" in why(cascade_folder)


def test_a_library_without_an_object_is_left_out(cascade_folder: Path) -> None:
    next(cascade_folder.glob("*.o")).unlink()
    assert "its last build did not finish: ninja would run" in why(cascade_folder)


def test_a_library_that_ninja_never_finished_is_left_out(cascade_folder: Path) -> None:
    log = cascade_folder / ".ninja_log"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if "cascade.so" not in line))
    assert "its last build did not finish: ninja would run 1 command" in why(cascade_folder)


def test_a_module_without_a_record_is_left_out(cascade_folder: Path) -> None:
    (cascade_folder / ".ninja_log").unlink()
    assert why(cascade_folder) == "its last build did not finish: ninja has no record of it"


def test_a_module_without_a_library_is_left_out(cascade_folder: Path) -> None:
    (cascade_folder / "cascade.so").unlink()
    assert "it has no library" in why(cascade_folder)


def test_a_module_for_several_architectures_is_left_out(tmp_path: Path, cascade_folder: Path) -> None:
    both = tmp_path / ".cache" / "flashinfer" / "0.7.4" / "90a_120f" / "cached_ops" / "cascade"
    shutil.copytree(cascade_folder, both)
    assert "several architectures at once (90a_120f)" in why(both)
