"""Publishing and reading back: all or nothing for readers, nothing lost between publishers, whatever dies when."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from entries import INGREDIENTS, build_name, make_entry, restored

from kcache.errors import (
    ConflictError,
    IntegrityError,
    ManifestError,
    NotFoundError,
    StoreError,
    UnavailableError,
    UsageError,
)
from kcache.index import index_path, parse_index
from kcache.store.base import Store
from kcache.store.file import FileStore
from kcache.store.memory import MemoryStore
from kcache.store.wrappers import FaultStore, MetricsStore
from kcache.workflows import reindex
from kcache.workflows.catalog import list_environments, read_index, read_manifest
from kcache.workflows.publish import publish

INDEX = index_path(INGREDIENTS)


def everything(store: Store) -> dict[str, bytes]:
    return {name: store.read_bytes(name, 1 << 30) for name in store.list("")}


def test_what_is_published_is_found_verified_and_whole(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", create=True)
    first = make_entry(tmp_path / "out", {"sampling": b"s" * 5000, "topk": b"t" * 100})
    second = make_entry(tmp_path / "out", {"page": b"p"}, kind="modules", gpu_arch="120f")
    report = publish(tmp_path / "out", store)
    assert {entry.status for entry in report.entries} == {"uploaded"} and report.indexes == (INDEX,)
    assert restored(store) == {
        first.fingerprint: {"sampling/sampling.so": b"s" * 5000, "topk/topk.so": b"t" * 100},
        second.fingerprint: {"page/page.so": b"p"},
    }
    assert list_environments(store) == [INDEX]


def test_each_environment_has_its_index(tmp_path: Path) -> None:
    store = MemoryStore()
    for version, release in (("0.7.4", "13.0"), ("0.7.4", "12.9"), ("0.7.2", "13.0")):
        make_entry(tmp_path / "out", flashinfer_version=version, cuda_release=release)
    report = publish(tmp_path / "out", store)
    assert len(report.indexes) == 3 == len(list_environments(store))
    for path in list_environments(store):
        assert len(parse_index(store.objects[path]).entries) == 1
    assert read_index(store, {**INGREDIENTS, "flashinfer.version": "0.9"}) is None


def test_publishing_again_uploads_nothing(tmp_path: Path) -> None:
    inner = FileStore(tmp_path / "store", create=True)
    make_entry(tmp_path / "out")
    publish(tmp_path / "out", inner)
    before = everything(inner)
    store = MetricsStore(inner)
    report = publish(tmp_path / "out", store)
    assert [entry.status for entry in report.entries] == ["present"]
    assert (report.bytes_uploaded, report.indexes, store.bytes_written) == (0, (), 0)
    assert not {"write", "replace", "delete"} & set(store.requests)
    assert everything(inner) == before


def test_the_same_files_built_again_are_present_already(tmp_path: Path) -> None:
    """Build seconds and provenance differ from build to build."""
    store = MemoryStore()
    make_entry(tmp_path / "a", build_seconds=5.0)
    make_entry(tmp_path / "b", build_seconds=6.0)
    publish(tmp_path / "a", store)
    before = dict(store.objects)
    assert publish(tmp_path / "b", store).entries[0].status == "present"
    assert store.objects == before


def test_other_files_under_the_same_key_are_refused_with_both_digests(tmp_path: Path) -> None:
    store = MemoryStore()
    ours = make_entry(tmp_path / "a", {"cascade": b"one"})
    theirs = make_entry(tmp_path / "b", {"cascade": b"two"})
    new = make_entry(tmp_path / "b", {"page": b"new"})
    publish(tmp_path / "a", store)
    before = dict(store.objects)
    with pytest.raises(ConflictError) as caught:
        publish(tmp_path / "b", store)
    assert ours.archive.sha256 in str(caught.value) and theirs.archive.sha256 in str(caught.value)
    assert "--replace" in caught.value.remedy and "\n" not in str(caught.value)
    assert store.objects == before and new.fingerprint not in restored(store)


def test_replacing_makes_the_new_files_visible_and_leaves_readers_of_the_old_index_whole(tmp_path: Path) -> None:
    store = MemoryStore()
    for number, content in enumerate((b"one", b"two", b"three")):
        manifest = make_entry(tmp_path / str(number), {"cascade": content})
    publish(tmp_path / "0", store)
    old = read_index(store, INGREDIENTS)
    for number, content in ((1, b"two"), (2, b"three")):
        report = publish(tmp_path / str(number), store, replace=True)
        assert report.entries[0].status == "replaced"
        assert restored(store) == {manifest.fingerprint: {"cascade/cascade.so": content}}
        assert restored(store, old) == {manifest.fingerprint: {"cascade/cascade.so": b"one"}}
    assert publish(tmp_path / "2", store).entries[0].status == "present"


def test_an_index_that_is_lost_or_damaged_comes_back_from_the_manifests(tmp_path: Path) -> None:
    store = MemoryStore()
    make_entry(tmp_path / "a", {"cascade": b"one"})
    make_entry(tmp_path / "b", {"cascade": b"two"})
    make_entry(tmp_path / "b", {"page": b"page"})
    publish(tmp_path / "a", store)
    publish(tmp_path / "b", store, replace=True)
    before = store.objects[INDEX]
    for damage in (None, b"", b"{", b"[]", b'{"format": "other"}', before[:-1], b"\xff"):
        if damage is None:
            store.delete(INDEX)
        else:
            store.objects[INDEX] = damage
        report = publish(tmp_path / "b", store)
        assert store.objects[INDEX] == before and report.indexes == (INDEX,)
        assert bool(report.warnings) == (damage is not None)


def test_an_index_of_a_newer_format_is_left_alone(tmp_path: Path) -> None:
    store = MemoryStore()
    make_entry(tmp_path / "out")
    store.write(INDEX, newer := b'{"format":"kcache.index/9","entries":[]}', if_absent=True)
    with pytest.raises(ManifestError, match=r"kcache\.index/9"):
        publish(tmp_path / "out", store)
    assert store.objects[INDEX] == newer


def test_a_damaged_store_is_repaired_by_publishing_again(tmp_path: Path) -> None:
    store = MemoryStore()
    manifest = make_entry(tmp_path / "out", {"cascade": b"one"})
    publish(tmp_path / "out", store)
    before = dict(store.objects)
    (name,) = (name for name in before if name.endswith(".tar.zst"))
    for damage in (None, before[name][:-5]):
        if damage is None:
            del store.objects[name]
        else:
            store.objects[name] = damage
        assert publish(tmp_path / "out", store).entries[0].status == "uploaded"
        assert store.objects == before
    (name,) = (name for name in before if "/entries/" in name)
    store.objects[name] = b"{}"
    with pytest.raises(ConflictError, match="unusable"):
        publish(tmp_path / "out", store)
    publish(tmp_path / "out", store, replace=True)
    assert restored(store) == {manifest.fingerprint: {"cascade/cascade.so": b"one"}}


def test_a_manifest_that_cannot_be_used_or_has_no_archive_is_left_out_and_named(tmp_path: Path) -> None:
    store = MemoryStore()
    lost = make_entry(tmp_path / "a", {"page": b"page"})
    good = make_entry(tmp_path / "b", {"cascade": b"cascade"})
    publish(tmp_path / "a", store)
    (name,) = (name for name in store.objects if name.endswith(".tar.zst"))
    del store.objects[name]
    del store.objects[INDEX]
    strange = reindex.generation_path(good.key, 0).replace(good.fingerprint[7:], "0" * 64)
    store.objects[strange] = good.encode()
    report = publish(tmp_path / "b", store)
    assert set(restored(store)) == {good.fingerprint}
    assert len(report.warnings) == 2 and any(lost.fingerprint[7:] in line for line in report.warnings)


def test_a_dry_run_writes_nothing_and_says_the_same(tmp_path: Path) -> None:
    make_entry(tmp_path / "out")
    store = FileStore(tmp_path / "store", create=True)
    dry = publish(tmp_path / "out", store, dry_run=True)
    assert not (tmp_path / "store").exists()
    wet = publish(tmp_path / "out", store)
    assert (dry.dry_run, dry.entries, dry.indexes) == (True, wet.entries, wet.indexes)
    assert 0 < dry.bytes_uploaded < wet.bytes_uploaded
    make_entry(tmp_path / "other", {"cascade": b"other"})
    with pytest.raises(ConflictError):
        publish(tmp_path / "other", store, dry_run=True)


# what is not published ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [".json", ".tar.zst"])
def test_a_flipped_byte_anywhere_stops_everything_before_anything_is_written(tmp_path: Path, part: str) -> None:
    make_entry(tmp_path / "out", {"page": b"fine"})
    manifest = make_entry(tmp_path / "out", {"cascade": b"c" * 50})
    path = tmp_path / "out" / f"{build_name(manifest.key)}{part}"
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        store = MemoryStore()
        try:
            publish(tmp_path / "out", store)
        except (IntegrityError, ManifestError):
            assert store.objects == {}
        else:
            assert part == ".json", f"byte {position} of the archive"  # provenance, or a figure: another, valid manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out, name: (out / f"{name}.tar.zst").unlink(), "no entries"),
        (lambda out, name: (out / f"{name}.json").unlink(), "has no manifest"),
        (lambda out, name: (out / f"{name}.json").write_bytes(b"{}"), "has format None"),
        (lambda out, name: (out / f"{name}.json").write_bytes((out / f"{name}.json").read_bytes() + b"\n"), "canonical"),
        (
            lambda out, name: [(out / f"{name}{e}").rename(out / f"sampling-90a-{'0' * 16}{e}") for e in (".json", ".tar.zst")],
            "another",
        ),
        (lambda out, name: (out / f"{name}.tar.zst").write_bytes(b""), "is damaged"),
        (lambda out, name: out.rename(out.with_name("gone")), "cannot read"),
    ],
)
def test_what_is_no_build_output_is_refused(tmp_path: Path, change: object, message: str) -> None:
    manifest = make_entry(tmp_path / "out")
    assert callable(change)
    change(tmp_path / "out", build_name(manifest.key))
    store = MemoryStore()
    with pytest.raises((UsageError, IntegrityError, ManifestError), match=message):
        publish(tmp_path / "out", store)
    assert store.objects == {}


def test_logs_beside_the_entries_are_not_looked_at(tmp_path: Path) -> None:
    make_entry(tmp_path / "out")
    (tmp_path / "out" / "build.log").write_bytes(b"log")
    (tmp_path / "out" / "report.json").write_bytes(b"{}")
    (tmp_path / "out" / "logs").mkdir()
    assert len(publish(tmp_path / "out", MemoryStore()).entries) == 1


# reading ------------------------------------------------------------------------------------------------------------------


def test_a_manifest_that_is_not_the_one_in_the_index_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    make_entry(tmp_path / "out")
    publish(tmp_path / "out", store)
    index = read_index(store, INGREDIENTS)
    assert index is not None
    (entry,) = index.entries
    good = store.objects[entry.manifest.path]
    bad: list[tuple[bytes, str]] = [
        (good.replace(b'"tests"', b'"tesst"'), "digest"),
        (good[:-1], "bytes"),
        (good + b" ", "larger"),
        (b"", "bytes"),
    ]
    for data, message in bad:
        store.objects[entry.manifest.path] = data
        with pytest.raises(IntegrityError, match=message):
            read_manifest(store, entry)
    del store.objects[entry.manifest.path]
    with pytest.raises(NotFoundError):
        read_manifest(store, entry)


def test_an_index_line_that_points_at_another_entry_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    make_entry(tmp_path / "out", {"cascade": b"1"})
    make_entry(tmp_path / "out", {"page": b"2"})
    publish(tmp_path / "out", store)
    index = read_index(store, INGREDIENTS)
    assert index is not None
    one, two = index.entries
    with pytest.raises(IntegrityError, match="another entry"):
        read_manifest(store, replace(one, manifest=two.manifest))
    with pytest.raises(IntegrityError, match="different archives"):
        read_manifest(store, replace(one, archive=two.archive))


def test_a_store_that_fails_is_never_a_store_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        read_index(FileStore(tmp_path / "none"), INGREDIENTS)

    def fault(operation: str, name: str) -> None:
        raise UnavailableError("down")

    with pytest.raises(UnavailableError):
        read_index(FaultStore(MemoryStore(), fault=fault), INGREDIENTS)


# faults -------------------------------------------------------------------------------------------------------------------


class DiedError(Exception):
    """Stands for the end of the process: no handler of kcache's own may catch it."""


