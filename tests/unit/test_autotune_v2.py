"""FlashInfer's managed store of tuning results: what is collected, what matches, and merging into a store that is in use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tunings import ABSENT, STACK, a_host, a_store, an_entry, entry_document, key_of, name_of

from kcache.documents import Reader
from kcache.errors import CollectError, IntegrityError, ProbeError, TrustError
from kcache.key import undetermined
from kcache.kinds.autotune import DSL, environment_hash, group_may_use
from kcache.kinds.autotune_v2 import (
    collect,
    content_digest,
    match_store,
    parse_store_environment,
    relocated,
    require_winners,
    store_root,
    verify_entry,
)
from kcache.kinds.autotune_v2_install import accepted, install
from kcache.tuning_facts import Stack, parse_tuning_host
from kcache.values import replace


def changed(stack: Stack, **wheel: str) -> Stack:
    wheels = {name: replace(found, **wheel) for name, found in stack.wheels.items()}
    return replace(stack, wheels=wheels)


def differs(decision: Any) -> list[str]:
    return [check.field for check in decision.differs]


def test_the_place_is_flashinfers() -> None:
    assert store_root({}, "/base") == "/base/.cache/flashinfer/autotune"
    assert store_root({"FLASHINFER_AUTOTUNE_CACHE_DIR": ""}, "/base") == "/base/.cache/flashinfer/autotune"
    assert store_root({"FLASHINFER_AUTOTUNE_CACHE_DIR": "/elsewhere"}, "/base") == "/elsewhere"


def test_what_was_installed_is_collected_with_its_policy_and_measured_results(tmp_path: Path) -> None:
    plain, eager = a_store([16, 32]), a_store([64], measure_execution_mode="eager", measure_cold_l2="False")
    for store in (plain, eager):
        install(tmp_path / "root", store)
    found = collect(tmp_path / "root", a_host())
    assert found.left_out == ()
    assert {store.env_hash: store for store in found.stores} == {
        plain.env_hash: replace(plain, entries=tuple(sorted(plain.entries, key=lambda entry: entry.name))),
        eager.env_hash: eager,
    }
    assert next(store for store in found.stores if store.env_hash == eager.env_hash).policy == {
        "measure_execution_mode": "eager",
        "measure_cold_l2": "False",
    }
    entry = eager.entries[0]
    assert (entry.operation, entry.runner, entry.tactic, entry.policy) == ("bf16_gemm", "CublasltBf16GemmRunner", 3, (1, False))


def broken(document: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({**document, **fields}).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (json.dumps(entry_document(16)).encode()[:50], "only a part"),
        (b"[]", "no JSON object"),
        (b'{"key": "x"}', "runner or tactic"),
        (broken(entry_document(16), runner=None), "runner or tactic"),
        (broken(entry_document(16), key=key_of(32)[0], key_fields=key_of(32)[1]), "named for"),
        (broken(entry_document(16), key_fields=key_of(32)[1]), "two forms"),
        (broken(entry_document(16), key_fields={"other": 1}), "two forms"),
        (broken(entry_document(16), more="x" * (1 << 20)), "too large"),
    ],
)
def test_a_result_that_flashinfer_would_not_take_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(IntegrityError, match=reason):
        verify_entry(name_of(key_of(16)[0]), data)


def test_partial_torn_and_foreign_files_are_left_out_each_with_its_reason(tmp_path: Path) -> None:
    store = a_store([16, 32, 64])
    entries = install(tmp_path, store).directory / "entries"
    whole = (entries / f"{store.entries[0].name}.json").read_bytes()
    (entries / f"{store.entries[0].name}.json").write_bytes(whole[: len(whole) // 2])
    (entries / ".autotune_x1.tmp").write_bytes(whole[:10])
    (entries / "notes.txt").write_text("mine")
    (entries / f"{'0' * 24}.json").write_bytes(whole)
    (entries / f"{store.entries[1].name}.json").unlink()
    (entries / f"{store.entries[1].name}.json").symlink_to(entries / "notes.txt")
    (tmp_path / "v2" / "other").mkdir()
    other = install(tmp_path, a_store([16], a_host(cublas_version="13.2.0"))).directory.name
    renamed = tmp_path / "v2" / ("f" * 16)
    (tmp_path / "v2" / install(tmp_path, a_store([16], measure_cold_l2="True")).directory.name).rename(renamed)
    found = collect(tmp_path, a_host())
    assert [[entry.key for entry in one.entries] for one in found.stores] == [[key_of(64)[0]]]
    reasons = {one.path.rpartition("/")[2]: one.why for one in found.left_out}
    assert "only a part" in reasons[f"{store.entries[0].name}.json"]
    assert "not a regular file" in reasons[f"{store.entries[1].name}.json"]
    assert "did not finish" in reasons[".autotune_x1.tmp"]
    assert reasons["notes.txt"] == "no name of a result"
    assert "named for" in reasons[f"{'0' * 24}.json"]
    assert "cublas_version is 13.2.0, here it is 13.1.0" in reasons[other]
    assert "not the environment of its directory" in reasons["f" * 16]
    assert "not a name" in reasons["other"]
    assert len(reasons) == 8


def test_a_field_that_could_not_be_found_out_is_never_published(tmp_path: Path) -> None:
    """FlashInfer wrote `unknown`; that it means an absence only the host can say."""
    absent = a_host(cudnn_frontend_version=ABSENT)
    install(tmp_path, a_store([16], absent))
    assert len(collect(tmp_path, absent).stores) == 1
    with pytest.raises(ProbeError, match="cudnn_frontend_version"):
        collect(tmp_path, a_host(cudnn_frontend_version=undetermined("importing cudnn fails")))
    left_out = collect(tmp_path, a_host()).left_out
    assert "cudnn_frontend_version is unknown, here it is 1.26.0" in left_out[0].why


def test_a_tuning_without_a_winner_has_failed(tmp_path: Path) -> None:
    with pytest.raises(CollectError, match="no winner"):
        require_winners(collect(tmp_path, a_host()))
    store = a_store([16])
    entries = install(tmp_path, store).directory / "entries"
    require_winners(collect(tmp_path, a_host()))
    (entries / f"{store.entries[0].name}.json").unlink()
    with pytest.raises(CollectError, match="trtllm_utils"):
        require_winners(collect(tmp_path, a_host()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flashinfer_version", "0.7.2.post1"),
        ("cuda_version", "13.1"),
        ("cublas_version", "13.1.1"),
        ("cudnn_version", "91502"),
        ("cudnn_frontend_version", "1.28.0"),
        ("gpu", "NVIDIA H200 NVL"),
    ],
)
def test_every_field_is_equal_or_the_store_is_refused_by_its_name(field: str, value: str) -> None:
    """The last is B37: FlashInfer's results are keyed on the product's name, even of one chip."""
    store, built = a_store([16]), a_host()
    assert match_store(store, built, built).accepted
    for host in (a_host(**{field: value}), a_host(**{field: ABSENT}), a_host(**{field: undetermined("no idea")})):
        assert differs(match_store(store, built, host)) == [field]
        assert field in differs(match_store(a_store([16], host) if host.fields[field].known else store, host, built))


def test_absent_equals_absent_and_what_could_not_be_found_out_equals_nothing() -> None:
    absent = a_host(cudnn_version=ABSENT)
    assert match_store(a_store([16], absent), absent, absent).accepted
    unknown = a_host(cudnn_version=undetermined("no idea"))
    assert differs(match_store(a_store([16], absent), unknown, unknown)) == ["cudnn_version"]


def test_the_same_compiler_under_another_installer_is_relocated_and_another_one_is_refused_by_its_package() -> None:
    store, built, host = a_store([16], measure_execution_mode="eager"), a_host(), a_host(**{DSL: "cpython-312;uv"})
    assert match_store(store, built, host).accepted
    moved = relocated(store, host)
    assert moved.environment == host.written() | {"measure_execution_mode": "eager", "cache_schema": "v2"}
    assert moved.env_hash != store.env_hash
    assert (moved.entries, moved.content) == (store.entries, store.content)
    assert differs(match_store(store, built, host, strict=True)) == [DSL]
    other = a_host(stack=changed(STACK, content="sha256:" + "9" * 64), **{DSL: "cpython-312;uv"})
    assert differs(match_store(store, built, other)) == ["package nvidia-cutlass-dsl"]
    missing = a_host(stack=replace(STACK, wheels={}))
    assert differs(match_store(store, built, missing)) == ["package nvidia-cutlass-dsl"]
    unknown = a_host(stack=changed(STACK, content=""))
    assert differs(match_store(store, unknown, unknown)) == ["package nvidia-cutlass-dsl"]


def test_another_python_is_held_to_what_is_the_same_for_every_python() -> None:
    store, built = a_store([16]), a_host()
    other = replace(changed(STACK, content="sha256:" + "9" * 64), python="cpython-311-x86_64-linux-gnu")
    assert match_store(store, built, a_host(stack=other)).accepted
    assert differs(match_store(store, built, a_host(stack=changed(other, portable="sha256:" + "8" * 64))))
    assert differs(match_store(store, built, a_host(stack=changed(other, version="4.8.1"))))
    assert "python.abi" in differs(match_store(store, built, a_host(stack=other), strict=True))


@pytest.mark.parametrize(
    ("version", "fits"), [("0.1.15.post2", True), ("0.1.16", True), ("0.1.15", False), ("0.2.0", False), ("", False)]
)
def test_tvm_ffi_is_of_the_same_series_and_not_older(version: str, fits: bool) -> None:
    host = a_host(stack=replace(STACK, tvm_ffi=version))
    assert match_store(a_store([16]), a_host(), host).accepted == fits


def test_a_store_that_is_not_of_the_environment_that_its_entry_states_is_refused() -> None:
    assert "store gpu" in differs(match_store(a_store([16], a_host(gpu="NVIDIA B200")), a_host(), a_host()))


def test_what_a_host_is_survives_its_json_form() -> None:
    host = a_host(cudnn_version=ABSENT, gpu=undetermined("none is visible"))
    reader = Reader()
    assert parse_tuning_host(json.loads(json.dumps(host.to_json())), "host", reader) == host
    assert reader.problems == []
    parse_tuning_host({"fields": {"gpu": 3}, "stack": {"wheels": {"a": {}}}}, "host", reader)
    text = "\n".join(reader.problems)
    for path in ("host.fields.gpu", "host.stack.wheels.a.version", "host.stack.python", "host.stack.tvm_ffi"):
        assert path in text


def test_results_that_are_there_stay_and_damaged_ones_are_set_aside(tmp_path: Path) -> None:
    ours, theirs = a_store([16, 32, 64]), a_store([16], tactic=7)
    entries = install(tmp_path, theirs).directory / "entries"
    torn = entries / f"{ours.entries[1].name}.json"
    torn.write_bytes(b'{"key": "half')
    placed = install(tmp_path, ours)
    assert (placed.theirs, placed.kept) == ((ours.entries[0].name,), ())
    assert placed.written == (ours.entries[1].name, ours.entries[2].name)
    assert (entries / placed.set_aside[0]).read_bytes() == b'{"key": "half'
    assert verify_entry(ours.entries[0].name, (entries / f"{ours.entries[0].name}.json").read_bytes()).tactic == 7
    assert accepted(tmp_path, ours) == ()
    again = install(tmp_path, ours)
    assert (again.written, len(again.kept), again.set_aside) == ((), 2, ())


def test_a_damaged_environment_document_is_written_anew_and_a_bad_place_refused(tmp_path: Path) -> None:
    store = a_store([16])
    manifest = install(tmp_path, store).directory / "manifest.json"
    manifest.write_bytes(b"{}")
    assert install(tmp_path, store).set_aside == (".damaged-manifest.json",)
    assert parse_store_environment(manifest.read_bytes(), store.env_hash) == dict(store.environment)
    (tmp_path / "v2").chmod(0o777)
    with pytest.raises(TrustError):
        install(tmp_path, store)
    with pytest.raises(TrustError):
        collect(tmp_path, a_host())


def test_nothing_is_written_if_one_result_is_not_what_its_name_says(tmp_path: Path) -> None:
    store = a_store([16, 32])
    wrong = replace(store, entries=(store.entries[0], replace(store.entries[1], data=store.entries[0].data)))
    with pytest.raises(IntegrityError):
        install(tmp_path / "root", wrong)
    assert not (tmp_path / "root").exists()


def test_a_group_uses_the_same_results_or_none(tmp_path: Path) -> None:
    store = a_store([16, 32])
    digests = []
    for rank in range(3):
        install(tmp_path / str(rank), store)
        digests.append(content_digest(tmp_path / str(rank), store.environment))
    assert digests == [store.content] * 3
    assert group_may_use(digests)
    (tmp_path / "1" / "v2" / store.env_hash / "entries" / f"{store.entries[0].name}.json").write_bytes(b"torn")
    assert content_digest(tmp_path / "1", store.environment) not in ("", store.content)
    none = content_digest(tmp_path / "none", store.environment)
    for others in ([*digests, content_digest(tmp_path / "1", store.environment)], [*digests, none], [none, none], []):
        assert not group_may_use(others)
    other = relocated(store, a_host(**{DSL: "cpython-312;uv"}))
    install(tmp_path / "uv", other)
    assert content_digest(tmp_path / "uv", other.environment) == store.content


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from tunings import a_store
from kcache.kinds.autotune_v2_install import install
sizes = [int(text) for text in sys.argv[3].split(",")]
while not Path(sys.argv[2], "go").exists():
    pass
install(Path(sys.argv[2], "root"), a_store(sizes))
"""

