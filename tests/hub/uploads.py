"""LFS: which files go that way, where to, in one part or in several, and what arrived."""

from __future__ import annotations

import hashlib
from math import ceil
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from .access import Refusal
from .exchange import Exchange, Hub, send_file
from .state import write

PART = 5_000_000
"""Bytes in a part of a large upload."""

BINARY = (".zst", ".tar", ".so", ".bin", ".gz", ".safetensors", ".npz", ".pt")


def mode(path: str, sample: bytes, size: int) -> str:
    """`lfs` or `regular`, decided as the Hub does: by .gitattributes, by size, by what the first bytes look like."""
    if path.endswith(BINARY) or size > 10_000_000 or b"\0" in sample:
        return "lfs"
    try:
        sample[:-4].decode()
    except UnicodeDecodeError:
        return "lfs"
    return "regular"


async def batch(exchange: Exchange, kind: str, repo: str) -> Response:
    exchange.writable(kind, repo)
    hub = exchange.hub
    objects = []
    for asked in (await exchange.json())["objects"]:
        oid, size = asked["oid"], asked["size"]
        answer = {"oid": oid, "size": size}
        if not hub.state.blobs.has(oid):
            prefix = "" if kind == "models" else f"{kind}/"
            git = f"{hub.base}/{prefix}{repo}.git/info/lfs"
            upload: dict[str, object] = {"href": f"{hub.cdn}/upload/{oid}?size={size}&signature=x"}
            if size > hub.multipart:
                parts = {f"{n + 1:05d}": f"{hub.cdn}/part/{oid}/{n + 1}?signature=x" for n in range(ceil(size / PART))}
                upload = {"href": f"{git}/complete/{oid}", "header": {"chunk_size": str(PART), **parts}}
            answer["actions"] = {"upload": upload, "verify": {"href": f"{git}/verify"}}
        objects.append(answer)
    return JSONResponse({"transfer": "basic", "objects": objects}, media_type="application/vnd.git-lfs+json")


async def verify(exchange: Exchange, kind: str, repo: str) -> Response:
    exchange.writable(kind, repo)
    asked = await exchange.json()
    path = exchange.hub.state.blobs.path(asked["oid"])
    if not path.exists() or path.stat().st_size != asked["size"]:
        raise Refusal(404, "the object is not there, or has another size")
    return Response()


async def complete(exchange: Exchange, kind: str, repo: str, path: str) -> Response:
    """All parts of a large file are there. The client sends no token with this."""
    hub, asked = exchange.hub, await exchange.json()
    parts = [_part(hub, path, part["partNumber"]) for part in asked["parts"]]
    data = b"".join(part.read_bytes() for part in parts)
    for part, said in zip(parts, asked["parts"], strict=True):
        if said["etag"].strip('"') != hashlib.md5(part.read_bytes()).hexdigest():
            raise Refusal(400, "a part has another ETag")
    _keep(hub, path, data)
    for part in parts:
        part.unlink()
    return JSONResponse({"success": True})


def _part(hub: Hub, oid: str, number: int) -> Path:
    return hub.state.root / "parts" / f"{oid}.{number}"


def _keep(hub: Hub, oid: str, data: bytes) -> None:
    if hashlib.sha256(data).hexdigest() != oid:
        raise Refusal(400, "the content does not have the digest that was promised")
    write(hub.state.blobs.path(oid), data)


async def storage(hub: Hub, request: Request) -> Response:
    """The second port: what the Hub keeps elsewhere, reached by signed addresses and never by a token."""
    words = request.url.path.strip("/").split("/")
    if "authorization" in request.headers:
        raise Refusal(400, "Only one auth mechanism allowed")
    if request.method in ("GET", "HEAD") and words[0] == "lfs":
        path = hub.state.blobs.path(words[1])
        if not path.exists():
            raise Refusal(404, "no such object")
        return send_file(request, path, path.stat().st_size, {"ETag": f'"{words[1]}"'})
    if request.method == "PUT" and words[0] == "upload":
        _keep(hub, words[1], await request.body())
        return Response()
    if request.method == "PUT" and words[0] == "part":
        data = await request.body()
        write(_part(hub, words[1], int(words[2])), data)
        return Response(headers={"ETag": f'"{hashlib.md5(data).hexdigest()}"'})
    raise Refusal(404, "no such object")