def test_the_pointer_is_written_last(tmp_path: Path) -> None:
    make_entry(tmp_path / "out", {"cascade": b"1"})
    make_entry(tmp_path / "out", {"page": b"2"}, cuda_release="12.9")
    written: list[str] = []

    def after(operation: str, name: str) -> None:
        if operation in ("write", "replace"):
            written.append("archive" if name.endswith(".tar.zst") else "manifest" if "/entries/" in name else "index")

    publish(tmp_path / "out", FaultStore(MemoryStore(), after=after))
    assert written == ["archive", "archive", "manifest", "manifest", "index", "index"]


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("replacing", [False, True])
def test_a_call_that_dies_at_any_point_harms_nobody_and_the_next_completes_it(
    tmp_path: Path, moment: str, replacing: bool
) -> None:
    old = make_entry(tmp_path / "old", {"cascade": b"old"})
    make_entry(tmp_path / "new", {"cascade": b"new" if replacing else b"old"})
    make_entry(tmp_path / "new", {"page": b"page", "topk": b"topk"})
    clean = MemoryStore()
    for part in ("old", "new"):
        publish(tmp_path / part, clean, replace=replacing)
    for step in range(1000):
        inner = MemoryStore()
        publish(tmp_path / "old", inner)
        index = read_index(inner, INGREDIENTS)
        left = step

        def die(operation: str, name: str) -> None:
            nonlocal left
            if left == 0:
                raise DiedError
            left -= 1

        faulty = FaultStore(inner, fault=die) if moment == "before" else FaultStore(inner, after=die)
        try:
            publish(tmp_path / "new", faulty, replace=replacing)
            break
        except DiedError:
            pass
        seen = restored(inner)
        assert seen[old.fingerprint]["cascade/cascade.so"] in (b"old", b"new")
        assert restored(inner, index)[old.fingerprint] == {"cascade/cascade.so": b"old"}
        publish(tmp_path / "new", inner, replace=replacing)
        assert restored(inner) == restored(clean)
        assert inner.objects == clean.objects
    assert step > 5


