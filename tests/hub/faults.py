"""Faults on demand: rules that say which requests go wrong, and how.

A rule is a JSON object:

    method, path    what it is for: `GET`, or `*`; a regular expression that is searched in `<port><raw path>`, where the port is
                    `hub:` or `cdn:`, as in `^hub:.*/resolve/`
    skip, count     spare the first `skip` of these, then hit `count`; all if left out
    action          `status`      answer `status` (a number) with `headers` and `body`
                    `reset`       break the connection, RST
                    `close`       end the connection cleanly, too early
                    `hang`        say nothing more for `seconds` (600)
                    `garbage`     bytes that are no HTTP
                    `drip`        the status line and headers, one byte each `seconds`
                    `flip`        change one bit of the byte at `after`
                    `slow`        `rate` bytes a second
                    `redirect`    302 to `to`; `{url}` in it is the address that was asked for
                    `html`        200 and a page in HTML, as a captive portal answers
    after           bytes of the body that go through first (`reset`, `close`, `hang`, `flip`); left out: it happens
                    before the headers. 0: right after them
    effect          do what the request asks for, then let the fault hide the answer
"""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from starlette.responses import Response

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class _Transport(Protocol):
    def write(self, data: bytes) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def is_closing(self) -> bool: ...
    def get_extra_info(self, name: str) -> Any: ...


@dataclass
class Rule:
    """See the module's description."""

    action: str
    path: str = ""
    method: str = "*"
    skip: int = 0
    count: int | None = None
    status: int = 500
    headers: Mapping[str, str] = field(default_factory=dict)
    body: str = '{"error": "injected"}'
    after: int | None = None
    seconds: float = 600.0
    rate: float = 1000.0
    to: str = ""
    effect: bool = False
    hits: int = 0

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Rule:
        if unknown := document.keys() - {each.name for each in fields(cls)}:
            raise ValueError(f"unknown in a rule: {sorted(unknown)}")
        if document.get("action") not in ACTIONS:
            raise ValueError(f"unknown action {document.get('action')!r}; known are {sorted(ACTIONS)}")
        return cls(**document)

    def takes(self, method: str, where: str) -> bool:
        """Whether this request is one to hit. Counts it."""
        if self.method not in ("*", method) or not re.search(self.path, where):
            return False
        self.hits += 1
        return self.hits > self.skip and (self.count is None or self.hits <= self.skip + self.count)


class Faults:
    """The rules in force; the first that takes a request has it."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []

    def wrap(self, app: App, port: str) -> App:
        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            where = f"{port}:{scope['raw_path'].decode()}"
            # Admin calls are never hit. Every rule sees every request, so that counts do not depend on other rules.
            taken = [] if "/_hub/" in where else [rule for rule in self.rules if rule.takes(scope["method"], where)]
            if not taken:
                await app(scope, receive, send)
                return
            await _strike(taken[0], app, scope, receive, send)

        return wrapped


async def _discard(message: Message) -> None:
    pass


async def _strike(rule: Rule, app: App, scope: Scope, receive: Receive, send: Send) -> None:
    transport: _Transport = scope["transport"]
    if rule.action in ("flip", "slow") or rule.after is not None:
        await app(scope, receive, _Bent(rule, transport, send).send)
        return
    if rule.effect:
        await app(scope, receive, _discard)
    await ACTIONS[rule.action](rule, transport, scope, receive, send)


class _Bent:
    """Lets an answer through until the rule says otherwise."""

    def __init__(self, rule: Rule, transport: _Transport, send: Send) -> None:
        self._rule, self._transport, self._send = rule, transport, send
        self._sent = 0

    async def send(self, message: Message) -> None:
        if message["type"] != "http.response.body":
            await self._send(message)
            return
        rule, data = self._rule, bytes(message.get("body", b""))
        if rule.action == "slow":
            await self._slowly(data)
            data = b""
        elif rule.action == "flip":
            at = (rule.after or 0) - self._sent
            if 0 <= at < len(data):
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        elif self._sent + len(data) >= (rule.after or 0):
            if passed := data[: (rule.after or 0) - self._sent]:
                await self._send({"type": "http.response.body", "body": passed, "more_body": True})
            await _end(rule, self._transport)
            return
        self._sent += len(data)
        await self._send({**message, "body": data})

    async def _slowly(self, data: bytes) -> None:
        step = max(1, int(self._rule.rate / 10))
        for start in range(0, len(data), step):
            await asyncio.sleep(0.1)
            if self._transport.is_closing():
                return
            await self._send({"type": "http.response.body", "body": data[start : start + step], "more_body": True})


async def _end(rule: Rule, transport: _Transport) -> None:
    """What a connection comes to, in the middle or before anything was said."""
    if rule.action == "hang":
        for _ in range(int(rule.seconds * 10)):
            await asyncio.sleep(0.1)
            if transport.is_closing():
                break
    elif rule.action == "reset":
        await asyncio.sleep(0.05)  # let what was sent go out: a reset drops what is not
        raw = transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
        return
    transport.close()


async def _broken(rule: Rule, transport: _Transport, scope: Scope, receive: Receive, send: Send) -> None:
    await _end(rule, transport)


async def _status(rule: Rule, transport: _Transport, scope: Scope, receive: Receive, send: Send) -> None:
    if not rule.effect:  # what the client sends is read first, or it would see a reset
        while (message := await receive())["type"] == "http.request" and message.get("more_body"):
            pass
    headers = {"Content-Type": "application/json", **rule.headers}
    await Response(rule.body, status_code=rule.status, headers=headers)(scope, receive, send)


async def _redirect(rule: Rule, transport: _Transport, scope: Scope, receive: Receive, send: Send) -> None:
    host = dict(scope["headers"]).get(b"host", b"").decode()
    to = rule.to.replace("{url}", f"http://{host}{scope['raw_path'].decode()}")
    await Response(status_code=302, headers={"Location": to})(scope, receive, send)


async def _html(rule: Rule, transport: _Transport, scope: Scope, receive: Receive, send: Send) -> None:
    page = "<!doctype html><html><head><title>Sign in</title></head><body>Please sign in to use this network.</body></html>"
    await Response(page, media_type="text/html")(scope, receive, send)


async def _garbage(rule: Rule, transport: _Transport, scope: Scope, receive: Receive, send: Send) -> None:
    transport.write(b"\x15\x03\x01\x00\x02\x02\x16 this is no HTTP\r\n\r\n")
    transport.close()


async def _drip(rule: Rule, transport: _Transport, scope: Scope, receive: Receive, send: Send) -> None:
    for byte in b"HTTP/1.1 200 OK\r\nX-Filler: " + b"x" * 10_000:
        if transport.is_closing():
            return
        transport.write(bytes([byte]))
        await asyncio.sleep(rule.seconds)


ACTIONS: dict[str, Callable[[Rule, _Transport, Scope, Receive, Send], Awaitable[None]]] = {
    "status": _status,
    "reset": _broken,
    "close": _broken,
    "hang": _broken,
    "flip": _broken,
    "slow": _broken,
    "redirect": _redirect,
    "html": _html,
    "garbage": _garbage,
    "drip": _drip,
}
