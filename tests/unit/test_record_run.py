"""Running a program to be recorded: its exit code, its signals, its environment, what it leaves behind. By the command line."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from schemas import conforms

from kcache.workflows.record import first_difference
from kcache.workflows.record_run import program_environ
from kcache.workflows.recorded import CacheDirectories, cache_directories, find_recorded
from kcache.workflows.recorded_objects import RecordedObjects


@pytest.fixture
def toolkit(tmp_path: Path) -> Path:
    """Stands for a toolkit, so that none is looked for: nothing here compiles."""
    return tmp_path / "no-toolkit"


def command(
    tmp_path: Path, toolkit: Path, *program: str, options: tuple[str, ...] = ("--json",)
) -> tuple[list[str], dict[str, str]]:
    words = [sys.executable, "-m", "kcache", "build", "--record", "-o", str(tmp_path / "out"), *options, "--", *program]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER_", "KCACHE_"))}
    return words, {**environ, "CUDA_HOME": str(toolkit)}


def record(tmp_path: Path, toolkit: Path, *program: str, **more: str) -> tuple[int, dict[str, Any], str]:
    words, environ = command(tmp_path, toolkit, *program)
    done = subprocess.run(words, env={**environ, **more}, capture_output=True, text=True, check=False, timeout=120)
    document = json.loads(done.stdout) if done.stdout else {}
    if document:
        conforms("error" if document["status"] == "error" else "build", document)
    return done.returncode, document, done.stderr


@pytest.mark.parametrize("code", [1, 7, 77])
def test_the_programs_exit_code_is_passed_on(tmp_path: Path, toolkit: Path, code: int) -> None:
    ended, report, _ = record(tmp_path, toolkit, "/bin/sh", "-c", f"exit {code}")
    assert ended == report["program"]["exit_code"] == code


def test_a_program_that_compiled_nothing_is_no_success(tmp_path: Path, toolkit: Path) -> None:
    ended, report, err = record(tmp_path, toolkit, "/bin/true")
    assert (ended, report["status"], report["entries"], report["left_out"]) == (1, "nothing", [], [])
    assert "no entry was recorded" in err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_a_program_that_died_of_a_signal_gives_what_a_shell_would(tmp_path: Path, toolkit: Path, number: int) -> None:
    assert record(tmp_path, toolkit, "/bin/sh", "-c", f"kill -{int(number)} $$")[0] == 128 + number


def test_a_program_that_cannot_be_started_is_a_usage_error(tmp_path: Path, toolkit: Path) -> None:
    ended, _, err = record(tmp_path, toolkit, "/nowhere/program")
    assert ended == 2
    assert "/nowhere/program cannot be started: No such file or directory" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_reaches_the_program(tmp_path: Path, toolkit: Path, number: int) -> None:
    name = signal.Signals(number).name.removeprefix("SIG")
    script = f"trap 'exit 9' {name}; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    words, environ = command(tmp_path, toolkit, "/bin/sh", "-c", script)
    process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / "ready")
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 9


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists()


def test_the_program_has_the_signal_mask_and_streams_that_it_would_have(tmp_path: Path, toolkit: Path) -> None:
    script = "import signal, sys; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), input())"
    words, environ = command(tmp_path, toolkit, sys.executable, "-c", script, options=())  # a shell would clear the mask
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60, input="a line\n")
    assert done.stdout == "[] a line\n"


def test_with_json_what_the_program_prints_is_on_standard_error(tmp_path: Path, toolkit: Path) -> None:
    ended, report, err = record(tmp_path, toolkit, "/bin/sh", "-c", "echo from the program; exit 4")
    assert (ended, report["program"]["exit_code"]) == (4, 4)
    assert "from the program\n" in err


@pytest.mark.parametrize("how", ["sleep 300 & exit 3", "trap '' TERM; (trap '' TERM; sleep 2; sleep 300) & exit 3"])
def test_what_the_program_left_running_is_ended(tmp_path: Path, toolkit: Path, how: str) -> None:
    script = tmp_path / "program"
    script.write_text(f"#!/bin/sh\n{how}\n")
    script.chmod(0o755)
    ended, report, err = record(tmp_path, toolkit, str(script), MARK=str(tmp_path))
    assert ended == 3
    assert report["program"]["left_running"] >= 1
    assert "processes running, which were ended" in err
    assert not [path for path in Path("/proc").glob("[0-9]*/environ") if f"MARK={tmp_path}".encode() in readable(path)]


def readable(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--record", "-o", "x"], "--record needs a program"),
        (["-o", "x", "--modules", "cascade", "--", "true"], "CMD and --in-place are for --record"),
        (["-o", "x", "--in-place"], "CMD and --in-place are for --record"),
        (["--record", "-o", "x", "--kinds", "sampling", "--", "true"], "one --gpu, --python and --work-dir only"),
        (["--record", "-o", "x", "--jobs", "3", "--", "true"], "one --gpu, --python and --work-dir only"),
        (["--record", "-o", "x y", "--", "true"], "has a character that build files cannot hold"),
    ],
)
def test_options_that_do_not_go_together_are_told(tmp_path: Path, toolkit: Path, words: list[str], told: str) -> None:
    _, environ = command(tmp_path, toolkit)
    done = subprocess.run(
        [sys.executable, "-m", "kcache", "build", *words], env=environ, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 2
    assert told in done.stderr


def test_one_architecture_at_a_time(tmp_path: Path, toolkit: Path) -> None:
    words, environ = command(tmp_path, toolkit, "true", options=("--arch", "9.0a,12.0f"))
    environ.pop("CUDA_HOME")
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode in (1, 2)
    assert "a recording is for one architecture" in done.stderr or "toolchain" in done.stderr


PRIVATE = Path("/work-directory/recorded")


@pytest.mark.parametrize(
    ("environ", "wanted", "unset"),
    [
        ({"HOME": "/h"}, {"HOME": "/h", "HF_HOME": "/h/.cache/huggingface", "TORCH_HOME": "/h/.cache/torch"}, []),
        ({}, {"HOME": str(PRIVATE)}, ["HF_HOME"]),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, {"HF_HOME": "/x/huggingface"}, []),
        ({"HOME": "/h", "HF_HOME": "/f", "TORCH_HOME": "/t"}, {"HF_HOME": "/f", "TORCH_HOME": "/t"}, []),
        ({"HOME": "/h", "CPATH": "/i", "FLASHINFER_DISABLE_JIT": "1"}, {}, ["CPATH", "FLASHINFER_DISABLE_JIT"]),
        ({"HOME": "/h", "FLASHINFER_AUTOTUNE_CACHE_DIR": "/a", "B12X_COMPILE_CACHE_DIR": "/b"}, {}, []),
        (
            {"HOME": "/h", "CC": "clang", "FLASHINFER_EXTRA_CUDAFLAGS": "-G"},
            {"CC": "clang", "FLASHINFER_EXTRA_CUDAFLAGS": "-G"},
            [],
        ),
        ({"HOME": "/h", "FLASHINFER_CUDA_ARCH_LIST": "8.0"}, {"FLASHINFER_CUDA_ARCH_LIST": "9.0a"}, []),
    ],
)
def test_the_programs_caches_are_empty_and_all_else_is_where_it_was(
    environ: dict[str, str], wanted: dict[str, str], unset: list[str]
) -> None:
    made = program_environ(environ, {"FLASHINFER_CUDA_ARCH_LIST": "9.0a"}, PRIVATE, uid=4242)
    assert wanted.items() <= dict(made.variables).items()
    assert not set(unset) & set(made.variables)
    assert set(made.removed) == {name for name in unset if name in environ}
    directories = cache_directories(made.variables, 4242)
    assert all(PRIVATE in place.parents for place in (directories.flashinfer, directories.autotune, directories.b12x))


def test_in_place_nothing_is_moved() -> None:
    environ = {"HOME": "/h", "XDG_CACHE_HOME": "/x"}
    made = program_environ(environ, {}, None, uid=4242)
    assert dict(made.variables) == environ
    assert cache_directories(made.variables, 4242) == CacheDirectories(
        flashinfer=Path("/h/.cache/flashinfer"), autotune=Path("/h/.cache/flashinfer/autotune"), b12x=Path("/x/b12x/compile")
    )
    named = {
        **environ,
        "FLASHINFER_WORKSPACE_BASE": "/w",
        "B12X_COMPILE_CACHE_DIR": "/b/c",
        "FLASHINFER_AUTOTUNE_CACHE_DIR": "/a",
    }
    assert cache_directories(named, 4242).b12x == Path("/b/c")
    assert cache_directories(named, 4242).flashinfer == Path("/w/.cache/flashinfer")


def test_what_landed_is_listed_by_kind(tmp_path: Path) -> None:
    directories = cache_directories({"HOME": str(tmp_path)}, 4242)
    ops = directories.flashinfer / "0.7.4" / "120f" / "cached_ops"
    for name in (
        ops / "cascade" / "build.ninja",
        ops / "b12x_moe_sm120a_cute_dsl" / "kernel.o",
        ops / "half" / "x.o",
        directories.flashinfer / "cubins" / "abc" / "x.cubin",
        directories.flashinfer / "autotune" / "v2" / "0123" / "entry.json",
        directories.b12x / "ab" / "k.o",
        directories.b12x / "ab" / "k.json",
        directories.b12x / "ab" / ".k.o.half.tmp",
        directories.b12x / "cd" / "stopped.lock",
        directories.b12x / "preparation" / "s.json",
        directories.b12x / "preparation" / "s.lock",
    ):
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(b"x")
    found = find_recorded(directories)
    assert [(one.kind, one.name, one.flashinfer, one.arch) for one in found] == [
        ("autotune", "v2/0123", "", ""),
        ("b12x-compile", "ab/k.o", "", ""),
        ("b12x-compile", "cd/stopped.o", "", ""),
        ("b12x-selections", "s.json", "", ""),
        ("cubin", "abc", "", ""),
        ("cute-dsl", "b12x_moe_sm120a_cute_dsl", "0.7.4", "120f"),
        ("nvcc-module", "cascade", "0.7.4", "120f"),
    ]
    before = {one.path: one.stamp() for one in found}
    (ops / "cascade" / "cascade.so").write_bytes(b"")
    assert [one.name for one in find_recorded(directories) if before[one.path] != one.stamp()] == ["cascade"]


def test_a_kind_that_is_not_packed_is_told_and_is_no_failure(tmp_path: Path, toolkit: Path) -> None:
    folder = "$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer/cubins"
    ended, report, err = record(tmp_path, toolkit, "/bin/sh", "-c", f"mkdir -p {folder}; touch {folder}/k.cubin")
    (left,) = report["left_out"]
    assert (left["kind"], left["failed"]) == ("cubin", False)
    assert "recorded, but not packed yet: kind cubin" in err
    assert (ended, report["status"]) == (1, "nothing")


def test_kernels_of_which_the_gpu_is_not_known_are_left_out_with_the_remedy(tmp_path: Path, toolkit: Path) -> None:
    folder = "$FLASHINFER_WORKSPACE_BASE/.cache/flashinfer/0.7.4/120f/cached_ops/b12x_moe_sm120a_cute_dsl"
    _, report, _ = record(tmp_path, toolkit, "/bin/sh", "-c", f"mkdir -p {folder}; touch {folder}/k.o")
    (left,) = report["left_out"]
    assert (left["kind"], left["arch"], left["failed"]) == ("cute-dsl", "120f", True)
    assert "not known for which GPU" in left["reason"]
    assert "--gpu" in left["reason"]


def test_in_place_only_what_is_new_counts(tmp_path: Path, toolkit: Path) -> None:
    base = tmp_path / "base"
    for name in ("old", "changed"):
        folder = base / ".cache" / "flashinfer" / "0.7.4" / "90a" / "cached_ops" / f"{name}_sm90a_cute_dsl"
        folder.mkdir(parents=True)
        (folder / "k.o").write_bytes(b"1")
    new = folder.parent / "new_sm90a_cute_dsl"
    program = ["/bin/sh", "-c", f"echo 2 > {folder}/k.o; mkdir {new}; echo 3 > {new}/k.o"]
    words, environ = command(tmp_path, toolkit, *program, options=("--json", "--in-place"))
    environ["FLASHINFER_WORKSPACE_BASE"] = str(base)
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False, timeout=60)
    left = json.loads(done.stdout)["left_out"]
    assert [one["name"] for one in left] == ["changed_sm90a_cute_dsl", "new_sm90a_cute_dsl"]


@pytest.mark.parametrize(
    ("wanted", "found", "told"),
    [
        (b"a\nb\n", b"a\nb\n", ""),
        (b"a\nb\n", b"a\nc\n", "it has 'c' for 'b'"),
        (b"  -O3\nx", b"  -O3 $\n  -G\nx", "it has '-G'"),
        (b"a\nb\n", b"a\n", "it lacks 'b'"),
        (b"a\nb\n", b"b\na\n", "its lines are in another order"),
    ],
)
def test_the_first_line_that_differs_is_told(wanted: bytes, found: bytes, told: str) -> None:
    assert first_difference(wanted, found) == told


@pytest.fixture
def made(tmp_path: Path) -> tuple[Path, list[str]]:
    """An object, and two sources that are older."""
    sources = [tmp_path / "a.cu", tmp_path / "b.cuh"]
    for source in sources:
        source.write_text("source")
    time.sleep(0.02)
    (tmp_path / "a.o").write_bytes(b"object")
    return tmp_path / "a.o", [str(source) for source in sources]


def changed(made: tuple[Path, list[str]]) -> str:
    """The file that changed, by a record that is read and written anew as every recording does."""
    output, sources = made
    record = RecordedObjects(output.parent / "record.json", [output.parent / "x-1.dist-info"])
    found, late = record.made_of(output, sources)
    assert set(found) == set(sources)
    record.write()
    return Path(late).name


def rewrite(path: str, text: str) -> None:
    """Changes a file and gives it an old time, which ninja believes."""
    Path(path).write_text(text)
    os.utime(path, (1, 1))


def test_sources_older_than_an_object_are_what_it_was_made_of(made: tuple[Path, list[str]]) -> None:
    assert changed(made) == ""


def test_b21_a_source_that_changed_under_an_old_time_is_seen_at_once(made: tuple[Path, list[str]]) -> None:
    time.sleep(0.02)
    rewrite(made[1][1], "changed")
    assert changed(made) == "b.cuh"
    assert changed(made) == "b.cuh"  # and not believed the next time


def test_b21_and_later_by_its_digest(made: tuple[Path, list[str]]) -> None:
    assert changed(made) == ""
    rewrite(made[1][0], "changed")
    assert changed(made) == "a.cu"


def test_a_source_that_was_linked_since_did_not_change(made: tuple[Path, list[str]]) -> None:
    assert changed(made) == ""
    time.sleep(0.02)
    os.link(made[1][0], f"{made[1][0]}.link")
    assert changed(made) == ""


def test_a_source_that_was_linked_before_the_first_time_is_what_its_wheel_says(made: tuple[Path, list[str]]) -> None:
    time.sleep(0.02)
    os.link(made[1][0], f"{made[1][0]}.link")
    assert changed(made) == "a.cu"
    metadata = made[0].parent / "x-1.dist-info"
    metadata.mkdir()
    hashed = base64.urlsafe_b64encode(hashlib.sha256(b"source").digest()).decode().rstrip("=")
    (metadata / "RECORD").write_text(f"a.cu,sha256={hashed},6\nb.cuh,,\nx-1.dist-info/RECORD,,\n")
    assert changed(made) == ""
    (made[0].parent / "record.json").unlink()
    rewrite(made[1][0], "another")
    assert changed(made) == "a.cu"


def test_an_object_that_was_compiled_again_is_a_new_one(made: tuple[Path, list[str]]) -> None:
    assert changed(made) == ""
    rewrite(made[1][0], "changed")
    time.sleep(0.02)
    made[0].write_bytes(b"another")
    assert changed(made) == ""


def test_a_record_that_is_none_is_no_record(made: tuple[Path, list[str]]) -> None:
    for text in ("", "[]", "{}", '{"format": "kcache.recorded/1", "objects": 3}'):
        (made[0].parent / "record.json").write_text(text)
        assert changed(made) == ""
