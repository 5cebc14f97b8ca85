"""The page that people see of a store on the Hub: its README.md, made from the indexes and kept by whoever publishes.

A page that somebody else wrote is left alone: ours carries a mark. It is written by compare-and-swap and read before the indexes,
so of several publishers the last one to write has seen them all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kcache.errors import ConflictError, IntegrityError, ManifestError, NotFoundError
from kcache.index import Index, IndexEntry
from kcache.matrix import make_matrix
from kcache.matrix_text import page_section
from kcache.store.base import Store
from kcache.values import dataclass
from kcache.workflows.catalog import list_environments, read_index_at

NAME = "README.md"
MARK = "<!-- made by `kcache publish`; without this line it is left alone -->"
ATTEMPTS = 10
_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPage:
    """`size` is the number of bytes written, 0 where the page was right already; `warnings` say why one was left alone."""

    size: int
    warnings: tuple[str, ...] = ()


def keep_page(store: Store, *, changed: bool) -> KeptPage:
    """Makes the page agree with the indexes.

    Args:
        changed: whether an index was rewritten; otherwise a page that is there is taken to be right.

    Raises:
        StoreError
    """
    for _ in range(ATTEMPTS):
        try:
            current = store.read_bytes(NAME, _BYTES)
        except NotFoundError:
            current = None
        if current is not None and MARK.encode() not in current:
            return KeptPage(size=0, warnings=(f"{NAME} of {store.describe()} was written by somebody else and is left alone",))
        if current is not None and not changed:
            return KeptPage(size=0)
        page = render(store.describe(), _indexes(store)).encode()
        if page == current:
            return KeptPage(size=0)
        try:
            store.replace(NAME, page, current)
        except ConflictError:
            continue
        return KeptPage(size=len(page))
    return KeptPage(size=0, warnings=(f"{NAME} of {store.describe()} is being rewritten by others; theirs stays",))


def _indexes(store: Store) -> dict[str, Index]:
    found = {}
    for path in list_environments(store):
        try:
            found[path] = read_index_at(store, path)
        except (IntegrityError, ManifestError, NotFoundError):
            continue  # whoever publishes there next mends it
    return found


def render(store: str, indexes: Mapping[str, Index]) -> str:
    """The page, from the paths of indexes and what they list."""
    rows = [_row(path, index.entries) for path, index in sorted(indexes.items()) if index.entries]
    matrix = make_matrix([store], [entry for index in indexes.values() for entry in index.entries])
    where = store.partition("@")[0]
    return f"""---
tags:
- kcache
- flashinfer
- cuda
---
{MARK}

# Compiled kernels for FlashInfer

Kernels that FlashInfer would otherwise compile when a server starts, compiled once. kcache puts those that fit a container in
place before its server starts; nothing is used that does not fit.

## Restore

    kcache restore --from {where} -- vllm serve MODEL

`kcache lookup --from {where}` says what fits this host, and why the rest does not. Pin a commit, `{where}@COMMIT`, to get the
same bytes every time. What is restored is native code: use it only if you trust whoever may write here.

## What is here

| FlashInfer | machine | CUDA | kinds | GPU architectures | entries | size | compile time saved |
|---|---|---|---|---|---|---|---|
{chr(10).join(rows) or "| nothing yet | | | | | | | |"}

## Which models and kinds

Each cell: entries, size, and the compile time that they save. `kcache matrix --from {where} --html matrix.html` makes a page
with filters, dates and signers.

{page_section(matrix)}"""


def _row(path: str, entries: Sequence[IndexEntry]) -> str:
    _, _, flashinfer, machine, _ = path.split("/")
    machine, _, cuda = machine.rpartition("-cuda")
    kinds = sorted({entry.key.kind for entry in entries})
    archs = sorted({entry.key.arch for entry in entries})
    size = sum({entry.archive.sha256: entry.archive.size for entry in entries}.values())
    seconds = sum(entry.build_seconds for entry in entries)
    cells = [
        flashinfer.removeprefix("flashinfer-"),
        machine,
        cuda,
        ", ".join(kinds),
        ", ".join(archs),
        str(len(entries)),
        f"{size / 1e6:.1f} MB",
        f"{seconds:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"
