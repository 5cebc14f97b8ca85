"""One request as the endpoints see it, and the shapes of their answers."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from .access import Access, Refusal, User
from .limits import Limit
from .state import Repository, State

CHUNK = 1 << 16


@dataclass
class Hub:
    """What all endpoints share. `base` and `cdn` are the addresses of the two ports, without a slash at the end.

    multipart:     LFS files of more bytes than this are uploaded in parts.
    page:          entries of a listing in one answer, at most.
    resolve_cache: serve regular files as the Hub does, by a redirect to another path of the same origin.
    xet:           new files of the kind LFS go through xet, where a client asks.
    """

    state: State
    access: Access
    base: str = ""
    cdn: str = ""
    multipart: int = 20_000_000
    page: int = 1000
    resolve_cache: bool = False
    xet: bool = False
    limits: dict[str, Limit] = field(default_factory=dict)
    log: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Exchange:
    """A request on its way through the endpoints."""

    hub: Hub
    request: Request
    user: User | None

    @property
    def query(self) -> Mapping[str, str]:
        return self.request.query_params

    async def json(self) -> Any:
        try:
            return json.loads(await self.request.body())
        except ValueError as error:
            raise Refusal(400, f"not JSON: {error}") from error

    def readable(self, kind: str, name: str, *, content: bool = False) -> Repository:
        return Access.may_read(self.hub.state.find(kind, name), self.user, content=content)

    def writable(self, kind: str, name: str) -> tuple[Repository, User]:
        return Access.may_write(self.hub.state.find(kind, name), self.user)

    def page(self, items: list[Any], size: int) -> Response:
        """One page of a listing, and where the next one is."""
        start = int(self.query.get("cursor", "0"))
        headers = {}
        if start + size < len(items):
            query = "&".join(
                f"{quote(key)}={quote(value)}" for key, value in self.request.query_params.multi_items() if key != "cursor"
            )
            path = self.request.scope["raw_path"].decode()
            headers["Link"] = f'<{self.hub.base}{path}?{query}{"&" if query else ""}cursor={start + size}>; rel="next"'
        return JSONResponse(items[start : start + size], headers=headers)


def commit_of(repository: Repository, revision: str) -> str:
    """The commit that a revision names.

    Raises:
        Refusal
    """
    found = repository.resolve(revision)
    if found is None:
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return found


_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def send_file(request: Request, path: Path, size: int, headers: Mapping[str, str]) -> Response:
    """A file, or the range of it that is asked for."""
    asked = _RANGE.fullmatch(request.headers.get("range", ""))
    start, end, status = 0, size, 200
    given = {**headers, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    if asked and (asked[1] or asked[2]):
        if asked[1]:
            start, end = int(asked[1]), min(size, int(asked[2]) + 1) if asked[2] else size
        else:
            start = max(0, size - int(asked[2]))
        if start >= size or end <= start:
            return Response(status_code=416, headers={**given, "Content-Range": f"bytes */{size}"})
        status = 206
        given["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
    given["Content-Length"] = str(end - start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=given)

    async def body() -> AsyncIterator[bytes]:
        with path.open("rb") as stream:
            stream.seek(start)
            left = end - start
            while left and (data := stream.read(min(CHUNK, left))):
                left -= len(data)
                yield data

    return StreamingResponse(body(), status_code=status, headers=given)
