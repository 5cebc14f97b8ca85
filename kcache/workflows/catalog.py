"""What a store publishes: indexes and manifests, each verified before it is parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kcache import digest
from kcache.documents import LIMITS
from kcache.errors import IntegrityError, NotFoundError
from kcache.index import PARTS_FORMAT, Index, IndexEntry, decode_index, index_of, index_path
from kcache.manifest import Manifest, parse_manifest
from kcache.store.base import Store

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kcache.key import Environment
    from kcache.workflows.resolve import Wanted

ENVIRONMENTS = "v1/env"
"""The directory that holds one directory for each environment (see `kcache.index.index_directory`)."""


def read_index(
    store: Store,
    ingredients: Mapping[str, str],
    *,
    check: Callable[[Store, str, bytes], object] | None = None,
    environment: Environment | None = None,
    asked: Wanted | None = None,
) -> Index | None:
    """The index of one environment, or None if the store works and publishes nothing for it.

    Args:
        ingredients: at least `flashinfer.version`, `platform.machine` and `cuda.release`.
        environment, asked: where both are given, lines may be left out that suit no GPU of this environment or were not asked
            for, models that were not named among them (then `Index.models` has their names).
        check: given the store, the path and the bytes before they are parsed; raises where the index must not be used.

    Raises:
        StoreError: the store does not work.
        IntegrityError, ManifestError: the index cannot be used.
    """
    try:
        return read_index_at(store, index_path(ingredients), check=check, environment=environment, asked=asked)
    except NotFoundError:
        return None


def read_index_at(
    store: Store,
    path: str,
    *,
    check: Callable[[Store, str, bytes], object] | None = None,
    environment: Environment | None = None,
    asked: Wanted | None = None,
) -> Index:
    """The index at a path, in one piece or in parts. Arguments and errors as for `read_index`.

    Raises:
        NotFoundError: there is none.
    """
    data = store.read_bytes(path, LIMITS.index_bytes)
    if check is not None:
        check(store, path, data)
    what = f"{path} of {store.describe()}"
    document = decode_index(data, what)
    if document["format"] != PARTS_FORMAT:
        return index_of(document, what)
    from kcache.workflows.parts import read_parts

    return read_parts(store, path, document, environment=environment, asked=asked)


def read_manifest(store: Store, entry: IndexEntry) -> Manifest:
    """The manifest that an index line names: its size and digest are checked before it is parsed, then that it is this line's.

    Raises:
        StoreError: the store does not work, or lacks the manifest.
        IntegrityError, ManifestError: it is not the one that the index names, or cannot be used.
    """
    path = entry.manifest.path
    what = f"{path} of {store.describe()}"
    data = store.read_bytes(path, entry.manifest.size)
    if len(data) != entry.manifest.size:
        raise IntegrityError(f"{what} has {len(data)} bytes", why=f"the index says {entry.manifest.size}")
    if (found := digest.of_bytes(data)) != entry.manifest.sha256:
        raise IntegrityError(f"{what} has digest {found}", why=f"the index says {entry.manifest.sha256}")
    manifest = parse_manifest(data, what)
    if manifest.key != entry.key:
        raise IntegrityError(f"{what} is the manifest of another entry", why=f"the index says {entry.key.fingerprint}")
    archive = manifest.archive
    if (archive.sha256, archive.size, archive.unpacked_size) != (entry.archive.sha256, entry.archive.size, entry.unpacked_size):
        raise IntegrityError(f"{what} and the index name different archives")
    return manifest


def signatures_of(store: Store, sha256: str) -> list[str]:
    """The names of the signatures of a manifest or an index, whoever made them.

    Raises:
        StoreError
    """
    from kcache.trust.statement import signatures_directory  # only those who write need it: a restore asks by key

    beginning = f"{signatures_directory(sha256)}/{sha256.removeprefix('sha256:')}."
    return [name for name in store.list(signatures_directory(sha256)) if name.startswith(beginning)]


def list_environments(store: Store) -> list[str]:
    """The paths of all indexes in a store, sorted.

    Raises:
        StoreError
    """
    # kcache.index, index_directory: what lies deeper are the entries, however many.
    return sorted(name for name in store.list(ENVIRONMENTS, depth=3) if name.count("/") == 4 and name.endswith("/index.json"))
