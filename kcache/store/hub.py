"""What a store on the Hub is: its address, the user's settings, and what the Hub's answers mean. No I/O but a token file.

Settings are those of huggingface_hub 2.4.0 (constants.py, utils/_auth.py): HF_ENDPOINT, HF_TOKEN, HF_TOKEN_PATH, HF_HOME,
XDG_CACHE_HOME, HF_HUB_OFFLINE, HF_HUB_DISABLE_IMPLICIT_TOKEN. They are read here, as importing that library
costs 300 ms.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from kcache.errors import AccessDeniedError, NotFoundError, StoreError, UsageError
from kcache.store.base import check_name
from kcache.store.mirror import refuse_page
from kcache.store.wire import Address, Answer

DEFAULT_ENDPOINT = "https://huggingface.co"
"""What HF_ENDPOINT stands for where it is not set: huggingface_hub's own `constants._HF_DEFAULT_ENDPOINT`."""

FORM = "hf://owner/repo[@revision][/directory]"
COMMIT = re.compile(r"[0-9a-f]{40}")
_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?")
_REVISION = re.compile(r"[A-Za-z0-9_.+][A-Za-z0-9_.+/-]{0,254}")
_OTHER_KINDS = ("datasets", "spaces", "buckets", "kernels")
_TRUE = ("1", "ON", "YES", "TRUE")


class Place:
    """A directory of a model repository at a revision. `revision` is "main" if none was given."""

    __slots__ = ("given", "prefix", "repo", "revision")

    def __init__(self, url: str) -> None:
        """
        Raises:
            UsageError: not of the form `hf://owner/repo[@revision][/directory]`.
        """
        parts = url.removeprefix("hf://").rstrip("/").split("/")
        if parts[0] == "models" and len(parts) > 2:
            parts = parts[1:]
        if parts[0] in _OTHER_KINDS:
            raise UsageError(f"{url} is no model repository", remedy=f"Write {FORM}.")
        owner, repo = parts[0], parts[1] if len(parts) > 1 else ""
        repo, at, revision = repo.partition("@")
        revision = revision.replace("%2F", "/").replace("%2f", "/")
        if not (_PART.fullmatch(owner) and _PART.fullmatch(repo)) or ".." in repo or "--" in repo:
            raise UsageError(f"{url} does not name a repository", remedy=f"Write {FORM}.")
        if at and (not _REVISION.fullmatch(revision) or ".." in revision):
            raise UsageError(f"{url} does not name a revision", remedy=f"Write {FORM}, slashes in a revision as %2F.")
        self.given = url
        self.repo = f"{owner}/{repo}"
        self.revision = revision or "main"
        self.prefix = "/".join(parts[2:])
        if self.prefix:
            try:
                check_name(self.prefix)
            except StoreError as error:
                raise UsageError(f"{url} does not name a directory", remedy=f"Write {FORM}.") from error

    def path(self, name: str) -> str:
        """An object's path in the repository."""
        check_name(name)
        return f"{self.prefix}/{name}" if self.prefix else name

    def name(self, path: str) -> str:
        """The object at a path that lies below the directory."""
        return path[len(self.prefix) + 1 :] if self.prefix else path


