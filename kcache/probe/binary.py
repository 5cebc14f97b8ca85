"""What a host must offer to a library that was just built: the facts of a binary that a manifest records.

Used where entries are built, so that pyelftools may cost its 40 ms; `kcache.probe.elf` is for the restore path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kcache.errors import CollectError
from kcache.manifest import ElfFacts
from kcache.probe.fatbin import SECTIONS, FatbinError, embedded_archs, gpu_archs

PREFIXES = ("CXXABI", "GLIBC", "GLIBCXX")

_MACHINES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}

_NAMED_FLOORS = {"GLIBC_ABI_DT_RELR": ("GLIBC", "2.36")}
"""Version names without a number, and the first release that has them (glibc NEWS 2.36)."""


def binary_facts(path: Path) -> ElfFacts:
    """Reads a shared library.

    Raises:
        CollectError: it is missing, no shared library of a known machine, or holds GPU code in a layout that is not known.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as stream:
            elf = ELFFile(stream)
            machine = _MACHINES.get(elf.header["e_machine"])
            if machine is None or elf.header["e_type"] != "ET_DYN":
                raise CollectError(f"{path.name} is no shared library of a known machine")
            return ElfFacts(
                machine=machine, needed=_needed(elf), versions=highest(_version_names(elf)), gpu_archs=_gpu_archs(elf)
            )
    except (OSError, ELFError, FatbinError) as error:
        raise CollectError(f"{path.name} cannot be read as a built library", why=str(error)) from error


def object_facts(path: Path) -> ElfFacts:
    """Reads an object file that CuTe-DSL exported: machine code for the host, with one fat binary in its data.

    Such an object needs no libraries by itself: whoever loads it brings TVM-FFI and CuTe-DSL's runtime.

    Raises:
        CollectError: it is missing, no object file of a known machine, or holds GPU code in a layout that is not known.
    """
    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        with path.open("rb") as stream:
            elf = ELFFile(stream)
            machine = _MACHINES.get(elf.header["e_machine"])
            if machine is None or elf.header["e_type"] != "ET_REL":
                raise CollectError(f"{path.name} is no object file of a known machine")
        return ElfFacts(machine=machine, needed=(), versions={}, gpu_archs=embedded_archs(path.read_bytes()))
    except (OSError, ELFError, FatbinError) as error:
        raise CollectError(f"{path.name} cannot be read as a compiled kernel", why=str(error)) from error


def _needed(elf: Any) -> tuple[str, ...]:
    dynamic = elf.get_section_by_name(".dynamic")
    return tuple(tag.needed for tag in dynamic.iter_tags("DT_NEEDED")) if dynamic is not None else ()


def _version_names(elf: Any) -> list[str]:
    section = elf.get_section_by_name(".gnu.version_r")
    if section is None:
        return []
    return [version.name for _, versions in section.iter_versions() for version in versions]


def highest(names: list[str]) -> dict[str, str]:
    """The highest version of each prefix of `PREFIXES`, from names such as `GLIBC_2.34`."""
    found: dict[str, str] = {}
    for name in names:
        prefix, _, version = name.partition("_")
        prefix, version = _NAMED_FLOORS.get(name, (prefix, version))
        if prefix in PREFIXES and re.fullmatch(r"[0-9]+(\.[0-9]+)*", version):
            found[prefix] = max(found.get(prefix, version), version, key=_numbers)
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _gpu_archs(elf: Any) -> tuple[str, ...]:
    sections = [section for section in map(elf.get_section_by_name, SECTIONS) if section is not None]
    return tuple(sorted({arch for section in sections for arch in gpu_archs(section.data())}))
