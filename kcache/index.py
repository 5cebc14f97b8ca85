"""The layout of a store, and the index that lists what it publishes for one environment.

Layout version 1. Names of immutable objects hold their own digest or fingerprint; only indexes are ever rewritten, and an index
is written last, so whatever it names is whole. An index can be rebuilt from the manifests beside it. No I/O here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kcache import digest
from kcache.documents import LIMITS, Reader, decode
from kcache.errors import ManifestError
from kcache.key import EntryKey, parse_key
from kcache.manifest import Manifest
from kcache.values import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

INDEX_FORMAT = "kcache.index/1"

PARTS_FORMAT = "kcache.index/2"
"""Of an index in parts (`kcache.index_parts`)."""

_SHOWN = 200
"""Characters of a text that is only shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """A pointer to named bytes in a store."""

    path: str
    size: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        return {"path": self.path, "size": self.size, "sha256": self.sha256}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry:
    """One line of an index: enough to decide by key, and to fetch the rest verified.

    built:  when the entry was built, `2026-12-01T09:00:00Z`; empty in lines that an older kcache wrote.
    signer: who signed it, as the index says, which proves nothing; empty where it does not say.
    """

    key: EntryKey
    manifest: Blob
    archive: Blob
    unpacked_size: int
    build_seconds: float
    built: str = ""
    signer: str = ""

    def to_json(self) -> dict[str, Any]:
        """Facts that are not known are left out, so that lines of older manifests stay what they were."""
        return {
            "key": self.key.to_json(),
            "manifest": self.manifest.to_json(),
            "archive": self.archive.to_json(),
            "unpacked_size": self.unpacked_size,
            "build_seconds": self.build_seconds,
        } | {name: text for name, text in (("built", self.built), ("signer", self.signer)) if text}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Several entries in one file (`kcache.store.bundle`), for containers that need them all. `manifests`: their digests."""

    file: Blob
    manifests: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file.to_json(), "manifests": sorted(self.manifests)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Everything that a store publishes for one environment (see `index_path`), sorted by fingerprint. Bundles hold what its
    lines name, and nothing else; a kcache that does not know them reads the lines.

    Of an index in parts (`kcache.index_parts`) `models` are those that it names, where not all of its lines were read, and
    `parts` the paths of its parts, where they were. Neither is written here.
    """

    entries: tuple[IndexEntry, ...]
    bundles: tuple[Bundle, ...] = ()
    models: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def encode(self) -> bytes:
        ordered = sorted(self.entries, key=lambda entry: entry.key.fingerprint)
        document: dict[str, Any] = {"format": INDEX_FORMAT, "entries": [entry.to_json() for entry in ordered]}
        if self.bundles:
            document["bundles"] = [bundle.to_json() for bundle in sorted(self.bundles, key=lambda bundle: bundle.file.path)]
        return digest.canonical_json(document)


def archive_path(sha256: str) -> str:
    """Where an archive lies in a store. `sha256` is a digest."""
    hexdigest = sha256.removeprefix("sha256:")
    return f"v1/archives/{hexdigest[:2]}/{hexdigest}.tar.zst"


def manifest_path(key: EntryKey) -> str:
    """Where an entry's manifest lies in a store, below `index_directory` so that an index can be rebuilt by listing."""
    hexdigest = key.fingerprint.removeprefix("sha256:")
    return f"{index_directory(key.ingredients)}/entries/{hexdigest[:2]}/{hexdigest}.json"


def index_directory(ingredients: Mapping[str, str]) -> str:
    """The directory of one environment: FlashInfer version, machine and CUDA major. One index each keeps look-ups flat."""
    major = ingredients["cuda.release"].partition(".")[0]
    version = re.sub(r"[^A-Za-z0-9.+-]", "_", ingredients["flashinfer.version"])
    return f"v1/env/flashinfer-{version}/{ingredients['platform.machine']}-cuda{major}"


def index_path(ingredients: Mapping[str, str]) -> str:
    """The index of one environment, from the ingredients `flashinfer.version`, `platform.machine`, `cuda.release`."""
    return f"{index_directory(ingredients)}/index.json"


def _parse_blob(value: Any, path: str, limit: int, reader: Reader) -> Blob:
    document = reader.object(value, path)
    return Blob(
        path=reader.path(document.get("path"), f"{path}.path"),
        size=reader.size(document.get("size"), f"{path}.size", limit),
        sha256=reader.sha256(document.get("sha256"), f"{path}.sha256"),
    )


