"""What people meet every day: completion, colours, levels, near misses, and errors that programs can read."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from matrix_samples import make_store

ROOT = Path(__file__).parents[2]
KCACHE = [sys.executable, "-m", "kcache"]


def variables(**given: str) -> dict[str, str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER", "KCACHE", "CUDA", "NO_COLOR"))
    }
    return {**kept, "PYTHONPATH": str(ROOT), **given}


def run(*words: str, **given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*KCACHE, *words], env=variables(**given), capture_output=True, text=True, timeout=120, check=False)


def on_a_terminal(*words: str, **given: str) -> str:
    """What a command writes where its standard output is a terminal."""
    ours, theirs = pty.openpty()
    with subprocess.Popen([*KCACHE, *words], env=variables(**given), stdout=theirs, stderr=subprocess.DEVNULL) as process:
        os.close(theirs)
        read = b""
        try:
            while some := os.read(ours, 65536):
                read += some
        except OSError:  # the other end is closed
            pass
        process.wait(timeout=120)
    os.close(ours)
    return read.decode()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kcache res", "restore"),
        ("kcache restore --fr", "--from"),
        ("kcache manifest ch", "check"),
        ("kcache restore --fal", "--fallback"),
    ],
)
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_are_offered_commands_and_options(shell: str, typed: str, offered: str) -> None:
    words = typed.split()
    asked = {"_KCACHE_COMPLETE": f"{shell}_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    if shell == "fish":
        asked |= {"COMP_CWORD": words[-1]}
    done = run(**asked)
    assert done.returncode == 0, done.stderr
    assert offered in done.stdout.replace(",", "\n").split(), done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_is_given_its_script(shell: str) -> None:
    done = run(_KCACHE_COMPLETE=f"{shell}_source")
    assert done.returncode == 0 and f"_KCACHE_COMPLETE={shell}_complete" in done.stdout


def test_a_real_bash_completes(tmp_path: Path) -> None:
    program = tmp_path / "kcache"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kcache "$@"\n')
    program.chmod(0o755)
    script = """
    eval "$(_KCACHE_COMPLETE=bash_source kcache)"
    COMP_WORDS=(kcache restore --st) COMP_CWORD=2
    "$(complete -p kcache | sed 's/.* -F \\([^ ]*\\) .*/\\1/')" kcache --st restore
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env=variables(PATH=path), capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.split() == ["--strict", "--strict-match"], done


def test_no_color_is_honoured_and_colours_are_there_without_it() -> None:
    doctor = ("doctor", "--arch", "9.0a")
    flags = {"FLASHINFER_EXTRA_CUDAFLAGS": "-g"}  # a finding, so that there is something to colour
    coloured, plain = on_a_terminal(*doctor, **flags), on_a_terminal(*doctor, **flags, NO_COLOR="1")
    assert "\x1b[33m" in coloured or "\x1b[31m" in coloured
    assert "\x1b[" not in plain and len(plain) > 100


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("lokup",), "Did you mean `lookup`?"),
        (("lookup", "--form", "/x"), "Did you mean '--from'?"),
        (("restore", "--shel", "--from", "/x"), "'--shell'"),
    ],
)
def test_near_misses_are_told_what_was_meant(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2 and said in done.stderr
    assert len(done.stderr.splitlines()) == 1


FAILING = [
    (("lookup", "--from", "/nonexistent"), 1, "StoreError"),
    (("lookup",), 2, "UsageError"),
    (("lokup",), 2, "UsageError"),
    (("restore",), 2, "UsageError"),
    (("restore", "--from", "/nonexistent", "--deadline", "soon"), 2, "UsageError"),
    (("publish", "/nonexistent", "--to", "/nonexistent/either"), 2, "UsageError"),
    (("import", "/nonexistent", "--to", "hf://x/y", "--bogus"), 2, "UsageError"),
    (("export", "--from", "/nonexistent", "-o", "/nonexistent/x"), 1, "StoreError"),
    (("compact", "--to", "/nonexistent/store"), 1, "StoreError"),
    (("matrix", "--from", "/nonexistent"), 1, "StoreError"),
    (("build", "-o", "/nonexistent", "--arch", "hopper", "--modules", "page"), 2, "UsageError"),
    (("warmup", "--kinds", "bogus"), 2, "UsageError"),
    (("env", "--arch", "hopper"), 2, "UsageError"),
    (("verify", "--arch", "hopper"), 2, "UsageError"),
    (("doctor", "--arch", "hopper"), 2, "UsageError"),
    (("manifest", "from-config", "/nonexistent"), 2, "RecipeError"),
]


@pytest.mark.parametrize(("words", "code", "error"), FAILING, ids=[" ".join(words) for words, _, _ in FAILING])
def test_a_failure_is_one_json_object_for_every_command(words: tuple[str, ...], code: int, error: str) -> None:
    done = run(*words, "--json")
    document = json.loads(done.stdout)
    assert document["status"] == "error" and document["exit_code"] == done.returncode
    assert (done.returncode, document["error"]["error"]) == (code, error)
    assert document["reasons"] and document["reasons"][0] in done.stderr
    assert set(document) == {"status", "error", "reasons", "exit_code"} and set(document["error"]) == {
        "error",
        "what",
        "why",
        "remedy",
    }


def test_a_restore_that_fails_says_so_in_its_own_report_with_the_same_words() -> None:
    done = run("restore", "--from", "/nonexistent", "--arch", "9.0a", "--json")
    document = json.loads(done.stdout)
    assert (document["status"], document["exit_code"]) == ("error", done.returncode)
    assert document["reasons"]


def test_a_server_whose_options_hold_json_is_not_answered_in_json() -> None:
    done = run("restore", "--bogus", "--", "echo", "--json")
    assert (done.returncode, done.stdout) == (0, "--json\n")


def test_a_model_that_is_nearly_published_is_told(tmp_path: Path) -> None:
    make_store(tmp_path / "store", models=3, archs=6, versions=10)
    words = ["restore", "--from", str(tmp_path / "store"), "--gpu", "rtx-pro-6000", "--json"]
    for name, said in [
        ("maker/model-002-mo", ["nothing is published here for the model maker/model-002-mo: did you mean maker/model-002-moe?"]),
        ("Model-001-moee", ["nothing is published here for the model Model-001-moee: did you mean maker/model-001-moe?"]),
        ("model-002-moe", []),
        ("*", []),
    ]:
        warnings = json.loads(run(*words, "--model", name, KCACHE_DIR=str(tmp_path / "cache")).stdout)["warnings"]
        assert [line for line in warnings if "for the model" in line] == said, (name, warnings)
