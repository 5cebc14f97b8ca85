"""FlashInfer's JSON files of tuning results: what is collected, what matches (B32), and merging into one that is in use (B36)."""

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
from tunings import ABSENT, STACK, a_file, a_host, file_document, key_of

from kcache.errors import IntegrityError, LockTimeoutError, ProbeError, TrustError
from kcache.fsops import locked
from kcache.key import undetermined
from kcache.kinds.autotune import DSL
from kcache.kinds.autotune_v1 import (
    KEPT,
    MERGED,
    REFUSED,
    WRITTEN,
    Selection,
    collect_files,
    content_digest,
    install,
    match_file,
    merge,
    parse_file,
    refuse_foreign,
    relocated,
)
from kcache.values import replace


def differs(decision: Any) -> list[str]:
    return [check.field for check in decision.differs]


def keys(*sizes: int) -> set[str]:
    return {key_of(m)[0] for m in sizes}


def test_a_file_says_what_it_was_tuned_in_how_was_measured_and_by_how_much_each_winner_won() -> None:
    file = a_file([16])
    result = file.results[key_of(16)[0]]
    assert file.metadata["gpu"] == "NVIDIA H200"
    assert (result.operation, result.runner, result.tactic, result.policy) == (
        "bf16_gemm",
        "CublasltBf16GemmRunner",
        3,
        (1, False),
    )
    assert result.selection == Selection(time_ms=0.25, runner_up_ms=0.3, margin=0.2, candidates=8)
    old = parse_file(json.dumps({"_metadata": {}, key_of(16)[0]: ["Runner", [128, 2]]}).encode()).results[key_of(16)[0]]
    assert (old.policy, old.selection, old.tactic, old.passed_over) == (None, None, [128, 2], False)


def test_an_index_into_cudnns_plans_is_known_to_have_no_effect() -> None:
    document = {"_metadata": {}, key_of(16)[0]: ["CudnnBf16GemmRunner", 3], key_of(32)[0]: ["CudnnBf16GemmRunner", "plan"]}
    results = parse_file(json.dumps(document).encode()).results
    assert [results[key_of(m)[0]].passed_over for m in (16, 32)] == [True, False]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ([], "no JSON object"),
        ({key_of(16)[0]: ["Runner", 1]}, "_metadata"),
        ({"_metadata": "H200"}, "_metadata"),
        ({"_metadata": {}, "_records": []}, "_records"),
        ({"_metadata": {}, key_of(16)[0]: {"runner": "x"}}, "no result"),
        ({"_metadata": {}, key_of(16)[0]: ["Runner"]}, "no result"),
        ({"_metadata": {}, key_of(16)[0]: ["Runner", 1, 2]}, "no result"),
        ({"_metadata": {}, key_of(16)[0]: ["Runner", 1, [], {"time_ms": None}]}, "no selection"),
        ({"_metadata": {}, "metadata": ["Runner", 1]}, "no result"),
    ],
)
def test_a_file_that_is_none_is_refused(document: Any, reason: str) -> None:
    with pytest.raises(IntegrityError, match=reason):
        parse_file(json.dumps(document).encode())


