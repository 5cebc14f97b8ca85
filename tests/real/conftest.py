"""Real builds, once per session: the command line, the real nvcc, the real FlashInfer.

`KCACHE_TEST_CACHE` names a directory that keeps them between sessions; a kept build is looked at again by `kcache build` itself,
which rebuilds whatever does not fit any more.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builds import BuildModules
from warmup_processes import Node, environment
from zygote import Zygote

from kcache.errors import KcacheError
from kcache.probe.packages import scan, this_interpreter
from kcache.probe.toolkit import find_toolkit, make_home


@pytest.fixture(scope="session")
def build_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where builds of this session lie."""
    named = os.environ.get("KCACHE_TEST_CACHE")
    # Workers of one xdist session share what is above their own directories.
    path = Path(named) if named else tmp_path_factory.getbasetemp().parent / "kcache-builds"
    path.mkdir(parents=True, exist_ok=True)
    return path


@pytest.fixture(scope="session")
def build_modules(build_cache: Path) -> BuildModules:
    """The factory; skips where this host has no FlashInfer or no toolchain."""
    interpreter = this_interpreter()
    if scan(interpreter.search_path).package("flashinfer") is None:
        pytest.skip("no FlashInfer in this Python")
    try:
        find_toolkit(os.environ, [Path(path) for path in interpreter.search_path])
    except KcacheError as error:
        pytest.skip(f"no CUDA toolchain: {error.what}")
    done: dict[tuple[tuple[str, ...], str, Path | None], Path] = {}

    def build(modules: tuple[str, ...], arch: str = "9.0a", flashinfer_site: Path | None = None) -> Path:
        wanted = (tuple(sorted(modules)), arch, flashinfer_site)
        if wanted not in done:
            done[wanted] = _build(build_cache, *wanted)
        return done[wanted]

    return build


def _build(cache: Path, modules: tuple[str, ...], arch: str, site: Path | None) -> Path:
    place = cache / hashlib.sha256(f"{sys.version_info[:2]} {site}".encode()).hexdigest()[:8]
    place.mkdir(exist_ok=True)
    output = place / f"{arch}-{'-'.join(modules)}"[:100]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER_", "KCACHE_"))}
    if site is not None:
        environ["PYTHONPATH"] = str(site)
    words = ["--modules", ",".join(modules), "--arch", arch, "-o", str(output), "--work-dir", str(place / "work")]
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = [sys.executable, "-m", "kcache", "build", *words]
        built = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=3000)
    assert built.returncode == 0, built.stderr
    return output


@pytest.fixture(scope="session")
def build_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Publishes a directory of entries into a local store of its own, by the command line."""

    def publish(entries: Path) -> Path:
        store = tmp_path_factory.mktemp("store")
        command = [sys.executable, "-m", "kcache", "publish", str(entries), "--to", str(store)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return store

    return publish


@pytest.fixture(scope="session")
def cascade_store(cascade_build: Path, build_store: Callable[[Path], Path]) -> Path:
    """A local store with the entry of `cascade`."""
    return build_store(cascade_build)


@pytest.fixture(scope="session")
def sampling_store(build_modules: BuildModules, build_cache: Path, build_store: Callable[[Path], Path]) -> Path:
    """A local store with the entry of the whole kind `sampling` for 9.0a."""
    output = build_cache / "sampling"
    words = ["--kinds", "sampling", "--arch", "9.0a", "-o", str(output), "--work-dir", str(build_cache / "sampling-work")]
    with (build_cache / "sampling.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = subprocess.run([sys.executable, "-m", "kcache", "build", *words], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return build_store(output)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests with the longest build first, so that the other worker has something to do meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("large") is None)


@pytest.fixture(scope="session")
def cascade_jit_directory(cascade_build: Path, build_cache: Path) -> Path:
    """The `cached_ops` directory in which FlashInfer's own ninja built `cascade`."""
    found = sorted(build_cache.glob("*/work/**/cached_ops/cascade/cascade.so"))
    assert found
    return found[0].parent.parent


@pytest.fixture(scope="session")
def quantization_library(build_modules: BuildModules, build_cache: Path) -> Path:
    """The library of another real module."""
    build_modules(("quantization",))
    return next(iter(sorted(build_cache.glob("*/work/**/cached_ops/quantization/quantization.so"))))


@pytest.fixture(scope="session")
def cuda_home(build_modules: BuildModules, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA_HOME with a compiler in it."""
    toolkit = find_toolkit(os.environ, [Path(path) for path in this_interpreter().search_path])
    home = tmp_path_factory.mktemp("cuda") / "home"
    return make_home(toolkit, home, os.uname().machine).home


@pytest.fixture(scope="session")
def other_version(build_modules: BuildModules, build_store: Callable[[Path], Path]) -> Callable[[str], tuple[Path, Path]]:
    """For a version of FlashInfer that `ci/other-versions` installed: its directory, and a store with its `cascade`."""

    def find(version: str) -> tuple[Path, Path]:
        site = Path(os.environ.get("KCACHE_TEST_DIR", "")) / "flashinfer" / version
        if not (site / "flashinfer").is_dir():
            pytest.skip(f"FlashInfer {version} is not installed (ci/other-versions)")
        return site, build_store(build_modules(("cascade",), flashinfer_site=site))

    return find


@pytest.fixture(scope="session")
def open_python() -> tuple[str, tuple[Path, ...]]:
    """An interpreter that uid 4242 may run, and what has to come on its PYTHONPATH to see the packages of this one."""
    setpriv = shutil.which("setpriv")
    if setpriv is None or os.geteuid() != 0:
        pytest.skip("needs root and setpriv")
    site = tuple(Path(path) for path in this_interpreter().search_path if "site-packages" in path)
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    # It must be able to start itself again: kcache does, for its proof.
    code = f"import subprocess, sys, click, zstandard, torch; assert sys.version_info[:2] == {sys.version_info[:2]}; "
    code += "subprocess.run([sys.executable, '-c', ''], check=True)"
    for python in (sys.executable, f"/usr/bin/python{ours}", "/usr/bin/python3"):
        environ = {"PYTHONPATH": ":".join(map(str, site)), "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [setpriv, "--reuid", "4242", "--regid", "4242", "--clear-groups", python, "-c", code]
        if subprocess.run(command, env=environ, capture_output=True, check=False, cwd="/").returncode == 0:
            return python, site
    pytest.skip("no Python of this version that another user may run")


@pytest.fixture(scope="session")
def cascade_build(build_modules: BuildModules) -> Path:
    """A directory with the entry of `cascade` for 9.0a, built with the installed FlashInfer."""
    return build_modules(("cascade",))


@pytest.fixture(scope="session")
def zygote(cuda_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Real processes that have FlashInfer already."""
    folder = tmp_path_factory.mktemp("zygote")
    found = Zygote(folder, {**environment(cuda_home), "FLASHINFER_WORKSPACE_BASE": str(folder)})
    yield found
    found.close()


@pytest.fixture
def node(zygote: Zygote, build_cache: Path, tmp_path: Path) -> Node:
    """A node whose FlashInfer has built nothing yet."""
    keep = build_cache / "compiler-launcher"
    keep.mkdir(exist_ok=True)
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    return Node(zygote=zygote, workspace=workspace, keep=keep)
