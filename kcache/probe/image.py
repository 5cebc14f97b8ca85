"""What an unpacked container image is, read from its files: nothing of it is run or imported.

Libraries, the Python and its directories are found as from within the image, whatever links say. A package that is a link out of
the image is refused. A link deeper in a package is followed as this host sees it; wheels hold none.

What only a running process could say is not made up: the Python's patch version, and variables of the image's configuration,
which is not part of its file system.
"""

# ruff: noqa: PTH110, PTH112, PTH119, PTH120 - strings and os.path, as in the modules that look at this host
from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from kcache.errors import ProbeError, UsageError
from kcache.key import ABSENT, Environment, Fact, known
from kcache.match import sm_count_fact
from kcache.probe import cuda, gpus, libraries, packages
from kcache.probe.elf import NotElfError, machine_of, read_library
from kcache.probe.host import Host, HostPaths, cuda_runtime, package_facts
from kcache.probe.libraries import Process, inside
from kcache.probe.packages import Interpreter
from kcache.values import replace

_USUAL = ("/opt/venv", "/venv", "/app/.venv", "/opt/conda", "/usr/local", "/usr")
"""Where images have the server's Python, the most particular first."""


def image_host(root: Path, *, python: str | None, archs: Sequence[str]) -> tuple[Host, Fact]:
    """The image as a host without GPUs, and the release of its CUDA toolkit.

    Args:
        root: its root directory.
        python: the server's Python by its path in the image; None to look in the usual places for one that has FlashInfer.
        archs: architectures of the host that it will run on, in any spelling.

    Raises:
        UsageError: there is no such directory, or an architecture is none.
        ProbeError: no Python was found.
    """
    top = os.path.realpath(root)
    if not os.path.isdir(top):
        raise UsageError(f"{root} is no directory", remedy="Name the directory that the image was unpacked to.")
    interpreter, machine = _interpreter(top, python)
    installed = packages.scan(interpreter.search_path)
    for name in ("flashinfer", "torch", "tvm_ffi"):
        package = installed.package(name)
        if package is not None and not os.path.realpath(package).startswith(f"{top}/"):
            raise ProbeError(f"the package {name} of the image is a link out of it", remedy="Unpack the image with its packages.")
    torch = installed.package("torch")
    facts = {**packages.flashinfer_facts(installed.package("flashinfer")), **packages.torch_facts(torch)}
    process = Process(
        executable=interpreter.executable,
        machine=machine,
        environ={},
        search_path=installed.search_path,
        torch=torch,
        torch_cuda=facts["torch.cuda"].value,
        tvm_ffi=installed.package("tvm_ffi"),
        root=top,
    )
    interpreter = replace(interpreter, libc=_libc(process))
    toolkit = _toolkit(top)
    facts["cuda.runtime"] = cuda_runtime(facts["torch.cuda"], installed, process)
    report = gpus.GpuReport()
    chosen = gpus.choose_archs(
        described=archs,
        listed=None,
        gpus=report,
        release=lambda: cuda.naming_release(toolkit, facts["torch.cuda"], facts["cuda.runtime"]),
    )
    facts |= {
        "platform.machine": known(machine),
        "platform.system": known("Linux"),
        "python.version": known(interpreter.version),
        "python.abi": known(interpreter.abi),
        "gpu.names": ABSENT,
        "gpu.source": chosen.source,
        "driver.version": ABSENT,
        **libraries.libc_facts(interpreter.libc),
        **libraries.libstdcxx_facts(_library(process, "libstdc++.so.6")),
        **{sm_count_fact(arch): ABSENT for arch in chosen.archs},
        **package_facts(installed),
    }
    paths = HostPaths(
        interpreter=interpreter,
        packages=installed,
        flashinfer=installed.package("flashinfer"),
        jit_cache=installed.package("flashinfer_jit_cache"),
        cubin=installed.package("flashinfer_cubin"),
        process=process,
    )
    return Host(environment=Environment(facts=facts, archs=chosen.archs), paths=paths, gpus=report), toolkit


def _interpreter(top: str, python: str | None) -> tuple[Interpreter, str]:
    """The server's Python, and its machine; the first of the usual ones that has FlashInfer, else the first."""
    places = [python] if python is not None else [f"{prefix}/bin/python3" for prefix in _USUAL]
    found = [one for place in places if (one := _at(top, place)) is not None]
    if not found:
        where = python or ", ".join(places)
        raise ProbeError(
            f"no Python was found in {top}",
            why=f"looked at {where}",
            remedy="Name the server's Python by its path in the image, such as `--python /opt/venv/bin/python3`.",
        )
    return next((one for one in found if packages.scan(one[0].search_path).package("flashinfer")), found[0])


def _at(top: str, place: str) -> tuple[Interpreter, str] | None:
    real = inside(top, place)
    version = re.fullmatch(r"python(3\.\d+)", os.path.basename(real))
    machine = machine_of(real)
    if version is None or machine is None:
        return None
    short = version[1]
    prefix = os.path.dirname(os.path.dirname(place))
    folders = [f"{prefix}/lib/python{short}/site-packages"]
    if prefix in ("/usr", "/usr/local"):
        folders += [f"/usr/local/lib/python{short}/dist-packages", "/usr/lib/python3/dist-packages"]
    tag = f"cpython-{short.replace('.', '')}"
    return Interpreter(
        executable=place,
        search_path=tuple(path for folder in folders if os.path.isdir(path := inside(top, folder))),
        version=short,
        abi=f"{tag}-{machine}-linux-gnu",
        cache_tag=tag,
        libc="",
    ), machine


def _libc(process: Process) -> str:
    """What `confstr(CS_GNU_LIBC_VERSION)` would say: glibc's newest symbol version is its own."""
    path = _library(process, "libc.so.6")
    if path is None:
        return ""
    try:
        defines = read_library(path).defines
    except (OSError, NotElfError):
        return ""
    versions = [tuple(map(int, match[1].split("."))) for name in defines if (match := re.fullmatch(r"GLIBC_(\d+\.\d+)", name))]
    return f"glibc {'.'.join(map(str, max(versions)))}" if versions else ""


def _library(process: Process, soname: str) -> str | None:
    path = process.find(soname)
    return None if path is None else process.seen(path)


def _toolkit(top: str) -> Fact:
    """The release of a toolkit in its usual place, as it is written there."""
    home = inside(top, "/usr/local/cuda")
    release = cuda.stated_release(home) if os.path.exists(f"{home}/bin/nvcc") else None
    return known(release) if release else ABSENT
