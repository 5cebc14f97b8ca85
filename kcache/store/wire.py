"""HTTP/1.1 over a socket, for reading: one request, its answer, as it arrives, within limits of time.

Why not a library: restoring stands before every server's start. Importing http.client costs 24 ms and httpx 70 ms where this
costs 18, and neither can bound a whole answer, only each read (decisions/0007-http-client.md). What is left out is what reading
stored bytes does not need: request bodies, cookies, caches, compressed answers, HTTP/2.

Every wait is bounded three ways: connecting, silence between two reads (and before the end of the headers), one moment for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from kcache.errors import AccessDeniedError, StoreError, UnavailableError
from kcache.store.base import CHUNK
from kcache.store.dial import Patience, connected, secured
from kcache.store.proxies import find_proxy

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

HEADER_BYTES = 65_536
"""Of one answer's status line and headers together."""

RECEIVE = 1 << 18
"""Bytes asked of the socket at once."""

PORTS = {"http": 80, "https": 443}


class Address:
    """A URL in parts. `origin` is what a connection and a token belong to."""

    __slots__ = ("host", "port", "scheme", "target")

    def __init__(self, url: str) -> None:
        scheme, separator, rest = url.partition("://")
        authority, slash, path = rest.partition("/")
        authority, question, query = authority.partition("?")
        self.scheme = scheme.lower()
        self.target = ("/" + path if slash else "/?" + query if question else "/").partition("#")[0]
        host, port = authority.rpartition("@")[2], ""
        if host.startswith("["):
            host, _, port = host[1:].partition("]")
            port = port.removeprefix(":")
        elif ":" in host:
            host, _, port = host.partition(":")
        self.host = host.lower()
        if not separator or self.scheme not in PORTS or not host or not (port or "0").isdigit() or not _printable(url):
            raise StoreError(f"{url!r} is no address of a file on the web")
        self.port = int(port) if port else PORTS[self.scheme]

    @property
    def origin(self) -> tuple[str, str, int]:
        return self.scheme, self.host, self.port

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """Without what signs an address: for messages."""
        return f"{self.scheme}://{self.authority}{self.target.partition('?')[0]}"

    def join(self, location: str) -> Address:
        """Where a redirect leads."""
        if "://" in location.partition("?")[0]:
            return Address(location)
        base = f"{self.scheme}://{self.authority}"
        if location.startswith("//"):
            return Address(f"{self.scheme}:{location}")
        if location.startswith("/"):
            return Address(base + location)
        return Address(f"{base}{self.target.partition('?')[0].rpartition('/')[0]}/{location}")


def _printable(text: str) -> bool:
    return all("!" <= letter <= "~" for letter in text)


class Answer:
    """What came back. `headers` have small names; the last of several is kept. The body is read once, by `chunks`."""

    __slots__ = ("_connection", "_left", "address", "headers", "status")

    def __init__(self, address: Address, status: int, headers: dict[str, str], connection: Connection, method: str) -> None:
        self.address, self.status, self.headers = address, status, headers
        self._connection = connection
        self._left: int | None = None  # bytes that are still to come; None: until the connection ends
        if method == "HEAD" or status in (204, 304):
            self._left = 0
        elif "transfer-encoding" not in headers and (length := headers.get("content-length")) is not None:
            if not length.isdigit():
                raise UnavailableError(f"{address.url} was answered with a length that is no number")
            self._left = int(length)
        if self._left == 0:
            connection.done(self)

    def chunks(self) -> Iterator[bytes]:
        """The body, as it arrives.

        Raises:
            UnavailableError: it broke off, or nothing came for too long.
        """
        if self._left == 0:
            return
        connection, got = self._connection, 0
        try:
            for chunk in self._pieces():
                got += len(chunk)
                yield chunk
        except UnavailableError as error:
            raise UnavailableError(f"{self.address.url} broke off after {got} bytes", why=error.why or error.what) from error
        finally:
            connection.done(self) if self._left == 0 else connection.close()

    def _pieces(self) -> Iterator[bytes]:
        connection = self._connection
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            yield from self._chunked()
        elif self._left is None:
            while data := connection.receive(RECEIVE):
                yield data
        else:
            while self._left:
                data = connection.receive(min(RECEIVE, self._left))
                if not data:
                    raise UnavailableError("the connection ended early", why=f"{self._left} bytes are missing")
                self._left -= len(data)
                yield data

    def _chunked(self) -> Iterator[bytes]:
        connection = self._connection
        while True:
            try:
                size = int(connection.line().partition(b";")[0].strip(), 16)
            except ValueError as error:
                raise UnavailableError("the answer is garbled", why="a chunk has no length") from error
            left = size
            while left > 0:
                if not (data := connection.receive(min(RECEIVE, left))):
                    raise UnavailableError("the connection ended early", why="in the middle of a chunk")
                left -= len(data)
                yield data
            if size <= 0:
                break
            connection.line()
        while connection.line():
            pass  # trailers
        self._left = 0

    def read(self, limit: int = CHUNK) -> bytes:
        """The body, or its first `limit` bytes."""
        parts, size = [], 0
        for chunk in self.chunks():
            parts.append(chunk)
            size += len(chunk)
            if size >= limit:
                break
        return b"".join(parts)[:limit]

    def drop(self) -> None:
        """The rest is not wanted: a short one is read, so that the connection can be used again."""
        if self._left is not None and self._left < 4096:
            for _ in self.chunks():
                pass
        else:
            self._connection.close()


