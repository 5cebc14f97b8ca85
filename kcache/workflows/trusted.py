"""Whether a policy lets entries and indexes of a store in: signatures are looked for, verified, and remembered in receipts.

Invariants: without a policy this is not imported; an entry is vouched for before its manifest is parsed; the receipt names the
policy and the key, so a start under the same policy verifies nothing again, and one under another policy does, offline too: the
envelope is kept beside the entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from kcache import digest
from kcache.errors import KcacheError, NotFoundError, RefusedError, TrustError
from kcache.index import IndexEntry, index_entry
from kcache.local_cache import InstalledEntry, LocalCache, Vouched
from kcache.store.base import Store
from kcache.trust.envelope import ENVELOPE_BYTES, unseal
from kcache.trust.policy import ENTRIES, IGNORE, OPEN, WARN, Policy, StoreRule, TrustedKey
from kcache.trust.statement import IndexClaim, check_entry, check_index, signature_path

ROOM = "indexes"
"""Where the newest index of each store that was seen here is remembered."""


class Guard:
    """A policy at work on this host."""

    def __init__(self, policy: Policy, cache: LocalCache | None, now: Callable[[], float] = time.time) -> None:
        """
        Args:
            cache: where receipts and what was seen are remembered; None remembers nothing.
            now: seconds since 1970.
        """
        self._policy = policy
        self._cache = cache
        self._now = now
        self._admitted: dict[tuple[str, ...], Vouched] = {}

    def admit(self, entry: IndexEntry, store: Store | None) -> Vouched:
        """Who vouches for an entry.

        Args:
            store: where it is published; None for what is installed, when no store answers.

        Raises:
            RefusedError: nobody that the policy trusts. ProbeError: signatures cannot be verified here. StoreError
        """
        # A restore chooses anew with each store that it asks: one answer serves as long as the line and the rule are the same.
        named = "" if store is None else _name(self._policy.rule(store.describe()))
        asked = entry.key.fingerprint, entry.manifest.sha256, entry.archive.sha256, named
        if asked not in self._admitted:
            self._admitted[asked] = self._admit(entry, store)
        return self._admitted[asked]

    def _admit(self, entry: IndexEntry, store: Store | None) -> Vouched:
        policy = self._policy
        title = f"{entry.key.title} {entry.key.fingerprint[7:19]}"
        for name in (entry.key.fingerprint, entry.manifest.sha256, entry.archive.sha256):
            if name.removeprefix("sha256:") in policy.revoked:
                raise self._refused(title, f"{name} is revoked", "Publish it again, built anew, or take it out of `revoked`.")
        rule = policy.rule(None if store is None else store.describe())
        if (known := self._remembered(entry, None if store is None else rule)) is not None:
            return known
        named = _name(rule)
        if rule.signatures == OPEN:
            return Vouched(policy=policy.digest, rule=named, key="", until=0)
        reasons = []
        for key in policy.keys:
            if ENTRIES not in key.roles or (rule.keys and key.name not in rule.keys):
                continue
            why, envelope = self._signed(entry, store, key)
            if envelope is not None:
                until = 0 if key.not_after == float("inf") else int(key.not_after)
                return Vouched(policy=policy.digest, rule=named, key=key.public.id, until=until, envelope=envelope)
            reasons.append(why)
        remedy = "Sign it with a key that may (`kcache publish --sign`, `kcache sign`), or change the policy."
        raise self._refused(title, "; ".join(reasons) or "no key may publish it", remedy)

    def _refused(self, title: str, why: str, remedy: str) -> RefusedError:
        return RefusedError(f"{title} is refused by the policy {self._policy.source}", why=why, remedy=remedy)

    def _remembered(self, entry: IndexEntry, rule: StoreRule | None) -> Vouched | None:
        """What the receipt says, if that was by this policy and still counts."""
        if self._cache is None:
            return None
        found = self._cache.vouched(entry.key.fingerprint, entry.manifest.sha256)
        if found is None or found.policy != self._policy.digest or (rule is not None and found.rule != _name(rule)):
            return None
        return found if not found.until or self._now() < found.until else None

    def _signed(self, entry: IndexEntry, store: Store | None, key: TrustedKey) -> tuple[str, bytes | None]:
        """Why a key does not vouch for an entry, or the envelope by which it does."""
        if key.public.id in self._policy.revoked:
            return f"key {key.name} is revoked", None
        if why := key.unfit(self._now()) or key.unauthorized(entry.key):
            return why, None
        path = signature_path(entry.manifest.sha256, key.public.id)
        why = f"not signed by key {key.name}"
        for data in self._envelopes(entry, store, path):
            try:
                check_entry(unseal(data, key.public, path), entry, path)
            except TrustError as error:
                why = f"{error.what} (key {key.name})" + (f": {error.why}" if error.why else "")
                continue
            return "", data
        return why, None

    def _envelopes(self, entry: IndexEntry, store: Store | None, path: str) -> Iterable[bytes]:
        """The one that was kept, then the store's."""
        if self._cache is not None and (kept := self._cache.envelope(entry.key.fingerprint)) is not None:
            yield kept
        if store is not None:
            try:
                yield store.read_bytes(path, ENVELOPE_BYTES)
            except NotFoundError:
                return

    def check_index(self, store: Store, path: str, data: bytes) -> list[str]:
        """Refuses an index that too few keys signed, or that is old; what the policy only warns of is returned.

        Raises:
            TrustError, StoreError
        """
        rule = self._policy.index
        if not rule.threshold or self._policy.rule(store.describe()).signatures == OPEN:
            return []
        sha256, claims, reasons = digest.of_bytes(data), [], []
        for key in self._policy.index_keys():
            if why := key.unfit(self._now()):
                reasons.append(why)
                continue
            name = signature_path(sha256, key.public.id)
            try:
                claims.append(check_index(unseal(store.read_bytes(name, ENVELOPE_BYTES), key.public, name), path, sha256, name))
            except NotFoundError:
                reasons.append(f"not signed by key {key.name}")
            except TrustError as error:
                reasons.append(f"{error.what} (key {key.name})")
        what = f"{path} of {store.describe()}"
        if len(claims) < rule.threshold:
            raise TrustError(
                f"{what} is signed by {len(claims)} of the {rule.threshold} keys that the policy {self._policy.source} asks for",
                why="; ".join(reasons),
                remedy="Sign it: `kcache sign STORE --index --key FILE`.",
            )
        return self._check_age(store, path, what, claims)

    def _check_age(self, store: Store, path: str, what: str, claims: list[IndexClaim]) -> list[str]:
        # An attacker may leave signatures out but not make any: the least of what was signed is what all of them stand for.
        serial = min(claim.serial for claim in claims)
        expires = min(claim.expires for claim in claims)
        warnings: list[str] = []
        name = digest.of_bytes(f"{store.describe()}\0{path}".encode()).removeprefix("sha256:")[:16]
        seen = (self._cache.read(ROOM, name) or {}).get("serial", 0) if self._cache is not None else 0
        newest = seen if type(seen) is int else 0
        if serial < newest:
            older = f"{what} is older than one that was seen here"
            self._object(self._policy.index.rollback, older, f"{serial} < {newest}", warnings)
        if self._now() >= expires:
            age = f"{(self._now() - expires) / 3600:.1f} h ago"
            self._object(self._policy.index.freeze, f"{what} has expired", age, warnings)
        if self._cache is not None and serial > newest:
            self._cache.remember(ROOM, name, {"serial": serial, "store": store.describe(), "index": path})
        return warnings

    def _object(self, answer: str, what: str, why: str, warnings: list[str]) -> None:
        if answer == IGNORE:
            return
        if answer == WARN:
            warnings.append(f"{what}: {why}")
            return
        remedy = "Somebody may be serving an old state. If not, sign the index again: `kcache sign STORE --index --key FILE`."
        raise TrustError(what, why=why, remedy=remedy)


def refused_entries(cache: LocalCache, rooms: Iterable[Mapping[str, Any] | None], policy: Policy) -> list[str]:
    """Why the policy does not let in what an environment uses, a sentence for each entry; empty where it lets in all of it.

    Args:
        rooms: its documents, each with a list `entries` of fingerprints.
    """
    guard, refused = Guard(policy, cache), []
    named = [room.get("entries") for room in rooms if room is not None]
    for fingerprint in sorted({str(one) for entries in named if isinstance(entries, list) for one in entries}):
        found = cache.find(fingerprint)
        if not isinstance(found, InstalledEntry):
            continue  # what it was is gone: nothing can be said of it, and nothing of it is offered again
        try:
            guard.admit(index_entry(found.manifest, found.manifest.encode()), None)
        except KcacheError as error:
            refused.append(str(error))
    return refused


def _name(rule: StoreRule) -> str:
    return f"{rule.match} {rule.signatures} {' '.join(rule.keys)}".strip()
