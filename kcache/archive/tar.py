"""The one shape of tar header that kcache writes, and so the only one that it reads.

POSIX ustar, regular files: mode 0644, no owner, time 0. A header is a function of path and size, so reading one is comparing
it: no field is interpreted, and nothing can be said in it that kcache would not say. Why: kcache/docs/decisions/
0002-archive-format.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from kcache.errors import IntegrityError

BLOCK = 512
END = bytes(2 * BLOCK)
"""What ends an archive; nothing follows it."""

MAX_FILE = 8**11 - 1
"""Bytes: the largest size that eleven octal digits hold."""

_TYPES = {
    b"0": "a regular file",
    b"\0": "a regular file",
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"5": "a directory",
    b"6": "a named pipe",
    b"7": "a contiguous file",
    b"x": "a PAX header",
    b"g": "a global PAX header",
    b"L": "a GNU long name",
    b"K": "a GNU long link name",
    b"S": "a GNU sparse file",
}


def padding(size: int) -> int:
    """Zero bytes that follow a file of `size` bytes."""
    return -size % BLOCK


def stream_size(sizes: Iterable[int]) -> int:
    """Bytes of an archive of files of these sizes in bytes."""
    return sum(BLOCK + size + padding(size) for size in sizes) + len(END)


def header(path: str, size: int) -> bytes:
    """The header of a file.

    Raises:
        IntegrityError: the size does not fit into it.
    """
    name, prefix = _split(path)
    if size > MAX_FILE:
        raise IntegrityError(f"{path} has {size} bytes", why=f"an archive holds files of at most {MAX_FILE}")
    before = name.ljust(100, b"\0") + b"0000644\0" + b"0000000\0" + b"0000000\0" + b"%011o\0" % size + b"%011o\0" % 0
    after = b"0" + bytes(100) + b"ustar\00000" + bytes(64) + b"0000000\0" + b"0000000\0" + prefix.ljust(155, b"\0") + bytes(12)
    checksum = sum(before) + sum(b" " * 8) + sum(after)
    return before + b"%06o\0 " % checksum + after


def member_name(path: str) -> str:
    """The name of a path's member: the path, or where that fits into no header, one made of its digest.

    FlashInfer's names of attention modules have up to 200 characters, and each is in its path twice.
    """
    encoded = path.encode()
    return path if _cut(encoded) >= 0 else f"long-path/{hashlib.sha256(encoded).hexdigest()}"


def _split(path: str) -> tuple[bytes, bytes]:
    encoded = member_name(path).encode()
    cut = _cut(encoded)
    return (encoded[cut + 1 :], encoded[:cut]) if cut else (encoded, b"")


def _cut(encoded: bytes) -> int:
    """Where a path is cut into prefix and name: 0 for no cut, negative where it does not fit."""
    if len(encoded) <= 100:
        return 0
    cut = encoded.find(b"/", len(encoded) - 101)
    return cut if 0 < cut <= 155 else -1


def claimed_name(found: bytes) -> str:
    """The member's name that a header claims, only for looking up and for messages."""
    name, prefix = found[:100].split(b"\0", 1)[0], found[345:500].split(b"\0", 1)[0]
    return (prefix + b"/" + name if prefix else name).decode("utf-8", "backslashreplace")


def why_refused(found: bytes, wanted: bytes) -> str:
    """What is wrong with the header `found` where `wanted` is the right one."""
    kind = found[156:157]
    if found[257:265] != wanted[257:265] and found[257:265] != b"ustar  \0":
        return "its header is not a tar header"
    if kind != b"0":
        return f"it is {_TYPES.get(kind, f'of type {kind!r}')}"
    if found[124:136] != wanted[124:136]:
        return f"its header says another size ({found[124:136]!r})"
    total = sum(found[:148]) + sum(b" " * 8) + sum(found[156:])
    if found[148:156] != b"%06o\0 " % total:
        return "the checksum of its header is wrong"
    return "its header is not one that kcache writes"
