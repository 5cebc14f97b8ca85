"""FlashInfer's managed store of tuning results (v2): read, collected whole, matched exactly, named for another environment.

`<root>/v2/<environment hash>/manifest.json` says what was tuned in, `entries/<hash of the key>.json` holds one result each
(`flashinfer/autotune_cache.py`, 0.7.0 to 0.7.4). A file that FlashInfer cannot use is a miss; here it is not collected, and said,
each with its reason. An environment of the same content under another installer has another hash: `relocated` names it as the
target does.

Nothing is written here: `kcache.kinds.autotune_v2_install` does that.
"""

# ruff: noqa: PTH208 -- names are compared as strings
from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kcache import digest, fsops
from kcache.errors import CollectError, IntegrityError, KcacheError
from kcache.kinds.autotune import (
    DSL,
    POLICY_PREFIX,
    SCHEMA,
    LeftOut,
    check_fields,
    check_stack,
    environment_hash,
    json_object,
    operation_of,
    why,
)
from kcache.match import EQUAL, Check, Decision
from kcache.tuning_facts import TuningHost
from kcache.values import dataclass

MANIFEST = "manifest.json"
ENTRIES = "entries"

MAX_FILE = 1 << 20
"""Bytes of one file; a result has some hundred."""

MAX_ENTRIES = 100_000

_HASH = re.compile(r"[0-9a-f]{16}")
_ENTRY = re.compile(r"([0-9a-f]{24})\.json")


def store_root(environ: Mapping[str, str], base: str) -> str:
    """Where FlashInfer keeps its managed stores (`get_default_cache_root`).

    Args:
        base: FLASHINFER_WORKSPACE_BASE or the home directory, as FlashInfer's process has it.
    """
    return environ.get("FLASHINFER_AUTOTUNE_CACHE_DIR") or f"{base}/.cache/flashinfer/autotune"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One result.

    name:      of its file, without `.json`: the hash of `key`.
    operation: such as `bf16_gemm`. runner: the class that won. tactic: JSON, for FlashInfer alone to interpret.
    policy:    how it was measured in this entry's case, where FlashInfer says so (0.7.4).
    data:      the file's bytes.
    """

    name: str
    key: str
    operation: str
    runner: str
    tactic: Any
    policy: tuple[Any, ...] | None
    data: bytes

    @property
    def sha256(self) -> str:
        return digest.of_bytes(self.data)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStore:
    """The results of one environment: the document that FlashInfer hashes, and its entries by name."""

    environment: Mapping[str, str]
    entries: tuple[Entry, ...]

    @property
    def env_hash(self) -> str:
        return environment_hash(self.environment)

    @property
    def policy(self) -> dict[str, str]:
        """How was measured, where that is not FlashInfer's default: a process that replays must ask for the same."""
        return {name: text for name, text in self.environment.items() if name.startswith(POLICY_PREFIX)}

    @property
    def content(self) -> str:
        """A digest of the results, whatever environment they are named for; ranks of a group compare it."""
        return _content({entry.name: entry.sha256 for entry in self.entries})


def _content(files: Mapping[str, str]) -> str:
    return digest.of_document(dict(files)) if files else ""


def parse_store_environment(data: bytes, env_hash: str) -> dict[str, str]:
    """The environment of a store, from the bytes of its `manifest.json`.

    Raises:
        IntegrityError: it is none, or not the one that its directory is named for.
    """
    document = json_object(data, MAX_FILE)
    if not all(isinstance(value, str) for value in document.values()) or document.get("cache_schema") != SCHEMA:
        raise IntegrityError("it is no environment of a managed store", why="a field is no text, or the schema is another")
    if (found := environment_hash(document)) != env_hash:
        raise IntegrityError("it is not the environment of its directory", why=f"its hash is {found}")
    return document


