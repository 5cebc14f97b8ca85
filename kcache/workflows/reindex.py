"""The index of an environment, rebuilt from the manifests beside it.

Invariants:
- Of several manifests of one entry the one of the highest generation counts (`<fingerprint>.json` is generation 0,
  `<fingerprint>.r1.json` generation 1). Where a marker of its generation lies beside it (`<fingerprint>.r1.gone.json`) it was
  pruned, and the entry is not published until a later generation is. So an index is a function of the names in the store, and
  anyone can rebuild it.
- The index is read before the names are listed. Whatever it names then was written earlier, so the list has it too, and a swap
  that succeeds has lost nothing.
- A line is only added when its archive is there with the right size.
- A signed index is never replaced by one that is not, unless that is asked for: readers that ask for signatures would refuse it.
- The parts of an index of very many lines (`kcache.index_parts`) are written before it, and never rewritten.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kcache import digest
from kcache.documents import LIMITS, decode
from kcache.errors import ConflictError, IntegrityError, ManifestError, NotFoundError, TrustError
from kcache.index import (
    INDEX_FORMAT,
    PARTS_FORMAT,
    Bundle,
    Index,
    IndexEntry,
    archive_path,
    decode_index,
    index_entry,
    index_of,
    manifest_path,
    parse_bundle,
)
from kcache.index_parts import encode, parse_root
from kcache.key import EntryKey
from kcache.manifest import Manifest, parse_manifest
from kcache.store.base import Store
from kcache.workflows.catalog import signatures_of
from kcache.workflows.parts import read_part

ATTEMPTS = 100
"""Swaps of one index before giving up."""

_MANIFEST = re.compile(r"([0-9a-f]{64})(?:\.r([1-9][0-9]{0,5}))?(\.gone)?\.json")


SignIndex = Callable[[Store, str, bytes, bytes | None], None]
"""Given the store, the path, the index that is about to be written, and the one that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Newest:
    """The manifest of an entry that counts: its generation, its name in the store, and whether it was pruned since (then `path`
    is the marker that says so)."""

    generation: int
    path: str
    gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """`size` is the number of bytes written, 0 when the index was right already; `warnings` name what was left out."""

    size: int
    warnings: tuple[str, ...]


def generation_path(key: EntryKey, generation: int) -> str:
    """Where the manifest of this generation lies."""
    path = manifest_path(key)
    return path if generation == 0 else f"{path.removesuffix('.json')}.r{generation}.json"


def gone_path(path: str) -> str:
    """Where the marker lies that takes a manifest out of every index."""
    return f"{path.removesuffix('.json')}.gone.json"


def newest_manifests(store: Store, directory: str) -> dict[str, Newest]:
    """Fingerprint -> the manifest that counts, for every entry of an environment (see `kcache.index.index_directory`)."""
    found: dict[str, Newest] = {}
    for path in store.list(f"{directory}/entries"):
        if match := _MANIFEST.fullmatch(path.rsplit("/", 1)[-1]):
            fingerprint, rank = f"sha256:{match[1]}", (int(match[2] or 0), bool(match[3]))
            if fingerprint not in found or (found[fingerprint].generation, found[fingerprint].gone) < rank:
                found[fingerprint] = Newest(generation=rank[0], path=path, gone=rank[1])
    return found


def read_published(store: Store, path: str, fingerprint: str) -> tuple[Manifest, bytes]:
    """A manifest as it lies in a store, without an index that vouches for it.

    Raises:
        StoreError
        IntegrityError, ManifestError: it cannot be used, or is not this entry's.
    """
    data = store.read_bytes(path, LIMITS.manifest_bytes)
    manifest = parse_manifest(data, f"{path} of {store.describe()}")
    if manifest.fingerprint != fingerprint or manifest.encode() != data:
        raise IntegrityError(f"{path} of {store.describe()} is not the manifest that its name says")
    return manifest, data


def archive_in_place(store: Store, manifest: Manifest) -> bool:
    """Whether the store has an archive of this digest and size."""
    found = store.stat(archive_path(manifest.archive.sha256))
    return found is not None and found.size == manifest.archive.size


def leave_unsigned(store: Store, path: str, data: bytes, before: bytes | None) -> None:
    """A `SignIndex` by which an index loses the signatures that it had."""


def require_signer(store: Store, directories: Iterable[str], sign: SignIndex | None) -> None:
    """Refuses to begin what would leave a signed index without a signature. Where `sign` is given nothing is asked.

    Args:
        directories: the environments whose indexes will be written again.

    Raises:
        TrustError, StoreError
    """
    for directory in directories if sign is None else ():
        path = f"{directory}/index.json"
        try:
            _refuse_signed(store, path, store.read_bytes(path, LIMITS.index_bytes))
        except NotFoundError:
            continue


def _refuse_signed(store: Store, path: str, data: bytes) -> None:
    if signatures_of(store, digest.of_bytes(data)):
        raise TrustError(
            f"{path} of {store.describe()} is signed, and would be written again without a signature",
            why="hosts whose policy asks for signed indexes would refuse it",
            remedy="Give the key: --sign-index FILE. If no host asks for signed indexes any more: --unsigned.",
        )


