"""Prunes the cache on this host: entries that rules name, and what killed or replaced restores left.

Order: the receipt of an entry goes first, so from then on it is not installed, then its files. A prune that is killed at any
point leaves a cache that a restore completes and the next prune tidies. Whoever has a file mapped or open keeps it: a name is
taken away, not the bytes.

What stays, whatever the rules say: what a process of this host has mapped or open, what a server's PYTHONPATH names, and what a
restore gave away within `grace` (its server may not have loaded it yet; in another PID namespace it could not be seen).
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcache import fsops
from kcache.errors import InstallError
from kcache.local_cache import Damage, InstalledEntry, LocalCache
from kcache.probe.holders import held_paths
from kcache.workflows.prune_rules import Candidate, Rules, Verdict, decide

GRACE = 3600.0
"""Seconds after a restore in which nothing that it gave away is removed."""

_ROOMS = ("current", "kernels", "programs", "tunings")
"""Where environments say what they use (`kcache.local_cache`): documents with a list `entries`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What one call did, or with `dry_run` would do. `leftovers` are paths of no entry, with the reason."""

    root: str
    verdicts: tuple[Verdict, ...]
    leftovers: Mapping[str, str]
    freed: int
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        return {
            "cache_root": self.root,
            "entries": [verdict.to_json() for verdict in self.verdicts],
            "leftovers": dict(self.leftovers),
            "bytes_freed": self.freed,
            "dry_run": self.dry_run,
        }


def prune(
    cache: LocalCache,
    rules: Rules,
    *,
    grace: float = GRACE,
    dry_run: bool = False,
    lock_timeout: float = 60.0,
    now: float | None = None,
) -> Pruned:
    """Removes what may go, under the cache's lock.

    Raises:
        TrustError: the root cannot be trusted; nothing was touched. LockTimeoutError: another process writes to it.
        InstallError: something cannot be removed.
    """
    cache.check()
    moment = time.time() if now is None else now
    if not cache.base.is_dir():
        return Pruned(root=str(cache.root), verdicts=(), leftovers={}, freed=0, dry_run=dry_run)
    if dry_run:
        return _prune(cache, rules, grace, moment, dry_run=True)
    with fsops.locked(cache.lock_path, lock_timeout):
        return _prune(cache, rules, grace, moment, dry_run=False)


def _prune(cache: LocalCache, rules: Rules, grace: float, now: float, *, dry_run: bool) -> Pruned:
    held = _held(cache)
    used = _last_uses(cache)
    installed = list(cache.fingerprints())
    young = now - grace
    verdicts = decide([_candidate(cache, one, held, used, young) for one in installed], rules, now)
    leftovers = {} if not (cache.base / "entries").is_dir() else dict(_leftovers(cache, installed, held))
    leftovers |= dict(_idle_views(cache, held, grace, now))
    freed = sum(verdict.candidate.size for verdict in verdicts if verdict.remove)
    freed += sum(_size(Path(path)) for path in leftovers)
    if not dry_run:
        for verdict in verdicts:
            if verdict.remove:
                _remove_entry(cache, verdict.candidate.fingerprint)
        for path in leftovers:
            _remove(Path(path))
    return Pruned(root=str(cache.root), verdicts=tuple(verdicts), leftovers=leftovers, freed=freed, dry_run=dry_run)


def _candidate(
    cache: LocalCache, fingerprint: str, held: Mapping[str, str], used: Mapping[str, float], young: float
) -> Candidate:
    directory = cache.entry_directory(fingerprint)
    made = _modified(directory / "receipt.json")  # before a look, which may write it again
    found = cache.find(fingerprint)
    last = max(used.get(fingerprint, 0.0), made)
    keeps = held.get(directory.name, "")
    if not keeps and last > young:
        keeps = "a restore gave it to a server a short while ago, which may not have loaded it yet (--grace)"
    title, version = fingerprint, ""
    if isinstance(found, InstalledEntry):
        title, version = found.manifest.key.title, found.manifest.key.ingredients.get("flashinfer.version", "")
    broken = f"it is damaged ({found.path.name}: {found.reason})" if isinstance(found, Damage) else ""
    return Candidate(
        fingerprint=fingerprint,
        title=title,
        version=version,
        size=_size(directory),
        made=made,
        used=last,
        held=keeps,
        broken=broken,
    )


def _held(cache: LocalCache) -> dict[str, str]:
    """Name of an entry's or a view's directory -> which process keeps it."""
    base = os.path.realpath(cache.base)
    held: dict[str, str] = {}
    for pid, path in held_paths(base):
        room, _, rest = path[len(base) + 1 :].partition("/")
        name = rest.partition("/")[0]
        if room not in ("entries", "site") or not name:
            continue
        why = f"process {pid} uses it"
        held.setdefault(name, why)
        if room == "site":
            for entry in _entries_of_view(cache, name):
                held.setdefault(entry, why)
    return held


def _entries_of_view(cache: LocalCache, name: str) -> Iterator[str]:
    """Names of the entries that a view offers: of a provider's directories, or of the goals of its links."""
    directory = cache.site / name
    document = cache.read(f"site/{name}/flashinfer_jit_cache", "kcache") or {}
    providers = document.get("providers")
    for provider in providers if isinstance(providers, list) else ():
        if isinstance(provider, dict):
            yield str(provider.get("directory")).rstrip("/").rpartition("/")[2]
    marker = "/v1/entries/"
    for root, folders, files in os.walk(directory):
        for item in (*folders, *files):
            with suppress(OSError):
                _, found, rest = str(Path(root, item).readlink()).partition(marker)
                if found:
                    yield rest.partition("/")[0]


