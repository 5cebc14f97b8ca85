"""What `kcache restore` does: it stands in a container's entrypoint. With a command, it always ends in that command."""

from __future__ import annotations

import os
import sys
import time
from contextlib import contextmanager

from kcache.cli import exit_codes, messages, progress
from kcache.errors import KcacheError, UnavailableError, UsageError
from kcache.report import ERROR, HIT, MISS, PARTIAL

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kcache.report import RestoreReport
    from kcache.workflows.target import TargetRequest

HANG_GRACE = 1.0
"""Seconds after the deadline in which the workflow's own bounds should have ended it."""

CODES = {HIT: exit_codes.DONE, PARTIAL: exit_codes.PARTIAL, MISS: exit_codes.MISS}
WARMUP = "warmup"
FALLBACKS = ("none", WARMUP)
HELP = "See `kcache restore --help`."
NAMED = 8
"""Modules, or reasons, that the line names."""


def restore(
    *,
    stores: tuple[str, ...],
    kinds: tuple[str, ...],
    modules: tuple[str, ...],
    models: tuple[str, ...],
    archs: tuple[str, ...],
    gpus: tuple[str, ...],
    python: str | None,
    env_file: str | None,
    policy: str | None,
    prove: bool,
    deadline: str,
    lock_timeout: str,
    fallback: str,
    keep: str | None,
    publish_missing: bool,
    strict: bool,
    strict_match: bool,
    into_package: bool,
    shell: bool,
    as_json: bool,
    server: tuple[str, ...],
) -> None:
    """Runs `kcache restore` and ends the process, or becomes `server`. The arguments are the options of `kcache.cli.restore`.

    Raises:
        UsageError: they contradict each other, and there is no server to start all the same.
    """
    try:
        if as_json and shell:
            raise UsageError("--json and --shell both want standard output: give one of them", remedy=HELP)
        seconds, lock_seconds = seconds_of(deadline, "--deadline"), seconds_of(lock_timeout, "--lock-timeout")
        if fallback not in FALLBACKS:
            raise UsageError(f"--fallback {fallback!r} is not known", remedy=f"Write {' or '.join(FALLBACKS)}. {HELP}")
        if (keep is not None or publish_missing) and fallback != WARMUP:
            raise UsageError("--keep and --publish-missing are for what --fallback warmup builds", remedy=HELP)
    except UsageError as error:
        if not server or strict:
            raise
        shell = shell and not as_json
        report = _failed(error)
    else:
        begun = time.monotonic()
        try:
            report = _run(
                stores=stores,
                kinds=kinds,
                modules=modules,
                models=models,
                archs=archs,
                gpus=gpus,
                python=python,
                env_file=env_file,
                policy=policy,
                prove=prove,
                deadline=seconds / 2 if fallback == WARMUP else seconds,  # a store that hangs must leave time to compile
                lock_timeout=lock_seconds,
                strict_match=strict_match,
                into_package=into_package,
            )
        except Exception as error:  # a server's start is at stake  # noqa: BLE001
            report = _failed(error)
        if fallback == WARMUP and report.status != HIT:
            from kcache.cli.fallback import warm_up_instead

            left = seconds - (time.monotonic() - begun)
            report = warm_up_instead(
                report,
                left,
                kinds=kinds,
                modules=modules,
                python=python,
                archs=archs,
                gpus=gpus,
                env_file=env_file,
                stores=stores,
                keep=keep,
                publish_missing=publish_missing,
                policy=policy,
            )
    if server or shell:
        from kcache.workflows.boot import note_boot

        report = note_boot(report, server, os.environ)
    try:
        _say(report, as_json=as_json, shell=shell)
    except (OSError, ValueError) as error:  # standard output is closed, full, or nobody reads it
        messages.fail(f"the result could not be printed: {error}")
        if not server:
            sys.exit(exit_codes.FAILED)
    if server and (report.status == HIT or warm(report) or not strict):
        from kcache.cli.start import start

        start(server, report.env)
    sys.exit(CODES.get(report.status, report.exit_code))


def warm(report: RestoreReport) -> bool:
    """Whether everything that the restore left missing was built instead."""
    return report.warmup is not None and report.warmup["status"] == "warm"


