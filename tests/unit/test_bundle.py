"""A store in one file: exported, restored from, imported, and refused where it is not what was written."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from container import Container
from entries import make_entry, make_fitting_entry, restored

from kcache.errors import AccessDeniedError, IntegrityError, NotFoundError, StoreError, UsageError
from kcache.store.bundle import BLOCK, BundleStore, header, padding
from kcache.store.file import FileStore
from kcache.store.memory import MemoryStore
from kcache.store.open import open_store
from kcache.workflows.bundle import export, import_bundle
from kcache.workflows.publish import publish
from kcache.workflows.resolve import Wanted


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    """A store with entries of two versions and two architectures."""
    made = FileStore(tmp_path / "store", create=True)
    make_entry(tmp_path / "out", {"cascade": b"c" * 3000})
    make_entry(tmp_path / "out", {"page": b"p" * 100}, kind="modules", gpu_arch="120f")
    make_entry(tmp_path / "out", {"page": b"q" * 100}, kind="modules", flashinfer_version="0.7.2")
    publish(tmp_path / "out", made)
    return made


def test_a_bundle_is_a_store_and_a_tar(store: FileStore, tmp_path: Path) -> None:
    report = export(store, tmp_path / "b.tar", asked=Wanted())
    bundle = BundleStore(tmp_path / "b.tar")
    assert (report.entries, len(report.environments), report.size) == (3, 2, (tmp_path / "b.tar").stat().st_size)
    assert restored(bundle) == restored(store)
    names = list(bundle.list(""))
    assert set(names) == set(store.list(""))
    with tarfile.open(tmp_path / "b.tar") as tar:
        assert sorted(tar.getnames()) == sorted(names)
        assert all(member.isreg() and member.mode == 0o644 and member.mtime == 0 for member in tar)
    for name in names:
        data = store.read_bytes(name, 1 << 20)
        assert bundle.read_bytes(name, 1 << 20) == data
        assert b"".join(bundle.read(name, offset=7)) == data[7:]
        found = bundle.stat(name)
        assert found is not None and found.size == len(data)
    assert b"".join(bundle.read(names[0], offset=1 << 30)) == b""


def test_the_same_entries_give_the_same_bytes(store: FileStore, tmp_path: Path) -> None:
    first = export(store, tmp_path / "1.tar", asked=Wanted())
    assert export(store, tmp_path / "2.tar", asked=Wanted()).sha256 == first.sha256
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()


@pytest.mark.parametrize(
    ("asked", "archs", "flashinfer", "entries"),
    [
        (Wanted(kinds=("modules",)), [], "", 2),
        (Wanted(kinds=("modules",)), ["120f"], "", 1),
        (Wanted(), [], "0.7.2", 1),
        (Wanted(modules=("page",)), ["90a"], "", 1),
    ],
)
def test_only_what_is_asked_for_goes_in(
    store: FileStore, tmp_path: Path, asked: Wanted, archs: list[str], flashinfer: str, entries: int
) -> None:
    report = export(store, tmp_path / "b.tar", asked=asked, archs=archs, flashinfer=flashinfer)
    assert report.entries == entries
    assert sum(".tar.zst" in name for name in BundleStore(tmp_path / "b.tar").list("")) == entries


def test_nothing_that_is_there_is_a_usage_error_and_leaves_no_file(store: FileStore, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has nothing of what was asked for"):
        export(store, tmp_path / "b.tar", asked=Wanted(), archs=["75"])
    assert not (tmp_path / "b.tar").exists()


def test_a_damaged_archive_is_not_exported(store: FileStore, tmp_path: Path) -> None:
    name = next(name for name in store.list("v1/archives"))
    path = tmp_path / "store" / name
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    with pytest.raises(IntegrityError, match="is not what the index says"):
        export(store, tmp_path / "b.tar", asked=Wanted())
    assert not (tmp_path / "b.tar").exists()


def test_importing_is_publishing(store: FileStore, tmp_path: Path) -> None:
    export(store, tmp_path / "b.tar", asked=Wanted())
    target = MemoryStore()
    report = import_bundle(tmp_path / "b.tar", target)
    assert {entry.status for entry in report.entries} == {"uploaded"}
    assert target.objects == {name: store.read_bytes(name, 1 << 20) for name in store.list("")}
    assert {entry.status for entry in import_bundle(tmp_path / "b.tar", target).entries} == {"present"}


def test_every_flipped_bit_is_noticed_before_anything_is_published(store: FileStore, tmp_path: Path) -> None:
    export(store, tmp_path / "b.tar", asked=Wanted())
    data = (tmp_path / "b.tar").read_bytes()
    padded = 0
    for at in range(0, len(data), 97):
        (tmp_path / "bad.tar").write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        target = MemoryStore()
        try:
            import_bundle(tmp_path / "bad.tar", target)
        except Exception as error:  # noqa: BLE001 - whichever, it must be one of ours
            assert "kcache" in type(error).__module__, error
            assert not target.objects
        else:
            # Only what nobody reads: the space after an object, and after the end.
            assert data[at] == 0
            assert target.objects == {name: store.read_bytes(name, 1 << 20) for name in store.list("")}
            padded += 1
    assert padded < len(data) / 97 / 2


@pytest.mark.parametrize("keep", [0, 1, 511, 512, 1000, -1025, -1024, -512])
def test_what_is_cut_off_is_no_bundle(store: FileStore, tmp_path: Path, keep: int) -> None:
    export(store, tmp_path / "b.tar", asked=Wanted())
    (tmp_path / "cut.tar").write_bytes((tmp_path / "b.tar").read_bytes()[:keep])
    bundle = BundleStore(tmp_path / "cut.tar")
    if keep == -512:  # of the two blocks at the end, one is left
        assert restored(bundle) == restored(store)
        return
    with pytest.raises(StoreError, match="no bundle"):
        list(bundle.list(""))


def test_other_tars_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    (tmp_path / "link").symlink_to("x")
    for name in ("x", "link"):
        with tarfile.open(tmp_path / "other.tar", "w") as tar:
            tar.add(tmp_path / name, arcname=f"v1/{name}")
        with pytest.raises(StoreError, match="did not write"):
            BundleStore(tmp_path / "other.tar").stat("v1/x")
    for name in ("../x", "/x", "a//b", ".x"):
        block = header(name, 1) + b"1" + padding(1)
        (tmp_path / "evil.tar").write_bytes(block + b"\0" * BLOCK)
        with pytest.raises(StoreError, match="did not write"):
            BundleStore(tmp_path / "evil.tar").stat("x")
    twice = (header("x", 1) + b"1" + padding(1)) * 2
    (tmp_path / "twice.tar").write_bytes(twice + b"\0" * BLOCK)
    with pytest.raises(StoreError, match="at x"):
        BundleStore(tmp_path / "twice.tar").stat("x")


def test_an_index_of_another_environment_is_refused(store: FileStore, tmp_path: Path) -> None:
    blocks = []
    for name in store.list(""):
        data = store.read_bytes(name, 1 << 20)
        moved = name.replace("0.7.2/x86_64-cuda13/index.json", "0.9/x86_64-cuda13/index.json")
        blocks += [header(moved, len(data)), data, padding(len(data))]
    (tmp_path / "b.tar").write_bytes(b"".join(blocks) + b"\0" * BLOCK)
    with pytest.raises(IntegrityError, match="an entry of another environment"):
        import_bundle(tmp_path / "b.tar", MemoryStore())


def test_a_bundle_is_only_read(store: FileStore, tmp_path: Path) -> None:
    export(store, tmp_path / "b.tar", asked=Wanted())
    bundle = open_store(str(tmp_path / "b.tar"))
    assert isinstance(bundle, BundleStore)
    for call in (
        lambda: bundle.write("a", b"", if_absent=True),
        lambda: bundle.write_many([("a", b"")], if_absent=True),
        lambda: bundle.replace("a", b"", None),
        lambda: bundle.delete("a"),
    ):
        with pytest.raises(AccessDeniedError, match="can only be read"):
            call()
    with pytest.raises(NotFoundError):
        bundle.read("v1/none")
    with pytest.raises(StoreError, match="there is no bundle"):
        BundleStore(tmp_path / "none.tar").stat("a")


def test_from_a_store_to_a_file_to_a_host_without_a_network(tmp_path: Path) -> None:
    make_fitting_entry(tmp_path / "out")

    def kcache(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "kcache", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ},
        )

    assert kcache("publish", "out", "--to", "store").returncode == 0
    done = kcache("export", "--from", "store", "-o", "b.tar")
    assert done.returncode == 0 and "1 entries of store in b.tar" in done.stderr, done.stderr
    assert kcache("import", "b.tar", "--to", "other").returncode == 0
    (tmp_path / "home").mkdir()
    container = Container(home=tmp_path / "home")
    for source in (tmp_path / "b.tar", tmp_path / "other"):
        restored_here = container.restore(source, "--", sys.executable, "-c", "print('started')")
        assert "started" in restored_here.out, restored_here.err
    assert container.libraries
    failed = kcache("import", "out", "--to", "other")
    assert failed.returncode == 1 and "Traceback" not in failed.stderr and len(failed.stderr.splitlines()) == 1
