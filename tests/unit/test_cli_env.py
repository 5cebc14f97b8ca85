"""`kcache env` in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from schemas import conforms

from kcache.digest import is_digest
from kcache.key import parse_environment

REPOSITORY = Path(__file__).parents[2]


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    base = {key: value for key, value in os.environ.items() if not key.startswith(("FLASHINFER", "KCACHE", "CUDA"))}
    base["PYTHONPATH"] = str(REPOSITORY)
    command = [sys.executable, "-m", "kcache", "env", *words]
    return subprocess.run(command, env={**base, **environ}, capture_output=True, text=True, timeout=120, check=False)


def document(*words: str, **environ: str) -> dict[str, Any]:
    done = run(*words, "--json", **environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_json_is_one_object_that_stands_in_for_the_host(tmp_path: Path) -> None:
    found = document("--arch", "9.0a,12.0f")
    environment = parse_environment(found)
    assert environment.archs == ("90a", "120f")
    assert found["arch_names"][1] == {"flashinfer": "120f", "FLASHINFER_CUDA_ARCH_LIST": "12.0f", "CUTE_DSL_ARCH": "sm_120a"}
    assert found["cache"]["root"]
    (tmp_path / "env.json").write_text(json.dumps(found))
    again = parse_environment(document("--env", str(tmp_path / "env.json")))
    assert again == environment


def test_a_saved_environment_holds_every_source_and_nothing_of_the_place(tmp_path: Path) -> None:
    file = tmp_path / "env.json"
    assert run("--arch", "9.0", "--save", str(file)).returncode == 0
    saved = parse_environment(json.loads(file.read_bytes()))
    assert set(json.loads(file.read_bytes())) == {"format", "facts", "archs", "libraries", "sources"}
    assert saved.archs == ("90a",)
    names = ("jit/core.py", "jit/env.py", "jit/cpp_ext.py", "compilation_context.py", "data/csrc/sampling.cu")
    assert all(is_digest(saved.source(name).value) for name in names)
    for directory in ("csrc", "include", "cutlass", "cccl", "spdlog"):
        assert any(name.startswith(f"data/{directory}/") for name in saved.sources), directory
    assert not any("__pycache__" in name or name.endswith(".pyc") for name in saved.sources)
    assert file.stat().st_mode & 0o777 == 0o644
    assert parse_environment(document("--env", str(file))) == saved


def test_an_environment_is_saved_through_a_linked_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert run("--arch", "9.0a", "--save", str(tmp_path / "link" / "env.json")).returncode == 0
    assert (tmp_path / "real" / "env.json").is_file()


def test_the_table_shows_each_ingredient_and_no_more_than_a_terminal_holds() -> None:
    done = run("--arch", "9.0a", COLUMNS="80")
    assert done.returncode == 0
    for word in ("gpu.arch", "90a", "flashinfer.version", "tvm_ffi.version", "libstdcxx.GLIBCXX", "sm_90a", "cache root"):
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_an_unusable_home_is_shown_with_what_the_server_needs(tmp_path: Path) -> None:
    xdg = tmp_path / "xdg"
    xdg.mkdir()
    cache = document("--arch", "9.0a", HOME="/nonexistent", XDG_CACHE_HOME=str(xdg))["cache"]
    assert cache["root"] == f"{xdg}/kcache"
    assert cache["exports"]["FLASHINFER_WORKSPACE_BASE"] == str(xdg)
    assert cache["rejected"][0].startswith("HOME: ")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--arch", "hopper"), 2, "not a GPU architecture"),
        (("--python", "/nonexistent/python"), 1, "--python"),
        (("--env", "/nonexistent/env.json"), 2, "cannot be read"),
        (("--arch", "9.0a", "--save", "/nonexistent/x/env.json"), 1, "/nonexistent/x"),
    ],
)
def test_what_cannot_be_done_is_one_line_on_stderr(words: tuple[str, ...], code: int, said: str) -> None:
    done = run(*words, "--json")
    assert done.returncode == code
    document = json.loads(done.stdout)
    conforms("error", document)
    assert said in " ".join(document["reasons"])
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_that_is_no_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "env.json").write_text('{"format": "other"}')
    done = run("--env", str(tmp_path / "env.json"))
    assert done.returncode == 12
    assert "kcache env --save" in done.stderr


def test_another_python_is_described_as_itself(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=120)
    python = str(tmp_path / "venv" / "bin" / "python")
    found = document("--arch", "9.0a", "--python", python)
    assert found["places"]["python"] == python
    assert found["facts"]["flashinfer.version"] == {"absent": True}
    assert found["facts"]["torch.version"] == {"absent": True}
    assert found["sources"] == {}
