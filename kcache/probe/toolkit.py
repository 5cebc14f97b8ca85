"""The CUDA toolchain to build with: found, checked for agreement, and made into a scratch CUDA_HOME.

Three sources, in this order: `CUDA_HOME` or `CUDA_PATH`; PyPI wheels of one CUDA release in the target Python's site-packages
(`nvidia/cu13/...`, from CUDA 13 on: earlier nvcc wheels do not hold nvcc itself); nvcc on PATH. What is found is never
changed: a folder of links stands for it, where what FlashInfer's link line needs (`libcudart.so`, `stubs/libcuda.so`) and what
a toolkit may lack (curand, cublas) is completed. Nothing is imported; versions come from the names of `.dist-info` directories.

Why agreement: nvcc of CUDA 13.5 with headers of 13.0, or the other way about, stops in CCCL with an error about versions that
names no package.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kcache.errors import ProbeError, UsageError
from kcache.probe.stub_libcuda import SONAME, driver_symbols, write_stub

RELEASE_WHEELS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
"""The wheels that must all be there, and of one CUDA release (major and minor)."""

LIBRARIES = ("curand", "cublas")
"""Libraries with versions of their own; where a toolkit lacks one, it is taken from the wheels of the same CUDA major."""

CUDA_HOME, WHEELS, PATH = "CUDA_HOME", "wheels", "PATH"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundToolkit:
    """A toolchain as it lies on this host.

    root:      the directory that holds `bin/nvcc`.
    source:    `CUDA_HOME`, `wheels` or `PATH`.
    nvcc:      full version of nvcc, such as `13.0.88`.
    wheels:    versions of the wheels beside it, by distribution name; empty where it is no wheel.
    extras:    root of the CUDA wheels of the same major, which may complete it, or None.
    """

    root: Path
    source: str
    nvcc: str
    wheels: Mapping[str, str] = field(default_factory=dict)
    extras: Path | None = None

    @property
    def release(self) -> str:
        """Major and minor, such as `13.0`."""
        return ".".join(self.nvcc.split(".")[:2])

    @property
    def release_pair(self) -> tuple[int, int]:
        major, minor = self.release.split(".")
        return int(major), int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Toolkit:
    """A CUDA_HOME to build with.

    home:     the scratch folder.
    missing:  libraries of `LIBRARIES` whose headers were found nowhere; a module that includes them cannot be compiled.
    """

    home: Path
    found: FoundToolkit
    missing: tuple[str, ...]


def find_toolkit(environ: Mapping[str, str], site_packages: Sequence[Path]) -> FoundToolkit:
    """The toolchain that a build on this host uses.

    Args:
        environ: the environment; read are CUDA_HOME, CUDA_PATH and PATH.
        site_packages: the directories where the target Python finds packages, in its order.

    Raises:
        UsageError: CUDA_HOME is set and holds no nvcc, or an nvcc that does not run.
        ProbeError: the wheels do not agree or are not complete, or there is no nvcc at all.
    """
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if value := environ.get(variable):
            return _at_home(variable, Path(value).absolute(), site_packages)
    if (root := _wheel_root(site_packages)) is not None:
        versions = wheel_versions(site_packages)
        _check_agreement(versions)
        return _found(root, WHEELS, site_packages, versions)
    if nvcc := shutil.which("nvcc", path=environ.get("PATH", os.defpath)):
        return _on_path(Path(nvcc), site_packages)
    raise ProbeError(
        "no CUDA toolchain was found",
        why="CUDA_HOME is not set, the Python to build for has no CUDA wheels, and nvcc is not on PATH",
        remedy=f"Install one CUDA release from wheels: {_pip_command('13.0')}; or set CUDA_HOME.",
    )


def _found(root: Path, source: str, site_packages: Sequence[Path], wheels: Mapping[str, str]) -> FoundToolkit:
    """The toolkit at `root`, with the wheels of its CUDA major that may complete it."""
    version = _nvcc_version(root)
    folder = f"nvidia/cu{version.partition('.')[0]}"
    extras = next((site / folder for site in site_packages if (site / folder / "include").is_dir()), None)
    return FoundToolkit(root=root, source=source, nvcc=version, wheels=wheels, extras=extras)


def _at_home(variable: str, root: Path, site_packages: Sequence[Path]) -> FoundToolkit:
    if not (root / "bin" / "nvcc").is_file():
        raise UsageError(
            f"{variable} names {root}, which holds no bin/nvcc",
            remedy=f"Point {variable} at a CUDA toolkit, or unset it to use CUDA wheels.",
        )
    return _found(root, CUDA_HOME, site_packages, {})


def _on_path(nvcc: Path, site_packages: Sequence[Path]) -> FoundToolkit:
    """The toolkit that an nvcc on PATH belongs to; a wrapper script is asked, with --dryrun, where its toolkit is."""
    root = nvcc.resolve().parent.parent
    if not (root / "include" / "cuda_runtime.h").is_file():
        said = _run([str(nvcc), "--dryrun", "-x", "cu", "-c", os.devnull, "-o", os.devnull])
        top = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
        if top is not None:
            root = Path(top[1]).resolve()
    if not (root / "include" / "cuda_runtime.h").is_file():
        raise ProbeError(f"nvcc at {nvcc} belongs to no toolkit with headers", remedy="Set CUDA_HOME to a whole toolkit.")
    return _found(root, PATH, site_packages, {})


def _wheel_root(site_packages: Sequence[Path]) -> Path | None:
    """The newest `nvidia/cuNN` that has an nvcc, in the first directory that has one."""
    for directory in site_packages:
        roots = [path for path in directory.glob("nvidia/cu[0-9]*") if (path / "bin" / "nvcc").is_file()]
        if roots:
            return max(roots, key=lambda path: int(path.name[2:]))
    return None


def wheel_versions(site_packages: Sequence[Path]) -> dict[str, str]:
    """Versions of the CUDA wheels, by distribution name, from the names of their `.dist-info` directories.

    A name in an earlier directory hides the same name in a later one, as for Python's import.
    """
    names = (*RELEASE_WHEELS, *(f"nvidia-{library}" for library in LIBRARIES))
    versions: dict[str, str] = {}
    for directory in site_packages:
        for info in sorted(directory.glob("nvidia_*.dist-info")):
            stem, _, version = info.name.removesuffix(".dist-info").partition("-")
            name = stem.replace("_", "-").lower()
            if name in names:
                versions.setdefault(name, version)
    return versions


def _release(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _pip_command(release: str) -> str:
    names = (*RELEASE_WHEELS, "nvidia-curand")
    return "pip install " + " ".join(f"'{name}=={release}.*'" if name in RELEASE_WHEELS else name for name in names)


def _check_agreement(versions: Mapping[str, str]) -> None:
    """All release wheels are there and of one release.

    The release that the pip command asks for is the one of nvidia-cuda-runtime, since torch pins that wheel.
    """
    release = _release(versions.get("nvidia-cuda-runtime") or versions.get("nvidia-cuda-nvcc") or "13.0")
    if missing := [name for name in RELEASE_WHEELS if name not in versions]:
        raise ProbeError(
            f"the CUDA wheels are not complete: {', '.join(missing)} missing",
            why="nvcc from wheels needs " + ", ".join(RELEASE_WHEELS),
            remedy=f"Run: {_pip_command(release)}",
        )
    if len({_release(versions[name]) for name in RELEASE_WHEELS}) > 1:
        raise ProbeError(
            "the CUDA wheels are of different releases: " + ", ".join(f"{name} {versions[name]}" for name in RELEASE_WHEELS),
            why="headers of one CUDA release do not compile with the nvcc of another",
            remedy=f"Run: {_pip_command(release)}",
        )


def _run(command: list[str]) -> str:
    """All output of a command of the toolkit.

    Raises:
        ProbeError: it cannot be run, fails, or takes longer than a minute.
    """
    # nvcc would take flags from NVCC_APPEND_FLAGS and its like here too, and may fail of them.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NVCC_")}
    try:
        done = subprocess.run(
            command,
            check=False,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProbeError(f"{command[0]} cannot be run", why=str(error)) from error
    output = done.stdout.decode(errors="replace")
    if done.returncode != 0:
        lines = output.strip().splitlines() or ["no output"]
        raise ProbeError(f"{command[0]} ended with code {done.returncode}", why=lines[-1])
    return output


def _nvcc_version(root: Path) -> str:
    output = _run([str(root / "bin" / "nvcc"), "--version"])
    found = re.search(r"release [0-9]+\.[0-9]+, V([0-9]+\.[0-9]+(?:\.[0-9]+)*)", output)
    if found is None:
        raise ProbeError(f"nvcc at {root} does not say its version", why=output.strip()[:200])
    return found[1]


def make_home(found: FoundToolkit, folder: Path, machine: str) -> Toolkit:
    """Makes a CUDA_HOME of links in `folder`, anew if it is there.

    Args:
        folder: a directory of our own; its content is replaced.
        machine: as `uname -m` says it, for the stand-in of libcuda.

    Raises:
        ProbeError: no stand-in is known for this machine.
        OSError: the folder cannot be written.
    """
    if folder.exists():
        shutil.rmtree(folder)
    stubs = folder / "lib64" / "stubs"
    stubs.mkdir(parents=True)
    for item in found.root.iterdir():
        if item.name not in ("bin", "include", "lib64"):
            (folder / item.name).symlink_to(item)
    # nvcc looks for the rest of its toolkit at `bin/..`, and names headers so; ninja takes that for this folder. With `bin` a
    # link the two would mean different places, and ninja would never find a header that the compiler read.
    (folder / "bin").mkdir()
    for item in (found.root / "bin").iterdir():
        (folder / "bin" / item.name).symlink_to(item)
    missing = _link_headers(found.root, found.extras, folder / "include")
    _link_libraries(found.root, found.extras, folder / "lib64")
    _link_stub(found.root, folder, stubs, machine)
    return Toolkit(home=folder, found=found, missing=missing)


def _link_headers(root: Path, extras: Path | None, include: Path) -> tuple[str, ...]:
    """One link where the toolkit is whole, else a folder of links. Returns the libraries that were found nowhere."""
    lacking = [library for library in LIBRARIES if not any((root / "include").glob(f"{library}*.h"))]
    completed = [library for library in lacking if extras is not None and any((extras / "include").glob(f"{library}*.h"))]
    if not completed:
        include.symlink_to(root / "include")
        return tuple(lacking)
    include.mkdir()
    for item in (root / "include").iterdir():
        (include / item.name).symlink_to(item)
    assert extras is not None
    for library in completed:
        for header in (extras / "include").glob(f"{library}*"):
            (include / header.name).symlink_to(header)
    return tuple(library for library in lacking if library not in completed)


def _library_files(root: Path) -> Iterator[Path]:
    for name in ("lib64", "lib"):
        if (root / name).is_dir():
            yield from sorted(item for item in (root / name).iterdir() if item.is_file())
            return


def _link_libraries(root: Path, extras: Path | None, lib64: Path) -> None:
    """Links every library, and beside `libx.so.13` the `libx.so` that the linker looks for and wheels do not have."""
    files = list(_library_files(root))
    if extras is not None and extras != root:
        here = {file.name for file in files}
        files += [file for file in _library_files(extras) if file.name not in here and file.name[3:].startswith(LIBRARIES)]
    for file in files:
        (lib64 / file.name).symlink_to(file)
    for file in files:
        plain = lib64 / (file.name.partition(".so.")[0] + ".so")
        if ".so." in file.name and not plain.exists():
            plain.symlink_to(file)


def _link_stub(root: Path, folder: Path, stubs: Path, machine: str) -> None:
    for own in (root / "lib64" / "stubs" / "libcuda.so", root / "lib" / "stubs" / "libcuda.so"):
        if own.is_file():
            (stubs / "libcuda.so").symlink_to(own)
            return
    header = folder / "include" / "cuda.h"
    names = driver_symbols(header.read_text(encoding="utf-8", errors="replace")) if header.is_file() else ()
    write_stub(stubs / "libcuda.so", machine, names)
    (stubs / SONAME).symlink_to("libcuda.so")
