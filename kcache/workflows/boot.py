"""The record of one boot: what a restore handed to a server, for `kcache report` to compare with what was built since.

    <root>/v1/boots/<host>-<pid>.json      what was restored, and when the server was started
    <root>/v1/boots/<host>-<pid>.builds    FlashInfer's own line for each build, in versions that write one
    <root>/v1/boots/<host>-<pid>.warmups   a line for each `kcache.warmup.warmup()` of the server's processes

It is written on the way of every server's start, so nothing here costs time, raises, or keeps the server from starting: where
nothing can be written there is no record, and `kcache report` says so. A host and pid that come again replace their record.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from kcache import fsops
from kcache.errors import KcacheError
from kcache.probe.caches import cache_root
from kcache.report import RestoreReport
from kcache.values import replace

FORMAT = "kcache.boot/1"
BOOT = "KCACHE_BOOT"
"""The server's variable with the path of its record."""
BUILD_LOG = "FLASHINFER_JIT_BUILD_LOG"
"""FlashInfer appends a JSON line for each build to the file that it names (flashinfer/jit/core.py, _record_jit_build, 0.7.4;
0.6.18 to 0.7.2 do not know it)."""
ROOM = "boots"
KEPT = 256
"""Records of one cache; the oldest go first."""


def note_boot(report: RestoreReport, server: Sequence[str], environ: Mapping[str, str]) -> RestoreReport:
    """Writes the record of a boot that is about to happen.

    Args:
        server: its command; empty where a shell starts it. Only the program is written down: tokens stand among arguments.

    Returns:
        The report with the variables by which the server's own builds come to be known. Unchanged where nothing can be written.
    """
    try:
        place = cache_root(environ, os.geteuid())
        root = report.cache_root or place.path
        if not root:
            return report
        room = Path(root) / "v1" / ROOM
        fsops.ensure_directory(room, root=Path(root))
        record = room / f"{os.uname().nodename}-{os.getpid()}.json"
        log = environ.get(BUILD_LOG) or str(record.with_suffix(".builds"))
        for old in (record.with_suffix(".builds"), record.with_suffix(".warmups")):
            old.unlink(missing_ok=True)
        document = {
            "format": FORMAT,
            "at": time.time(),
            "host": os.uname().nodename,
            "server": list(server[:1]),
            "workspace": report.env.get("FLASHINFER_WORKSPACE_BASE") or place.base or "",
            "build_log": log,
            "restore": report.to_json(),
        }
        fsops.write_bytes(record, json.dumps(document).encode(), durable=False)
        _forget(room)
    except (OSError, ValueError, KcacheError):
        return report
    return replace(report, env={**report.env, BOOT: str(record), BUILD_LOG: log})


def _forget(room: Path) -> None:
    """Removes the oldest records where there are too many."""
    records = [name for name in os.listdir(room) if name.endswith(".json")]  # noqa: PTH208
    if len(records) <= KEPT:
        return
    oldest = sorted((room / name for name in records), key=lambda path: path.stat().st_mtime)
    for record in oldest[: len(records) - KEPT]:
        for path in (record, record.with_suffix(".builds"), record.with_suffix(".warmups")):
            path.unlink(missing_ok=True)
