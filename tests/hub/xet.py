"""Xet: tokens, and what lies in a local content-addressed store that hf_xet itself writes."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

from .access import Refusal
from .exchange import Exchange, Hub


async def token(exchange: Exchange, kind: str, repo: str, access: str, rev: str) -> Response:
    if not exchange.hub.xet:
        raise Refusal(404, "this local Hub runs without xet")
    return JSONResponse({})


def find(hub: Hub, sha256: str) -> str | None:
    return None


def hash_of(hub: Hub, sha256: str) -> str:
    return ""


def link(hub: Hub, kind: str, repo: str, oid: str, xet_hash: str) -> dict[str, str]:
    return {}