class Connection:
    """To one origin, perhaps through a proxy. Used for one request after another."""

    __slots__ = ("_buffer", "_sock", "_through", "_where", "idle", "keep", "patience")

    def __init__(self, address: Address, patience: Patience, environ: Mapping[str, str]) -> None:
        """
        Raises:
            UnavailableError: no name, no connection, in time. StoreError: TLS failed. AccessDeniedError: the proxy refuses.
        """
        self.patience = patience
        self._where = f"{address.scheme}://{address.authority}"
        self._buffer = b""
        self._through: dict[str, str] | None = None  # headers for a proxy that is spoken to in clear
        self.keep = self.idle = False
        proxy = find_proxy(environ, address.scheme, address.host, address.port)
        self._sock: Any = None
        try:
            if proxy is None:
                self._sock = connected(address.host, address.port, patience, self._where)
            else:
                self._use_proxy(proxy, address)
            if address.scheme == "https":
                self._sock = secured(self._sock, address.host, patience, self._where, environ)
        except BaseException:
            self.close()
            raise

    def _use_proxy(self, proxy: str, address: Address) -> None:
        userinfo = proxy.removeprefix("http://").rpartition("@")[0]
        at = Address(proxy)
        port = at.port if ":" in proxy.removeprefix("http://").rpartition("@")[2] else 80
        headers = {}
        if userinfo:
            from base64 import b64encode
            from urllib.parse import unquote

            headers["Proxy-Authorization"] = "Basic " + b64encode(unquote(userinfo).encode()).decode()
        self._sock = connected(at.host, port, self.patience, f"the proxy {at.authority}")
        if address.scheme == "http":
            self._through = headers
            return
        target = f"{address.host}:{address.port}"
        self._send("CONNECT", target, {"Host": target, **headers})
        status, _ = self._head()
        if status != 200:
            kind = AccessDeniedError if status in (401, 403, 407) else UnavailableError
            raise kind(
                f"the proxy {at.authority} does not let kcache through to {address.host}",
                why=f"it answered {status}",
                remedy="Check https_proxy, and what the proxy allows.",
            )

    def ask(self, method: str, address: Address, headers: Mapping[str, str]) -> Answer:
        """Sends a request and reads the answer's headers.

        Raises:
            UnavailableError: the connection broke, the answer is garbled, or it took too long.
        """
        self.idle = False
        target = address.target if self._through is None else f"http://{address.authority}{address.target}"
        self._send(method, target, {"Host": address.authority, **headers, **(self._through or {})})
        status, found = self._head()
        while status in (100, 102, 103):
            status, found = self._head()
        wishes = found.get("connection", "").lower()
        self.keep = "close" not in wishes
        return Answer(address, status, found, self, method)

    def _send(self, method: str, target: str, headers: Mapping[str, str]) -> None:
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
        limit = self.patience.left(self.patience.silence, self._where)
        try:
            self._sock.settimeout(limit)
            self._sock.sendall("\r\n".join(lines).encode("latin-1"))
        except OSError as error:
            self._fail(error, limit)

    def _head(self) -> tuple[int, dict[str, str]]:
        """Status and headers; all of them within `silence`, however they drip."""
        until = time.monotonic() + self.patience.silence
        first = self.line(until)
        words = first.split(b" ", 2)
        if not first.startswith(b"HTTP/1.") or len(words) < 2 or not words[1].isdigit():
            self.close()
            raise UnavailableError(f"{self._where} does not answer in HTTP", why=repr(first[:40])[1:])
        headers: dict[str, str] = {}
        if first.startswith(b"HTTP/1.0"):
            headers["connection"] = "close"
        size = len(first)
        while line := self.line(until):
            size += len(line)
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
            if size > HEADER_BYTES:
                self.close()
                raise UnavailableError(f"{self._where} answers with more headers than any Hub does")
        return int(words[1]), headers

    def line(self, until: float = float("inf")) -> bytes:
        """A line without its end."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > HEADER_BYTES:
                raise UnavailableError(f"{self._where} answers with a line that does not end")
            if not (data := self._receive(RECEIVE, until)):
                raise UnavailableError(f"{self._where} ended the connection without an answer")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.rstrip(b"\r")

    def receive(self, size: int) -> bytes:
        """At most `size` bytes; none when the connection has ended."""
        if self._buffer:
            data, self._buffer = self._buffer[:size], self._buffer[size:]
            return data
        return self._receive(size, float("inf"))

    def _receive(self, size: int, until: float) -> bytes:
        limit = min(self.patience.silence, max(0.001, until - time.monotonic()))
        limit = self.patience.left(limit, self._where)
        try:
            self._sock.settimeout(limit)
            data: bytes = self._sock.recv(size)
        except OSError as error:
            if isinstance(error, TimeoutError) and limit < self.patience.silence / 2:
                self._too_slow(until)
            self._fail(error, limit)
        if until <= time.monotonic():
            self._too_slow(until)
        return data

    def _too_slow(self, until: float) -> NoReturn:
        """Something came now and then, but not enough of it in time."""
        self.close()
        if until <= time.monotonic() < self.patience.until:
            raise UnavailableError(f"{self._where} does not end its headers") from TimeoutError()
        raise UnavailableError(f"{self._where} took longer than the time that was allowed", remedy="Raise --deadline.")

    def _fail(self, error: OSError, waited: float) -> NoReturn:
        self.close()
        if isinstance(error, TimeoutError):
            raise UnavailableError(f"{self._where} does not answer", why=f"nothing came for {waited:.1f} s") from error
        raise UnavailableError(f"the connection to {self._where} broke", why=error.strerror or str(error)) from error

    def done(self, answer: Answer) -> None:
        """An answer was read to its end: the connection may serve another request."""
        self.idle = self.keep and not self._buffer
        if not self.idle:
            self.close()

    def close(self) -> None:
        self.keep = self.idle = False
        if self._sock is not None:
            try:
                self._sock.close()
            except OSError:
                pass
