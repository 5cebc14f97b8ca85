"""Nothing of the command line is undocumented: read from click's own tree, so that a new command or option is seen here."""

from __future__ import annotations

import ast
from pathlib import Path

import click
import pytest
from command_tree import COMMANDS

from kcache.cli import exit_codes

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
HOW = "Say what it does where it is declared: "


def variables(source: str) -> set[str]:
    """The names of kcache's own variables that a module's code reads: whole strings, so that docstrings do not count."""
    strings = {
        node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return {text for text in strings if text.lstrip("_").startswith("KCACHE_") and text.isidentifier()}


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_help_and_examples(path: str) -> None:
    command = COMMANDS[path]
    assert command.help, f"`{path}` has no help. {HOW}the docstring of its function."
    examples = (command.epilog or "").partition("Examples:")[2]
    assert path in examples, f"`{path} --help` shows no example. {HOW}epilog='\\b\\nExamples:\\n  {path} ...' of @click.command."


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_has_help(path: str) -> None:
    for parameter in COMMANDS[path].params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"`{path} {parameter.opts[0]}` has no help. {HOW}help=... of its @click.option."


@pytest.mark.parametrize("path", [path for path, command in COMMANDS.items() if not isinstance(command, click.Group)])
def test_every_command_prints_json(path: str) -> None:
    names = [name for parameter in COMMANDS[path].params for name in parameter.opts]
    assert "--json" in names, f"`{path}` has no --json. Add json_option of kcache/cli/options.py, and a schema."


@pytest.mark.parametrize("path", [path for path in COMMANDS if path.count(" ") == 1])
def test_every_command_is_in_the_readme(path: str) -> None:
    table = README.partition("| command | does |")[2].partition("\n\n")[0]
    assert f"`{path}" in table, f"README.md, the table of commands: a row for `{path}` is missing."


def test_every_exit_code_is_in_the_readme() -> None:
    table = README.partition("| exit code | |")[2].partition("\n\n")[0]
    codes = {name: value for name, value in vars(exit_codes).items() if isinstance(value, int)}
    for name, code in codes.items():
        assert f"\n| {code} | " in table, f"README.md, the table of exit codes: {code} ({name}) is missing."


def test_every_variable_of_kcache_is_in_the_readme() -> None:
    table = README.partition("## Variables")[2].partition("\n## ")[0]
    slots = {"KCACHE_MATRIX_DATA"}  # a word of the matrix page that data is put in place of
    for file in sorted((ROOT / "kcache").rglob("*.py")):
        for name in variables(file.read_text()) - slots:
            assert f"`{name}`" in table, (
                f"README.md, the table of variables: {name} is missing ({file.relative_to(ROOT)} reads it)."
            )
