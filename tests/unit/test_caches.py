"""The cache root in force, on hosts as containers have them (case B06): real users, real mounts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kcache.probe.caches import CacheRoot, cache_root, home_directory

NOBODY_AT_ALL = 4242
"""A uid with no passwd entry."""

ASK = (
    "import json, os, sys; from kcache.probe.caches import cache_root; r = cache_root(os.environ, os.geteuid()); "
    "print(json.dumps({'path': r.path, 'base': r.base, 'reason': r.reason, 'exports': dict(r.exports), 'rejected': r.rejected}))"
)


def root(**environ: str) -> CacheRoot:
    return cache_root(environ, os.geteuid())


def test_kcache_dir_comes_first_and_flashinfer_keeps_its_own_base(tmp_path: Path) -> None:
    found = root(KCACHE_DIR=str(tmp_path / "k"), FLASHINFER_WORKSPACE_BASE=str(tmp_path / "f"), HOME=str(tmp_path))
    assert (found.path, found.base, found.reason) == (str(tmp_path / "k"), str(tmp_path / "f"), "KCACHE_DIR")
    assert found.exports == {}


def test_flashinfers_base_comes_before_home(tmp_path: Path) -> None:
    found = root(FLASHINFER_WORKSPACE_BASE=str(tmp_path / "f"), HOME=str(tmp_path))
    assert (found.path, found.base, found.exports) == (f"{tmp_path}/f/.cache/kcache", f"{tmp_path}/f", {})


def test_a_usable_home_needs_no_exports(tmp_path: Path) -> None:
    found = root(HOME=f"{tmp_path}/", XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert (found.path, found.base, found.reason, found.exports) == (f"{tmp_path}/.cache/kcache", str(tmp_path), "HOME", {})
    assert found.rejected == ()


@pytest.mark.parametrize("home", ["/", "/nonexistent", "relative", "", "/dev/null"])
def test_an_unusable_home_is_passed_over_and_flashinfer_is_told(tmp_path: Path, home: str) -> None:
    (tmp_path / "xdg").mkdir()
    found = root(HOME=home, XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert (found.path, found.base, found.reason) == (f"{tmp_path}/xdg/kcache", f"{tmp_path}/xdg", "XDG_CACHE_HOME")
    assert found.exports == {"FLASHINFER_WORKSPACE_BASE": f"{tmp_path}/xdg"}
    assert len(found.rejected) == 1
    assert found.rejected[0].startswith("HOME: ")


def test_kcache_dir_with_an_unusable_home_gives_flashinfer_a_base_too(tmp_path: Path) -> None:
    (tmp_path / "xdg").mkdir()
    found = root(KCACHE_DIR=str(tmp_path / "k"), HOME="/nonexistent", XDG_CACHE_HOME=str(tmp_path / "xdg"))
    assert found.path == str(tmp_path / "k")
    assert found.exports == {"FLASHINFER_WORKSPACE_BASE": f"{tmp_path}/xdg"}


def test_a_base_that_is_no_directory_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o755)
    (tmp_path / "broken").symlink_to(tmp_path / "none")
    for bad in (f"{tmp_path}/file", f"{tmp_path}/file/below", f"{tmp_path}/broken/x", "not/absolute"):
        found = root(KCACHE_DIR=bad, HOME=str(tmp_path))
        assert (found.path, found.reason) == (f"{tmp_path}/.cache/kcache", "HOME")
        assert found.rejected[0].startswith("KCACHE_DIR: ")


def test_home_is_what_pathlib_says(tmp_path: Path) -> None:
    for environ in ({"HOME": str(tmp_path)}, {"HOME": f"{tmp_path}//"}, {"HOME": "/"}, {"HOME": ""}, {}):
        command = [sys.executable, "-c", "import pathlib; print(pathlib.Path.home().as_posix())"]
        done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=60)
        assert home_directory(environ, os.geteuid()) == done.stdout.strip()
    assert home_directory({}, NOBODY_AT_ALL) is None


def in_container(
    script: str, *, environ: Mapping[str, str], uid: int = NOBODY_AT_ALL, ask: str = ASK, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Runs `ask` as another user in a mount namespace that `script` has prepared."""
    package = str(Path(__file__).parents[2])
    inner = f'{script}\nexec setpriv --reuid {uid} --regid {uid} --clear-groups -- "$PYTHON" -c "$ASK"'
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-euc", inner]
    base = {"PATH": os.environ["PATH"], "PYTHON": python, "ASK": ask, "PYTHONPATH": package, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, env={**base, **environ}, capture_output=True, text=True, timeout=300, check=False)


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def mount_point() -> Iterator[Path]:
    """A directory that another user can reach; pytest's own are closed to others."""
    folder = Path("/mnt") / f"kcache-test-{os.getpid()}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def only_here(point: Path, options: str = "mode=0755,uid=4242") -> str:
    """Everything read-only but one tmpfs: `/` last, since mounting needs nothing written."""
    hidden = "".join(f"mount -t tmpfs -o ro,size=1m none {place}\n" for place in ("/tmp", "/var/tmp", "/dev/shm"))
    return f"{hidden}mount -t tmpfs -o size=8m,{options} none {point}\nmount -o remount,bind,ro /\n"


