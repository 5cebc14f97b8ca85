"""Puts the tuner's results where the target's FlashInfer, or an engine, will look for them, named as the target names them.

Entries lie verified below the cache root. They are merged into what is in use: a result that is there stays, whoever's it is.
What kcache put there is remembered with its identity, so that a second restore of an unchanged host reads no result and takes no
lock. Whether results may be used here is decided exactly (`kcache.kinds.autotune`); an engine that is not here is passed over
with a note.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kcache import digest
from kcache.errors import InstallError, IntegrityError, KcacheError, ProbeError, TrustError
from kcache.fsops import Identity
from kcache.fsops.failures import reason
from kcache.kinds import autotune_v1, autotune_v2, autotune_v2_install
from kcache.kinds.autotune import check_store_rule
from kcache.kinds.autotune_places import sglang_root, vllm_root
from kcache.local_cache import InstalledEntry, LocalCache
from kcache.match import EQUAL, Check, Decision
from kcache.tuning_facts import B12X, FILES, FLASHINFER, VLLM, TuningFacts
from kcache.values import dataclass
from kcache.workflows import selections
from kcache.workflows.outcome import Placement
from kcache.workflows.target import Target

ROOM = "tunings"
"""Below the cache root: what each environment uses (`<environment>.json`) and what was written where (`at-<place>.json`)."""


def decide(target: Target, facts: TuningFacts, *, strict: bool) -> Decision:
    """Whether an entry's results may be used; a host that cannot be asked, or whose FlashInfer is not known, is a refusal."""
    if facts.place == B12X:
        return selections.decide(target, facts)
    try:
        host = target.tuning_host()
    except ProbeError as error:
        check = Check(field="tuning.environment", rule=EQUAL, wanted=_described(facts), found=str(error), passed=False)
        return Decision(checks=(check,))
    if facts.place == FLASHINFER:
        store = autotune_v2.TuningStore(environment=facts.environment, entries=())
        return autotune_v2.match_store(store, facts.host, host, strict=strict)
    file = autotune_v1.TuningFile(metadata=facts.environment, results={}, records={})
    return autotune_v1.match_file(file, facts.host, host, strict=strict)


def _described(facts: TuningFacts) -> str:
    return f"FlashInfer {facts.environment.get('flashinfer_version', '')} on {facts.environment.get('gpu', '')}"


def place_root(target: Target, place: str) -> Path | None:
    """Where results of a place go on this host; None where the engine is not here.

    Raises:
        ProbeError: it is not known where.
    """
    environ = target.process_environ
    if place == B12X:
        return selections.root_of(target)
    if place == FLASHINFER:
        if target.base is None and not environ.get("FLASHINFER_AUTOTUNE_CACHE_DIR"):
            raise ProbeError("it is not known where FlashInfer's cache lies", remedy="Restore on the host that will use it.")
        return Path(autotune_v2.store_root(environ, target.base or ""))
    names: tuple[str, ...]
    if place == VLLM:
        version, archs = target.environment.fact("flashinfer.version").value or "", "_".join(target.environment.archs)
        root = Path(vllm_root(environ, flashinfer_version=version, archs=archs))
        names, own = ("VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR", "VLLM_CACHE_ROOT"), root.parents[2]
    else:
        root = Path(sglang_root(environ))
        names, own = ("SGLANG_CACHE_DIR",), root.parents[1]
    there = target.has_package(place) or own.is_dir() or any(environ.get(name) for name in names)
    return root if there else None


