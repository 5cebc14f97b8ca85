"""What a start of kcache imports stays within its budget: a set of modules, whatever the machine's speed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "ci" / "importtime.py"


def test_every_way_to_start_kcache_is_within_its_budget() -> None:
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{done.stdout}\nci/importtime --tree shows who imports what"
    assert "kcache restore" in done.stdout


def test_a_module_that_is_too_much_is_named() -> None:
    spec = importlib.util.spec_from_file_location("importtime", SCRIPT)
    assert spec is not None and spec.loader is not None
    importtime = importlib.util.module_from_spec(spec)
    sys.modules["importtime"] = importtime  # dataclasses look their module up
    spec.loader.exec_module(importtime)
    found = [importtime.Import(module=name, depth=0, own=1, total=1) for name in ("kcache", "click.core", "clickety")]
    way = importtime.Way(words=(), budget=2, forbidden=("click",))
    forbidden, over = importtime.exceeded(way, found)
    assert "click.core" in forbidden
    assert "3 modules, and its budget is 2" in over
