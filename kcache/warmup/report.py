"""What a warm-up did: values for an engine, and their JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RESTORED = "restored"
"""FlashInfer loaded it as it was restored (or shipped); no compiler and no ninja ran."""
PRESENT = "present"
"""Built earlier; ninja found nothing to do, or this process has it already."""
BUILT = "built"
FAILED = "failed"
LATE = "late"
"""The deadline came first. Objects that were finished are kept for the next run."""
SKIPPED = "skipped"
"""Not for this host, or not built because another rank has shown that it cannot be."""

READY = (RESTORED, PRESENT, BUILT)

WARM, PARTIAL, NOTHING = "warm", "partial", "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReport:
    """One module of FlashInfer, or the kernels of one model. `seconds` is wall time, waiting for another process included.

    reason: why it is not ready, or was built although it was there, in a line; else empty.
    """

    name: str
    status: str
    seconds: float = 0.0
    reason: str = ""

    @property
    def ready(self) -> bool:
        return self.status in READY

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "status": self.status, "seconds": round(self.seconds, 3), "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank of the group. `state`: `done`, `late`, `dead` (its pulse stopped) or `absent` (it never called)."""

    rank: int
    state: str
    ready: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "state": self.state, "ready": list(self.ready)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Said while a warm-up works. `doing` are the modules in work; `done` of `total` are finished; `elapsed` in seconds."""

    elapsed: float
    doing: tuple[str, ...]
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupReport:
    """What became of everything that was asked for.

    reasons: what kept anything from being tried at all, such as that there is no FlashInfer.
    ranks:   empty for a process on its own.
    agreed:  what is ready on every rank, as all ranks were told alike; on a process of its own, what is ready.
    """

    modules: tuple[ModuleReport, ...]
    reasons: tuple[str, ...] = ()
    ranks: tuple[RankReport, ...] = ()
    agreed: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def status(self) -> str:
        """`warm`: all is ready. `partial`: some. `failed`: nothing is. `nothing`: there was nothing to warm up."""
        wanted = [module for module in self.modules if module.status != SKIPPED]
        if not wanted:
            return FAILED if self.reasons and self.modules else NOTHING
        ready = sum(module.ready for module in wanted)
        return WARM if ready == len(wanted) and not self.reasons else PARTIAL if ready else FAILED

    def module(self, name: str) -> ModuleReport | None:
        return next((module for module in self.modules if module.name == name), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "modules": [module.to_json() for module in self.modules],
            "reasons": list(self.reasons),
            "ranks": [rank.to_json() for rank in self.ranks],
            "agreed": list(self.agreed),
            "seconds": round(self.seconds, 3),
        }
