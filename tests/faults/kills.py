"""A command is killed, or a call of it fails, at any of its changes: afterwards the state is the old one or the new one, and
the command, run again, completes it."""

from __future__ import annotations

import errno
import json
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from faults.injection import Ended, Fault, run
from faults.scenarios import NEW, Scenario, environ

KILL, TORN = "kill", "torn"
LATE, SHOWN = "late", "shown"
GONE = "gone"
"""The cache, or the store, is moved away while the command is at work, and comes back when it has ended."""


@dataclass(kw_only=True)
class Figures:
    """What came of one scenario: points tried, and the states that were found there before the command ran again."""

    points: int = 0
    states: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Figures) -> Figures:
        return Figures(points=self.points + other.points, states=self.states + other.states)


class Stand:
    """A directory in the old state, as often as it is asked for. The path is always the same, since views hold paths."""

    def __init__(self, scenario: Scenario, directory: Path) -> None:
        self.scenario = scenario
        self.place = directory / "place"
        self._saved = directory / "saved"
        self._saved.mkdir(parents=True)
        self.place.mkdir()
        scenario.make(self.place)
        self._calls: dict[str, int] = {}
        self._saved.rmdir()
        self.place.rename(self._saved)

    def fresh(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.copytree(self._saved, self.place, symlinks=True)

    def run(self, at: int = 0, do: str = KILL, *, on: bool = False, only: str = "") -> Ended:
        scenario, place = self.scenario, self.place
        gone = scenario.vanishing(place) if do == GONE else None
        fault = Fault(under=scenario.under(place), at=at, do=do, on=on, only=only, gone=gone)
        done = run(scenario.command(place), environ(place), fault, cwd=place)
        if gone is not None and (away := gone.with_name(f"{gone.name}.gone")).exists():
            shutil.rmtree(gone, ignore_errors=True)  # what was made anew there
            away.rename(gone)
        return done

    def calls(self, only: str = "") -> int:
        """How many changes the command makes if nothing happens to it; found out once."""
        if only not in self._calls:
            self.fresh()
            done = self.run(only=only)
            assert done.code == 0, done.err
            assert self.scenario.check(self.place) == NEW
            self._calls[only] = done.calls
        return self._calls[only]


def kill_at(stand: Stand, points: Iterable[int], do: str = KILL, *, only: str = "") -> Figures:
    """Kills the command at each of these changes."""
    figures = Figures()
    for at in points:
        stand.fresh()
        done = stand.run(at, do, only=only)
        assert done.code == -9, f"{stand.scenario.name}: not killed at change {at}: {done.code} {done.err}"
        _settle(stand, figures, f"{do} at change {at}")
    return figures


def fail_at(stand: Stand, points: Iterable[int], do: str, *, on: bool = False, only: str = "") -> Figures:
    """Lets each of these calls fail; the command must go on or say so in one line, and never with a traceback."""
    figures = Figures()
    for at in points:
        stand.fresh()
        done = stand.run(at, do, on=on, only=only)
        where = f"{stand.scenario.name}, {do} at change {at}"
        assert done.code >= 0 and "Traceback" not in done.err, f"{where}: {done.code} {done.err}"
        new = do == GONE or stand.scenario.check(stand.place) == NEW  # who prunes what has vanished has nothing left to do
        assert done.code != 0 or _usable(done) or new, f"{where}: success and old state"
        assert done.code == 0 or done.err.strip() or done.out.strip(), f"{where}: failed without a word"
        _settle(stand, figures, where)
    return figures


def _usable(done: Ended) -> bool:
    """A restore that could not install and says so is no failed command."""
    try:
        document = json.loads(done.out)
    except ValueError:
        return False
    return isinstance(document, dict) and document.get("status") != "hit"


def _settle(stand: Stand, figures: Figures, where: str) -> None:
    """The state is right, and the next run completes it."""
    scenario = stand.scenario
    try:
        figures.states[scenario.check(stand.place)] += 1
        again = stand.run()
        assert again.code == 0, again.err
        assert scenario.check(stand.place) == NEW, "the next run does not complete it"
    except Exception as error:
        raise AssertionError(f"{scenario.name}, {where}: {error}") from error
    figures.points += 1


ERRNOS = {name: str(getattr(errno, name)) for name in ("ENOSPC", "EIO", "EROFS", "EACCES", "EXDEV", "ENOLCK", "EDQUOT", "ESTALE")}
STAYS = ("ENOSPC", "EROFS", "EDQUOT")
"""What every later call meets too: a disk that is full stays full."""
