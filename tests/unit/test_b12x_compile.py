"""b12x's compile cache: what is collected, what is left out and why, renaming, and installs that keep what the user has."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from b12x_samples import FARM, files, program, target

from kcache.errors import IntegrityError, LockTimeoutError, TrustError
from kcache.fsops import locked
from kcache.kinds.b12x_compile import (
    accepted,
    collect,
    compile_cache_directory,
    for_target,
    install,
    read_program,
)


def put(root: Path, facts: str = "0", *, manifest: dict[str, Any] | None = None, data: bytes | None = None) -> str:
    key, made, document = files(facts)
    shard = root / key[:2]
    shard.mkdir(parents=True, exist_ok=True)
    (shard / f"{key}.o").write_bytes(made if data is None else data)
    (shard / f"{key}.json").write_text(json.dumps({**document, **(manifest or {})}))
    (shard / f"{key}.lock").touch()
    return key


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({"B12X_COMPILE_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c"),
        ({"B12X_COMPILE_CACHE_DIR": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/b12x/compile"),
        ({"HOME": "/h"}, "/h/.cache/b12x/compile"),
    ],
)
def test_the_cache_is_where_b12x_looks_for_it(environ: dict[str, str], place: str) -> None:
    assert compile_cache_directory(environ) == place


def test_without_a_home_there_is_no_place() -> None:
    with pytest.raises(IntegrityError, match="no place"):
        compile_cache_directory({})


def test_finished_programs_are_collected_with_the_bytes_that_were_verified(tmp_path: Path) -> None:
    keys = sorted(put(tmp_path, facts) for facts in ("a", "b", "c"))
    (tmp_path / "preparation").mkdir()
    found = collect(tmp_path)
    assert sorted(one.key for one in found.programs) == keys
    assert not found.left_out
    assert found.programs[0].kernel == "integration.tp_moe.dynamic"
    assert [one.key for one in collect(tmp_path, only=keys[:1]).programs] == keys[:1]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def swap(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def hard_link(path: Path) -> None:
    os.link(path, path.with_name("again"))


@pytest.mark.parametrize(
    ("suffix", "damage", "why"),
    [
        (".json", Path.unlink, "no manifest"),
        (".o", Path.unlink, "no object"),
        (".o", cut, "the manifest says"),
        (".o", swap, "SHA-256"),
        (".o", link, "a symbolic link"),
        (".json", link, "a symbolic link"),
        (".o", hard_link, "hard links"),
        (".o", lambda path: path.chmod(0o666), "can be written by"),
        (".json", lambda path: path.write_text("{"), "not JSON"),
        (".json", lambda path: path.write_text("[]"), "not a JSON object"),
        (".json", lambda path: path.write_text("{}"), "another key"),
    ],
)
def test_what_is_not_finished_or_not_vouched_for_is_left_out_with_the_reason(
    tmp_path: Path, suffix: str, damage: Callable[[Path], object], why: str
) -> None:
    good, bad = put(tmp_path, "good"), put(tmp_path, "bad")
    damage(tmp_path / bad[:2] / f"{bad}{suffix}")
    found = collect(tmp_path)
    assert [one.key for one in found.programs] == [good]
    reasons = [item.why for item in found.left_out if bad in item.path]
    assert len(reasons) == 1
    assert why in reasons[0]


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        ({"schema": "b12x._lib.compile_manifest.v4"}, "another kind"),
        ({"cache_payload_repr": "()"}, "another key"),
        ({"cache_payload_repr": 3}, "another key"),
        ({"object_bytes": "12"}, "the manifest says"),
        ({"object_sha256": "0" * 64}, "SHA-256"),
    ],
)
def test_a_manifest_that_kcache_does_not_know_is_left_out(tmp_path: Path, manifest: dict[str, Any], why: str) -> None:
    put(tmp_path, manifest=manifest)
    found = collect(tmp_path)
    assert not found.programs
    assert why in found.left_out[0].why


def test_an_object_that_does_not_export_its_key_is_left_out(tmp_path: Path) -> None:
    data = b"\x7fELF of something else"
    put(tmp_path, data=data, manifest={"object_bytes": len(data), "object_sha256": hashlib.sha256(data).hexdigest()})
    assert "does not export" in collect(tmp_path).left_out[0].why


def test_what_is_no_program_is_told_and_a_lock_alone_is_not(tmp_path: Path) -> None:
    key = put(tmp_path)
    (tmp_path / key[:2] / f".{key}.o.x7d2.tmp").write_bytes(b"partial")
    (tmp_path / key[:2] / f"{'0' * 64}.lock").touch()
    found = collect(tmp_path)
    assert len(found.programs) == 1
    assert [item.why for item in found.left_out] == ["not a name that b12x gives a finished program"]


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path) -> None:
    put(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(TrustError):
        collect(tmp_path)
    with pytest.raises(TrustError):
        install(tmp_path, [program("x")], timeout=1)


def test_renaming_changes_the_key_everywhere_and_nothing_else() -> None:
    host = target(environ={**FARM, "CUDA_HOME": "/usr/local/cuda-13.0"}, torch_cuda="12.8")
    mine = program()
    theirs = for_target(mine, host)
    assert theirs.key != mine.key
    assert theirs.object == mine.object.replace(mine.key.encode(), theirs.key.encode())
    assert dict(theirs.payload.environment)["CUDA_HOME"] == "/usr/local/cuda-13.0"
    manifest = json.loads(theirs.manifest)
    assert manifest["cache_key"] == theirs.key
    assert manifest["object_sha256"] == hashlib.sha256(theirs.object).hexdigest()
    assert ["torch_cuda", "12.8"] in manifest["toolchain"]
    assert for_target(theirs, target()).object == mine.object


def test_a_program_for_the_same_host_is_left_alone() -> None:
    mine = program()
    assert for_target(mine, target()) is mine


def test_an_object_with_its_key_outside_symbols_is_not_renamed() -> None:
    mine = program()
    odd = mine.object + b" " + mine.key.encode()
    document = json.loads(mine.manifest) | {"object_bytes": len(odd), "object_sha256": hashlib.sha256(odd).hexdigest()}
    from kcache.kinds.b12x_compile import verify_program

    strange = verify_program(mine.key, odd, json.dumps(document).encode())
    with pytest.raises(IntegrityError, match="places that are no symbols"):
        for_target(strange, target(torch_cuda=""))


def test_installed_programs_are_taken_and_are_what_was_given(tmp_path: Path) -> None:
    root = tmp_path / "home" / ".cache" / "b12x" / "compile"
    programs = [program(facts) for facts in "abc"]
    placed = install(root, programs, timeout=1)
    assert placed.written == {one.key: one.sha256 for one in programs}
    assert not placed.kept and not placed.set_aside
    for one in programs:
        assert accepted(root, one.key) == ""
        assert read_program(root, one.key) == one
        path = root / one.path
        assert not path.is_symlink()
        assert path.stat().st_mode & 0o777 == 0o644


def test_a_second_install_writes_nothing_and_what_the_user_has_stays(tmp_path: Path) -> None:
    key = put(tmp_path, "theirs")
    theirs, ours = program("theirs"), program("ours")
    before = (tmp_path / theirs.path).stat()
    assert install(tmp_path, [theirs, ours], timeout=1).kept == (key,)
    assert (tmp_path / theirs.path).stat() == before
    assert install(tmp_path, [theirs, ours], timeout=1).written == {}


@pytest.mark.parametrize(("suffix", "damage"), [(".o", swap), (".o", cut), (".o", Path.unlink), (".json", Path.unlink)])
def test_a_pair_that_is_not_whole_is_replaced_and_set_aside(
    tmp_path: Path, suffix: str, damage: Callable[[Path], object]
) -> None:
    key = put(tmp_path)
    damage(tmp_path / key[:2] / f"{key}{suffix}")
    assert accepted(tmp_path, key)
    placed = install(tmp_path, [program()], timeout=1)
    assert list(placed.written) == [key]
    assert placed.set_aside
    assert accepted(tmp_path, key) == ""
    assert list((tmp_path / key[:2]).glob(".damaged-*"))


def test_a_stale_manifest_is_gone_before_other_bytes_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case B43: killed between the two writes, the cache must hold no manifest above bytes that it does not vouch for."""
    key = put(tmp_path)
    swap(tmp_path / key[:2] / f"{key}.o")
    import kcache.kinds.b12x_compile as module

    def killed(shard: Path, name: str, data: bytes) -> None:
        assert name == f"{key}.o"
        assert not (shard / f"{key}.json").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_write", killed)
    with pytest.raises(KeyboardInterrupt):
        install(tmp_path, [program()], timeout=1)
    assert accepted(tmp_path, key)


