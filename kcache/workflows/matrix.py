"""The matrix of what stores publish: their indexes read, and nothing else of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kcache.documents import LIMITS
from kcache.errors import IntegrityError, ManifestError, NotFoundError
from kcache.index import IndexEntry, parse_index
from kcache.key import EntryKey
from kcache.matrix import Matrix, make_matrix
from kcache.store.base import Store
from kcache.workflows.catalog import list_environments


def read_matrix(stores: Sequence[Store], *, takes: Callable[[EntryKey], bool], archs: Sequence[str] = ()) -> Matrix:
    """Reads every index of these stores.

    Args:
        takes: which keys were asked for.
        archs: only these architectures, where any are given.

    Raises:
        StoreError: a store does not work, or cannot say what it has. An index that cannot be used is one of the `problems`.
    """
    entries: list[IndexEntry] = []
    problems: list[str] = []
    for store in stores:
        for path in list_environments(store):
            try:
                index = parse_index(store.read_bytes(path, LIMITS.index_bytes), f"{path} of {store.describe()}")
            except (IntegrityError, ManifestError, NotFoundError) as error:
                problems.append(str(error))
                continue
            entries += [entry for entry in index.entries if takes(entry.key)]
    return make_matrix([store.describe() for store in stores], entries, problems=problems, archs=archs)
