"""Ranks that serve together use the same tuning results, or none of them does: a rank with others, or with none, would choose
other kernels, or tune while its group waits for it.

The first rank that has results offers its bytes through the store that `torch.distributed` was initialised with; every rank puts
them into a directory that is named for their content, and says whether it holds them. Nobody goes on before all have said so, are
dead, or have had their time (`kcache.warmup.ranks`). FlashInfer's own rule decides in every rank, so a rank whose environment is
another holds nothing, and then nobody does. Never the reason that a start fails: whatever goes wrong is a `why`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kcache import digest, fsops
from kcache.errors import IntegrityError, KcacheError
from kcache.kinds import autotune_v1, autotune_v2, autotune_v2_install
from kcache.kinds.autotune import SCHEMA, WILDCARD
from kcache.values import dataclass
from kcache.warmup.ranks import Ranks
from kcache.warmup.stopping import Stop

logger = logging.getLogger("kcache.warmup")

DEADLINE = 120.0
"""Seconds, where the caller names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTunings:
    """What all ranks were told alike.

    agreed:  whether every rank that lives holds the same results; if not, none may be used.
    digest:  of their content. results: how many there are.
    root:    for `flashinfer.autotune_v2(mode="replay", cache_root=...)`; None where a file was shared, or nothing was.
    file:    for `flashinfer.autotune(False, cache=...)`, likewise.
    why:     one line, where nothing is agreed.
    """

    agreed: bool
    digest: str = ""
    results: int = 0
    root: Path | None = None
    file: Path | None = None
    why: str = ""


def share_tunings(
    *,
    root: Path | None = None,
    file: Path | None = None,
    policy: Mapping[str, str] | None = None,
    into: Path | None = None,
    group: Any = None,
    deadline: float | None = None,
    stall_seconds: float = 30.0,
    join_seconds: float = 120.0,
) -> SharedTunings:
    """Agrees with the other ranks on the tuning results that all of them use. To be called by every rank, in the same order.

    Args:
        root: of this rank's managed store (v2); FlashInfer's own where None.
        file: of this rank's JSON file (v1), which is shared instead of a store.
        policy: the fields of the measurement policy, where it is not FlashInfer's default.
        into: where the shared results are put; beside the store or the file where None.
        group: the `torch.distributed` group that serves together; None for all ranks, where it is initialised.
        deadline: seconds until this rank goes on without results; 120 where None.
        stall_seconds, join_seconds: see `kcache.warmup.warmup`.
    """
    stop = Stop(DEADLINE if deadline is None else deadline)
    try:
        ranks = Ranks.of(group, stall=stall_seconds, join=join_seconds)
    except Exception as error:
        logger.exception("the other ranks cannot be asked; no tuning results are used")
        return SharedTunings(agreed=False, why=f"the other ranks cannot be asked: {error}")
    with ranks:
        held = SharedTunings(agreed=False, why="FlashInfer is not there, or does not say what it would write")
        environment = _environment()
        place = _Place(root=_own_root() if root is None else root, file=file, into=into)
        own = b"" if environment is None else _offer(place, environment, policy or {})
        offered = ranks.offer(own, stop)
        if environment is not None:
            held = _held(place, environment, policy or {}, offered)
        ready = (f"autotune:{held.digest}",) if held.agreed else ()
        ranks.tell(ready, {})
        ranks.finish(stop)
        agreed, _ = ranks.verdict(ready)
    if ready and ready[0] in agreed:
        return held
    why = held.why or "not every rank holds the same tuning results"
    logger.info("no tuning results are used: %s", why)
    return SharedTunings(agreed=False, why=why)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where this rank's results lie, and where shared ones go."""

    root: Path
    file: Path | None
    into: Path | None

    def shared(self, content: str) -> Path:
        beside = self.root.with_name(f"{self.root.name}-shared") if self.file is None else self.file.parent / "kcache-shared"
        return (self.into or beside) / content.removeprefix("sha256:")[:16]


