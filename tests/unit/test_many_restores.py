"""Sixty-four restores at once into one cache, while servers load what is there."""

from __future__ import annotations

import hashlib
import mmap
import os
import subprocess
import sys
from pathlib import Path

from container import REPOSITORY, Container
from entries import make_fitting_entry, publish

FLASHINFERS = [Path(path) for path in os.environ.get("KCACHE_TEST_FLASHINFERS", "").split(":") if path]
MANY = 64
LIBRARIES = {"cascade": b"\x7fELF cascade" * 20_000, "page": b"\x7fELF page" * 20_000}


def test_sixty_four_restores_download_once_and_read_nothing_partial(tmp_path: Path) -> None:
    """Some ask for one module, some for both, and some have another FlashInfer, which has an entry of its own: mixed needs and
    versions in one node cache."""
    for name, data in LIBRARIES.items():
        make_fitting_entry(tmp_path / name, {name: data}, kind=name)
        publish(tmp_path / name, tmp_path / "store")
    libraries = dict(LIBRARIES)
    for site in FLASHINFERS[:1]:
        libraries["norm"] = b"\x7fELF norm" * 20_000
        make_fitting_entry(tmp_path / "norm", {"norm": libraries["norm"]}, kind="norm", site=site)
        publish(tmp_path / "norm", tmp_path / "store")
    container = Container(home=tmp_path / "home")
    words = [sys.executable, "-m", "kcache", "restore", "--from", str(tmp_path / "store"), "--arch", "9.0a"]
    # The server: each reads its libraries to the last byte as soon as it is started.
    code = (
        "import hashlib, pathlib, sys\nfor path in sorted(pathlib.Path(sys.argv[1]).glob('*/*/[!.]*.so')):\n"
        "    print(path.stem, hashlib.sha256(path.read_bytes()).hexdigest(), flush=True)"
    )
    root = container.home / ".cache" / "kcache" / "v1" / "entries"
    env = container.variables
    started, own = [], []
    for number in range(MANY):
        asked = ["--kinds", "cascade"] if number % 3 == 1 else []
        other = FLASHINFERS[:1] if number % 3 == 2 else []
        own.append("norm" if other else "cascade")
        paths = {"PYTHONPATH": ":".join(map(str, [*other, REPOSITORY]))}
        command = [*words, *asked, "--", sys.executable, "-c", code, str(root)]
        started.append(
            subprocess.Popen(command, env=env | paths, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        )
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in libraries.items()}
    installed = 0
    for process, name in zip(started, own, strict=True):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and ("kcache: restored: " in err or "kcache: already in place: " in err), err
        installed += "kcache: restored: " in err
        found = dict(line.split() for line in out.splitlines())
        assert name in found and all(digests[name] == sha256 for name, sha256 in found.items())
    assert 1 <= installed <= len(libraries), "an entry was downloaded more than once"
    assert {path.stem: path.read_bytes() for path in root.glob("*/*/[!.]*.so")} == libraries


def test_a_restore_never_changes_a_file_that_a_server_has_loaded(tmp_path: Path) -> None:
    """The library is damaged under its name while a server has it mapped; restoring gives the name other bytes, not the map."""
    make_fitting_entry(tmp_path / "entries", {"cascade": LIBRARIES["cascade"]})
    publish(tmp_path / "entries", tmp_path / "store")
    container = Container(home=tmp_path / "home")
    assert container.restore(tmp_path / "store").document["status"] == "hit"
    [library] = container.libraries
    with library.open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as loaded:
        other = library.with_name("other")
        other.write_bytes(b"damaged")
        other.replace(library)
        assert container.restore(tmp_path / "store").document["status"] == "hit"
        assert loaded[:] == LIBRARIES["cascade"] == library.read_bytes()
