"""One suite for every store and every wrapper around one, then what only real file systems and processes can show."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from entries import make_entry
from hub.process import HubProcess
from hub.static import static_site

from kcache import digest
from kcache.errors import (
    AccessDeniedError,
    ConflictError,
    IntegrityError,
    NotFoundError,
    RefusedError,
    StoreError,
    UnavailableError,
    UsageError,
)
from kcache.store.base import CHUNK, Store, StoredObject
from kcache.store.file import FileStore
from kcache.store.hf import HfStore
from kcache.store.memory import MemoryStore
from kcache.store.mirror import MirrorStore
from kcache.store.open import open_store
from kcache.store.wrappers import FaultStore, MetricsStore, ReadOnlyStore, RetryStore
from kcache.trust.keys import generate, load
from kcache.trust.policy import parse_policy
from kcache.values import replace
from kcache.workflows.catalog import read_index
from kcache.workflows.publish import publish
from kcache.workflows.signing import IndexSigner
from kcache.workflows.trusted import Guard

NOBODY = 65534
BIG = os.urandom(CHUNK + 12345)

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def flaky(inner: Store) -> Store:
    """Fails about every third time it is asked for anything, chunks included; what is outside must not notice."""
    dice = random.Random(1)

    def fault(operation: str, name: str) -> None:
        if dice.random() < 0.3:
            raise UnavailableError("try again")

    return RetryStore(FaultStore(inner, fault=fault), seconds=60, sleep=lambda seconds: None)


def late(inner: Store) -> Store:
    """Does its work, then says that it failed; repeated once."""
    seen: set[tuple[str, str]] = set()

    def after(operation: str, name: str) -> None:
        if operation == "replace" and (operation, name) not in seen:
            seen.add((operation, name))
            raise UnavailableError("the answer was lost")

    return RetryStore(FaultStore(inner, after=after), seconds=60, sleep=lambda seconds: None)


class Mirrored(FileStore):
    """A directory that is written here and read through a web server."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, create=True)
        self._site = static_site(root)
        self.mirror = MirrorStore(self._site.__enter__(), stall=10)

    def stat(self, name: str) -> StoredObject | None:
        return self.mirror.stat(name)

    def read(self, name: str, *, offset: int = 0) -> Iterator[bytes]:
        return self.mirror.read(name, offset=offset)

    def __del__(self) -> None:
        self._site.__exit__(None, None, None)


_hubs: list[HubProcess] = []
_numbers = count()


