"""Writes one entry of a build: facts of the libraries, key, archive, manifest. The last step of `kcache.workflows.build`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcache import archive, digest, fsops
from kcache.errors import CollectError, KcacheError
from kcache.key import Fact, known, undetermined
from kcache.kinds.nvcc_modules import BuildFacts, BuiltModule, EntryParts, entry_parts
from kcache.manifest import Manifest, module_artifact_path, parse_manifest
from kcache.probe.binary import binary_facts
from kcache.probe.packages import FLASHINFER_UNKNOWN_VERSION
from kcache.workflows.build_output import build_name
from kcache.workflows.compile import Compiled, package_sources
from kcache.workflows.provenance import provenance as described

BUILT = "built"
UP_TO_DATE = "up-to-date"
FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What entries of one architecture share. `facts` is the child's answer about FlashInfer; `package` its directory."""

    output: Path
    arch: str
    package: Path
    facts: Mapping[str, Any]
    cuda_release: str
    flags: str
    provenance: Mapping[str, Any]

    def build_facts(self) -> BuildFacts:
        version = self.facts["flashinfer"]
        return BuildFacts(
            machine=known(os.uname().machine),
            flashinfer=_fact(None if version == FLASHINFER_UNKNOWN_VERSION else version, "FlashInfer does not know its version"),
            cuda_release=known(self.cuda_release),
            arch=self.arch,
            tvm_ffi=_fact(self.facts["tvm_ffi"], "apache-tvm-ffi has no package metadata"),
            flags=known(self.flags),
        )


def _fact(value: Any, why: str) -> Fact:
    return known(value) if isinstance(value, str) and value else undetermined(why)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReport:
    """One module of one entry. `status` is built, up-to-date or failed; `log` is a path, given where a compiler failed."""

    module: str
    arch: str
    kind: str
    status: str
    seconds: float
    reason: str = ""
    log: str = ""

    def to_json(self) -> dict[str, Any]:
        document = {"module": self.module, "arch": self.arch, "kind": self.kind, "status": self.status}
        return {**document, "seconds": round(self.seconds, 3), "reason": self.reason, "log": self.log}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryReport:
    """One entry. `manifest` and `archive` are paths, empty where it failed; `model` is empty where it suits every one."""

    kind: str
    arch: str
    modules: tuple[str, ...]
    status: str
    reason: str = ""
    fingerprint: str = ""
    manifest: str = ""
    archive: str = ""
    model: str = ""
    variant: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "model": self.model,
            "variant": self.variant,
            "arch": self.arch,
            "modules": list(self.modules),
            "status": self.status,
            "reason": self.reason,
            "fingerprint": self.fingerprint,
            "manifest": self.manifest,
            "archive": self.archive,
        }


def write_entry(context: Context, kind: str, compiled: Mapping[str, Compiled], missing: Mapping[str, str]) -> EntryReport:
    """Writes an entry unless it is there already, or says why there is none.

    Args:
        compiled: its modules that went through the compiler. missing: the others, and why.
    """
    names = tuple(sorted({*compiled, *missing}))
    failed = {**missing, **{name: one.failed for name, one in compiled.items() if one.failed}}
    if failed:
        reason = "; ".join(f"{name}: {why}" for name, why in sorted(failed.items()))
        return EntryReport(kind=kind, arch=context.arch, modules=names, status=FAILED, reason=reason)
    try:
        return _write(context, kind, compiled)
    except KcacheError as error:
        return EntryReport(kind=kind, arch=context.arch, modules=names, status=FAILED, reason=str(error))


def _write(context: Context, kind: str, compiled: Mapping[str, Compiled]) -> EntryReport:
    modules = tuple(_built(one, context.package) for one in compiled.values())
    parts = entry_parts(kind, context.build_facts(), modules)
    files = {module_artifact_path(module): one.module.library for module, one in compiled.items()}
    return write_parts(context.output, parts, files, context.provenance)


def write_parts(output: Path, parts: EntryParts, files: Mapping[str, Path], provenance: Mapping[str, Any]) -> EntryReport:
    """Packs an entry and writes its manifest, unless the output directory holds it already.

    Args:
        files: path of each artifact in the entry -> the file that was built.

    Raises:
        CollectError: a file changed meanwhile.
    """
    name = build_name(parts.key)
    packed, written = output / f"{name}.tar.zst", output / f"{name}.json"
    status = UP_TO_DATE
    if not _is_there(parts, packed, written):
        status = BUILT
        written.unlink(missing_ok=True)
        manifest = Manifest(
            key=parts.key,
            artifacts=parts.artifacts,
            archive=archive.pack(files, packed),
            sources=parts.sources,
            build_seconds=parts.build_seconds,
            provenance=described({"built": built_now(os.environ), **provenance}),
            kernels=parts.kernels,
            programs=parts.programs,
            tunings=parts.tunings,
        )
        _check_unchanged(manifest, files)
        parse_manifest(manifest.encode(), name)  # what is written must be what a reader takes
        fsops.write_bytes(written, manifest.encode())
    return EntryReport(
        kind=parts.key.kind,
        arch=parts.key.arch,
        modules=parts.key.modules,
        status=status,
        fingerprint=parts.key.fingerprint,
        manifest=str(written),
        archive=str(packed),
        model=parts.key.model,
        variant=parts.key.variant,
    )


def built_now(environ: Mapping[str, str]) -> str:
    """The time that an entry says it was built, UTC; SOURCE_DATE_EPOCH (reproducible-builds.org) where that is set."""
    given = environ.get("SOURCE_DATE_EPOCH", "")
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(given) if given.isdecimal() else None))


def _built(one: Compiled, package: Path) -> BuiltModule:
    library = one.module.library
    sha256, size = digest.of_file(str(library))
    return BuiltModule(
        name=one.module.name,
        size=size,
        sha256=sha256,
        elf=binary_facts(library),
        sources=package_sources(one, package),
        seconds=one.seconds,
    )


def _check_unchanged(manifest: Manifest, files: Mapping[str, Path]) -> None:
    for artifact in manifest.artifacts:
        if digest.of_file(str(files[artifact.path])) != (artifact.sha256, artifact.size):
            raise CollectError(f"{files[artifact.path].name} changed while it was packed", remedy="Run the build again.")


def _is_there(parts: EntryParts, packed: Path, written: Path) -> bool:
    """Whether the output directory holds this entry already, made of the same libraries."""
    try:
        manifest = parse_manifest(written.read_bytes(), written.name)
        found = digest.of_file(str(packed))
    except (OSError, KcacheError):
        return False
    same = (manifest.key.fingerprint, manifest.artifacts) == (parts.key.fingerprint, parts.artifacts)
    return same and found == (manifest.archive.sha256, manifest.archive.size)
