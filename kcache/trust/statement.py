"""What a signature says: in-toto statements (version 1) about a manifest or an index. Pure.

About a manifest the predicate is SLSA provenance (https://slsa.dev/provenance/v1): what was asked to be built, from which
sources, by which builder, with which toolchain. The subject is the manifest's digest and, for other tools, the archive's;
everything else about the files follows from the manifest. About an index it is kcache's own: serial number, when it was made,
when it ends.
"""

from __future__ import annotations

from typing import Any

from kcache.errors import TrustError
from kcache.index import IndexEntry
from kcache.manifest import Manifest
from kcache.values import dataclass

STATEMENT = "https://in-toto.io/Statement/v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
INDEX = "urn:kcache:index:1"
BUILD_TYPE = "urn:kcache:build:1"
BUILDER = "urn:kcache:builder"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexClaim:
    """What a signed index says of itself. `serial` only rises; `made` and `expires` in seconds since 1970."""

    serial: int
    made: int
    expires: int


def subjects(entry: IndexEntry) -> list[dict[str, Any]]:
    """What a statement about an entry must be about, exactly."""
    return [
        {"name": entry.key.fingerprint, "digest": {"sha256": entry.manifest.sha256.removeprefix("sha256:")}},
        {"name": "archive", "digest": {"sha256": entry.archive.sha256.removeprefix("sha256:")}},
    ]


def about_entry(manifest: Manifest, entry: IndexEntry) -> dict[str, Any]:
    """The statement about one entry. It holds nothing but what the manifest holds, so that signing again gives the same bytes."""
    key, made = manifest.key, dict(manifest.provenance)
    source = {name: made.pop(name) for name in ("source", "flashinfer_commit") if name in made}
    version = str(made.pop("kcache", ""))
    inputs: list[dict[str, Any]] = [{"uri": f"pkg:pypi/flashinfer-python@{key.ingredients['flashinfer.version']}"}]
    for name in ("flashinfer.sources", "cutlass_dsl.wheels"):
        if name in key.ingredients:
            inputs.append({"uri": f"urn:kcache:{name}", "digest": {"sha256": key.ingredients[name].removeprefix("sha256:")}})
    return {
        "_type": STATEMENT,
        "subject": subjects(entry),
        "predicateType": PROVENANCE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": key.to_json(),
                "internalParameters": {"source": source, "toolchain": made},
                "resolvedDependencies": inputs,
            },
            "runDetails": {"builder": {"id": BUILDER, "version": {"kcache": version}}},
        },
    }


def check_entry(statement: dict[str, Any], entry: IndexEntry, what: str) -> None:
    """Refuses a statement that is not about this very entry.

    Raises:
        TrustError
    """
    if (statement.get("_type"), statement.get("predicateType")) != (STATEMENT, PROVENANCE):
        raise TrustError(f"{what} is a statement about something else than an entry")
    if statement.get("subject") != subjects(entry):
        raise TrustError(f"{what} is the signature of another entry", remedy="Do not use this store: somebody changed it.")


def about_index(path: str, sha256: str, claim: IndexClaim) -> dict[str, Any]:
    """The statement about an index whose bytes have the digest `sha256`."""
    return {
        "_type": STATEMENT,
        "subject": [{"name": path, "digest": {"sha256": sha256.removeprefix("sha256:")}}],
        "predicateType": INDEX,
        "predicate": {"serial": claim.serial, "made": claim.made, "expires": claim.expires},
    }


def check_index(statement: dict[str, Any], path: str, sha256: str, what: str) -> IndexClaim:
    """What a statement says of this very index.

    Raises:
        TrustError: it is about something else, or malformed.
    """
    predicate = statement.get("predicate")
    numbers = predicate if isinstance(predicate, dict) else {}
    names = ("serial", "made", "expires")
    if set(numbers) != set(names) or not all(type(numbers[name]) is int and 0 <= numbers[name] < 1 << 62 for name in names):
        raise TrustError(f"{what} is no statement about an index")
    claim = IndexClaim(serial=numbers["serial"], made=numbers["made"], expires=numbers["expires"])
    if statement != about_index(path, sha256, claim):
        raise TrustError(f"{what} is the signature of another index", remedy="Do not use this store: somebody changed it.")
    return claim


def signature_path(sha256: str, key_id: str) -> str:
    """Where one key's signature of a manifest or an index lies in a store: named by the digest of what is signed, and by the key,
    so that whoever trusts a key finds its signature without a listing, and publishers never write to one name."""
    hexdigest = sha256.removeprefix("sha256:")
    return f"{signatures_directory(sha256)}/{hexdigest}.{key_id[:16]}.json"


def signatures_directory(sha256: str) -> str:
    """The directory of the signatures of a manifest or an index."""
    return f"v1/signatures/{sha256.removeprefix('sha256:')[:2]}"
