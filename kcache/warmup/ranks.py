"""Ranks that start together: one of a node builds, the others wait, and nobody serves before all know the same.

Each rank writes its state, a small document, into the store that `torch.distributed` was initialised with, and reads those of
the others: what it is doing, what it has, and a counter that shows that it lives. No collective call is made, so a rank that
died, hangs or never calls cannot hold the others for longer than the times that they were given; a store that does not answer
makes a rank go on alone. All store calls are made by one thread, and nobody waits for that thread.

Who leads is no promise: the file lock of a module (`kcache.warmup.locks`) keeps two from building it. What is agreed is one: the
first rank that has seen all others writes the verdict, and every rank takes that one.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from kcache.warmup.report import RankReport
from kcache.warmup.stopping import Stop

logger = logging.getLogger("kcache.warmup")

DONE, LATE, DEAD, ABSENT = "done", "late", "dead", "absent"

_TOLD = "told"
"""The state of a rank that is done and knows the verdict."""

_SETTLE = 0.5
"""Seconds in which ranks that start together see each other."""

_PART = 1 << 20
"""Bytes of one value in the store: the servers of torch's stores refuse values of 8 MiB."""

_rounds: dict[str, int] = {}
"""How many warm-ups this process has made with a group: the ranks of one must not read those of another."""


