"""Cases from public reports, each with the real entry of a real module and the real command line. Names carry the case's id."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from container import REPOSITORY, ROOT, Container, copy_flashinfer, open_up

from kcache import digest, fsops

pytestmark = pytest.mark.real

needs_root = pytest.mark.skipif(not ROOT, reason="needs root")
READ_ONLY = "mount -t tmpfs -o ro tmpfs /dev/shm; true"
SERVER = ["--", "/bin/echo", "the server started"]


def started(done: object) -> bool:
    return "the server started" in getattr(done, "out", "")


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(home=tmp_path / "home")


def namespace(script: str) -> tuple[str, ...]:
    """Runs what follows in a mount namespace of its own, after `script`."""
    unshare = shutil.which("unshare")
    assert unshare is not None
    return (
        unshare,
        "-m",
        "/bin/sh",
        "-c",
        f'export PATH_="$PATH" PATH=/usr/sbin:/usr/bin:/sbin:/bin; {script}; PATH="$PATH_" exec "$@"',
        "sh",
    )


def test_b04_a_host_without_nvcc_and_ninja_is_served(container: Container, cascade_store: Path) -> None:
    restored = container.restore(cascade_store)
    assert (restored.code, restored.document["status"]) == (0, "hit")
    assert container.verify()["compiler_runs"] == 0


@needs_root
@pytest.mark.root
def test_b06_a_read_only_root_with_one_writable_mount(
    tmp_path: Path, cascade_store: Path, open_python: tuple[str, tuple[Path, ...]]
) -> None:
    python, site = open_python
    writable, home = tmp_path / "cache", tmp_path / "home"
    writable.mkdir()
    (home / "no-programs").mkdir(parents=True)
    open_up(tmp_path, cascade_store)
    script = f"mount -o remount,ro,bind /; mount -t tmpfs -o mode=0777 tmpfs {writable}; {READ_ONLY}"
    prefix = (*namespace(script), "/usr/bin/setpriv", "--reuid", "4242", "--regid", "4242", "--clear-groups")
    container = Container(home=home, site=site, python=python, prefix=prefix, environ={"HOME": "/", "TMPDIR": str(writable)})
    done = container.restore(cascade_store)
    assert done.code == 0, done.err
    assert done.document["cache_root"].startswith(str(writable))
    assert done.document["env"]["FLASHINFER_WORKSPACE_BASE"].startswith(str(writable))


@needs_root
@pytest.mark.root
def test_b06_with_nothing_writable_one_line_and_the_server_starts(
    tmp_path: Path, cascade_store: Path, open_python: tuple[str, tuple[Path, ...]]
) -> None:
    python, site = open_python
    home = tmp_path / "home"
    (home / "no-programs").mkdir(parents=True)
    open_up(tmp_path, cascade_store)
    script = f"mount -o remount,ro,bind /; {READ_ONLY}"
    prefix = (*namespace(script), "/usr/bin/setpriv", "--reuid", "4242", "--regid", "4242", "--clear-groups")
    container = Container(home=home, site=site, python=python, prefix=prefix, environ={"HOME": "/", "TMPDIR": "/nowhere"})
    done = container.kcache("restore", "--from", str(cascade_store), "--arch", "9.0a", *SERVER)
    assert started(done)
    assert len(done.err.strip().splitlines()) == 1, done.err


def test_b14_eight_processes_restore_one_entry_with_one_download(container: Container, cascade_store: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: container.restore(cascade_store), range(8)))
    assert [one.code for one in done] == [0] * 8, [one.err for one in done]
    actions = [one.document["kinds"]["modules"]["entries"][0]["action"] for one in done]
    assert sorted(actions) == ["in-place"] * 7 + ["installed"]
    assert len({json.dumps(one.document["env"]) for one in done}) == 1


def test_b15_an_orphan_lock_is_no_obstacle(container: Container, cascade_store: Path) -> None:
    directory = container.home / ".cache" / "kcache" / "v1"
    fsops.ensure_directory(directory)
    (directory / "lock").write_text("pid 999999\n")
    (directory / "lock").chmod(0o600)
    assert container.restore(cascade_store).code == 0


def test_b15_a_lock_held_for_ever_is_waited_for_a_bounded_time(container: Container, cascade_store: Path) -> None:
    lock = container.home / ".cache" / "kcache" / "v1" / "lock"
    fsops.ensure_directory(lock.parent)
    hold = (
        f"import sys; from kcache.fsops import locked\nwith locked({str(lock)!r}, 5): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    try:
        begun = time.monotonic()
        done = container.restore(cascade_store, "--lock-timeout", "1s")
        assert time.monotonic() - begun < 30
        assert done.code == 11
        assert str(lock) in done.document["reasons"][0]
        assert started(
            container.kcache("restore", "--from", str(cascade_store), "--arch", "9.0a", "--lock-timeout", "1s", *SERVER)
        )
    finally:
        holder.kill()
        holder.wait()
    assert container.restore(cascade_store).code == 0


def test_b21_one_changed_source_byte_is_refused_and_named(tmp_path: Path, cascade_store: Path) -> None:
    flashinfer_copy = copy_flashinfer(tmp_path / "elsewhere")
    container = Container(home=tmp_path / "home", site=(flashinfer_copy,))
    assert container.restore(cascade_store).code == 0
    header = flashinfer_copy / "flashinfer" / "data" / "include" / "flashinfer" / "attention" / "cascade.cuh"
    content = bytearray(header.read_bytes())
    before = header.stat()
    content[-2] ^= 1
    header.unlink()
    header.write_bytes(bytes(content))
    os.utime(header, ns=(before.st_atime_ns, before.st_mtime_ns - 10**12))
    done = container.restore(cascade_store)
    assert done.code == 10, done.out
    assert "data/include/flashinfer/attention/cascade.cuh" in done.document["kinds"]["modules"]["reasons"][0]
    assert "PYTHONPATH" not in done.document["env"]


def test_b24_a_host_with_an_older_libc_is_refused_and_the_version_named(
    container: Container, cascade_store: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "env.json"
    assert container.kcache("env", "--arch", "9.0a", "--save", str(saved)).code == 0
    document = json.loads(saved.read_text())
    document["facts"]["libc.version"] = {"value": "2.2"}
    saved.write_text(json.dumps(document))
    done = container.kcache("restore", "--from", str(cascade_store), "--env", str(saved), "--json")
    assert done.code == 10
    assert "GLIBC_2." in done.document["kinds"]["modules"]["reasons"][0]
    assert not container.libraries


def test_what_was_restored_for_another_environment_is_not_given_to_a_server_of_this_host(
    container: Container, cascade_store: Path, tmp_path: Path
) -> None:
    """FlashInfer does not check what it finds behind PYTHONPATH: only what was matched with this very host may lie there."""
    saved = tmp_path / "env.json"
    assert container.kcache("env", "--arch", "9.0a", "--save", str(saved)).code == 0
    done = container.kcache("restore", "--from", str(cascade_store), "--env", str(saved), "--json")
    assert (done.code, done.document["status"]) == (0, "hit")
    assert "PYTHONPATH" not in done.document["env"]
    assert any("--env" in line for line in done.document["warnings"])
    here = container.restore(cascade_store)  # in the cache already: only the view is made
    assert (here.code, here.document["bytes_downloaded"] < 100_000) == (0, True)
    assert "PYTHONPATH" in here.document["env"]


def test_b25_a_library_truncated_later_is_set_aside_and_restored(container: Container, cascade_store: Path) -> None:
    assert container.restore(cascade_store).code == 0
    (library,) = container.libraries
    whole = library.read_bytes()
    with library.open("r+b") as stream:
        stream.truncate(1000)
    done = container.restore(cascade_store)
    assert (done.code, done.document["kinds"]["modules"]["entries"][0]["action"]) == (0, "repaired")
    assert str(library) in done.document["warnings"][0]
    assert library.read_bytes() == whole


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="needs root, to give up reading everything")
@pytest.mark.parametrize("below", ["v1", "v1/entries", "v1/entries/*", "v1/entries/*/cascade"])
def test_a_part_of_the_cache_that_may_not_be_looked_at_is_said_in_one_line(
    tmp_path: Path, cascade_store: Path, below: str
) -> None:
    setpriv = (str(shutil.which("setpriv")), "--bounding-set", "-dac_override,-dac_read_search")
    container = Container(home=tmp_path / "home", prefix=setpriv)
    assert container.restore(cascade_store).code == 0
    (directory,) = (tmp_path / "home" / ".cache" / "kcache").glob(below)
    directory.chmod(0)
    try:
        done = container.restore(cascade_store)
    finally:
        directory.chmod(0o755)
    assert (done.code, done.document["status"]) == (1, "error")
    assert "Permission denied" in done.err
    assert "Traceback" not in done.err


def test_b25_a_truncated_library_that_cannot_be_restored_is_not_left_to_be_loaded(
    container: Container, cascade_store: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(cascade_store, store)
    assert container.restore(store).code == 0
    (library,) = container.libraries
    with library.open("r+b") as stream:
        stream.truncate(1000)
    shutil.rmtree(store / "v1" / "archives")
    done = container.restore(store)
    assert done.code != 0
    assert not library.exists()
    assert started(container.kcache("restore", "--from", str(store), "--arch", "9.0a", *SERVER))


@pytest.mark.parametrize("package", ["flashinfer-jit-cache", "flashinfer-cubin"])
def test_b27_a_package_off_by_one_version_is_named_by_doctor(tmp_path: Path, package: str) -> None:
    name = package.replace("-", "_")
    (tmp_path / "site" / name).mkdir(parents=True)
    (tmp_path / "site" / name / "__init__.py").write_text("__version__ = '0.7.3'\n")
    metadata = tmp_path / "site" / f"{name}-0.7.3.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.7.3\n")
    container = Container(home=tmp_path / "home", site=(tmp_path / "site",), environ={"FLASHINFER_DISABLE_VERSION_CHECK": "1"})
    done = container.kcache("doctor", "--arch", "9.0a", "--json")
    assert "0.7.3" in done.out and "0.7.4" in done.out and package in done.out


def test_b29_a_build_without_gpu_and_arch_list_refuses_with_the_remedy(container: Container, tmp_path: Path) -> None:
    done = container.kcache("build", "--modules", "cascade", "-o", str(tmp_path / "out"), env={"CUDA_HOME": ""})
    assert done.code == 2
    assert "--arch" in done.err
    assert not (tmp_path / "out").exists()


def test_b43_bytes_swapped_under_a_manifest_are_refused(container: Container, cascade_store: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(cascade_store, store)
    (archive,) = (store / "v1" / "archives").rglob("*.tar.zst")
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(bytes(content))
    done = container.restore(store)
    assert done.code == 12, done.out
    assert not container.libraries


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda root: root.chmod(0o775), "can be written"),
        (lambda root: (root / "v1").chmod(0o777), "can be written"),
        (lambda root: ((root / "v1").rename(root / "x"), (root / "v1").symlink_to(root / "x")), "symbolic link"),
        (lambda root: ((root / "v1" / "lock").unlink(), (root / "v1" / "lock").symlink_to("/etc/passwd")), "symbolic link"),
        pytest.param(lambda root: os.chown(root, 4242, 4242), "4242", marks=[needs_root, pytest.mark.root]),
        pytest.param(lambda root: os.chown(root / "v1" / "entries", 4242, 4242), "4242", marks=[needs_root, pytest.mark.root]),
    ],
    ids=["root-group-writable", "v1-world-writable", "v1-symlink", "lock-symlink", "root-foreign", "entries-foreign"],
)
def test_b43_a_cache_that_others_could_write_is_refused(
    container: Container, cascade_store: Path, spoil: object, word: str
) -> None:
    assert container.restore(cascade_store).code == 0
    root = container.home / ".cache" / "kcache"
    for library in container.libraries:
        library.unlink()  # so that a restore has to write, and to lock
    assert callable(spoil)
    spoil(root)
    done = container.restore(cascade_store)
    assert done.code == 12, done.out + done.err
    assert word in done.document["reasons"][0], done.document
    assert started(container.kcache("restore", "--from", str(cascade_store), "--arch", "9.0a", *SERVER))


def test_b43_a_library_replaced_by_a_link_is_not_followed(container: Container, cascade_store: Path, tmp_path: Path) -> None:
    assert container.restore(cascade_store).code == 0
    (library,) = container.libraries
    library.rename(tmp_path / "evil.so")
    library.symlink_to(tmp_path / "evil.so")
    done = container.restore(cascade_store)
    assert done.document["kinds"]["modules"]["entries"][0]["action"] == "repaired"
    assert "symbolic link" in done.document["warnings"][0]
    assert not library.is_symlink()


def test_b03_a_miss_bounds_the_jobs_of_the_server_and_keeps_a_given_number(container: Container, cascade_store: Path) -> None:
    missed = container.restore(cascade_store, arch="8.0")
    assert missed.code == 10
    assert int(missed.document["env"]["MAX_JOBS"]) >= 1
    given = Container(home=container.home, environ={"MAX_JOBS": "7"}).restore(cascade_store, arch="8.0")
    assert "MAX_JOBS" not in given.document["env"]


@needs_root
@pytest.mark.root
def test_b11_a_target_in_a_lower_overlay_layer(tmp_path: Path, cascade_store: Path) -> None:
    """The image holds a damaged cache; the container's writable layer lies over it. Renames of its directories give EXDEV."""
    image = Container(home=tmp_path / "image")
    assert image.restore(cascade_store).code == 0
    (library,) = image.libraries
    library.write_bytes(b"damaged in the image")
    merged, upper, work = tmp_path / "merged", tmp_path / "upper", tmp_path / "work"
    for directory in (merged, upper, work):
        directory.mkdir()
    options = f"lowerdir={image.home},upperdir={upper},workdir={work}"
    done = subprocess.run(
        ["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no overlay file system here: {done.stderr.strip()}")
    try:
        container = Container(home=merged)
        renamed = merged / ".cache" / "kcache" / "v1" / "entries"
        with pytest.raises(OSError, match="cross-device"):
            renamed.rename(renamed.with_name("moved"))
        restored = container.restore(cascade_store)
        assert restored.code == 0, restored.err
        assert restored.document["kinds"]["modules"]["entries"][0]["action"] == "repaired"
    finally:
        subprocess.run(["umount", str(merged)], check=True)


@needs_root
@pytest.mark.root
def test_b13_a_full_file_system_is_noticed_before_anything_is_written(tmp_path: Path, cascade_store: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=0755", "tmpfs", str(home)], check=True)
    try:
        container = Container(home=home)
        done = container.restore(cascade_store)
        assert done.code == 1, done.out
        assert (
            "room" in done.document["kinds"]["modules"]["reasons"][0]
            or "space" in done.document["kinds"]["modules"]["reasons"][0]
        )
        assert not container.libraries
        assert not [path for path in (home / ".cache" / "kcache" / "v1" / "entries").rglob("*") if path.is_file()]
        assert started(container.kcache("restore", "--from", str(cascade_store), "--arch", "9.0a", *SERVER))
    finally:
        subprocess.run(["umount", str(home)], check=True)


def test_a_module_that_nobody_published_is_named(container: Container, cascade_store: Path) -> None:
    done = container.restore(cascade_store, "--modules", "cascade,page")
    assert (done.code, done.document["status"]) == (3, "partial")
    assert done.document["kinds"]["modules"]["reasons"][0].startswith("page: ")
    missed = container.restore(cascade_store, "--modules", "page")
    assert missed.code == 10
    assert missed.document["kinds"]["modules"]["reasons"][0].startswith("page: ")


def test_a_kind_that_nobody_published_is_a_miss(container: Container, cascade_store: Path) -> None:
    done = container.restore(cascade_store, "--kinds", "sampling")
    assert (done.code, done.document["kinds"]["sampling"]["status"]) == (10, "miss")


def test_what_was_restored_outlives_the_store(container: Container, cascade_store: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(cascade_store, store)
    assert container.restore(store).code == 0
    shutil.rmtree(store)
    (library,) = container.libraries
    assert library.stat().st_nlink == 1 and not library.is_symlink()
    done = container.restore(store)
    assert (done.code, done.document["status"]) == (0, "hit")
    assert str(store) in done.document["warnings"][0]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _newer(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"kcache.index/1", b"kcache.index/9"))


def _older(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"kcache.index/1", b"kcache.index/0"))


def _newer_manifest(path: Path) -> None:
    _another_manifest(path, b"kcache.entry/2")


def _older_manifest(path: Path) -> None:
    _another_manifest(path, b"kcache.entry/0")


def _another_manifest(path: Path, form: bytes) -> None:
    """A manifest of another format, and an index that names it: nothing but its format is wrong."""
    before = path.read_bytes()
    after = before.replace(b"kcache.entry/1", form)
    path.write_bytes(after)
    index = path.parents[2] / "index.json"
    index.write_bytes(index.read_bytes().replace(digest.of_bytes(before).encode(), digest.of_bytes(after).encode()))


OTHER_FORMATS: dict[object, str] = {
    _newer: "has format 'kcache.index/9': this kcache reads kcache.index/1 and kcache.index/2. Use the kcache",
    _older: "has format 'kcache.index/0': this kcache reads kcache.index/1 and kcache.index/2. Use the kcache",
    _newer_manifest: "has format 'kcache.entry/2': this kcache reads kcache.entry/1. Use the kcache version that wrote it",
    _older_manifest: "has format 'kcache.entry/0': this kcache reads kcache.entry/1. Use the kcache version that wrote it",
}


def _lie(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"90a"', b'"89"'))


@pytest.mark.parametrize(
    ("which", "spoil", "code"),
    [
        ("archives/*/*.tar.zst", _truncate, 12),
        ("archives/*/*.tar.zst", lambda path: path.write_bytes(b"not an archive"), 12),
        ("archives/*/*.tar.zst", lambda path: path.write_bytes(path.read_bytes() + b"more"), 12),
        ("env/*/*/entries/*/*.json", _truncate, 12),
        ("env/*/*/entries/*/*.json", _lie, 12),
        ("env/*/*/entries/*/*.json", _newer_manifest, 12),
        ("env/*/*/entries/*/*.json", _older_manifest, 12),
        ("env/*/*/index.json", _truncate, 12),
        ("env/*/*/index.json", _newer, 12),
        ("env/*/*/index.json", _older, 12),
        ("env/*/*/index.json", _lie, 10),
    ],
)
def test_what_is_damaged_in_a_store_is_refused_in_one_line_and_nothing_is_touched(
    container: Container, cascade_store: Path, tmp_path: Path, which: str, spoil: Callable[[Path], object], code: int
) -> None:
    store = tmp_path / "store"
    shutil.copytree(cascade_store, store)
    (found,) = (store / "v1").glob(which)
    found.chmod(0o644)
    spoil(found)
    done = container.restore(store)
    assert done.code == code, done.out + done.err
    assert len(done.err.strip().splitlines()) == 1, done.err
    assert OTHER_FORMATS.get(spoil, "") in done.err
    looked = container.kcache("lookup", "--from", str(store), "--arch", "9.0a")
    assert looked.code == (0 if "archives" in which else code) and "Traceback" not in looked.err  # it reads no archive
    assert not container.libraries
    assert "PYTHONPATH" not in done.document["env"]
    assert started(container.kcache("restore", "--from", str(store), "--arch", "9.0a", *SERVER))


@pytest.mark.parametrize("number", [b"0", b"9"])
def test_an_exported_file_of_another_format_is_one_line(
    container: Container, cascade_store: Path, tmp_path: Path, number: bytes
) -> None:
    bundle, target = tmp_path / "entries.tar", tmp_path / "target"
    assert container.kcache("export", "--from", str(cascade_store), "-o", str(bundle)).code == 0
    bundle.write_bytes(bundle.read_bytes().replace(b"kcache.index/1", b"kcache.index/" + number))
    message = f"has format 'kcache.index/{number.decode()}': this kcache reads kcache.index/1"
    for words in (["import", str(bundle), "--to", str(target)], ["restore", "--from", str(bundle), "--arch", "9.0a"]):
        done = container.kcache(*words)
        assert done.code == 12 and message in done.err and len(done.err.splitlines()) == 1, done.err
    assert started(container.kcache("restore", "--from", str(bundle), "--arch", "9.0a", *SERVER))
    assert not container.libraries and not target.exists()


@pytest.mark.parametrize("number", [b"0", b"2"])
def test_what_a_kcache_of_another_format_installed_is_installed_again(
    container: Container, cascade_store: Path, number: bytes
) -> None:
    assert container.restore(cascade_store).code == 0
    (receipt,) = (container.home / ".cache/kcache/v1/entries").glob("*/receipt.json")
    written = receipt.read_bytes()
    receipt.write_bytes(written.replace(b"kcache.receipt/1", b"kcache.receipt/" + number))
    alone = container.kcache("restore", "--from", "gopher://nowhere", "--arch", "9.0a", *SERVER)
    assert started(alone) and len(alone.err.splitlines()) <= 2 and "Traceback" not in alone.err, alone.err
    done = container.restore(cascade_store)
    assert [entry["action"] for entry in done.document["kinds"]["modules"]["entries"]] == ["installed"], done.err
    assert b"kcache.receipt/1" in receipt.read_bytes() and container.libraries


@pytest.mark.parametrize("arch", ["10.0a", "12.0f", "8.9"])
def test_another_gpu_is_a_miss_that_names_it(container: Container, cascade_store: Path, arch: str) -> None:
    done = container.restore(cascade_store, arch=arch)
    assert done.code == 10
    assert not container.libraries


def test_one_bad_store_does_not_stop_the_next(container: Container, cascade_store: Path, tmp_path: Path) -> None:
    bad = ["--from", "gopher://nowhere", "--from", str(tmp_path / "not-there")]
    done = container.kcache("restore", *bad, "--from", str(cascade_store), "--arch", "9.0a", "--json")
    assert done.code == 0, done.err
    assert len(done.document["warnings"]) == 2


@pytest.mark.parametrize(
    ("which", "spoil"),
    [("archives/*/*.tar.zst", _truncate), ("env/*/*/entries/*/*.json", _truncate), ("env/*/*/index.json", _lie)],
)
def test_what_the_first_store_has_damaged_or_not_at_all_the_next_one_gives(
    container: Container, cascade_store: Path, tmp_path: Path, which: str, spoil: Callable[[Path], object]
) -> None:
    first = tmp_path / "first"
    shutil.copytree(cascade_store, first)
    (found,) = (first / "v1").glob(which)
    found.chmod(0o644)
    spoil(found)
    done = container.kcache("restore", "--from", str(first), "--from", str(cascade_store), "--arch", "9.0a", "--json")
    assert done.code == 0, done.out + done.err
    assert [entry["action"] for kind in done.document["kinds"].values() for entry in kind["entries"]] == ["installed"]
    assert [f"{cascade_store} is asked" in line for line in done.document["warnings"]] == [True] * ("archives" in which)
    assert container.libraries


def test_a_restore_killed_at_any_moment_is_repaired_by_the_next(container: Container, cascade_store: Path) -> None:
    """Killed 24 times, later and later; the state is the old or the new one, and nothing unfinished stays."""
    command = [sys.executable, "-m", "kcache", "restore", "--from", str(cascade_store), "--arch", "9.0a"]
    environ = {**container.variables, "PYTHONPATH": str(REPOSITORY)}
    for number in range(24):
        process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=container.home)
        time.sleep(0.05 + number * 0.015)
        process.kill()
        process.wait()
        for library in container.libraries if number % 3 == 2 else []:
            library.write_bytes(b"damaged")  # so that the next one has something to write
    done = container.restore(cascade_store)
    assert done.code == 0, done.err
    root = container.home / ".cache" / "kcache" / "v1" / "entries"
    assert not list(root.rglob(".tmp-*"))
    assert container.restore(cascade_store).document["kinds"]["modules"]["entries"][0]["action"] == "in-place"
