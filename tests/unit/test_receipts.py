"""What a start hashes, counted: an installed file is read again only if its identity is another one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from container import Container
from entries import make_fitting_entry, publish

COUNTED = """
import hashlib, os, sys
class Counted:
    real, total = hashlib.sha256, 0
    def __init__(self, data=b""):
        self.inner = self.real()
        self.update(data)
    def update(self, data):
        Counted.total += memoryview(data).nbytes
        self.inner.update(data)
    def hexdigest(self):
        return self.inner.hexdigest()
hashlib.sha256 = Counted
leave = os._exit
def end(code):
    trust = any(name.startswith("kcache.trust") for name in sys.modules)
    print(Counted.total, file=sys.stderr, flush=True)
    leave(99 if trust else code)
os._exit = end
from kcache.cli.main import main
main()
"""
SIZE = 3_000_000
FEW = 200_000
"""Bytes of an index, a manifest and a few documents, and no library."""


def hashed(host: Container, store: Path) -> int:
    """Bytes that a restore, which must hit, has hashed."""
    done = host.run([sys.executable, "-c", COUNTED, "restore", "--from", str(store), "--arch", "9.0a", "--json"])
    assert (done.code, done.document["status"]) == (0, "hit"), done.err  # 99: without a policy something of kcache.trust is there
    return int(done.err.split()[-1])


def test_a_second_start_hashes_no_file_whose_identity_is_the_receipts(tmp_path: Path) -> None:
    make_fitting_entry(tmp_path / "out", {"cascade": os.urandom(SIZE), "page": os.urandom(SIZE)})
    publish(tmp_path / "out", tmp_path / "store")
    host = Container(home=tmp_path / "home")
    assert hashed(host, tmp_path / "store") > 2 * SIZE
    assert hashed(host, tmp_path / "store") < FEW
    first, second = host.libraries
    first.touch()
    assert SIZE <= hashed(host, tmp_path / "store") < SIZE + FEW  # that one, and no other
    assert hashed(host, tmp_path / "store") < FEW
    with second.open("r+b") as stream:  # as many bytes, at the same time
        before = second.stat()
        stream.write(b"x")
    os.utime(second, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert hashed(host, tmp_path / "store") > SIZE  # its change time says so
    assert hashed(host, tmp_path / "store") < FEW
