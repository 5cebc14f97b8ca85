"""Which of two tunings is kept."""

from __future__ import annotations

import pytest

from kcache.workflows.build_tuned import compared


@pytest.mark.parametrize(
    ("rounds", "kept"),
    [
        pytest.param([(2.0, 1.0)], "now", id="the new one is faster"),
        pytest.param([(1.0, 2.0)], "before", id="the old one is faster"),
        pytest.param([(1.0, 1.0)], "before", id="as fast as before"),
        pytest.param([(1.0, 2.0), (3.0, 0.9)], "now", id="the best round of each counts"),
        pytest.param([(None, 2.0)], "now", id="the old one cannot be replayed"),
        pytest.param([(1.0, None)], "before", id="the new one cannot be replayed"),
        pytest.param([(None, None)], "before", id="neither was measured"),
    ],
)
def test_the_tuning_that_replays_faster_is_kept(rounds: list[tuple[float | None, float | None]], kept: str) -> None:
    said = compared([{"before": before, "now": now} for before, now in rounds])
    assert (said["kept"], said["rounds"]) == (kept, len(rounds))
