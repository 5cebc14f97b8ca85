"""Where a restored module is used: one real FlashInfer module, one change of the world at a time, and no compiler in any of them.

Beside it stands what a plain copy of FlashInfer's cache directory does.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from container import ROOT, Container, copy_flashinfer, open_up

from kcache.fsops import Identity

pytestmark = pytest.mark.real

needs_root = pytest.mark.skipif(not ROOT, reason="needs root")


def proven(container: Container, store: Path, *modules: str, restore: tuple[str, ...] = ()) -> None:
    """Restores, and proves in a fresh process that every module is used and no compiler runs."""
    done = container.restore(store, *restore)
    assert done.code == 0, done.err
    assert done.document["status"] == "hit"
    proof = container.verify()
    assert proof["status"] == "proven", proof
    assert proof["compiler_runs"] == 0
    assert sorted(module["module"] for module in proof["modules"]) == sorted(modules)


def test_in_another_home(tmp_path: Path, cascade_store: Path) -> None:
    proven(Container(home=tmp_path / "home"), cascade_store, "cascade")


def test_in_the_same_home_again_nothing_is_done(tmp_path: Path, cascade_store: Path) -> None:
    container = Container(home=tmp_path / "home")
    proven(container, cascade_store, "cascade")
    before = {path: Identity.of(path) for path in (tmp_path / "home").rglob("*")}
    again = container.restore(cascade_store)
    assert again.document["kinds"]["modules"]["entries"][0]["action"] == "in-place"
    assert {path: Identity.of(path) for path in (tmp_path / "home").rglob("*")} == before


def test_with_flashinfer_at_another_path(tmp_path: Path, cascade_store: Path) -> None:
    proven(Container(home=tmp_path / "home", site=(copy_flashinfer(tmp_path / "elsewhere"),)), cascade_store, "cascade")


def test_with_headers_newer_than_the_artifact(tmp_path: Path, cascade_store: Path) -> None:
    site = tmp_path / "elsewhere"
    copy_flashinfer(site)
    for directory in ("include", "csrc"):
        for path in (site / "flashinfer" / "data" / directory).rglob("*cascade*"):
            content = path.read_bytes()
            path.unlink()  # the copy is hard-linked
            path.write_bytes(content)
            os.utime(path, (4e9, 4e9))
    proven(Container(home=tmp_path / "home", site=(site,)), cascade_store, "cascade")


def test_with_output_times_moved(tmp_path: Path, cascade_store: Path) -> None:
    """B18: image layers and copies move times; FlashInfer's JIT directory would be rebuilt."""
    container = Container(home=tmp_path / "home")
    proven(container, cascade_store, "cascade")
    for path in container.libraries:
        moved = path.stat().st_mtime + 67
        os.utime(path, (moved, moved))
    assert container.restore(cascade_store).document["kinds"]["modules"]["entries"][0]["action"] == "in-place"
    assert container.verify()["status"] == "proven"


def test_with_cuda_through_a_symbolic_link(tmp_path: Path, cascade_store: Path, cuda_home: Path) -> None:
    """B19: built with CUDA at its own path, run through a link, with JIT allowed: FlashInfer itself builds nothing."""
    (tmp_path / "cuda").symlink_to(cuda_home)
    container = Container(home=tmp_path / "home", environ={"CUDA_HOME": str(tmp_path / "cuda")})
    restored = container.restore(cascade_store)
    assert restored.code == 0, restored.err
    log = tmp_path / "builds"
    code = "from flashinfer.cascade import get_cascade_module; print(get_cascade_module())"
    environ = {**restored.document["env"], "FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_JIT_BUILD_LOG": str(log)}
    preload = cuda_home / "lib64" / "libcudart.so.13"
    done = container.run([sys.executable, "-c", code], env={**environ, "LD_PRELOAD": str(preload)})
    assert done.code == 0, done.err
    assert not log.exists()
    assert not list((tmp_path / "home" / ".cache" / "flashinfer").rglob("cascade.so"))


@needs_root
@pytest.mark.root
def test_with_read_only_packages(tmp_path: Path, cascade_store: Path) -> None:
    site = tmp_path / "elsewhere"
    copy_flashinfer(site)
    mount = f'mount --bind {site} {site} && mount -o remount,ro,bind {site} && exec "$@"'
    prefix = (shutil.which("unshare") or "unshare", "-m", "/bin/sh", "-c", f"PATH=/usr/sbin:/usr/bin:/sbin:/bin; {mount}", "sh")
    container = Container(home=tmp_path / "home", site=(site,), prefix=prefix)
    refused = container.run(["/bin/touch", str(site / "x")])
    assert "Read-only file system" in refused.err
    proven(container, cascade_store, "cascade")