def _own_root() -> Path:
    base = os.environ.get("FLASHINFER_WORKSPACE_BASE") or str(Path.home())
    return Path(autotune_v2.store_root(os.environ, base))


def _environment() -> dict[str, str] | None:
    """What this process's FlashInfer writes beside its results; None where it is not there, or cannot say."""
    if sys.modules.get("flashinfer", 0) is None:
        return None
    try:
        from flashinfer.autotuner import _collect_metadata

        return {str(name): str(text) for name, text in _collect_metadata().items()}
    except Exception:
        logger.exception("FlashInfer's tuner cannot be asked for its environment")
        return None


def _offer(place: _Place, environment: Mapping[str, str], policy: Mapping[str, str]) -> bytes:
    """This rank's results as a document; empty where it has none that its FlashInfer would take."""
    try:
        if place.file is not None:
            data = fsops.read_checked(place.file, autotune_v1.MAX_FILE)
            _check(autotune_v1.parse_file(data).metadata, environment)
            return json.dumps({"file": data.decode()}).encode()
        store = autotune_v2.read_store(place.root, dict(environment) | dict(policy))
    except (KcacheError, OSError) as error:
        logger.info("this rank has no tuning results to offer: %s", error)
        return b""
    if store is None:
        return b""
    entries = {entry.name: entry.data.decode() for entry in store.entries}
    return json.dumps({"store": entries, "environment": dict(store.environment)}, sort_keys=True).encode()


def _check(metadata: Mapping[str, Any], environment: Mapping[str, str]) -> None:
    """FlashInfer's own rule (`_classify_metadata_mismatches`); in a store's environment nothing is a wildcard, nor written so."""
    for name, text in environment.items():
        if metadata.get(name) not in (text, WILDCARD):
            raise IntegrityError("the tuning results are of another environment", why=f"{name} is {text} here")


def _held(place: _Place, environment: Mapping[str, str], policy: Mapping[str, str], offered: bytes) -> SharedTunings:
    """What this rank holds once the offered results are in place here."""
    if not offered:
        return SharedTunings(agreed=False, why="no rank has tuning results")
    try:
        document = json.loads(offered)
        content = digest.of_bytes(offered)
        directory = fsops.ensure_directory(place.shared(content))
        with fsops.locked(directory / ".lock", DEADLINE / 4):
            if "file" in document:
                return _hold_file(directory, document["file"].encode(), environment, content)
            own = dict(environment) | dict(policy) | {"cache_schema": SCHEMA}
            _check(document["environment"], own)
            return _hold_store(directory, document["store"], own, content)
    except (KcacheError, OSError, ValueError, KeyError, AttributeError) as error:
        logger.warning("the tuning results that a rank offered cannot be used here: %s", error)
        return SharedTunings(agreed=False, why=str(error))


def _hold_file(directory: Path, data: bytes, environment: Mapping[str, str], content: str) -> SharedTunings:
    file = autotune_v1.parse_file(data)
    _check(file.metadata, environment)
    path = directory / "autotune_configs.json"
    if not path.exists() or fsops.read_checked(path, autotune_v1.MAX_FILE) != data:
        fsops.write_bytes(path, data, durable=False)
    return SharedTunings(agreed=True, digest=content, results=len(file.results), file=path)


def _hold_store(directory: Path, entries: Mapping[str, str], environment: Mapping[str, str], content: str) -> SharedTunings:
    """The offered results and no others: what a server added to them since is set aside."""
    found = tuple(autotune_v2.verify_entry(name, text.encode()) for name, text in sorted(entries.items()))
    store = autotune_v2.TuningStore(environment=environment, entries=found)
    there = autotune_v2.content_digest(directory, environment)
    if there != store.content:
        if there:
            fsops.set_aside(directory / SCHEMA / store.env_hash)
        autotune_v2_install.install(directory, store)
    if autotune_v2.content_digest(directory, environment) != store.content:
        raise IntegrityError(f"{directory} does not hold what was offered", why="another process writes it")
    return SharedTunings(agreed=True, digest=content, results=len(found), root=directory)