def bundle_path(directory: str, sha256: str) -> str:
    """Where a bundle lies in a store: below the environment's `index_directory`. What is in it stands beside it, in `.json`."""
    return f"{directory}/bundles/{sha256.removeprefix('sha256:')}.tar"


def parse_bundle(data: bytes, what: str) -> Bundle:
    """A bundle's description from bytes.

    Raises:
        IntegrityError, ManifestError: with every problem found.
    """
    reader = Reader()
    bundle = _read_bundle(decode(data, what, LIMITS.index_bytes), "bundle", reader)
    reader.finish(what)
    return bundle


def _read_bundle(value: Any, path: str, reader: Reader) -> Bundle:
    document = reader.object(value, path)
    file = _parse_blob(document.get("file"), f"{path}.file", LIMITS.archive_bytes, reader)
    named = document.get("manifests")
    if not isinstance(named, list):
        reader.problems.append(f"{path}.manifests: not a list")
        named = []
    manifests = [reader.sha256(one, f"{path}.manifests[{number}]") for number, one in enumerate(named)]
    return Bundle(file=file, manifests=tuple(sorted(manifests)))


def parse_index(data: bytes, what: str = "index") -> Index:
    """An index from bytes. Raises as `decode_index` and `index_of`."""
    return index_of(decode_index(data, what), what)


def decode_index(data: bytes, what: str) -> dict[str, Any]:
    """The document of an index, in one piece or the root of one in parts, from bytes.

    Raises:
        IntegrityError, ManifestError: it is none, or of a format that is not known.
    """
    reader = Reader()
    document = reader.object(decode(data, what, LIMITS.index_bytes), "index")
    if (found := document.get("format")) not in (INDEX_FORMAT, PARTS_FORMAT):
        raise ManifestError(
            f"{what} has format {found!r}",
            why=f"this kcache reads {INDEX_FORMAT} and {PARTS_FORMAT}",
            remedy="Use the kcache version that wrote it, or a newer one.",
        )
    reader.finish(what)
    return document


def index_of(document: Mapping[str, Any], what: str) -> Index:
    """An index in one piece, from its document.

    Raises:
        ManifestError: with every problem found.
    """
    reader = Reader()
    if document.get("format") != INDEX_FORMAT:
        raise ManifestError(f"{what} is in parts, where an index in one piece belongs")
    items = document.get("entries")
    if not isinstance(items, list):
        reader.problems.append("entries: not a list")
        items = []
    entries = []
    for number, item in enumerate(items):
        path = f"entries[{number}]"
        line = reader.object(item, path)
        key = parse_key(line.get("key"), f"{path}.key", reader.problems)
        parsed = (
            _parse_blob(line.get("manifest"), f"{path}.manifest", LIMITS.manifest_bytes, reader),
            _parse_blob(line.get("archive"), f"{path}.archive", LIMITS.archive_bytes, reader),
            reader.size(line.get("unpacked_size"), f"{path}.unpacked_size", LIMITS.unpacked_bytes),
            reader.seconds(line.get("build_seconds"), f"{path}.build_seconds"),
        )
        if key is not None:
            entries.append(
                IndexEntry(
                    key=key,
                    manifest=parsed[0],
                    archive=parsed[1],
                    unpacked_size=parsed[2],
                    build_seconds=parsed[3],
                    built=_shown(line.get("built")),
                    signer=_shown(line.get("signer")),
                )
            )
    bundles = document.get("bundles", [])
    if not isinstance(bundles, list):
        reader.problems.append("bundles: not a list")
        bundles = []
    read = [_read_bundle(item, f"bundles[{number}]", reader) for number, item in enumerate(bundles)]
    reader.finish(what)
    return Index(entries=tuple(entries), bundles=tuple(read))


def _shown(value: Any) -> str:
    """A text that is only shown to people: what is none, or could be an attack on a terminal, is dropped and harms nothing."""
    return value if isinstance(value, str) and len(value) <= _SHOWN and value.isprintable() else ""


def index_entry(manifest: Manifest, encoded: bytes) -> IndexEntry:
    """The index line of a manifest whose canonical bytes are `encoded`."""
    return IndexEntry(
        key=manifest.key,
        manifest=Blob(path=manifest_path(manifest.key), size=len(encoded), sha256=digest.of_bytes(encoded)),
        archive=Blob(path=archive_path(manifest.archive.sha256), size=manifest.archive.size, sha256=manifest.archive.sha256),
        unpacked_size=manifest.archive.unpacked_size,
        build_seconds=sum(manifest.build_seconds.values()),
        built=_shown(manifest.provenance.get("built")),
    )
