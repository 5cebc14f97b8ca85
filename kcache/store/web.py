"""Reading files over HTTP: redirects, retries within limits of time, and streams that go on where they broke off.

Knows nothing of what a server's answers mean: `Site` does, one for the Hub and one for a plain mirror.

- A token goes to its own origin only; a redirect elsewhere drops it.
- What may be repeated is repeated with growing, jittered pauses, for as long as `stall` seconds without a byte, and never past
  the moment at which everything ends. A server that says how long to wait is waited for if there is that much time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping

from kcache.errors import StoreError, UnavailableError
from kcache.store.base import CHUNK
from kcache.store.dial import Patience
from kcache.store.wire import Address, Answer, Connection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Protocol
else:
    Protocol = object

REDIRECTS = 5
ATTEMPTS = 5
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 4.0
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Answers after which the same request may succeed."""


class Site(Protocol):
    """What a server's answers mean."""

    def headers(self) -> Mapping[str, str]:
        """For every request to its own origin, a token among them."""
        ...

    def check(self, answer: Answer, what: str) -> None:
        """Looks at the first answer to a request, a redirect or a file.

        Raises:
            StoreError: it is no such thing.
        """
        ...


class BusyError(UnavailableError):
    """The server wants to be asked again, not before `seconds` have passed if that is not None."""

    def __init__(self, what: str, *, why: str, seconds: float | None, remedy: str = "") -> None:
        super().__init__(what, why=why, remedy=remedy)
        self.seconds = seconds


class Web:
    """Reads from one site. Connections are kept and used again; not for several threads."""

    def __init__(self, site: Site, *, patience: Patience, stall: float, environ: Mapping[str, str]) -> None:
        """
        Args:
            stall: seconds that may pass without a byte, retries and pauses included.
        """
        self._site, self.patience, self._stall, self._environ = site, patience, stall, environ
        self._idle: dict[tuple[str, str, int], Connection] = {}
        self.requests = 0

    def get(self, url: str, what: str, *, method: str = "GET", leave: bool = True) -> Answer:
        """The answer to a request, after redirects.

        Args:
            what: is named in messages.
            leave: whether to follow one that leads to another origin; that redirect is the answer otherwise.

        Raises:
            StoreError: as the site says. UnavailableError: nothing came in time, after retries.
        """
        return self._repeated(_Retries(self), url, what, method, {}, leave=leave)

    def read(self, url: str, what: str, offset: int) -> Iterator[bytes]:
        """A file's bytes from `offset` on.

        Raises:
            StoreError: at the call, or while iterating.
        """
        retries = _Retries(self)
        answer = self._repeated(retries, url, what, "GET", _from(offset))
        return self._resumed(retries, answer, url, what, offset)

    def _resumed(self, retries: _Retries, answer: Answer, url: str, what: str, offset: int) -> Iterator[bytes]:
        tag = _tag(answer)
        while True:
            try:
                for chunk in _positioned(answer, what, offset):
                    offset += len(chunk)
                    retries.moved()
                    yield from (chunk,) if len(chunk) <= CHUNK else (chunk[n : n + CHUNK] for n in range(0, len(chunk), CHUNK))
                return
            except UnavailableError as error:
                retries.after(error)
            answer = self._repeated(retries, url, what, "GET", _from(offset))
            if _tag(answer) != tag:
                raise StoreError(f"{what} was changed while it was read", remedy="Restore again.")

    def _repeated(
        self, retries: _Retries, url: str, what: str, method: str, headers: Mapping[str, str], *, leave: bool = True
    ) -> Answer:
        while True:
            try:
                return self._once(url, what, method, headers, leave=leave)
            except UnavailableError as error:
                retries.after(error)

    def _once(self, url: str, what: str, method: str, headers: Mapping[str, str], *, leave: bool) -> Answer:
        at = start = Address(url)
        common = {"Accept-Encoding": "identity", "Connection": "keep-alive", **headers}
        for hop in range(REDIRECTS + 1):
            own = at.origin == start.origin
            answer = self._ask(method, at, {**common, **(self._site.headers() if own else {})})
            if answer.status in BUSY:
                answer.drop()
                raise _busy(answer, what)
            if own or hop == 0:
                self._site.check(answer, what)
            if answer.status not in (301, 302, 303, 307, 308):
                if not own:
                    _check_storage(answer, what)
                return answer
            target = at.join(answer.headers.get("location", ""))
            if at.scheme == "https" and target.scheme == "http":
                raise StoreError(f"{what} is redirected from https to http", why=f"to {target.url}", remedy="Check the address.")
            if not leave and target.origin != start.origin:
                return answer
            answer.drop()
            at = target
        raise StoreError(f"{what} is redirected more than {REDIRECTS} times", why=f"at last to {at.url}")

    def _ask(self, method: str, at: Address, headers: Mapping[str, str]) -> Answer:
        self.requests += 1
        kept = self._idle.pop(at.origin, None)
        if kept is not None and kept.idle:
            try:
                answer = kept.ask(method, at, headers)
                self._idle[at.origin] = kept
                return answer
            except UnavailableError as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise  # otherwise it was closed meanwhile, most likely: a new one, at once
        connection = Connection(at, self.patience, self._environ)
        self._idle[at.origin] = connection
        return connection.ask(method, at, headers)


