"""The driver of the dry run: whatever the child does, its caller learns it in time. The real child is in tests/real."""

from __future__ import annotations

import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kcache.errors import CollectError, ProbeError
from kcache.gpu_products import product
from kcache.workflows import cute_build
from kcache.workflows.cute_build import DryRun, compile_kernels, name_kernels

ANSWER = """
import json, os, signal, subprocess, sys, time
request = json.load(sys.stdin)
kernel = {"name": "m/k", "kernel": "k", "module": "m", "object": "/o/k.o", "cases": {"c": [1]}, "fallback": False,
          "status": "built", "seconds": 1.5, "error": "", "size": 3, "sha256": "sha256:00"}
answer = {"flashinfer": "0.7.4", "package": "/site/flashinfer", "python": {"cache_tag": "cpython-311", "soabi": "abi"},
          "stack": {"nvidia-cutlass-dsl": "4.8.0"}, "jit_dir": "/o", "kernels": [kernel],
          "modules": {"m": {"meta": {"arch": "sm120a"}, "key_files": ["/site/flashinfer/a/b.py", "/site/flashinfer/c.py"]}},
          "not_persisted": [{"kernel": "Direct", "where": "f.py:g", "cases": {"c": [1]}}],
          "triton_kernels": [{"kernel": "t", "cases": ["c"]}], "compiles": 0, "seconds": {},
          "cases": [{"id": "c", "status": "error", "errors": [{"tokens": 4, "error": "ValueError: no"}]}], "request": request}
def give(answer):
    open(request["answer"], "w").write(json.dumps(answer))
def progress(done, total):
    print("kcache-progress", json.dumps({"done": done, "total": total, "kernel": "m/k", "status": "built"}), file=sys.stderr)
    sys.stderr.flush()
"""


def run_of(tmp_path: Path, what_the_child_does: str) -> DryRun:
    """A run whose interpreter is a script that does this in place of the child."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{ANSWER}\n{what_the_child_does}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    case = {"id": "c", "tokens": [1]}
    return DryRun(
        python=str(script), workspace=str(tmp_path), gpu=product("gb10"), cuda="13.0", cases=[case], environ=dict(os.environ)
    )


def test_an_answer_is_taken_apart(tmp_path: Path) -> None:
    events: list[Any] = []
    answer = compile_kernels(run_of(tmp_path, "progress(1, 1); give(answer)"), jobs=2, progress=events.append)
    (kernel,) = answer.kernels
    assert (kernel.name, kernel.status, kernel.seconds, kernel.size, kernel.cases) == ("m/k", "built", 1.5, 3, {"c": (1,)})
    assert [(item.kind, item.kernel) for item in answer.left_out] == [("cute-dsl", "Direct"), ("triton", "t")]
    assert [(item.case, item.tokens, item.error) for item in answer.errors] == [("c", 4, "ValueError: no")]
    assert events == [{"done": 1, "total": 1, "kernel": "m/k", "status": "built"}]
    assert answer.failed == ()
    assert (answer.meta, answer.sources) == ({"m": {"arch": "sm120a"}}, {"m": ("a/b.py", "c.py")})
    assert answer.key_files == ("/site/flashinfer/a/b.py", "/site/flashinfer/c.py")
    assert (answer.package, answer.cache_tag, answer.stack) == (
        "/site/flashinfer",
        "cpython-311",
        {"nvidia-cutlass-dsl": "4.8.0"},
    )


def test_the_request_names_the_gpu_in_both_spellings(tmp_path: Path) -> None:
    request = run_of(tmp_path, "").request("build", "/a", 3, 5.0)
    assert (request["cute_dsl_arch"], request["arch_list"]) == ("sm_121a", "12.1a")
    assert (request["jobs"], request["seconds_per_kernel"], request["only"]) == (3, 5.0, None)
    assert request["gpu"]["sm_count"] == 48


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("os.kill(os.getpid(), 11)", "signal 11"),
        ("print('no memory', file=sys.stderr); sys.exit(9)", "exit code 9; its last words: no memory"),
        ("pass", "exit code 0"),
    ],
)
def test_a_child_that_ends_without_an_answer_is_told(tmp_path: Path, does: str, told: str) -> None:
    with pytest.raises(CollectError) as caught:
        compile_kernels(run_of(tmp_path, does), jobs=1)
    assert told in caught.value.why


@pytest.mark.parametrize(("kind", "told"), [("assumption", "not as kcache expects"), ("failed", "dry run failed")])
def test_an_error_of_the_child_names_what_was_asked_for(tmp_path: Path, kind: str, told: str) -> None:
    error = {"kind": kind, "what": "X has no y", "trace": [], "asked": [{"case": "c", "tokens": [1, 2]}]}
    does = f"give({{'error': {error}}})"
    with pytest.raises(ProbeError) as caught:
        name_kernels(run_of(tmp_path, does))
    assert told in caught.value.what
    assert "X has no y; asked for were c at [1, 2] tokens" in caught.value.why


def alive(pid_file: Path) -> bool:
    try:
        os.kill(int(pid_file.read_text()), 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid_file.read_text()}/stat").read_text().split()[2] != "Z"


def test_a_child_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    does = (
        f"other = subprocess.Popen(['sleep', '600']); open({str(tmp_path / 'pid')!r}, 'w').write(str(other.pid)); time.sleep(600)"
    )
    started = time.monotonic()
    with pytest.raises(CollectError, match="longer than 2 s"):
        compile_kernels(run_of(tmp_path, does), jobs=1, limit=2.0)
    assert time.monotonic() - started < 60
    assert not alive(tmp_path / "pid")


def test_without_a_limit_progress_gives_every_kernel_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_build, "SECONDS_BEFORE_KERNELS", 1.0)
    answer = compile_kernels(run_of(tmp_path, "progress(1, 3); time.sleep(2); give(answer)"), jobs=1, seconds_per_kernel=1.0)
    assert answer.flashinfer == "0.7.4"
    with pytest.raises(CollectError, match="longer than"):
        compile_kernels(run_of(tmp_path, "time.sleep(60)"), jobs=1, seconds_per_kernel=1.0)