def python_for_others() -> str:
    """An interpreter that a user without rights can run; ours may lie in root's home."""
    for python in (sys.executable, "/usr/bin/python3"):
        user = ["setpriv", "--reuid", str(NOBODY_AT_ALL), "--regid", str(NOBODY_AT_ALL), "--clear-groups"]
        done = subprocess.run([*user, python, "-c", "import click"], env={}, capture_output=True, timeout=60, check=False)
        if done.returncode == 0:
            return python
    pytest.skip("no interpreter that another user can run")


@pytest.mark.root
def test_read_only_root_and_one_writable_mount_use_that_mount_and_export_it(mount_point: Path) -> None:
    found = answer(in_container(only_here(mount_point), environ={"HOME": "/"}, python=python_for_others()))
    assert found["path"] == f"{mount_point}/.cache/kcache"
    assert found["reason"] == f"writable mount {mount_point}"
    assert found["exports"] == {"FLASHINFER_WORKSPACE_BASE": str(mount_point), "TMPDIR": str(mount_point)}


@pytest.mark.root
def test_without_home_and_passwd_entry_home_is_exported_as_well(mount_point: Path) -> None:
    found = answer(in_container(only_here(mount_point), environ={}, python=python_for_others()))
    assert found["exports"] == dict.fromkeys(("FLASHINFER_WORKSPACE_BASE", "HOME", "TMPDIR"), str(mount_point))


@pytest.mark.root
def test_without_any_writable_place_there_is_a_reason_and_no_exception(mount_point: Path) -> None:
    found = answer(in_container(only_here(mount_point, "mode=0755,uid=0"), environ={"HOME": "/"}, python=python_for_others()))
    assert (found["path"], found["base"], found["exports"]) == (None, None, {})
    assert found["reason"] == "no directory can be written"
    assert f"writable mount {mount_point}: {mount_point} cannot be written" in str(found["rejected"])


@pytest.mark.root
def test_a_mount_that_forbids_loading_is_passed_over(mount_point: Path) -> None:
    found = answer(in_container(only_here(mount_point, "mode=0755,uid=4242,noexec"), environ={}, python=python_for_others()))
    assert found["path"] is None
    assert "noexec" in str(found["rejected"])


@pytest.mark.root
def test_in_a_directory_for_everyone_the_cache_is_private(mount_point: Path) -> None:
    script = only_here(mount_point, "mode=1777")
    found = answer(in_container(script, environ={"HOME": "/nonexistent"}, python=python_for_others()))
    assert found["base"] == f"{mount_point}/kcache-4242"
    assert found["path"] == f"{mount_point}/kcache-4242/.cache/kcache"


@pytest.mark.root
@pytest.mark.parametrize(
    "trap", ["mkdir -m 755 {0}; chown 1000 {0}", "ln -s /tmp {0}", "mkdir {0}; chown 4242 {0}; chmod 777 {0}"]
)
def test_a_private_directory_that_somebody_else_made_is_not_taken(mount_point: Path, trap: str) -> None:
    script = only_here(mount_point, "mode=1777") + trap.format(f"{mount_point}/kcache-4242")
    found = answer(in_container(script, environ={}, python=python_for_others()))
    assert found["path"] is None


@pytest.mark.root
def test_a_mount_on_disk_comes_before_one_in_memory(mount_point: Path) -> None:
    (mount_point / "disk").mkdir()
    (mount_point / "memory").mkdir()
    (mount_point / "data").mkdir()
    os.chown(mount_point / "data", NOBODY_AT_ALL, NOBODY_AT_ALL)
    script = (
        "".join(f"mount -t tmpfs -o ro,size=1m none {place}\n" for place in ("/tmp", "/var/tmp", "/dev/shm"))
        + f"mount -t tmpfs -o size=8m,mode=0755,uid=4242 none {mount_point}/memory\n"
        + f"mount --bind {mount_point}/data {mount_point}/disk\nmount -o remount,bind,ro /\n"
    )
    found = answer(in_container(script, environ={}, python=python_for_others()))
    assert found["base"] == f"{mount_point}/disk"


@pytest.mark.root
@pytest.mark.real
@pytest.mark.parametrize("home", [None, "/", "/nonexistent"])
def test_with_the_exports_flashinfer_starts_and_without_them_it_does_not(mount_point: Path, home: str | None) -> None:
    """The real FlashInfer, as a user without passwd entry, with everything read-only but one mount."""
    python = python_for_others()
    environ = {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", **({} if home is None else {"HOME": home})}
    ask = "import flashinfer; print('imported')"
    found = answer(in_container(only_here(mount_point), environ=environ, python=python))
    exports = found["exports"]
    assert isinstance(exports, dict)
    before = in_container(only_here(mount_point), environ=environ, ask=ask, python=python)
    assert before.returncode != 0
    after = in_container(only_here(mount_point), environ={**environ, **exports}, ask=ask, python=python)
    assert after.returncode == 0, after.stderr
    assert "imported" in after.stdout
