"""Entries of tuning results: what a manifest says of them has to add up, and is decided by name, never by likeness."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tunings import ABSENT, a_file, a_host, a_store

from kcache import archive
from kcache.errors import CollectError, ManifestError, ProbeError
from kcache.key import Environment, known, undetermined
from kcache.kinds.autotune_entry import TuningBuild, engine_path, file_groups, file_parts, store_parts
from kcache.kinds.autotune_v1 import CollectedFile
from kcache.kinds.nvcc_modules import EntryParts
from kcache.manifest import Manifest, parse_manifest
from kcache.tuning_facts import environment_digest

FARM = Environment(facts={"platform.machine": known("x86_64"), "flashinfer.version": known("0.7.4")}, archs=("90a",))
VLLM = "a" * 64


def build(host: Any = None) -> TuningBuild:
    return TuningBuild(farm=FARM, host=host or a_host(), cuda="13.0", cute_arch="sm_90a", sm_count=132)


def packed(parts: EntryParts, files: dict[str, bytes], directory: Path) -> Manifest:
    paths = {}
    for number, (path, data) in enumerate(files.items()):
        paths[path] = directory / str(number)
        paths[path].write_bytes(data)
    facts = archive.pack(paths, directory / "packed")
    return Manifest(
        key=parts.key,
        artifacts=parts.artifacts,
        archive=facts,
        sources={},
        build_seconds={},
        provenance={},
        tunings=parts.tunings,
    )


def test_a_manifest_of_tuning_results_is_read_as_it_was_written(tmp_path: Path) -> None:
    parts, files = store_parts(build(a_host(cudnn_version=ABSENT)), a_store([16, 32], a_host(cudnn_version=ABSENT)))
    manifest = packed(parts, files, tmp_path)
    read = parse_manifest(manifest.encode())
    assert (read, read.compiles) == (manifest, 0)
    assert read.tunings is not None
    assert (read.tunings.host.fields["cudnn_version"], read.tunings.environment["cudnn_version"]) == (ABSENT, "unknown")
    assert (read.tunings.results, read.tunings.operations) == (2, ("bf16_gemm",))


def set_to(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for name in path[:-1]:
            document = document[name]
        document[path[-1]] = value

    return change


WRONG = [
    (set_to("tunings", "place", value="elsewhere"), "tunings.place"),
    (set_to("tunings", "environment", "gpu", value="NVIDIA H100"), "tunings.environment"),
    (set_to("tunings", "host", "fields", "gpu", value={"undetermined": "no driver"}), "it was not found out"),
    (set_to("tunings", "results", value=0), "tunings.results"),
    (set_to("tunings", "calls", value=[1]), "tunings.calls"),
    (set_to("artifacts", value=[{"path": "x.json", "size": 1, "sha256": "sha256:" + "1" * 64}]), "artifacts"),
    (lambda document: document.pop("tunings"), "tunings: there if"),
]


@pytest.mark.parametrize(("change", "named"), WRONG, ids=lambda case: case if isinstance(case, str) else "")
def test_a_manifest_that_does_not_add_up_is_refused(change: Callable[[Any], Any], named: str, tmp_path: Path) -> None:
    document = packed(*store_parts(build(), a_store([16])), tmp_path).to_json()
    document = json.loads(json.dumps(document))
    change(document)
    with pytest.raises(ManifestError) as error:
        parse_manifest(json.dumps(document).encode())
    assert any(named in problem for problem in error.value.problems)


def test_what_was_not_found_out_is_never_published() -> None:
    with pytest.raises(ProbeError):
        store_parts(build(a_host(cublas_version=undetermined("no loader"))), a_store([16]))
    with pytest.raises(CollectError):
        store_parts(build(), a_store([]))


def test_two_tunings_of_one_thing_are_two_entries_and_measurement_policies_are_told_apart() -> None:
    keys = [store_parts(build(), a_store([16], tactic=tactic))[0].key for tactic in (3, 4)]
    assert keys[0].fingerprint != keys[1].fingerprint
    assert keys[0].variant == keys[1].variant == "flashinfer"
    assert store_parts(build(), a_store([16], measure_execution_mode="eager"))[0].key.variant.startswith("flashinfer-")


def test_files_of_engines_are_grouped_by_configuration_and_environment() -> None:
    paths = [f"any/where/{VLLM}/autotune_configs_tp_{ranks}.json" for ranks in ("0-1", "2-3")]
    paths += [f"x/0.7.4/sm90/{'b' * 16}/rank_tp0_pp0_dp0.json", "mine.json"]
    found = [CollectedFile(path=path, file=a_file([16])) for path in paths]
    found.append(CollectedFile(path=f"{VLLM}/autotune_configs.json", file=a_file([16], gpu="*")))
    groups, others = file_groups(found)
    assert others == ("mine.json",)
    assert sorted((group.variant, len(group.files)) for group in groups) == [
        (f"sglang-{'b' * 16}", 1),
        (f"vllm-{'a' * 16}", 1),
        (f"vllm-{'a' * 16}", 2),
    ]
    parts, files = file_parts(build(), next(group for group in groups if len(group.files) == 2))
    assert sorted(files) == [f"files/{VLLM}/autotune_configs_tp_{ranks}.json" for ranks in ("0-1", "2-3")]
    assert parts.key.ingredients["tuning.environment"] == environment_digest(a_file([16]).metadata)
    assert engine_path("runs/scratch.json") is None
