"""The wheel and the source distribution, each made here and installed from scratch with the packages that it asks for."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from kcache import __version__

ROOT = Path(__file__).parents[2]

MEGABYTES = 80.0
"""What the base installation may take, its dependencies included. It was 55 in 2026."""

OWN_MEGABYTES = 4.0
"""kcache's own share of it. It was 2.3."""

HEAVY = ("torch", "flashinfer_python", "numpy", "cryptography", "ray", "pyelftools", "nvidia_")
"""Distributions that a container must not get from kcache."""


def run(*command: str | Path, **environ: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(list(map(str, command)), env=kept | environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def uv(*words: str | Path, **environ: str) -> str:
    return run(sys.executable, "-m", "uv", "--no-progress", *words, **environ)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the source distribution; the wheel is made from the source distribution."""
    place = tmp_path_factory.mktemp("dist")
    uv("build", "--quiet", "--out-dir", place, ROOT)
    return place


def installed(place: Path, what: Path) -> Path:
    """A new virtual environment with this and what it asks for."""
    uv("venv", "--quiet", "--python", sys.executable, place)
    uv("pip", "install", "--quiet", "--python", place / "bin" / "python", what)
    return place


def megabytes(directory: Path) -> float:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc") / 1e6


@pytest.mark.parametrize("pattern", ["*.whl", "*.tar.gz"])
def test_it_installs_cleanly_and_starts(built: Path, tmp_path: Path, pattern: str) -> None:
    (archive,) = built.glob(pattern)
    venv = installed(tmp_path / "venv", archive)
    home = {"HOME": str(tmp_path)}
    for command in ([venv / "bin" / "kcache"], [venv / "bin" / "python", "-m", "kcache"]):
        assert run(*command, "--version", **home).split()[-1] == __version__
        assert "restore" in run(*command, "--help", **home)
        assert run(*command, "restore", "--from", "/nonexistent", "--", "/bin/echo", "served", **home) == "served\n"
    (site,) = venv.glob("lib/python*/site-packages")
    sources = {
        path.relative_to(ROOT) for path in (ROOT / "kcache").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert {path for path in sources if not (site / path).is_file()} == set()
    assert (site / "kcache" / "py.typed").is_file()


def test_the_base_installation_is_small(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (site,) = installed(tmp_path / "venv", wheel).glob("lib/python*/site-packages")
    names = [path.name for path in site.glob("*.dist-info")]
    assert [name for name in names if name.startswith(HEAVY)] == []
    assert megabytes(site / "kcache") < OWN_MEGABYTES
    assert megabytes(site) < MEGABYTES, sorted(((round(megabytes(part), 1), part.name) for part in site.iterdir()), reverse=True)[
        :8
    ]


def test_it_installs_as_a_tool(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    places = {"UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    uv("tool", "install", "--quiet", "--python", sys.executable, wheel, **places)
    assert run(tmp_path / "bin" / "kcache", "--version").split()[-1] == __version__


def test_nothing_but_the_package_is_in_the_wheel_and_the_tests_are_in_the_sources(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    assert {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()} == {"kcache", f"kcache-{__version__}.dist-info"}
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        inside = {name.split("/")[1] for name in sources.getnames() if "/" in name}
    assert {"kcache", "tests", "ci", "manifests", "pyproject.toml", "README.md", "CHANGELOG.md"} <= inside
