"""The cache on this host: where things lie below a cache root, and what was installed there.

    <root>/v1/lock                                   one writer at a time
    <root>/v1/entries/<fingerprint>/<module>/<module>.so
    <root>/v1/entries/<fingerprint>/manifest.json    the verified manifest
    <root>/v1/entries/<fingerprint>/signature.json   the envelope by which the policy let it in, where there is a policy
    <root>/v1/entries/<fingerprint>/receipt.json     written last: the entry is installed, and by which policy and key it came in
    <root>/v1/site/<view>/flashinfer_jit_cache/      what FlashInfer sees (kcache.kinds.provider)
    <root>/v1/current/<environment>.json             which view an environment uses
    <root>/v1/sources/<package>.json                 digests of FlashInfer's files by identity, so that they are read once
    <root>/v1/indexes/<store>.json                   the newest signed index that was seen, where there is a policy
    <root>/v1/proofs/<environment>.json              what `kcache verify` proved
    <root>/v1/boots/<host>-<pid>.json                what a server was started with (kcache.workflows.boot)

Invariants: without a receipt nothing is installed; a receipt is believed only as far as the files still are what it says, by
identity (size, times, inode) or else by digest. Nothing below a root that others can write is believed at all.

What a power failure may tear, as it is not flushed: manifests, receipts, views and small documents. Each is checked whenever it
is read, and made again. Artifacts are on disk before they get their names, and so before a receipt speaks of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kcache import digest, fsops
from kcache.errors import InstallError, KcacheError, TrustError
from kcache.fsops import Flusher, Identity, Staged
from kcache.kinds.provider import View
from kcache.manifest import Artifact, Manifest, parse_manifest
from kcache.values import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RECEIPT_FORMAT = "kcache.receipt/1"
_DOCUMENT_BYTES = 64 << 20
_USED_EVERY = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledEntry:
    """An entry whose files are in place and are what its manifest says."""

    manifest: Manifest
    manifest_sha256: str
    directory: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Vouched:
    """By what an entry was let in (see `kcache.workflows.trusted`).

    policy:   digest of the policy's file; `rule`: what it asks of the store, in words.
    key:      id of the key that signed it; empty where none was asked for.
    until:    when that stops to count, in seconds since 1970; 0 for never.
    envelope: what was verified; None where it was not read, as the receipt says it all.
    """

    policy: str
    rule: str
    key: str
    until: int
    envelope: bytes | None = None

    def to_json(self) -> dict[str, Any]:
        return {"policy": self.policy, "rule": self.rule, "key": self.key, "until": self.until}


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """An entry that was installed and no longer is what it was: which file, and how it differs."""

    path: Path
    reason: str


class LocalCache:
    """One cache root. Reading checks owners and modes; nothing is created until something is written."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / "v1"
        self.lock_path = self.base / "lock"
        self.site = self.base / "site"
        self._parsed: dict[str, Manifest] = {}

    def entry_directory(self, fingerprint: str) -> Path:
        return self.base / "entries" / fingerprint.removeprefix("sha256:")

    def check(self) -> None:
        """Refuses a root, or a directory of ours below it, that others could have written to.

        Raises:
            TrustError: with the directory and the remedy.
        """
        for directory in (self.root, self.base, self.base / "entries", self.site, self.base / "current"):
            if os.path.lexists(directory):
                fsops.check_root(directory)

    def prepare(self) -> None:
        """Makes the directories that writers need, with exact modes.

        Raises:
            InstallError, TrustError: they cannot be made, or belong to somebody else.
        """
        for directory in (self.root, self.base, self.base / "entries", self.site):
            fsops.ensure_directory(directory)
        self.check()

    def fingerprints(self) -> Iterator[str]:
        """The fingerprints of entries that have a receipt."""
        with suppress(OSError):
            for directory in sorted((self.base / "entries").iterdir()):
                if os.path.exists(directory / "receipt.json"):  # False, not an error, where it may not be looked at  # noqa: PTH110
                    yield f"sha256:{directory.name}"

    def find(self, fingerprint: str) -> InstalledEntry | Damage | None:
        """What is installed under a fingerprint: a whole entry, a damaged one, or nothing.

        Files whose identity is the receipt's are not read again. Files that were only touched are hashed, and the receipt is
        brought up to date where this process may write it.
        """
        directory = self.entry_directory(fingerprint)
        receipt = self._document(directory / "receipt.json")
        if receipt is None or receipt.get("format") != RECEIPT_FORMAT:  # of another kcache: as if nothing were installed
            return None
        try:
            manifest, sha256 = self._manifest(directory, str(receipt.get("manifest_sha256")))
        except (KcacheError, OSError) as error:
            return Damage(path=directory / "manifest.json", reason=str(error))
        if manifest.fingerprint != fingerprint:
            return Damage(path=directory / "manifest.json", reason="it is the manifest of another entry")
        recorded = receipt.get("files")
        identities = recorded if isinstance(recorded, dict) else {}
        touched = False
        for artifact in manifest.artifacts:
            path = directory / artifact.path
            found = Identity.of(path)
            unchanged = found is not None and identities.get(artifact.path) == found.to_json()
            if reason := _flaw(path, artifact, found, unchanged=unchanged):
                return Damage(path=path, reason=reason)
            touched = touched or not unchanged
        if touched:
            with suppress(InstallError):
                self.write_receipt(manifest, sha256, vouched=_vouched(receipt))
        return InstalledEntry(manifest=manifest, manifest_sha256=sha256, directory=directory)

    def vouched(self, fingerprint: str, manifest_sha256: str) -> Vouched | None:
        """What the receipt of this very manifest says of who vouched for it; None where it says nothing."""
        receipt = self._document(self.entry_directory(fingerprint) / "receipt.json")
        return None if receipt is None or receipt.get("manifest_sha256") != manifest_sha256 else _vouched(receipt)

    def envelope(self, fingerprint: str) -> bytes | None:
        """The envelope that was kept with an entry, or None. It is worth what its signature is worth."""
        path = self.entry_directory(fingerprint) / "signature.json"
        try:
            fsops.check_regular(path)
            return None if path.stat().st_size > _DOCUMENT_BYTES else path.read_bytes()
        except (OSError, TrustError):
            return None

    def keep_vouched(self, entry: InstalledEntry, vouched: Vouched) -> None:
        """Brings the receipt of an installed entry up to date, where this process may write it. Without that, whoever comes next
        verifies again."""
        if vouched.envelope is None and self.vouched(entry.manifest.fingerprint, entry.manifest_sha256) == vouched:
            return
        with suppress(InstallError, TrustError):
            self.write_receipt(entry.manifest, entry.manifest_sha256, vouched=vouched)

    def _manifest(self, directory: Path, sha256: str) -> tuple[Manifest, str]:
        path = directory / "manifest.json"
        fsops.check_regular(path)
        data = path.read_bytes()
        if digest.of_bytes(data) != sha256:
            raise TrustError("it is not the manifest that the receipt names")
        if sha256 not in self._parsed:
            self._parsed[sha256] = parse_manifest(data)
        return self._parsed[sha256], sha256

    def _document(self, path: Path) -> dict[str, Any] | None:
        """A JSON object of ours, or None where there is none that can be used. Never an error: it can be made again."""
        try:
            if path.is_symlink() or not path.exists() or path.stat().st_size > _DOCUMENT_BYTES:
                return None
            fsops.check_regular(path)
            document = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError, TrustError):
            return None
        return document if isinstance(document, dict) else None

    def stage_artifact(
        self, fingerprint: str, path: str, chunks: Iterable[bytes], *, size: int, sha256: str, flusher: Flusher
    ) -> Staged:
        """Writes one file of an entry under a temporary name beside its own; `commit` gives it that name. What lay there before
        goes on existing for those who opened it.

        Args:
            chunks: end in an error if their digest is not `sha256`.
            flusher: its `finish` comes before `commit`, so that a receipt never speaks of bytes that are not on disk.
        """
        target = self.entry_directory(fingerprint) / path
        fsops.ensure_directory(target.parent, root=self.root)
        return fsops.stage(
            target.parent, target.name, chunks, expected_size=size, expected_sha256=None, verified=sha256, flusher=flusher
        )

    def write_receipt(
        self, manifest: Manifest, manifest_sha256: str, encoded: bytes | None = None, *, vouched: Vouched | None = None
    ) -> None:
        """Makes an entry visible: its manifest if `encoded` is given, then the receipt, last."""
        directory = self.entry_directory(manifest.fingerprint)
        if encoded is not None:
            fsops.write_bytes(directory / "manifest.json", encoded, durable=False)
            self._parsed[manifest_sha256] = manifest
        if vouched is not None and vouched.envelope is not None:
            fsops.write_bytes(directory / "signature.json", vouched.envelope, durable=False)
        identities = {artifact.path: Identity.of(directory / artifact.path) for artifact in manifest.artifacts}
        document: dict[str, Any] = {
            "format": RECEIPT_FORMAT,
            "manifest_sha256": manifest_sha256,
            "files": {path: identity.to_json() for path, identity in identities.items() if identity is not None},
        }
        if vouched is not None:
            document["vouched"] = vouched.to_json()
        fsops.write_bytes(directory / "receipt.json", digest.canonical_json(document), durable=False)

    def sweep(self, manifest: Manifest) -> None:
        """Removes unfinished files that killed writers left in an entry. Only for the holder of the lock: nobody else is writing
        there."""
        directory = self.entry_directory(manifest.fingerprint)
        for place in [directory, *sorted({(directory / artifact.path).parent for artifact in manifest.artifacts})]:
            if os.path.isdir(place):  # noqa: PTH112
                fsops.sweep(place, idle=0)

    def remove_if_empty(self, manifest: Manifest) -> None:
        """Removes the directories that an installation made and left empty."""
        directory = self.entry_directory(manifest.fingerprint)
        with suppress(OSError):
            for parent in [*sorted({(directory / a.path).parent for a in manifest.artifacts}), directory]:
                parent.rmdir()

    def set_aside(self, fingerprint: str, damage: Damage) -> None:
        """Takes a damaged entry out of use: its receipt goes first, then the damaged file gets a name that nothing loads."""
        receipt = self.entry_directory(fingerprint) / "receipt.json"
        with fsops.translated(receipt, "remove"), suppress(FileNotFoundError):
            receipt.unlink()
        if os.path.lexists(damage.path):
            fsops.set_aside(damage.path)

    def write_view(self, view: View) -> Path:
        """Makes a view, unless it is there already, and returns its directory. A view that does not hold what it should is
        completed in place: its content is named by its id."""
        directory = self.site / view.id
        if self._view_in_place(directory, view):
            return directory
        # The package's own files come last: without them the view offers nothing.
        for path in [*sorted(view.links), *sorted(view.files, reverse=True)]:
            fsops.ensure_directory((directory / path).parent, root=self.root)
            if path in view.files:
                fsops.write_bytes(directory / path, view.files[path], durable=False)
            else:
                fsops.write_link(directory / path, view.links[path], durable=False)
        return directory

    def _view_in_place(self, directory: Path, view: View) -> bool:
        try:
            for path in view.files:
                if Identity.of(directory / path) is None:
                    return False
                fsops.check_regular(directory / path)
            return all((directory / path).read_bytes() == data for path, data in view.files.items()) and all(
                str((directory / path).readlink()) == target for path, target in view.links.items()
            )
        except OSError:
            return False

    def read(self, room: str, name: str) -> dict[str, Any] | None:
        """A small document of ours, such as `read("current", environment_id)`."""
        return self._document(self.base / room / f"{name}.json")

    def write(self, room: str, name: str, document: Mapping[str, Any]) -> None:
        """Writes a small document unless it already says the same; then it is marked as used, at most once an hour: `kcache
        prune` goes by that.

        Raises:
            InstallError: it cannot be written.
        """
        if self.read(room, name) == document:
            path = f"{self.base}/{room}/{name}.json"
            with suppress(OSError):
                if abs(time.time() - os.lstat(path).st_mtime) > _USED_EVERY:
                    os.utime(path, follow_symlinks=False)
            return
        fsops.ensure_directory(self.base / room, root=self.root)
        fsops.write_bytes(self.base / room / f"{name}.json", digest.canonical_json(document), durable=False)

    def remember(self, room: str, name: str, document: Mapping[str, Any]) -> None:
        """`write` for what is useful and not needed: a cache that cannot be written is no obstacle."""
        with suppress(InstallError, TrustError):
            self.prepare()
            self.write(room, name, document)


