"""Repositories on disk: blobs by sha256, commits as changes to their parent, references as small files.

A commit file is written before a reference names it, each by rename, so a server that dies leaves the old state or the new one.
Trees of commits are kept in memory and made from the chain of changes when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

COMMIT = re.compile(r"[0-9a-f]{40}")
GITATTRIBUTES = b"*.zst filter=lfs diff=lfs merge=lfs -text\n*.tar.* filter=lfs diff=lfs merge=lfs -text\n"


@dataclass(frozen=True)
class File:
    """A file in a commit. `oid` is git's, of the blob or of the LFS pointer; `sha256` names the content on disk."""

    size: int
    oid: str
    sha256: str
    lfs: bool = False
    pointer_size: int = 0
    xet: str = ""


@dataclass(frozen=True)
class Commit:
    """`changes`: path -> the file there from now on, or None if it is gone."""

    oid: str
    parent: str
    title: str
    message: str
    author: str
    date: str
    changes: Mapping[str, File | None]


@dataclass
class Settings:
    """What a repository's owner decided. `readers` may read a private one; `granted` may read a gated one."""

    private: bool = False
    gated: bool = False
    disabled: bool = False
    readers: list[str] = field(default_factory=list)
    granted: list[str] = field(default_factory=list)


def write(path: Path, data: bytes) -> None:
    """The bytes under a name, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    temporary.write_bytes(data)
    temporary.replace(path)


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Blobs:
    """Content by sha256."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, sha256: str) -> Path:
        return self._root / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        return self.path(sha256).exists()

    def add(self, data: bytes) -> str:
        sha256 = hashlib.sha256(data).hexdigest()
        if not self.has(sha256):
            write(self.path(sha256), data)
        return sha256

    def regular(self, data: bytes) -> File:
        return File(size=len(data), oid=git_oid(data), sha256=self.add(data))

    def lfs(self, sha256: str, size: int, xet: str = "") -> File:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
        return File(size=size, oid=git_oid(pointer), sha256=sha256, lfs=True, pointer_size=len(pointer), xet=xet)


class Repository:
    """One repository. Not for several processes at once: the server is one."""

    def __init__(self, root: Path, kind: str, name: str) -> None:
        self.root, self.kind, self.name = root, kind, name
        self._commits: dict[str, Commit] = {}
        self._trees: dict[str, dict[str, File]] = {}

    @property
    def settings(self) -> Settings:
        return Settings(**json.loads((self.root / "settings.json").read_bytes()))

    @settings.setter
    def settings(self, value: Settings) -> None:
        write(self.root / "settings.json", json.dumps(asdict(value)).encode())

    def refs(self, kind: str) -> dict[str, str]:
        """Name -> commit, of the `branches` or `tags`."""
        path = self.root / f"{kind}.json"
        found: dict[str, str] = json.loads(path.read_bytes()) if path.exists() else {}
        return found

    def set_ref(self, kind: str, name: str, commit: str | None) -> None:
        refs = self.refs(kind)
        if commit is None:
            refs.pop(name, None)
        else:
            refs[name] = commit
        write(self.root / f"{kind}.json", json.dumps(refs).encode())

    def resolve(self, revision: str) -> str | None:
        """The commit that a branch, a tag, a full reference or a commit (seven digits or more) names."""
        short = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        for kind in ("branches", "tags"):
            if short in (refs := self.refs(kind)):
                return refs[short]
        if COMMIT.fullmatch(revision) and (self.root / "commits" / f"{revision}.json").exists():
            return revision
        if re.fullmatch("[0-9a-f]{7,39}", revision):
            return next((path.stem for path in (self.root / "commits").glob(f"{revision}*.json")), None)
        return None

    def commit(self, oid: str) -> Commit:
        if oid not in self._commits:
            document = json.loads((self.root / "commits" / f"{oid}.json").read_bytes())
            changes = {path: None if file is None else File(**file) for path, file in document.pop("changes").items()}
            self._commits[oid] = Commit(oid=oid, changes=changes, **document)
        return self._commits[oid]

    def history(self, oid: str) -> Iterator[Commit]:
        while oid:
            commit = self.commit(oid)
            yield commit
            oid = commit.parent

    def tree(self, oid: str) -> Mapping[str, File]:
        """Path -> file of a commit."""
        chain = []
        at = oid
        while at and at not in self._trees:
            chain.append(self.commit(at))
            at = chain[-1].parent
        files = dict(self._trees.get(at, {}))
        for commit in reversed(chain):
            for path, file in commit.changes.items():
                if file is None:
                    files.pop(path, None)
                else:
                    files[path] = file
        if chain:
            while len(self._trees) > 8:
                self._trees.pop(next(iter(self._trees)))
            self._trees[oid] = files
        return files

    def add_commit(
        self, branch: str, changes: Mapping[str, File | None], *, title: str, message: str = "", author: str = "tester"
    ) -> str:
        """A commit on top of a branch, which then names it."""
        parent = self.refs("branches").get(branch, "")
        document: dict[str, Any] = {
            "parent": parent,
            "title": title,
            "message": message,
            "author": author,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime()),
            "changes": {path: None if file is None else asdict(file) for path, file in changes.items()},
        }
        encoded = json.dumps(document).encode()
        oid = hashlib.sha1(encoded + os.urandom(16)).hexdigest()
        write(self.root / "commits" / f"{oid}.json", encoded)
        self.set_ref("branches", branch, oid)
        return oid


class State:
    """All repositories, blobs and tokens below one directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = Blobs(root / "blobs")
        self._open: dict[tuple[str, str], Repository] = {}

    def find(self, kind: str, name: str) -> Repository | None:
        """A repository of a kind (`models`, `datasets`, `spaces`), such as `farm/kernels`."""
        if (kind, name) in self._open:
            return self._open[kind, name]
        root = self.root / "repos" / kind / name
        if not (root / "settings.json").exists():
            return None
        found = self._open[kind, name] = Repository(root, kind, name)
        return found

    def create(self, kind: str, name: str, settings: Settings) -> Repository:
        repository = Repository(self.root / "repos" / kind / name, kind, name)
        repository.settings = settings
        repository.add_commit("main", {".gitattributes": self.blobs.regular(GITATTRIBUTES)}, title="initial commit")
        self._open[kind, name] = repository
        return repository

    def delete(self, kind: str, name: str) -> None:
        import shutil

        self._open.pop((kind, name), None)
        shutil.rmtree(self.root / "repos" / kind / name)
