"""The record of a boot, what was built since, and its metrics."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kcache.errors import NotFoundError
from kcache.report import HIT, MISS, KindReport, RestoreReport
from kcache.workflows.boot import BOOT, BUILD_LOG, KEPT, note_boot
from kcache.workflows.boot_metrics import textfile
from kcache.workflows.boot_report import BootReport, Build, builds_since, find_boot, read_boot, tell_boot

HIT_REPORT = RestoreReport(
    status=HIT, seconds=0.1, compiles_avoided=2, seconds_saved=2732.4, bytes_downloaded=10, http_requests=3
)


def line(name: str, seconds: float, time: float, toolchain: str = "nvcc") -> dict[str, Any]:
    return {"toolchain": toolchain, "name": name, "seconds": seconds, "pid": 1, "time": time}


@pytest.mark.parametrize(
    ("log", "libraries", "expected"),
    [
        ([], {}, []),
        ([line("a", 30.0, 150)], {"a": 150.0}, ["a"]),
        ([line("a", 0.02, 150)], {"a": 50.0}, []),  # ninja found nothing to do
        ([line("a", 0.2, 150)], {"a": 150.0}, ["a"]),  # ccache
        ([line("a", 30.0, 90)], {"a": 90.0}, []),  # an earlier boot's
        ([line("k", 30.0, 90, "cute-dsl")], {}, []),
        ([line("a", 30.0, 150), line("a", 0.02, 160)], {"a": 150.0}, ["a"]),
        ([line("prebuild[3 modules]", 40.0, 150)], {}, ["prebuild[3 modules]"]),
        ([line("k", 0.4, 150, "cute-dsl")], {}, ["k"]),  # kernels are logged only when they are compiled
        ([], {"old": 50.0, "new": 150.0}, ["new"]),  # a FlashInfer without a log
    ],
)
def test_what_was_really_built(log: list[dict[str, Any]], libraries: dict[str, float], expected: list[str]) -> None:
    assert [build.name for build in builds_since(100.0, log, libraries, ())] == expected


def report(*builds: Build, restore: RestoreReport = HIT_REPORT, **words: Any) -> BootReport:
    return BootReport(at=100.0, server=("vllm",), restore=restore.to_json(), builds=builds, logged=True, **words)


def test_a_build_of_a_warm_up_is_not_one_while_serving() -> None:
    builds = builds_since(100.0, [line("a", 9.0, 150), line("b", 9.0, 160)], {}, ["a"])
    assert [(build.name, build.warmup) for build in builds] == [("a", True), ("b", False)]
    assert report(*builds).status == "built"
    assert report(builds[0]).status == "warmed-up"
    assert report().status == "nothing-built"


def test_what_is_missing_is_what_the_farm_can_build() -> None:
    warmup = {"modules": [{"name": "topk", "status": "built"}, {"name": "page", "status": "present"}]}
    found = report(Build(name="cascade"), Build(name="k", toolchain="cute-dsl"), restore=replace(HIT_REPORT, warmup=warmup))
    assert found.missing == {"modules": ("cascade", "topk"), "kernels": ("k",)}


def samples(text: str) -> dict[str, list[Any]]:
    return {family.name: family.samples for family in text_string_to_metric_families(text)}


def test_the_textfile_is_what_prometheus_reads() -> None:
    why = 'sampling: "quoted", a \\ and\na line feed'
    kinds = {"sampling": KindReport(status=MISS, reasons=(why,))}
    restore = replace(
        HIT_REPORT, status=MISS, kinds=kinds, warmup={"modules": [{"name": "a", "status": "built", "seconds": 9.5}]}
    )
    found = samples(textfile(report(Build(name="cascade", seconds=12.5), restore=restore)))
    assert found["kcache_restore_misses"][0].labels == {"kind": "sampling", "reason": why}
    assert {s.labels["status"]: s.value for s in found["kcache_restore_status"]} == {
        "hit": 0,
        "partial": 0,
        "miss": 1,
        "error": 0,
    }
    values = {name: family[0].value for name, family in found.items() if len(family) == 1}
    expected = {
        "kcache_boot_time_seconds": 100,
        "kcache_restore_hits": 0,
        "kcache_restore_downloaded_bytes": 10,
        "kcache_restore_http_requests": 3,
        "kcache_restore_seconds": 0.1,
        "kcache_compiler_runs_avoided": 2,
        "kcache_saved_seconds": 2732.4,
        "kcache_warmup_modules": 1,
        "kcache_warmup_seconds": 9.5,
        "kcache_built_since_boot": 1,
        "kcache_built_since_boot_seconds": 12.5,
        "kcache_built_since_boot_info": 1,
    }
    assert values | expected == values


@given(st.text())
def test_any_reason_comes_through_the_textfile(reason: str) -> None:
    if len(reason.splitlines()) > 1 and "\n" not in reason:
        return  # the parser splits where Prometheus does not
    reason = "".join(letter for letter in reason if letter == "\n" or letter.isprintable())
    found = samples(textfile(report(restore=replace(HIT_REPORT, reasons=(reason,)))))
    assert found["kcache_restore_misses"][0].labels["reason"] == reason


def test_a_boot_is_written_down_and_read_again(tmp_path: Path) -> None:
    told = note_boot(replace(HIT_REPORT, cache_root=str(tmp_path)), ["serve", "m"], {"HOME": str(tmp_path)})
    assert set(told.env) == {BOOT, BUILD_LOG}
    tell_boot({"modules": [{"name": "page", "status": "built"}]}, told.env)
    now = os.stat(told.env[BOOT]).st_mtime + 5  # noqa: PTH116
    lines = [line("page", 9.0, now), line("cascade", 8.0, now)]
    Path(told.env[BUILD_LOG]).write_text("".join(json.dumps(text) + "\n" for text in lines) + '{"torn')
    found = read_boot(find_boot(tmp_path, {}), logged=True)
    assert (found.server, found.restore["status"]) == (("serve",), HIT)
    assert [(build.name, build.warmup) for build in found.builds] == [("cascade", False), ("page", True)]


def test_a_new_boot_of_the_same_process_id_begins_anew(tmp_path: Path) -> None:
    told = note_boot(replace(HIT_REPORT, cache_root=str(tmp_path)), [], {})
    Path(told.env[BUILD_LOG]).write_text("old\n")
    note_boot(replace(HIT_REPORT, cache_root=str(tmp_path)), [], {})
    assert not Path(told.env[BUILD_LOG]).exists()


def test_a_log_that_the_host_chose_is_kept(tmp_path: Path) -> None:
    told = note_boot(replace(HIT_REPORT, cache_root=str(tmp_path)), [], {BUILD_LOG: "/var/log/builds"})
    assert told.env[BUILD_LOG] == "/var/log/builds"


def test_where_nothing_can_be_written_the_server_starts_without_a_record(tmp_path: Path) -> None:
    (tmp_path / "v1").write_text("a file")
    given = replace(HIT_REPORT, cache_root=str(tmp_path), env={"A": "b"})
    assert note_boot(given, [], {}).env == {"A": "b"}


def test_old_records_go(tmp_path: Path) -> None:
    room = tmp_path / "v1" / "boots"
    room.mkdir(parents=True)
    for number in range(KEPT + 3):
        (room / f"host-{number}.json").write_text("{}")
        os.utime(room / f"host-{number}.json", (number, number))
    (room / "host-0.builds").write_text("")
    note_boot(replace(HIT_REPORT, cache_root=str(tmp_path)), [], {})
    left = {path.name for path in room.iterdir()}
    assert len(left) == KEPT
    assert not left & {"host-0.json", "host-0.builds", "host-3.json"}


def test_no_record_is_one_message_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="kcache restore"):
        find_boot(tmp_path, {})
    with pytest.raises(NotFoundError, match="not the record"):
        read_boot(tmp_path / "none", logged=True)
