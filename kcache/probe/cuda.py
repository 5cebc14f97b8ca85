"""The CUDA releases of this host, as FlashInfer finds them out: the toolkit's (nvcc) and the one that decides arch names.

A toolkit that says its version in a file is not run. Choosing and completing a toolkit to build with is
`kcache.probe.toolkit`'s work; here only what an unchanged server process would see is looked at.
"""

# On the path of every restore strings and os.path take a fifth of pathlib's time.
# ruff: noqa: PTH113, PTH120
from __future__ import annotations

import os
import re
from collections.abc import Mapping

from kcache.key import ABSENT, Fact, known, undetermined

_DEFAULT_HOME = "/usr/local/cuda"
_NVCC_TIMEOUT = 30.0
"""Seconds for `nvcc --version`, which takes 5 ms; more means a broken file system."""


def find_nvcc(environ: Mapping[str, str]) -> str | None:
    """The nvcc that FlashInfer would run, or None.

    flashinfer/jit/cpp_ext.py, get_cuda_path (0.6.18 to 0.7.4): CUDA_HOME, else CUDA_PATH (also when it holds no nvcc), else
    nvcc on PATH, else /usr/local/cuda.
    """
    home = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if home:
        return _executable(f"{home}/bin/nvcc")
    for directory in environ.get("PATH", os.defpath).split(os.pathsep):
        if directory and (found := _executable(f"{directory}/nvcc")):
            # FlashInfer takes the directory above nvcc's, and looks for bin/nvcc in that.
            return _executable(f"{os.path.dirname(os.path.dirname(found))}/bin/nvcc")
    return _executable(f"{_DEFAULT_HOME}/bin/nvcc")


def _executable(path: str) -> str | None:
    return path if os.path.isfile(path) and os.access(path, os.X_OK) else None


def toolkit_release(environ: Mapping[str, str]) -> Fact:
    """The release of the toolkit's nvcc, such as `13.0`: from version.json, else from `nvcc --version`; absent without nvcc."""
    nvcc = find_nvcc(environ)
    if nvcc is None:
        return ABSENT
    if release := stated_release(os.path.dirname(os.path.dirname(nvcc))):
        return known(release)
    import subprocess

    try:
        done = subprocess.run(
            [nvcc, "--version"], env=dict(environ), capture_output=True, text=True, timeout=_NVCC_TIMEOUT, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        return undetermined(f"{nvcc} does not run: {error}")
    found = re.search(r"release (\d+\.\d+),", done.stdout)
    return known(found[1]) if found else undetermined(f"{nvcc} does not say its release")


def stated_release(home: str) -> str | None:
    """The compiler's release from the version.json that NVIDIA's own installers write."""
    import json

    try:
        with open(f"{home}/version.json", encoding="utf-8") as stream:
            version = json.load(stream)["cuda_nvcc"]["version"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    found = re.match(r"\d+\.\d+", str(version))
    return found[0] if found else None


def naming_release(toolkit: Fact, torch_cuda: Fact, runtime: Fact = ABSENT) -> tuple[int, int] | None:
    """The CUDA release that FlashInfer names 12.x architectures by: nvcc's, else torch's; None if there is neither.

    flashinfer/jit/cpp_ext.py, get_cuda_version (0.6.18 to 0.7.4). An nvcc that does not run counts as none there, too.

    Args:
        runtime: the CUDA runtime's release, for a described GPU on a host with a CPU build of torch: the server that is meant
            will have a CUDA build for that runtime.
    """
    for fact in (toolkit, torch_cuda, runtime):
        if fact.known and (found := re.match(r"(\d+)\.(\d+)", fact.value or "")):
            return int(found[1]), int(found[2])
    return None
