"""Warm-up inside an engine's process: what a restore left missing is built before the server says that it is ready.

An engine calls `warmup()` once in every rank, before the first early return of its start (kcache/docs/engines.md). What is in
place is not touched: a second call does nothing. Whatever goes wrong is logged with its traceback and reported, and the start
goes on; the call that needs the module then raises FlashInfer's own error, if it is ever made. Without FlashInfer nothing
happens.

Importing this package imports neither torch nor FlashInfer. It is for the process that will serve; `kcache warmup`
(`kcache.workflows.warmup`) is for a process of its own.
"""

from __future__ import annotations

from kcache.warmup.report import Beat, ModuleReport, RankReport, WarmupReport
from kcache.warmup.run import warmup
from kcache.warmup.tunings import SharedTunings, share_tunings

__all__ = ["Beat", "ModuleReport", "RankReport", "SharedTunings", "WarmupReport", "share_tunings", "warmup"]
