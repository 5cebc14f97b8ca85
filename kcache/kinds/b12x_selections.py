"""b12x's selection cache: which configuration its autotuning chose, collected, merged into a host's, and judged as b12x does.

One file `<compile cache>/preparation/<digest of identity>.json` for a compute capability and an SM count
(`preparation/_cache.py`, 1.5.1): two product names of one chip share it. A record is a choice for one query of one component,
named by a digest of both and of the component's versions. Two things make a file dangerous where it does not belong, as b12x
raises instead of passing over it: a file that breaks its schema, and a record whose assignment is not legal in the b12x that
reads it (the identity does not cover the package). So kcache's own rule adds the package: choices are installed only for the
b12x that made them.

Choices are measured on a GPU; nothing here makes any. Pure except where a path is an argument.
"""

# ruff: noqa: PTH208 -- names are compared as strings
from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kcache import fsops
from kcache.errors import IntegrityError, KcacheError
from kcache.key import Fact, known, undetermined
from kcache.kinds.b12x_compile import LeftOut
from kcache.match import EQUAL, Check, Decision
from kcache.values import dataclass

SCHEMA_VERSION = 6
MEASUREMENT = "stream_gated_events_v1"

MAX_BYTES = 64 << 20
"""A record has about 1 KB; b12x keeps one for each query that was ever tuned."""

_IDENTITY = frozenset(("schema_version", "tuning_cache_version", "measurement", "namespace", "compute_capability", "sm_count"))
_RECORD = frozenset(("assignment", "config", "coverage", "programs"))
_COVERAGE = frozenset(("cartesian_count", "legal_count", "effective_count", "measured_count"))


def selections_directory(compile_cache: str) -> str:
    """Where b12x keeps selections: below its compile cache, unless a session was given another place."""
    return f"{compile_cache}/preparation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selections:
    """One file of choices.

    identity: what the choices are for: see `identity_of`.
    records:  name of a query -> {assignment, config, coverage, programs}. `programs` are keys of the compile cache on the host
              that measured; b12x does not read them back.
    """

    identity: Mapping[str, Any]
    records: Mapping[str, Mapping[str, Any]]

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{digest_of(self.identity)}.json"


