"""Programs that Triton compiled for b12x: one directory each, moved to another place.

Triton keeps a program as `<cache>/<key in base 32>/`, its files named by `__grp__<name>.json`, which holds their **absolute
paths** (`triton/runtime/cache.py`, FileCacheManager, 3.7.1): a copy elsewhere is not found, and a moved home means compiling
again. So the group's file is written anew for the place where the program goes; nothing else changes. Its key covers Triton's
own bytes, its extension module for one Python among them, the kernel's source and the compiler's switches, and cannot be worked
out without Triton: a program goes only where that all is equal (`Facts`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

from kcache import fsops
from kcache.errors import IntegrityError, KcacheError
from kcache.kinds.b12x_compile import LeftOut
from kcache.match import EQUAL, Check, Decision
from kcache.values import dataclass

MAX_FILE = 64 << 20

_DIRECTORY = re.compile(r"[A-Z2-7]{52}")
_GROUP = "__grp__"

_PREFIXES = ("TRITON_", "MLIR_", "LLVM_", "NVPTX_", "AMDGCN_", "DISABLE_", "ALLOW_", "USE_IR_", "ENABLE_")
_PLACES = frozenset(("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR"))


def triton_cache_directory(environ: Mapping[str, str]) -> str:
    """Where Triton keeps programs (`triton/knobs.py`, cache_knobs, 3.7.1): TRITON_CACHE_DIR, else below TRITON_HOME or HOME.

    Raises:
        IntegrityError: none of them says so.
    """
    if place := environ.get("TRITON_CACHE_DIR"):
        return place
    home = environ.get("TRITON_HOME") or environ.get("HOME")
    if not home:
        raise IntegrityError("Triton's cache has no place", why="HOME is not set", remedy="Set TRITON_CACHE_DIR.")
    return f"{home}/.triton/cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One program: its directory's name, the name of its group (`_route_topk_kernel.json`), and its files' bytes by name."""

    directory: str
    name: str
    files: Mapping[str, bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a Triton program's key depends on, without the program itself.

    triton:   version and content of the installed wheel, as one text.
    python:   the ABI of extension modules: Triton hashes its own.
    package:  fingerprint of the b12x that holds the kernel's source.
    gpu:      compute capability, such as `12.0`.
    switches: variables that may change what Triton compiles, those that are set.
    """

    triton: str
    python: str
    package: str
    gpu: str
    switches: Mapping[str, str]


def switches_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may enter a key: every set one with a prefix of Triton's or LLVM's, but for places."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(_PREFIXES) and name not in _PLACES}


def match_group(built: Facts, host: Facts) -> Decision:
    """Whether programs of one host are found by the Triton of another; an empty fact could not be found out."""
    pairs = [("triton", built.triton, host.triton), ("python.abi", built.python, host.python)]
    pairs += [("b12x.package", built.package, host.package), ("gpu.capability", built.gpu, host.gpu)]
    checks = [
        Check(
            field=name, rule=EQUAL, wanted=wanted or "unknown", found=found or "unknown", passed=wanted != "" and wanted == found
        )
        for name, wanted, found in pairs
    ]
    for name in sorted({*built.switches, *host.switches}):
        texts = [switches.get(name, "unset") for switches in (built.switches, host.switches)]
        checks.append(Check(field=f"env {name}", rule=EQUAL, wanted=texts[0], found=texts[1], passed=texts[0] == texts[1]))
    return Decision(checks=tuple(checks))


def read_group(cache: Path, directory: str, name: str) -> Group:
    """One program, whole.

    Args:
        name: of its group: the kernel's name and `.json`.

    Raises:
        IntegrityError: it is not finished, or a file is not where the group says.
        TrustError: a file is a link, or someone else could change it.
    """
    if not _DIRECTORY.fullmatch(directory):
        raise IntegrityError(f"{directory[:60]!r} is no directory of a Triton program")
    here = cache / directory
    fsops.check_root(here)
    group = _read(here / f"{_GROUP}{name}")
    try:
        children = json.loads(group)["child_paths"]
        names = sorted(children)
        usable = all(os.path.basename(child) == child and child not in ("", ".", "..") for child in names)  # noqa: PTH119
    except (ValueError, KeyError, TypeError, RecursionError):
        usable, names = False, []
    if not usable or name not in names:
        raise IntegrityError(f"{directory} is no finished program", why=f"{_GROUP}{name} does not list its files")
    return Group(directory=directory, name=name, files={child: _read(here / child) for child in names})


def _read(path: Path) -> bytes:
    if not os.path.lexists(path):
        raise IntegrityError(f"{path.parent.name} is no finished program", why=f"{path.name} is missing")
    return fsops.read_checked(path, MAX_FILE)


def collect_groups(cache: Path, wanted: Mapping[str, str]) -> tuple[tuple[Group, ...], tuple[LeftOut, ...]]:
    """The programs of these directories (-> name of the group); what is not finished, with the reason."""
    found: list[Group] = []
    left_out: list[LeftOut] = []
    for directory, name in sorted(wanted.items()):
        try:
            found.append(read_group(cache, directory, name))
        except KcacheError as error:
            left_out.append(LeftOut(path=directory, why=f"{error.what}: {error.why}" if error.why else error.what))
    return tuple(found), tuple(left_out)


def install_group(cache: Path, group: Group, *, timeout: float) -> bool:
    """Put a program into a Triton cache, its group's file last; False if a whole one is there, which stays.

    Raises:
        TrustError: the cache, a directory or a file is a link, or someone else could change it.
        LockTimeoutError, NoSpaceError, InstallError: see `kcache.fsops`.
    """
    if not _DIRECTORY.fullmatch(group.directory) or group.name not in group.files:
        raise IntegrityError(f"{group.directory[:60]!r} is no Triton program")
    fsops.ensure_directory(cache)
    here = fsops.ensure_directory(cache / group.directory, root=cache)
    with fsops.locked(here / ".b12x-compile.lock", timeout):
        if found_by_triton(here, group.name):
            return False
        for name, data in sorted(group.files.items()):
            fsops.write_bytes(here / name, data)
        # The spelling of the path is Triton's own: the cache's directory as the environment gives it.
        children = {name: f"{cache}/{group.directory}/{name}" for name in group.files}
        fsops.write_bytes(here / f"{_GROUP}{group.name}", json.dumps({"child_paths": children}).encode())
    return True


def found_by_triton(directory: Path, name: str) -> bool:
    """Whether Triton would find the program here: its group is there, and every file where the group says (`get_group`)."""
    try:
        children = json.loads((directory / f"{_GROUP}{name}").read_bytes())["child_paths"]
        return name in children and all(os.path.exists(path) for path in children.values())  # noqa: PTH110
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