def _last_uses(cache: LocalCache) -> dict[str, float]:
    """Fingerprint -> when an environment that names it was last restored."""
    uses: dict[str, float] = {}
    for room in _ROOMS:
        for path in sorted((cache.base / room).glob("*.json")):
            named = (cache.read(room, path.stem) or {}).get("entries")
            for fingerprint in named if isinstance(named, list) else ():
                uses[str(fingerprint)] = max(uses.get(str(fingerprint), 0.0), _modified(path))
    return uses


def _leftovers(cache: LocalCache, installed: list[str], held: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """What no receipt speaks of. Only the holder of the lock may say so: nobody else is writing there."""
    whole = {cache.entry_directory(fingerprint).name for fingerprint in installed}
    for directory in sorted((cache.base / "entries").iterdir()):
        if directory.name in held:
            continue
        if directory.name not in whole:
            yield str(directory), "an installation that was not finished, or was taken out of use"
            continue
        for prefix, why in ((fsops.TEMPORARY_PREFIX, "an unfinished file"), (fsops.DAMAGED_PREFIX, "a damaged file, set aside")):
            for path in sorted(directory.rglob(f"{prefix}*")):
                yield str(path), why


def _idle_views(cache: LocalCache, held: Mapping[str, str], grace: float, now: float) -> Iterator[tuple[str, str]]:
    """Views that no environment uses any more."""
    used = {str((cache.read("current", path.stem) or {}).get("view")) for path in (cache.base / "current").glob("*.json")}
    for view in sorted(cache.site.iterdir()) if cache.site.is_dir() else ():
        if str(view) not in used and view.name not in held and now - _modified(view) > grace:
            yield str(view), "a view that no environment uses"


def _remove_entry(cache: LocalCache, fingerprint: str) -> None:
    directory = cache.entry_directory(fingerprint)
    receipt = directory / "receipt.json"
    with fsops.translated(receipt, "remove"), suppress(FileNotFoundError):
        receipt.unlink()
    _remove(directory)


def _remove(path: Path) -> None:
    """A file, a link, or a directory with all that is in it; links are not followed."""
    with fsops.translated(path, "remove"), suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            if not shutil.rmtree.avoids_symlink_attacks:
                raise InstallError(f"cannot remove {path} safely on this system")
            shutil.rmtree(path)
        else:
            path.unlink()


def _size(path: Path) -> int:
    total = 0
    with suppress(OSError):
        total = path.lstat().st_size if not path.is_dir() else 0
    for root, _, files in os.walk(path):
        for name in files:
            with suppress(OSError):
                total += Path(root, name).lstat().st_size
    return total


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
