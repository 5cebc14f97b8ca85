"""The policy of a host: which keys may publish what, which stores need signatures, and what old indexes count for. Pure, but for
`find_policy` and `read_policy`.

A TOML file, named by `--policy`, else by the variable KCACHE_POLICY, else `/etc/kcache/policy.toml` where that is there. Without
one, publishers are not authenticated. What is not understood refuses the whole file: a misspelt word must not open a door.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from datetime import datetime, timezone
from fnmatch import fnmatchcase
from typing import Any

from kcache import digest
from kcache.errors import TrustError
from kcache.key import EntryKey
from kcache.trust.keys import PublicKey, parse_public
from kcache.values import dataclass, field

FORMAT = "kcache.policy/1"
VARIABLE, SYSTEM = "KCACHE_POLICY", "/etc/kcache/policy.toml"
POLICY_BYTES = 1 << 20
REQUIRED, OPEN = "required", "none"
REFUSE, WARN, IGNORE = "refuse", "warn", "ignore"
ENTRIES, INDEXES = "entries", "index"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKey:
    """A key and what it may publish. Patterns as in file names; an empty tuple is no limit.

    models:     an entry that belongs to no model has the name "", which `*` matches and `Qwen/*` does not.
    not_before, not_after: seconds since 1970 between which its signatures count.
    roles:      `entries`, `index` or both.
    """

    name: str
    public: PublicKey
    kinds: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    archs: tuple[str, ...] = ()
    not_before: float = 0.0
    not_after: float = float("inf")
    roles: tuple[str, ...] = (ENTRIES,)

    def unfit(self, now: float) -> str:
        """Why its signatures do not count now; empty if they do."""
        if now < self.not_before:
            return f"key {self.name} counts from {_date(self.not_before)} on"
        return f"key {self.name} expired {_date(self.not_after)}" if now >= self.not_after else ""

    def unauthorized(self, key: EntryKey) -> str:
        """Why it may not publish an entry; empty if it may."""
        for what, value, patterns in (
            ("kind", key.kind, self.kinds),
            ("model", key.model, self.models),
            ("architecture", key.arch, self.archs),
        ):
            if patterns and not any(fnmatchcase(value, pattern) for pattern in patterns):
                return f"key {self.name} may not publish {what} {value or '(none)'}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRule:
    """What is asked of a store.

    match:      a pattern for the store as it is written after --from.
    signatures: `required` or `none`.
    keys:       names of the keys that count; all if empty.
    """

    match: str = "*"
    signatures: str = REQUIRED
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexRule:
    """What is asked of indexes. `threshold`: by how many different keys one must be signed; with 0 nothing is asked.

    rollback, freeze: `refuse`, `warn` or `ignore` an index older than one that was seen here, or past its end.
    """

    threshold: int = 0
    rollback: str = REFUSE
    freeze: str = REFUSE


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A policy as it was read. `digest` is that of the file's bytes: receipts name it. `revoked` holds key ids and digests of
    manifests, and fingerprints."""

    source: str
    digest: str
    keys: tuple[TrustedKey, ...]
    stores: tuple[StoreRule, ...] = ()
    index: IndexRule = field(default_factory=IndexRule)
    revoked: frozenset[str] = frozenset()

    def rule(self, store: str | None) -> StoreRule:
        """The first rule that fits a store; without one, and for what is installed already (None), signatures are required."""
        found = (rule for rule in self.stores if store is not None and fnmatchcase(store, rule.match))
        return next(found, StoreRule())

    def index_keys(self) -> tuple[TrustedKey, ...]:
        return tuple(key for key in self.keys if INDEXES in key.roles and key.public.id not in self.revoked)


def find_policy(given: str | None, environ: Mapping[str, str]) -> str | None:
    """The file that counts, or None: `--policy`, the variable, the system's."""
    if given or environ.get(VARIABLE):
        return given or environ[VARIABLE]
    return SYSTEM if os.path.lexists(SYSTEM) else None