def _vouched(receipt: Mapping[str, Any]) -> Vouched | None:
    found = receipt.get("vouched")
    names = ("policy", "rule", "key")
    if not isinstance(found, dict) or not all(isinstance(found.get(name), str) for name in names):
        return None
    until = found.get("until")
    return Vouched(**{name: found[name] for name in names}, until=until) if type(until) is int else None


def _flaw(path: Path, artifact: Artifact, found: Identity | None, *, unchanged: bool) -> str:
    """What is wrong with an installed file; empty if nothing is. Reads it only if it is not `unchanged`."""
    if found is None:
        return "missing"
    try:
        fsops.check_regular(path)
    except TrustError as error:
        return str(error)
    if unchanged:
        return ""
    if found.size != artifact.size:
        return f"{found.size} bytes instead of {artifact.size}"
    return "" if digest.of_file(str(path))[0] == artifact.sha256 else "other bytes than its manifest states"


class SourceMemo:
    """Digests of files outside the cache, remembered by identity, so that an unchanged file is read only once.

    The memo lies below the cache root, which only we can write; a file with any other size, time or inode is read again. Each of
    its lines is [digest, size, mtime_ns, ctime_ns, ino, dev]: a thousand of them are compared at every start.
    """

    def __init__(self, cache: LocalCache, package: Path) -> None:
        self._cache = cache
        self._package = str(package)
        self._name = digest.of_bytes(str(package).encode()).removeprefix("sha256:")[:16]
        files = (cache.read("sources", self._name) or {}).get("files")
        self._known: dict[str, Any] = files if isinstance(files, dict) else {}
        self._new = False

    def recall(self, paths: Iterable[str]) -> dict[str, str]:
        """The digests of those of `paths` (inside the package) that have not changed since they were hashed."""
        digests = {}
        for path in paths:
            line = self._known.get(path)
            if not isinstance(line, list):
                continue
            with suppress(OSError):
                found = os.stat(f"{self._package}/{path}")  # what a link leads to counts  # noqa: PTH116
                if line[1:] == _identity(found):
                    digests[path] = str(line[0])
        return digests

    def remember(self, digests: Mapping[str, str], seen: Mapping[str, os.stat_result]) -> None:
        """Takes in new digests, each with what the file was before it was read, so that a change in between is noticed the next
        time; `save` keeps them."""
        for path, sha256 in digests.items():
            if path in seen:
                self._known[path] = [sha256, *_identity(seen[path])]
                self._new = True

    def save(self) -> None:
        """Writes what is new, once for all entries. A cache that cannot be written is no obstacle: the files are read again."""
        if not self._new:
            return
        with suppress(InstallError, TrustError):
            self._cache.write("sources", self._name, {"package": self._package, "files": self._known})


def _identity(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]
