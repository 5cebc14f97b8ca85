"""What faults happen to: real commands on real directories, and what must be true of these afterwards.

`check` looks at the files as they lie, says whether they are the `old` or the `new` state, and raises if they are neither.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from container import REPOSITORY, Container
from entries import make_entry, make_fitting_entry, publish, restored

from kcache.local_cache import Damage, InstalledEntry, LocalCache
from kcache.store.file import FileStore

OLD, NEW = "old", "new"
LIBRARIES = {"cascade": b"\x7fELF cascade" * 9000, "page": b"\x7fELF page" * 30_000}
"""Bytes of two modules: small, and each longer than one piece of an archive."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One command that changes something.

    make:    fills an empty directory with the old state.
    words:   the command line in that directory.
    under:   what the command changes: faults happen there.
    check:   see the module.
    """

    name: str
    make: Callable[[Path], None]
    words: Callable[[Path], Sequence[str]]
    under: Callable[[Path], Path]
    check: Callable[[Path], str]

    def vanishing(self, place: Path) -> Path:
        """The directory that is worked in."""
        return cache_of(place).root if self.under(place) == _home(place) else self.under(place)

    def command(self, place: Path) -> list[str]:
        return [sys.executable, "-m", "kcache", *self.words(place)]


def environ(place: Path) -> Mapping[str, str]:
    """Variables of the commands: a home of their own, and this checkout."""
    return {**Container(home=place / "home").variables, "PYTHONPATH": str(REPOSITORY)}


def kcache(place: Path, *words: str) -> None:
    """A command without any fault."""
    command = [sys.executable, "-m", "kcache", *words]
    done = subprocess.run(command, env=environ(place), cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def cache_of(place: Path) -> LocalCache:
    return LocalCache(place / "home" / ".cache" / "kcache")


def _restore_words(place: Path) -> list[str]:
    return ["restore", "--from", str(place / "store"), "--arch", "9.0a", "--json"]


def make_store(place: Path) -> None:
    make_fitting_entry(place / "entries", LIBRARIES)
    publish(place / "entries", place / "store")


def _make_damaged(place: Path) -> None:
    make_store(place)
    kcache(place, *_restore_words(place))
    [library] = (cache_of(place).base / "entries").glob("*/page/page.so")
    library.write_bytes(library.read_bytes()[:5000])


def check_cache(place: Path) -> str:
    """Nothing, or damage that a look notices, is old; a whole entry is new. A library that has its name is whole."""
    cache = cache_of(place)
    found = [cache.find(fingerprint) for fingerprint in cache.fingerprints()]
    for library in (cache.base / "entries").glob("*/*/[!.]*.so"):
        whole = library.read_bytes() == LIBRARIES[library.stem]
        assert whole or any(isinstance(one, Damage) for one in found) or not found, f"{library} is visible and not whole"
    state = OLD
    for one in found:
        if isinstance(one, InstalledEntry):
            state = NEW
            assert {path.stem: path.read_bytes() for path in one.directory.glob("*/[!.]*.so")} == LIBRARIES
    for view in cache.site.glob("*/flashinfer_jit_cache/__init__.py"):
        assert (view.parent / "kcache.json").is_file(), f"{view.parent} can be imported and is not whole"
    return state


def _make_entries(place: Path) -> None:
    """Two environments' worth of entries, one published already."""
    make_entry(place / "first", {"norm": b"norm" * 900})
    publish(place / "first", place / "store")
    make_entry(place / "entries", {"cascade": b"cascade" * 900})
    make_entry(place / "entries", {"page": b"page" * 900}, kind="page")
    make_entry(place / "entries", {"page": b"page 0.7.2" * 900}, kind="page", flashinfer_version="0.7.2")


def _make_bundle(place: Path) -> None:
    _make_entries(place)
    publish(place / "entries", place / "source")
    kcache(place, "export", "--from", str(place / "source"), "-o", str(place / "bundle.tar"))
    shutil.rmtree(place / "source")


def check_store(place: Path) -> str:
    """Whatever an index names is whole and right, and what was published before stays so."""
    store = FileStore(place / "store")
    seen: set[bytes] = set()
    for version in ("0.7.4", "0.7.2"):
        ingredients = {"flashinfer.version": version, "platform.machine": "x86_64", "cuda.release": "13.0"}
        seen |= {data for files in _restored(store, ingredients).values() for data in files.values()}
    everything = {b"norm" * 900, b"cascade" * 900, b"page" * 900, b"page 0.7.2" * 900}
    assert b"norm" * 900 in seen and seen <= everything
    return NEW if seen == everything else OLD


def _restored(store: FileStore, ingredients: Mapping[str, str]) -> dict[str, dict[str, bytes]]:
    from kcache.workflows.catalog import read_index

    index = read_index(store, ingredients)
    return restored(store, index) if index is not None else {}


def _make_installed(place: Path) -> None:
    make_store(place)
    kcache(place, *_restore_words(place))


def check_pruned(place: Path) -> str:
    """Whole and installed is old; new is not installed, and all of its files are gone once a prune has ended."""
    return OLD if check_cache(place) == NEW or any((cache_of(place).base / "entries").iterdir()) else NEW


def _make_published(place: Path) -> None:
    _make_entries(place)
    publish(place / "entries", place / "store")


def check_pruned_store(place: Path) -> str:
    """What stays is whole all the time; what goes can be had whole as long as an index names it. New: its files are gone."""
    check_store(place)
    files = [path for path in (place / "store").rglob("*") if path.is_file()]
    # Hidden files are what a killed writer left: they go when they are a day old.
    left = [path for path in files if "flashinfer-0.7.2" in str(path) and not path.name.startswith(".")]
    manifests = [path for path in left if path.parent.parent.name == "entries" and "gone" not in path.name]
    return OLD if manifests or len(list((place / "store").rglob("*.tar.zst"))) != 3 else NEW


def _store(place: Path) -> Path:
    return place / "store"


def _home(place: Path) -> Path:
    return place / "home"


RESTORE = Scenario(name="restore", make=make_store, words=_restore_words, under=_home, check=check_cache)
REPAIR = Scenario(name="restore of a damaged entry", make=_make_damaged, words=_restore_words, under=_home, check=check_cache)
PUBLISH = Scenario(
    name="publish",
    make=_make_entries,
    words=lambda place: ["publish", str(place / "entries"), "--to", str(place / "store")],
    under=_store,
    check=check_store,
)
IMPORT = Scenario(
    name="import",
    make=_make_bundle,
    words=lambda place: ["import", str(place / "bundle.tar"), "--to", str(place / "store")],
    under=_store,
    check=check_store,
)
PRUNE = Scenario(
    name="prune",
    make=_make_installed,
    words=lambda place: ["prune", "--version", "*", "--grace", "0s"],
    under=_home,
    check=check_pruned,
)
PRUNE_STORE = Scenario(
    name="prune of a store",
    make=_make_published,
    words=lambda place: ["prune", "--in", str(place / "store"), "--version", "0.7.2", "--grace", "0s"],
    under=_store,
    check=check_pruned_store,
)
SCENARIOS: tuple[Scenario, ...] = (RESTORE, REPAIR, PUBLISH, IMPORT, PRUNE, PRUNE_STORE)
