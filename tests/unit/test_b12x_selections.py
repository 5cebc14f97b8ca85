"""b12x's selection cache: what b12x would refuse is not collected and not installed; the user's choices stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kcache.errors import IntegrityError, TrustError
from kcache.key import known
from kcache.kinds.b12x_selections import (
    Selections,
    collect_selections,
    identity_of,
    install_selections,
    match_selections,
    package_fact,
    parse_selections,
    selections_directory,
    serialise,
)

RECORD: dict[str, Any] = {
    "assignment": {"backend": "dynamic", "dynamic_tile_m": 16},
    "config": {"backend": "dynamic", "w4a16_tile_config": None},
    "coverage": {"cartesian_count": 40, "legal_count": 20, "effective_count": 14, "measured_count": 14},
    "programs": [["cute", "ab" * 32], ["triton", "cd" * 32]],
}
IDENTITY = identity_of((12, 0), 188, {})


def selections(**records: Any) -> Selections:
    return Selections(identity=IDENTITY, records=records or {"q": RECORD})


def test_one_chip_under_two_product_names_has_one_identity() -> None:
    """Case B37. b12x reads the name and leaves it out; `tests/real/test_b12x_package_builds.py` asks b12x itself."""
    assert IDENTITY == {
        "schema_version": 6,
        "tuning_cache_version": 1,
        "measurement": "stream_gated_events_v1",
        "namespace": {},
        "compute_capability": [12, 0],
        "sm_count": 188,
    }
    assert identity_of((12, 0), 170, {}) != IDENTITY
    assert identity_of((12, 0), 188, {"B12X_TUNING_CACHE_VERSION": "2"}) != IDENTITY


@pytest.mark.parametrize("text", ["0", "-1", "x", ""])
def test_a_tuning_version_that_b12x_refuses_is_told(text: str) -> None:
    with pytest.raises(IntegrityError, match="selection cache"):
        identity_of((12, 0), 188, {"B12X_TUNING_CACHE_VERSION": text})


def test_choices_lie_below_the_compile_cache() -> None:
    assert selections_directory("/c") == "/c/preparation"


def test_what_is_written_is_read_back() -> None:
    mine = selections()
    assert parse_selections(serialise(mine), mine.name) == mine


def changed(**parts: Any) -> dict[str, Any]:
    return {**RECORD, **parts}


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (changed(more=1), "fields differ"),
        ({"assignment": {}}, "fields differ"),
        ([], "fields differ"),
        (changed(assignment=[]), "plain values"),
        (changed(config={"": 1}), "plain values"),
        (changed(coverage={}), "other fields"),
        (changed(coverage=RECORD["coverage"] | {"legal_count": -1}), "whole numbers"),
        (changed(coverage=RECORD["coverage"] | {"legal_count": True}), "whole numbers"),
        (changed(coverage=RECORD["coverage"] | {"measured_count": 13}), "complete race"),
        (changed(coverage=dict.fromkeys(RECORD["coverage"], 1)), "complete race"),
        (changed(programs={}), "dialect and key"),
        (changed(programs=[["nvcc", "x"]]), "dialect and key"),
        (changed(programs=[["cute", ""]]), "dialect and key"),
    ],
)
def test_a_record_that_b12x_refuses_is_refused_with_the_reason(record: Any, why: str) -> None:
    data = json.dumps({"identity": IDENTITY, "records": {"q": record}}).encode()
    with pytest.raises(IntegrityError, match=why):
        parse_selections(data, selections().name)


@pytest.mark.parametrize(
    ("document", "why"),
    [
        ([], "identity and records"),
        ({"identity": IDENTITY, "records": {}, "more": 1}, "identity and records"),
        ({"identity": {}, "records": {}}, "other fields"),
        ({"identity": IDENTITY | {"schema_version": 7}, "records": {}}, "another schema"),
        ({"identity": IDENTITY | {"sm_count": 170}, "records": {}}, "another identity"),
        ({"identity": IDENTITY, "records": []}, "no mapping"),
    ],
)
def test_a_file_that_b12x_refuses_is_refused_with_the_reason(document: Any, why: str) -> None:
    with pytest.raises(IntegrityError, match=why):
        parse_selections(json.dumps(document).encode(), selections().name)


def test_collecting_leaves_out_what_is_none_with_the_reason(tmp_path: Path) -> None:
    mine = selections()
    (tmp_path / mine.name).write_bytes(serialise(mine))
    (tmp_path / f"{'0' * 64}.json").write_bytes(serialise(mine))
    (tmp_path / f"{'1' * 64}.json").write_text("{")
    (tmp_path / "tmpx.tmp").touch()
    (tmp_path / mine.name.replace(".json", ".lock")).touch()
    found, left_out = collect_selections(tmp_path)
    assert found == (mine,)
    whys = {item.path: item.why for item in left_out}
    assert len(whys) == 3
    assert "another identity" in whys[f"{'0' * 64}.json"]
    assert "not JSON" in whys[f"{'1' * 64}.json"]
    assert collect_selections(tmp_path / "nowhere") == ((), ())


def test_choices_are_merged_and_the_hosts_own_stay(tmp_path: Path) -> None:
    theirs = changed(assignment={"backend": "micro"})
    assert install_selections(tmp_path, selections(a=theirs), timeout=1).added == ("a",)
    merged = install_selections(tmp_path, selections(a=RECORD, b=RECORD), timeout=1)
    assert (merged.added, merged.kept) == (("b",), ("a",))
    (found,), _ = collect_selections(tmp_path)
    assert found.records == {"a": theirs, "b": RECORD}
    before = (tmp_path / found.name).stat()
    assert install_selections(tmp_path, selections(b=RECORD), timeout=1).added == ()
    assert (tmp_path / found.name).stat() == before


def test_programs_are_named_as_they_are_here(tmp_path: Path) -> None:
    install_selections(tmp_path, selections(), timeout=1, renamed={"ab" * 32: "ef" * 32})
    (found,), _ = collect_selections(tmp_path)
    assert found.records["q"]["programs"] == [["cute", "ef" * 32], ["triton", "cd" * 32]]


def test_a_file_that_b12x_refuses_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / selections().name
    path.write_text("{")
    with pytest.raises(IntegrityError):
        install_selections(tmp_path, selections(), timeout=1)
    assert path.read_text() == "{"


def test_a_linked_file_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(serialise(selections(a=RECORD)))
    directory = tmp_path / "preparation"
    directory.mkdir()
    (directory / selections().name).symlink_to(elsewhere)
    with pytest.raises(TrustError):
        install_selections(directory, selections(a=RECORD), timeout=1)
    assert elsewhere.read_bytes() == serialise(selections(a=RECORD))


def test_choices_of_another_b12x_are_refused_by_name() -> None:
    """b12x raises when a choice is not legal in it, and no field of the identity names the package."""
    decision = match_selections(selections(), IDENTITY, built_with=known("1"), package=known("2"))
    assert [check.field for check in decision.differs] == ["b12x.package"]
    assert match_selections(selections(), IDENTITY, built_with=known("1"), package=known("1")).accepted
    unknown = match_selections(selections(), IDENTITY, built_with=package_fact(""), package=package_fact(""))
    assert not unknown.accepted


def test_choices_for_another_gpu_are_refused_by_name() -> None:
    other = identity_of((12, 1), 48, {"B12X_TUNING_CACHE_VERSION": "3"}, {"model": "m"})
    decision = match_selections(selections(), other, built_with=known("1"), package=known("1"))
    assert [check.field for check in decision.differs] == [
        "selections.compute_capability",
        "selections.namespace",
        "selections.sm_count",
        "selections.tuning_cache_version",
    ]
