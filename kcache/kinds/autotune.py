"""What FlashInfer keys its tuning results by, worked out without importing torch or flashinfer, and compared field by field.

FlashInfer writes the environment that it tuned in beside the results, and takes them only where it works out the same: as
`_metadata` of a JSON file (v1, `autotuner/autotuner.py`, _collect_metadata) and as the document whose hash names a store's
directory (v2, `autotune_cache.py`, ManagedAutotuneCache). Both hold the same fields. Rules:

- every field is equal, or the result is not used; a tactic is an index into what these libraries list;
- FlashInfer writes `unknown` for two things: what is absent (equal to another absence), and what could not be found out, which
  never matches and is never published. Here they are two: `kcache.key.Fact`;
- `*` is a wildcard of the file's owner (v1 alone); kcache never writes one;
- `cutlass_dsl_version` depends on who installed the compiler. Where the compiler is equal by content, it is written anew for the
  target (kcache/docs/decisions/0005-cute-dsl-ingredients.md), never otherwise.

Pure but for reading FlashInfer's source. Files: `kcache.kinds.autotune_v1`, `kcache.kinds.autotune_v2`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from kcache.errors import IntegrityError, KcacheError, ProbeError
from kcache.key import ABSENT, Fact, known, undetermined
from kcache.kinds.library_text import digest_of_parts, function_text, read_source
from kcache.match import EQUAL, NOT_OLDER, SAME_RELEASE, Check, compiler_facts
from kcache.tuning_facts import UNKNOWN, Stack
from kcache.values import dataclass

DSL = "cutlass_dsl_version"
"""The field that names CuTe-DSL's compiler as its installer left it."""

FIELDS = ("flashinfer_version", "cuda_version", "cublas_version", "cudnn_version", "cudnn_frontend_version", "gpu")
"""What FlashInfer 0.6.18 writes; 0.7.0 and later write `DSL` too."""

INDETERMINATE = (None, UNKNOWN, "None")
"""What FlashInfer has written for a value that it did not have (`_INDETERMINATE_META_VALUES`)."""

WILDCARD = "*"

SCHEMA = "v2"
"""The directory of the managed store, and a field of its environment (`autotune_cache.py`, _SCHEMA)."""

POLICY_PREFIX = "measure_"
"""Fields of a store's environment that say how was measured (`MeasurementPolicy.manifest_fields`)."""

_METADATA_PARTS = ("_get_cublas_version", "_get_cudnn_backend_version", "_collect_metadata", "_classify_metadata_mismatches")

_METADATA_RULES: Mapping[str, tuple[str, ...]] = {
    "0b0af667d2fd22a5": FIELDS,
    "c7bf8a991e30e827": (*FIELDS, DSL),
}
"""Digest of FlashInfer's text of `_METADATA_PARTS` -> the fields that it writes (0.6.18.post1; 0.7.0.post1 to 0.7.4)."""

_STORE_RULES = frozenset(("ef18aa690d8f56b2", "7a4f68cb9224c3d6"))
"""Digests of FlashInfer's text of the store's names (0.7.0.post1; 0.7.2.post1 and 0.7.4): one rule."""

_REMEDY = "Use a newer kcache; until then FlashInfer tunes, or falls back to its heuristics, as without kcache."


def metadata_fields(package: str) -> tuple[str, ...]:
    """The fields that this FlashInfer compares.

    Args:
        package: the directory of the flashinfer package.

    Raises:
        ProbeError: its rule is not known here, or its source cannot be read.
    """
    found = metadata_digest(package)
    if found not in _METADATA_RULES:
        raise ProbeError(
            "this FlashInfer decides in another way which tuning results it takes",
            why=f"autotuner/autotuner.py has a rule with digest {found}, which this kcache does not know",
            remedy=_REMEDY,
        )
    return _METADATA_RULES[found]


def metadata_digest(package: str) -> str:
    """Of FlashInfer's own text of the metadata's rule: sixteen hex digits."""
    text = read_source(f"{package}/autotuner/autotuner.py", "FlashInfer's rule for tuning results")
    return digest_of_parts(function_text(text, name) for name in _METADATA_PARTS)


def check_store_rule(package: str) -> None:
    """Refuses a FlashInfer whose managed store (v2) is laid out in a way that is not known here.

    Raises:
        ProbeError: it has none (0.6.18), or another one.
    """
    found = store_digest(package)
    if found not in _STORE_RULES:
        raise ProbeError(
            "this FlashInfer keeps a managed store of tuning results in another way",
            why=f"autotune_cache.py has a rule with digest {found}, which this kcache does not know",
            remedy=_REMEDY,
        )


def store_digest(package: str) -> str:
    """Of FlashInfer's own text of the store's names: sixteen hex digits."""
    text = read_source(f"{package}/autotune_cache.py", "FlashInfer's managed store of tuning results (from 0.7.0 on)")
    schema = re.search(r"^_SCHEMA = .*$", text, re.MULTILINE)
    store = text.partition("class ManagedAutotuneCache")[2]
    parts = [schema[0] if schema else "", *(function_text(text, name) for name in ("get_default_cache_root", "_canonical_json"))]
    return digest_of_parts([*parts, *(function_text(store, name) for name in ("__init__", "_entry_path"))])


