"""`kcache diff`: what differs between environments, and what of a store a bump would miss, in recorded build seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from entries import SOURCES, make_entry, publish

from kcache.key import ENVIRONMENT_FORMAT

FACTS = {
    **{"platform.machine": "x86_64", "flashinfer.version": "0.7.4", "cuda.runtime": "13.0", "tvm_ffi.version": "0.1.15.post2"},
    **{"libc.version": "2.36", "torch.version": "2.13.0"},
}


def saved(path: Path, archs: tuple[str, ...] = ("90a",), **facts: str) -> Path:
    values = {**FACTS, **{name.replace("__", "."): value for name, value in facts.items()}}
    document = {
        "format": ENVIRONMENT_FORMAT,
        "archs": list(archs),
        "facts": {name: {"value": value} for name, value in values.items()},
        "libraries": {"libc.so.6": {"value": "/lib/libc.so.6"}},
        "sources": {name: {"value": value} for name, value in SOURCES.items()},
    }
    path.write_text(json.dumps(document))
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_entry(tmp_path / "out", {"sampling": b"s", "topk": b"t"}, build_seconds=1800.0)
    make_entry(tmp_path / "out", {"page": b"p"}, kind="modules", build_seconds=90.0)
    make_entry(tmp_path / "out", {"page": b"p"}, kind="modules", build_seconds=95.0, flashinfer_version="0.7.5")
    publish(tmp_path / "out", tmp_path / "store")
    return tmp_path / "store"


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kcache", "diff", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def preview(*words: object) -> Any:
    done = run(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["preview"]


def test_a_bump_of_flashinfer_misses_what_is_not_published_for_it_yet(tmp_path: Path, store: Path) -> None:
    before = saved(tmp_path / "a.json")
    found = preview(before, "--bump", "flashinfer=0.7.5", "--from", store)
    assert (found["usable_before"], found["usable_after"], found["build_seconds"], found["build_hours"]) == (2, 1, 3600.0, 1.0)
    assert [(one["kind"], one["entries"], one["archs"]) for one in found["missed"]] == [("sampling", 1, ["90a"])]
    assert preview(before, "--bump", "flashinfer=0.7.5", "--from", store, "--kinds", "modules")["missed"] == []
    told = run(before, "--bump", "flashinfer=0.8.0", "--from", store).stdout
    assert "flashinfer.version: 0.7.4 -> 0.8.0 (matched: equal)" in told and "To build in all: 62 min" in told


def test_what_is_compatible_is_not_missed(tmp_path: Path, store: Path) -> None:
    before = saved(tmp_path / "a.json")
    for bump in ("torch=2.14.0", "cuda=13.1", "glibc=2.39"):
        assert preview(before, "--bump", bump, "--from", store)["missed"] == [], bump
    for bump in ("cuda=12.9", "machine=aarch64", "tvm-ffi=0.2.0"):
        assert preview(before, "--bump", bump, "--from", store)["build_seconds"] == 3690.0, bump


def test_two_environments_are_compared_fact_by_fact_what_is_matched_first(tmp_path: Path, store: Path) -> None:
    before = saved(tmp_path / "a.json")
    after = saved(tmp_path / "b.json", ("90a", "120f"), torch__version="2.14.0", tvm_ffi__version="0.1.16")
    document = json.loads(run(before, after, "--from", store, "--json").stdout)
    names = [(change["fact"], bool(change["matched"])) for change in document["changes"]]
    assert names == [("gpu.arch", True), ("tvm_ffi.version", True), ("gpu.sm_count.120f", True), ("torch.version", False)]
    assert [(one["kind"], one["archs"]) for one in document["preview"]["missed"]] == [
        ("modules", ["120f"]),
        ("sampling", ["120f"]),
    ]
    assert run(before, before).stdout == "Nothing differs.\n"


def test_what_cannot_be_understood_is_said(tmp_path: Path) -> None:
    before = saved(tmp_path / "a.json")
    for words in ((before,), (before, before, "--bump", "cuda=13.1"), (before, "--bump", "cuda"), (before, "--bump", "x=1")):
        assert run(*words).returncode == 2, words