def test_a_torn_file_is_refused() -> None:
    data = a_file([16, 32]).encode()
    for end in (0, 1, len(data) // 2, len(data) - 1):
        with pytest.raises(IntegrityError, match="only a part"):
            parse_file(data[:end])


def test_files_of_this_environment_are_collected_and_all_others_left_out_with_a_reason(tmp_path: Path) -> None:
    here = a_host(cudnn_version=ABSENT)
    config = tmp_path / ("a" * 64)
    config.mkdir()
    (config / "autotune_configs.json").write_bytes(a_file([16], here).encode())
    (config / "owner.json").write_bytes(a_file([32], here, cudnn_frontend_version="*").encode())
    (config / "torn.json").write_bytes(a_file([16], here).encode()[:99])
    (config / "gpu.json").write_bytes(a_file([16], a_host(gpu="NVIDIA B200", cudnn_version=ABSENT)).encode())
    (config / "uv.json").write_bytes(
        a_file([16], replace(here, fields={**here.fields, DSL: a_host(**{DSL: "uv"}).fields[DSL]})).encode()
    )
    (config / "unknown.json").write_bytes(a_file([16], here, cublas_version="unknown").encode())
    (config / "none.json").write_bytes(a_file([], here).encode())
    (config / ".autotuner_x.tmp").write_bytes(b"{")
    (config / "link.json").symlink_to("torn.json")
    deep = config / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "deep.json").write_bytes(a_file([16], here).encode())
    collected, left_out = collect_files(tmp_path, here, depth=3)
    assert [one.path for one in collected] == [f"{'a' * 64}/autotune_configs.json", f"{'a' * 64}/owner.json"]
    assert collected[1].file.wildcards == {"cudnn_frontend_version"}
    reasons = {one.path.rpartition("/")[2]: one.why for one in left_out}
    assert "only a part" in reasons["torn.json"]
    assert "gpu: wanted NVIDIA B200" in reasons["gpu.json"]
    assert DSL in reasons["uv.json"]
    assert "cublas_version: wanted could not be found out" in reasons["unknown.json"]
    assert reasons["none.json"] == "no result is in it"
    assert "did not finish" in reasons[".autotuner_x.tmp"]
    assert "not a regular file" in reasons["link.json"]
    assert len(reasons) == 7
    assert collect_files(tmp_path, here)[0][-1].path.endswith("/b/c/deep.json")


def test_a_host_that_does_not_know_itself_publishes_nothing(tmp_path: Path) -> None:
    blind = a_host(gpu=undetermined("no GPU is visible"))
    with pytest.raises(ProbeError, match="gpu"):
        collect_files(tmp_path, blind)
    with pytest.raises(ProbeError, match="gpu"):
        refuse_foreign(a_file([16]), blind)


def test_made_with_another_frontend_it_is_refused_by_the_fields_name_and_nothing_becomes_a_wildcard() -> None:
    """B32: made with cudnn-frontend 1.26, the host has 1.28."""
    file, built = a_file([16]), a_host(cudnn_frontend_version="1.26.0")
    decision = match_file(file, built, a_host(cudnn_frontend_version="1.28.0"))
    assert [check.to_json() for check in decision.differs] == [
        {"field": "cudnn_frontend_version", "rule": "equal", "wanted": "1.26.0", "found": "1.28.0"}
    ]
    moved = relocated(file, a_host(**{DSL: "uv"}))
    assert moved.wildcards == frozenset()
    assert moved.metadata == a_host(**{DSL: "uv"}).written()


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
def test_every_field_is_equal_unless_the_owner_wrote_a_wildcard(field: str, value: str) -> None:
    file, built = a_file([16]), a_host()
    assert match_file(file, built, built).accepted
    for host in (a_host(**{field: value}), a_host(**{field: ABSENT}), a_host(**{field: undetermined("no idea")})):
        assert differs(match_file(file, built, host)) == [field]
        free = a_file([16], **{field: "*"})
        assert match_file(free, built, host).accepted
    assert relocated(free, a_host(**{field: value})).metadata[field] == "*"
    assert differs(match_file(a_file([16], **{field: "unknown"}), built, built)) == [field]


def test_absent_equals_absent_and_unknown_nothing() -> None:
    absent = a_host(cudnn_version=ABSENT)
    assert match_file(a_file([16], absent), absent, absent).accepted
    assert differs(match_file(a_file([16], absent), a_host(), absent)) == ["cudnn_version"]
    blind = a_host(cudnn_version=undetermined("no idea"))
    assert differs(match_file(a_file([16], absent), blind, blind)) == ["cudnn_version"]


