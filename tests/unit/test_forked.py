"""Jobs in forked processes: each one's end, whatever it is, is told, and loses nothing of the others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kcache.probe.children
from kcache.probe.children.forked import following

SCRIPT = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import forked

def job(name):
    if name == "dies":
        os.kill(os.getpid(), 11)
    if name == "leaves":
        os._exit(7)
    if name == "hangs":
        time.sleep(600)
    if name.startswith("long"):
        time.sleep(0.3)
    return {"status": "ok", "pid": os.getpid(), "text": name * 50000 if name == "large" else name}

results = {}
forked.run(sys.argv[3].split(), job, jobs=int(sys.argv[2]), limit=2.0, done=lambda name, result: results.update({name: result}))
print(json.dumps({"results": results, "mine": os.getpid()}))
"""


def forked(names: str, jobs: int) -> dict[str, dict[str, object]]:
    where = str(Path(kcache.probe.children.__file__).parent)
    command = [sys.executable, "-c", SCRIPT, where, str(jobs), names]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)
    assert all(result.get("pid") != answer["mine"] for result in answer["results"].values())
    return dict(answer["results"])


def test_all_jobs_are_done_by_few_processes() -> None:
    results = forked("a b c d e f large", 2)
    assert [result["status"] for result in results.values()] == ["ok"] * 7
    assert len({result["pid"] for result in results.values()}) <= 2
    assert len(str(results["large"]["text"])) == 250000


def test_a_job_that_dies_leaves_or_hangs_loses_only_itself() -> None:
    results = forked("a dies b hangs c leaves d", 2)
    assert {name: result["status"] for name, result in results.items()} == {
        "a": "ok", "b": "ok", "c": "ok", "d": "ok", "dies": "crashed", "hangs": "timeout", "leaves": "crashed",
    }  # fmt: skip
    assert "signal 11" in str(results["dies"]["error"])
    assert "exit code 7" in str(results["leaves"]["error"])
    assert "longer than 2 s" in str(results["hangs"]["error"])


def test_jobs_run_at_the_same_time() -> None:
    assert len({result["pid"] for result in forked("long1 long2 long3", 3).values()}) == 3


def test_one_process_is_enough() -> None:
    assert {result["status"] for result in forked("a dies b", 1).values()} == {"ok", "crashed"}


@pytest.mark.parametrize(
    ("last", "elsewhere", "wanted"),
    [
        ("", [], "static1"),
        ("", ["static0"], "micro1"),
        ("micro0", [], "micro1"),
        ("micro0", ["static0"], "micro1"),
        ("micro0", ["micro9"], "micro1"),
        ("static0", ["micro0"], "static1"),
        ("dynamic0", ["static0"], "micro1"),
        ("dynamic0", ["static0", "micro0"], "static1"),
    ],
)
def test_a_process_goes_on_with_what_it_is_prepared_for(last: str, elsewhere: list[str], wanted: str) -> None:
    waiting = ["static1", "static2", "micro1", "micro2"]
    assert following(waiting, lambda name: name[:-1], last, elsewhere) == wanted


def test_jobs_without_kinds_are_done_in_their_order() -> None:
    assert following(["b", "a"], lambda name: "", "c", ["d"]) == "b"
