"""One request stream for a node: its ranks ask a far store one after the other, and what one was told holds for all (case B38).

A rank that reads an index holds a lock of the cache meanwhile; the others wait, for no longer than they have. What a Hub that is
busy said, to be asked again in so many seconds, is kept in the cache: until then nobody of this node asks. Where the cache cannot
be written, every rank asks for itself.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress

from kcache import digest, fsops
from kcache.errors import InstallError, TrustError
from kcache.local_cache import LocalCache
from kcache.store.base import Store
from kcache.store.web import BusyError
from kcache.store.wrappers import Wrapper
from kcache.workflows.deadline import Deadline

ROOM = "busy"

LONGEST = 3600.0
"""Seconds: no word of a Hub is kept for longer, whatever it or a clock that was set says."""


class OneStream(Wrapper):
    """A far store, asked by one process of the node at a time as long as it is not known to answer."""

    def __init__(self, inner: Store, address: str, cache: LocalCache, deadline: Deadline) -> None:
        super().__init__(inner)
        self._cache, self._deadline = cache, deadline
        self._key = digest.of_bytes(address.encode()).removeprefix("sha256:")
        self._answered = False

    def read_bytes(self, name: str, limit: int) -> bytes:
        if self._answered:
            return self.inner.read_bytes(name, limit)
        with self._alone():
            self._wait(name)
            try:
                data = self.inner.read_bytes(name, limit)
            except BusyError as error:
                self._keep(error)
                raise
        self._answered = True
        return data

    def _alone(self) -> ExitStack:
        """Holds the lock until it is left, where there can be one."""
        held = ExitStack()
        with suppress(InstallError, TrustError):
            self._cache.prepare()
            held.enter_context(fsops.locked(self._cache.base / "asking.lock", self._deadline.left()))
        return held

    def _wait(self, name: str) -> None:
        """Waits as long as another process was told to.

        Raises:
            BusyError: that is longer than there is.
        """
        kept = self._cache.read(ROOM, self._key) or {}
        until = kept.get("until")
        seconds = until - time.time() if isinstance(until, (int, float)) else 0.0
        if not 0 < seconds <= LONGEST:
            return
        if seconds > self._deadline.left():
            why = f"it asked another process of this host to wait; {seconds:.0f} s are left"
            what = f"{name} in {self.describe()} is not asked for now"
            raise BusyError(what, why=why, seconds=seconds, remedy="Restore again later.")
        time.sleep(seconds)

    def _keep(self, error: BusyError) -> None:
        if error.seconds is not None:
            with suppress(InstallError, TrustError):
                self._cache.write(ROOM, self._key, {"until": time.time() + min(error.seconds, LONGEST)})
