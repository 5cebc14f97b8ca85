"""`kcache restore --fallback warmup`: what no store had is compiled before the server starts, which it does in any case."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kcache.cli import messages
from kcache.cli.restoring import bounded
from kcache.errors import KcacheError
from kcache.values import replace

if TYPE_CHECKING:
    from kcache.report import RestoreReport

_ENDING = 45.0
"""Seconds after the deadline in which compilers end and what is finished is installed."""


def warm_up_instead(
    report: RestoreReport,
    seconds: float,
    *,
    kinds: tuple[str, ...],
    modules: tuple[str, ...],
    python: str | None,
    archs: tuple[str, ...],
    gpus: tuple[str, ...],
    env_file: str | None,
    stores: tuple[str, ...],
    keep: str | None,
    publish_missing: bool,
    policy: str | None,
) -> RestoreReport:
    """The report with what was built of what a restore left missing, and the variables with which the server uses it.

    Args:
        report: the restore's.
        seconds: what is left of the deadline.
        kinds, modules: what was asked for; `sampling` where nothing was. Other kinds need a build manifest: not built here.
        stores: where `publish_missing` offers what was built, to the first that takes entries.
        policy: the file that says which publishers are trusted, as given.
        keep: directory in which what was built is kept as entries.
    """
    try:
        if env_file is not None or seconds <= 0:
            why = "this is another environment" if env_file is not None else "the deadline has come"
            return replace(report, warnings=(*report.warnings, f"nothing is warmed up: {why}"))
        from kcache.cli.warmup import TellBeat, say
        from kcache.warmup.standalone import OFFERED, StandaloneRequest, warm_here
        from kcache.workflows.target import TargetRequest

        sampling = "sampling" in kinds or not (kinds or modules)
        keep = keep or (OFFERED if publish_missing else None)
        request = StandaloneRequest(kinds=("sampling",) if sampling else (), modules=modules, keep=keep)
        where = TargetRequest(python=python, archs=archs, gpus=gpus)
        with bounded(seconds + _ENDING):
            done = warm_here(request, where, os.environ, deadline_seconds=seconds, heartbeat=TellBeat(), policy=policy)
    except KcacheError as error:
        return replace(report, warnings=(*report.warnings, f"nothing is warmed up: {error}"))
    except Exception as error:  # a server's start is at stake  # noqa: BLE001
        messages.unexpected("warm-up")
        return replace(report, warnings=(*report.warnings, f"nothing is warmed up: {type(error).__name__}: {error}"))
    say(done)
    warnings = [*report.warnings, *done.warnings]
    if publish_missing and done.kept:
        from pathlib import Path

        from kcache.warmup.keeping import offer_entries

        warnings.append(offer_entries(Path(done.kept), stores, os.environ))
    return replace(report, env={**report.env, **done.env}, warnings=tuple(warnings), warmup=done.warmup.to_json())
