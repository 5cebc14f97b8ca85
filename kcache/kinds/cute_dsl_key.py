"""What a CuTe-DSL kernel depends on, and whether kernels that were compiled elsewhere may be used on this host.

FlashInfer keys these kernels on more than they depend on: absolute paths, what an installer wrote into RECORD, torch, Python.
Here every ingredient has a rule by what it does: of the compiler (equal), of the loader (compatible), of neither (recorded). The
rules and their evidence are kcache/docs/decisions/0005-cute-dsl-ingredients.md. Pure decisions; a value that could not be found
out never passes.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kcache import digest
from kcache.key import Fact, known, undetermined
from kcache.kinds.cute_dsl import Installed
from kcache.match import EQUAL, NOT_OLDER, Check, Decision

SAME_RELEASE = "same-release"
"""Of another Python: the same version, and equal in every file that is not compiled for one Python."""

INGREDIENTS = {
    "platform.machine": EQUAL,
    "flashinfer.version": EQUAL,
    "gpu.cute_arch": EQUAL,
    "gpu.sm_count": EQUAL,
    "tvm_ffi.version": NOT_OLDER,
}
"""Ingredients that are one value each, and their rules; sources and wheels are compared one by one beside them.

platform.machine    `uname -m`: the object is machine code
flashinfer.version  names of kernels, and the calling side, are of one version
gpu.cute_arch       what was compiled for, in CuTe-DSL's spelling, such as `sm_120a`
gpu.sm_count        kernels hold grid sizes that FlashInfer works out from it; their names do too
tvm_ffi.version     the object speaks TVM-FFI's C ABI
"""

COMPILER = "nvidia-cutlass-dsl"
"""The compiler is every distribution whose name begins so: which of its backends are installed is part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One installed distribution of the compiler.

    content:  digest of what the wheel held (`kcache.probe.packages.content_digest`).
    portable: the same without what is compiled for one Python.
    """

    version: str
    content: Fact
    portable: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredients:
    """What CuTe-DSL kernels depend on: of an entry as it was built, or (with facts that may be missing) of a host.

    values:  those of `INGREDIENTS`.
    sources: key source, relative to the flashinfer package -> digest.
    wheels:  normalised name of each installed distribution of the compiler.
    python:  its `sys.implementation.cache_tag`, such as `cpython-311`: says which of a wheel's two digests counts.
    """

    values: Mapping[str, Fact]
    sources: Mapping[str, Fact]
    wheels: Mapping[str, Wheel]
    python: str


def compiler_wheels(stack: Iterable[Installed], contents: Mapping[str, Fact]) -> dict[str, Wheel]:
    """The compiler's distributions, by normalised name; of two of one name the first on the search path, which Python imports.

    Args:
        contents: normalised name -> content digest.
    """
    wheels: dict[str, Wheel] = {}
    for one in stack:
        name = re.sub(r"[-_.]+", "-", one.name).lower()
        if name.startswith(COMPILER) and name not in wheels:
            content = contents.get(name, _NOT_LOOKED)
            wheels[name] = Wheel(version=one.version, content=content, portable=portable_digest(one))
    return wheels


def portable_digest(one: Installed) -> Fact:
    """A digest of a wheel's version and of those of its files that are the same in its builds for every Python.

    Left out are extension modules, the files that name them (`_cutlass_ir_version_*.py`), static libraries (archives hold
    dates, and nothing that is loaded comes from them), scripts, byte code and the metadata directory.
    """
    if one.record is None:
        return undetermined(f"{one.name} has no RECORD")
    rows = [row for row in csv.reader(one.record.splitlines()) if row]
    kept = sorted(row[:3] for row in rows if not _is_python_bound(row[0]))
    if not kept:
        return undetermined(f"the RECORD of {one.name} lists no file that is the same for every Python")
    return known(digest.of_document([one.version, kept]))


def _is_python_bound(path: str) -> bool:
    name = path.rpartition("/")[2]
    return (
        ".cpython-" in name
        or ".abi3." in name
        or path.startswith("../")
        or "__pycache__/" in path
        or ".dist-info/" in path
        or name.endswith((".pyc", ".a"))
        or name.startswith("_cutlass_ir_version_")
    )


_NOT_LOOKED = undetermined("not looked at")
_NO_WHEEL = Fact()


def match_ingredients(built: Ingredients, host: Ingredients, *, strict: bool = False) -> Decision:
    """Whether kernels of these ingredients may be used on this host; every refusal names the field, package or file.

    Args:
        strict: everything equal, nothing merely compatible.
    """
    checks = []
    for name, rule in INGREDIENTS.items():
        wanted, found = built.values.get(name, _NOT_LOOKED), host.values.get(name, _NOT_LOOKED)
        checks.append(_compare(name, EQUAL if strict else rule, wanted, found))
    portable = not strict and bool(built.python) and bool(host.python) and built.python != host.python
    for name in sorted({*built.wheels, *host.wheels}):
        checks.append(_compare_wheel(name, built.wheels.get(name), host.wheels.get(name), portable=portable))
    for path in sorted(built.sources):
        found = host.sources.get(path, _NOT_LOOKED)
        checks.append(_compare(f"flashinfer/{path}", EQUAL, built.sources[path], found))
    for what, there in (("sources", built.sources), ("wheels", built.wheels)):
        if not there:
            checks.append(Check(field=what, rule=EQUAL, wanted="at least one", found="none in the entry", passed=False))
    return Decision(checks=tuple(checks))


def _compare_wheel(name: str, built: Wheel | None, host: Wheel | None, *, portable: bool) -> Check:
    field = f"package {name}"
    if built is None or host is None:
        wanted, found = (wheel.version if wheel else "absent" for wheel in (built, host))
        return Check(field=field, rule=EQUAL, wanted=wanted, found=found, passed=False)
    if built.version != host.version:
        return Check(field=field, rule=EQUAL, wanted=built.version, found=host.version, passed=False)
    if portable:
        return _compare(field, SAME_RELEASE, built.portable, host.portable)
    return _compare(field, EQUAL, built.content, host.content)


def _compare(field: str, rule: str, wanted: Fact, found: Fact) -> Check:
    passed = wanted.known and found.known and wanted.value == found.value
    if not passed and rule == NOT_OLDER and wanted.known and found.known:
        built, host = _numbers(wanted.value or ""), _numbers(found.value or "")
        passed = bool(built and host) and built[:2] == host[:2] and host >= built
    return Check(field=field, rule=rule, wanted=wanted.describe(), found=found.describe(), passed=passed)


def _numbers(version: str) -> tuple[int, ...]:
    """A final or post release as numbers; empty for anything else, which then only equals itself."""
    match = re.fullmatch(r"([0-9]+)\.([0-9]+)\.([0-9]+)(?:\.post([0-9]+))?", version)
    return tuple(int(part or 0) for part in match.groups()) if match else ()
