"""Offers installed entries to FlashInfer, and asks by FlashInfer's own rules whether it will take them.

Either through a view (a provider package, the default: nothing outside the cache root is written), or by copying into
`flashinfer/data/aot` of the target's own package, where that is asked for and writable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from kcache import digest, fsops
from kcache.digest import CHUNK
from kcache.errors import InstallError, KcacheError
from kcache.fsops import Identity
from kcache.kinds.provider import Acceptance, ProvidedEntry, acceptance, make_view, uses_providers
from kcache.local_cache import InstalledEntry, LocalCache
from kcache.manifest import Artifact, module_artifact_path
from kcache.match import arch_score, match_key
from kcache.values import dataclass
from kcache.workflows.target import Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """What FlashInfer will see.

    view:     the directory for PYTHONPATH; None where modules went into the package itself, or there is nothing to offer.
    refusals: module -> why FlashInfer will not use the restored library.
    """

    view: Path | None
    refusals: Mapping[str, str]


def offer(
    cache: LocalCache,
    target: Target,
    installed: Sequence[InstalledEntry],
    *,
    into_package: bool,
    admits: Callable[[InstalledEntry], bool] = lambda entry: True,
) -> Offered:
    """Makes the view of this environment (or fills the package) and applies FlashInfer's rules to every module.

    Args:
        admits: whether what an earlier restore offered may still be: the policy may be another.

    Raises:
        InstallError, TrustError: the view cannot be written.
    """
    if not installed:
        return Offered(view=None, refusals={})
    version = target.environment.fact("flashinfer.version").value or ""
    if into_package:
        refusals = _fill_package(target, version, installed)
        _write_current(cache, target, None, installed)
        return Offered(view=None, refusals=refusals)
    entries = [*installed, *filter(admits, _kept(cache, target, installed))]
    try:
        directory = _write_view(cache, target, version, entries)
        _write_current(cache, target, directory, entries)
    except InstallError:  # a cache that was made by another user or with an image, say, for these GPUs and others
        entries = _offered_to_more(cache, target, entries, admits) if uses_providers(version) else []
        if not entries:
            raise
        directory = _write_view(cache, target, version, entries)
    decided = [_accept(target, version, module, entries) for entry in installed for module in entry.manifest.key.modules]
    return Offered(view=directory, refusals={a.module: a.reason for a in decided if not a.accepted})


def _write_view(cache: LocalCache, target: Target, version: str, entries: Sequence[InstalledEntry]) -> Path:
    """The directory of the view that offers these entries; made where it is not there."""
    provided = [
        ProvidedEntry(
            fingerprint=entry.manifest.fingerprint,
            directory=str(entry.directory),
            arch=entry.manifest.key.arch,
            modules=entry.manifest.key.modules,
        )
        for entry in entries
    ]
    return cache.write_view(make_view(provided, version, {} if uses_providers(version) else target.real_modules()))


def present_view(cache: LocalCache, target: Target) -> Mapping[str, Any] | None:
    """What an environment uses, as `offer` wrote it. In a cache that cannot be written that may be what was made for its GPUs and
    others; whether it serves, `offer` finds out."""
    own = cache.read("current", target.id)
    if own is not None or os.access(cache.base / "current", os.W_OK, effective_ids=True):
        return own
    return next(_made_for_more(cache, target), None)


def _made_for_more(cache: LocalCache, target: Target) -> Iterator[Mapping[str, Any]]:
    """What environments use that have all GPU architectures of this one, and more."""
    for path in sorted((cache.base / "current").glob("*.json")):
        document = cache.read("current", path.stem) or {}
        archs, view = document.get("archs"), document.get("view")
        if view is not None and isinstance(archs, list) and set(target.environment.archs) < set(map(str, archs)):
            yield document


def _offered_to_more(
    cache: LocalCache, target: Target, entries: Sequence[InstalledEntry], admits: Callable[[InstalledEntry], bool]
) -> list[InstalledEntry]:
    """Entries of a view that is there already, these among them, of which FlashInfer will use here only what it may; else none.
    FlashInfer takes of each provider's modules those that are for the GPU at hand (jit/_cuda_architecture.py, 0.7.4)."""
    wanted = {entry.manifest.fingerprint: entry for entry in entries}
    for document in _made_for_more(cache, target):
        named = document.get("entries")
        fingerprints = set(map(str, named)) if isinstance(named, list) else set()
        if not wanted.keys() <= fingerprints:
            continue
        others = [cache.find(fingerprint) for fingerprint in sorted(fingerprints - wanted.keys())]
        if all(isinstance(other, InstalledEntry) and _harmless(target, other, admits) for other in others):
            return [*entries, *(other for other in others if isinstance(other, InstalledEntry))]
    return []