def test_the_same_compiler_under_another_installer_is_relocated_and_another_one_refused() -> None:
    file, built, host = a_file([16]), a_host(), a_host(**{DSL: "uv"})
    assert match_file(file, built, host).accepted
    assert differs(match_file(file, built, host, strict=True)) == [DSL]
    assert match_file(file, built, built, strict=True).accepted
    assert relocated(file, host).content == file.content
    other = a_host(stack=replace(STACK, wheels={}))
    assert differs(match_file(file, built, other)) == ["package nvidia-cutlass-dsl"]
    assert match_file(a_file([16], **{DSL: "*"}), built, other).accepted
    assert differs(match_file(a_file([16], **{DSL: "someone else's"}), built, host)) == [DSL]
    assert differs(match_file(a_file([16], **{DSL: "unknown"}), built, host)) == [DSL]


def test_an_older_flashinfer_writes_no_compiler_and_its_files_are_held_to_it_all_the_same() -> None:
    fields = {name: fact for name, fact in a_host().fields.items() if name != DSL}
    old = replace(a_host(), fields=fields)
    file = a_file([16], old)
    assert DSL not in file.metadata
    assert match_file(file, old, old).accepted
    assert differs(match_file(file, old, replace(old, stack=replace(STACK, wheels={})))) == ["package nvidia-cutlass-dsl"]


def test_what_is_in_a_file_stays_and_ours_is_added(tmp_path: Path) -> None:
    path = tmp_path / "config" / "autotune_configs.json"
    assert install(path, a_file([16, 32]), timeout=5).how == WRITTEN
    theirs = replace(a_file([64], tactic=9), records={"sparse": {"a": 1, "b": 2}})
    placed = install(path, theirs, timeout=5)
    assert (placed.how, set(placed.added), placed.theirs) == (MERGED, keys(64), ())
    ours = replace(a_file([16, 64, 128], tactic=5), records={"sparse": {"b": 3, "c": 4}, "other": {}})
    placed = install(path, ours, timeout=5)
    assert (placed.how, set(placed.added), set(placed.theirs)) == (MERGED, keys(128), keys(16, 64))
    now = parse_file(path.read_bytes())
    assert {key: result.tactic for key, result in now.results.items()} == {
        key_of(16)[0]: 3, key_of(32)[0]: 3, key_of(64)[0]: 9, key_of(128)[0]: 5
    }  # fmt: skip
    assert now.records == {"sparse": {"a": 1, "b": 2, "c": 4}, "other": {}}
    before = path.stat()
    assert install(path, ours, timeout=5).how == KEPT
    assert path.stat() == before


def test_a_file_of_another_environment_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "autotune_configs.json"
    data = a_file([16], a_host(gpu="NVIDIA B200")).encode()
    path.write_bytes(data)
    placed = install(path, a_file([32]), timeout=5)
    assert placed.how == REFUSED
    assert "gpu is NVIDIA B200 there" in placed.why
    assert path.read_bytes() == data
    free, placed = merge(a_file([16], gpu="*"), a_file([32]))
    assert (placed.how, free.metadata["gpu"], set(free.results)) == (MERGED, "*", keys(16, 32))


