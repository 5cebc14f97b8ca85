"""What is written anywhere below a directory, as the kernel says it (inotify(7)): files that are gone again count too."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CREATE, _MODIFY, _ATTRIB, _MOVED_FROM, _MOVED_TO, _DELETE = 0x100, 0x2, 0x4, 0x40, 0x80, 0x200
_MASK = _CREATE | _MODIFY | _ATTRIB | _MOVED_FROM | _MOVED_TO | _DELETE
_NONBLOCK = 0x800


@contextmanager
def changes(root: Path) -> Iterator[list[str]]:
    """The paths below `root` (and `root` itself) that were changed, made or removed while the body ran, once it has ended.

    Directories that are made meanwhile are reported, what happens in them is not.
    """
    library = ctypes.CDLL(None, use_errno=True)
    descriptor = library.inotify_init1(_NONBLOCK)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    places: dict[int, str] = {}
    found: list[str] = []
    try:
        for directory, _, _ in os.walk(root):
            watch = library.inotify_add_watch(descriptor, os.fsencode(directory), _MASK)
            assert watch >= 0, os.strerror(ctypes.get_errno())
            places[watch] = directory
        yield found
        found += _events(descriptor, places)
    finally:
        os.close(descriptor)


def _events(descriptor: int, places: dict[int, str]) -> Iterator[str]:
    while True:
        try:
            data = os.read(descriptor, 1 << 20)
        except BlockingIOError:
            return
        while data:
            watch, _, _, length = struct.unpack_from("iIII", data)
            name = data[16 : 16 + length].rstrip(b"\0").decode("utf-8", "surrogateescape")
            data = data[16 + length :]
            yield f"{places.get(watch, '?')}/{name}"
