"""The matrix of what stores publish: their indexes read, and nothing else of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kcache.errors import IntegrityError, ManifestError, NotFoundError
from kcache.index import IndexEntry
from kcache.key import EntryKey
from kcache.matrix import Matrix, make_matrix
from kcache.store.base import Store
from kcache.workflows.catalog import list_environments, read_index_at


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
                index = read_index_at(store, path)
            except (IntegrityError, ManifestError, NotFoundError) as error:
                problems.append(str(error))
                continue
            entries += [entry for entry in index.entries if takes(entry.key)]
    return make_matrix([store.describe() for store in stores], entries, problems=problems, archs=archs)