def place_tunings(cache: LocalCache, target: Target, installed: Sequence[InstalledEntry], *, timeout: float) -> Placement:
    """Gives FlashInfer and the engines the results of these entries, which `decide` accepted.

    Args:
        timeout: seconds to wait for another kcache that writes the same file.
    """
    refusals: dict[str, str] = {}
    failures: dict[str, KcacheError] = {}
    new: set[str] = set()
    notes: list[str] = []
    taken: list[str] = []
    for entry in installed:
        fingerprint = entry.manifest.fingerprint
        try:
            changed, told = _place(cache, target, entry, timeout)
        except ProbeError as error:
            refusals[fingerprint] = str(error)
        except KcacheError as error:
            failures[fingerprint] = error
        except OSError as error:
            failures[fingerprint] = InstallError("tuning results cannot be placed", why=f"{error.filename}: {reason(error)}")
        else:
            notes += told
            taken.append(fingerprint)
            if changed:
                new.add(fingerprint)
    if taken or cache.read(ROOM, target.id):
        _remember(cache, target.id, {"entries": sorted(taken)})
    return Placement(refusals=refusals, failures=failures, new=frozenset(new), notes=tuple(dict.fromkeys(notes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """What one entry's placing came to: files that hold its results, whether any had to be written, and notes."""

    files: tuple[Path, ...]
    changed: bool
    notes: tuple[str, ...]


def _place(cache: LocalCache, target: Target, entry: InstalledEntry, timeout: float) -> tuple[bool, Sequence[str]]:
    """Places one entry's results unless they are; whether anything had to be done, and notes."""
    facts = entry.manifest.tunings
    assert facts is not None
    root = place_root(target, facts.place)
    if root is None:
        return False, (f"tuning results for {facts.place} are kept in the cache alone: {facts.place} is not installed here",)
    fields = facts.environment if facts.place == B12X else target.tuning_host().written()
    state = {"root": str(root), "fields": dict(fields)}
    place = "at-" + digest.of_document([entry.manifest.fingerprint, str(root)]).removeprefix("sha256:")[:16]
    if _in_place(cache.read(ROOM, place), state):
        return False, ()
    put: Callable[..., _Done] = {FLASHINFER: _put_store, B12X: _put_selections}.get(facts.place, _put_files)
    done = put(target, entry, root, timeout)
    identities = {str(path): found.to_json() for path in done.files if (found := Identity.of(path)) is not None}
    _remember(cache, place, {**state, "files": identities})
    return done.changed, done.notes


def _in_place(known: Mapping[str, Any] | None, state: Mapping[str, Any]) -> bool:
    """Whether what was put there is there, unchanged, for a host that would write the same."""
    if known is None or any(known.get(name) != value for name, value in state.items()):
        return False
    files = known.get("files")
    if not isinstance(files, dict) or not files:
        return False
    found = {path: Identity.of(Path(path)) for path in files}
    return all(one is not None and one.to_json() == files[path] for path, one in found.items())


def store_of(entry: InstalledEntry) -> autotune_v2.TuningStore:
    """The managed store in an entry, each result verified.

    Raises:
        IntegrityError: a file is not what it should be.
    """
    facts = entry.manifest.tunings
    assert facts is not None
    paths = [Path(artifact.path) for artifact in entry.manifest.artifacts]
    entries = tuple(autotune_v2.verify_entry(path.stem, _bytes(entry.directory / path)) for path in paths)
    return autotune_v2.TuningStore(environment=facts.environment, entries=entries)


def files_of(entry: InstalledEntry) -> dict[str, autotune_v1.TuningFile]:
    """The files in an entry, by their paths below the engine's root. Raises as `store_of`."""
    paths = [artifact.path.removeprefix(f"{FILES}/") for artifact in entry.manifest.artifacts]
    return {path: autotune_v1.parse_file(_bytes(entry.directory / FILES / path)) for path in paths}


def _put_selections(_target: Target, entry: InstalledEntry, root: Path, timeout: float) -> _Done:
    files, changed, notes = selections.put(entry, root, timeout)
    return _Done(files=files, changed=changed, notes=notes)


def _put_store(target: Target, entry: InstalledEntry, root: Path, timeout: float) -> _Done:
    check_store_rule(target.flashinfer_package or "")
    store = autotune_v2.relocated(store_of(entry), target.tuning_host())
    placed = autotune_v2_install.install(root, store)
    if lost := autotune_v2_install.accepted(root, store):
        raise InstallError(f"{root} was changed while tuning results were placed", why=f"{lost[0]} is not there")
    notes = [
        f"{name} in {placed.directory} is what FlashInfer would not have taken; it was set aside" for name in placed.set_aside
    ]
    if placed.theirs:
        notes.append(f"{len(placed.theirs)} tuning results in {placed.directory} were measured by others, and stay")
    files = [placed.directory / autotune_v2.ENTRIES / f"{one.name}.json" for one in store.entries]
    return _Done(files=(placed.directory / autotune_v2.MANIFEST, *files), changed=bool(placed.written), notes=tuple(notes))


def _put_files(target: Target, entry: InstalledEntry, root: Path, timeout: float) -> _Done:
    files, notes, changed = [], [], False
    for path, file in files_of(entry).items():
        placed = autotune_v1.install(root / path, autotune_v1.relocated(file, target.tuning_host()), timeout=timeout)
        if placed.how == autotune_v1.REFUSED:
            raise InstallError(f"tuning results are not merged into {root / path}", why=placed.why)
        if placed.set_aside:
            notes.append(f"{root / path} was set aside as {placed.set_aside}: {placed.why}")
        if placed.theirs:
            notes.append(f"{len(placed.theirs)} tuning results in {root / path} were measured by others, and stay")
        changed = changed or placed.how != autotune_v1.KEPT
        files.append(root / path)
    return _Done(files=tuple(files), changed=changed, notes=tuple(notes))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read", why=os.strerror(error.errno or 0)) from error


def _remember(cache: LocalCache, name: str, document: Mapping[str, Any]) -> None:
    """Keeps a document where that is possible: without it the next restore looks at every result again."""
    with suppress(InstallError, TrustError):
        cache.write(ROOM, name, document)


def tunings_in_use(cache: LocalCache, target: Target) -> list[InstalledEntry]:
    """The entries whose results the last restore gave to this environment, as far as they are whole."""
    named = (cache.read(ROOM, target.id) or {}).get("entries")
    found = [cache.find(str(fingerprint)) for fingerprint in (named if isinstance(named, list) else [])]
    return [entry for entry in found if isinstance(entry, InstalledEntry) and entry.manifest.tunings is not None]


def lacking_modules(entries: Sequence[TuningFacts], there: set[str]) -> list[str]:
    """For each entry of results whose operations load modules that are not there: a sentence that names them."""
    said = []
    for facts in entries:
        if lost := sorted(set(facts.modules) - there):
            said.append(
                f"tuning results of {', '.join(facts.operations) or facts.place} are there, and the modules that they choose"
                f" kernels of are not: {', '.join(lost)}"
            )
    return said
