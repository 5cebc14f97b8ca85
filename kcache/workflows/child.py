"""Runs a child script that imports something heavy, passes its progress on, bounds its time, and brings its answer.

The scripts lie in `kcache/probe/children`: a request as JSON on stdin, an answer as JSON in a file, progress lines
(`kcache-progress {json}` with `done`, `total`, `kernel`, `status`) and logs on stderr. What a child does with its request, and
what the answer means, is its caller's affair.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_PROGRESS = "kcache-progress "

Progress = Callable[[Mapping[str, Any]], None]
"""Called with `done`, `total`, `kernel`, `status` after each job, from another thread."""


def run(
    python: str,
    script: str,
    request: Callable[[str], Mapping[str, Any]],
    *,
    environ: Mapping[str, str],
    jobs: int,
    seconds_before: float,
    seconds_per_job: float,
    limit: float | None,
    progress: Progress | None,
) -> tuple[dict[str, Any] | None, str]:
    """Run a child to its end; no process of its group is left.

    Args:
        script: its name in `kcache/probe/children`.
        request: makes the request from the path of the answer's file.
        jobs: how many of its jobs it does at a time.
        seconds_before: that it may take before the first of its jobs is done, beyond what one job may take.
        limit: seconds for the whole run; where None, enough for every job to take as long as it may.

    Returns:
        The answer, or None if there is none; and how the child ended, with its last words.
    """
    path = Path(__file__).parents[1] / "probe" / "children" / script
    with tempfile.TemporaryDirectory(prefix="kcache-child-") as folder:
        answer = Path(folder) / "answer.json"
        text = json.dumps(request(str(answer)))
        child = subprocess.Popen(
            [python, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=dict(environ),
            text=True,
            errors="replace",
            start_new_session=True,
        )
        log: deque[str] = deque(maxlen=40)
        watch = _Watch(child, limit, seconds_before, seconds_per_job, jobs)
        with watch:
            reader = threading.Thread(target=_read, args=(child, log, progress, watch), daemon=True)
            reader.start()
            _send(child, text)
            child.wait()
            reader.join()
        document = _answer_document(answer)
    code = child.returncode
    ended = watch.late or (f"it was ended by signal {-code}" if code < 0 else f"it ended with exit code {code}")
    return document, f"{ended}; its last words: {' / '.join(list(log)[-3:]) or 'none'}"


def _send(child: subprocess.Popen[str], text: str) -> None:
    assert child.stdin is not None
    try:
        child.stdin.write(text)
        child.stdin.close()
    except BrokenPipeError:
        pass  # it ended before it read all; that it has no answer is told below


class _Watch:
    """Kills the child's whole process group when its time is over.

    Without a limit of its own a run may take: the time before its jobs, then, once the child has said how many there are, what
    every job may take in the worst case.
    """

    def __init__(self, child: subprocess.Popen[str], limit: float | None, before: float, per_job: float, jobs: int) -> None:
        self._child, self._limit, self._before, self._per_job, self._jobs = child, limit, before, per_job, max(1, jobs)
        self._timer: threading.Timer | None = None
        self.late = ""

    def __enter__(self) -> _Watch:
        self._start(self._before + self._per_job if self._limit is None else self._limit)
        return self

    def progressed(self, event: Mapping[str, Any]) -> None:
        if self._limit is None:
            rounds = -(-(int(event["total"]) - int(event["done"])) // self._jobs) + 1
            self._start(60.0 + rounds * self._per_job)

    def _start(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, self._end, args=(seconds,))
        self._timer.daemon = True
        self._timer.start()

    def _end(self, seconds: float) -> None:
        self.late = f"it took longer than {seconds:g} s"
        _kill_group(self._child.pid)

    def __exit__(self, *exc: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._child.poll() is None or self.late:
            _kill_group(self._child.pid)
        self._child.wait()


def _kill_group(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _read(child: subprocess.Popen[str], log: deque[str], progress: Progress | None, watch: _Watch) -> None:
    """Takes progress lines out of the child's stderr; the rest is kept for the case that it fails."""
    assert child.stderr is not None
    for line in child.stderr:
        if not line.startswith(_PROGRESS):
            log.append(line.rstrip())
            continue
        event = json.loads(line[len(_PROGRESS) :])
        watch.progressed(event)
        if progress is not None:
            progress(event)


def _answer_document(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
