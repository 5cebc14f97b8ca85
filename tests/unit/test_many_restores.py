"""Sixty-four restores at once into one cache, while servers load what is there."""

from __future__ import annotations

import hashlib
import mmap
import subprocess
import sys
from pathlib import Path

from container import REPOSITORY, Container
from entries import make_fitting_entry, publish

MANY = 64
LIBRARIES = {"cascade": b"\x7fELF cascade" * 20_000, "page": b"\x7fELF page" * 20_000}


def test_sixty_four_restores_download_once_and_read_nothing_partial(tmp_path: Path) -> None:
    """Half ask for one module, half for both entries (mixed needs in one node cache); a server has the first one mapped."""
    for name, data in LIBRARIES.items():
        make_fitting_entry(tmp_path / name, {name: data}, kind=name)
        publish(tmp_path / name, tmp_path / "store")
    container = Container(home=tmp_path / "home")
    words = [sys.executable, "-m", "kcache", "restore", "--from", str(tmp_path / "store"), "--arch", "9.0a"]
    # The server: each reads its libraries to the last byte as soon as it is started.
    code = (
        "import hashlib, pathlib, sys\nfor path in sorted(pathlib.Path(sys.argv[1]).glob('*/*/[!.]*.so')):\n"
        "    print(path.stem, hashlib.sha256(path.read_bytes()).hexdigest(), flush=True)"
    )
    root = container.home / ".cache" / "kcache" / "v1" / "entries"
    env = {**container.variables, "PYTHONPATH": str(REPOSITORY)}
    started = []
    for number in range(MANY):
        asked = ["--kinds", "cascade"] if number % 2 else []
        command = [*words, *asked, "--", sys.executable, "-c", code, str(root)]
        started.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        )
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in LIBRARIES.items()}
    installed = 0
    for process in started:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and ("kcache: restored: " in err or "kcache: already in place: " in err), err
        installed += "kcache: restored: " in err
        found = dict(line.split() for line in out.splitlines())
        assert "cascade" in found and all(digests[name] == sha256 for name, sha256 in found.items())
    assert 1 <= installed <= len(LIBRARIES), "an entry was downloaded more than once"
    assert {path.stem: path.read_bytes() for path in root.glob("*/*/[!.]*.so")} == LIBRARIES


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
