"""A boot report as a Prometheus textfile, for node_exporter's textfile collector or any scraper of files. Pure.

The format is Prometheus' text exposition format 0.0.4: label values with backslash, quote and line feed escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kcache.workflows.boot_report import BootReport, seconds_of


def textfile(report: BootReport) -> str:
    """All metrics of a boot, each with its help and type."""
    lines: list[str] = []
    for name, text, samples in _metrics(report):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in samples]
    return "\n".join(lines) + "\n"


_Samples = list[tuple[Mapping[str, str], float]]


def _metrics(report: BootReport) -> Iterator[tuple[str, str, _Samples]]:
    restore = report.restore
    kinds: Mapping[str, Any] = restore.get("kinds", {})
    warm = [module for told in (restore.get("warmup") or {}, *report.warmups) for module in told.get("modules", [])]

    def plain(value: float) -> _Samples:
        return [({}, value)]

    yield "kcache_boot_time_seconds", "When the server was started, since the epoch.", plain(report.at)
    yield (
        "kcache_restore_status",
        "1 for what the restore came to.",
        [({"status": status}, float(restore.get("status") == status)) for status in ("hit", "partial", "miss", "error")],
    )
    yield (
        "kcache_restore_hits",
        "Entries in place, for each kind.",
        [({"kind": kind}, len(told["entries"])) for kind, told in sorted(kinds.items())],
    )
    reasons = [({"kind": kind, "reason": reason}, 1.0) for kind, told in sorted(kinds.items()) for reason in told["reasons"]]
    reasons += [({"kind": "", "reason": reason}, 1.0) for reason in restore.get("reasons", [])]
    yield "kcache_restore_misses", "1 for each reason why something is not in place.", list(reasons)
    yield "kcache_restore_downloaded_bytes", "Bytes read from stores.", plain(restore.get("bytes_downloaded", 0))
    yield "kcache_restore_http_requests", "Requests sent to stores.", plain(restore.get("http_requests", 0))
    yield "kcache_restore_seconds", "Wall time of the restore.", plain(restore.get("seconds", 0))
    yield (
        "kcache_compiler_runs_avoided",
        "Modules and kernels that were not compiled here.",
        plain(restore.get("compiles_avoided", 0)),
    )
    yield "kcache_saved_seconds", "What their builds took on the farm.", plain(restore.get("seconds_saved", 0))
    states = sorted({str(module.get("status")) for module in warm})
    yield (
        "kcache_warmup_modules",
        "What warm-ups came to, by status.",
        [({"status": status}, sum(module.get("status") == status for module in warm)) for status in states],
    )
    yield "kcache_warmup_seconds", "Wall time of warm-ups, by module, summed.", plain(sum(m.get("seconds", 0.0) for m in warm))
    yield "kcache_built_since_boot", "Modules and kernels built outside warm-ups.", plain(len(report.serving))
    yield "kcache_built_since_boot_seconds", "Wall time of these builds, as logged.", plain(seconds_of(report.serving))
    yield (
        "kcache_built_since_boot_info",
        "1 for each of them.",
        [({"module": build.name, "toolchain": build.toolchain}, 1.0) for build in report.serving],
    )


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return repr(float(value)) if float(value) != int(value) else str(int(value))