def _harmless(target: Target, entry: InstalledEntry, admits: Callable[[InstalledEntry], bool]) -> bool:
    key = entry.manifest.key
    if not admits(entry):
        return False
    if all(arch_score(key.arch, arch) is None for arch in target.environment.archs):
        return True
    return match_key(key, target.environment).accepted and target.decide(entry.manifest).accepted


def _write_current(cache: LocalCache, target: Target, view: Path | None, entries: Sequence[InstalledEntry]) -> None:
    document = {
        "view": str(view) if view is not None else None,
        "into_package": view is None,
        "entries": sorted(entry.manifest.fingerprint for entry in entries),
        "modules": sorted({module for entry in entries for module in entry.manifest.key.modules}),
        "archs": list(target.environment.archs),
    }
    cache.write("current", target.id, document)


def _kept(cache: LocalCache, target: Target, installed: Sequence[InstalledEntry]) -> list[InstalledEntry]:
    """Entries of this environment's present view that still fit and that the new ones do not replace."""
    present = (cache.read("current", target.id) or {}).get("entries")
    if not isinstance(present, list):
        return []
    new = {entry.manifest.fingerprint for entry in installed}
    taken = {(module, e.manifest.key.arch) for e in installed for module in e.manifest.key.modules}
    kept = []
    for fingerprint in present:
        found = cache.find(str(fingerprint)) if fingerprint not in new else None
        if not isinstance(found, InstalledEntry):
            continue
        key = found.manifest.key
        replaced = any((module, key.arch) in taken for module in key.modules)
        if replaced or not match_key(key, target.environment).accepted:
            continue
        if target.decide(found.manifest).accepted:
            kept.append(found)
    return kept


def _accept(target: Target, version: str, module: str, entries: Sequence[InstalledEntry]) -> Acceptance:
    holders = [entry for entry in entries if module in entry.manifest.key.modules]
    in_place = all((entry.directory / module_artifact_path(module)).is_file() for entry in holders)
    archs = target.environment.archs
    served = [a for a in archs if any(arch_score(e.manifest.key.arch, a) is not None for e in holders)]
    return acceptance(
        module,
        flashinfer_version=version,
        shadowing=target.shadowing(module),
        library_in_place=in_place,
        archs=archs,
        served=served,
    )


_MARK = "kcache.json"


def _fill_package(target: Target, version: str, installed: Sequence[InstalledEntry]) -> dict[str, str]:
    """Copies libraries into `flashinfer/data/aot`; the reasons for those that could not be."""
    refusals: dict[str, str] = {}
    for entry in installed:
        for module in entry.manifest.key.modules:
            try:
                _copy_into_package(target, version, entry, module)
            except KcacheError as error:
                refusals[module] = str(error)
    return refusals


def _copy_into_package(target: Target, version: str, entry: InstalledEntry, module: str) -> None:
    if len(target.environment.archs) != 1:
        raise InstallError("flashinfer/data/aot cannot serve several GPU architectures", remedy="Restore without --into-package.")
    if not uses_providers(version) and target.real_package is not None:
        raise InstallError(
            f"FlashInfer {version} ignores flashinfer/data/aot while flashinfer_jit_cache is installed",
            remedy="Restore without --into-package.",
        )
    directory = target.aot_directory() / module
    library, mark = directory / f"{module}.so", directory / _MARK
    artifact = next(a for a in entry.manifest.artifacts if a.path == module_artifact_path(module))
    if library.exists() and not mark.exists():
        raise InstallError(f"{library} is not kcache's", remedy="Remove it, or restore without --into-package.")
    if _same(library, mark, artifact):
        return
    fsops.ensure_directory(target.aot_directory())
    fsops.ensure_directory(directory)
    source = entry.directory / artifact.path
    fsops.write_bytes(mark, digest.canonical_json({"sha256": artifact.sha256}))
    with source.open("rb", buffering=0) as stream:
        chunks = iter(lambda: stream.read(CHUNK), b"")
        fsops.write_stream(directory, library.name, chunks, expected_size=artifact.size, expected_sha256=artifact.sha256)
    identity = Identity.of(library)
    document = {"sha256": artifact.sha256, "identity": identity.to_json() if identity else None}
    fsops.write_bytes(mark, digest.canonical_json(document))


def _same(library: Path, mark: Path, artifact: Artifact) -> bool:
    found = Identity.of(library)
    if found is None or not mark.exists():
        return False
    document = {"sha256": artifact.sha256, "identity": found.to_json()}
    return mark.read_bytes() == digest.canonical_json(document)
