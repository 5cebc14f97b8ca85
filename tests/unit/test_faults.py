"""Real commands killed, and refused by the file system, at a share of their changes. `ci/faults` does it at all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults.flips import LOADED, REFUSED, flip_bytes
from faults.kills import ERRNOS, GONE, LATE, SHOWN, STAYS, TORN, Stand, fail_at, kill_at
from faults.scenarios import SCENARIOS

SHARE = 2
"""Points of each kind in every run of the tests."""


@pytest.fixture(scope="module", params=SCENARIOS, ids=lambda scenario: scenario.name)
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stand:
    """Each command, its old state made once."""
    return Stand(request.param, tmp_path_factory.mktemp("faults"))


def share(calls: int, offset: int) -> range:
    """A few of the points from 1 to `calls`, the last one among them."""
    step = max(1, calls // SHARE)
    return range(calls - offset % step, 0, -step)


def test_a_command_killed_at_any_change_leaves_the_old_or_the_new_state(stand: Stand) -> None:
    calls = stand.calls()
    assert calls >= 10
    figures = kill_at(stand, share(calls, 0)) + kill_at(stand, share(calls, 1), TORN)
    assert figures.points >= SHARE


def test_a_call_that_fails_costs_one_line_and_the_next_run_completes_it(stand: Stand) -> None:
    calls = stand.calls()
    first = SCENARIOS.index(stand.scenario) % 2
    for number, name in list(enumerate(ERRNOS))[first::2]:
        # A disk that is full stays so, and so does one that became read-only.
        fail_at(stand, [1 + (number * 7) % calls], ERRNOS[name], on=name in STAYS)


@pytest.mark.parametrize("do", [LATE, SHOWN])
def test_a_rename_that_was_done_though_it_failed_does_no_harm(stand: Stand, do: str) -> None:
    """As over NFS, when an answer is lost: done already, or by the server a moment later."""
    assert fail_at(stand, [stand.calls("rename")], do, only="rename").points == 1


def test_a_directory_that_vanishes_meanwhile_costs_one_line_and_what_comes_back_is_whole(stand: Stand) -> None:
    assert fail_at(stand, share(stand.calls(), 1), GONE).points >= SHARE


def test_no_flipped_byte_is_ever_loaded(tmp_path: Path) -> None:
    figures = flip_bytes(tmp_path, 900, seed=20261201)
    assert all(found[LOADED] == 0 for found in figures.values()), figures
    for part in ("archive", "manifest", "installed manifest", "installed file"):
        assert figures[part][REFUSED] == 150, figures
