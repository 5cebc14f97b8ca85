"""Runs a command that ends when its parent ends: the compilers of a server that was killed must not go on in its cache.

Run by path: `python -I -S guard.py PARENT GRACE COMMAND...`, standard library only. The command is stopped when standard input
is closed, or when PARENT (a pid) is no longer the parent: SIGINT first, so that ninja removes what is half written and ends its
compilers; after GRACE seconds everything that is left is killed. The exit code is the command's, or 130.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def _children() -> list[int]:
    """Children of this process that still run, adopted ones among them."""
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
            if int(fields[1]) == os.getpid() and fields[0] != "Z":
                found.append(int(name))
    return found


def _stop(child: "subprocess.Popen[bytes]", grace: float) -> int:
    child.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace)
    # Compilers that did not end with it were adopted by this process.
    until = time.monotonic() + grace
    while (left := _children()) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return 130


def main() -> int:
    parent, grace, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    with contextlib.suppress(OSError):
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    pause = 0.005
    while child.poll() is None:
        closed, _, _ = select.select([0], [], [], pause)
        pause = min(pause * 1.5, 0.2)
        if closed or os.getppid() != parent:
            return _stop(child, grace)
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
