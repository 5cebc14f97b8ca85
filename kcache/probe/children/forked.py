"""Runs jobs in processes forked from this one, so that all share what it has imported, and one bad job loses only itself.

For child processes that have imported something heavy (FlashInfer: seconds) and have no threads of their own that hold locks. A
job is a name; its result is a JSON object. A worker does one job after another until it is told no more; one that dies, or takes
longer than the limit and is killed, is replaced. Stdlib only; imports nothing of kcache.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Result = dict[str, Any]
Job = Callable[[str], Result]


class Worker:
    """One process. `name` is the job that it was given last."""

    def __init__(self, job: Job) -> None:
        self.channel, other = socket.socketpair()
        self.name, self.started = "", 0.0
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid:
            other.close()
            return
        try:
            self.channel.close()
            gc.disable()  # a compilation makes millions of objects and few cycles, and the process does not live long
            with other.makefile("rw") as lines:
                for line in lines:
                    lines.write(json.dumps(job(line.strip())) + "\n")
                    lines.flush()
        finally:
            os._exit(0)

    def give(self, name: str) -> None:
        self.name, self.started = name, time.monotonic()
        self.channel.sendall(f"{name}\n".encode())

    def result(self) -> Result:
        """What the worker says of its job; waits until it has said all of it, or is gone."""
        text = b""
        while not text.endswith(b"\n"):
            if not (chunk := self.channel.recv(65536)):
                code = os.waitstatus_to_exitcode(self.end())
                how = f"signal {-code}" if code < 0 else f"exit code {code}"
                return {"status": "crashed", "error": f"the process that did this ended with {how}"}
            text += chunk
        return dict(json.loads(text))

    def end(self, kill: bool = False) -> int:
        """Let the process go and wait for it; its wait status."""
        self.channel.close()
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        pid, self.pid = self.pid, 0
        return os.waitpid(pid, 0)[1]


def following(waiting: Sequence[str], kind: Callable[[str], str], last: str, elsewhere: Sequence[str]) -> str:
    """The job that a process should do next: one of the kind that it did last, for which it is prepared; else the first of a kind
    that no other process is at; else the first."""
    kinds = [kind(last)] if last else []
    busy = {kind(name) for name in elsewhere}
    own = [name for name in waiting if kind(name) in kinds]
    return (own or [name for name in waiting if kind(name) not in busy] or list(waiting))[0]


def run(
    names: Sequence[str],
    job: Job,
    *,
    jobs: int,
    limit: float,
    done: Callable[[str, Result], None],
    kind: Callable[[str], str] = lambda name: "",
) -> None:
    """Do every job, at most `jobs` at a time, in the order given but for their kinds (`following`).

    Args:
        limit: seconds that one job may take; then its process is killed.
        done: called in this process with each job's name and result: what `job` returned, or `status` `crashed` or `timeout`
            with an `error`; `seconds` is added.
        kind: of a job: jobs of one kind are cheaper one after the other in one process.
    """
    waiting, idle, busy = list(names), list[Worker](), list[Worker]()
    gc.freeze()
    while waiting or busy:
        while waiting and len(busy) < max(1, jobs):
            worker = idle.pop() if idle else Worker(job)
            name = following(waiting, kind, worker.name, [other.name for other in busy])
            waiting.remove(name)
            worker.give(name)
            busy.append(worker)
        patience = min(worker.started for worker in busy) + limit - time.monotonic()
        ready, _, _ = select.select([worker.channel for worker in busy], [], [], max(0.0, patience))
        for worker in list(busy):
            seconds = time.monotonic() - worker.started
            if worker.channel in ready:
                result = worker.result()
            elif seconds >= limit:
                worker.end(kill=True)
                result = {"status": "timeout", "error": f"took longer than {limit:g} s"}
            else:
                continue
            busy.remove(worker)
            if worker.pid:
                idle.append(worker)
            done(worker.name, result | {"seconds": round(seconds, 3)})
    for worker in idle:
        worker.end(kill=True)  # a later worker holds a copy of an earlier one's channel: closing ours would not end it