class HubSettings:
    """Where the Hub is and who asks. `offline`: nothing may be asked."""

    __slots__ = ("endpoint", "environ", "offline", "token")

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.endpoint = (environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        self.offline = (environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or "").upper() in _TRUE
        self.token = _token(environ)
        Address(self.endpoint)

    @property
    def host(self) -> str:
        return Address(self.endpoint).authority


def _token(environ: Mapping[str, str]) -> str | None:
    if environ.get("HF_HUB_DISABLE_IMPLICIT_TOKEN", "").upper() in _TRUE:
        return None
    found = _clean(environ.get("HF_TOKEN", "")) or _clean(environ.get("HUGGING_FACE_HUB_TOKEN", ""))
    if found:
        return found
    path = _at_home(environ, environ.get("HF_TOKEN_PATH") or f"{_hub_home(environ)}/token")
    try:
        with open(path, encoding="utf-8") as stream:
            return _clean(stream.read(10_000)) or None
    except (OSError, ValueError):
        return None


def _hub_home(environ: Mapping[str, str]) -> str:
    cache = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME', '')}/.cache"
    return environ.get("HF_HOME") or f"{cache}/huggingface"


def _at_home(environ: Mapping[str, str], path: str) -> str:
    return environ.get("HOME", "") + path[1:] if path.startswith("~") else path


def downloaded(place: Place, environ: Mapping[str, str]) -> str | None:
    """Where huggingface_hub keeps what it downloaded of a repository at this revision, if it did (2.4.0, file_download.py)."""
    cache = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE") or f"{_hub_home(environ)}/hub"
    kept = os.path.abspath(f"{_at_home(environ, cache)}/models--{place.repo.replace('/', '--')}")  # noqa: PTH100
    commit = place.revision
    if not COMMIT.fullmatch(commit):
        try:
            with open(f"{kept}/refs/{place.revision}", encoding="ascii") as stream:
                commit = stream.read(100).strip()
        except (OSError, ValueError):
            return None
    snapshot = f"{kept}/snapshots/{commit}"
    return f"{snapshot}/{place.prefix}".rstrip("/") if COMMIT.fullmatch(commit) and os.path.isdir(snapshot) else None  # noqa: PTH112


def _clean(text: str) -> str:
    """A token, as huggingface_hub cleans it. What cannot stand in a header is none."""
    text = text.replace("\r", "").replace("\n", "").strip()
    return text if text.isascii() and text.isprintable() else ""


class FileAnswers:
    """Answers of the resolver, `{endpoint}/{repo}/resolve/{revision}/{path}`. `commit` is the one that the last answer was of."""

    def __init__(
        self, place: Place, settings: HubSettings, agent: str, *, to_be_made: bool = False, writing: bool = False
    ) -> None:
        """
        Args:
            to_be_made: a repository or revision that is not there has no objects yet.
            writing: whoever asks is going to write.
        """
        self._place, self._settings, self._to_be_made, self._writing = place, settings, to_be_made, writing
        self._headers = {"User-Agent": agent}
        if settings.token:
            self._headers["Authorization"] = f"Bearer {settings.token}"
        self.commit: str | None = None

    def headers(self) -> Mapping[str, str]:
        return self._headers

    def check(self, answer: Answer, what: str) -> None:
        commit = answer.headers.get("x-repo-commit", "")
        if COMMIT.fullmatch(commit):
            self.commit = commit
        if answer.status >= 400 and answer.status != 416:
            self.refuse(answer, what)
        elif not commit:
            # Every Hub says which commit it answers of; huggingface_hub refuses an answer without (file_download.py).
            refuse_page(answer, what)
            raise StoreError(
                f"{what} was not answered by a Hub",
                why=f"{answer.address.authority} does not say of which commit",
                remedy="Check HF_ENDPOINT, and whether this network asks for a sign-in.",
            )

    def refuse(self, answer: Answer, what: str) -> None:
        """Raises what an answer of 400 and above means (huggingface_hub 2.4.0, utils/_http.py, hf_raise_for_status)."""
        code, said = answer.headers.get("x-error-code", ""), answer.headers.get("x-error-message", "")
        status, repo = answer.status, self._place.repo
        answer.drop()
        missing = code in ("RevisionNotFound", "RepoNotFound")
        if (
            code == "EntryNotFound"
            or (missing and self._to_be_made)
            or (status == 404 and not code and "x-repo-commit" in answer.headers)
        ):
            raise NotFoundError(f"there is no {what}")
        if code == "RevisionNotFound":
            raise StoreError(f"{repo} on {self._settings.host} has no revision {self._place.revision}", remedy="Check the name.")
        if code == "GatedRepo":
            raise AccessDeniedError(
                f"{repo} on {self._settings.host} is gated",
                why="this token was not granted access" if self._settings.token else "there is no token",
                remedy=f"Ask for access at {self._settings.endpoint}/{repo}, and set HF_TOKEN.",
            )
        if said == "Invalid credentials in Authorization header":
            raise AccessDeniedError(
                f"{self._settings.host} does not know the token", remedy="Set HF_TOKEN to a valid one, or remove it."
            )
        if code == "RepoNotFound" or status == 401:
            raise self._hidden()
        why = f"it answered {status}" + (f": {said}" if said and said.isprintable() else "")
        kind = AccessDeniedError if status == 403 else StoreError
        raise kind(f"{self._settings.host} does not give {what}", why=why, remedy="Check the address and the token.")

    def _hidden(self) -> StoreError:
        """Missing or private: the Hub does not say which."""
        what = f"there is no repository {self._place.repo} on {self._settings.host}, or it is private"
        if not self._settings.token:
            return AccessDeniedError(what, why="there is no token", remedy="Check the name, or set HF_TOKEN.")
        remedy = "Publish with --create to make it; otherwise check" if self._writing else "Check"
        return StoreError(what, why="the token given may not see it", remedy=f"{remedy} the name, and whose token it is.")


class ApiAnswers(FileAnswers):
    """Answers of the API: JSON, or an error."""

    def check(self, answer: Answer, what: str) -> None:
        if answer.status >= 400:
            self.refuse(answer, what)
        refuse_page(answer, what)
