"""What a restore did, for people and for machines. The JSON form is part of the command-line contract (README.md)."""

from __future__ import annotations

from collections.abc import Mapping

from kcache.values import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HIT = "hit"
PARTIAL = "partial"
MISS = "miss"
ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryReport:
    """One entry that is in place. `action` is `installed`, `in-place` or `repaired`; `model` is empty where it suits all."""

    fingerprint: str
    modules: tuple[str, ...]
    arch: str
    action: str
    model: str = ""
    variant: str = ""

    def to_json(self) -> dict[str, Any]:
        document = {"fingerprint": self.fingerprint, "modules": list(self.modules), "arch": self.arch, "action": self.action}
        return document | {name: text for name, text in (("model", self.model), ("variant", self.variant)) if text}


@dataclass(frozen=True, slots=True, kw_only=True)
class KindReport:
    """One cache kind. `reasons`: why anything of it is not in use, one line each."""

    status: str
    entries: tuple[EntryReport, ...] = ()
    reasons: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "entries": [entry.to_json() for entry in self.entries],
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """The outcome of one restore.

    bytes_downloaded, http_requests: as counted at the stores; a local store makes no HTTP requests.
    seconds:          wall seconds from the start of the workflow.
    compiles_avoided: modules and kernels that FlashInfer would otherwise have compiled in this environment.
    seconds_saved:    what their builds took on the farm, in seconds.
    env:              variables that the server needs.
    exit_code:        of the error, where status is `error`.
    warmup:           what `--fallback warmup` built of what is missing (`kcache.warmup.standalone`).
    """

    status: str
    kinds: Mapping[str, KindReport] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    bytes_downloaded: int = 0
    http_requests: int = 0
    seconds: float = 0.0
    compiles_avoided: int = 0
    seconds_saved: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)
    cache_root: str = ""
    proof: Mapping[str, Any] | None = None
    exit_code: int = 1
    warmup: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "kinds": {name: kind.to_json() for name, kind in sorted(self.kinds.items())},
            "reasons": list(self.reasons),
            "warnings": list(self.warnings),
            "bytes_downloaded": self.bytes_downloaded,
            "http_requests": self.http_requests,
            "seconds": round(self.seconds, 4),
            "compiles_avoided": self.compiles_avoided,
            "seconds_saved": round(self.seconds_saved, 1),
            "env": dict(self.env),
            "cache_root": self.cache_root,
            "proof": dict(self.proof) if self.proof is not None else None,
            **({"warmup": dict(self.warmup)} if self.warmup is not None else {}),
            **({"exit_code": self.exit_code} if self.status == ERROR else {}),
        }


def overall(kinds: Mapping[str, KindReport]) -> str:
    """One status for all kinds: hit only if every kind is, error if nothing was hit and something failed."""
    statuses = {kind.status for kind in kinds.values()}
    if statuses == {HIT}:
        return HIT
    if HIT in statuses or PARTIAL in statuses:
        return PARTIAL
    return ERROR if ERROR in statuses else MISS