def verify_entry(name: str, data: bytes) -> Entry:
    """A result from the bytes of its file, by FlashInfer's own rules (`lookup` and `preload`).

    Raises:
        IntegrityError: FlashInfer would not take it under this name.
    """
    document = json_object(data, MAX_FILE)
    key, runner = document.get("key"), document.get("runner")
    if not isinstance(key, str) or not isinstance(runner, str) or not runner or "tactic" not in document:
        raise IntegrityError("it is no tuning result", why="key, runner or tactic is missing")
    if hashlib.sha256(key.encode()).hexdigest()[:24] != name:
        raise IntegrityError("its key is not the one that it is named for")
    if "key_fields" in document and _key_text(document["key_fields"]) != key:
        raise IntegrityError("its two forms of the key differ")
    policy = document.get("profiling_policy")
    return Entry(
        name=name,
        key=key,
        operation=operation_of(key)[0],
        runner=runner,
        tactic=document["tactic"],
        policy=tuple(policy) if isinstance(policy, list) else None,
        data=data,
    )


def _key_text(fields: Any) -> str:
    """The text that FlashInfer makes of a key's fields, from their encoded form (`_decode_key_fields`); empty if it is none."""
    if fields is None or isinstance(fields, bool | int | float | str):
        return repr(fields)
    if isinstance(fields, dict) and isinstance(name := fields.get("__dtype__"), str):
        return f"torch.{name}"
    items = fields.get("__tuple__") if isinstance(fields, dict) else fields
    if not isinstance(items, list):
        return ""
    texts = [_key_text(item) for item in items]
    if isinstance(fields, list):
        return f"[{', '.join(texts)}]"
    return f"({texts[0]},)" if len(texts) == 1 else f"({', '.join(texts)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What lies below a root: stores that may be published, and everything else."""

    stores: tuple[TuningStore, ...]
    left_out: tuple[LeftOut, ...]


def collect(root: Path, host: TuningHost) -> Collected:
    """The stores below a root that were tuned in this very environment, whatever the measurement policy.

    Args:
        host: the environment that tuned. Only a store that names it is collected, so that nothing is published whose
            environment was not found out.

    Raises:
        ProbeError: a field of it could not be found out.
        TrustError: someone else could change the root.
    """
    expected = host.written()
    stores: list[TuningStore] = []
    left_out: list[LeftOut] = []
    above = root / SCHEMA
    if not above.is_dir():
        return Collected(stores=(), left_out=())
    for directory in (root, above):
        fsops.check_root(directory)
    for name in sorted(os.listdir(above)):
        if not _HASH.fullmatch(name):
            left_out.append(LeftOut(path=name, why="not a name that FlashInfer gives a store"))
            continue
        try:
            environment = _read_environment(above / name, name)
            _refuse_foreign(environment, expected)
            entries, others = _read_entries(above / name / ENTRIES, name)
        except KcacheError as error:
            left_out.append(LeftOut(path=name, why=why(error)))
            continue
        left_out += others
        if entries:
            stores.append(TuningStore(environment=environment, entries=entries))
        else:
            left_out.append(LeftOut(path=name, why="no result is in it"))
    return Collected(stores=tuple(stores), left_out=tuple(left_out))


def require_winners(collected: Collected) -> None:
    """A tuning that left no result has failed, whatever its progress bar said.

    Raises:
        CollectError: there is none.
    """
    if not collected.stores:
        reasons = "; ".join(f"{one.path}: {one.why}" for one in collected.left_out)
        raise CollectError(
            "tuning left no winner",
            why=reasons or "no candidate could be measured",
            remedy="The tuner needs the JIT module trtllm_utils: without it every candidate fails, and nothing is raised.",
        )


def _read_environment(directory: Path, name: str) -> dict[str, str]:
    for path in (directory, directory / ENTRIES):
        fsops.check_root(path)
    return parse_store_environment(read_part(directory / MANIFEST), name)


def _refuse_foreign(environment: Mapping[str, str], expected: Mapping[str, str]) -> None:
    fields = {name: text for name, text in environment.items() if not name.startswith(POLICY_PREFIX) and name != "cache_schema"}
    for name in dict.fromkeys((*expected, *fields)):
        if fields.get(name) != expected.get(name):
            here = expected.get(name, "not written")
            raise IntegrityError(
                "tuned in another environment", why=f"{name} is {fields.get(name, 'missing')}, here it is {here}"
            )


