"""Which GPU architectures a library's embedded GPU code is for, read from its fat binaries without NVIDIA's tools.

A fat binary section holds containers, a container holds entries, an entry holds one cubin (an ELF file for a GPU) or PTX. The
entry's header names architecture and suffix; the layout is not documented and was found by comparing what nvcc 13.0.88 writes
for 9.0, 9.0a, 10.0f, 12.0a, 12.0f with what cuobjdump says. Toolkits before 13 also say `a` in the cubin's own ELF header
(`e_flags`), which is looked at where the entry says nothing. Pure: bytes in, names out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

SECTIONS = (".nv_fatbin", "__nv_relfatbin")
"""Where host objects keep fat binaries: whole programs, and relocatable device code before its link."""

_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
"""Magic, version, header size, size of what follows in bytes."""
_ENTRY = struct.Struct("<HHIQIIIIIIQ")
"""Kind, version, header size, padded payload size, compressed size, -, -, architecture, -, -, flags."""

_PTX, _CUBIN = 1, 2
_FLAG_A, _FLAG_F, _FLAG_ZSTD, _FLAG_LZ4 = 0x100000, 0x200000, 0x8000, 0x2000

_OSABI_OLD, _OSABI_NEW = 51, 65
_ACCELERATED = {_OSABI_OLD: 0x800, _OSABI_NEW: 0x8}
"""The bit of a cubin's e_flags that means `a`, by its OS ABI (ptxas 12.8 and 12.9; 13.0 leaves it unset)."""


class FatbinError(ValueError):
    """The bytes are not fat binaries of a known layout."""


def gpu_archs(section: bytes) -> tuple[str, ...]:
    """The architectures of a fat binary section, sorted, each once: `sm_90a` for machine code, `compute_90` for PTX.

    Raises:
        FatbinError: the section is cut short, or of a layout that this kcache does not know.
    """
    return tuple(sorted({name for container in _containers(section) for name in _entries(container)}))


def embedded_archs(data: bytes) -> tuple[str, ...]:
    """The same of fat binaries that lie among other data, at multiples of eight bytes.

    Raises:
        FatbinError: one is cut short, or of a layout that this kcache does not know.
    """
    found: set[str] = set()
    magic, position = _MAGIC.to_bytes(4, "little"), 0
    while (position := data.find(magic, position)) >= 0:
        if position % 8 or len(data) - position < _CONTAINER.size:
            position += 1
            continue
        _, _, header, size = _CONTAINER.unpack_from(data, position)
        found.update(gpu_archs(data[position : position + header + size]))
        position += header + size
    return tuple(sorted(found))


def _containers(section: bytes) -> Iterator[bytes]:
    position = 0
    while position + _CONTAINER.size <= len(section):
        magic, _, header, size = _CONTAINER.unpack_from(section, position)
        if magic != _MAGIC:
            if section[position : position + 8].strip(b"\0"):
                raise FatbinError(f"no fat binary at offset {position}")
            position += 8  # padding between containers
            continue
        start = position + header
        if header < _CONTAINER.size or start + size > len(section):
            raise FatbinError(f"the fat binary at offset {position} is cut short")
        yield section[start : start + size]
        position = start + size


def _entries(container: bytes) -> Iterator[str]:
    position = 0
    while position + _ENTRY.size <= len(container):
        kind, _, header, size, compressed, _, _, arch, _, _, flags = _ENTRY.unpack_from(container, position)
        if header < _ENTRY.size or position + header + size > len(container):
            raise FatbinError(f"the entry at offset {position} is cut short")
        if kind == _PTX:
            yield f"compute_{arch}{_suffix(flags)}"
        elif kind == _CUBIN:
            payload = container[position + header : position + header + (compressed or size)]
            yield f"sm_{arch}{_suffix(flags) or _cubin_suffix(payload, flags)}"
        position += header + size


def _suffix(flags: int) -> str:
    return "a" if flags & _FLAG_A else "f" if flags & _FLAG_F else ""


def _cubin_suffix(payload: bytes, flags: int) -> str:
    """What the cubin's own header adds where the entry names no suffix."""
    if flags & _FLAG_ZSTD:
        import zstandard

        try:
            payload = zstandard.ZstdDecompressor().decompressobj().decompress(payload)
        except zstandard.ZstdError as error:
            raise FatbinError(f"a compressed cubin cannot be read: {error}") from error
    elif flags & _FLAG_LZ4:
        return ""
    if payload[:4] != b"\x7fELF" or len(payload) < 52:
        raise FatbinError("an entry is no ELF file")
    (elf_flags,) = struct.unpack_from("<I", payload, 48)
    return "a" if elf_flags & _ACCELERATED.get(payload[7], 0) else ""