@pytest.fixture(scope="module", autouse=True)
def _hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One local Hub for all stores of this module, started when the first one asks for it."""
    yield
    for hub in _hubs:
        hub.stop()
    _hubs.clear()


def on_hub(path: Path, directory: str = "", *, xet: bool = False) -> Store:
    """A repository of its own on the local Hub, uploaded to by LFS or by xet."""
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_XET = not xet
    if not _hubs:
        _hubs.append(HubProcess(path / "hub", "--xet"))
    url = f"hf://farm/store{next(_numbers)}{directory}"
    return HfStore(url, settle=False, create=True, stall=10, environ={**os.environ, **_hubs[0].environ()})


MAKERS: dict[str, Callable[[Path], Store]] = {
    "hf": on_hub,
    "hf xet": lambda path: on_hub(path, xet=True),
    "hf directory": lambda path: on_hub(path, "@team%2Fbranch/a/b"),
    "https": lambda path: Mirrored(path / "store"),
    "file": lambda path: FileStore(path / "store", create=True),
    "memory": lambda path: MemoryStore(),
    "metrics": lambda path: MetricsStore(FileStore(path / "store", create=True)),
    "fault": lambda path: FaultStore(MemoryStore()),
    "retry": lambda path: RetryStore(FileStore(path / "store", create=True), seconds=1),
    "flaky file": lambda path: flaky(FileStore(path / "store", create=True)),
    "flaky memory": lambda path: flaky(MemoryStore()),
    "late": lambda path: late(FileStore(path / "store", create=True)),
    "all": lambda path: MetricsStore(flaky(MetricsStore(FileStore(path / "store", create=True)))),
}


@pytest.fixture(params=list(MAKERS))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    made = MAKERS[request.param](tmp_path)
    assert made.write("seed", b"", if_absent=True)
    return made


def read(store: Store, name: str, offset: int = 0) -> bytes:
    return b"".join(store.read(name, offset=offset))


def test_what_is_written_is_read(store: Store, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(BIG)
    assert store.write("a/b/big.tar.zst", tmp_path / "source", if_absent=True)
    assert store.write("a/small.json", b"{}", if_absent=False)
    assert read(store, "a/b/big.tar.zst") == BIG
    assert all(len(chunk) <= CHUNK for chunk in store.read("a/b/big.tar.zst"))
    assert store.read_bytes("a/small.json", 2) == b"{}"
    found = store.stat("a/b/big.tar.zst")
    assert found is not None and found.size == len(BIG)


@pytest.mark.parametrize("offset", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, len(BIG) - 1, len(BIG), len(BIG) + 10])
def test_reading_begins_at_the_offset(store: Store, offset: int) -> None:
    store.write("big", BIG, if_absent=True)
    assert read(store, "big", offset) == BIG[offset:]


def test_what_is_not_there_is_said_at_the_call(store: Store) -> None:
    store.write("a/b", b"x", if_absent=True)
    for name in ("none", "a", "a/none", "a/b/c"):
        assert store.stat(name) is None
        with pytest.raises(NotFoundError, match=name):
            store.read(name)
        with pytest.raises(NotFoundError):
            store.read_bytes(name, 10)
        assert store.delete(name) is False


def test_an_object_is_written_once_if_asked(store: Store) -> None:
    assert store.write("x/name", b"first", if_absent=True)
    assert not store.write("x/name", b"second", if_absent=True)
    assert read(store, "x/name") == b"first"
    assert store.write("x/name", b"third", if_absent=False)
    assert read(store, "x/name") == b"third"


def test_a_reader_of_an_object_that_is_replaced_gets_one_of_both(store: Store) -> None:
    store.write("name", BIG, if_absent=True)
    chunks = store.read("name")
    first = next(chunks)
    store.write("name", b"new", if_absent=False)
    assert first and BIG.startswith(first)
    assert read(store, "name") == b"new"


def test_listing_is_sorted_and_below_a_directory(store: Store) -> None:
    names = ["b/2", "a/x/1", "a/x/2", "a/y", "a.b/z", "ab/z", "c"]
    for name in names:
        store.write(name, b"", if_absent=True)
    assert list(store.list("")) == ["a/x/1", "a/x/2", "a/y", "a.b/z", "ab/z", "b/2", "c", "seed"]
    assert list(store.list("a")) == list(store.list("a/")) == ["a/x/1", "a/x/2", "a/y"]
    assert list(store.list("a/x")) == ["a/x/1", "a/x/2"]
    assert list(store.list("none")) == [] == list(store.list("c"))
    assert list(store.list("", depth=1)) == ["c", "seed"]
    assert list(store.list("", depth=2)) == ["a/y", "a.b/z", "ab/z", "b/2", "c", "seed"]
    assert list(store.list("a", depth=1)) == ["a/y"] and list(store.list("a", depth=2)) == ["a/x/1", "a/x/2", "a/y"]
    assert list(store.list("none", depth=1)) == []


def test_many_are_written_as_one_by_one(store: Store, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    (tmp_path / "source").write_bytes(BIG)
    repeated = "flaky" in request.node.name or "[all]" in request.node.name  # an attempt that failed half way wrote some
    items: list[tuple[str, Path | bytes]] = [(f"many/{n}", b"%d" % n) for n in range(9 if repeated else 120)]
    store.write_many([("many/7", b"first"), ("big.zst", tmp_path / "source")], if_absent=True)
    written = list(store.write_many(items, if_absent=True))
    assert len(written) == len(items) and not written[7] and (repeated or sum(written) == 119)
    assert read(store, "many/7") == b"first" and read(store, items[-1][0]) == items[-1][1] and read(store, "big.zst") == BIG
    assert list(store.write_many(items[:9], if_absent=False)) == [True] * 9
    assert read(store, "many/7") == b"7"
    assert list(store.write_many([], if_absent=True)) == []


def test_signatures_travel_with_entries(store: Store, tmp_path: Path) -> None:
    manifest = make_entry(tmp_path / "out")
    generate(str(tmp_path / "a.key"))
    key = load(str(tmp_path / "a.key"))
    text = f'format = "kcache.policy/1"\n[[key]]\nname = "a"\npublic = "{key.public.text}"\nroles = ["entries", "index"]\n'
    policy = parse_policy(f"{text}[index]\nthreshold = 1".encode(), "policy")
    publish(tmp_path / "out", store, key=key, sign_index=IndexSigner(key, 60).sign)
    guard = Guard(policy, None)
    index = read_index(store, manifest.key.ingredients, check=guard.check_index)
    assert index is not None
    assert guard.admit(index.entries[0], store).key == key.public.id
    other = replace(index.entries[0], manifest=replace(index.entries[0].manifest, sha256=digest.of_bytes(b"other")))
    with pytest.raises(RefusedError, match="not signed by key a"):
        guard.admit(other, store)


def test_deleting(store: Store) -> None:
    store.write("a/b", b"x", if_absent=True)
    assert store.delete("a/b") is True
    assert store.stat("a/b") is None
    assert store.delete("a/b") is False
    assert store.write("a/b", b"y", if_absent=True)
    store.write("a/c", b"z", if_absent=True)
    assert store.delete("a/b", "a/none", "a/c") is True
    assert list(store.list("a")) == []
    assert store.delete("a/b", "a/c") is False


def test_compare_and_swap(store: Store) -> None:
    store.replace("v1/index.json", b"one", None)
    for wrong in (None, b"other", b""):
        with pytest.raises(ConflictError):
            store.replace("v1/index.json", b"two", wrong)
    assert read(store, "v1/index.json") == b"one"
    store.replace("v1/index.json", b"two", b"one")
    assert read(store, "v1/index.json") == b"two"
    with pytest.raises(ConflictError):
        store.replace("v1/other.json", b"two", b"one")
    assert store.stat("v1/other.json") is None
    assert list(store.list("v1")) == ["v1/index.json"]


def test_a_limit_is_a_limit(store: Store) -> None:
    store.write("big", BIG, if_absent=True)
    assert store.read_bytes("big", len(BIG)) == BIG
    with pytest.raises(IntegrityError, match="larger"):
        store.read_bytes("big", len(BIG) - 1)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "/etc/passwd",
        "../x",
        "a/../b",
        "a//b",
        "a/",
        "a/.b",
        ".tmp-1",
        "-x",
        "a b",
        "a\0",
        "a\n",
        "ä",
        "x" * 256,
        "a/" * 500 + "a",
    ],
)
def test_a_name_that_could_leave_the_store_is_refused(store: Store, name: str) -> None:
    calls: list[Callable[[], object]] = [
        lambda: store.stat(name),
        lambda: store.read(name),
        lambda: store.read_bytes(name, 1),
        lambda: store.write(name, b"", if_absent=True),
        lambda: store.write(name, b"", if_absent=False),
        lambda: store.replace(name, b"", None),
        lambda: store.delete(name),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="cannot be the name"):
            call()


def test_a_source_that_cannot_be_read_changes_nothing(store: Store, tmp_path: Path) -> None:
    store.write("a", b"before", if_absent=True)
    with pytest.raises(StoreError, match="cannot read"):
        store.write("a", tmp_path / "none", if_absent=False)
    assert read(store, "a") == b"before"


def test_it_says_what_it_is(store: Store) -> None:
    assert store.describe()


# wrappers -----------------------------------------------------------------------------------------------------------------


def test_a_read_only_store_reads_and_refuses() -> None:
    inner = MemoryStore()
    inner.write("a", b"x", if_absent=True)
    store = ReadOnlyStore(inner)
    assert read(store, "a") == b"x" and list(store.list("")) == ["a"]
    calls: list[Callable[[], object]] = [
        lambda: store.write("b", b"", if_absent=True),
        lambda: store.replace("a", b"", b"x"),
        lambda: store.delete("a"),
    ]
    for call in calls:
        with pytest.raises(AccessDeniedError, match="reading only"):
            call()
    assert inner.objects == {"a": b"x"}


def test_metrics_count_requests_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    store = MetricsStore(MemoryStore())
    store.write("a", tmp_path / "source", if_absent=True)
    store.write("a", b"not written", if_absent=True)
    store.replace("b", b"123", None)
    read(store, "a")
    store.read_bytes("b", 3)
    store.stat("a")
    list(store.list(""))
    store.delete("a")
    assert dict(store.requests) == {"write": 2, "replace": 1, "read": 2, "stat": 1, "list": 1, "delete": 1}
    assert (store.bytes_read, store.bytes_written) == (8, 8)


def test_retrying_ends_at_its_deadline_with_growing_jittered_pauses() -> None:
    now = 0.0
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    def fault(operation: str, name: str) -> None:
        raise UnavailableError("down")

    store = RetryStore(FaultStore(MemoryStore(), fault=fault), seconds=20, sleep=sleep, clock=lambda: now)
    with pytest.raises(UnavailableError, match="down"):
        store.stat("a")
    assert now <= 20
    for number, pause in enumerate(pauses):
        full = min(0.2 * 2**number, 5.0)
        assert full / 2 <= pause <= full
    assert len({round(pause / min(0.2 * 2**number, 5.0), 3) for number, pause in enumerate(pauses)}) > 1


@pytest.mark.parametrize("error", [NotFoundError("no"), AccessDeniedError("no"), ConflictError("no"), StoreError("no")])
def test_permanent_errors_are_not_retried(error: StoreError) -> None:
    calls: list[str] = []

    def fault(operation: str, name: str) -> None:
        calls.append(operation)
        raise error

    store = RetryStore(FaultStore(MemoryStore(), fault=fault), seconds=60, sleep=lambda seconds: None)
    attempts: list[Callable[[], object]] = [
        lambda: store.stat("a"),
        lambda: store.read("a"),
        lambda: store.write("a", b"", if_absent=True),
        lambda: store.replace("a", b"", None),
    ]
    for attempt in attempts:
        with pytest.raises(type(error)):
            attempt()
    assert calls == ["stat", "read", "write", "replace"]


def test_a_stream_goes_on_where_it_broke_off() -> None:
    inner = MemoryStore()
    inner.write("big", BIG * 3, if_absent=True)
    broken = iter([False, True, False, False, True, True] + [False] * 100)

    def fault(operation: str, name: str) -> None:
        if operation == "chunk" and next(broken):
            raise UnavailableError("reset")

    counted = MetricsStore(FaultStore(inner, fault=fault))
    assert read(RetryStore(counted, seconds=60, sleep=lambda seconds: None), "big") == BIG * 3
    assert counted.bytes_read == len(BIG) * 3
    assert counted.requests["read"] == 4


def test_a_conflict_after_an_uncertain_attempt_is_still_a_conflict_if_it_was_not_ours() -> None:
    inner = MemoryStore()

    def fault(operation: str, name: str) -> None:
        if operation == "replace" and not inner.objects:
            inner.write("a", b"theirs", if_absent=True)
            raise UnavailableError("lost")

    store = RetryStore(FaultStore(inner, fault=fault), seconds=60, sleep=lambda seconds: None)
    with pytest.raises(ConflictError):
        store.replace("a", b"ours!!", None)
    assert inner.objects["a"] == b"theirs"


# files --------------------------------------------------------------------------------------------------------------------


def everything(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_others_can_read_what_was_published_under_a_strict_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        store = FileStore(tmp_path / "deep" / "store", create=True)
        store.write("a/b/c", b"x", if_absent=True)
        store.write("a/b/d", b"x", if_absent=False)
        store.replace("a/index", b"x", None)
    finally:
        os.umask(before)
    for path in (tmp_path / "deep").rglob("*"):
        if not path.name.startswith("."):
            assert stat.S_IMODE(path.stat().st_mode) == (0o755 if path.is_dir() else 0o644), path
            assert path.stat().st_nlink == 1 or path.is_dir()


@pytest.mark.parametrize("if_absent", [True, False])
def test_a_symbolic_link_is_no_object(tmp_path: Path, if_absent: bool) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    store = FileStore(tmp_path / "store", create=True)
    store.write("a/b", b"x", if_absent=True)
    (tmp_path / "store/a/link").symlink_to(secret)
    calls: list[Callable[[], object]] = [
        lambda: store.read("a/link"),
        lambda: store.read_bytes("a/link", 100),
        lambda: store.stat("a/link"),
        lambda: store.write("a/link", b"y", if_absent=if_absent),
        lambda: store.replace("a/link", b"y", b"secret"),
        lambda: store.delete("a/link"),
    ]
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call()
        assert not isinstance(caught.value, NotFoundError | UnavailableError)
    assert list(store.list("")) == ["a/b"]
    assert secret.read_bytes() == b"secret"


def test_a_pipe_is_no_object_and_nobody_waits_for_it(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", create=True)
    store.write("a/b", b"x", if_absent=True)
    os.mkfifo(tmp_path / "store/pipe")
    with pytest.raises(StoreError, match=r"regular file"):
        store.read_bytes("pipe", 10)
    assert list(store.list("")) == ["a/b"]


def test_a_directory_is_not_written_over(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", create=True)
    store.write("a/b", b"x", if_absent=True)
    for if_absent in (True, False):
        with pytest.raises(StoreError, match="a directory, not a regular file"):
            store.write("a", b"y", if_absent=if_absent)
    assert everything(tmp_path / "store") == {"a/b": b"x"}


def test_strangers_files_are_not_listed(tmp_path: Path) -> None:
    store = FileStore(tmp_path, create=True)
    store.write("a/b", b"x", if_absent=True)
    for name in (".hidden", ".tmp-0123", "with space", "a/.nfs000", "a/ä"):
        (tmp_path / name).write_bytes(b"")
    assert list(store.list("")) == ["a/b"]


def test_a_missing_store_is_never_a_missing_object(tmp_path: Path) -> None:
    """An unmounted volume must not look like a miss."""
    store = FileStore(tmp_path / "gone")
    calls: list[Callable[[], object]] = [
        lambda: store.stat("a"),
        lambda: store.read("a"),
        lambda: store.read_bytes("a", 1),
        lambda: store.list(""),
        lambda: store.write("a", b"", if_absent=True),
        lambda: store.write("a", b"", if_absent=False),
        lambda: store.replace("a", b"", None),
        lambda: store.delete("a"),
    ]
    for call in calls:
        with pytest.raises(StoreError, match="there is no store at") as caught:
            call()
        assert type(caught.value) is StoreError and caught.value.remedy
    assert not (tmp_path / "gone").exists()
    (tmp_path / "gone").write_bytes(b"")
    with pytest.raises(StoreError, match="not a directory"):
        store.stat("a")


def test_a_store_that_vanishes_while_it_is_used_is_an_error(tmp_path: Path) -> None:
    for number in range(3):
        FileStore(tmp_path / "store", create=True).write(f"d{number}/x", b"x", if_absent=True)
    store = FileStore(tmp_path / "store")
    names = store.list("")
    assert next(names) == "d0/x"
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    assert list(names) in ([], ["d1/x"], ["d1/x", "d2/x"])
    with pytest.raises(StoreError, match="there is no store at"):
        store.stat("d0/x")


def test_without_hard_links_an_object_is_still_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: Path, target: Path, **options: object) -> None:
        if target.name == "late":
            target.write_bytes(b"theirs")  # another writer, after we looked
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refused)
    store = FileStore(tmp_path / "store", create=True)
    assert store.write("a/b", b"x", if_absent=True)
    assert not store.write("a/b", b"y", if_absent=True)
    assert not store.write("a/late", b"ours", if_absent=True)
    assert everything(tmp_path / "store") == {"a/b": b"x", "a/late": b"theirs"}


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("operation", ["write", "write if absent", "replace"])
def test_a_full_disk_is_an_error_and_leaves_no_part(tmp_path: Path, operation: str) -> None:
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], check=False, capture_output=True)
    if done.returncode:
        pytest.skip("no mounts here")
    try:
        store = FileStore(tmp_path)
        store.replace("index", b"before", None)
        data = os.urandom(2 << 20)
        calls: dict[str, Callable[[], object]] = {
            "write": lambda: store.write("index", data, if_absent=False),
            "write if absent": lambda: store.write("other", data, if_absent=True),
            "replace": lambda: store.replace("index", data, b"before"),
        }
        with pytest.raises(StoreError, match="no room for") as caught:
            calls[operation]()
        assert type(caught.value) is StoreError
        assert {name: data for name, data in everything(tmp_path).items() if not name.startswith(".lock")} == {"index": b"before"}
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


@pytest.mark.root
@needs_root
def test_a_read_only_mount_can_be_read_and_not_written(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    FileStore(tmp_path / "s", create=True).write("a", b"x", if_absent=True)
    for command in (["mount", "--bind", "s", "m"], ["mount", "-o", "remount,bind,ro", "m"]):
        if subprocess.run(command, check=False, cwd=tmp_path, capture_output=True).returncode:
            pytest.skip("no mounts here")
    try:
        store = FileStore(tmp_path / "m", create=True)
        assert read(store, "a") == b"x" and list(store.list("")) == ["a"]
        calls: list[Callable[[], object]] = [
            lambda: store.write("a", b"", if_absent=False),
            lambda: store.write("b/c", b"", if_absent=True),
            lambda: store.replace("a", b"", b"x"),
            lambda: store.delete("a"),
        ]
        for call in calls:
            with pytest.raises(AccessDeniedError, match="Read-only"):
                call()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path / "m")], check=True)


@pytest.mark.root
@needs_root
def test_another_user_reads_and_is_told_that_it_may_not_write() -> None:
    with TemporaryDirectory() as made:
        root = Path(made)
        root.chmod(0o755)
        FileStore(root).write("a/b", b"x", if_absent=True)
        (root / "a" / "closed").write_bytes(b"")
        (root / "a" / "closed").chmod(0o600)
        store = FileStore(root, create=True)

        def child() -> list[str]:
            assert read(store, "a/b") == b"x"
            assert sorted(store.list("")) == ["a/b", "a/closed"]
            calls: list[Callable[[], object]] = [
                lambda: store.read("a/closed"),
                lambda: store.write("a/c", b"", if_absent=True),
                lambda: store.write("a/b", b"", if_absent=False),
                lambda: store.replace("a/b", b"", b"x"),
                lambda: store.delete("a/b"),
            ]
            return [said(call) for call in calls]

        assert in_child(child) == ["AccessDeniedError"] * 5
        assert everything(root) == {"a/b": b"x", "a/closed": b""}


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except StoreError as error:
        return type(error).__name__
    return "nothing"


def in_child(action: Callable[[], list[str]]) -> list[str]:
    """What `action` returns in a forked child of another uid."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            answer = "\n".join(action())
        except BaseException as error:  # noqa: BLE001 - whatever it was, the parent must hear it
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        return stream.read().split("\n")