def meant(text: object, here: Fact) -> Fact:
    """What a field of a file means that was written on this host.

    Args:
        here: the fact on this host: only it can tell that `unknown` was an absence.
    """
    if text in INDETERMINATE:
        return ABSENT if here.absent else undetermined("FlashInfer could not find it out when it tuned")
    return known(text) if isinstance(text, str) else undetermined("it is no text")


def check_fields(built: Mapping[str, Fact], host: Mapping[str, Fact], *, wildcards: Collection[str] = ()) -> list[Check]:
    """Every field but `DSL`: equal, absent on both sides, or a wildcard of the file's owner."""
    checks = []
    for name in dict.fromkeys((*host, *built)):
        if name == DSL:
            continue
        wanted = built.get(name, undetermined("not recorded"))
        found = host.get(name, undetermined("this FlashInfer does not compare it"))
        free = name in wildcards
        checks.append(
            Check(
                field=name,
                rule=EQUAL,
                wanted=WILDCARD if free else wanted.describe(),
                found=found.describe(),
                passed=free or wanted.same(found),
            )
        )
    return checks


def check_stack(built: Stack, host: Stack, *, strict: bool = False) -> list[Check]:
    """The compiler by content, as for kernels that it compiled (decision 0005): tactics are configurations of it.

    Args:
        strict: nothing merely compatible: the same Python, the same tvm-ffi.
    """
    portable = not strict and built.python != host.python
    checks = [] if not strict else [_equal("python.abi", built.python, host.python)]
    ending = ".portable" if portable else ""
    wanted, found = compiler_facts(built.wheels), compiler_facts(host.wheels)
    for name in sorted({name.removesuffix(".portable") for name in (*wanted, *found)}):
        one, other = (
            wanted.get(f"{name}{ending}", wanted.get(name, ABSENT)),
            found.get(f"{name}{ending}", found.get(name, ABSENT)),
        )
        checks.append(
            Check(
                field=f"package {name.removeprefix('cutlass_dsl.')}",
                rule=SAME_RELEASE if portable else EQUAL,
                wanted=one.describe(),
                found=other.describe(),
                passed=one.same(other),
            )
        )
    rule = EQUAL if strict else NOT_OLDER
    fits = built.tvm_ffi == host.tvm_ffi or (not strict and _not_older(built.tvm_ffi, host.tvm_ffi))
    found_text, wanted_text = host.tvm_ffi or "absent", built.tvm_ffi or "absent"
    checks.append(Check(field="tvm_ffi.version", rule=rule, wanted=wanted_text, found=found_text, passed=fits))
    return checks


def _equal(field: str, wanted: str, found: str) -> Check:
    return Check(field=field, rule=EQUAL, wanted=wanted, found=found, passed=bool(wanted) and wanted == found)


_RELEASE = re.compile(r"([0-9]+)\.([0-9]+)\.([0-9]+)(?:\.post([0-9]+))?")


def _not_older(built: str, host: str) -> bool:
    """Within a series (major.minor) of tvm-ffi the host's may be newer (decision 0003)."""
    one, other = _RELEASE.fullmatch(built), _RELEASE.fullmatch(host)
    if one is None or other is None:
        return False
    numbers = [tuple(int(part or 0) for part in match.groups()) for match in (one, other)]
    return numbers[0][:2] == numbers[1][:2] and numbers[1] >= numbers[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A file or directory that was not collected, by path below what was looked through, and why in one line."""

    path: str
    why: str


def why(error: KcacheError) -> str:
    """An error in one line, for `LeftOut`."""
    return f"{error.what}: {error.why}" if error.why else error.what


def group_may_use(digests: Collection[str]) -> bool:
    """Whether all ranks of a tuning group hold the same results: one that has others, or none, waits for its group for ever.

    Args:
        digests: of each rank, as `content_digest` of `kcache.kinds.autotune_v1` or `autotune_v2` gives it; empty for none.
    """
    return len(set(digests)) == 1 and "" not in digests


def environment_hash(environment: Mapping[str, str]) -> str:
    """The name of a store's directory (`ManagedAutotuneCache.__init__`); the schema is added where it is not there."""
    document = dict(environment) | {"cache_schema": SCHEMA}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))  # FlashInfer's `_canonical_json`: ASCII, unlike kcache's
    return hashlib.sha256(text.encode()).hexdigest()[:16]


TUNER_MODULES = ("trtllm_utils",)
"""The tuner itself loads these (`_profile_single_kernel`, 0.6.18 to 0.7.4); without one every candidate fails in silence."""


def operation_of(key: str) -> tuple[str, str]:
    """(operation, runner class) of a key, `str((custom_op, runner_class_name, shapes, extras))`; empty texts if it is none."""
    found = re.match(r"\('((?:[^'\\]|\\.)*)', '([A-Za-z_][A-Za-z0-9_]*)', \(", key)
    return (found[1], found[2]) if found else ("", "")


def json_object(data: bytes, limit: int) -> dict[str, Any]:
    """The JSON object in a file of tuning results, of at most `limit` bytes.

    Raises:
        IntegrityError: larger, torn, or something else.
    """
    if len(data) > limit:
        raise IntegrityError("it is too large", why=f"at most {limit} bytes are read")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise IntegrityError("it is no JSON, or only a part of it", why=str(error)) from error
    if not isinstance(document, dict):
        raise IntegrityError("it is no JSON object")
    return document
