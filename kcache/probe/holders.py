"""Which processes of this host have files below a directory loaded, open, or named in their environment.

Read from /proc. A process of another user is seen by root only, one in another PID namespace not at all; callers must not take
"nobody" for more than that. A process that ends meanwhile holds nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_MAPS_BYTES = 64 << 20
_ENVIRON_BYTES = 4 << 20


def held_paths(base: str) -> Iterator[tuple[int, str]]:
    """(pid, path below `base`) of whatever a process has mapped or open, or has in a variable of its environment.

    Args:
        base: an absolute path without symbolic links.
    """
    prefix = base.rstrip("/") + "/"
    for pid in _processes():
        seen: set[str] = set()
        for path in (*_mapped(pid), *_opened(pid), *_named(pid, prefix)):
            if path.startswith(prefix) and path not in seen:
                seen.add(path)
                yield pid, path


def _processes() -> Iterator[int]:
    own = os.getpid()
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and int(name) != own:
            yield int(name)


def _mapped(pid: int) -> Iterator[str]:
    for line in _read(f"/proc/{pid}/maps", _MAPS_BYTES).splitlines():
        fields = line.split(None, 5)  # address, permissions, offset, device, inode, path (proc(5))
        if len(fields) == 6 and fields[5].startswith(b"/"):
            yield os.fsdecode(fields[5])


def _opened(pid: int) -> Iterator[str]:
    directory = f"/proc/{pid}/fd"
    try:
        names = os.listdir(directory)  # noqa: PTH208
    except OSError:
        return
    for name in names:
        try:
            yield str(Path(directory, name).readlink())
        except OSError:
            continue


def _named(pid: int, prefix: str) -> Iterator[str]:
    for variable in _read(f"/proc/{pid}/environ", _ENVIRON_BYTES).split(b"\0"):
        for part in os.fsdecode(variable.partition(b"=")[2]).split(":"):
            if part.startswith(prefix):
                yield part


def _read(path: str, limit: int) -> bytes:
    try:
        with open(path, "rb") as stream:
            return stream.read(limit)
    except OSError:
        return b""
