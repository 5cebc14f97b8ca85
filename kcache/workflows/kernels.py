"""Puts CuTe-DSL kernels where the target's FlashInfer looks for them, and asks by its own rules whether it will take them.

Entries lie verified below the cache root; FlashInfer wants copies in `cached_ops/<module>_<arch>_cute_dsl/`, beside a `meta.json`
that is right for this very host (`kcache.kinds.cute_dsl`). What kcache wrote there is remembered with its identity, so that a
second restore reads no kernel, takes no lock and writes nothing, and so that a kernel of the user's is never taken for ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

from kcache import digest, fsops
from kcache.errors import InstallError, KcacheError, ProbeError, TrustError
from kcache.fsops import Identity
from kcache.fsops.failures import reason
from kcache.kernel_facts import KernelFacts
from kcache.kinds.cute_dsl import expected_meta, module_directory
from kcache.local_cache import InstalledEntry, LocalCache
from kcache.values import dataclass
from kcache.workflows.outcome import Placement
from kcache.workflows.target import Target

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

META_BYTES = 1 << 20
"""FlashInfer's `meta.json` is below a kilobyte. A larger one is not what it expects."""

ROOM = "kernels"
"""Below the cache root: what each environment uses (`<environment>.json`) and what was written where (`at-<place>.json`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """One directory of FlashInfer's, and what belongs into it.

    meta:    the `meta.json` that the target's FlashInfer expects there.
    files:   name of an object -> its verified file in the cache. digests: name -> digest.
    entries: fingerprints of the entries that want it.
    """

    directory: Path
    meta: Mapping[str, object]
    files: dict[str, Path]
    digests: dict[str, str]
    entries: list[str]

    @property
    def name(self) -> str:
        return "at-" + digest.of_bytes(str(self.directory).encode()).removeprefix("sha256:")[:16]


def place_kernels(
    cache: LocalCache, target: Target, installed: Sequence[InstalledEntry], *, strict: bool, timeout: float
) -> Placement:
    """Gives FlashInfer the kernels of these entries.

    Args:
        strict: take only entries whose farm's `meta.json` is the target's: FlashInfer's own rule.
        timeout: seconds to wait for a build that holds FlashInfer's lock for a module.
    """
    places: dict[Path, _Place] = {}
    refusals: dict[str, str] = {}
    failures: dict[str, KcacheError] = {}
    # In one order, so that of two builds of a kernel the same one comes first every time.
    for entry in sorted(installed, key=lambda entry: entry.manifest.fingerprint):
        try:
            _add(places, entry, target, strict=strict)
        except KcacheError as error:
            refusals[entry.manifest.fingerprint] = str(error)
    new: set[str] = set()
    notes: list[str] = []
    for place in places.values():
        try:
            if not _in_place(cache, place):
                wrote, told = _install(cache, place, timeout)
                notes += told
                new.update(place.entries if wrote else ())
            if lacking := _lacking(place):
                raise InstallError(f"{place.directory} was changed while kernels were placed", why=f"{lacking} is missing")
        except ProbeError as error:
            refusals |= dict.fromkeys(place.entries, str(error))
        except KcacheError as error:
            failures |= dict.fromkeys(place.entries, error)
        except OSError as error:
            failed = InstallError(f"kernels cannot be placed in {place.directory}", why=reason(error))
            failures |= dict.fromkeys(place.entries, failed)
    taken = [entry.manifest.fingerprint for entry in installed if entry.manifest.fingerprint not in {*refusals, *failures}]
    if taken or cache.read(ROOM, target.id):
        _remember(cache, target.id, {"entries": sorted(taken)})
    return Placement(refusals=refusals, failures=failures, new=frozenset(new), notes=tuple(notes))


def _add(places: dict[Path, _Place], entry: InstalledEntry, target: Target, *, strict: bool) -> None:
    """Adds an entry to the place that it belongs to."""
    kernels = entry.manifest.kernels
    assert kernels is not None
    arch = entry.manifest.key.ingredients["gpu.cute_arch"]
    meta = _expected(target, kernels, arch)
    if strict and dict(kernels.meta) != meta:
        differing = sorted(name for name in {*kernels.meta, *meta} if kernels.meta.get(name) != meta.get(name))
        raise ProbeError(
            "meta.json of the farm is not the one of this host", why=f"differs: {', '.join(differing)} (strict match)"
        )
    directory = target.cached_ops() / module_directory(kernels.module, arch)
    place = places.setdefault(directory, _Place(directory=directory, meta=meta, files={}, digests={}, entries=[]))
    place.entries.append(entry.manifest.fingerprint)
    for artifact in entry.manifest.artifacts:
        name = artifact.path.rpartition("/")[2]
        # Two models may share a kernel. Builds of it differ in bytes and are the same kernel: the first one stays.
        if name not in place.files:
            place.files[name], place.digests[name] = entry.directory / artifact.path, artifact.sha256


def _expected(target: Target, kernels: KernelFacts, arch: str) -> dict[str, object]:
    host = target.kernel_target(arch)
    named = host.environ.get("CUTE_DSL_ARCH", arch)
    if named.replace("_", "") != arch.replace("_", ""):
        raise ProbeError(
            f"CUTE_DSL_ARCH={named} is set, and these kernels are for {arch}", remedy="Unset it where the server runs."
        )
    return expected_meta(host, kernels.key_files, tvm_ffi=kernels.tvm_ffi)


def _in_place(cache: LocalCache, place: _Place) -> bool:
    """Whether every kernel is there under the right `meta.json`; files are read only if their identity is not remembered.

    Where one has none (a restore was killed), they are looked at under the lock, and remembered.
    """
    if _read_meta(place.directory) != place.meta:
        return False
    known = _known(cache, place)
    for name, sha256 in place.digests.items():
        found = Identity.of(place.directory / name)
        line = known.get(name)
        if found is None:
            return False
        if not isinstance(line, dict):  # what kcache did not write is the user's own kernel of that name
            if not (place.directory / name).is_file():
                return False
            continue
        touched = (line.get("sha256"), line.get("identity")) != (sha256, found.to_json())
        if line.get("identity") is None or (touched and fsops.digest_or_none(place.directory / name) != sha256):
            return False
    return True


def _read_meta(directory: Path) -> object:
    data = fsops.read_small(directory / "meta.json", META_BYTES)
    try:
        return None if data is None else json.loads(data)
    except (ValueError, RecursionError):
        return None


def _known(cache: LocalCache, place: _Place) -> dict[str, Any]:
    """What kcache wrote there: name -> {sha256, identity}."""
    objects = (cache.read(ROOM, place.name) or {}).get("objects")
    return objects if isinstance(objects, dict) else {}


def _install(cache: LocalCache, place: _Place, timeout: float) -> tuple[bool, list[str]]:
    """Whether anything had to be written, and what a person should know."""
    from kcache.kinds.cute_dsl_install import SET_ASIDE, install_module

    def owned() -> dict[str, str]:
        return {name: str(line.get("sha256")) for name, line in _known(cache, place).items() if isinstance(line, dict)}

    def remember(ours: Mapping[str, str], whole: AbstractSet[str]) -> None:
        """Identities only of what is known to be ours to the last byte: anything else is read again the next time."""
        objects: dict[str, Any] = {name: {"sha256": sha256, "identity": None} for name, sha256 in ours.items()}
        for name in whole:
            if (identity := Identity.of(place.directory / name)) is not None:
                objects[name]["identity"] = identity.to_json()
        _remember(cache, place.name, {"directory": str(place.directory), "objects": objects})

    placed = install_module(
        place.directory.parent,
        place.directory.name,
        place.meta,
        place.files,
        digests=place.digests,
        owned=owned,
        timeout=timeout,
        remember=remember,
    )
    if placed.plan.how != SET_ASIDE:
        return bool(placed.plan.write), []
    return True, [f"kernels that were not kcache's lie in {placed.set_aside} now: {placed.plan.why}"]


def _remember(cache: LocalCache, name: str, document: Mapping[str, Any]) -> None:
    """Keeps a document where that is possible. In a cache that may only be read nothing is remembered: then the next restore
    takes kcache's kernels for the user's own, and leaves them alone as long as FlashInfer takes them."""
    with suppress(InstallError, TrustError):
        cache.write(ROOM, name, document)


def _lacking(place: _Place) -> str:
    """FlashInfer's own rule (`JitSpecCuteDsl.try_load`): the object is there, and `meta.json` is what it expects."""
    if _read_meta(place.directory) != place.meta:
        return "the meta.json that FlashInfer expects"
    return next((name for name in place.files if not (place.directory / name).is_file()), "")


def in_use(cache: LocalCache, target: Target) -> list[InstalledEntry]:
    """The entries whose kernels the last restore gave to this environment, as far as they are whole."""
    named = (cache.read(ROOM, target.id) or {}).get("entries")
    found = [cache.find(str(fingerprint)) for fingerprint in (named if isinstance(named, list) else [])]
    return [entry for entry in found if isinstance(entry, InstalledEntry) and entry.manifest.kernels is not None]
