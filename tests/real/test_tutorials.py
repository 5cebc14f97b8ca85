"""The tutorials, run as they stand: each `sh` block of kcache/docs/tutorials in one fresh shell, in the order of the pages.

Real nvcc, real FlashInfer, a local Hub over HTTP. `vllm` is a program of that name that loads the module through FlashInfer.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from container import REPOSITORY, ROOT
from hub.process import HubProcess, local_hub

pytestmark = pytest.mark.real

PAGES = REPOSITORY / "kcache" / "docs" / "tutorials"

VLLM = """#!/bin/sh
exec {python} -c '
from flashinfer.cascade import get_cascade_module
get_cascade_module()
print("serving", *__import__("sys").argv[1:])
' "$@"
"""


def blocks(page: str) -> list[str]:
    found = re.findall(r"^```sh\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with local_hub(tmp_path_factory.mktemp("hub")) as running:
        yield running


class Host:
    """A machine: a home, a working directory, programs, and a shell that ends with the first command that fails."""

    def __init__(self, home: Path, hub: HubProcess, *prefix: str) -> None:
        self.home, self.prefix = home, prefix
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "kcache").write_text(f'#!/bin/sh\nexec {sys.executable} -m kcache "$@"\n')
        (home / "bin" / "vllm").write_text(VLLM.format(python=sys.executable))
        for program in (home / "bin").iterdir():
            program.chmod(0o755)
        self.environ = {"HOME": str(home), "PATH": f"{home}/bin:/usr/bin:/bin", "PYTHONPATH": str(REPOSITORY), **hub.environ()}

    def run(self, script: str, **more: str) -> str:
        """Standard output and error, as a person reads them."""
        command = [*self.prefix, "/bin/bash", "-euc", script]
        done = subprocess.run(
            command, env=self.environ | more, cwd=self.home, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout


def test_the_tutorials_run_as_they_stand(hub: HubProcess, tmp_path: Path, cuda_home: Path) -> None:
    farm = Host(tmp_path / "farm", hub)
    build, publish, see = blocks("farm.md")
    assert "built: " in farm.run(build)
    farm.run(publish)
    shown = farm.run(see)
    assert "modules: hit" in shown
    assert "cascade" in shown

    container = Host(tmp_path / "container", hub)
    serve, verify, again = blocks("container.md")
    without = {"FLASHINFER_DISABLE_JIT": "1", "CUDA_HOME": "/none", "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    runtime = next((cuda_home / "lib64").glob("libcudart.so.*"))  # a GPU's torch would have loaded it
    assert "serving serve MODEL" in container.run(serve, LD_PRELOAD=str(runtime), **without)
    assert "compiler runs: 0" in container.run(verify)
    assert "already in place" in container.run(again)

    export, restore, mirror = blocks("air-gap.md")
    farm.run(export)
    unshare = shutil.which("unshare")
    isolated = Host(tmp_path / "isolated", hub, *([unshare, "-n"] if unshare and ROOT else []))
    shutil.copy(farm.home / "kernels.tar", isolated.home)
    assert "restored: cascade" in isolated.run(restore)
    assert "already in place" in isolated.run(mirror)
    assert os.listdir(isolated.home / "mirror")  # noqa: PTH208