def identity_of(
    capability: tuple[int, int], sm_count: int, environ: Mapping[str, str], namespace: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """What b12x's `cache_identity` gives for a GPU. The product's name is not in it.

    Args:
        environ: for B12X_TUNING_CACHE_VERSION.
        namespace: what the engine gives its PreparationSession.

    Raises:
        IntegrityError: B12X_TUNING_CACHE_VERSION is no positive number; b12x refuses to start so.
    """
    text = environ.get("B12X_TUNING_CACHE_VERSION", "1")
    try:
        version = int(text)
    except ValueError:
        version = 0
    if version <= 0:
        raise IntegrityError("b12x has no selection cache", why=f"B12X_TUNING_CACHE_VERSION is {text!r}, no positive number")
    return {
        "schema_version": SCHEMA_VERSION,
        "tuning_cache_version": version,
        "measurement": MEASUREMENT,
        "namespace": dict(namespace or {}),
        "compute_capability": list(capability),
        "sm_count": sm_count,
    }


def _json(value: Any) -> str:
    """As b12x writes and hashes them."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest_of(identity: Mapping[str, Any]) -> str:
    """b12x's digest of an identity: 64 hex digits."""
    return hashlib.sha256(_json(dict(identity)).encode()).hexdigest()


def parse_selections(data: bytes, name: str) -> Selections:
    """The choices in a file, held to all that b12x checks when it reads it, and to its name.

    Raises:
        IntegrityError: b12x would refuse the file, or look for it under another name.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{name} is not JSON", why=str(error)) from error
    if not isinstance(document, dict) or set(document) != {"identity", "records"}:
        raise IntegrityError(f"{name} is no selection cache", why="it does not hold identity and records, and nothing else")
    identity, records = document["identity"], document["records"]
    if not isinstance(identity, dict) or set(identity) != _IDENTITY:
        raise IntegrityError(f"{name} is no selection cache", why="its identity has other fields than b12x 1.5.1 writes")
    if identity["schema_version"] != SCHEMA_VERSION or identity["measurement"] != MEASUREMENT:
        raise IntegrityError(f"{name} has another schema", why=f"{identity['schema_version']}, {identity['measurement']}")
    if not isinstance(records, dict):
        raise IntegrityError(f"{name} is no selection cache", why="its records are no mapping")
    for key, record in records.items():
        if why := _record_problem(record):
            raise IntegrityError(f"{name} holds a record that b12x refuses", why=f"{key[:16]}: {why}")
    found = Selections(identity=identity, records=records)
    if found.name != name:
        raise IntegrityError(f"{name} has another identity than its name says", why=f"b12x would look for it as {found.name}")
    return found


def _record_problem(record: Any) -> str:
    """`SelectionCache._validate` of one record; empty if it passes."""
    if not isinstance(record, dict) or set(record) != _RECORD:
        return "its fields differ from the schema"
    if not all(isinstance(record[part], dict) and _is_metadata(record[part]) for part in ("assignment", "config")):
        return "its assignment or config is no mapping of plain values"
    if not isinstance(record["programs"], list) or not all(map(_is_program, record["programs"])):
        return "its programs are not all known by dialect and key"
    return _coverage_problem(record["coverage"])


def _coverage_problem(coverage: Any) -> str:
    if not isinstance(coverage, dict) or set(coverage) != _COVERAGE:
        return "its coverage has other fields"
    if any(type(value) is not int or value < 0 for value in coverage.values()):
        return "its counts are not all whole numbers from 0"
    measured = coverage["measured_count"]
    if not coverage["cartesian_count"] >= coverage["legal_count"] >= coverage["effective_count"] == measured > 1:
        return "it is not of a complete race of several candidates"
    return ""


def _is_program(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and value[0] in ("cute", "triton")
        and isinstance(value[1], str)
        and value[1] != ""
    )


def _is_metadata(value: Any) -> bool:
    """What b12x's FrozenMapping takes."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and key and _is_metadata(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_is_metadata, value))
    return not isinstance(value, float) or math.isfinite(value)


def serialise(selections: Selections, renamed: Mapping[str, str] | None = None) -> bytes:
    """The file as b12x writes it.

    Args:
        renamed: key of a program on the farm -> its key here (`kcache.kinds.b12x_compile.for_target`).
    """
    names = renamed or {}
    records = {
        key: {**record, "programs": [[dialect, names.get(program, program)] for dialect, program in record["programs"]]}
        for key, record in selections.records.items()
    }
    return _json({"identity": dict(selections.identity), "records": records}).encode()


def collect_selections(directory: Path) -> tuple[tuple[Selections, ...], tuple[LeftOut, ...]]:
    """The choices that lie in a directory, and the files that are none, with the reason. No directory: nothing of either.

    Raises:
        TrustError: someone else could change the directory.
    """
    if not os.path.lexists(directory):
        return (), ()
    fsops.check_root(directory)
    found: list[Selections] = []
    left_out: list[LeftOut] = []
    for name in sorted(os.listdir(directory)):
        if name.endswith(".lock"):
            continue
        try:
            if not name.endswith(".json"):
                raise IntegrityError("not a name that b12x gives a selection cache")
            found.append(parse_selections(fsops.read_checked(directory / name, MAX_BYTES), name))
        except KcacheError as error:
            left_out.append(LeftOut(path=name, why=f"{error.what}: {error.why}" if error.why else error.what))
    return tuple(found), tuple(left_out)


def match_selections(selections: Selections, identity: Mapping[str, Any], *, built_with: Fact, package: Fact) -> Decision:
    """Whether choices may be used on a host: by b12x's identity, part by part, and by the package that made them.

    Args:
        identity: the host's (`identity_of`).
        built_with, package: fingerprints of the b12x that measured, and of the host's.
    """
    checks = []
    for field in sorted(_IDENTITY):
        wanted, found = _json(selections.identity.get(field)), _json(identity.get(field))
        checks.append(Check(field=f"selections.{field}", rule=EQUAL, wanted=wanted, found=found, passed=wanted == found))
    passed = built_with.known and built_with.same(package)
    checks.append(Check(field="b12x.package", rule=EQUAL, wanted=built_with.describe(), found=package.describe(), passed=passed))
    return Decision(checks=tuple(checks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """What an install of choices did: names of records that were added, and of those that were there and stay."""

    added: tuple[str, ...]
    kept: tuple[str, ...]


def install_selections(
    directory: Path, selections: Selections, *, timeout: float, renamed: Mapping[str, str] | None = None
) -> Merged:
    """Merge choices into a host's file of the same identity, under b12x's own lock; the host's own choices stay.

    Raises:
        IntegrityError: a file is there that b12x itself refuses. It is not touched: it may be the user's only copy.
        TrustError: the directory, the file or its lock is a link, or someone else could change it.
        LockTimeoutError, NoSpaceError, InstallError: see `kcache.fsops`.
    """
    wanted = parse_selections(serialise(selections, renamed), selections.name)
    fsops.ensure_directory(directory)
    path = directory / wanted.name
    with fsops.locked(path.with_suffix(".lock"), timeout):
        there: dict[str, Mapping[str, Any]] = {}
        if os.path.lexists(path):
            there = dict(parse_selections(fsops.read_checked(path, MAX_BYTES), path.name).records)
        added = tuple(sorted(key for key in wanted.records if key not in there))
        if added:
            merged = Selections(identity=wanted.identity, records={**wanted.records, **there})
            fsops.write_bytes(path, serialise(merged))
    return Merged(added=added, kept=tuple(sorted(key for key in wanted.records if key in there)))


def package_fact(fingerprint: str) -> Fact:
    """A fingerprint as a fact; the empty text could not be found out."""
    return known(fingerprint) if fingerprint else undetermined("no b12x package was found")
