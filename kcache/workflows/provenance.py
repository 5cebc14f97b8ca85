"""What a manifest says of how an entry was made: recorded, signed, shown to everybody, and so without anything private."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from kcache import __version__


def provenance(facts: Mapping[str, Any]) -> dict[str, Any]:
    """What was found out about a build, with kcache's own version and source. Paths below a home begin with `~`."""
    document = {"kcache": __version__, **({"source": dict(source())} if source() else {}), **facts}
    return {str(name): _without_home(value, _homes()) for name, value in document.items()}


@cache
def source() -> Mapping[str, Any]:
    """`revision` and `dirty` of the checkout that this kcache runs from; empty where it was installed as a package."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return {}
    try:
        revision = _git(root, "rev-parse", "HEAD")
        return {"revision": revision, "dirty": bool(_git(root, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):  # no git, or a checkout of somebody else
        return {}


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def _homes() -> tuple[str, ...]:
    found = {os.environ.get("HOME", "")}
    with suppress(KeyError):  # a user without an entry
        found.add(pwd.getpwuid(os.getuid()).pw_dir)
    kept = {home.rstrip("/") for home in found if home.startswith("/") and home.rstrip("/")}
    return tuple(sorted(kept, key=len, reverse=True))


def _without_home(value: Any, homes: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        for home in homes:
            if value == home or value.startswith(f"{home}/"):
                return "~" + value[len(home) :]
        return value
    if isinstance(value, Mapping):
        return {name: _without_home(item, homes) for name, item in value.items()}
    return [_without_home(item, homes) for item in value] if isinstance(value, list | tuple) else value