def test_what_a_dead_call_uploaded_is_not_uploaded_again(tmp_path: Path) -> None:
    make_entry(tmp_path / "out", {"cascade": os.urandom(5000)})

    def die(operation: str, name: str) -> None:
        if operation == "write" and "/entries/" in name:
            raise DiedError

    inner = MemoryStore()
    with pytest.raises(DiedError):
        publish(tmp_path / "out", FaultStore(inner, fault=die))
    store = MetricsStore(inner)
    report = publish(tmp_path / "out", store)
    assert store.requests["write"] == 1 and report.bytes_uploaded == store.bytes_written < 5000
    assert len(restored(inner)) == 1


PUBLISHER = """
import sys
from pathlib import Path
from kcache.store.file import FileStore
from kcache.workflows.publish import publish
store = FileStore(Path(sys.argv[1]), create=True)
print("go", flush=True)
for directory in sys.argv[2:]:
    publish(Path(directory), store)
"""


def start(store: Path, *directories: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PUBLISHER, str(store), *map(str, directories)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_eight_publishers_of_five_entries_each_lose_nothing(tmp_path: Path) -> None:
    expected = {}
    directories: list[list[Path]] = []
    for number in range(8):
        directories.append([tmp_path / f"out-{number}-{part}" for part in range(5)])
        for part, directory in enumerate(directories[-1]):
            data = b"%d %d" % (number, part)
            manifest = make_entry(directory, {f"m{number}_{part}": data})
            expected[manifest.fingerprint] = {f"m{number}_{part}/m{number}_{part}.so": data}
    processes = [start(tmp_path / "store", *paths) for paths in directories]
    assert [process.wait(600) for process in processes] == [0] * 8
    assert restored(FileStore(tmp_path / "store")) == expected


def test_killed_publishers_leave_a_store_that_restores_and_the_rest_is_completed(tmp_path: Path) -> None:
    expected = {}
    directories = []
    for number in range(12):
        directories.append(tmp_path / f"out-{number}")
        data = os.urandom(200_000)
        manifest = make_entry(directories[-1], {f"m{number}": data})
        expected[manifest.fingerprint] = {f"m{number}/m{number}.so": data}
    store = FileStore(tmp_path / "store", create=True)
    publish(directories[0], store)
    for number in range(12):
        process = start(tmp_path / "store", *directories)
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        time.sleep(0.006 * number)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        seen = restored(store)
        assert seen and all(expected[fingerprint] == files for fingerprint, files in seen.items())
    for directory in directories:
        publish(directory, store)
    assert restored(store) == expected


def test_an_index_that_others_rewrite_for_ever_ends_in_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reindex, "ATTEMPTS", 3)

    def fault(operation: str, name: str) -> None:
        if operation == "replace":
            raise ConflictError("first again")

    make_entry(tmp_path / "out")
    with pytest.raises(ConflictError, match="rewritten by others 3 times") as caught:
        publish(tmp_path / "out", FaultStore(MemoryStore(), fault=fault))
    assert caught.value.remedy


