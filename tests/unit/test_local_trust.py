"""Case B43 through the real command line: what somebody else could have changed is neither loaded nor written, and CMD starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from container import Container
from entries import make_fitting_entry, publish

NOBODY = 65534


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("published")
    make_fitting_entry(place / "out")
    publish(place / "out", place / "store")
    return place / "store"


def installed(root: Path) -> dict[str, int]:
    """Entries and views, with their change times."""
    return {str(path): path.lstat().st_ctime_ns for room in ("entries", "site") for path in root.glob(f"**/{room}/**/*")}


def world_writable(root: Path) -> None:
    root.chmod(0o777)


def group_writable_below(root: Path) -> None:
    (root / "v1" / "entries").chmod(0o775)


def foreign(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    os.chown(root / "v1", NOBODY, NOBODY)


def linked_elsewhere(root: Path) -> None:
    (root / "v1").rename(root / "elsewhere")
    (root / "v1").symlink_to(root / "elsewhere")


@pytest.mark.parametrize("spoil", [world_writable, group_writable_below, foreign, linked_elsewhere])
def test_a_cache_that_others_could_change_is_refused_with_the_remedy(
    tmp_path: Path, store: Path, spoil: Callable[[Path], None]
) -> None:
    root = tmp_path / "cache"
    host = Container(home=tmp_path / "home", environ={"KCACHE_DIR": str(root)})
    assert host.restore(store).document["status"] == "hit"
    spoil(root)
    before = installed(root)
    done = host.restore(store, "--", "/usr/bin/touch", "reached")
    assert "PYTHONPATH" not in done.document["env"], done.err
    assert done.document["status"] == "error"
    assert "chmod" in done.err or "KCACHE_DIR" in done.err
    assert installed(root) == before
    assert (host.home / "reached").exists()


def library_linked(library: Path) -> None:
    library.rename(library.with_name("other"))
    library.symlink_to("other")


def library_hard_linked(library: Path) -> None:
    os.link(library, library.parents[4] / "outside")


def library_for_all(library: Path) -> None:
    library.chmod(0o666)


def library_a_pipe(library: Path) -> None:
    library.unlink()
    os.mkfifo(library)


@pytest.mark.parametrize("spoil", [library_linked, library_hard_linked, library_for_all, library_a_pipe])
def test_a_library_that_others_could_change_is_replaced_by_a_verified_one(
    tmp_path: Path, store: Path, spoil: Callable[[Path], None]
) -> None:
    host = Container(home=tmp_path / "home")
    assert host.restore(store).document["status"] == "hit"
    [library] = host.libraries
    spoil(library)
    done = host.restore(store)
    assert done.document["status"] == "hit", done.err
    assert "set aside" in done.err
    found = library.lstat()
    assert (found.st_nlink, found.st_mode & 0o177777) == (1, 0o100644)


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path, store: Path) -> None:
    host = Container(home=tmp_path / "home")
    base = host.home / ".cache" / "kcache" / "v1"
    base.mkdir(parents=True)
    (base / "lock").symlink_to(tmp_path / "victim")
    done = host.restore(store)
    assert done.document["status"] == "error"
    assert "symbolic link" in done.err
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("mask", ["000", "077", "777"])
def test_modes_are_safe_and_readable_whatever_the_umask(tmp_path: Path, store: Path, mask: str) -> None:
    host = Container(home=tmp_path / "home", prefix=("/bin/sh", "-c", f'umask {mask}; exec "$@"', "sh"))
    (tmp_path / "home" / ".cache").mkdir(parents=True)
    assert host.variables["PATH"]  # makes the container's own directories, which the mask is not about
    assert host.restore(store).document["status"] == "hit"
    assert host.restore(store, "--", "/bin/true").code == 0  # leaves the record of a start
    root = host.home / ".cache" / "kcache"
    wrong = []
    for path in [root, *root.rglob("*")]:
        mode = path.lstat().st_mode & 0o7777
        if not path.is_symlink() and mode != (0o755 if path.is_dir() else 0o600 if path.name == "lock" else 0o644):
            wrong.append((path, oct(mode)))
    assert not wrong
