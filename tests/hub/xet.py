"""Xet: tokens, and a content-addressed store that hf_xet itself writes and reads, on this disk.

A token's address is `local:///DIR`, which hf_xet 1.8.0 takes for a directory: the client's own library writes there. A commit
names a file by its sha256 only; which xet hash that is, the shards say (format: xet-core, mdb_shard). Then the file is read back
with hf_xet, so that the resolver can serve it to clients without xet, as the Hub does. That happens in a process of its own on a
copy of hard links: the library's index of chunks is for one process at a time. So there is one publisher by xet at a time.
"""

from __future__ import annotations

import struct
import subprocess
import sys
import time
from pathlib import Path

from starlette.responses import JSONResponse, Response

from .access import Refusal
from .exchange import Exchange, Hub

VERIFIED, EXTENDED = 1 << 31, 1 << 30
RECORD = 48
"""Bytes of every record in a shard."""

READ = """
import os, shutil, sys, tempfile, time
import hf_xet
cas, wanted, size, target = sys.argv[1:]
with tempfile.TemporaryDirectory(dir=os.path.dirname(cas)) as copy:
    for directory, _, names in os.walk(cas):
        there = os.path.join(copy, os.path.relpath(directory, cas))
        os.makedirs(there, exist_ok=True)
        for name in names:
            take = shutil.copy if name.endswith(".redb") else os.link
            take(os.path.join(directory, name), os.path.join(there, name))
    session = hf_xet.XetSession()
    with session.new_file_download_group(
        endpoint="local://" + copy, token="t", token_expiry_unix_secs=int(time.time()) + 3600
    ) as group:
        group.start_download_file(hf_xet.XetFileInfo(wanted, int(size)), target)
"""


async def token(exchange: Exchange, kind: str, repo: str, access: str, rev: str) -> Response:
    hub = exchange.hub
    if not hub.xet:
        raise Refusal(404, "this local Hub runs without xet")
    if access == "write":
        exchange.writable(kind, repo)
    else:
        exchange.readable(kind, repo, content=True)
    expires = int(time.time()) + 3600
    url = f"local://{_cas(hub)}"
    _cas(hub).mkdir(parents=True, exist_ok=True)
    headers = {"X-Xet-Cas-Url": url, "X-Xet-Access-Token": "local", "X-Xet-Token-Expiration": str(expires)}
    return JSONResponse({"casUrl": url, "accessToken": "local", "exp": expires}, headers=headers)


def _cas(hub: Hub) -> Path:
    return hub.state.root / "cas"


def hash_of(hub: Hub, sha256: str) -> str:
    """The xet hash of a file that came by xet, or nothing."""
    return _known(hub).get(sha256, "")


def find(hub: Hub, sha256: str, size: int) -> bool:
    """Whether a file came by xet. It is a blob afterwards."""
    wanted = hash_of(hub, sha256)
    if not wanted:
        return False
    target = hub.state.blobs.path(sha256)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}")
    command = [sys.executable, "-c", READ, str(_cas(hub)), wanted, str(size), str(temporary)]
    if subprocess.run(command, check=False).returncode != 0:
        return False
    temporary.rename(target)
    return True


def _known(hub: Hub) -> dict[str, str]:
    """sha256 -> xet hash, from all shards that were uploaded."""
    found = {}
    for shard in (_cas(hub) / "xet" / "xorbs" / "shards").glob("*.mdb"):
        found.update(_files(shard.read_bytes()))
    return found


def _files(shard: bytes) -> dict[str, str]:
    """sha256 -> xet hash in one shard: a header, then for each file a record with its hash, flags and number of segments, the
    segments, as many records of verification if the flag says so, and one with the sha256 if that flag does."""
    found = {}
    at = RECORD
    while at + RECORD <= len(shard) and shard[at : at + 32] != b"\xff" * 32:
        name = _hex(shard[at : at + 32])
        flags, segments = struct.unpack("<II", shard[at + 32 : at + 40])
        at += RECORD * (1 + segments * (2 if flags & VERIFIED else 1))
        if flags & EXTENDED:
            found[_hex(shard[at : at + 32])] = name
            at += RECORD
    return found


def _hex(data: bytes) -> str:
    """A hash as xet-core writes it: four numbers, each in the order of its digits."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", data))


def link(hub: Hub, kind: str, repo: str, oid: str, xet_hash: str) -> dict[str, str]:
    """What the resolver says of a file that is kept in xet."""
    route = f"{hub.base}/api/{kind}/{repo}/xet-read-token/{oid}"
    return {"X-Xet-Hash": xet_hash, "X-Xet-Refresh-Route": route, "Link": f'<{route}>; rel="xet-auth"'}
