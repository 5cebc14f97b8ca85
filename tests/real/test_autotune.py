"""FlashInfer's own tuner against what kcache collects, names anew and merges: real FlashInfer in processes of its own, no GPU.

FlashInfer publishes and saves results of an operation that is defined here (its own classes do all of it; what only a GPU can do,
measuring, is left out), and is asked in another process, at another home, whether it finds them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tuning_children import FLASHINFERS, TUNE, environ_of, host_of, replayed, request_of, tuned, worked_out

from kcache.key import known
from kcache.kinds import autotune_v1, autotune_v2, autotune_v2_install
from kcache.kinds.autotune import check_store_rule
from kcache.values import replace


def with_store(path: str) -> bool:
    return not path or (Path(path) / "flashinfer" / "autotune_cache.py").exists()


@pytest.mark.real
@pytest.mark.parametrize(
    "path", [path for path in ["", *FLASHINFERS] if with_store(path)], ids=lambda path: Path(path).name or "installed"
)
def test_a_store_at_another_home_under_another_installer_is_found_by_the_library(path: str, tmp_path: Path) -> None:
    farm, target = environ_of(path, tmp_path / "farm", {}), environ_of(path, tmp_path / "target", {})
    policy = {"measure_execution_mode": "eager", "measure_cold_l2": "False"}
    keys = tuned(farm, [16, 32, 64], policy=policy)
    root = Path(autotune_v2.store_root(farm, farm["HOME"]))
    host = worked_out(farm)
    check_store_rule(host_of(farm).paths.flashinfer or "")
    collected = autotune_v2.collect(root, host)
    assert collected.left_out == ()
    (store,) = collected.stores
    assert {entry.key for entry in store.entries} == set(keys)
    assert (store.policy, store.entries[0].operation) == (policy, "kcache::plain")

    # As where uv installed the same wheels: another fingerprint (here made by metadata without files), the same compiler.
    extra = tmp_path / "target-site" / "nvidia_cutlass_dsl_kcache_test-1.0.dist-info"
    extra.mkdir(parents=True)
    (extra / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cutlass-dsl-kcache-test\nVersion: 1.0\n")
    target["PYTHONPATH"] = ":".join(part for part in (path, str(extra.parent)) if part)
    there = replace(worked_out(target), stack=host.stack)
    assert autotune_v2.match_store(store, host, there).accepted
    moved = autotune_v2.relocated(store, there)
    assert moved.env_hash != store.env_hash
    target_root = Path(autotune_v2.store_root(target, target["HOME"]))
    placed = autotune_v2_install.install(target_root, moved)
    said = replayed(target, stores=[{"root": None, "policy": policy, "keys": [*keys, "('other', 'PlainRunner', (), ())"]}])
    (found,) = said["stores"]
    assert (found["directory"], found["env_hash"]) == (str(placed.directory), moved.env_hash)
    assert (found["loaded"], found["total"], found["skipped"], found["hits"]) == (3, 3, 0, 3)
    assert found["missed"] == ["('other', 'PlainRunner', (), ())"]

    # Why it has to be relocated: a plain copy is not found; nor is one that was measured in another way.
    autotune_v2_install.install(tmp_path / "copy", store)
    stores = [{"root": str(tmp_path / "copy"), "policy": policy, "keys": keys}, {"root": None, "policy": {}, "keys": keys}]
    assert [one["hits"] for one in replayed(target, stores=stores)["stores"]] == [0, 0]


@pytest.mark.real
@pytest.mark.parametrize("path", ["", *FLASHINFERS], ids=lambda path: Path(path).name or "installed")
def test_a_file_at_another_home_is_loaded_by_the_library_and_written_as_it_writes(path: str, tmp_path: Path) -> None:
    farm = environ_of(path, tmp_path / "farm", {})
    saved = tmp_path / "farm" / "config" / "autotune_configs.json"
    keys = tuned(farm, [16, 32], file=str(saved))
    host = worked_out(farm)
    (collected,), left_out = autotune_v1.collect_files(saved.parents[1], host)
    assert (collected.path, left_out) == ("config/autotune_configs.json", ())
    assert set(collected.file.results) == set(keys)
    assert collected.file.encode() == saved.read_bytes()
    assert autotune_v1.match_file(collected.file, host, host).accepted
    target = tmp_path / "target" / collected.path
    autotune_v1.install(target, autotune_v1.relocated(collected.file, host), timeout=10)
    assert target.read_bytes() == saved.read_bytes()
    foreign = autotune_v1.relocated(
        collected.file, replace(host, fields={**host.fields, "cudnn_frontend_version": known("1.26.0")})
    )
    (tmp_path / "foreign.json").write_bytes(foreign.encode())
    (tmp_path / "torn.json").write_bytes(saved.read_bytes()[:-20])
    said = replayed(farm, files=[str(target), str(tmp_path / "foreign.json"), str(tmp_path / "torn.json")])["files"]
    assert [(one["loaded"], one["results"]) for one in said] == [(True, 2), (False, 0), (False, 0)]
    assert "JSONDecodeError" in said[2]["error"]


@pytest.mark.real
def test_flashinfer_saves_into_a_file_that_kcache_merges_into_and_nothing_is_lost(tmp_path: Path) -> None:
    environ = environ_of("", tmp_path, {})
    path = tmp_path / "autotune_configs.json"
    first = tuned(environ, [16], file=str(path), tactic=9)
    host = worked_out(environ)
    start = parse = autotune_v1.parse_file(path.read_bytes())
    go = tmp_path / "go"
    saving = subprocess.Popen([sys.executable, "-c", TUNE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    assert saving.stdin is not None
    assert saving.stdout is not None
    saving.stdin.write(json.dumps(request_of([32, 64], file=str(path), wait=str(go))))
    saving.stdin.close()
    while saving.stdout.readline() not in ("ready\n", ""):
        pass
    go.touch()
    ours = [
        replace(start, results={key.replace("16", str(m)): one for key, one in parse.results.items()}) for m in range(100, 140)
    ]
    for file in ours:
        renamed = {key: replace(one, key=key) for key, one in file.results.items()}
        autotune_v1.install(path, replace(file, results=renamed, metadata=host.written()), timeout=10)
    saved = json.loads(saving.stdout.read().splitlines()[-1])["keys"]
    assert saving.wait(timeout=60) == 0
    saving.stdout.close()
    for file in ours:  # FlashInfer takes no lock: what its rename took away comes back with the next restore
        renamed = {key: replace(one, key=key) for key, one in file.results.items()}
        autotune_v1.install(path, replace(file, results=renamed, metadata=host.written()), timeout=10)
    now = autotune_v1.parse_file(path.read_bytes())
    assert set(now.results) >= {*first, *saved, *(key for file in ours for key in file.results)}
    assert now.results[first[0]].tactic == [128, 9]
