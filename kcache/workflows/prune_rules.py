"""Which entries go and which stay, and why. Pure: whoever prunes says what there is, and removes what is told here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from kcache.errors import UsageError

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is to go. An entry goes if any rule says so; with none, no whole entry does.

    older_than: seconds since it was installed. unused_for: seconds since a restore last gave it to a server.
    max_bytes:  for all entries together; the least recently used go first.
    versions:   FlashInfer versions, `*` matches anything.
    """

    older_than: float | None = None
    unused_for: float | None = None
    max_bytes: int | None = None
    versions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One entry. Times in seconds since the epoch, None where nobody knows; `held` says why it must stay, empty if nothing
    holds it; `broken` why it is of no use, empty if it is whole."""

    fingerprint: str
    title: str
    version: str
    size: int
    made: float | None
    used: float | None
    held: str = ""
    broken: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of an entry, and why, in one sentence without a full stop."""

    candidate: Candidate
    remove: bool
    why: str

    def to_json(self) -> dict[str, Any]:
        return {
            "fingerprint": self.candidate.fingerprint,
            "title": self.candidate.title,
            "size": self.candidate.size,
            "status": "removed" if self.remove else "kept",
            "reason": self.why,
        }


def decide(candidates: Sequence[Candidate], rules: Rules, now: float) -> list[Verdict]:
    """A verdict for each, those that go first, each group in the order of last use.

    A time in the future (a clock that was set back) is taken for now: such an entry is young.
    """
    ordered = sorted(candidates, key=lambda one: (one.used or one.made or 0.0, one.fingerprint))
    reasons = {one.fingerprint: _reason(one, rules, now) for one in ordered}
    if rules.max_bytes is not None:
        left = sum(one.size for one in ordered if one.held or not reasons[one.fingerprint])
        for one in ordered:
            if left > rules.max_bytes and not one.held and not reasons[one.fingerprint]:
                reasons[one.fingerprint] = f"all together are larger than {rules.max_bytes} bytes, and others were used later"
                left -= one.size
    verdicts = [_verdict(one, reasons[one.fingerprint]) for one in ordered]
    return sorted(verdicts, key=lambda verdict: not verdict.remove)


def _verdict(one: Candidate, reason: str) -> Verdict:
    if one.held:
        return Verdict(candidate=one, remove=False, why=one.held)
    return Verdict(candidate=one, remove=bool(reason), why=reason or "no rule asks for it to go")


def _reason(one: Candidate, rules: Rules, now: float) -> str:
    if one.broken:
        return one.broken
    if any(fnmatchcase(one.version, pattern) for pattern in rules.versions):
        return f"it is for FlashInfer {one.version}"
    for limit, moment, verb in ((rules.older_than, one.made, "made"), (rules.unused_for, one.used, "last used")):
        if limit is not None and moment is not None and now - moment > limit:
            return f"it was {verb} {_days(now - moment)} ago"
    return ""


def _days(seconds: float) -> str:
    return f"{seconds / 86400:.1f} days" if seconds >= 86400 else f"{seconds / 3600:.1f} hours"


def parse_duration(text: str) -> float:
    """Seconds from `90s`, `15m`, `12h`, `30d`, `2w`.

    Raises:
        UsageError: anything else.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smhdw])", text)
    if match is None:
        raise UsageError(f"{text!r} is no duration", remedy="Write a number and one of s, m, h, d, w, such as 30d.")
    return float(match[1]) * _UNITS[match[2]]


def parse_size(text: str) -> int:
    """Bytes from `500M`, `20G`, `0`.

    Raises:
        UsageError: anything else.
    """
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMGT]?)", text)
    if match is None:
        raise UsageError(f"{text!r} is no size", remedy="Write a number of bytes, or one with K, M, G or T, such as 20G.")
    return int(float(match[1]) * _SIZES[match[2]])
