"""`kcache prune`: what goes, what stays and why, here and in a store. Real processes hold entries."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from container import Container
from entries import INGREDIENTS, make_entry, make_fitting_entry, publish, restored

from kcache.errors import KcacheError, UsageError
from kcache.index import Index, index_path
from kcache.local_cache import LocalCache
from kcache.store.file import FileStore
from kcache.workflows.catalog import read_index
from kcache.workflows.prune import prune
from kcache.workflows.prune_rules import Candidate, Rules, decide, parse_duration, parse_size
from kcache.workflows.prune_store import LEDGER, prune_store

DAY = 86400.0
LIBRARY = b"\x7fELF cascade" * 900


def candidate(name: str, *, size: int = 10, made: float = 0, used: float = 0, held: str = "", version: str = "1") -> Candidate:
    return Candidate(fingerprint=name, title=name, version=version, size=size, made=made, used=used, held=held)


FOUR = (
    candidate("a", made=1 * DAY, used=9 * DAY),
    candidate("b", made=2 * DAY, used=2 * DAY, version="2.1"),
    candidate("c", made=3 * DAY, used=3 * DAY, held="process 1 uses it"),
    candidate("d", made=99 * DAY, used=99 * DAY),
)


@pytest.mark.parametrize(
    ("rules", "gone"),
    [
        (Rules(), ""),
        (Rules(older_than=8.5 * DAY), "a"),
        (Rules(unused_for=5 * DAY), "b"),
        (Rules(unused_for=0), "ab"),
        (Rules(versions=("2.*",)), "b"),
        (Rules(versions=("*",)), "abd"),
        (Rules(max_bytes=40), ""),
        (Rules(max_bytes=30), "b"),
        (Rules(max_bytes=20), "ab"),
        (Rules(max_bytes=0), "abd"),
        (Rules(max_bytes=30, versions=("2.*",)), "b"),
    ],
)
def test_an_entry_goes_if_any_rule_says_so_and_nothing_holds_it(rules: Rules, gone: str) -> None:
    verdicts = decide(FOUR, rules, now=10 * DAY)
    assert sorted(verdict.candidate.title for verdict in verdicts if verdict.remove) == sorted(gone)
    assert all(verdict.why for verdict in verdicts)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("30d", 30 * DAY), ("2w", 14 * DAY), ("0s", 0)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "d", "-1d", "1 d", "1e9d", "nan", "inf"])
def test_what_is_no_duration_or_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_duration(text)
    if text != "5":
        with pytest.raises(UsageError):
            parse_size(text)
    assert parse_size("1.5K") == 1536


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Container:
    """A host with one restored entry. Tests put back what they take."""
    place = tmp_path_factory.mktemp("prune")
    make_fitting_entry(place / "entries", {"cascade": LIBRARY})
    publish(place / "entries", place / "store")
    return Container(home=place / "home")


def fill(container: Container) -> Mapping[str, str]:
    done = container.restore(container.home.parent / "store")
    assert done.document["status"] == "hit", done.err
    env = done.document["env"]
    assert isinstance(env, dict)
    return env


def cache_of(container: Container) -> LocalCache:
    return LocalCache(container.home / ".cache" / "kcache")


def test_the_command_says_what_would_go_and_then_removes_it(container: Container) -> None:
    fill(container)
    [library] = container.libraries
    dry = container.kcache("prune", "--version", "*", "--grace", "0s", "--dry-run", "--json")
    assert dry.document["entries"][0]["status"] == "removed" and dry.document["dry_run"] and library.exists()
    kept = container.kcache("prune", "--version", "*")
    assert "keeps cascade" in kept.out and "a short while ago" in kept.out and library.exists()
    done = container.kcache("prune", "--version", "*", "--grace", "0s")
    assert done.code == 0 and "removes cascade" in done.out and "MB freed" in done.err
    assert not container.libraries and not list(cache_of(container).site.iterdir())[1:]
    fill(container)
    assert [path.read_bytes() for path in container.libraries] == [LIBRARY]


def held(container: Container) -> str:
    """Why the only entry stays, where every rule says that it goes; nothing is removed."""
    [verdict] = prune(cache_of(container), Rules(versions=("*",)), grace=0).verdicts
    assert not verdict.remove and container.libraries
    return verdict.why


def test_what_a_process_has_loaded_open_or_on_its_path_stays(container: Container) -> None:
    env = fill(container)
    [library] = container.libraries
    mapped = "import mmap, sys; f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 0, prot=1); f.close()"
    opened = "import sys; f = open(sys.argv[1])"
    for code, variables in ((mapped, {}), (opened, {}), ("", env)):
        command = [sys.executable, "-c", f"{code}\nprint(flush=True)\ninput()", str(library)]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, **variables}) as process:
            assert process.stdout is not None and process.stdout.readline()
            assert held(container) == f"process {process.pid} uses it"
            process.communicate(b"\n")
    [verdict] = prune(cache_of(container), Rules(versions=("*",)), grace=0).verdicts
    assert verdict.remove and not container.libraries


def test_a_library_that_is_mapped_outlives_its_name(container: Container) -> None:
    """A server in another PID namespace is not seen: what it has loaded goes on working."""
    fill(container)
    [library] = container.libraries
    with library.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as loaded:
        prune(cache_of(container), Rules(versions=("*",)), grace=0)  # this process does not look at itself
        assert not library.exists() and loaded[:] == LIBRARY


def test_leftovers_go_without_any_rule_and_entries_stay(container: Container) -> None:
    fill(container)
    [library] = container.libraries
    cache = cache_of(container)
    (library.parent / ".tmp-0123").write_bytes(b"x" * 1000)
    (library.parent / ".damaged-cascade.so").write_bytes(b"x")
    (cache.base / "entries" / ("0" * 64) / "page").mkdir(parents=True)
    (cache.site / "0123456789abcdef").mkdir()
    os.utime(cache.site / "0123456789abcdef", (1, 1))
    (library.parent / "stranger").symlink_to(container.home.parent / "store")
    done = prune(cache, Rules())
    assert len(done.leftovers) == 4 and container.libraries == [library]
    assert not list(cache.base.rglob(".tmp-*")) and not (cache.base / "entries" / ("0" * 64)).exists()
    prune(cache, Rules(versions=("*",)), grace=0)
    assert (container.home.parent / "store" / "v1").is_dir(), "a link was followed"


def test_last_use_is_when_an_environment_was_restored(container: Container) -> None:
    fill(container)
    cache = cache_of(container)
    [fingerprint] = cache.fingerprints()
    for path in (*cache.base.glob("current/*.json"), cache.entry_directory(fingerprint) / "receipt.json"):
        os.utime(path, (1e9, 1e9))
    assert [verdict.remove for verdict in prune(cache, Rules(unused_for=DAY), dry_run=True).verdicts] == [True]
    fill(container)  # nothing to do, and yet used
    assert [verdict.remove for verdict in prune(cache, Rules(unused_for=DAY), dry_run=True).verdicts] == [False]


# stores -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    make_entry(tmp_path / "entries", {"cascade": LIBRARY})
    make_entry(tmp_path / "entries", {"page": b"page"}, kind="page")
    make_entry(tmp_path / "entries", {"old": b"old"}, kind="page", flashinfer_version="0.6.18")
    publish(tmp_path / "entries", tmp_path / "store")
    return FileStore(tmp_path / "store")


OLD = {**INGREDIENTS, "flashinfer.version": "0.6.18"}


def index(store: FileStore) -> Index:
    found = read_index(store, OLD)
    assert found is not None
    return found


def test_a_store_loses_its_index_line_first_and_its_files_after_the_grace_time(store: FileStore, tmp_path: Path) -> None:
    before = index(store)
    rules = Rules(versions=("0.6.*",))
    dry = prune_store(store, rules, dry_run=True, now=1 * DAY)
    assert index(store) == before and len(dry.waiting) == 2 and store.stat(LEDGER) is None
    prune_store(store, rules, now=1 * DAY)
    assert index(store).entries == ()
    assert len(restored(store, before)) == 1, "a reader of the old index"
    publish(tmp_path / "entries", tmp_path / "other")  # something else happens
    assert not prune_store(store, rules, now=7.9 * DAY).deleted
    assert len(restored(store, before)) == 1
    assert len(prune_store(store, rules, now=8 * DAY).deleted) == 2
    assert len(restored(store)) == 2
    assert sum("archives" in name for name in store.list("v1")) == 2
    assert not prune_store(store, Rules(), now=99 * DAY).deleted


def test_what_was_pruned_is_published_again_if_asked_for_and_never_by_itself(store: FileStore, tmp_path: Path) -> None:
    prune_store(store, Rules(versions=("0.6.*",)), now=1 * DAY)
    make_entry(tmp_path / "more", {"more": b"more"}, kind="more", flashinfer_version="0.6.18")
    publish(tmp_path / "more", tmp_path / "store")
    assert len(restored(store, index(store))) == 1
    publish(tmp_path / "entries", tmp_path / "store")
    assert len(restored(store, index(store))) == 2
    prune_store(store, Rules(), now=99 * DAY)
    prune_store(store, Rules(), now=199 * DAY)
    assert len(restored(store, index(store))) == 2


def test_ages_in_a_store_count_from_the_first_prune_and_a_clock_set_back_makes_nothing_older(store: FileStore) -> None:
    assert not [v for v in prune_store(store, Rules(older_than=5 * DAY), now=100 * DAY).verdicts if v.remove]
    assert not [v for v in prune_store(store, Rules(older_than=5 * DAY), now=50 * DAY).verdicts if v.remove]
    assert len([v for v in prune_store(store, Rules(older_than=5 * DAY), now=56 * DAY).verdicts if v.remove]) == 3


def test_the_largest_size_of_a_store(store: FileStore) -> None:
    verdicts = prune_store(store, Rules(max_bytes=0), now=DAY).verdicts
    assert [verdict.remove for verdict in verdicts] == [True] * 3
    with pytest.raises(UsageError, match="last used"):
        prune_store(store, Rules(unused_for=1))


def test_a_damaged_ledger_starts_the_times_anew_and_a_damaged_index_stops_all(store: FileStore, tmp_path: Path) -> None:
    prune_store(store, Rules(versions=("0.6.*",)), now=DAY)
    for text in ("[", "[]", '{"unused": {"a": "b"}, "seen": 3}', json.dumps({"unused": {"a": -1}})):
        (tmp_path / "store" / LEDGER).write_text(text)
        assert not prune_store(store, Rules(), now=99 * DAY).deleted
    path = tmp_path / "store" / index_path(OLD)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(KcacheError):
        prune_store(store, Rules(versions=("*",)), now=999 * DAY)
    assert len(restored(store)) == 2