WRITER = """
import sys
from pathlib import Path
from kcache.store.file import FileStore
store = FileStore(Path(sys.argv[1]), create=True)
data = {n: bytes([n]) * 3_000_000 for n in range(8)}
print("go", flush=True)
last = store.read_bytes("index", 1 << 30)
for number in range(10_000_000):
    n = number % 8
    store.write(f"objects/{number % 50}", data[n], if_absent=number % 2 == 0)
    store.replace("index", data[n], last)
    last = data[n]
"""


def test_a_killed_writer_leaves_whole_objects(tmp_path: Path) -> None:
    store = FileStore(tmp_path, create=True)
    store.write("index", b"\0" * 3_000_000, if_absent=True)
    for number in range(20):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"go\n"
            time.sleep(0.005 * number)
            process.send_signal(signal.SIGKILL)
        for name in store.list(""):
            data = store.read_bytes(name, 1 << 30)
            assert len(data) == 3_000_000 and len(set(data)) == 1, name
        store.replace("index", b"\0" * 3_000_000, store.read_bytes("index", 1 << 30))


SWAPPER = """
import sys
from pathlib import Path
from kcache.errors import ConflictError
from kcache.store.file import FileStore
store = FileStore(Path(sys.argv[1]))
done = 0
while done < 30:
    data = store.read_bytes("counter", 100)
    try:
        store.replace("counter", str(int(data) + 1).encode(), data)
        done += 1
    except ConflictError:
        pass
"""