@pytest.mark.parametrize(
    "data",
    [
        b'{"_metadata": {"gpu": "NVID',
        b"[]",
        json.dumps({key_of(16)[0]: ["Runner", 1]}).encode(),
        a_file([16], gpu="unknown").encode(),
    ],
)
def test_what_flashinfer_would_replace_is_set_aside_and_never_deleted(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "autotune_configs.json"
    path.write_bytes(data)
    placed = install(path, a_file([32]), timeout=5)
    assert (placed.how, set(placed.added)) == (WRITTEN, keys(32))
    assert placed.why
    assert (tmp_path / placed.set_aside).read_bytes() == data
    assert set(parse_file(path.read_bytes()).results) == keys(32)


def test_bad_places_and_a_lock_that_is_held_are_refused_in_time(tmp_path: Path) -> None:
    path = tmp_path / "autotune_configs.json"
    install(path, a_file([16]), timeout=5)
    with locked(tmp_path / ".autotune_configs.json.kcache.lock", 5):
        done = subprocess.run(
            [sys.executable, "-c", WRITER, str(Path(__file__).parents[1]), str(tmp_path), "1", "0.2"],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert LockTimeoutError.__name__ in done.stderr
    path.chmod(0o666)
    with pytest.raises(TrustError):
        install(path, a_file([32]), timeout=5)
    path.unlink()
    path.symlink_to("elsewhere")
    with pytest.raises(TrustError):
        install(path, a_file([32]), timeout=5)


def test_the_digest_of_a_group_is_of_the_results_and_not_of_the_place(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    install(one, a_file([16, 32]), timeout=5)
    install(other, a_file([16, 32], a_host(**{DSL: "uv"})), timeout=5)
    assert content_digest(one) == content_digest(other) == a_file([16, 32]).content
    assert a_file([16, 32], tactic=4).content != a_file([16, 32]).content
    install(other, a_file([64], a_host(**{DSL: "uv"})), timeout=5)
    assert content_digest(other) != content_digest(one)
    one.write_bytes(b"torn")
    assert content_digest(one) == content_digest(tmp_path / "missing.json") == ""


def test_the_bytes_are_those_that_flashinfer_writes() -> None:
    """`save_configs`: metadata, records, results in order, and last the digest of all that."""
    file = replace(a_file([32, 16]), records={"sparse": {"a": 1}})
    document = json.loads(file.encode())
    assert list(document) == ["_metadata", "_records", *sorted(keys(16, 32)), "_generation"]
    assert parse_file(file.encode()).encode() == file.encode()
    without = parse_file(json.dumps(file_document([16])).encode())
    assert "_generation" not in json.loads(without.encode())


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from tunings import a_file
from kcache.kinds.autotune_v1 import install
sizes = [int(text) for text in sys.argv[3].split(",")]
while len(sys.argv) < 5 and not Path(sys.argv[2], "go").exists():
    pass
install(Path(sys.argv[2], "autotune_configs.json"), a_file(sizes), timeout=float(sys.argv[4]) if len(sys.argv) > 4 else 60)
"""

HALF = """
import sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from tunings import a_file
from kcache import fsops
data = a_file(list(range(1, 300))).encode()
def slowly():
    yield data[:4000]
    print("half", flush=True)
    time.sleep(600)
with fsops.locked(Path(sys.argv[2], ".autotune_configs.json.kcache.lock"), 5):
    fsops.write_stream(Path(sys.argv[2]), "autotune_configs.json", slowly(), expected_size=None, expected_sha256=None)
"""


@pytest.mark.parametrize("left", ["nothing", "whole", "torn"])
def test_a_writer_is_killed_while_saving_then_four_merge_at_once_and_nothing_is_lost(tmp_path: Path, left: str) -> None:
    """B36. The killed one held the lock; `torn` is what a writer leaves that renames nothing."""
    tests, path = str(Path(__file__).parents[1]), tmp_path / "autotune_configs.json"
    whole = a_file([1000, 1001], tactic=8).encode()
    if left != "nothing":
        path.write_bytes(whole if left == "whole" else whole[:-200])
    killed = subprocess.Popen([sys.executable, "-c", HALF, tests, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "half\n"
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    assert any(name.startswith(".tmp-") for name in os.listdir(tmp_path))  # noqa: PTH208
    parts = [range(1, 80), range(40, 120), range(60, 200), range(2, 200, 3)]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, tests, str(tmp_path), ",".join(map(str, part))]) for part in parts]
    time.sleep(0.5)
    (tmp_path / "go").touch()
    while any(writer.poll() is None for writer in writers):  # whoever reads meanwhile finds it whole, or as it was
        with suppress(FileNotFoundError):
            data = path.read_bytes()
            assert data == whole[:-200] or parse_file(data)
    assert [writer.wait(timeout=120) for writer in writers] == [0] * 4
    now = parse_file(path.read_bytes())
    assert set(now.results) == keys(*{m for part in parts for m in part}, *((1000, 1001) if left == "whole" else ()))
    if left == "whole":
        assert now.results[key_of(1000)[0]].tactic == 8
    if left == "torn":
        assert (tmp_path / ".damaged-autotune_configs.json").read_bytes() == whole[:-200]
