"""`kcache env --image-root`: an image is what its files say, nothing of it runs, and no link leads out of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kcache.probe.libraries import inside, libc_facts
from kcache.probe.packages import this_interpreter


@pytest.mark.parametrize(
    ("link", "target", "asked", "found"),
    [
        ("a", "/b", "/a/c", "/b/c"),
        ("a", "b", "/a/c", "/b/c"),
        ("a", "../../../etc", "/a/passwd", "/etc/passwd"),
        ("a", "a", "/a", "/a"),
        ("d/a", "/b", "/d/a/c", "/b/c"),
        ("a", "/", "/a/./x/../y", "/y"),
    ],
)
def test_links_are_followed_within_the_root(tmp_path: Path, link: str, target: str, asked: str, found: str) -> None:
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(target)
    assert inside(str(tmp_path), asked) == f"{tmp_path}{found}"


def image(directory: Path) -> Path:
    """A root file system with this host's C library and Python, and a FlashInfer and a torch that are only their versions."""
    site = directory / "opt/venv/lib/python3.11/site-packages"
    for package, files in {
        "flashinfer": {
            "__init__.py": "raise SystemExit('imported')",
            "_build_meta.py": '__version__ = "0.7.4"\n',
            "jit/core.py": "",
        },
        "torch": {"__init__.py": "raise SystemExit('imported')", "version.py": "__version__ = '2.13.0'\ncuda: str = '13.0'\n"},
        "tvm_ffi": {"__init__.py": "", "_version.py": '__version__ = "0.1.15"\n'},
    }.items():
        for name, text in files.items():
            (site / package / name).parent.mkdir(parents=True, exist_ok=True)
            (site / package / name).write_text(text)
    for path in ("opt/venv/bin", "usr/bin", f"usr/lib/{os.uname().machine}-linux-gnu"):
        (directory / path).mkdir(parents=True, exist_ok=True)
    libraries = Path(f"/usr/lib/{os.uname().machine}-linux-gnu")
    for name in ("libc.so.6", "libstdc++.so.6"):
        if not (libraries / name).exists():
            pytest.skip(f"this host has no {name} where Debian has it")
        shutil.copy(libraries / name, directory / str(libraries)[1:] / name)
    shutil.copy(Path(sys.executable).resolve(), directory / "usr/bin/python3.11")
    (directory / "opt/venv/bin/python3").symlink_to("/usr/bin/python3.11")
    (directory / "lib").symlink_to("usr/lib")
    return directory


def env(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kcache", "env", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_an_image_is_described_from_its_files_and_stands_in_for_a_host(tmp_path: Path) -> None:
    root = image(tmp_path / "root")
    done = env("--image-root", root, "--gpu", "rtx-pro-6000", "--save", tmp_path / "env.json", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    facts = {name: fact.get("value") for name, fact in document["facts"].items()}
    assert facts["flashinfer.version"] == "0.7.4" and facts["cuda.runtime"] == facts["torch.cuda"] == "13.0"
    assert (facts["tvm_ffi.version"], facts["python.version"]) == ("0.1.15", "3.11")
    assert (facts["gpu.sm_count.120f"], document["archs"]) == ("188", ["120f"])
    assert facts["libc.version"] == libc_facts(this_interpreter().libc)["libc.version"].value
    assert facts["libstdcxx.GLIBCXX"]
    assert document["sources"]["jit/core.py"]["value"].startswith("sha256:")
    assert document["libraries"]["libcurand.so.10"] == {"absent": True}  # what this host has does not count
    again = env("--env", tmp_path / "env.json", "--json")
    assert json.loads(again.stdout)["facts"] == document["facts"]


def test_what_is_no_image_is_said(tmp_path: Path) -> None:
    done = env("--image-root", tmp_path)
    assert done.returncode == 1 and "no Python was found" in done.stderr and "--python" in done.stderr
    assert env("--image-root", tmp_path / "nowhere").returncode == 2
    assert env("--image-root", tmp_path, "--env", "x").returncode == 2


def test_a_package_that_is_a_link_to_this_host_is_refused(tmp_path: Path) -> None:
    root = image(tmp_path / "root")
    package = root / "opt/venv/lib/python3.11/site-packages/flashinfer"
    package.rename(tmp_path / "outside")
    package.symlink_to(tmp_path / "outside")
    done = env("--image-root", root, "--arch", "9.0a")
    assert done.returncode == 1 and "link out of it" in done.stderr
