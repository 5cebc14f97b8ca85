"""What `kcache build -o DIR` left: flat pairs `<kind>-<arch>-<16 digits of the fingerprint>.json` and `.tar.zst`, verified."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kcache import archive, digest
from kcache.documents import LIMITS
from kcache.errors import IntegrityError, ManifestError, UsageError
from kcache.key import EntryKey
from kcache.manifest import Manifest, parse_manifest

REMEDY = "Name the directory that `kcache build -o` wrote."


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEntry:
    """An entry in a build output directory, checked to its last byte. `encoded` is its canonical manifest."""

    manifest: Manifest
    encoded: bytes
    archive: Path


def build_name(key: EntryKey) -> str:
    """The name of an entry's two files, without their endings."""
    return f"{key.kind}-{key.arch}-{key.fingerprint.removeprefix('sha256:')[:16]}"


def read_build_output(directory: Path, progress: Callable[[str], None] = lambda line: None) -> list[BuiltEntry]:
    """All entries of a build output directory, by name. Other files there (logs, reports) are not looked at.

    Raises:
        UsageError: there is no such directory, or no entry in it.
        IntegrityError, ManifestError: an entry is damaged.
    """
    try:
        names = {path.name for path in directory.iterdir()}
    except OSError as error:
        raise UsageError(f"cannot read {directory}", why=error.strerror or "", remedy=REMEDY) from error
    entries = []
    for name in sorted(names):
        if name.endswith(".tar.zst"):
            manifest = f"{name.removesuffix('.tar.zst')}.json"
            if manifest not in names:
                raise IntegrityError(f"{directory / name} has no manifest", remedy="Build the entry again, or remove the file.")
            progress(f"checking {name}")
            entries.append(_read(directory / manifest, directory / name))
    if not entries:
        raise UsageError(f"there are no entries in {directory}", remedy=REMEDY)
    return entries


def _read(path: Path, packed: Path) -> BuiltEntry:
    try:
        with path.open("rb") as stream:
            encoded = stream.read(LIMITS.manifest_bytes + 1)
        manifest = parse_manifest(encoded, str(path))
        if manifest.encode() != encoded:
            raise ManifestError(f"{path} is not in canonical form", remedy="Build the entry again.")
        if path.stem != build_name(manifest.key):
            raise ManifestError(f"{path} is the manifest of another entry", why=f"its fingerprint is {manifest.fingerprint}")
        _verify(packed, manifest)
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or path}", why=error.strerror or "") from error
    return BuiltEntry(manifest=manifest, encoded=encoded, archive=packed)


def _verify(packed: Path, manifest: Manifest) -> None:
    try:
        archive.unpack_entry(_chunks(packed), manifest, lambda path, size, chunks: None)
    except IntegrityError as error:
        raise IntegrityError(f"{packed} is damaged", why=str(error), remedy="Build the entry again.") from error


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as stream:
        while chunk := stream.read(digest.CHUNK):
            yield chunk
