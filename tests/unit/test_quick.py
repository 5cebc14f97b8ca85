"""A command line that is understood without click means what it means to click."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kcache.cli import messages, quick, restoring
from kcache.cli.group import app
from kcache.cli.restore import command

ROOT = Path(__file__).parents[2]

VALUES = ["/store", "a,b", "a b", "", "30s", "-x", "--json", "--", "restore", "=", "x=y", "ä\udcff"]
NAMES = [*quick.LISTS, *quick.REPEATED, *quick.VALUES, *quick.FLAGS]
WORDS = st.sampled_from([*NAMES, *VALUES, "--from=/other", "--arch=9.0a,12.0f", "--json=1", "--help", "-h", "--bogus", "-fx"])
BEFORE = st.sampled_from(["-q", "-v", "-vv", "--quiet", "--verbose", "--version", "-vq", "verify"])


def understood_by_click(words: list[str]) -> tuple[int, dict[str, Any]] | None:
    """The level and the options with which click calls the command, or None if it does not."""
    seen: list[dict[str, Any]] = []
    before = messages.level

    def restore(**options: Any) -> None:
        seen.append(options)

    original: Callable[..., None] = restoring.restore
    restoring.restore = restore
    try:
        app.main(args=words, prog_name="kcache", standalone_mode=False)
        return (messages.level, seen[0]) if seen else None
    except (click.ClickException, click.exceptions.Exit):
        return None
    finally:
        restoring.restore = original
        messages.level = before


@given(st.lists(BEFORE, max_size=2), st.lists(WORDS, max_size=8))
@example(["-q"], ["--from", "/store", "--arch", "9.0a", "--", "vllm", "serve", "--json", "--", "x"])
@example([], ["--from", "--json", "--from=b", "--deadline", "1s", "--deadline=2s", "--"])
@example([], ["--from", "defaults"])
@example([], ["--from"])
@example([], ["--from", "/store", "vllm", "--json"])
@settings(max_examples=1500, deadline=None)
def test_what_is_understood_without_click_is_what_click_understands(before: list[str], words: list[str]) -> None:
    line = [*before, "restore", *words]
    found = quick.parse(line, {})
    if found is not None:
        assert (found.level, found.options) == understood_by_click(line)


@pytest.mark.parametrize(
    "words",
    [
        ["restore", "--from", "/mnt/kcache", "--", "vllm", "serve", "MODEL"],
        ["restore", "--from=/mnt/kcache", "--shell"],
        ["-q", "restore", "--from", "/a", "--from", "/b", "--arch", "9.0a,12.0f", "--prove", "--json"],
        ["restore", *(word for name in quick.FLAGS for word in (name,)), "--from", "a"],
        ["restore", "--from", "a", *(word for name in [*quick.LISTS, *quick.VALUES] for word in (name, "x"))],
    ],
)
def test_usual_lines_are_understood_without_click(words: list[str]) -> None:
    assert quick.parse(words, {}) is not None


def test_every_option_of_restore_is_in_the_tables() -> None:
    known = {**quick.LISTS, **quick.REPEATED, **quick.VALUES, **quick.FLAGS}
    options = {p.opts[0]: p.name for p in command.params if isinstance(p, click.Option)}
    assert known == options
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            [name] = parameter.opts
            assert parameter.is_flag == (name in quick.FLAGS)
            assert parameter.multiple == (name in quick.LISTS or name in quick.REPEATED)
            assert (parameter.callback is not None) == (name in quick.LISTS)
            assert parameter.required == (parameter.name in quick.REQUIRED)


def test_shell_completion_is_left_to_click() -> None:
    assert quick.parse(["restore", "--from", "a"], {"_KCACHE_COMPLETE": "bash_complete"}) is None


def test_a_plain_restore_does_not_import_click(tmp_path: Path) -> None:
    """With a missing store: everything up to the search for it is imported, what shows an error included."""
    words = ["restore", "--from", "/none", "--arch", "9.0a"]
    environ = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command_line = [sys.executable, "-X", "importtime", "-m", "kcache", *words]
    done = subprocess.run(command_line, env=environ, capture_output=True, text=True, timeout=60, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "there is no store at /none" in done.stderr
    assert "kcache.workflows.restore" in imported
    assert not imported & {"click", "inspect", "dataclasses", "rich", "subprocess", "importlib.metadata"}