ABSENT_WRITER = """
import sys
from pathlib import Path
from kcache.store.file import FileStore
store = FileStore(Path(sys.argv[1]))
print(sum(store.write(f"race/{n}", b"%d" % n * 5000, if_absent=True) for n in range(60)))
"""


def test_processes_that_swap_one_object_lose_no_update(tmp_path: Path) -> None:
    store = FileStore(tmp_path, create=True)
    store.write("counter", b"0", if_absent=True)
    processes = [subprocess.Popen([sys.executable, "-c", SWAPPER, str(tmp_path)]) for _ in range(4)]
    assert [process.wait(300) for process in processes] == [0] * 4
    assert store.read_bytes("counter", 100) == b"120"


def test_of_many_writers_of_one_object_exactly_one_wrote_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ABSENT_WRITER, str(tmp_path)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(4)]
    assert sum(int(process.communicate(timeout=300)[0]) for process in processes) == 60
    assert len(everything(tmp_path)) == 60


def test_a_lock_that_is_held_makes_a_swap_unavailable_not_lost(tmp_path: Path) -> None:
    from kcache import fsops

    store = FileStore(tmp_path, create=True, lock_timeout=0.05)
    store.replace("index", b"x", None)
    with fsops.locked(tmp_path / ".lock-index", 0), pytest.raises(UnavailableError, match=r"cannot write index .*\.lock-index"):
        store.replace("index", b"y", b"x")
    assert store.read_bytes("index", 1) == b"x"


