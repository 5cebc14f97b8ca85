"""What huggingface_hub downloaded is a store: by its path, and by the repository's name on a host that must not ask the Hub."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

import pytest
from container import Container, Done
from entries import make_fitting_entry
from hub.process import HubProcess, local_hub

from kcache.errors import AccessDeniedError, StoreError
from kcache.store.open import open_store

REPO = "farm/kernels"
_numbers = count()
DOWNLOAD = "import sys, huggingface_hub; print(huggingface_hub.snapshot_download(sys.argv[1], revision=sys.argv[2]))"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    scratch = tmp_path_factory.mktemp("snapshots")
    make_fitting_entry(scratch / "out")
    with local_hub(scratch / "hub") as hub:
        words = ["publish", str(scratch / "out"), "--to", f"hf://{REPO}@branch/x/deep", "--create"]
        environ = {**os.environ, **hub.environ()}
        done = subprocess.run([sys.executable, "-m", "kcache", *words], env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        yield hub


@pytest.fixture
def snapshot(hub: HubProcess, tmp_path: Path) -> Path:
    """A snapshot in the cache of its own HF_HOME, `tmp_path / "hf"`."""
    environ = {**os.environ, **hub.environ(), "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", DOWNLOAD, REPO, "branch"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    hub.requests()
    return Path(done.stdout.strip())


def restore(tmp_path: Path, store: str, environ: Mapping[str, str]) -> Done:
    home = tmp_path / f"home{next(_numbers)}"
    home.mkdir()
    container = Container(home=home, environ={"HF_HUB_OFFLINE": "1", **environ})
    looked = container.kcache("lookup", "--from", store, "--arch", "9.0a", "--json")
    assert "Traceback" not in looked.err
    done = container.kcache("restore", "--from", store, "--arch", "9.0a", "--json")
    assert looked.document["status"] == done.document["status"] if looked.out else done.document["status"] == "error"
    return done


def test_a_snapshot_is_restored_from_by_its_path(snapshot: Path, tmp_path: Path) -> None:
    assert any(path.is_symlink() for path in snapshot.rglob("*"))
    assert restore(tmp_path, str(snapshot / "x/deep"), {}).document["status"] == "hit"
    store = open_store(f"file://{snapshot}/x/deep")
    names = list(store.list(""))
    assert len(names) == 4 and all(store.stat(name) is not None for name in names)
    with pytest.raises(AccessDeniedError, match="for reading only"):
        store.delete(names[0])
    with pytest.raises(AccessDeniedError, match="for reading only"):
        store.write("a", b"", if_absent=True)


@pytest.mark.parametrize("revision", ["branch", "the commit"])
def test_a_host_that_is_offline_restores_what_was_downloaded(
    hub: HubProcess, snapshot: Path, tmp_path: Path, revision: str
) -> None:
    store = f"hf://{REPO}@{snapshot.name if revision == 'the commit' else revision}/x/deep"
    environ = {"HF_ENDPOINT": hub.endpoint}
    found = restore(tmp_path, store, {**environ, "HF_HOME": str(tmp_path / "hf")})
    assert found.document["status"] == "hit", found.err
    (tmp_path / "cache").symlink_to(tmp_path / "hf" / "hub")
    assert restore(tmp_path, store, {**environ, "HF_HUB_CACHE": str(tmp_path / "cache")}).document["status"] == "hit"
    lacking = restore(tmp_path, store.replace("x/deep", "x/none"), {**environ, "HF_HOME": str(tmp_path / "hf")})
    assert "there is no store at" in lacking.err
    assert not hub.requests()


def test_what_was_not_downloaded_is_one_line(hub: HubProcess, snapshot: Path, tmp_path: Path) -> None:
    container = Container(
        home=tmp_path, environ={"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
    )
    done = container.kcache("restore", "--from", f"hf://{REPO}", "--", sys.executable, "-c", "print('started')")
    assert done.out == "started\n" and "HF_HUB_OFFLINE is set. Download it with `hf download`" in done.err
    assert not hub.requests()


@pytest.mark.parametrize("link", ["/etc/passwd", "../../../../outside", "{blobs}/../outside", "{blobs}/directory/file"])
def test_a_link_that_leads_elsewhere_is_no_object(tmp_path: Path, link: str) -> None:
    root = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    blobs = tmp_path / "models--a--b" / "blobs"
    for directory in (root, blobs / "directory"):
        directory.mkdir(parents=True)
    (blobs / "directory" / "file").write_bytes(b"x")
    (blobs / "blob").write_bytes(b"right")
    (blobs / "link").symlink_to("/etc/passwd")
    (root / "right").symlink_to("../../blobs/blob")
    (root / "wrong").symlink_to(link.format(blobs=blobs))
    (root / "twice").symlink_to("../../blobs/link")
    store = open_store(str(root))
    assert store.read_bytes("right", 10) == b"right"
    for name in ("wrong", "twice"):
        with pytest.raises(StoreError, match="symbolic link"):
            store.read_bytes(name, 1 << 20)
    assert "wrong" not in list(store.list(""))
