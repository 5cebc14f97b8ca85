"""Command lines of `kcache restore` that are plain, understood without click.

click takes 50 ms to import, and every server that starts behind kcache would pay for it. What is understood here means the same
as to click (a test compares them on any words); everything else, whatever is wrong among it, is None and left to click. The
tables below are those of the options of `kcache.cli.restore`, which a test holds them to.
"""

from __future__ import annotations

from kcache.cli import messages
from kcache.values import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

LISTS = {"--kinds": "kinds", "--modules": "modules", "--arch": "archs"}
"""Options with several words each time, which may be given several times."""

REPEATED = {"--from": "stores", "--model": "models", "--gpu": "gpus"}
"""Options with one value each time, which may be given several times."""

VALUES = {
    "--policy": "policy",
    "--python": "python",
    "--env": "env_file",
    "--deadline": "deadline",
    "--lock-timeout": "lock_timeout",
    "--fallback": "fallback",
    "--keep": "keep",
}
"""Options with one value, of which the last counts."""

FLAGS = {
    "--prove": "prove",
    "--strict": "strict",
    "--strict-match": "strict_match",
    "--into-package": "into_package",
    "--publish-missing": "publish_missing",
    "--shell": "shell",
    "--json": "as_json",
}
DEFAULTS: Mapping[str, str | None] = {
    "policy": None,
    "python": None,
    "env_file": None,
    "deadline": "30s",
    "lock_timeout": "60s",
    "fallback": "none",
    "keep": None,
}
REQUIRED = ("stores",)
LEVELS = {"-q": 0, "--quiet": 0, "-v": 1, "--verbose": 1, "-vv": 2}
"""Options before the command: 0 says only what went wrong, each other number that much more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A command line. `level` is that of `messages`; `options` are the arguments of `kcache.cli.restoring.restore`."""

    level: int
    options: dict[str, Any]


def parse(words: Sequence[str], environ: Mapping[str, str]) -> Line | None:
    """What the words after `kcache` say, if that is a plain `restore`; None for everything that click is to judge."""
    if "_KCACHE_COMPLETE" in environ:  # the shell asks for completions (click/core.py, Command._main_shell_completion)
        return None
    verbose, quiet, place = 0, False, 0
    while place < len(words) and words[place] in LEVELS:
        verbose += LEVELS[words[place]]
        quiet = quiet or not LEVELS[words[place]]
        place += 1
    if place >= len(words) or words[place] != "restore":
        return None
    options = _options(words[place + 1 :])
    level = messages.QUIET if quiet else min(verbose, messages.DEBUG)
    return None if options is None else Line(level=level, options=options)


def _options(words: Sequence[str]) -> dict[str, Any] | None:
    lists: dict[str, list[str]] = {name: [] for name in (*LISTS.values(), *REPEATED.values())}
    values = dict(DEFAULTS)
    flags = dict.fromkeys(FLAGS.values(), False)
    server: Sequence[str] = ()
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if word == "--":
            server = words[place:]
            break
        option, equals, value = word.partition("=")
        if option in FLAGS and not equals:
            flags[FLAGS[option]] = True
            continue
        if not equals:
            if place >= len(words):
                return None
            value = words[place]
            place += 1
        if option in VALUES:
            values[VALUES[option]] = value
        elif option in LISTS:
            lists[LISTS[option]].append(value)
        elif option in REPEATED:
            lists[REPEATED[option]].append(value)
        else:
            return None
    if not all(lists[name] for name in REQUIRED):
        return None
    several = {name: separated(lists[name]) for name in LISTS.values()}
    repeated = {name: tuple(lists[name]) for name in REPEATED.values()}
    return {**values, **flags, **several, **repeated, "server": tuple(server)}


def separated(given: Iterable[str]) -> tuple[str, ...]:
    """`a,b` and `c` as ("a", "b", "c"), each once."""
    return tuple(dict.fromkeys(word for text in given for word in text.replace(",", " ").split()))