def test_two_publishers_of_different_files_under_one_key_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """Both looked before either wrote."""
    inner = MemoryStore()
    make_entry(tmp_path / "a", {"cascade": b"one"})
    manifest = make_entry(tmp_path / "b", {"cascade": b"two"})
    others: list[str] = ["b"]

    def fault(operation: str, name: str) -> None:
        if operation == "write" and others:
            publish(tmp_path / others.pop(), inner)

    with pytest.raises(ConflictError):
        publish(tmp_path / "a", FaultStore(inner, fault=fault))
    assert restored(inner) == {manifest.fingerprint: {"cascade/cascade.so": b"two"}}
    others.append("b")
    publish(tmp_path / "a", FaultStore(inner, fault=fault), replace=True)
    assert restored(inner) == {manifest.fingerprint: {"cascade/cascade.so": b"one"}}


# command line -------------------------------------------------------------------------------------------------------------


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "kcache", *arguments], capture_output=True, text=True, check=False)


def test_the_command_publishes_and_answers_in_json(tmp_path: Path) -> None:
    manifest = make_entry(tmp_path / "out")
    done = cli("publish", str(tmp_path / "out"), "--to", str(tmp_path / "store"), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [entry["fingerprint"] for entry in answer["entries"]] == [manifest.fingerprint]
    assert "1 uploaded" in done.stderr
    assert set(restored(FileStore(tmp_path / "store"))) == {manifest.fingerprint}
    again = cli("publish", str(tmp_path / "out"), "--to", f"file://{tmp_path}/store", "--dry-run")
    assert (again.returncode, again.stdout) == (0, "") and "1 present" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["publish", "none", "--to", "store"], 2, "cannot read none"),
        (["publish", "out", "--to", "hf://a"], 2, "does not name a repository"),
        (["publish", "out", "--to", "store", "--private"], 2, "on the Hub"),
        (["publish", "out", "--to", "hf://a/b@c", "--revision", "d"], 2, "another revision"),
        (["publish", "out"], 2, "--to"),
        (["publish", "bad", "--to", "store"], 12, "is damaged"),
        (["publish", "out", "--to", "/proc/none/store"], 1, "/proc/none/store cannot be made: No such file or directory"),
        (["publish", "other", "--to", "store"], 1, "--replace"),
    ],
)
def test_the_command_fails_with_one_line_and_the_contracts_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_entry(tmp_path / "out", {"cascade": b"1"})
    make_entry(tmp_path / "other", {"cascade": b"2"})
    manifest = make_entry(tmp_path / "bad")
    (tmp_path / "bad" / f"{build_name(manifest.key)}.tar.zst").write_bytes(b"")
    publish(tmp_path / "out", FileStore(tmp_path / "store", create=True))
    done = cli(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr and "Traceback" not in done.stderr