def _read_entries(directory: Path, store: str) -> tuple[tuple[Entry, ...], list[LeftOut]]:
    entries: list[Entry] = []
    left_out: list[LeftOut] = []
    for file in sorted(os.listdir(directory)):
        path = f"{store}/{ENTRIES}/{file}"
        found = _ENTRY.fullmatch(file)
        if found is None or len(entries) >= MAX_ENTRIES:
            unfinished = file.endswith(".tmp") or file.startswith(fsops.TEMPORARY_PREFIX)
            left_out.append(LeftOut(path=path, why="a writer did not finish it" if unfinished else "no name of a result"))
            continue
        try:
            entries.append(verify_entry(found[1], read_part(directory / file)))
        except KcacheError as error:
            left_out.append(LeftOut(path=path, why=why(error)))
    return tuple(entries), left_out


def read_part(path: Path) -> bytes:
    """The bytes of one file of a store.

    Raises:
        IntegrityError: missing, or too large. TrustError: a link, or someone else could change it.
    """
    if not os.path.lexists(path):
        raise IntegrityError(f"{path.name} is missing")
    return fsops.read_checked(path, MAX_FILE)


def match_store(store: TuningStore, built: TuningHost, host: TuningHost, *, strict: bool = False) -> Decision:
    """Whether results of one environment may be used in another.

    Args:
        built: the environment that tuned: what the store's `unknown` means, and the compiler by content.
        host:  the target's.
        strict: FlashInfer's own rule on top: the target's `DSL` is the builder's, so that nothing has to be written anew.
    """
    own = {name: fact for name, fact in built.fields.items() if name in host.fields or name != DSL}
    checks = check_fields(own, host.fields) + check_stack(built.stack, host.stack, strict=strict)
    written = {name: fact.value or "unknown" for name, fact in built.fields.items()}
    for name, text in written.items():
        if store.environment.get(name) != text:
            found = store.environment.get(name, "nothing")
            checks.append(Check(field=f"store {name}", rule=EQUAL, wanted=text, found=found, passed=False))
    if strict and DSL in built.fields:
        one, other = built.fields[DSL], host.fields.get(DSL, built.fields[DSL])
        checks.append(Check(field=DSL, rule=EQUAL, wanted=one.describe(), found=other.describe(), passed=one.same(other)))
    return Decision(checks=tuple(checks))


def relocated(store: TuningStore, host: TuningHost) -> TuningStore:
    """The store as the target's FlashInfer names it: its own environment, with the policy that was measured under.

    Only `match_store` says whether the results may be used there.

    Raises:
        ProbeError: a field of the target could not be found out.
    """
    environment = host.written() | store.policy | {"cache_schema": SCHEMA}
    return TuningStore(environment=environment, entries=store.entries)


def read_store(root: Path, environment: Mapping[str, str]) -> TuningStore | None:
    """The results of one environment that lie below a root now and that FlashInfer would take; None where there are none.

    Args:
        environment: with the measurement policy's fields; the schema is added where it is not there.

    Raises:
        TrustError: someone else could change it.
    """
    whole = dict(environment) | {"cache_schema": SCHEMA}
    directory = root / SCHEMA / environment_hash(whole)
    if not (directory / ENTRIES).is_dir():
        return None
    for path in (directory, directory / ENTRIES):
        fsops.check_root(path)
    entries, _ = _read_entries(directory / ENTRIES, directory.name)
    return TuningStore(environment=whole, entries=entries) if entries else None


def content_digest(root: Path, environment: Mapping[str, str]) -> str:
    """Of the results that `read_store` finds; empty where there are none.

    Ranks of a tuning group compare it (`kcache.kinds.autotune.group_may_use`) before any of them uses the store.

    Raises:
        TrustError: someone else could change it.
    """
    found = read_store(root, environment)
    return found.content if found is not None else ""