class _Retries:
    """Decides whether to try again, and waits."""

    def __init__(self, web: Web) -> None:
        self._web = web
        self.moved()

    def moved(self) -> None:
        """Something came: all the time and all the attempts begin again."""
        self._until = time.monotonic() + self._web._stall
        self._attempt = 0
        self._silences = 0

    def after(self, error: UnavailableError) -> None:
        """Sleeps, or gives up by raising what failed."""
        self._attempt += 1
        self._silences += isinstance(error.__cause__, TimeoutError)
        pause = min(FIRST_PAUSE * 2 ** (self._attempt - 1), LONGEST_PAUSE) * (0.5 + os.urandom(1)[0] / 255)
        left = min(self._until, self._web.patience.until) - time.monotonic()
        if isinstance(error, BusyError) and error.seconds is not None:
            if error.seconds > left:
                why = f"{error.why}; there is time for {max(0.0, left):.0f} s"
                raise BusyError(error.what, why=why, seconds=error.seconds, remedy="Restore again later.") from error
            pause += error.seconds
        if self._attempt >= ATTEMPTS or self._silences > 1 or pause > left:
            raise error
        time.sleep(pause)


def _from(offset: int) -> dict[str, str]:
    return {"Range": f"bytes={offset}-"} if offset else {}


def _tag(answer: Answer) -> str:
    return answer.headers.get("etag", "").removeprefix("W/")


def _positioned(answer: Answer, what: str, offset: int) -> Iterator[bytes]:
    """The body from `offset` on, whatever range the server chose to send."""
    if answer.status == 416:
        answer.drop()
        return
    start = 0
    if answer.status == 206:
        found = answer.headers.get("content-range", "").removeprefix("bytes ").partition("-")[0]
        if not found.isdigit() or int(found) > offset:
            raise StoreError(f"{what} was answered with another part than was asked for")
        start = int(found)
    elif answer.status != 200:
        raise StoreError(f"{what} was answered with status {answer.status}")
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise StoreError(f"{what} was answered in an encoding that was not asked for", remedy="Check what stands in between.")
    for chunk in answer.chunks():
        if start + len(chunk) > offset:
            yield chunk[max(0, offset - start) :]
        start += len(chunk)


def _check_storage(answer: Answer, what: str) -> None:
    """The answer of another origin that a redirect led to."""
    if answer.status in (200, 206, 416):
        return
    answer.drop()
    raise StoreError(
        f"{what} cannot be had from {answer.address.authority}",
        why=f"it answered {answer.status}",
        remedy="Check that this host may reach it.",
    )


def wait_asked(status: int, headers: Mapping[str, str]) -> float | None:
    """The seconds that a busy server asks to wait, if it says so. `headers` have small names.

    `Retry-After` as seconds, or what the Hub sends instead (the IETF's draft, huggingface_hub 2.4.0, utils/_http.py,
    parse_ratelimit_headers): `RateLimit: "api";r=0;t=55`.
    """
    after = headers.get("retry-after", "").strip()
    if after.isdigit():
        return float(after)
    limits = dict(part.strip().partition("=")[::2] for part in headers.get("ratelimit", "").split(";"))
    return float(limits["t"]) if status == 429 and limits.get("r") == "0" and limits.get("t", "").isdigit() else None


def _busy(answer: Answer, what: str) -> BusyError:
    """429 and its kind."""
    seconds = wait_asked(answer.status, answer.headers)
    said = answer.headers.get("x-error-message", "")
    why = f"{answer.address.authority} answers {answer.status}"
    why += f" ({said})" if said and said.isprintable() else ""
    why += f" and asks to wait {seconds:g} s" if seconds is not None else ""
    return BusyError(f"{what} cannot be read now", why=why, seconds=seconds)
