"""Write-back: what a warm-up built is kept as entries, and offered to a store, so that the next container hits.

Keeping is a copy of what `kcache build` has packed and verified already. Offering is `kcache publish` in a process of its own
that outlives this one (a server's start waits for nothing), with an end after ten minutes and the lowest priority; its words are
in `publish.log` beside the entries. Whatever goes wrong is a line for people, never an exception.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

OFFERING = 600
"""Seconds after which a publisher that hangs is ended."""
LOG = "publish.log"


def keep_entries(made: Path, keep: Path) -> list[str]:
    """Copies the entries of one build output directory into another, the manifest of each last. Those that are there stay.

    Returns:
        The names of the manifests of `made`.

    Raises:
        OSError: they could not be written.
    """
    keep.mkdir(parents=True, exist_ok=True)
    names = sorted(path.name for path in made.glob("*.json") if path.with_suffix(".tar.zst").exists())
    for name in names:
        if (keep / name).exists():
            continue
        for source in (made / name).with_suffix(".tar.zst"), made / name:
            part = keep / f".{source.name}.{os.getpid()}.part"
            shutil.copyfile(source, part)
            part.replace(keep / source.name)
    return names


def may_take(store: str) -> bool:
    """Whether entries can be published into what an address names at all; whether this host may is the store's to say."""
    return not store.startswith(("https://", "http://")) and not store.endswith(".tar")


def offer_entries(keep: Path, stores: Sequence[str], environ: Mapping[str, str]) -> str:
    """Starts `kcache publish` for the entries in `keep`, to the first store that takes entries, and does not wait for it.

    Returns:
        What was done, in a line.
    """
    store = next((store for store in stores if may_take(store)), None)
    if store is None:
        return "nothing is published: no --from names a directory or a repository"
    command = [sys.executable, "-m", "kcache", "publish", str(keep), "--to", store]
    try:
        child = os.fork()
        if child == 0:
            _become(command, keep / LOG, environ)
        os.waitpid(child, 0)
    except OSError as error:
        return f"nothing is published: {error}"
    return f"what was built is published to {store} meanwhile; {keep / LOG} says what became of it"


def _become(command: list[str], log: Path, environ: Mapping[str, str]) -> None:
    """In a child: leaves a process of a session of its own behind, which has no parent that must wait for it, and ends."""
    try:
        os.setsid()
        if os.fork() == 0:
            os.nice(19)
            signal.alarm(OFFERING)  # exec keeps it, and nobody catches it
            nothing, told = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            for descriptor, source in ((0, nothing), (1, told), (2, told)):
                os.dup2(source, descriptor)
            os.execve(command[0], command, dict(environ))
    finally:
        os._exit(0)