def rebuild_index(store: Store, directory: str, *, sign: SignIndex | None = None) -> Rebuilt:
    """Makes the index of an environment agree with its manifests, against any number of other publishers.

    Args:
        sign: signs an index before it is written.

    Raises:
        TrustError: the index that is there is signed, and `sign` was not given.
        ConflictError: others were first every time.
        ManifestError: the index is of a format that a newer kcache wrote.
        StoreError
    """
    path = f"{directory}/index.json"
    fresh: dict[str, IndexEntry] = {}
    read: dict[str, Bundle] = {}
    parts: dict[str, Index | None] = {}
    size = 0
    for attempt in range(ATTEMPTS):
        try:
            current = store.read_bytes(path, LIMITS.index_bytes)
        except NotFoundError:
            current = None
        warnings: list[str] = []
        known = {} if current is None else _lines(store, current, path, parts, warnings)
        entries = []
        for fingerprint, newest in newest_manifests(store, directory).items():
            if newest.gone:
                continue
            line = known.get(fingerprint)
            if line is None or line.manifest.path != newest.path:
                line = _adopt(store, fingerprint, newest, fresh, warnings) or line
            if line is not None:
                entries.append(line)
        bundles = tuple(_bundles(store, directory, entries, read, warnings))
        encoded, made = encode(Index(entries=tuple(entries), bundles=bundles), directory)
        new = {name: data for name, data in made.items() if parts.get(name) is None}
        if (encoded == current and not new) or (current is None and not entries):
            return Rebuilt(size=size, warnings=tuple(warnings))
        size += _write_parts(store, new, parts)
        if encoded == current:
            return Rebuilt(size=size, warnings=tuple(warnings))
        try:
            if sign is not None:
                sign(store, path, encoded, current)
            elif current is not None:
                _refuse_signed(store, path, current)
            store.replace(path, encoded, current)
        except ConflictError:
            time.sleep(min(0.01 * 2**attempt, 0.5) * (0.5 + os.urandom(1)[0] / 510))
            continue
        return Rebuilt(size=size + len(encoded), warnings=tuple(warnings))
    raise ConflictError(
        f"{path} of {store.describe()} was rewritten by others {ATTEMPTS} times",
        remedy="Publish again when fewer publishers are at work; nothing that was uploaded is lost.",
    )


def _bundles(
    store: Store, directory: str, entries: Sequence[IndexEntry], read: dict[str, Bundle], warnings: list[str]
) -> list[Bundle]:
    """The bundles beside an index of which several entries still count. `read`: those that are known already."""
    current = {entry.manifest.sha256 for entry in entries}
    found = []
    for path in store.list(f"{directory}/bundles", depth=1):
        if not path.endswith(".json"):
            continue
        try:
            if path not in read:
                read[path] = parse_bundle(store.read_bytes(path, LIMITS.index_bytes), f"{path} of {store.describe()}")
        except (IntegrityError, ManifestError, NotFoundError) as error:
            warnings.append(f"left out of the index: {error}")
            continue
        if len(current.intersection(read[path].manifests)) > 1:
            found.append(read[path])
    return found


def _write_parts(store: Store, new: Mapping[str, bytes], parts: dict[str, Index | None]) -> int:
    """Writes parts that are not there yet, or are damaged (None in `parts`); how many bytes that were."""
    damaged = {name for name in new if name in parts}
    for names in (damaged, new.keys() - damaged):
        if names:
            store.write_many([(name, new[name]) for name in sorted(names)], if_absent=names is not damaged)
    for name, data in new.items():
        parts[name] = index_of(decode_index(data, name), name)
    return sum(map(len, new.values()))


def _lines(store: Store, data: bytes, path: str, parts: dict[str, Index | None], warnings: list[str]) -> dict[str, IndexEntry]:
    """The lines of an index. One that is damaged has none: it is made again. One that is newer than this kcache is left alone.

    Args:
        parts: takes in every part that was read, by its path; None for one that cannot be used, whose lines are made again.
    """
    try:
        document = decode_index(data, path)
        if document["format"] != PARTS_FORMAT:
            return {entry.key.fingerprint: entry for entry in index_of(document, path).entries}
        root = parse_root(document, path)
        blobs = [root.blob(path.removesuffix("/index.json"), bucket) for bucket in root.parts]
    except ManifestError as error:
        if _is_of_another_format(data, path):
            raise
        warnings.append(f"{path} was damaged and is made again: {error}")
        return {}
    for blob in blobs:
        if parts.get(blob.path) is None:
            try:
                parts[blob.path] = read_part(store, blob)
            except (IntegrityError, ManifestError) as error:
                warnings.append(f"made again: {error}")
                parts[blob.path] = None
    read = [part for blob in blobs if (part := parts[blob.path]) is not None]
    return {entry.key.fingerprint: entry for part in read for entry in part.entries}


def _is_of_another_format(data: bytes, path: str) -> bool:
    try:
        document = decode(data, path, LIMITS.index_bytes)
    except ManifestError:
        return False
    found = document.get("format") if isinstance(document, dict) else None
    return isinstance(found, str) and found.startswith("kcache.index/") and found not in (INDEX_FORMAT, PARTS_FORMAT)


def _adopt(
    store: Store, fingerprint: str, newest: Newest, fresh: dict[str, IndexEntry], warnings: list[str]
) -> IndexEntry | None:
    """The line of a manifest that the index does not have yet, or None if it cannot be used."""
    if newest.path in fresh:
        return fresh[newest.path]
    try:
        manifest, data = read_published(store, newest.path, fingerprint)
    except (IntegrityError, ManifestError, NotFoundError) as error:
        warnings.append(f"left out of the index: {error}")
        return None
    if not archive_in_place(store, manifest):
        warnings.append(f"left out of the index: {newest.path} names an archive that is not there")
        return None
    line = index_entry(manifest, data)
    fresh[newest.path] = line = replace(line, manifest=replace(line.manifest, path=newest.path))
    return line
