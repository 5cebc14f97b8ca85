"""The distributions of CuTe-DSL's compiler that are installed, by content.

Two digests each: of all that the wheel held, and of what is the same in its builds for every Python. RECORD says both; no file
of a wheel is read. What the digests decide is `kcache.match`'s.
"""

from __future__ import annotations

import csv

from kcache import digest
from kcache.kernel_facts import COMPILER, Wheel
from kcache.key import Fact, known, undetermined
from kcache.probe.packages import Distribution, Packages, content_digest, is_target_script


def compiler_wheels(installed: Packages) -> dict[str, Wheel]:
    """Normalised name -> distribution, of every nvidia-cutlass-dsl* on a search path; digests that are not known are empty."""
    wheels: dict[str, Wheel] = {}
    for name in installed.names():
        distribution = installed.distribution(name) if name.startswith(COMPILER) else None
        if distribution is not None:
            content, portable = content_digest(distribution), portable_digest(distribution)
            wheels[name] = Wheel(version=distribution.version, content=content.value or "", portable=portable.value or "")
    return wheels


def portable_digest(distribution: Distribution) -> Fact:
    """A digest of a wheel's version and of those of its files that are the same in its builds for every Python.

    Left out are extension modules, the files that name them (`_cutlass_ir_version_*.py`), static libraries (archives hold
    dates, and nothing that is loaded comes from them), scripts, byte code and the metadata directory.
    """
    try:
        with open(f"{distribution.metadata}/RECORD", encoding="utf-8", newline="") as stream:
            rows = [row for row in csv.reader(stream) if row]
    except (OSError, UnicodeDecodeError, csv.Error):
        return undetermined(f"{distribution.name} has no RECORD")
    kept = sorted(row[:3] for row in rows if not _is_python_bound(row[0]))
    if not kept:
        return undetermined(f"the RECORD of {distribution.name} lists no file that is the same for every Python")
    return known(digest.of_document([distribution.version, kept]))


def _is_python_bound(path: str) -> bool:
    name = path.rpartition("/")[2]
    return (
        ".cpython-" in name
        or ".abi3." in name
        or path.startswith(("../", "/"))
        or is_target_script(path)
        or "__pycache__/" in path
        or ".dist-info/" in path
        or name.endswith((".pyc", ".a"))
        or name.startswith("_cutlass_ir_version_")
    )
