"""Tokens, and who may read and write what. Answers to those who may not are the Hub's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .state import Repository

DEFAULT_TOKENS = {
    "hf_farm_write": {"name": "builder", "orgs": ["farm"], "role": "write"},
    "hf_farm_read": {"name": "viewer", "orgs": ["farm"], "role": "read"},
    "hf_stranger": {"name": "stranger", "orgs": [], "role": "write"},
}
"""Token -> who has it. A user may read and, with the role `write`, write what belongs to them or to one of their orgs."""


@dataclass(frozen=True)
class User:
    name: str
    orgs: tuple[str, ...]
    role: str

    def belongs_to(self, namespace: str) -> bool:
        return namespace == self.name or namespace in self.orgs


@dataclass(frozen=True)
class Refusal(Exception):
    """An answer that is an error: the Hub's status, `X-Error-Code` and `X-Error-Message`."""

    status: int
    message: str
    code: str = ""
    headers: Mapping[str, str] | None = None


class Access:
    """The tokens of `tokens.json`, which is made if it is not there."""

    def __init__(self, root: Path) -> None:
        path = root / "tokens.json"
        if not path.exists():
            root.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(DEFAULT_TOKENS, indent=1))
        self._users = {
            token: User(name=who["name"], orgs=tuple(who["orgs"]), role=who["role"])
            for token, who in json.loads(path.read_text()).items()
        }

    def user(self, authorization: str | None) -> User | None:
        """Who asks, None if nobody says.

        Raises:
            Refusal: a token that nobody has.
        """
        if authorization is None:
            return None
        user = self._users.get(authorization.removeprefix("Bearer "))
        if user is None:
            raise Refusal(401, "Invalid credentials in Authorization header")
        return user

    @staticmethod
    def may_read(repository: Repository | None, user: User | None, *, content: bool) -> Repository:
        """The repository, if this user may see it and, for `content`, its files.

        Raises:
            Refusal: a private repository looks like one that does not exist.
        """
        owner = repository is not None and user is not None and user.belongs_to(repository.name.partition("/")[0])
        settings = repository.settings if repository is not None else None
        hidden = settings is None or (settings.private and not owner and (user is None or user.name not in settings.readers))
        if repository is None or settings is None or hidden:
            if user is None:
                raise Refusal(401, "Invalid username or password.", "RepoNotFound")
            raise Refusal(404, "Repository not found", "RepoNotFound")
        if settings.disabled:
            raise Refusal(403, "Access to this resource is disabled.")
        if content and settings.gated and not owner and (user is None or user.name not in settings.granted):
            what = f"Access to model {repository.name} is restricted"
            if user is None:
                raise Refusal(401, f"{what}. You must have access to it and be authenticated to access it.", "GatedRepo")
            raise Refusal(403, f"{what} and you are not in the authorized list.", "GatedRepo")
        return repository

    @staticmethod
    def may_write(repository: Repository | None, user: User | None) -> tuple[Repository, User]:
        found = Access.may_read(repository, user, content=False)
        if user is None:
            raise Refusal(401, "Invalid username or password.")
        if not user.belongs_to(found.name.partition("/")[0]) or user.role != "write":
            raise Refusal(403, "Forbidden: you must use a write token to upload to a repository.")
        return found, user
