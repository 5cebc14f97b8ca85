"""The tuner's results: from what was collected to the parts of a manifest. Pure: values in, values out.

One entry holds one managed store, or the files of one configuration of one engine that were tuned in one environment. Refuses
what would be a lie: an environment with a field that was not found out, a compiler whose content is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kcache import digest
from kcache.errors import CollectError
from kcache.key import AUTOTUNE, EntryKey, Environment, known
from kcache.kinds.autotune_places import parse_sglang_path, parse_vllm_path
from kcache.kinds.autotune_v1 import CollectedFile
from kcache.kinds.autotune_v2 import TuningStore
from kcache.kinds.b12x_selections import Selections, serialise
from kcache.kinds.nvcc_modules import EntryParts, required
from kcache.manifest import Artifact
from kcache.tuning_facts import (
    B12X,
    FILES,
    FLASHINFER,
    MODULE,
    SELECTIONS,
    SGLANG,
    VLLM,
    Stack,
    TuningFacts,
    TuningHost,
    environment_digest,
    results_digest,
)
from kcache.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningBuild:
    """What all entries of one collection share.

    farm:      the environment that tuned: version of FlashInfer, machine. host: as the tuner sees it.
    cuda:      the release of its CUDA runtime, such as `13.0`.
    cute_arch: of its GPU, such as `sm_90a`. sm_count: likewise.
    model:     that was tuned for; empty for results that suit every one.
    modules, calls: see `kcache.tuning_facts.TuningFacts`.
    seconds:   that tuning took; 0 where nobody knows.
    """

    farm: Environment
    host: TuningHost
    cuda: str
    cute_arch: str
    sm_count: int
    model: str = ""
    modules: tuple[str, ...] = ()
    calls: tuple[Mapping[str, Any], ...] = ()
    seconds: float = 0.0


def store_parts(build: TuningBuild, store: TuningStore) -> tuple[EntryParts, dict[str, bytes]]:
    """The parts of the entry of one managed store, and its files by their paths in the entry.

    Raises:
        CollectError: an entry with this key would not be true.
    """
    files = {f"entries/{entry.name}.json": entry.data for entry in store.entries}
    policy = digest.of_document(store.policy).removeprefix("sha256:")[:8] if store.policy else ""
    variant = f"{FLASHINFER}-{policy}" if policy else FLASHINFER
    operations = {entry.operation for entry in store.entries}
    facts = _facts(build, FLASHINFER, store.environment, operations, len(store.entries))
    return _parts(build, variant, facts, files), files


@dataclass(frozen=True, slots=True, kw_only=True)
class FileGroup:
    """Files of one engine's configuration that were tuned in one environment. `files`: by path below the engine's root."""

    place: str
    variant: str
    files: Mapping[str, CollectedFile]


def engine_path(path: str) -> tuple[str, str, str] | None:
    """(place, variant, path below the engine's root) of a file that an engine keeps; None for any other."""
    segments = path.split("/")
    own = "/".join(segments[-2:])
    if (vllm := parse_vllm_path(own)) is not None:
        return VLLM, f"{VLLM}-{vllm[0][:16]}", own
    own = "/".join(segments[-4:])
    if (sglang := parse_sglang_path(own)) is not None:
        return SGLANG, f"{SGLANG}-{sglang[0].rpartition('/')[2]}", own
    return None


def file_groups(found: Sequence[CollectedFile]) -> tuple[tuple[FileGroup, ...], tuple[str, ...]]:
    """Files by engine, configuration and metadata; and the paths of those that no engine looks for."""
    groups: dict[tuple[str, str, str], dict[str, CollectedFile]] = {}
    others = []
    for one in found:
        engine = engine_path(one.path)
        if engine is None:
            others.append(one.path)
            continue
        place, variant, own = engine
        groups.setdefault((place, variant, environment_digest(one.file.metadata)), {})[own] = one
    made = [FileGroup(place=place, variant=variant, files=files) for (place, variant, _), files in sorted(groups.items())]
    return tuple(made), tuple(others)


def file_parts(build: TuningBuild, group: FileGroup) -> tuple[EntryParts, dict[str, bytes]]:
    """The parts of the entry of one engine's files, and the files by their paths in the entry. Raises as `store_parts`."""
    files = {f"{FILES}/{path}": one.file.encode() for path, one in group.files.items()}
    metadata = next(iter(group.files.values())).file.metadata
    results = [result for one in group.files.values() for result in one.file.results.values()]
    operations = {result.operation for result in results}
    return _parts(build, group.variant, _facts(build, group.place, metadata, operations, len(results)), files), files


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionBuild:
    """Where choices of the package b12x were measured.

    farm:      the environment: version of FlashInfer, machine, Python.
    cuda:      the release of its CUDA runtime, such as `13.0`.
    cute_arch: of the GPU that the choices name, such as `sm_120a`.
    package:   fingerprint of its b12x.
    """

    farm: Environment
    cuda: str
    cute_arch: str
    package: str


def selection_parts(build: SelectionBuild, selections: Selections) -> tuple[EntryParts, dict[str, bytes]]:
    """The parts of the entry of one file of b12x's choices. Raises as `store_parts`."""
    if not selections.records:
        raise CollectError("no choice is in it")
    files = {f"{SELECTIONS}/{selections.name}": serialise(selections)}
    python = required("python.abi", build.farm.fact("python.abi"))
    facts = TuningFacts(
        place=B12X,
        host=TuningHost(fields={"package": known(build.package)}, stack=Stack(wheels={}, python=python, tvm_ffi="")),
        environment=selection_environment(selections.identity, build.package),
        results=len(selections.records),
    )
    farm = TuningBuild(
        farm=build.farm,
        host=facts.host,
        cuda=build.cuda,
        cute_arch=build.cute_arch,
        sm_count=int(selections.identity["sm_count"]),
    )
    return _parts(farm, f"{B12X}-{selections.name[:8]}", facts, files), files


def selection_environment(identity: Mapping[str, Any], package: str) -> dict[str, str]:
    """`TuningFacts.environment` of b12x's choices."""
    return {"identity": digest.canonical_json(dict(identity)).decode(), "package": package}


def _facts(build: TuningBuild, place: str, environment: Mapping[str, str], operations: set[str], results: int) -> TuningFacts:
    build.host.written()
    if unknown := [name for name, wheel in build.host.stack.wheels.items() if not wheel.content]:
        raise CollectError(f"it is not known what was tuned: the content of {', '.join(unknown)} could not be found out")
    if not results:
        raise CollectError("no tuning result is in it")
    return TuningFacts(
        place=place,
        host=build.host,
        environment=dict(environment),
        results=results,
        operations=tuple(sorted(operations - {""})),
        modules=tuple(sorted(build.modules)),
        calls=build.calls,
    )


def _parts(build: TuningBuild, variant: str, facts: TuningFacts, files: Mapping[str, bytes]) -> EntryParts:
    artifacts = tuple(Artifact(path=path, size=len(data), sha256=digest.of_bytes(data)) for path, data in sorted(files.items()))
    return EntryParts(
        key=EntryKey(
            kind=MODULE,
            modules=(MODULE,),
            ingredients={
                "platform.machine": required("platform.machine", build.farm.fact("platform.machine")),
                "flashinfer.version": required("flashinfer.version", build.farm.fact("flashinfer.version")),
                "cuda.release": build.cuda,
                "gpu.cute_arch": build.cute_arch,
                "gpu.sm_count": str(build.sm_count),
                "tuning.environment": environment_digest(facts.environment),
                "tuning.results": results_digest({artifact.path: artifact.sha256 for artifact in artifacts}),
            },
            layout=AUTOTUNE,
            model=build.model,
            variant=variant,
        ),
        artifacts=artifacts,
        sources={},
        build_seconds={MODULE: round(build.seconds, 3)} if build.seconds else {},
        tunings=facts,
    )
