"""Brings one entry from a store into the local cache: space, download, verification, extraction and receipt, in that order.

What is written is verified file by file before it gets its name, and the entry counts as installed only when its receipt is
written, after the whole archive was read and its digest was right. The caller holds the cache's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kcache import archive, digest, fsops
from kcache.errors import IntegrityError
from kcache.fsops import Staged
from kcache.index import IndexEntry
from kcache.local_cache import Damage, InstalledEntry, LocalCache, Vouched
from kcache.manifest import Manifest
from kcache.store.base import Store
from kcache.workflows.deadline import Deadline

SPACE_MARGIN = 1 << 20
"""Bytes asked for beyond the files themselves: receipt, view, directories."""


Watch = Callable[[Iterator[bytes], str, int], Iterator[bytes]]
"""Hands on the chunks of a download, of which it is told what they are and how many bytes they come to: for people to see."""


def install_entry(
    cache: LocalCache,
    store: Store,
    entry: IndexEntry,
    manifest: Manifest,
    deadline: Deadline,
    *,
    watch: Watch | None = None,
    vouched: Vouched | None = None,
) -> InstalledEntry:
    """Installs a verified manifest's entry.

    Args:
        vouched: by what a policy let it in, for the receipt.

    Raises:
        NoSpaceError: found before anything is written.
        IntegrityError: bytes are not what the manifest says; nothing of the entry is in use.
        StoreError, InstallError: the store failed, or the files could not be written.
    """
    encoded = manifest.encode()
    if digest.of_bytes(encoded) != entry.manifest.sha256:
        raise IntegrityError(f"the manifest of {entry.key.fingerprint} is not in canonical form", remedy="Publish it again.")
    cache.prepare()
    fsops.require_space(cache.base, manifest.archive.unpacked_size + len(encoded) + SPACE_MARGIN)
    expected = {artifact.path: (artifact.size, artifact.sha256) for artifact in manifest.artifacts}

    staged: list[Staged] = []
    flusher = fsops.Flusher()

    def sink(path: str, size: int, chunks: Iterator[bytes]) -> None:
        sha256 = expected[path][1]
        staged.append(cache.stage_artifact(manifest.fingerprint, path, chunks, size=size, sha256=sha256, flusher=flusher))

    chunks = deadline.watch(store.read(entry.archive.path), f"downloading {entry.archive.path}")
    if watch is not None:
        chunks = watch(chunks, entry.key.title, entry.archive.size)
    try:
        archive.unpack(chunks, manifest.archive, expected, sink)
        flusher.finish()
    except BaseException:
        for file in staged:
            file.discard()
        cache.remove_if_empty(manifest)
        raise
    for file in staged:
        file.commit(durable=False)
    cache.write_receipt(manifest, entry.manifest.sha256, encoded, vouched=vouched)
    found = cache.find(manifest.fingerprint)
    if not isinstance(found, InstalledEntry):
        reason = found.reason if isinstance(found, Damage) else "it is gone"
        raise IntegrityError(f"{entry.key.fingerprint} was changed while it was installed", why=reason)
    return found
