"""A directory behind a web server as a store, for reading: `https://host/path`. Any static file server does.

It cannot be listed and not be written to: publish into a directory and copy that. `http://` is for loopback, where nobody else
listens; elsewhere whoever stands in between would choose the code that servers run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kcache.errors import AccessDeniedError, NotFoundError, StoreError
from kcache.store.base import StoredObject, check_name, collect
from kcache.store.dial import Patience
from kcache.store.web import Web
from kcache.store.wire import Address, Answer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

AGENT = "kcache"


class MirrorStore:
    """The store below `url`. Implements `kcache.store.base.Store`, as far as reading goes."""

    def __init__(
        self, url: str, *, patience: Patience | None = None, stall: float = 30.0, environ: Mapping[str, str] | None = None
    ) -> None:
        """
        Args:
            patience, stall: see `kcache.store.web.Web`.

        Raises:
            StoreError: no address.
        """
        self._url = url.rstrip("/")
        Address(self._url)
        self._web = Web(self, patience=patience or Patience(), stall=stall, environ=os.environ if environ is None else environ)

    def describe(self) -> str:
        return self._url

    @property
    def http_requests(self) -> int:
        """How many were sent, redirects and repetitions among them."""
        return self._web.requests

    def headers(self) -> Mapping[str, str]:
        return {"User-Agent": AGENT}

    def check(self, answer: Answer, what: str) -> None:
        status = answer.status
        if status in (404, 410):
            answer.drop()
            raise NotFoundError(f"there is no {what}")
        if status in (401, 403):
            raise AccessDeniedError(f"no access to {what}", why=f"the server answered {status}")
        if status < 400 or status == 416:
            refuse_page(answer, what)
            return
        raise StoreError(f"{what} cannot be read", why=f"the server answered {status}")

    def _what(self, name: str) -> str:
        return f"{name} of {self._url}"

    def _address(self, name: str) -> str:
        check_name(name)
        return f"{self._url}/{name.replace('+', '%2B')}"

    def stat(self, name: str) -> StoredObject | None:
        try:
            answer = self._web.get(self._address(name), self._what(name), method="HEAD")
        except NotFoundError:
            return None
        return StoredObject(size=content_length(answer, self._what(name)))

    def read(self, name: str, *, offset: int = 0) -> Iterator[bytes]:
        return self._web.read(self._address(name), self._what(name), offset)

    def read_bytes(self, name: str, limit: int) -> bytes:
        return collect(self.read(name), name, limit)

    def list(self, prefix: str, *, depth: int | None = None) -> Iterator[str]:
        raise StoreError(f"{self._url} cannot be listed", why="a web server does not say what it has")

    def _refuse(self, name: str) -> NoReturn:
        check_name(name)
        raise AccessDeniedError(
            f"{self._url} can only be read",
            why=f"{name} was to be changed",
            remedy="Publish into a directory, and copy it there.",
        )

    def write(self, name: str, source: Path | bytes, *, if_absent: bool) -> bool:
        self._refuse(name)

    def write_many(self, items: Sequence[tuple[str, Path | bytes]], *, if_absent: bool) -> Sequence[bool]:
        return [self.write(name, source, if_absent=if_absent) for name, source in items]

    def replace(self, name: str, data: bytes, expected: bytes | None) -> None:
        self._refuse(name)

    def delete(self, *names: str) -> bool:
        self._refuse(names[0])


def content_length(answer: Answer, what: str) -> int:
    """The size that a HEAD's answer says.

    Raises:
        StoreError: it says none.
    """
    length = answer.headers.get("content-length", "")
    if not length.isdigit():
        raise StoreError(f"{what} was answered without its size")
    return int(length)


def refuse_page(answer: Answer, what: str) -> None:
    """A web page is no stored object: a captive portal, a sign-in page, an application that answers everything.

    Raises:
        StoreError
    """
    if answer.status < 300 and answer.headers.get("content-type", "").lower().startswith("text/html"):
        raise StoreError(
            f"{what} was answered with a web page",
            why=f"something at {answer.address.authority} answers in its place",
            remedy="Check whether this network asks for a sign-in.",
        )