def _run(
    *,
    stores: tuple[str, ...],
    kinds: tuple[str, ...],
    modules: tuple[str, ...],
    models: tuple[str, ...],
    archs: tuple[str, ...],
    gpus: tuple[str, ...],
    python: str | None,
    env_file: str | None,
    policy: str | None,
    prove: bool,
    deadline: float,
    lock_timeout: float,
    strict_match: bool,
    into_package: bool,
) -> RestoreReport:
    from kcache.workflows.entrypoint import restore_here
    from kcache.workflows.resolve import Wanted
    from kcache.workflows.restore import RestoreRequest
    from kcache.workflows.target import TargetRequest

    asked = Wanted(kinds=kinds, modules=modules, models=models)
    watch = progress.drawn if progress.is_wanted() else None
    request = RestoreRequest(
        asked=asked, strict_match=strict_match, lock_timeout=lock_timeout, into_package=into_package, watch=watch
    )
    where = TargetRequest(python=python, archs=archs, gpus=gpus, env_file=env_file)
    with bounded(deadline):
        report = restore_here(request, where, stores=stores, environ=os.environ, deadline_seconds=deadline, policy=policy)
    return _proven(report, where, policy) if prove else report


def _proven(report: RestoreReport, where: TargetRequest, policy: str | None) -> RestoreReport:
    """The report with its proof. What was restored stays offered where the proof could not be had."""
    from kcache.errors import KcacheError
    from kcache.values import replace
    from kcache.workflows.entrypoint import with_proof

    try:
        return with_proof(report, where, os.environ, policy)
    except KcacheError as error:
        return replace(report, status=ERROR, reasons=(*report.reasons, str(error)), exit_code=error.exit_code)


@contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Ends whatever hangs (a dead network file system, a driver that does not answer) a little after the deadline."""
    import signal

    def ring(_signal: int, _frame: object) -> None:
        raise UnavailableError("restore hung beyond its deadline", why=f"{seconds:g} s were allowed", remedy="Raise --deadline.")

    before = signal.signal(signal.SIGALRM, ring)
    # Again and again: a store that hangs is one of several, and so may the next one.
    signal.setitimer(signal.ITIMER_REAL, seconds + HANG_GRACE, HANG_GRACE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _failed(error: Exception) -> RestoreReport:
    """The report of a restore that ended in an exception: one line for people, the traceback for the log."""
    from kcache.cli.main import needed_anyway
    from kcache.report import RestoreReport

    if isinstance(error, KcacheError):
        reason, code = str(error), error.exit_code
    else:
        messages.unexpected("restore")
        reason, code = f"{type(error).__name__}: {error}", exit_codes.FAILED
    return RestoreReport(status=ERROR, reasons=(reason,), env=needed_anyway(), exit_code=code)


def seconds_of(text: str, option: str) -> float:
    """`30`, `30s`, `500ms`, `2m` as seconds."""
    units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
    number = text.rstrip("msh")
    try:
        seconds = float(number) * units[text[len(number) :] or "s"]
    except (ValueError, KeyError):
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise UsageError(f"{option} {text!r} is not a time", remedy=f"Write 30s, 2m or 500ms. {HELP}")
    return seconds


def _say(report: RestoreReport, *, as_json: bool, shell: bool) -> None:
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(report.to_json())
    if shell:
        import shlex

        for name, value in report.env.items():
            print(f"export {name}={shlex.quote(value)}", flush=True)
    messages.say(_summary(report), at=messages.NORMAL if report.status == HIT else messages.QUIET)
    for line in report.warnings:
        messages.say(line)


def _summary(report: RestoreReport) -> str:
    entries = [entry for kind in report.kinds.values() for entry in kind.entries]
    modules = _first(sorted({module for entry in entries for module in entry.modules}), ", ")
    seconds = f"{report.seconds * 1000:.0f} ms"
    reasons = [*report.reasons, *(reason for kind in report.kinds.values() for reason in kind.reasons)]
    why = _first(reasons, "; ")
    if report.status == HIT:
        new = any(entry.action != "in-place" for entry in entries)
        done = "restored" if new else "already in place"
        return f"{done}: {modules} in {seconds}; {report.seconds_saved:.0f} s of compiling avoided"
    if warm(report):
        return f"not everything was restored ({why}); what was missing is compiled and installed"
    if report.status == PARTIAL:
        return f"partly restored ({modules}) in {seconds}; the rest will be compiled when first used: {why}"
    if report.status == MISS:
        return f"nothing restored; kernels will be compiled when first used: {why}"
    return f"restore failed; kernels will be compiled when first used: {why}"


def _first(texts: Sequence[str], between: str) -> str:
    """One line can be read at a glance; `--json` has them all."""
    return between.join([*texts[:NAMED], *([f"and {len(texts) - NAMED} more"] if len(texts) > NAMED else [])])
