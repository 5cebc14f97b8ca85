"""`kcache lookup` over several stores, through the real command line: one that is bad does not hide what the next has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from kcache.key import ENVIRONMENT_FORMAT


def saved(directory: Path) -> Path:
    path = directory / "environment.json"
    facts = {name: {"value": value} for name, value in FACTS.items()}
    path.write_text(json.dumps({"format": ENVIRONMENT_FORMAT, "archs": ["90a"], "facts": facts, "libraries": {}, "sources": {}}))
    return path


FACTS = {"platform.machine": "x86_64", "flashinfer.version": "0.7.4", "cuda.runtime": "13.0"}


def lookup(directory: Path, *stores: Path) -> subprocess.CompletedProcess[str]:
    words = [word for store in stores for word in ("--from", str(store))]
    command = [sys.executable, "-m", "kcache", "lookup", *words, "--env", str(saved(directory)), "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def store(directory: Path, environment: str, index: str) -> Path:
    place = directory / "v1" / "env" / environment
    place.mkdir(parents=True)
    (place / "index.json").write_text(index)
    return directory


EMPTY = json.dumps({"format": "kcache.index/1", "entries": []})
HERE = "flashinfer-0.7.4/x86_64-cuda13"


def test_a_store_that_is_bad_does_not_stop_the_next(tmp_path: Path) -> None:
    good, bad = store(tmp_path / "good", HERE, EMPTY), store(tmp_path / "bad", HERE, "{")
    done = lookup(tmp_path, tmp_path / "nowhere", bad, good)
    assert (done.returncode, json.loads(done.stdout)["status"]) == (10, "miss")
    assert "there is no store at" in done.stderr
    assert "index.json" in done.stderr
    assert lookup(tmp_path, bad).returncode == 12


def test_an_index_of_another_environment_that_is_damaged_is_no_answer_about_this_one(tmp_path: Path) -> None:
    place = store(tmp_path / "store", HERE, EMPTY)
    store(place, "flashinfer-0.7.2/x86_64-cuda13", "{")
    done = lookup(tmp_path, place)
    assert (done.returncode, json.loads(done.stdout)["status"]) == (10, "miss"), done.stderr
