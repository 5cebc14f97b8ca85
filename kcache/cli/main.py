"""The command line: a thin door. Each command lives in its own module and is imported only when it is called.

`kcache restore` is on the way of every server's start, so this module imports nothing that costs time, click included: plain
words are understood without it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from kcache.cli import exit_codes, messages, quick
from kcache.errors import KcacheError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

COMMANDS = {
    "build": "compile entries on a host that needs no GPU",
    "compact": "put published entries together into one file beside them, for fleets",
    "diff": "what differs between two environments, and what a bump would cost",
    "doctor": "what would keep a restored cache from being used here, with remedies",
    "env": "what this host is: every ingredient of a key",
    "export": "copy published entries into one file, for hosts without a network",
    "import": "publish what an exported file holds",
    "keygen": "make a key to sign entries with",
    "lookup": "which published entries fit this host, and why the others do not",
    "manifest": "say what to build for a model: made from its config, and checked",
    "matrix": "what is published: by architecture, CUDA, FlashInfer, model and kind",
    "prune": "remove what is old or no longer used, here or in a store",
    "plan": "the builds that manifests ask for and a store lacks, for schedulers",
    "publish": "upload built entries, then make them visible",
    "report": "what was built since the server was started, and what the restore spared",
    "restore": "put matching entries in place, then start a server",
    "sign": "sign what is published already",
    "verify": "prove in a fresh process that no compiler runs",
    "warmup": "compile what is missing here, and install it",
}
"""Command -> one line of help. The module is `kcache.cli.<command>`, the function `command`."""


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and ends the process with the contract's exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        found = quick.parse(words, os.environ)
        if found is None:
            from kcache.cli.group import run

            run(words)
        else:
            _restore(found)
    except KeyboardInterrupt:
        messages.fail("stopped")
        echo_error(words, {"error": "Stopped", "what": "stopped"}, exit_codes.STOPPED)
        sys.exit(exit_codes.STOPPED)
    except KcacheError as error:
        messages.fail(str(error))
        echo_error(words, error.diagnostics(), error.exit_code, reason=str(error))
        sys.exit(error.exit_code)
    except Exception as error:  # noqa: BLE001 (a server's start may be at stake)
        messages.unexpected("kcache")
        echo_error(words, {"error": type(error).__name__, "what": str(error)}, exit_codes.FAILED)
        start_anyway(words)
        sys.exit(exit_codes.FAILED)


def _restore(line: quick.Line) -> None:
    """Runs a plain `kcache restore`. The process ends with it, one way or the other, so nothing is collected before and nothing
    taken apart after: that is a tenth of a restore with nothing to do."""
    import gc

    gc.disable()
    from kcache.cli.restoring import restore

    messages.level = line.level
    try:
        restore(**line.options)
    except SystemExit as end:
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # closed (then it is None), full, or nobody reads it
                stream.flush()
        if isinstance(end.code, int):
            os._exit(end.code)
        raise


def start_anyway(words: list[str]) -> None:
    """`kcache restore` with a command reaches that command even when its own options, or the word `restore` itself, are wrong:
    what is meant is what comes nearest. Not where --strict was given."""
    if "--" not in words:
        return
    ours, server = words[: words.index("--")], words[words.index("--") + 1 :]
    # The first word that names a command, or nearly: what stands before it may be the value of an option that does not exist.
    called = next((near for word in ours if not word.startswith("-") and (near := nearest_command(word))), None)
    if called == "restore" and server and "--strict" not in ours:
        from kcache.cli.start import start

        start(server, needed_anyway())


def nearest_command(word: str) -> str | None:
    """The command that a word names, or comes near to."""
    if word in COMMANDS:
        return word
    from difflib import get_close_matches

    return next(iter(get_close_matches(word, COMMANDS, n=1)), None)


def needed_anyway() -> dict[str, str]:
    """What a server needs whatever became of the restore. Never raises."""
    try:
        from kcache.workflows.entrypoint import needed_by_server

        return needed_by_server(os.environ)
    except Exception:  # a server's start is at stake  # noqa: BLE001
        messages.unexpected("looking for what the server needs")
        return {}


_echoed = False
"""Whether this process has printed its JSON object."""


def echo_json(document: dict[str, Any]) -> None:
    """One JSON object on stdout, and nothing else there."""
    import json

    global _echoed  # noqa: PLW0603 (a process has one standard output)
    _echoed = True
    print(json.dumps(document, indent=2, sort_keys=True), flush=True)


def echo_error(words: list[str], error: dict[str, str], exit_code: int, *, reason: str = "") -> None:
    """With --json: the one object of a command that failed before it had a result (kcache/docs/schemas/error.json). Never raises.

    Args:
        words: the command line; what stands after `--` is a server's.
        error: `error` (a class) and `what`, perhaps `why` and `remedy`.
        reason: all of that as one sentence; `what` by default.
    """
    ours = words[: words.index("--")] if "--" in words else words
    if "--json" not in ours or _echoed:
        return
    document = {"error": {"why": "", "remedy": "", **error}, "reasons": [reason or error["what"]], "exit_code": exit_code}
    with suppress(AttributeError, OSError, ValueError):  # standard output is closed or full, or nobody reads it
        echo_json({"status": "error", **document})


if __name__ == "__main__":
    main()