HALF = """
import sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from tunings import a_store
from kcache import fsops
from kcache.kinds.autotune_v2_install import install
store = a_store([1])
directory = install(Path(sys.argv[2], "root"), store).directory / "entries"
def slowly():
    yield store.entries[0].data[:40]
    print("half", flush=True)
    time.sleep(600)
fsops.write_stream(directory, store.entries[0].name + ".json", slowly(), expected_size=None, expected_sha256=None)
"""


def test_a_writer_is_killed_while_saving_then_four_merge_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    """B36."""
    tests = str(Path(__file__).parents[1])
    killed = subprocess.Popen([sys.executable, "-c", HALF, tests, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "half\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    entries = tmp_path / "root" / "v2" / a_store([1]).env_hash / "entries"
    assert any(name.startswith(".tmp-") for name in os.listdir(entries))  # noqa: PTH208
    torn = {f"{an_entry(m).name}.json": an_entry(m).data[:31] for m in range(2, 200)}
    for name, data in torn.items():  # writers that rename nothing were killed, too
        (entries / name).write_bytes(data)
    parts = [range(1, 80), range(40, 120), range(60, 200), range(2, 200, 3)]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, tests, str(tmp_path), ",".join(map(str, part))]) for part in parts]
    time.sleep(0.5)
    (tmp_path / "go").touch()
    while any(writer.poll() is None for writer in writers):  # whoever reads meanwhile finds each file whole or as it was
        for path in entries.glob("[0-9a-f]*.json"):
            with suppress(FileNotFoundError):
                data = path.read_bytes()
                assert data == torn.get(path.name) or verify_entry(path.stem, data)
    assert [writer.wait(timeout=120) for writer in writers] == [0] * 4
    found = collect(tmp_path / "root", a_host())
    assert {entry.key for entry in found.stores[0].entries} == {key_of(m)[0] for part in parts for m in part}
    assert all(".tmp-" in one.path or ".damaged-" in one.path for one in found.left_out)


def test_the_hash_is_of_ascii_text() -> None:
    assert environment_hash({"gpu": "NVIDIA GB10™"}) == environment_hash({"gpu": "NVIDIA GB10™", "cache_schema": "v2"})
