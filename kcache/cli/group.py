"""The command line as click understands it: every command, its help, and what is wrong with a line.

Not imported by a `kcache restore` whose words are all plain (`kcache.cli.quick`): click takes longer to import than a restore
with nothing to do takes in all.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

import click

from kcache import __version__
from kcache.cli import exit_codes, messages
from kcache.cli.main import COMMANDS, echo_error, nearest_command, start_anyway


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        found = import_module(f"kcache.cli.{cmd_name}").command
        assert isinstance(found, click.Command)
        found.name = cmd_name  # of its function every module says `command`
        return found

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            near = nearest_command(args[0])
            hint = f" Did you mean `{near}`?" if near else ""
            raise click.UsageError(f"There is no command `{args[0]}`.{hint} `kcache --help` lists them.", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(sorted(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="""\b
Examples:
  kcache build --kinds sampling --arch 9.0a -o entries
  kcache publish entries --to /mnt/kcache
  kcache restore --from /mnt/kcache -- vllm serve MODEL
  eval "$(_KCACHE_COMPLETE=bash_source kcache)"    # completion in this shell; also zsh_source and fish_source""",
)
@click.version_option(__version__, prog_name="kcache")
@click.option("-v", "--verbose", count=True, help="Say more on stderr; twice for everything.")
@click.option("-q", "--quiet", is_flag=True, help="Say only what went wrong.")
def app(verbose: int, quiet: bool) -> None:
    """Kernels compiled once on a farm, accepted by the library in every container.

    \b
    Exit codes: 0 done, 1 failed, 2 usage, 3 partial, 10 miss, 11 locked, 12 corrupt or untrusted,
    130 stopped.
    `kcache restore -- CMD` always reaches CMD, whatever happened, unless --strict is given.
    """
    messages.level = messages.QUIET if quiet else min(verbose, messages.DEBUG)


def run(words: list[str]) -> None:
    """Does what a command line says, or says what is wrong with it and ends the process."""
    color = False if os.environ.get("NO_COLOR") else None
    try:
        app.main(args=words, prog_name="kcache", standalone_mode=False, color=color)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.Abort:
        raise KeyboardInterrupt from None
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click 8.2 on; before, help was no error
            error.show()
        else:
            messages.fail(_one_line(error))
            echo_error(words, {"error": "UsageError", "what": _one_line(error)}, exit_codes.USAGE)
        start_anyway(words)
        sys.exit(exit_codes.USAGE)


def _one_line(error: click.ClickException) -> str:
    """What is wrong with a command line, and where its help is."""
    context = error.ctx if isinstance(error, click.UsageError) else None
    what = " ".join(error.format_message().split())
    if not isinstance(error, click.UsageError) or "--help" in what:
        return what
    return f"{what} See `{context.command_path if context is not None else 'kcache'} --help`."
