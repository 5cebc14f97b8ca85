"""The index of an environment with very many entries: a root that names parts, so that a container reads only its own.

Format `kcache.index/2`. An index of up to `PLAIN_LINES` lines stays one document (`kcache.index`). Beyond, each line goes to the
part that its label hashes to: the architecture that it was built for, and its model. What belongs to no model has the label of
its architecture alone, as a container wants all of it; where that alone is very much (`SPREAD_LINES`), kind or module as well.
The root names every part by digest and size, so whoever trusts the root trusts its parts, and a part is written once: its name
is its digest. Only the root is ever rewritten. No I/O here.

    {"format": "kcache.index/2", "lines": 100000, "buckets": 2048, "archs": ["90a", "sm_120a"], "spread": [],
     "models": ["Qwen/Qwen3-30B-A3B"], "models_in_all": 1, "parts": {"7f": ["<64 hex digits>", 81234]}}

A part is an index of its own, `kcache.index/1`, with the bundles that hold any of its lines.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kcache import digest
from kcache.documents import LIMITS, Reader
from kcache.errors import IntegrityError
from kcache.index import PARTS_FORMAT, Blob, Index, IndexEntry
from kcache.key import KIND_MODULES, NVCC, EntryKey
from kcache.values import dataclass

PLAIN_LINES = 256
"""Lines up to which an index is one document: reading these costs less than another request."""

PART_LINES = 64
"""Lines aimed at in a part."""

MAX_BUCKETS = 4096
SPREAD_LINES = 2048
"""Lines of one architecture that belong to no model, beyond which they are spread by kind and module."""

NAMED_MODELS = 2000
"""Models that the root names."""

WORKS_FOR_ANY = ""

Label = tuple[str, str]
"""The architecture that a line was built for, as its key spells it, and whom it is for (see `for_model`, `for_kind`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """What a root says.

    lines:   of all parts.
    buckets: what labels are hashed into.
    archs:   every architecture that something was built for.
    spread:  those of which what belongs to no model is spread by kind and module.
    models:  names of models, sorted, the first `NAMED_MODELS` of `models_in_all`.
    parts:   bucket -> digest without prefix, and size in bytes; checked when one is asked for.
    """

    lines: int
    buckets: int
    archs: tuple[str, ...]
    spread: tuple[str, ...]
    models: tuple[str, ...]
    models_in_all: int
    parts: Mapping[str, Any]

    def blob(self, directory: str, bucket: str) -> Blob:
        """The part of a bucket that is there.

        Raises:
            ManifestError: the root does not say what and where.
        """
        reader = Reader()
        named = self.parts[bucket]
        hexdigest, size = named if isinstance(named, list) and len(named) == 2 else ("", 0)
        sha256 = reader.sha256(f"sha256:{hexdigest}", f"parts.{bucket}")
        size = reader.size(size, f"parts.{bucket}", LIMITS.index_bytes)
        reader.finish(f"{directory}/index.json")
        return Blob(path=part_path(directory, sha256), size=size, sha256=sha256)

    def buckets_of(self, labels: Iterable[Label]) -> list[str]:
        """The buckets that lines with these labels are in, of those that are there."""
        return sorted({bucket for label in labels if (bucket := _bucket(label, self.buckets)) in self.parts})


def part_path(directory: str, sha256: str) -> str:
    """Where a part lies in a store, below the environment's `index_directory`. `sha256` is a digest."""
    hexdigest = sha256.removeprefix("sha256:")
    return f"{directory}/parts/{hexdigest[:2]}/{hexdigest}.json"


def for_model(name: str) -> str:
    """Whom the entries of a model are for: people name it with or without who owns it, and in any case."""
    return f"model {name.rpartition('/')[2].lower()}"


def for_kind(kind: str, modules: Sequence[str]) -> str:
    """Whom spread entries are for that belong to no model: a module that is asked for by name, else a kind."""
    return f"module {modules[0]}" if kind == KIND_MODULES else f"kind {kind}"


def built_for(key: EntryKey) -> str:
    """The architecture as a key spells it."""
    return key.ingredients["gpu.arch" if key.layout == NVCC else "gpu.cute_arch"]


def _bucket(label: Label, buckets: int) -> str:
    return f"{int(hashlib.sha256(' '.join(label).encode()).hexdigest()[:8], 16) % buckets:x}"


def encode(index: Index, directory: str) -> tuple[bytes, dict[str, bytes]]:
    """An index as it is written: the document at its path, and its parts by theirs; none where one document will do.

    Raises:
        IntegrityError: a part would be larger than readers accept.
    """
    if len(index.entries) <= PLAIN_LINES:
        return index.encode(), {}
    buckets = 1
    while buckets < MAX_BUCKETS and buckets * PART_LINES < len(index.entries):
        buckets *= 2
    alone: dict[str, int] = {}
    for entry in index.entries:
        if not entry.key.model:
            alone[built_for(entry.key)] = alone.get(built_for(entry.key), 0) + 1
    spread = sorted(arch for arch, lines in alone.items() if lines > SPREAD_LINES)
    lines: dict[str, list[IndexEntry]] = {}
    for entry in index.entries:
        lines.setdefault(_bucket(_label(entry.key, spread), buckets), []).append(entry)
    parts, named = {}, {}
    for bucket, entries in lines.items():
        data = _part(entries, index).encode()
        if len(data) > LIMITS.index_bytes:
            raise IntegrityError(
                f"{entries[0].key.title} has {len(entries)} entries in {directory}",
                why=f"an index may have {LIMITS.index_bytes} bytes",
                remedy="Prune the store.",
            )
        sha256 = digest.of_bytes(data)
        parts[part_path(directory, sha256)] = data
        named[bucket] = [sha256.removeprefix("sha256:"), len(data)]
    models = sorted({entry.key.model for entry in index.entries if entry.key.model})
    root = {
        "format": PARTS_FORMAT,
        "lines": len(index.entries),
        "buckets": buckets,
        "archs": sorted({built_for(entry.key) for entry in index.entries}),
        "spread": spread,
        "models": models[:NAMED_MODELS],
        "models_in_all": len(models),
        "parts": named,
    }
    return digest.canonical_json(root), parts


def _label(key: EntryKey, spread: Sequence[str]) -> Label:
    arch = built_for(key)
    if key.model:
        return arch, for_model(key.model)
    return arch, for_kind(key.kind, key.modules) if arch in spread else WORKS_FOR_ANY


def _part(entries: Sequence[IndexEntry], index: Index) -> Index:
    held = {entry.manifest.sha256 for entry in entries}
    return Index(entries=tuple(entries), bundles=tuple(b for b in index.bundles if not held.isdisjoint(b.manifests)))


def parse_root(document: Mapping[str, Any], what: str) -> Root:
    """A root from its decoded document, whose format was looked at.

    Raises:
        ManifestError: with every problem found.
    """
    reader = Reader()
    parts = reader.object(document.get("parts"), "parts")
    root = Root(
        lines=reader.size(document.get("lines"), "lines", 1 << 40),
        buckets=reader.size(document.get("buckets"), "buckets", MAX_BUCKETS),
        archs=reader.texts(document.get("archs"), "archs"),
        spread=reader.texts(document.get("spread"), "spread"),
        models=reader.texts(document.get("models"), "models"),
        models_in_all=reader.size(document.get("models_in_all"), "models_in_all", 1 << 40),
        parts=parts,
    )
    if not root.buckets or not parts:
        reader.problems.append("parts: there are none")
    reader.finish(what)
    return root
