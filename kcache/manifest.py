"""The manifest of an entry: what its archive holds, for whom, and how it was made.

Format: kcache/docs/design.md. Manifests are canonical JSON, named in an index by size and digest, and only parsed after both
were verified. Parsing returns frozen values or raises one error with every problem. No I/O here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kcache import digest
from kcache.documents import LIMITS, Reader, decode
from kcache.errors import ManifestError
from kcache.kernel_facts import KernelFacts, kernels_digest, parse_kernel_facts, wheels_digest
from kcache.key import AUTOTUNE, B12X, CUTE_DSL, NVCC, EntryKey, parse_key
from kcache.values import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from kcache.program_facts import ProgramFacts  # imported where there are programs: most starts have none
    from kcache.tuning_facts import TuningFacts  # likewise

ENTRY_FORMAT = "kcache.entry/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ElfFacts:
    """What the loader will ask of a host: read from the binary when the entry was built.

    machine:   ELF machine, such as `x86_64`.
    needed:    DT_NEEDED sonames.
    versions:  highest symbol version asked for, by prefix: {"GLIBC": "2.34", "GLIBCXX": "3.4.29", "CXXABI": "1.3.13"}.
    gpu_archs: architectures of the embedded GPU code, such as `sm_90a`.
    """

    machine: str
    needed: tuple[str, ...]
    versions: Mapping[str, str]
    gpu_archs: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "needed": list(self.needed),
            "versions": dict(sorted(self.versions.items())),
            "gpu_archs": list(self.gpu_archs),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One file of an entry. `path` is relative, with `/`, below the entry's directory; `size` in bytes."""

    path: str
    size: int
    sha256: str
    elf: ElfFacts | None = None

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"path": self.path, "size": self.size, "sha256": self.sha256}
        if self.elf is not None:
            document["elf"] = self.elf.to_json()
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchiveFacts:
    """The entry's archive: a deterministic tar in one zstd frame. Sizes in bytes."""

    sha256: str
    size: int
    unpacked_size: int

    def to_json(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "size": self.size, "unpacked_size": self.unpacked_size}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One entry.

    sources:       path inside the flashinfer package -> digest, for every FlashInfer file that the compiler read, or that
                   FlashInfer keys its kernels by.
    build_seconds: wall seconds of the build of each module, by module; what a hit saves.
    provenance:    how it was built: recorded, never matched.
    kernels:       of an entry of CuTe-DSL kernels: what they depend on and what asks for them; None for the other layouts.
    programs:      likewise, of an entry of programs of the package b12x.
    tunings:       likewise, of an entry of the tuner's results.
    """

    key: EntryKey
    artifacts: tuple[Artifact, ...]
    archive: ArchiveFacts
    sources: Mapping[str, str]
    build_seconds: Mapping[str, float]
    provenance: Mapping[str, Any]
    kernels: KernelFacts | None = None
    programs: ProgramFacts | None = None
    tunings: TuningFacts | None = None

    @property
    def compiles(self) -> int:
        """How many compilations the entry spares a host; tuning results spare none."""
        if self.tunings is not None:
            return 0
        return len(self.artifacts) if self.programs is None else len(self.programs.kernels) + len(self.programs.groups)

    @property
    def fingerprint(self) -> str:
        return self.key.fingerprint

    def to_json(self) -> dict[str, Any]:
        document = {
            "format": ENTRY_FORMAT,
            "key": self.key.to_json(),
            "fingerprint": self.fingerprint,
            "artifacts": [artifact.to_json() for artifact in self.artifacts],
            "archive": self.archive.to_json(),
            "sources": dict(sorted(self.sources.items())),
            "build_seconds": dict(sorted(self.build_seconds.items())),
            "provenance": dict(self.provenance),
        }
        if self.programs is not None:
            document["programs"] = self.programs.to_json()
        if self.tunings is not None:
            document["tunings"] = self.tunings.to_json()
        return document if self.kernels is None else document | {"kernels": self.kernels.to_json()}

    def encode(self) -> bytes:
        return digest.canonical_json(self.to_json())


def module_artifact_path(module: str) -> str:
    """Where a module's library lies below its entry: FlashInfer's own layout (`jit/env.py`, get_aot_artifacts, 0.7.4)."""
    return f"{module}/{module}.so"


def parse_manifest(data: bytes, what: str = "manifest") -> Manifest:
    """A manifest from verified bytes.

    Raises:
        IntegrityError, ManifestError: with every problem found.
    """
    reader = Reader()
    document = reader.object(decode(data, what, LIMITS.manifest_bytes), "manifest")
    if (found := document.get("format")) != ENTRY_FORMAT:
        raise ManifestError(
            f"{what} has format {found!r}",
            why=f"this kcache reads {ENTRY_FORMAT}",
            remedy="Use the kcache version that wrote it, or a newer one.",
        )
    key = parse_key(document.get("key"), "key", reader.problems)
    artifacts = _parse_artifacts(document.get("artifacts"), reader)
    archive = reader.object(document.get("archive"), "archive")
    parsed = ArchiveFacts(
        sha256=reader.sha256(archive.get("sha256"), "archive.sha256"),
        size=reader.size(archive.get("size"), "archive.size", LIMITS.archive_bytes),
        unpacked_size=reader.size(archive.get("unpacked_size"), "archive.unpacked_size", LIMITS.unpacked_bytes),
    )
    sources = {
        reader.text(path, "sources"): reader.sha256(value, f"sources.{path}")
        for path, value in reader.object(document.get("sources"), "sources").items()
    }
    seconds = {
        name: reader.seconds(value, f"build_seconds.{name}")
        for name, value in reader.object(document.get("build_seconds"), "build_seconds").items()
    }
    provenance = reader.object(document.get("provenance"), "provenance")
    kernels = parse_kernel_facts(document["kernels"], "kernels", reader) if "kernels" in document else None
    programs = _parse_programs(document["programs"], reader) if "programs" in document else None
    tunings = _parse_tunings(document["tunings"], reader) if "tunings" in document else None
    if key is not None:
        _check_consistency(key, artifacts, sources, kernels, document, reader)
        _check_programs(key, programs, artifacts, reader)
        _check_tunings(key, tunings, artifacts, reader)
    reader.finish(what)
    assert key is not None
    return Manifest(
        key=key,
        artifacts=artifacts,
        archive=parsed,
        sources=sources,
        build_seconds=seconds,
        provenance=provenance,
        kernels=kernels,
        programs=programs,
        tunings=tunings,
    )


def _parse_programs(value: Any, reader: Reader) -> ProgramFacts:
    from kcache.program_facts import parse_program_facts

    return parse_program_facts(value, "programs", reader)


def _parse_tunings(value: Any, reader: Reader) -> TuningFacts:
    from kcache.tuning_facts import parse_tuning_facts

    return parse_tuning_facts(value, "tunings", reader)


def _parse_artifacts(value: Any, reader: Reader) -> tuple[Artifact, ...]:
    if not isinstance(value, list) or not value or len(value) > LIMITS.members:
        reader.problems.append("artifacts: not a list, empty or too long")
        return ()
    artifacts = []
    for number, item in enumerate(value):
        path = f"artifacts[{number}]"
        document = reader.object(item, path)
        elf = document.get("elf")
        artifacts.append(
            Artifact(
                path=reader.path(document.get("path"), f"{path}.path"),
                size=reader.size(document.get("size"), f"{path}.size", LIMITS.unpacked_bytes),
                sha256=reader.sha256(document.get("sha256"), f"{path}.sha256"),
                elf=None if elf is None else _parse_elf(reader.object(elf, f"{path}.elf"), f"{path}.elf", reader),
            )
        )
    return tuple(artifacts)


def _parse_elf(document: dict[str, Any], path: str, reader: Reader) -> ElfFacts:
    versions = reader.object(document.get("versions"), f"{path}.versions")
    for prefix, version in versions.items():
        if not isinstance(version, str) or not re.fullmatch(r"[0-9]+(\.[0-9]+)*", version):
            reader.problems.append(f"{path}.versions.{prefix}: not a version")
    return ElfFacts(
        machine=reader.text(document.get("machine"), f"{path}.machine"),
        needed=reader.texts(document.get("needed"), f"{path}.needed"),
        versions=versions,
        gpu_archs=reader.texts(document.get("gpu_archs"), f"{path}.gpu_archs"),
    )


def sources_digest(sources: Mapping[str, str]) -> str:
    """The key ingredient `flashinfer.sources`."""
    return digest.of_document(dict(sources))


def _check_consistency(  # noqa: PLR0917 -- every part of a manifest
    key: EntryKey,
    artifacts: tuple[Artifact, ...],
    sources: Mapping[str, str],
    kernels: KernelFacts | None,
    document: dict[str, Any],
    reader: Reader,
) -> None:
    """A manifest must agree with itself: what it says of its key is what its parts add up to."""
    if document.get("fingerprint") != key.fingerprint:
        reader.problems.append(f"fingerprint: the key's is {key.fingerprint}")
    if (of_key := key.ingredients.get("flashinfer.sources")) is not None and of_key != sources_digest(sources):
        reader.problems.append("sources: their digest is not the one in the key")
    paths = [artifact.path for artifact in artifacts]
    if len({path.lower() for path in paths}) != len(paths):
        reader.problems.append("artifacts: a path twice (letter case aside)")
    if (key.layout == CUTE_DSL) != (kernels is not None):
        reader.problems.append(f"kernels: there if the layout is {CUTE_DSL}, and only then")
    elif key.layout == NVCC:
        _check_modules(key, artifacts, paths, reader)
    elif kernels is not None:
        _check_kernels(key, kernels, paths, sources, reader)


def _check_modules(key: EntryKey, artifacts: tuple[Artifact, ...], paths: list[str], reader: Reader) -> None:
    for module in key.modules:
        if module_artifact_path(module) not in paths:
            reader.problems.append(f"artifacts: no library for module {module}")
    for number, artifact in enumerate(artifacts):
        if artifact.elf is None:
            reader.problems.append(f"artifacts[{number}].elf: missing")


def _check_kernels(key: EntryKey, kernels: KernelFacts, paths: list[str], sources: Mapping[str, str], reader: Reader) -> None:
    if key.modules != (kernels.module,):
        reader.problems.append("kernels.module: not the module of the key")
    if key.ingredients["kernels"] != kernels_digest(tuple(paths)):
        reader.problems.append("artifacts: their names are not those in the key")
    if key.ingredients["cutlass_dsl.wheels"] != wheels_digest(kernels.wheels):
        reader.problems.append("kernels.wheels: their digest is not the one in the key")
    if set(kernels.key_files) != set(sources):
        reader.problems.append("kernels.key_files: not the files of `sources`")
    for number, path in enumerate(paths):
        directory, _, name = path.partition("/")
        if directory != kernels.module or "/" in name or not name.endswith(".o"):
            reader.problems.append(f"artifacts[{number}].path: not an object of module {kernels.module}")


def _check_programs(key: EntryKey, programs: ProgramFacts | None, artifacts: tuple[Artifact, ...], reader: Reader) -> None:
    if (key.layout == B12X) != (programs is not None):
        reader.problems.append(f"programs: there if the layout is {B12X}, and only then")
    elif programs is not None:
        from kcache.program_facts import check_program_facts

        check_program_facts(programs, key, tuple(artifact.path for artifact in artifacts), reader)


def _check_tunings(key: EntryKey, tunings: TuningFacts | None, artifacts: tuple[Artifact, ...], reader: Reader) -> None:
    if (key.layout == AUTOTUNE) != (tunings is not None):
        reader.problems.append(f"tunings: there if the layout is {AUTOTUNE}, and only then")
    elif tunings is not None:
        from kcache.tuning_facts import check_tuning_facts

        check_tuning_facts(tunings, key, {artifact.path: artifact.sha256 for artifact in artifacts}, reader)