# open ---------------------------------------------------------------------------------------------------------------------


def test_a_store_is_opened_by_url_or_by_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with space").mkdir()
    monkeypatch.chdir(tmp_path)
    for url in (
        str(tmp_path / "with space"),
        "with space",
        "./with space",
        f"file://{tmp_path}/with%20space",
        f"file://localhost{tmp_path}/with%20space",
    ):
        assert open_store(url).describe() == str(tmp_path / "with space")


def test_opening_makes_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "new" / "store"), create=True)
    assert not (tmp_path / "new").exists()
    store.write("a", b"x", if_absent=True)
    assert (tmp_path / "new" / "store" / "a").read_bytes() == b"x"
    with pytest.raises(StoreError, match="there is no store at"):
        open_store(str(tmp_path / "other")).stat("a")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("hf://owner", "does not name a repository"),
        ("hf://owner/repo@", "does not name a revision"),
        ("hf://owner/repo@a..b", "does not name a revision"),
        ("hf://owner/repo/../x", "does not name a directory"),
        ("hf://datasets/owner/repo", "no model repository"),
        ("https://user@host/x", "does not name a directory on a web server"),
        ("s3://bucket/x", r"s3://; Known|s3://"),
        ("http://host/x", "for this host only"),
        ("file://host/dir", "three slashes"),
        ("file://dir", "three slashes"),
        ("", "no name"),
    ],
)
def test_what_is_no_store_is_a_usage_error_that_lists_what_is(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        open_store(url)
    assert any(form in str(caught.value) for form in ("file:///", "hf://owner/repo", "https://"))


def test_importing_stores_is_cheap() -> None:
    names = "kcache.store.open, kcache.store.file, kcache.store.wrappers"
    code = f"import sys; before = set(sys.modules); import {names}; print(*set(sys.modules) - before)"
    loaded = set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())
    assert not loaded & {
        "subprocess",
        "tempfile",
        "random",
        "logging",
        "zstandard",
        "huggingface_hub",
        "click",
        "kcache.manifest",
    }


def test_a_chunk_iterator_that_is_dropped_closes_its_file(tmp_path: Path) -> None:
    store = FileStore(tmp_path, create=True)
    store.write("a", BIG, if_absent=True)

    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = open_files()
    chunks: Iterator[bytes] | None = store.read("a")
    assert chunks is not None
    next(chunks)
    assert open_files() == before + 1
    chunks = None
    assert open_files() == before
