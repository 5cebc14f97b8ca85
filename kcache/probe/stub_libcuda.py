"""A stand-in for the driver's library, for linking on a host without a GPU: an ELF shared object made without a compiler.

The driver's `libcuda.so.1` comes with the driver, not with the toolkit's wheels, but FlashInfer links every module with
`-lcuda` (`jit/cpp_ext.py`, generate_ninja_build_for_op, 0.7.4). The stand-in has the soname `libcuda.so.1` and defines every
name that the toolkit's `cuda.h` mentions: a linker run with `--as-needed` (the default of some distributions) would drop a
library that defines nothing, and the module would then not find the driver on the GPU host. Every function returns
`CUDA_ERROR_STUB_LIBRARY` (34), as those of NVIDIA's own stub do. It is never installed and never part of an entry.

Layout: one read-and-execute segment (headers, hash table, symbols, names, code) and one writable segment with the dynamic
section, since glibc before 2.36 writes its pointers back into it. Section headers are there for the linkers.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kcache.errors import ProbeError

SONAME = "libcuda.so.1"

CUDA_ERROR_STUB_LIBRARY = 34

_PAGE = 0x10000
"""Segment alignment, bytes: the largest page of the two machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Machine:
    number: int
    """e_machine of the ELF header."""
    code: bytes
    """A function that returns 34."""


_MACHINES = {
    "x86_64": _Machine(number=62, code=b"\xb8" + struct.pack("<I", CUDA_ERROR_STUB_LIBRARY) + b"\xc3"),
    "aarch64": _Machine(number=183, code=struct.pack("<II", 0x52800000 | CUDA_ERROR_STUB_LIBRARY << 5, 0xD65F03C0)),
}


def driver_symbols(cuda_header: str) -> tuple[str, ...]:
    """The names that a driver may have to define, sorted: every `cu...` identifier in the text of `cuda.h`.

    More names than functions, types and macros among them: a name too many harms nobody, one too few loses the driver.
    """
    return tuple(sorted(set(re.findall(r"\bcu[A-Z][A-Za-z0-9_]*", cuda_header))))


def write_stub(path: Path, machine: str, symbols: Iterable[str]) -> None:
    """Writes the library to `path`.

    Args:
        machine: `x86_64` or `aarch64`, as `uname -m` says it.
        symbols: the functions to define; see `driver_symbols`.

    Raises:
        ProbeError: another machine.
        OSError: the file cannot be written.
    """
    path.write_bytes(stub_bytes(machine, symbols))


def stub_bytes(machine: str, symbols: Iterable[str]) -> bytes:
    """The library's bytes; the same arguments give the same bytes. Arguments and errors as of `write_stub`."""
    facts = _MACHINES.get(machine)
    if facts is None:
        raise ProbeError(
            f"no stand-in for libcuda is known for {machine}",
            why=f"known are {', '.join(sorted(_MACHINES))}",
            remedy="Set CUDA_HOME to a toolkit that has lib64/stubs/libcuda.so.",
        )
    names = [name.encode("ascii") for name in sorted(set(symbols))]
    strings, offsets = _string_table([SONAME.encode(), *names])
    parts = _Parts(
        hash=_hash_table(names),
        dynsym=b"",
        dynstr=strings,
        text=facts.code,
    )
    at = parts.offsets(len(names) + 1)
    parts.dynsym = _symbols(offsets[1:], at["text"], len(facts.code))
    return _assemble(facts, parts, at, soname=offsets[0])


@dataclass(slots=True, kw_only=True)
class _Parts:
    hash: bytes
    dynsym: bytes
    dynstr: bytes
    text: bytes

    def offsets(self, symbols: int) -> dict[str, int]:
        """Where each part lies, bytes from the start of the file; addresses are the same numbers."""
        at = {"hash": _HEADERS}
        at["dynsym"] = _aligned(at["hash"] + len(self.hash), 8)
        at["dynstr"] = at["dynsym"] + symbols * _SYMBOL.size
        at["text"] = _aligned(at["dynstr"] + len(self.dynstr), 16)
        at["end"] = at["text"] + len(self.text)
        at["dynamic"] = _aligned(at["end"], _PAGE)
        return at


_EHDR = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR = struct.Struct("<IIQQQQQQ")
_SHDR = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYN = struct.Struct("<QQ")
_SEGMENTS = 4
_HEADERS = 64 + _SEGMENTS * 56
_TEXT_SECTION = 4