def read_policy(path: str) -> Policy:
    """The policy in a file that nobody else can change. A link to it is followed: that is how Kubernetes mounts one.

    Raises:
        TrustError: it cannot be read, somebody else can change it, or it is not understood; with every problem.
    """
    try:
        with open(path, "rb") as stream:
            found = os.fstat(stream.fileno())
            data = stream.read(POLICY_BYTES + 1)
    except OSError as error:
        raise TrustError(
            f"the policy {path} cannot be read", why=error.strerror or "", remedy="Name another with --policy."
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o022:
        raise TrustError(
            f"the policy {path} can be changed by others (mode {stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid})",
            remedy=f"Run `chmod go-w {path}`, and let it belong to you or root.",
        )
    return parse_policy(data, path)


def parse_policy(data: bytes, what: str) -> Policy:
    """A policy from the bytes of a TOML file.

    Raises:
        TrustError: with every problem.
    """
    tomllib = _toml_reader()
    try:
        if len(data) > POLICY_BYTES:
            raise ValueError("too large")
        document = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TrustError(f"the policy {what} is not TOML", why=" ".join(str(error).split())[:200]) from error
    reader = _Reader()
    reader.only(document, ("format", "key", "store", "index", "revoked"), "policy")
    if document.get("format") != FORMAT:
        reader.problems.append(f'format: write format = "{FORMAT}"')
    keys = tuple(reader.key(item, f"key[{number}]") for number, item in enumerate(reader.tables(document, "key")))
    stores = tuple(reader.store(item, f"store[{number}]") for number, item in enumerate(reader.tables(document, "store")))
    index = reader.index(document.get("index", {}))
    revoked = frozenset(text.removeprefix("sha256:") for text in reader.texts(document, "revoked", "policy"))
    for text in revoked:
        if not digest.is_digest(f"sha256:{text}"):
            reader.problems.append(f"revoked: {text[:80]!r} is no key id, fingerprint or digest of 64 hex digits")
    names = [key.name for key in keys]
    if len(set(names)) != len(names) or len({key.public.raw for key in keys}) != len(keys):
        reader.problems.append("key: a name or a public key is there twice")
    reader.problems += [f"store: no key is named {name!r}" for rule in stores for name in rule.keys if name not in names]
    if index.threshold > sum(INDEXES in key.roles for key in keys):
        reader.problems.append('index.threshold: more than there are keys with roles = ["index"]')
    if reader.problems:
        raise TrustError(f"the policy {what} cannot be used", why="; ".join(reader.problems), remedy="See SECURITY.md.")
    return Policy(source=what, digest=digest.of_bytes(data), keys=keys, stores=stores, index=index, revoked=revoked)


class _Reader:
    """Takes a policy apart and collects every problem."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def only(self, table: Mapping[str, Any], names: tuple[str, ...], path: str) -> None:
        self.problems += [f"{path}: {name!r} is not known" for name in table if name not in names]

    def tables(self, document: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
        found = document.get(name, [])
        if isinstance(found, list) and all(isinstance(item, dict) for item in found):
            return found
        self.problems.append(f"{name}: write [[{name}]]")
        return []

    def texts(self, table: Mapping[str, Any], name: str, path: str) -> tuple[str, ...]:
        found = table.get(name, [])
        if isinstance(found, list) and all(isinstance(item, str) for item in found):
            return tuple(found)
        self.problems.append(f"{path}.{name}: not a list of texts")
        return ()

    def one_of(self, table: Mapping[str, Any], name: str, words: tuple[str, ...], path: str) -> str:
        found = table.get(name, words[0])
        if found in words:
            return str(found)
        self.problems.append(f"{path}.{name}: write {' or '.join(words)}")
        return words[0]

    def moment(self, table: Mapping[str, Any], name: str, default: float, path: str) -> float:
        if name not in table:
            return default
        found = table[name]
        if isinstance(found, datetime) and found.tzinfo is not None:
            return found.timestamp()
        self.problems.append(f"{path}.{name}: write a time with its zone, as 2027-01-31T00:00:00Z")
        return default

    def key(self, table: Mapping[str, Any], path: str) -> TrustedKey:
        self.only(table, ("name", "public", "kinds", "models", "archs", "not_before", "not_after", "roles"), path)
        public = parse_public(table.get("public"))
        name = table.get("name")
        if public is None:
            self.problems.append(f"{path}.public: write what `kcache keygen` printed, ed25519:...")
        if not isinstance(name, str) or not name:
            self.problems.append(f"{path}.name: not a text")
        roles = self.texts(table, "roles", path) if "roles" in table else (ENTRIES,)
        if not roles or not set(roles) <= {ENTRIES, INDEXES}:
            self.problems.append(f"{path}.roles: write {ENTRIES}, {INDEXES} or both")
        limits = {limit: self.texts(table, limit, path) for limit in ("kinds", "models", "archs")}
        self.problems += [f"{path}.{limit}: empty" for limit, given in limits.items() if limit in table and not given]
        return TrustedKey(
            name=str(name),
            public=public or PublicKey(raw=os.urandom(32)),  # stands in until the problems are raised
            not_before=self.moment(table, "not_before", 0.0, path),
            not_after=self.moment(table, "not_after", float("inf"), path),
            roles=roles,
            **limits,
        )

    def store(self, table: Mapping[str, Any], path: str) -> StoreRule:
        self.only(table, ("match", "signatures", "keys"), path)
        match = table.get("match")
        if not isinstance(match, str) or not match:
            self.problems.append(f"{path}.match: not a text")
        signatures = self.one_of(table, "signatures", (REQUIRED, OPEN), path)
        return StoreRule(match=str(match), signatures=signatures, keys=self.texts(table, "keys", path))

    def index(self, table: Any) -> IndexRule:
        if not isinstance(table, dict):
            self.problems.append("index: write [index]")
            return IndexRule()
        self.only(table, ("threshold", "rollback", "freeze"), "index")
        threshold = table.get("threshold", 0)
        if type(threshold) is not int or not 0 <= threshold <= 100:
            self.problems.append("index.threshold: not a number from 0 to 100")
            threshold = 0
        answers = (REFUSE, WARN, IGNORE)
        return IndexRule(
            threshold=threshold,
            rollback=self.one_of(table, "rollback", answers, "index"),
            freeze=self.one_of(table, "freeze", answers, "index"),
        )


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).isoformat(timespec="seconds")


def _toml_reader() -> Any:
    """tomllib, or on Python 3.10 the package that it was made from."""
    import importlib
    import sys

    return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
