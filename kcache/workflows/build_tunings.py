"""Makes entries of directories in which FlashInfer's tuner, or an engine, left its results.

Nothing is tuned here. What was tuned elsewhere, or in an environment that was not found out, is left out with the reason; a file
is collected only if it says that it was tuned in the very environment that the target has now.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kcache import fsops
from kcache.archs import cute_dsl_arch
from kcache.errors import CollectError, KcacheError, UsageError
from kcache.kinds.autotune import SCHEMA, TUNER_MODULES, LeftOut
from kcache.kinds.autotune_entry import TuningBuild, file_groups, file_parts, store_parts
from kcache.kinds.autotune_v1 import collect_files
from kcache.kinds.autotune_v2 import collect
from kcache.kinds.nvcc_modules import EntryParts, required
from kcache.match import sm_count_fact
from kcache.tuning_facts import MODULE
from kcache.values import dataclass
from kcache.workflows import selections
from kcache.workflows.build_entries import FAILED, EntryReport, write_parts
from kcache.workflows.target import Target

DEPTH = 8
"""Segments below a directory in which files of engines are looked for: any directory above an engine's root may be named."""

_REMEDY = "Name FlashInfer's store (it has a directory v2), a directory with files of vLLM or SGLang, or b12x's compile cache."


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningsReport:
    """What was made of some directories. `left_out` are paths below them, each with the reason."""

    entries: tuple[EntryReport, ...]
    left_out: tuple[LeftOut, ...]


def collect_tunings(
    directories: Sequence[Path],
    target: Target,
    output: Path,
    *,
    model: str = "",
    modules: Sequence[str] = (),
    calls: Sequence[Mapping[str, Any]] = (),
    seconds: float = 0.0,
    provenance: Mapping[str, Any] | None = None,
) -> TuningsReport:
    """Writes an entry for each managed store, and for the files of each configuration of an engine.

    Args:
        directories: roots of FlashInfer's managed store, directories with files of engines below them, or b12x's compile cache.
        target: the environment that tuned.
        output: the directory for entries.
        model: that was tuned for; empty for results that suit every one.
        modules, calls, seconds: see `kcache.kinds.autotune_entry.TuningBuild`; the tuner's own modules are not counted.
        provenance: what more to record.

    Raises:
        ProbeError: a field of the target that FlashInfer compares could not be found out.
        UsageError: a directory cannot be read, or the target is not one GPU product.
        CollectError: nothing in the directories may be published; every reason is in the message.
        TrustError: someone else could change a directory.
    """
    build: TuningBuild | None = None
    made: list[tuple[EntryParts, dict[str, bytes]]] = []
    left_out: list[LeftOut] = []
    for directory in directories:
        if not directory.is_dir():
            raise UsageError(f"{directory} is no directory", remedy=_REMEDY)
        if (choices := selections.directory_of(directory)) is not None:
            found, lost = selections.collect(choices, target)
        else:
            build = build or _build(target, model=model, modules=modules, calls=calls, seconds=seconds)
            found, lost = _read(build, Path(directory))
        made += found
        left_out += lost
    if not made:
        reasons = "; ".join(f"{one.path}: {one.why}" for one in left_out[:5])
        more = f"; and {len(left_out) - 5} more" if len(left_out) > 5 else ""
        raise CollectError("no tuning result can be published from here", why=f"{reasons}{more}", remedy=_REMEDY)
    output.mkdir(parents=True, exist_ok=True)
    recorded = {**({"gpu": build.host.written().get("gpu", "")} if build is not None else {}), **(provenance or {})}
    return TuningsReport(entries=tuple(_write(output, *one, recorded) for one in made), left_out=tuple(left_out))


def _build(
    target: Target, *, model: str, modules: Sequence[str], calls: Sequence[Mapping[str, Any]], seconds: float
) -> TuningBuild:
    archs = target.environment.archs
    counts = {arch: (target.environment.fact(sm_count_fact(arch)).value or "").split() for arch in archs}
    if len(archs) != 1 or len(counts[archs[0]]) != 1:
        raise UsageError(
            "it is not known which GPU was tuned for",
            why=f"{len(archs)} architectures are here" if len(archs) != 1 else "how many SMs it has could not be found out",
            remedy="Collect on the host that tuned, or describe its GPU with --gpu.",
        )
    return TuningBuild(
        farm=target.environment,
        host=target.tuning_host(),
        cuda=required("cuda.runtime", target.environment.fact("cuda.runtime")),
        cute_arch=cute_dsl_arch(archs[0]),
        sm_count=int(counts[archs[0]][0]),
        model=model,
        modules=tuple(name for name in modules if name not in TUNER_MODULES),
        calls=tuple(calls),
        seconds=seconds,
    )


def _read(build: TuningBuild, directory: Path) -> tuple[list[tuple[EntryParts, dict[str, bytes]]], list[LeftOut]]:
    if (directory / SCHEMA).is_dir():
        stores = collect(directory, build.host)
        return [store_parts(build, store) for store in stores.stores], list(stores.left_out)
    found, left_out = collect_files(directory, build.host, depth=DEPTH)
    groups, others = file_groups(found)
    why = "FlashInfer loads such a file only where its caller names one, and no engine keeps one here"
    return [file_parts(build, group) for group in groups], [*left_out, *(LeftOut(path=path, why=why) for path in others)]


def _write(output: Path, parts: EntryParts, files: Mapping[str, bytes], provenance: Mapping[str, Any]) -> EntryReport:
    """Packs an entry from files of its own: what FlashInfer writes to may change meanwhile."""
    try:
        with tempfile.TemporaryDirectory(prefix=".tunings-", dir=output) as name:
            paths = {}
            for number, (path, data) in enumerate(files.items()):
                paths[path] = Path(name) / f"{number}.json"
                fsops.write_bytes(paths[path], data, durable=False)
            return write_parts(output, parts, paths, provenance)
    except KcacheError as error:
        return EntryReport(
            kind=MODULE,
            arch=parts.key.arch,
            modules=(MODULE,),
            status=FAILED,
            reason=str(error),
            model=parts.key.model,
            variant=parts.key.variant,
        )
