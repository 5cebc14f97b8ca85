"""The child that tunes, with the real FlashInfer: look-ups, winners, files, stores and groups. Timings are made up (no GPU)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tuning_children import CHILDREN, FLASHINFERS, environ_of, worked_out

from kcache.kinds import autotune_v1, autotune_v2

PLAIN = {"operation": "plain", "backend": "none", "m": 64, "covers": [33, 1]}


def start(tmp_path: Path, request: dict[str, Any], path: str = "", rank: int = 0) -> subprocess.Popen[str]:
    driver = Path(__file__).parents[1] / "described_tuning.py"
    command = [sys.executable, str(driver), str(CHILDREN), "autotune_tune"]
    environ = environ_of(path, tmp_path / f"home-{rank}", {})
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    whole = {"calls": [PLAIN], "root": None, "file": None, "policy": {}, "skip": [], "group": None, **request}
    assert process.stdin is not None
    process.stdin.write(json.dumps({**whole, "answer": str(tmp_path / f"answer-{rank}.json")}))
    process.stdin.close()
    return process


def end(tmp_path: Path, process: subprocess.Popen[str], rank: int = 0) -> dict[str, Any]:
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=120) == 0, said
    return dict(json.loads((tmp_path / f"answer-{rank}.json").read_text()))


def tune(tmp_path: Path, path: str = "", **request: Any) -> dict[str, Any]:
    return end(tmp_path, start(tmp_path, request, path))


@pytest.mark.real
@pytest.mark.parametrize("path", ["", *FLASHINFERS], ids=lambda path: Path(path).name or "installed")
def test_the_largest_count_covers_the_smaller_ones_in_a_store_and_in_a_file(path: str, tmp_path: Path) -> None:
    with_store = not path or (Path(path) / "flashinfer" / "autotune_cache.py").exists()
    file, root = tmp_path / "config" / "autotune_configs.json", tmp_path / "store"
    file.parent.mkdir()
    said = tune(tmp_path, path, root=str(root) if with_store else None, file=str(file))
    assert said["problem"] == ""
    assert said["covered"] == {"hits": 3, "misses": 0, "missed": []}
    assert said["total"] == {"kcache::plain": 3}
    assert {call["tactic"] for call in said["calls"]} == {1}
    host = worked_out(environ_of(path, tmp_path / "home-0", {}))
    (collected,), left_out = autotune_v1.collect_files(file.parent, host)
    assert ({one.tactic for one in collected.file.results.values()}, len(collected.file.results), left_out) == ({1}, 3, ())
    if with_store:
        (store,) = autotune_v2.collect(root, host).stores
        assert store.env_hash == said["env_hash"]
        assert {entry.key for entry in store.entries} == set(collected.file.results)
        assert {entry.tactic for entry in store.entries} == {1}


@pytest.mark.real
@pytest.mark.parametrize(
    ("pretend", "wanted"),
    [
        pytest.param({"fails": [[0, "RuntimeError", "not for this shape"]]}, "", id="one candidate is not for this shape"),
        pytest.param(
            {"fails": [[2, "FileNotFoundError", "'tileiras' compiler not found"]]},
            "candidates were left out because something is missing here: PlainRunner 2: FileNotFoundError: 'tileiras'",
            id="a helper is missing for one candidate",
        ),
        pytest.param(
            {"fails": [[tactic, "RuntimeError", "no kernel image"] for tactic in (-1, 0, 1, 2)]},
            "tuning left no winner for every look-up (kcache::plain: 3 without one): PlainRunner",
            id="every candidate fails",
        ),
        pytest.param(
            {"really": True}, "the module trtllm_utils, which the tuner needs, cannot be loaded", id="no tuner's module"
        ),
    ],
)
def test_a_tuning_that_is_no_good_says_why(pretend: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    really = {"really": pretend.pop("really")} if "really" in pretend else {}
    said = tune(tmp_path, root=str(tmp_path / "store"), pretend=pretend, **really)
    assert (wanted in said["problem"]) if wanted else said["problem"] == ""


@pytest.mark.real
def test_what_is_to_be_skipped_is_not_tuned_and_a_call_that_fails_is_told(tmp_path: Path) -> None:
    other = {**PLAIN, "named": "kcache::skipped"}
    said = tune(tmp_path, root=str(tmp_path / "store"), calls=[PLAIN, other], skip=["kcache::skipped"])
    assert said["problem"] == ""
    assert set(said["total"]) == {"kcache::plain"}
    assert [call["tactic"] for call in said["calls"]] == [1, -1]
    failed = tune(tmp_path, root=str(tmp_path / "other"), calls=[PLAIN, {"operation": "unheard_of", "backend": "none", "m": 1}])
    assert failed["problem"] == "a call failed: no call of unheard_of is known here"


@pytest.mark.real
def test_a_group_picks_by_its_mean_and_the_leader_alone_saves(tmp_path: Path) -> None:
    """Rank 0 would pick tactic 1 (1.0 ms against 1.1); the four of them together measure 1.75 ms for it, and pick tactic 2."""
    size, file = 4, tmp_path / "shared" / "autotune_configs.json"
    file.parent.mkdir()
    request = {"root": str(tmp_path / "store"), "file": str(file), "pretend": {"timings": [3.0, 1.0, 1.1]}}
    group = {"size": size, "init": f"file://{tmp_path}/meet"}
    processes = [start(tmp_path, {**request, "group": {**group, "rank": rank}}, rank=rank) for rank in range(size)]
    answers = [end(tmp_path, process, rank) for rank, process in enumerate(processes)]
    assert [answer["problem"] for answer in answers] == [""] * size
    assert {call["tactic"] for answer in answers for call in answer["calls"]} == {2}
    assert all(call["together"] for answer in answers for call in answer["calls"])
    host = worked_out(environ_of("", tmp_path / "home-0", {}))
    (collected,), _ = autotune_v1.collect_files(file.parent, host)
    assert {one.tactic for one in collected.file.results.values()} == {2}
    assert [answer["env_hash"] != "" for answer in answers] == [True, False, False, False]


@pytest.mark.real
def test_one_of_a_group_that_dies_ends_the_tuning_of_all(tmp_path: Path) -> None:
    group = {"size": 2, "init": f"file://{tmp_path}/meet"}
    request = {"root": str(tmp_path / "store"), "pretend": {"dies": 1}}
    one, other = (start(tmp_path, {**request, "group": {**group, "rank": rank}}, rank=rank) for rank in range(2))
    assert other.wait(timeout=120) == 7
    assert one.stderr is not None
    said = one.stderr.read()
    assert one.wait(timeout=120) != 0 or "problem" in json.loads((tmp_path / "answer-0.json").read_text())
    for process in (one, other):
        assert process.stderr is not None
        process.stderr.close()
    assert "_TuningGroupError" in said or "peer" in said or "rank" in said
