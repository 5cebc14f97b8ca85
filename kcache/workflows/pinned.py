"""Indexes and manifests of a store that can never change, kept in the local cache: a pinned revision needs no network twice.

What is kept is checked by its digest whenever it is read, in a cache whose owners and modes were checked. Otherwise it is as good
as the store: manifests are verified against the index, which is the root of the chain.
"""

from __future__ import annotations

from contextlib import suppress

from kcache import digest
from kcache.errors import InstallError, TrustError
from kcache.local_cache import LocalCache
from kcache.store.base import Store
from kcache.store.wrappers import Wrapper

ROOM = "pinned"


class PinnedReads(Wrapper):
    """Remembers what `read_bytes` read from a store that can never change."""

    def __init__(self, inner: Store, cache: LocalCache) -> None:
        super().__init__(inner)
        self._cache = cache

    def read_bytes(self, name: str, limit: int) -> bytes:
        key = digest.of_bytes(f"{self.inner.describe()}\n{name}".encode()).removeprefix("sha256:")
        kept = self._cache.read(ROOM, key)
        text = kept.get("text") if kept is not None else None
        if kept is not None and isinstance(text, str) and len(text) <= limit:
            data = text.encode()
            if len(data) <= limit and digest.of_bytes(data) == kept.get("sha256"):
                return data
        data = self.inner.read_bytes(name, limit)
        with suppress(UnicodeDecodeError, InstallError, TrustError):
            document = {"store": self.inner.describe(), "name": name, "sha256": digest.of_bytes(data), "text": data.decode()}
            self._cache.write(ROOM, key, document)
        return data
