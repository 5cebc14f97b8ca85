"""Restores while something else goes on: another publish, another environment, another clock, another user. Real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp
from threading import Event

import pytest
from container import REPOSITORY, ROOT, Container, Done, open_up
from entries import make_fitting_entry, publish

from kcache import fsops
from kcache.probe.packages import this_interpreter

GENERATIONS = 8
SECONDS = 3.0
"""How long two environments go on restoring."""

FLASHINFERS = [Path(path) for path in os.environ.get("KCACHE_TEST_FLASHINFERS", "").split(":") if path]
LIBRARY = b"\x7fELF cascade" * 20_000


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(home=tmp_path / "home")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    make_fitting_entry(tmp_path / "entries", {"cascade": LIBRARY})
    publish(tmp_path / "entries", tmp_path / "store")
    return tmp_path / "store"


def action(done: Done) -> str:
    """What a restore did, which must have been a hit without any warning."""
    assert (done.code, done.document["status"], done.document["warnings"]) == (0, "hit", []), done.err
    [entry] = done.document["kinds"]["modules"]["entries"]
    return str(entry["action"])


def until(seconds: float) -> Iterator[int]:
    """Numbers, for so many seconds."""
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        yield number
        number += 1


def test_every_restore_hits_while_new_generations_are_published(container: Container, tmp_path: Path, store: Path) -> None:
    libraries = [b"\x7fELF generation %d" % n * 20_000 for n in range(2)]
    for number, library in enumerate(libraries):
        make_fitting_entry(tmp_path / f"entries-{number}", {"cascade": library})

    published = Event()

    def publisher() -> None:
        for number in range(GENERATIONS):
            publish(tmp_path / f"entries-{number % 2}", store, "--replace")
        published.set()

    def restorer(_: int) -> list[str]:
        actions = []
        while not published.is_set():
            actions.append(action(container.restore(store)))
        return actions

    def newcomer() -> list[str]:
        actions: list[str] = []
        while not published.is_set():
            actions.append(action(Container(home=tmp_path / f"home-{len(actions)}").restore(store)))
        return actions

    with ThreadPoolExecutor(4) as pool:
        publishing, fresh = pool.submit(publisher), pool.submit(newcomer)
        publishing.add_done_callback(lambda _: published.set())
        actions = [one for several in pool.map(restorer, range(2)) for one in several]
        publishing.result()
        assert set(fresh.result()) == {"installed"}
    assert "installed" in actions
    assert action(container.restore(store)) in ("installed", "in-place")
    assert container.libraries[0].read_bytes() in libraries


@pytest.mark.parametrize("site", FLASHINFERS, ids=lambda site: site.name)
def test_two_environments_restore_into_one_root_at_once(container: Container, tmp_path: Path, store: Path, site: Path) -> None:
    other_library = b"\x7fELF other" * 20_000
    make_fitting_entry(tmp_path / "other", {"cascade": other_library}, site=site)
    publish(tmp_path / "other", store)
    other = Container(home=container.home, site=(site,))

    def restores(one: Container) -> list[Done]:
        return [one.restore(store) for _ in until(SECONDS)]

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(restores, [container, other, container, other]))
    views = []
    for one in (done[0] + done[2], done[1] + done[3]):
        assert sorted({action(each) for each in one}) == ["in-place", "installed"]
        assert [action(each) for each in one].count("installed") == 1
        [paths] = {each.document["env"]["PYTHONPATH"] for each in one}
        views.append(paths.split(":")[0])
    assert views[0] != views[1]
    present = [json.loads(path.read_bytes()) for path in (container.home / ".cache" / "kcache" / "v1" / "current").iterdir()]
    assert sorted(str(document["view"]) for document in present) == sorted(views)
    assert sorted(path.read_bytes() for path in container.libraries) == sorted([LIBRARY, other_library])


@pytest.mark.parametrize("days", [1, -1])
def test_a_clock_that_was_set_back_or_forward_costs_no_entry(container: Container, store: Path, days: int) -> None:
    """Everything is as if it had been written when the clock was wrong."""
    assert action(container.restore(store)) == "installed"
    when = time.time() + days * 86_400
    for place in (store, container.home):
        for path in [*place.rglob("*"), place]:
            os.utime(path, (when, when), follow_symlinks=False)
    assert action(container.restore(store)) == "in-place"
    receipts = [*container.home.rglob("receipt.json")]
    before = [receipt.stat().st_mtime_ns for receipt in receipts]
    assert action(container.restore(store)) == "in-place"
    assert [receipt.stat().st_mtime_ns for receipt in receipts] == before


SHIFTED = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
#include <sys/time.h>
static int (*real)(clockid_t, struct timespec *);
int clock_gettime(clockid_t id, struct timespec *at) {
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(id, at);
    if (!failed && id == CLOCK_REALTIME) at->tv_sec -= 40000000;
    return failed;
}
time_t time(time_t *to) { struct timespec at; clock_gettime(CLOCK_REALTIME, &at); if (to) *to = at.tv_sec; return at.tv_sec; }
"""


