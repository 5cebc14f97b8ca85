"""Reading an index in parts (`kcache.index_parts`): all of it, or only what a container can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kcache import digest
from kcache.archs import cute_dsl_arch
from kcache.errors import IntegrityError, NotFoundError
from kcache.index import Blob, Index, parse_index
from kcache.index_parts import WORKS_FOR_ANY, Label, Root, for_kind, for_model, parse_root
from kcache.key import KIND_MODULES, Environment
from kcache.match import arch_score
from kcache.store.base import Store
from kcache.workflows.resolve import Wanted, is_model


def read_parts(
    store: Store, path: str, document: Mapping[str, Any], *, environment: Environment | None = None, asked: Wanted | None = None
) -> Index:
    """The index whose root was read from `path`: only the parts that hold what is asked for, where both arguments are given.

    Raises:
        StoreError: the store does not work, or lacks a part.
        IntegrityError, ManifestError: the root or a part cannot be used.
    """
    directory = path.removesuffix("/index.json")
    root = parse_root(document, f"{path} of {store.describe()}")
    whole = environment is None or asked is None
    buckets = list(root.parts) if environment is None or asked is None else wanted_buckets(root, environment, asked)
    blobs = [root.blob(directory, bucket) for bucket in buckets]
    read = [read_part(store, blob) for blob in blobs]
    return Index(
        entries=tuple(entry for part in read for entry in part.entries),
        # A bundle is described in every part that it holds a line of.
        bundles=tuple({bundle.file.path: bundle for part in read for bundle in part.bundles}.values()),
        models=() if whole else root.models,
        parts=tuple(blob.path for blob in blobs) if whole else (),
    )


def read_part(store: Store, blob: Blob) -> Index:
    """A part, whose size and digest are checked before it is parsed. Raises as `read_parts`."""
    what = f"{blob.path} of {store.describe()}"
    try:
        data = store.read_bytes(blob.path, blob.size)
    except NotFoundError as error:
        raise IntegrityError(f"{what} is not there", why="the index names it", remedy="Publish again to mend it.") from error
    if len(data) != blob.size or digest.of_bytes(data) != blob.sha256:
        raise IntegrityError(f"{what} is not what the index says", remedy="Publish again to mend it.")
    return parse_index(data, what)


def wanted_buckets(root: Root, environment: Environment, asked: Wanted) -> list[str]:
    """The buckets of everything that `asked` takes and that may run on the environment's GPUs; never none, so that a miss can say
    what there is."""
    everything = list(root.parts)
    names = _labels_of_models(root, asked.models)
    if names is None:
        return everything
    labels: list[Label] = []
    for arch in root.archs:
        if not _may_serve(arch, environment.archs):
            continue
        labels += [(arch, name) for name in names]
        if arch not in root.spread:
            labels.append((arch, WORKS_FOR_ANY))
        elif asked.kinds or asked.modules:
            labels += [(arch, for_kind(kind, ())) for kind in asked.kinds if kind != KIND_MODULES]
            labels += [(arch, for_kind(KIND_MODULES, (module,))) for module in asked.modules]
        if arch in root.spread and (KIND_MODULES in asked.kinds or not (asked.kinds or asked.modules)):
            return everything
    return root.buckets_of(labels) or everything[:1]


def _labels_of_models(root: Root, asked: Sequence[str]) -> list[str] | None:
    """Whom the entries of the models that are meant are for; None where only the lines themselves can tell."""
    if not asked:
        return [for_model(name) for name in root.models] if root.models_in_all == 1 else []  # of several, one has to be named
    names = []
    for name in asked:
        if not set("*?[").isdisjoint(name):
            if root.models_in_all > len(root.models):
                return None
            names += [for_model(model) for model in root.models if is_model(model, name)]
        else:
            names.append(for_model(name))
    return names


def _may_serve(built: str, archs: Sequence[str]) -> bool:
    if built.startswith("sm_"):
        return any(cute_dsl_arch(arch) == built for arch in archs)
    return any(arch_score(built, arch) is not None for arch in archs)
