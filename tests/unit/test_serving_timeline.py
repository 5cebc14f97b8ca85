"""What the documentation says of a server's start is in the kept timelines, and its picture is drawn from them."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "kcache" / "docs"


@pytest.fixture(scope="module")
def plot() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "ci" / "gpu" / "plot.py"))


@pytest.fixture(scope="module")
def story() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "serving.json").read_text())
    return found


def test_cold_the_build_is_in_a_request(plot: dict[str, Any], story: dict[str, Any]) -> None:
    cold = plot["summary"](story["cold"])
    assert (cold["built_before_ready"], cold["built_while_serving"]) == ([], ["sampling"])
    assert cold["first_sampled_wait"] >= story["cold"]["builds"][0]["seconds"]
    assert cold["waited_over_a_second"] > 1000  # greedy ones too: they wait behind it


def test_warmed_up_the_build_is_before_ready(plot: dict[str, Any], story: dict[str, Any]) -> None:
    warm = plot["summary"](story["warmup"])
    assert (warm["built_before_ready"], warm["built_while_serving"]) == (["sampling"], [])
    assert warm["longest_wait"] < 1


def test_restored_nothing_is_built(plot: dict[str, Any], story: dict[str, Any]) -> None:
    restored = plot["summary"](story["restored"])
    assert story["restored"]["builds"] == story["restored"]["compilers"] == []
    assert restored["longest_wait"] < 1
    assert story["verify"] == {"status": "proven", "compiler_runs": 0, "import_seconds": story["verify"]["import_seconds"]}
    assert story["check_restored"]["get_sampling_module_ms"] <= 5
    assert story["first_sample"]["first_top_k_top_p_ms"] <= 300


def test_the_picture_is_of_these_timelines(plot: dict[str, Any], story: dict[str, Any]) -> None:
    drawn = plot["svg"]({mode: story[mode] for mode in plot["MODES"]})
    assert drawn == (DOCS / "serving.svg").read_text()
    ElementTree.fromstring(drawn)
