"""The command line: a thin door. Each command lives in its own module and is imported only when it is called.

`kcache restore` is on the way of every server's start, so this module imports click and nothing else that costs time.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

import click

from kcache import __version__
from kcache.cli import exit_codes, messages
from kcache.errors import KcacheError

COMMANDS = {
    "build": "compile entries on a host that needs no GPU",
    "doctor": "what would keep a restored cache from being used here, with remedies",
    "env": "what this host is: every ingredient of a key",
    "lookup": "which published entries fit this host, and why the others do not",
    "manifest": "say what to build for a model: made from its config, and checked",
    "publish": "upload built entries, then make them visible",
    "restore": "put matching entries in place, then start a server",
    "verify": "prove in a fresh process that no compiler runs",
}
"""Command -> one line of help. The module is `kcache.cli.<command>`, the function `command`."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found = import_module(f"kcache.cli.{cmd_name}").command
        assert isinstance(found, click.Command)
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            from difflib import get_close_matches

            near = get_close_matches(args[0], COMMANDS, n=1)
            hint = f" Did you mean `{near[0]}`?" if near else ""
            raise click.UsageError(f"There is no command `{args[0]}`.{hint} `kcache --help` lists them.", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kcache")
@click.option("-v", "--verbose", count=True, help="Say more on stderr; twice for everything.")
@click.option("-q", "--quiet", is_flag=True, help="Say only what went wrong.")
def app(verbose: int, quiet: bool) -> None:
    """Kernels compiled once on a farm, accepted by the library in every container.

    \b
    Exit codes: 0 done, 1 failed, 2 usage, 3 partial, 10 miss, 11 locked, 12 corrupt or untrusted.
    `kcache restore -- CMD` always reaches CMD, whatever happened, unless --strict is given.
    """
    messages.level = messages.QUIET if quiet else min(verbose, messages.DEBUG)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and ends the process with the contract's exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        app.main(args=words, prog_name="kcache", standalone_mode=False)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.Abort:
        messages.fail("stopped")
        sys.exit(130)
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 on; before, help was no error
            error.show()
        else:
            messages.fail(_one_line(error))
        _start_anyway(words)
        sys.exit(exit_codes.USAGE)
    except KcacheError as error:
        messages.fail(str(error))
        sys.exit(error.exit_code)
    except Exception:  # noqa: BLE001 (a server's start may be at stake)
        messages.unexpected("kcache")
        _start_anyway(words)
        sys.exit(exit_codes.FAILED)


def _start_anyway(words: list[str]) -> None:
    """`kcache restore` with a command reaches that command even when its own options are wrong, unless --strict was given."""
    if "--" not in words:
        return
    ours, server = words[: words.index("--")], words[words.index("--") + 1 :]
    called = next((word for word in ours if not word.startswith("-")), "")
    if called == "restore" and server and "--strict" not in ours:
        from kcache.cli.start import start

        start(server, needed_anyway())


def needed_anyway() -> dict[str, str]:
    """What a server needs whatever became of the restore. Never raises."""
    try:
        from kcache.workflows.entrypoint import needed_by_server

        return needed_by_server(os.environ)
    except Exception:  # a server's start is at stake  # noqa: BLE001
        messages.unexpected("looking for what the server needs")
        return {}


def _one_line(error: click.ClickException) -> str:
    """What is wrong with a command line, and where its help is."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    what = " ".join(error.format_message().split())
    if not isinstance(error, click.UsageError) or "--help" in what:
        return what
    return f"{what} See `{context.command_path if context is not None else 'kcache'} --help`."


def echo_json(document: dict[str, Any]) -> None:
    """One JSON object on stdout, and nothing else there."""
    import json

    click.echo(json.dumps(document, indent=2, sort_keys=True))


if __name__ == "__main__":
    main()
