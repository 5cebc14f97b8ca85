"""How long a restore may wait and download before the server is started without it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from kcache.errors import UnavailableError
from kcache.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A moment of the monotonic clock after which a restore stops waiting."""

    at: float
    seconds: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(at=time.monotonic() + seconds, seconds=seconds)

    def left(self) -> float:
        """Seconds that remain, never negative."""
        return max(0.0, self.at - time.monotonic())

    def watch(self, chunks: Iterable[bytes], what: str) -> Iterator[bytes]:
        """The same chunks, ended by an error once the deadline has passed.

        Raises:
            UnavailableError: while iterating.
        """
        for chunk in chunks:
            if time.monotonic() > self.at:
                raise UnavailableError(
                    f"{what} took longer than the deadline",
                    why=f"{self.seconds:g} s were allowed",
                    remedy="Raise --deadline, or bring the store nearer.",
                )
            yield chunk
