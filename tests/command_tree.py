"""Every command of the command line, from click's own tree."""

from __future__ import annotations

from collections.abc import Iterator

import click

from kcache.cli.group import app


def walk(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    yield command, context
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from walk(child, click.Context(child, info_name=name, parent=context))


COMMANDS = {context.command_path: command for command, context in walk(app, click.Context(app, info_name="kcache"))}