@pytest.mark.parametrize("suffix", [".o", ".json", ".lock"])
def test_a_link_where_a_file_or_lock_belongs_is_refused_before_anything_is_written(tmp_path: Path, suffix: str) -> None:
    first, second = program("first"), program("second")
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    (root / second.key[:2]).mkdir(parents=True)
    elsewhere.write_text("theirs")
    (root / second.key[:2] / f"{second.key}{suffix}").symlink_to(elsewhere)
    with pytest.raises(TrustError, match="symbolic link"):
        install(root, [first, second], timeout=1)
    assert elsewhere.read_text() == "theirs"
    assert not (root / first.path).exists()


def test_a_linked_directory_is_refused(tmp_path: Path) -> None:
    one = program()
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    (root / one.key[:2]).symlink_to(elsewhere)
    with pytest.raises(TrustError):
        install(root, [one], timeout=1)
    assert not list(elsewhere.iterdir())


def test_a_program_with_other_bytes_than_its_manifest_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    from dataclasses import replace

    good = program("good")
    bad = replace(program("bad"), object=b"x" + program("bad").object[1:])
    with pytest.raises(IntegrityError):
        install(tmp_path / "root", [good, bad], timeout=1)
    assert not (tmp_path / "root").exists()


def test_a_compilation_that_holds_its_lock_is_waited_for_and_then_told(tmp_path: Path) -> None:
    one = program()
    (tmp_path / one.key[:2]).mkdir()
    with locked(tmp_path / one.key[:2] / f"{one.key}.lock", 1), pytest.raises(LockTimeoutError):
        install(tmp_path, [one], timeout=0.05)
    assert accepted(tmp_path, one.key) == "there is no object"