def test_a_process_whose_clock_is_a_year_behind_restores_and_finds_all_in_place(
    container: Container, tmp_path: Path, store: Path
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "shifted.c").write_text(SHIFTED)
    shifted = tmp_path / "shifted.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", shifted, tmp_path / "shifted.c", "-ldl"], check=True)
    behind = Container(home=container.home, environ={"LD_PRELOAD": str(shifted)})
    told = behind.run([sys.executable, "-c", "import time; print(time.time())"])
    assert time.time() - float(told.out) > 30_000_000
    assert action(container.restore(store)) == "installed"
    assert action(behind.restore(store)) == "in-place"
    shutil.rmtree(container.home)
    assert action(behind.restore(store)) == "installed"
    assert action(container.restore(store)) == "in-place"


needs_root = pytest.mark.skipif(not ROOT, reason="needs root")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that other users can reach. Every session of pytest closes the one above `tmp_path` to them."""
    directory = Path(mkdtemp(prefix="kcache-test-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def servers(place: Path) -> tuple[Container, Container]:
    """Root's container and that of a server of another user, with one KCACHE_DIR that only root can write."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("no setpriv")
    prefix = (setpriv, "--reuid", "4242", "--regid", "4242", "--clear-groups")
    site = tuple(Path(path) for path in this_interpreter().search_path if "site-packages" in path)
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    environ = {"PYTHONPATH": ":".join(map(str, site)), "PYTHONDONTWRITEBYTECODE": "1"}
    for python in (sys.executable, f"/usr/bin/python{ours}", "/usr/bin/python3"):
        code = f"import sys, click, zstandard; assert sys.version_info[:2] == {sys.version_info[:2]}"
        if not subprocess.run([*prefix, python, "-c", code], env=environ, capture_output=True, check=False, cwd="/").returncode:
            break
    else:
        pytest.skip("no Python of this version that another user may run")
    chosen = {"KCACHE_DIR": str(place / "shared")}
    (place / "home-of-server" / "no-programs").mkdir(parents=True)
    make_fitting_entry(place / "entries", {"cascade": LIBRARY})
    publish(place / "entries", place / "store")
    open_up(place / "store")
    root = Container(home=place / "home-of-root", python=python, site=site, environ=chosen)
    return root, Container(home=place / "home-of-server", python=python, site=site, environ=chosen, prefix=prefix)


def tree(directory: Path) -> dict[str, int]:
    """Everything below a directory, with its change time."""
    return {str(path): path.lstat().st_ctime_ns for path in sorted(directory.rglob("*"))}


@needs_root
@pytest.mark.root
def test_a_cache_that_root_installed_serves_another_user_who_cannot_write_it(
    servers: tuple[Container, Container], place: Path
) -> None:
    root, server = servers
    store = place / "store"
    installed = root.restore(store)
    assert action(installed) == "installed"
    before = tree(place / "shared")
    found = server.restore(store)
    assert action(found) == "in-place"
    assert found.document["cache_root"] == str(place / "shared")
    assert found.document["env"]["PYTHONPATH"] == installed.document["env"]["PYTHONPATH"]
    assert tree(place / "shared") == before
    # A server that was given the variables already, and one whose store is gone.
    again = server.kcache(
        "restore", "--from", str(store), "--arch", "9.0a", "--json", env={"PYTHONPATH": found.document["env"]["PYTHONPATH"]}
    )
    assert action(again) == "in-place"
    code = "import os; from kcache.probe.host import probe_host as probe; "
    code += "print(probe(python=None, described_archs=['9.0a'], environ=os.environ).paths.jit_cache)"
    views = {"PYTHONPATH": found.document["env"]["PYTHONPATH"]}
    assert server.run([server.python, "-c", code], env=views).out == root.run([root.python, "-c", code]).out
    shutil.rmtree(store)
    started = server.kcache("restore", "--from", str(store), "--arch", "9.0a", "--", "/usr/bin/env")
    assert f"PYTHONPATH={place / 'shared'}/v1/site/" in started.out, started.err


