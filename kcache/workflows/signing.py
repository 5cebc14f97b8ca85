"""Signing what a store publishes: entries, and the indexes that list them. Nothing else is uploaded again.

A signature is written before the index names what it is about, so readers with a policy never see an entry whose signature is
still to come.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from kcache import digest
from kcache.documents import LIMITS
from kcache.errors import IntegrityError, ManifestError, NotFoundError, RefusedError, TrustError
from kcache.index import IndexEntry, decode_index, index_entry
from kcache.manifest import Manifest
from kcache.store.base import Store
from kcache.trust.envelope import ENVELOPE_BYTES, seal, unseal
from kcache.trust.keys import PrivateKey, PublicKey
from kcache.trust.policy import Policy
from kcache.trust.statement import IndexClaim, about_entry, about_index, check_index, signature_path
from kcache.values import dataclass
from kcache.values import replace as changed
from kcache.workflows.catalog import list_environments, read_index_at, read_manifest
from kcache.workflows.reindex import newest_manifests, read_published
from kcache.workflows.resolve import Wanted
from kcache.workflows.trusted import Guard


@dataclass(frozen=True, slots=True, kw_only=True)
class SignReport:
    """What was signed: entries and indexes newly, entries that were already, and why others were not."""

    key: str
    entries: int
    present: int
    indexes: tuple[str, ...]
    left_out: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "entries": self.entries,
            "present": self.present,
            "indexes": list(self.indexes),
            "left_out": list(self.left_out),
        }


def _signed(entry: IndexEntry, manifest: Manifest, key: PrivateKey) -> tuple[str, bytes]:
    """The name and the bytes of an entry's signature."""
    return signature_path(entry.manifest.sha256, key.public.id), seal(about_entry(manifest, entry), key)


def _put(store: Store, items: Sequence[tuple[str, bytes]]) -> int:
    """Writes signatures, at once where a store can, and returns how many were not there. Something else under a name is
    replaced."""
    if not items:
        return 0
    written = store.write_many(items, if_absent=True)
    for (path, data), done in zip(items, written, strict=True):
        if not done and (there := _there(store, path)) != data:
            store.replace(path, data, there)
    return sum(map(bool, written))


def _there(store: Store, path: str) -> bytes:
    return store.read_bytes(path, ENVELOPE_BYTES)


def sign_published(store: Store, ours: Sequence[Manifest], directories: Iterable[str], key: PrivateKey) -> tuple[int, list[str]]:
    """Signs what is published of the entries that were built here, if it is what was built here.

    Returns:
        How many signatures are new, and why entries were left out.
    """
    built = {manifest.fingerprint: manifest for manifest in ours}
    items: list[tuple[str, bytes]] = []
    left_out: list[str] = []
    for directory in directories:
        for fingerprint, newest in newest_manifests(store, directory).items():
            if (own := built.get(fingerprint)) is None or newest.gone:
                continue
            try:
                theirs, data = read_published(store, newest.path, fingerprint)
            except (IntegrityError, ManifestError) as error:
                left_out.append(f"not signed: {error}")
                continue
            # Provenance, build times and the archive's packing differ from build to build; what a server would load may not.
            same = changed(theirs, provenance=own.provenance, build_seconds=own.build_seconds, archive=own.archive)
            if same != own:
                left_out.append(f"not signed: {newest.path} is not what was built here; --replace publishes this one")
                continue
            items.append(_signed(index_entry(theirs, data), theirs, key))
    return _put(store, items), left_out


def sign_store(store: Store, key: PrivateKey, *, asked: Wanted, policy: Policy | None) -> SignReport:
    """Signs the entries of a store with one more key, as when keys are rotated.

    Args:
        policy: only what it lets in is signed; None signs whatever the store holds.

    Raises:
        StoreError, IntegrityError, ManifestError: the store cannot be read or written.
    """
    guard = None if policy is None else Guard(policy, None)
    items: list[tuple[str, bytes]] = []
    left_out: list[str] = []
    for name in list_environments(store):
        for entry in read_index_at(store, name).entries:
            if not asked.takes(entry.key):
                continue
            try:
                if guard is not None:
                    guard.admit(entry, store)
            except RefusedError as error:
                left_out.append(str(error))
                continue
            items.append(_signed(entry, read_manifest(store, entry), key))
    new = _put(store, items)
    return SignReport(key=key.public.id, entries=new, present=len(items) - new, indexes=(), left_out=tuple(left_out))


class IndexSigner:
    """Signs indexes with one key, each until `seconds` from now."""

    def __init__(self, key: PrivateKey, seconds: float) -> None:
        self._key = key
        self._seconds = seconds

    def sign(self, store: Store, path: str, data: bytes, before: bytes | None) -> None:
        """Signs an index before it is written.

        Args:
            before: the index that it takes the place of, if any: its serial number is passed.
        """
        now = int(time.time())
        serials = [claim.serial for index in (before, data) if index is not None for claim in self._claims(store, path, index)]
        claim = IndexClaim(serial=max([now, *(serial + 1 for serial in serials)]), made=now, expires=now + int(self._seconds))
        sha256 = digest.of_bytes(data)
        _put(store, [(signature_path(sha256, self._key.public.id), seal(about_index(path, sha256, claim), self._key))])

    def _claims(self, store: Store, path: str, data: bytes) -> list[IndexClaim]:
        sha256 = digest.of_bytes(data)
        name = signature_path(sha256, self._key.public.id)
        public: PublicKey = self._key.public
        try:
            return [check_index(unseal(store.read_bytes(name, ENVELOPE_BYTES), public, name), path, sha256, name)]
        except (NotFoundError, TrustError):
            return []

    def sign_all(self, store: Store) -> tuple[str, ...]:
        """Signs every index of a store as it is, and returns their paths."""
        paths = tuple(list_environments(store))
        for path in paths:
            data = store.read_bytes(path, LIMITS.index_bytes)
            decode_index(data, f"{path} of {store.describe()}")
            self.sign(store, path, data, None)
        return paths