@needs_root
@pytest.mark.root
def test_as_a_user_without_a_passwd_entry(tmp_path: Path, cascade_store: Path, open_python: tuple[str, tuple[Path, ...]]) -> None:
    python, site = open_python
    setpriv = shutil.which("setpriv")
    assert setpriv is not None
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 4242, 4242)
    open_up(tmp_path, cascade_store)
    (home / "no-programs").mkdir()
    prefix = (setpriv, "--reuid", "4242", "--regid", "4242", "--clear-groups")
    proven(Container(home=home, prefix=prefix, python=python, site=site), cascade_store, "cascade")


def test_beside_a_real_looking_jit_cache_package(tmp_path: Path, cascade_store: Path, quantization_library: Path) -> None:
    """A package as FlashInfer's wheels lay it out, with a library of its own: both are served."""
    package = tmp_path / "real" / "flashinfer_jit_cache"
    library = package / "jit_cache" / "quantization" / "quantization.so"
    library.parent.mkdir(parents=True)
    shutil.copy(quantization_library, library)
    (package / "__init__.py").write_text(
        "from pathlib import Path\nfrom types import SimpleNamespace\n__version__ = '0.7.4+cu130'\n"
        "def get_jit_cache_dir(): return str(Path(__file__).parent / 'jit_cache')\n"
        "def get_jit_cache_providers():\n"
        "    given = dict(provider_id='flashinfer-jit-cache', distribution='flashinfer-jit-cache', version=__version__)\n"
        "    given |= dict(jit_cache_dir=get_jit_cache_dir(), cuda_architectures=['sm90a'], modules=['quantization'])\n"
        "    return [SimpleNamespace(**given)]\n"
    )
    container = Container(home=tmp_path / "home", site=(tmp_path / "real",))
    proven(container, cascade_store, "cascade")
    code = (
        "from flashinfer.jit.core import gen_jit_spec as g\n"
        "print(g('quantization', []).build_and_load(), g('cascade', []).aot_path)"
    )
    environ = {
        **container.restore(cascade_store).document["env"],
        "FLASHINFER_CUDA_ARCH_LIST": "9.0a",
        "FLASHINFER_DISABLE_JIT": "1",
    }
    environ["LD_PRELOAD"] = os.environ.get("LD_PRELOAD", "")
    done = container.run([sys.executable, "-c", code], env=environ)
    assert done.code == 0, done.err
    assert "/kcache/v1/entries/" in done.out


@pytest.mark.parametrize("version", ["0.6.18.post1", "0.7.0.post1", "0.7.2.post1"])
def test_with_every_supported_flashinfer(tmp_path: Path, version: str, other_version: Callable[[str], tuple[Path, Path]]) -> None:
    site, store = other_version(version)
    container = Container(home=tmp_path / "home", site=(site,))
    proven(container, store, "cascade")
    assert container.verify()["flashinfer"] == version


def test_copied_into_the_package_itself(tmp_path: Path, cascade_store: Path) -> None:
    site = copy_flashinfer(tmp_path / "elsewhere")
    container = Container(home=tmp_path / "home", site=(site,))
    proven(container, cascade_store, "cascade", restore=("--into-package",))
    assert (site / "flashinfer" / "data" / "aot" / "cascade" / "cascade.so").is_file()


def test_what_a_plain_copy_of_the_cache_directory_does(tmp_path: Path, cascade_jit_directory: Path) -> None:
    """The same library, copied as people do today: without nvcc and ninja FlashInfer does not even look at it."""
    home = tmp_path / "home"
    shutil.copytree(cascade_jit_directory, home / ".cache" / "flashinfer" / "0.7.4" / "90a" / "cached_ops")
    assert (home / ".cache" / "flashinfer" / "0.7.4" / "90a" / "cached_ops" / "cascade" / "cascade.so").is_file()
    container = Container(home=home)
    code = "from flashinfer.cascade import get_cascade_module; get_cascade_module()"
    disabled = container.run(
        [sys.executable, "-c", code], env={"FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_DISABLE_JIT": "1"}
    )
    assert "MissingJITCacheError" in disabled.err
    allowed = container.run([sys.executable, "-c", code], env={"FLASHINFER_CUDA_ARCH_LIST": "9.0a"})
    assert allowed.code != 0
    assert "ninja" in allowed.err


def test_subprocess_is_the_real_thing(cascade_store: Path) -> None:
    """The store holds one whole entry: what the tests above restore is what nvcc made."""
    listed = subprocess.run(
        [sys.executable, "-m", "kcache", "lookup", "--from", str(cascade_store), "--arch", "9.0a"],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert "modules: hit" in listed.stdout