@needs_root
@pytest.mark.root
def test_what_a_cache_that_cannot_be_written_lacks_is_restored_elsewhere_and_said(
    servers: tuple[Container, Container], place: Path
) -> None:
    root, server = servers
    store = place / "store"
    (place / "home-of-server").chmod(0o777)
    assert action(root.restore(store)) == "installed"
    make_fitting_entry(place / "entries-new", {"cascade": b"\x7fELF newer" * 100})
    publish(place / "entries-new", store, "--replace")
    open_up(store)
    before = tree(place / "shared")
    done = server.restore(store)
    assert (done.code, done.document["status"]) == (0, "hit"), done.err
    assert done.document["cache_root"] == str(place / "home-of-server" / ".cache" / "kcache")
    [warning] = done.document["warnings"]
    assert warning.startswith(f"KCACHE_DIR: {place / 'shared'} cannot be written; ")
    assert tree(place / "shared") == before


@needs_root
@pytest.mark.root
def test_a_read_only_cache_that_was_made_for_more_gpus_serves_a_host_that_has_one_of_them(
    servers: tuple[Container, Container], place: Path
) -> None:
    root, server = servers
    store = place / "store"
    make_fitting_entry(place / "entries-120f", {"cascade": LIBRARY}, arch="120f")
    publish(place / "entries-120f", store)
    open_up(store)
    installed = root.restore(store, arch="9.0a,12.0f")
    assert installed.document["status"] == "hit", installed.document["kinds"]
    before = tree(place / "shared")
    for arch in ("9.0a", "12.0f"):
        found = server.restore(store, arch=arch)
        assert action(found) == "in-place"
        assert found.document["cache_root"] == str(place / "shared")
        assert found.document["env"]["PYTHONPATH"] == installed.document["env"]["PYTHONPATH"]
    assert tree(place / "shared") == before
    alone = server.restore(store, arch="10.0a")  # nothing of it is for this one: it is passed over
    assert alone.document["status"] == "miss" and str(place / "shared") in alone.document["warnings"][0]


KILLED = """
import sys, time
from pathlib import Path
from kcache.store.file import FileStore
from kcache.store import file
def source(_):
    yield b"half of it"
    print("writing", flush=True)
    time.sleep(600)
file._source = source
FileStore(Path(sys.argv[1])).write(sys.argv[2], b"", if_absent=True)
"""


@pytest.mark.parametrize("name", ["v1/archives/ab/abc.tar.zst", "v1/env/flashinfer-9/x86_64-cuda13/entries/cd/cde.json"])
def test_what_a_killed_publisher_left_goes_when_it_is_a_day_old(tmp_path: Path, store: Path, name: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(store), name], stdout=subprocess.PIPE, env=environ)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    make_fitting_entry(tmp_path / "entries-1", {"page": LIBRARY})
    publish(tmp_path / "entries-1", store)
    [left] = store.rglob(f"{fsops.TEMPORARY_PREFIX}*")  # it is being written
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    make_fitting_entry(tmp_path / "entries-2", {"norm": LIBRARY})
    publish(tmp_path / "entries-2", store)
    assert left.exists()  # nothing says that its writer is dead
    old = time.time() - 2 * 86_400
    os.utime(left, (old, old))
    objects = {path for path in store.rglob("*") if path.is_file() and not path.name.startswith(".")}
    make_fitting_entry(tmp_path / "entries-3", {"quantization": LIBRARY})
    publish(tmp_path / "entries-3", store)
    assert not left.exists()
    assert all(path.exists() for path in objects)
