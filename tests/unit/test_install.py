"""What a power failure or a failing disk may do to an installation, and what the next restore makes of it."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from container import Container
from entries import make_fitting_entry, publish
from hypothesis import given, settings
from hypothesis import strategies as st

from kcache import fsops
from kcache.archive import hashing
from kcache.errors import InstallError, NoSpaceError
from kcache.index import index_entry
from kcache.local_cache import InstalledEntry, LocalCache
from kcache.manifest import Manifest
from kcache.store.file import FileStore
from kcache.workflows.deadline import Deadline
from kcache.workflows.install import install_entry

MODULES = {"cascade": b"\x7fELF cascade" * 50_000, "page": b"\x7fELF page" * 1000}


@pytest.fixture
def published(tmp_path: Path) -> tuple[Path, Manifest]:
    """A store with one entry of two files that fits this host."""
    manifest = make_fitting_entry(tmp_path / "entries", MODULES, kind="sampling")
    publish(tmp_path / "entries", tmp_path / "store")
    return tmp_path / "store", manifest


def install(store: Path, manifest: Manifest, cache: LocalCache) -> InstalledEntry:
    entry = index_entry(manifest, manifest.encode())
    return install_entry(cache, FileStore(store), entry, manifest, Deadline.after(60))


def test_files_are_on_disk_before_they_get_their_names_and_the_receipt_comes_last(
    tmp_path: Path, published: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        events.append(("flushed", Path(f"/proc/self/fd/{descriptor}").readlink().name))

    def watched_replace(source: str, name: str, **more: int) -> None:
        events.append(("named", f"{source} {name}"))
        replace(source, name, **more)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    install(*published, LocalCache(tmp_path / "cache"))
    named = [text.split() for what, text in events if what == "named"]
    assert [name for _, name in named] == ["cascade.so", "page.so", "manifest.json", "receipt.json"]
    first_name = events.index(("named", " ".join(named[0])))
    assert {("flushed", temporary) for temporary, name in named if name.endswith(".so")} <= set(events[:first_name])


@pytest.mark.parametrize(("number", "expected"), [(errno.EIO, InstallError), (errno.ENOSPC, NoSpaceError)])
def test_a_file_that_cannot_be_flushed_is_not_installed(
    tmp_path: Path,
    published: tuple[Path, Manifest],
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    expected: type[InstallError],
) -> None:
    def failing(descriptor: int) -> None:
        if os.fstat(descriptor).st_size == len(MODULES["page"]):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    cache = LocalCache(tmp_path / "cache")
    with pytest.raises(expected, match=r"page\.so"):
        install(*published, cache)
    assert cache.find(published[1].fingerprint) is None
    assert not cache.entry_directory(published[1].fingerprint).exists()


def test_a_large_file_is_flushed_while_it_is_written_and_a_failure_then_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, sizes = 20 << 20, []

    def failing(descriptor: int) -> None:
        sizes.append(os.fstat(descriptor).st_size)
        if len(sizes) == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", failing)
    flusher = fsops.Flusher()
    chunks = (bytes(1 << 20) for _ in range(20))
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    fsops.stage(tmp_path, "large", chunks, expected_size=size, expected_sha256=None, flusher=flusher)
    with pytest.raises(InstallError, match="large"):
        flusher.finish()
    assert len(sizes) == 6
    assert max(sizes) == size
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def empty(data: bytes) -> bytes:
    return b""


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def zeros(data: bytes) -> bytes:
    return bytes(len(data))


def most(data: bytes) -> bytes:
    return data[:-1]


@pytest.mark.parametrize("torn", [empty, half, zeros, most])
@pytest.mark.parametrize(
    "pattern",
    [
        "entries/*/receipt.json",
        "entries/*/manifest.json",
        "current/*.json",
        "sources/*.json",
        "site/*/flashinfer_jit_cache/__init__.py",
        "site/*/flashinfer_jit_cache/kcache.json",
    ],
)
def test_what_a_power_failure_tore_is_made_again(
    tmp_path: Path, published: tuple[Path, Manifest], pattern: str, torn: Callable[[bytes], bytes]
) -> None:
    container = Container(home=tmp_path / "home")
    first = container.restore(published[0])
    assert first.code == 0, first.err
    [document] = (container.home / ".cache" / "kcache" / "v1").glob(pattern)
    whole = document.read_bytes()
    document.write_bytes(torn(whole))
    again = container.restore(published[0])
    assert (again.code, again.document["status"], again.document["env"]) == (0, "hit", first.document["env"]), again.err
    assert [path.read_bytes() for path in container.libraries] == [MODULES[name] for name in sorted(MODULES)]
    last = container.restore(published[0])
    assert last.document["kinds"]["sampling"]["entries"][0]["action"] == "in-place"
    assert last.document["warnings"] == []
    if "receipt" not in pattern and "sources" not in pattern:  # they hold times
        assert document.read_bytes() == whole


@given(st.lists(st.binary(max_size=5000), max_size=40), st.integers(1, 20_000))
@settings(max_examples=50, deadline=None)
def test_hashing_in_the_background_gives_the_same_digests(pieces: list[bytes], ahead: int) -> None:
    before, hashing._AHEAD = hashing._AHEAD, ahead
    background = hashing.Background()
    try:
        one, other = background.sha256(), background.sha256()
        for piece in pieces:
            one.update(piece)
            other.update(piece[::-1])
        assert one.hexdigest() == hashlib.sha256(b"".join(pieces)).hexdigest()
        assert other.hexdigest() == hashlib.sha256(b"".join(piece[::-1] for piece in pieces)).hexdigest()
    finally:
        background.close()
        hashing._AHEAD = before


def test_what_goes_wrong_in_the_background_is_raised_where_the_digest_is_asked_for() -> None:
    background = hashing.Background()
    hasher = background.sha256()
    hasher.update("no bytes")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        hasher.hexdigest()
    background.close()


def test_many_files_are_flushed_and_closed(tmp_path: Path) -> None:
    flusher = fsops.Flusher()
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    staged = [
        fsops.stage(tmp_path, f"f{n}", [b"x" * n], expected_size=n, expected_sha256=None, flusher=flusher) for n in range(40)
    ]
    flusher.finish()
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    for file in staged:
        file.commit()
    assert [(tmp_path / f"f{n}").stat().st_size for n in range(40)] == list(range(40))
