"""A model repository on the Hub as a store: `hf://owner/repo[@revision][/directory]`.

Reading uses the resolver only, never the API, so a restore costs as many requests as it reads objects, out of the larger of the
Hub's two allowances. What is opened for reading settles on one commit with the first answer and reads everything from it. Listing
uses the API and is for publishers and for explanations. Writing goes through huggingface_hub (`kcache.store.hf_upload`).

Nothing is cached here, and nothing is verified: digests are for whoever reads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from pathlib import Path

from kcache.errors import NotFoundError, StoreError
from kcache.store.base import StoredObject, check_name, collect
from kcache.store.dial import Patience
from kcache.store.hub import COMMIT, ApiAnswers, FileAnswers, HubSettings, Place
from kcache.store.mirror import content_length
from kcache.store.web import Web
from kcache.store.wire import Answer

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from kcache.store.hf_upload import Uploader

AGENT = "kcache; huggingface-resolver"
PAGES = 100_000
LIST_PAGE_BYTES = 64 << 20


class HfStore:
    """Implements `kcache.store.base.Store`."""

    def __init__(
        self,
        url: str,
        *,
        settle: bool = True,
        create: bool = False,
        private: bool = False,
        patience: Patience | None = None,
        stall: float = 30.0,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            settle: read everything from the commit of the first answer. Not for who writes.
            create, private: make the repository, for its members only, with the first write.
            patience, stall: see `kcache.store.web.Web`.

        Raises:
            UsageError: `url` is not of this form. StoreError: HF_ENDPOINT is no address.
        """
        self.place = Place(url)
        self.settings = HubSettings(os.environ if environ is None else environ)
        self._settle, self._create, self._private = settle, create, private
        self._patience, self._stall = patience or Patience(), stall
        self._answers = FileAnswers(self.place, self.settings, AGENT, to_be_made=create, writing=not settle)
        self._files = Web(self._answers, patience=self._patience, stall=stall, environ=self.settings.environ)
        self._made: Uploader | None = None

    def describe(self) -> str:
        return self.place.given

    @property
    def commit(self) -> str | None:
        """The commit that is read: the one asked for, or the one of the first answer."""
        return self.place.revision if COMMIT.fullmatch(self.place.revision) else self._answers.commit

    @property
    def http_requests(self) -> int:
        """How many were sent for reading, redirects and repetitions among them."""
        return self._files.requests

    def _what(self, name: str) -> str:
        return f"{name} in {self.place.given}"

    def _address(self, path: str) -> str:
        revision = (self.commit if self._settle else None) or self.place.revision
        return f"{self.settings.endpoint}/{self.place.repo}/resolve/{_segment(revision)}/{_quoted(path)}"

    def _online(self, what: str) -> None:
        if self.settings.offline:
            raise StoreError(
                f"{what} is not asked for",
                why="HF_HUB_OFFLINE is set",
                remedy="Download it with `hf download` beforehand, or restore from a directory.",
            )

    def stat(self, name: str) -> StoredObject | None:
        address = self._address(self.place.path(name))
        self._online(self._what(name))
        try:
            answer = self._files.get(address, self._what(name), method="HEAD", leave=False)
        except NotFoundError:
            return None
        linked = answer.headers.get("x-linked-size", "")
        return StoredObject(size=int(linked) if linked.isdigit() else content_length(answer, self._what(name)))

    def read(self, name: str, *, offset: int = 0) -> Iterator[bytes]:
        address = self._address(self.place.path(name))
        self._online(self._what(name))
        return self._files.read(address, self._what(name), offset)

    def read_bytes(self, name: str, limit: int) -> bytes:
        return collect(self.read(name), name, limit)

    def list(self, prefix: str, *, depth: int | None = None) -> Iterator[str]:
        prefix = prefix.rstrip("/")
        if prefix:
            check_name(prefix)
        self._online(self.place.given)
        found = self._listed(prefix) if depth is None else self._near(prefix, depth)
        return iter(sorted(found, key=lambda name: name.split("/")))

    def _near(self, prefix: str, depth: int) -> Iterator[str]:
        """Directory by directory, down to a depth: a request each, however many objects lie deeper."""
        directories: MutableSequence[str] = []
        yield from self._listed(prefix, directories)
        for directory in directories if depth > 1 else ():
            yield from self._near(directory, depth - 1)

    def _listed(self, prefix: str, directories: MutableSequence[str] | None = None) -> Iterator[str]:
        """All objects below a directory; where `directories` is given, only those in it, and its directories are added there."""
        directory = "/".join(part for part in (self.place.prefix, prefix) if part)
        revision = (self.commit if self._settle else None) or self.place.revision
        address = f"{self.settings.endpoint}/api/models/{self.place.repo}/tree/{_segment(revision)}"
        address += f"/{_segment(directory)}" if directory else ""
        address += f"?recursive={'true' if directories is None else 'false'}&expand=false"
        answers = ApiAnswers(self.place, self.settings, AGENT, to_be_made=self._create, writing=not self._settle)
        web = Web(answers, patience=self._patience, stall=self._stall, environ=self.settings.environ)
        what = f"the list of {self.place.given}"
        for _ in range(PAGES):
            try:
                answer = web.get(address, what)
            except NotFoundError:
                return  # there is no such directory
            for item in _items(answer, what):
                name = self.place.name(item["path"])
                if not _is_object(name):
                    continue
                if item["type"] == "file":
                    yield name
                elif directories is not None and item["type"] == "directory":
                    directories.append(name)
            following = answer.headers.get("link", "")
            if 'rel="next"' not in following:
                return
            address = following.partition("<")[2].partition(">")[0]

    def _upload(self) -> Uploader:
        from kcache.store.hf_upload import Uploader

        if self._made is None:
            self._online(self.place.given)
            self._made = Uploader(self.place, self.settings, create=self._create, private=self._private)
        return self._made

    def write(self, name: str, source: Path | bytes, *, if_absent: bool) -> bool:
        return self.write_many([(name, source)], if_absent=if_absent)[0]

    def write_many(self, items: Sequence[tuple[str, Path | bytes]], *, if_absent: bool) -> Sequence[bool]:
        return self._upload().write_many([(self.place.path(name), source) for name, source in items], if_absent=if_absent)

    def replace(self, name: str, data: bytes, expected: bytes | None) -> None:
        path = self.place.path(name)
        self._upload().replace(path, data, expected, self._current)

    def _current(self, path: str, commit: str) -> bytes | None:
        """What a path holds in a commit, None if it is not there."""
        address = f"{self.settings.endpoint}/{self.place.repo}/resolve/{commit}/{_quoted(path)}"
        try:
            return b"".join(self._files.read(address, f"{path} in {self.place.given}", 0))
        except NotFoundError:
            return None

    def delete(self, *names: str) -> bool:
        return self._upload().delete([self.place.path(name) for name in names])


def _quoted(text: str) -> str:
    """A path in an address. Of the letters that names, directories and revisions may have, this one alone needs it."""
    return text.replace("+", "%2B")


def _segment(text: str) -> str:
    """The same as one segment."""
    return _quoted(text).replace("/", "%2F")


def _is_object(name: str) -> bool:
    """Whether a listed path can be an object's: repositories hold .gitattributes, and whatever people put there."""
    try:
        check_name(name)
    except StoreError:
        return False
    return True


def _items(answer: Answer, what: str) -> list[dict[str, Any]]:
    try:
        items = json.loads(answer.read(LIST_PAGE_BYTES))
        return [{"path": str(item["path"]), "type": str(item["type"])} for item in items]
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{what} was not answered as a Hub does", why=str(error), remedy="Check HF_ENDPOINT.") from error