def _aligned(value: int, to: int) -> int:
    return -(-value // to) * to


def _string_table(strings: list[bytes]) -> tuple[bytes, list[int]]:
    """A string table, and the offset of each string in it."""
    table, offsets = bytearray(b"\0"), []
    for string in strings:
        offsets.append(len(table))
        table += string + b"\0"
    return bytes(table), offsets


def _sysv_hash(name: bytes) -> int:
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


def _hash_table(names: list[bytes]) -> bytes:
    """DT_HASH of the names, which are symbols 1, 2, ... of the table."""
    buckets = [0] * max(1, len(names) // 2)
    chain = [0] * (len(names) + 1)
    for index, name in enumerate(names, start=1):
        bucket = _sysv_hash(name) % len(buckets)
        chain[index] = buckets[bucket]
        buckets[bucket] = index
    return struct.pack(f"<II{len(buckets)}I{len(chain)}I", len(buckets), len(chain), *buckets, *chain)


def _symbols(name_offsets: list[int], address: int, size: int) -> bytes:
    """The symbol table: the null symbol, then one global function for each name, all at the same address."""
    global_function = 1 << 4 | 2
    return b"\0" * _SYMBOL.size + b"".join(
        _SYMBOL.pack(name, global_function, 0, _TEXT_SECTION, address, size) for name in name_offsets
    )


def _dynamic(parts: _Parts, at: dict[str, int], soname: int) -> bytes:
    tags = [
        (14, soname),  # DT_SONAME
        (4, at["hash"]),  # DT_HASH
        (5, at["dynstr"]),  # DT_STRTAB
        (6, at["dynsym"]),  # DT_SYMTAB
        (10, len(parts.dynstr)),  # DT_STRSZ
        (11, _SYMBOL.size),  # DT_SYMENT
        (0, 0),
    ]
    return b"".join(_DYN.pack(*tag) for tag in tags)


def _assemble(machine: _Machine, parts: _Parts, at: dict[str, int], soname: int) -> bytes:
    dynamic = _dynamic(parts, at, soname)
    names, name_at = _string_table([b".hash", b".dynsym", b".dynstr", b".text", b".dynamic", b".shstrtab"])
    names_offset = at["dynamic"] + len(dynamic)
    sections_offset = _aligned(names_offset + len(names), 8)
    alloc, write, execute = 2, 1, 4
    sections = [
        (0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
        (name_at[0], 5, alloc, at["hash"], at["hash"], len(parts.hash), 2, 0, 8, 4),
        (name_at[1], 11, alloc, at["dynsym"], at["dynsym"], len(parts.dynsym), 3, 1, 8, _SYMBOL.size),
        (name_at[2], 3, alloc, at["dynstr"], at["dynstr"], len(parts.dynstr), 0, 0, 1, 0),
        (name_at[3], 1, alloc | execute, at["text"], at["text"], len(parts.text), 0, 0, 16, 0),
        (name_at[4], 6, alloc | write, at["dynamic"], at["dynamic"], len(dynamic), 3, 0, 8, _DYN.size),
        (name_at[5], 3, 0, 0, names_offset, len(names), 0, 0, 1, 0),
    ]
    segments = [
        (1, 5, 0, 0, 0, at["end"], at["end"], _PAGE),  # PT_LOAD, read and execute
        (1, 6, at["dynamic"], at["dynamic"], at["dynamic"], len(dynamic), len(dynamic), _PAGE),  # PT_LOAD, read and write
        (2, 6, at["dynamic"], at["dynamic"], at["dynamic"], len(dynamic), len(dynamic), 8),  # PT_DYNAMIC
        (0x6474E551, 6, 0, 0, 0, 0, 0, 16),  # PT_GNU_STACK: without it glibc would ask for an executable stack
    ]
    image = bytearray(sections_offset + len(sections) * _SHDR.size)
    ident = b"\x7fELF" + bytes([2, 1, 1, 0]) + b"\0" * 8
    header = _EHDR.pack(
        ident, 3, machine.number, 1, 0, 64, sections_offset, 0, 64, 56, len(segments), 64, len(sections), len(sections) - 1
    )
    pieces = [
        (0, header),
        (64, b"".join(_PHDR.pack(*segment) for segment in segments)),
        (at["hash"], parts.hash),
        (at["dynsym"], parts.dynsym),
        (at["dynstr"], parts.dynstr),
        (at["text"], parts.text),
        (at["dynamic"], dynamic),
        (names_offset, names),
        (sections_offset, b"".join(_SHDR.pack(*section) for section in sections)),
    ]
    for offset, piece in pieces:
        image[offset : offset + len(piece)] = piece
    return bytes(image)