class Ranks:
    """One warm-up of one group, as one rank sees it. A context: within, its pulse beats."""

    def __init__(self, store: Any, rank: int, size: int, *, stall: float, join: float) -> None:
        self.rank, self.size = rank, size
        self._store, self._stall, self._join = store, stall, join
        self._interval = max(0.1, size * 0.02)
        self._began = time.monotonic()
        self._changed = threading.Condition()
        self._mine: dict[str, Any] = {"beat": 0, "state": "waiting", "place": "", "problems": {}, "ready": []}
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}
        self._verdict: dict[str, Any] | None = None
        self._proposed: str | None = None
        self._offering, self._taken = b"", b""
        self._lost = False  # whether the store answered last time
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._pulse, name="kcache-warmup-pulse", daemon=True)

    @classmethod
    def of(cls, group: Any, *, stall: float, join: float) -> Ranks:
        """The ranks of a `torch.distributed` group (all ranks where None); nobody else where that is not in use.

        Raises:
            Exception: whatever torch raises; there is no store, or this process is not of the group.
        """
        torch: Any = sys.modules.get("torch")
        distributed = getattr(torch, "distributed", None)
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return no_ranks()
        members = sorted(distributed.get_process_group_ranks(group or distributed.group.WORLD))
        if len(members) < 2:
            return no_ranks()
        name = "-".join(map(str, members))
        _rounds[name] = _rounds.get(name, 0) + 1
        base = distributed.distributed_c10d._get_default_store()
        store = distributed.PrefixStore(f"kcache-warmup/{name}/{_rounds[name]}", base)
        return cls(store, members.index(distributed.get_rank()), len(members), stall=stall, join=join)

    def __enter__(self) -> Ranks:
        if self.size > 1:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)  # its last words; a store that hangs keeps nobody

    def lead(self, place: str, stop: Stop) -> dict[str, str]:
        """Waits while another rank builds at this place; returns once it is this rank's turn.

        Args:
            place: host and directory in which modules are built.

        Returns:
            Modules that a rank at this place could not build, with the reason: trying again would only take time.
        """
        if self.size < 2:
            return {}
        self._set(place=place)
        until = time.monotonic() + _SETTLE
        with self._changed:
            while not stop.come and (time.monotonic() < until or self._waits(place)):
                self._changed.wait(0.1)
        self._set(state="building")
        with self._changed:
            others = [state for state, _ in self._seen.values() if state["place"] == place]
        return {name: f"another rank of this node: {reason}" for state in others for name, reason in state["problems"].items()}

    def _waits(self, place: str) -> bool:
        """Whether a rank that lives builds here, or one with a lower number is about to."""
        for rank, (state, _) in self._seen.items():
            if state["place"] == place and self._lives(rank):
                if state["state"] == "building" and (rank < self.rank or self._first() != self.rank):
                    return True
                if state["state"] == "waiting" and rank < self.rank:
                    return True
        return False

    def _first(self) -> int:
        return min([self.rank, *(rank for rank in self._seen if self._lives(rank))])

    def _lives(self, rank: int) -> bool:
        state, at = self._seen[rank]
        return not _done(state) and time.monotonic() - at < self._stall

    def tell(self, ready: tuple[str, ...], problems: Mapping[str, str]) -> None:
        """Tells the others what is ready here, and what could not be built."""
        self._set(ready=list(ready), problems=dict(problems))

    def offer(self, data: bytes, stop: Stop) -> bytes:
        """One rank's bytes for all: those of the first rank that has some and lives; empty where none has.

        Args:
            data: this rank's; empty where it has none.
        """
        if self.size < 2:
            return data
        self._set(offers=bool(data))
        with self._changed:
            while not stop.come and not self._taken:
                leader = self._first_with_bytes(bool(data))
                if leader == self.rank:
                    self._offering = data
                elif leader is None:
                    break
                self._changed.wait(0.1)
            return self._taken

    def _first_with_bytes(self, mine: bool) -> int | None:
        """The rank whose bytes count, -1 while that is not known, None where no rank has any."""
        for rank in range(self.size):
            if rank == self.rank:
                if mine:
                    return rank
            elif rank not in self._seen:
                if self._awaited(rank):
                    return -1
            else:
                state = self._seen[rank][0]
                if "offers" not in state and self._lives(rank):
                    return -1
                if state.get("offers") and (self._lives(rank) or _done(state)):
                    return rank
        return None

    def finish(self, stop: Stop) -> None:
        """The barrier: waits until every rank is done, dead, or absent for too long, or the end comes; then all know the same."""
        if self.size < 2:
            return
        self._set(state=DONE)
        with self._changed:
            while not stop.come and any(self._awaited(rank) for rank in range(self.size)):
                self._changed.wait(0.1)
            self._proposed = json.dumps(self._proposal())
            until = time.monotonic() + min(self._stall, 5.0)
            while self._verdict is None and time.monotonic() < until:
                self._changed.wait(0.1)
        if self._verdict is not None:
            self._set(state=_TOLD)
            with self._changed:  # the rank that keeps the store may end after this: the others must have read it
                while (
                    not self._lost
                    and time.monotonic() < until
                    and any(state["state"] == DONE and time.monotonic() - at < self._stall for state, at in self._seen.values())
                ):
                    self._changed.wait(0.1)

    def _awaited(self, rank: int) -> bool:
        if rank == self.rank:
            return False
        if rank in self._seen:
            return self._lives(rank)
        return time.monotonic() - self._began < self._join

    def _proposal(self) -> dict[str, Any]:
        """What this rank has seen: every rank's state and what is ready on all that are done."""
        states: dict[str, str] = {}
        ready: dict[str, list[str]] = {}
        for rank in range(self.size):
            found = self._mine if rank == self.rank else self._seen.get(rank, (None, 0.0))[0]
            if found is None:
                states[str(rank)] = ABSENT
            elif _done(found):
                states[str(rank)] = DONE
            else:
                states[str(rank)] = LATE if self._lives(rank) else DEAD
            ready[str(rank)] = list(found["ready"]) if found is not None else []
        # A dead rank serves no more. What one has that is late, or that never called, is not known: then nothing is agreed.
        serving = [set(ready[rank]) if state == DONE else set() for rank, state in states.items() if state != DEAD]
        return {"states": states, "ready": ready, "agreed": sorted(set.intersection(*serving))}

    def verdict(self, ready: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[RankReport, ...]]:
        """What is agreed, and every rank; for a rank on its own, or one that was not told, what it has itself.

        A rank that does not know the verdict agrees to nothing: it cannot know what the others do.
        """
        if self.size < 2:
            return ready, ()
        found = self._verdict
        if found is None:
            return (), ()
        ranks = tuple(
            RankReport(rank=int(rank), state=state, ready=tuple(found["ready"].get(rank, ())))
            for rank, state in found["states"].items()
        )
        return tuple(found["agreed"]), ranks

    def _set(self, **changes: Any) -> None:
        with self._changed:
            self._mine = {**self._mine, **changes}

    def _pulse(self) -> None:
        """Writes this rank's state and reads the others', until the warm-up is over."""
        failures = 0
        while True:
            last = self._ended.is_set()
            try:
                self._exchange()
                self._lost, failures = False, 0
            except Exception as error:  # the store is gone, with the rank that kept it  # noqa: BLE001
                self._lost, failures = True, failures + 1
                if failures == 1:
                    logger.warning("the store of torch.distributed does not answer: %s", error)
                if failures > 20:
                    return
            with self._changed:
                self._changed.notify_all()
            if last:
                return
            self._ended.wait(self._interval)

    def _exchange(self) -> None:
        with self._changed:
            self._mine["beat"] += 1
            mine, proposed = json.dumps(self._mine), self._proposed
        self._store.set(f"state/{self.rank}", mine)
        if "offers" in self._mine and not self._taken:
            self._exchange_bytes()
        for rank in range(self.size):
            if rank == self.rank or (rank in self._seen and self._seen[rank][0]["state"] == _TOLD):
                continue
            key = f"state/{rank}"
            if not self._store.check([key]):
                continue
            state = json.loads(self._store.get(key))
            with self._changed:
                if rank not in self._seen or self._seen[rank][0]["beat"] != state["beat"]:
                    self._seen[rank] = (state, time.monotonic())
        if proposed is not None and self._verdict is None:
            told = json.loads(self._store.compare_set("verdict", "", proposed))
            with self._changed:
                self._verdict = told

    def _exchange_bytes(self) -> None:
        """Gives what this rank offers, unless another was first, and takes what was given."""
        if self._offering and not self._store.check(["offer"]):
            parts = [self._offering[start : start + _PART] for start in range(0, len(self._offering), _PART)]
            for number, part in enumerate(parts):
                self._store.set(f"offer/{self.rank}/{number}", part)
            self._store.compare_set("offer", "", f"{self.rank} {len(parts)}")
        if self._store.check(["offer"]):
            rank, count = map(int, self._store.get("offer").split())
            taken = b"".join(self._store.get(f"offer/{rank}/{number}") for number in range(count))
            with self._changed:
                self._taken = taken


def _done(state: Mapping[str, Any]) -> bool:
    return state["state"] in (DONE, _TOLD)


def no_ranks() -> Ranks:
    """A process on its own."""
    return Ranks(None, 0, 1, stall=0.0, join=0.0)
