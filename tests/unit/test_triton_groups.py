"""Triton programs: moved with their group's paths written anew, whole or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kcache.errors import IntegrityError, TrustError
from kcache.kinds.triton_groups import (
    Facts,
    collect_groups,
    found_by_triton,
    install_group,
    match_group,
    read_group,
    switches_of,
    triton_cache_directory,
)

DIRECTORY = "EPDOF2SDJC7CBWLPST6TBJXPD66ZP4F4HHXPEUPFT3MMXC5BTZJQ"
NAME = "_route_topk_kernel.json"
FILES = {NAME: b"{}", "_route_topk_kernel.cubin": b"\x7fELF", "_route_topk_kernel.ptx": b"//"}


def put(cache: Path) -> Path:
    here = cache / DIRECTORY
    here.mkdir(parents=True)
    for name, data in FILES.items():
        (here / name).write_bytes(data)
    children = {name: str(here / name) for name in FILES}
    (here / f"__grp__{NAME}").write_text(json.dumps({"child_paths": children}))
    return here


def test_the_cache_is_where_triton_looks_for_it() -> None:
    assert triton_cache_directory({"TRITON_CACHE_DIR": "/t", "TRITON_HOME": "/x", "HOME": "/h"}) == "/t"
    assert triton_cache_directory({"TRITON_HOME": "/x", "HOME": "/h"}) == "/x/.triton/cache"
    assert triton_cache_directory({"HOME": "/h"}) == "/h/.triton/cache"
    with pytest.raises(IntegrityError):
        triton_cache_directory({})


def test_a_copied_program_is_not_found_and_an_installed_one_is(tmp_path: Path) -> None:
    here = put(tmp_path / "farm")
    group = read_group(tmp_path / "farm", DIRECTORY, NAME)
    assert group.files == FILES
    there = tmp_path / "home" / ".triton" / "cache"
    assert install_group(there, group, timeout=1)
    for path in (tmp_path / "farm").rglob("*"):
        if path.is_file():
            path.unlink()
    assert not found_by_triton(here, NAME)
    assert found_by_triton(there / DIRECTORY, NAME)
    assert read_group(there, DIRECTORY, NAME) == group
    children = json.loads((there / DIRECTORY / f"__grp__{NAME}").read_text())["child_paths"]
    assert children == {name: str(there / DIRECTORY / name) for name in FILES}
    assert not install_group(there, group, timeout=1)


def test_a_group_with_the_farms_paths_is_written_anew(tmp_path: Path) -> None:
    put(tmp_path / "farm")
    group = read_group(tmp_path / "farm", DIRECTORY, NAME)
    (tmp_path / "farm").rename(tmp_path / "moved")
    assert not found_by_triton(tmp_path / "moved" / DIRECTORY, NAME)
    assert install_group(tmp_path / "moved", group, timeout=1)
    assert found_by_triton(tmp_path / "moved" / DIRECTORY, NAME)


def test_what_is_not_finished_is_left_out_with_the_reason(tmp_path: Path) -> None:
    here = put(tmp_path)
    (here / "_route_topk_kernel.cubin").unlink()
    other = "A" * 52
    (tmp_path / other).mkdir()
    found, left_out = collect_groups(tmp_path, {DIRECTORY: NAME, other: NAME, "../x": NAME})
    assert not found
    assert sorted(item.path for item in left_out) == sorted([DIRECTORY, other, "../x"])
    assert any("_route_topk_kernel.cubin is missing" in item.why for item in left_out)


@pytest.mark.parametrize("children", [{"../../x": "/x"}, {"": "/x"}, {}, ["x"], {"..": "/x"}])
def test_a_group_that_names_anything_outside_is_refused(tmp_path: Path, children: object) -> None:
    here = put(tmp_path)
    (here / f"__grp__{NAME}").write_text(json.dumps({"child_paths": children}))
    with pytest.raises(IntegrityError):
        read_group(tmp_path, DIRECTORY, NAME)


def test_a_linked_file_or_directory_is_refused(tmp_path: Path) -> None:
    here = put(tmp_path / "farm")
    group = read_group(tmp_path / "farm", DIRECTORY, NAME)
    there = tmp_path / "there"
    there.mkdir()
    (there / DIRECTORY).symlink_to(here)
    with pytest.raises(TrustError):
        install_group(there, group, timeout=1)
    (here / NAME).rename(tmp_path / "elsewhere")
    (here / NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrustError):
        read_group(tmp_path / "farm", DIRECTORY, NAME)


BUILT = Facts(triton="3.7.1 sha256:1", python="cpython-311", package="98", gpu="12.0", switches={"DISABLE_PTXAS_OPT": "1"})


def test_programs_of_an_equal_triton_are_taken() -> None:
    assert match_group(BUILT, BUILT).accepted


@pytest.mark.parametrize(
    ("host", "field"),
    [
        (replace(BUILT, triton="3.7.1 sha256:2"), "triton"),
        (replace(BUILT, triton=""), "triton"),
        (replace(BUILT, python="cpython-312"), "python.abi"),
        (replace(BUILT, package="97"), "b12x.package"),
        (replace(BUILT, gpu="12.1"), "gpu.capability"),
        (replace(BUILT, switches={}), "env DISABLE_PTXAS_OPT"),
        (replace(BUILT, switches={"DISABLE_PTXAS_OPT": "1", "LLVM_X": "1"}), "env LLVM_X"),
    ],
)
def test_another_one_is_refused_by_name(host: Facts, field: str) -> None:
    assert [check.field for check in match_group(BUILT, host).differs] == [field]


def test_an_unknown_triton_equals_nothing() -> None:
    unknown = replace(BUILT, triton="")
    assert not match_group(unknown, unknown).accepted


def test_places_are_no_switches() -> None:
    environ = {"TRITON_CACHE_DIR": "/x", "HOME": "/h", "TRITON_DEFAULT_FP_FUSION": "0", "MLIR_ENABLE_DUMP": "1"}
    assert switches_of(environ) == {"MLIR_ENABLE_DUMP": "1", "TRITON_DEFAULT_FP_FUSION": "0"}
