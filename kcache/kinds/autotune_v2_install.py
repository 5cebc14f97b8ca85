"""Results merged into FlashInfer's managed store of tuning results (v2) while servers use it.

FlashInfer takes no locks: it writes a temporary file and renames it (`flashinfer/autotune_cache.py`, 0.7.0 to 0.7.4). So here:

- what FlashInfer would not take is not installed, and nothing of its store is then written;
- a result that is there stays, whoever's it is; one that FlashInfer would not take is set aside, never deleted;
- a name is only ever given to a whole file, so a killed writer leaves nothing that anyone reads.

Whether results may be used somewhere is decided before, by `kcache.kinds.autotune_v2`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from kcache import fsops
from kcache.errors import InstallError, IntegrityError
from kcache.kinds.autotune import SCHEMA
from kcache.kinds.autotune_v2 import ENTRIES, MANIFEST, TuningStore, parse_store_environment, read_part, verify_entry
from kcache.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What an install did, by an entry's name.

    written:   results that were written. kept: that were there with the same bytes.
    theirs:    that were there with other bytes, measured by whoever put them there, and stay.
    set_aside: files that FlashInfer would not have taken, renamed.
    """

    directory: Path
    written: tuple[str, ...]
    kept: tuple[str, ...]
    theirs: tuple[str, ...]
    set_aside: tuple[str, ...]


def install(root: Path, store: TuningStore) -> Placed:
    """Merge results into the store of their environment; nothing that FlashInfer would take is lost or replaced.

    Args:
        root: see `store_root`; made where it is missing.

    Raises:
        TrustError: a directory or file is a link, or someone else could change it.
        IntegrityError: a result's bytes are not what its name says; nothing was written.
        NoSpaceError, InstallError: see `kcache.fsops`.
    """
    for entry in store.entries:
        verify_entry(entry.name, entry.data)
    fsops.ensure_directory(root)
    fsops.require_space(root, sum(len(entry.data) for entry in store.entries))
    directory = fsops.ensure_directory(root / SCHEMA / store.env_hash, root=root)
    entries = fsops.ensure_directory(directory / ENTRIES, root=root)
    aside = _place_environment(directory, store)
    written: list[str] = []
    kept: list[str] = []
    theirs: list[str] = []
    for entry in store.entries:
        path = entries / f"{entry.name}.json"
        there = _there(path)
        if there is not None:
            (kept if there == entry.data else theirs).append(entry.name)
            continue
        aside += move_aside(path)
        fsops.write_bytes(path, entry.data, durable=False)
        written.append(entry.name)
    return Placed(directory=directory, written=tuple(written), kept=tuple(kept), theirs=tuple(theirs), set_aside=tuple(aside))


def _place_environment(directory: Path, store: TuningStore) -> list[str]:
    """FlashInfer writes this file if there is none and does not read it; kcache does, to know what it collects."""
    path = directory / MANIFEST
    try:
        parse_store_environment(read_part(path), store.env_hash)
    except IntegrityError:
        aside = move_aside(path)
        data = json.dumps(dict(store.environment), indent=2, sort_keys=True).encode()  # as `_atomic_write_json` writes it
        fsops.write_bytes(path, data, durable=False)
        return aside
    return []


def move_aside(path: Path) -> list[str]:
    """Renames what lies at a path, and says to what; nothing where nothing lies there, or another process was first.

    Raises:
        InstallError: it is there, and cannot be renamed.
    """
    if not os.path.lexists(path):
        return []
    try:
        return [fsops.set_aside(path).name]
    except InstallError:
        if os.path.lexists(path):
            raise
        return []


def _there(path: Path) -> bytes | None:
    """The bytes of a result that FlashInfer would take, or None."""
    if not os.path.lexists(path):
        return None
    try:
        return verify_entry(path.stem, read_part(path)).data
    except IntegrityError:
        return None


def accepted(root: Path, store: TuningStore) -> tuple[str, ...]:
    """Names of results that FlashInfer would not find there: missing, damaged, or another's."""
    entries = root / SCHEMA / store.env_hash / ENTRIES
    return tuple(entry.name for entry in store.entries if _there(entries / f"{entry.name}.json") is None)
