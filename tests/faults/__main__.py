"""`ci/faults`: all of it, and a table of the figures. Ends with 1 at the first thing that does not hold."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from faults.archives import refuse_all
from faults.flips import LOADED, flip_bytes
from faults.kills import ERRNOS, GONE, LATE, SHOWN, STAYS, TORN, Figures, Stand, fail_at, kill_at
from faults.scenarios import SCENARIOS, Scenario


def main() -> None:
    parser = argparse.ArgumentParser(prog="ci/faults", description=__doc__)
    parser.add_argument("--step", type=int, default=1, metavar="N", help="Kill at every Nth change only.")
    parser.add_argument("--flips", type=int, default=10_000, metavar="N", help="Bytes to flip.")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="Which bytes.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="Scenarios at once.")
    given = parser.parse_args()
    kills, failures = Figures(), Figures()
    print("| what | tried | old state | new state | run again completes |\n|---|---|---|---|---|", flush=True)
    with ProcessPoolExecutor(given.jobs) as pool:
        for scenario, (killed, failed) in zip(
            SCENARIOS, pool.map(partial(tried, given.step), range(len(SCENARIOS))), strict=True
        ):
            _row(f"{scenario.name}: SIGKILL at a change, or in the middle of a write", killed)
            _row(f"{scenario.name}: {', '.join(ERRNOS)}; renames that fail and are done; the directory vanishes", failed)
            kills, failures = kills + killed, failures + failed
    with tempfile.TemporaryDirectory(prefix="kcache-faults-") as directory:
        flips = flip_bytes(Path(directory), given.flips, given.seed)
    print(f"\n| byte flips (seed {given.seed}) | tried | refused | files right all the same | loaded |\n|---|---|---|---|---|")
    for part, counts in flips.items():
        print(f"| {part} | {sum(counts.values())} | " + " | ".join(str(count) for count in counts.values()) + " |")
    loaded = sum(counts[LOADED] for counts in flips.values())
    with tempfile.TemporaryDirectory(prefix="kcache-faults-") as directory:
        archives, outside = refuse_all(Path(directory))
    print("\n| kills | failing calls | byte flips | of these loaded | hostile archives refused | writes outside |")
    print("|---|---|---|---|---|---|")
    print(f"| {kills.points} | {failures.points} | {given.flips} | {loaded} | {archives} | {len(outside)} |")
    raise SystemExit(1 if loaded or outside else 0)


def tried(step: int, number: int) -> tuple[Figures, Figures]:
    """Kills, and failing calls, of one scenario."""
    scenario: Scenario = SCENARIOS[number]
    with tempfile.TemporaryDirectory(prefix="kcache-faults-") as directory:
        stand = Stand(scenario, Path(directory))
        calls = stand.calls()
        # A change that is done and then killed leaves what a kill before the next one leaves: only writes can be half done.
        killed = kill_at(stand, range(1, calls + 1, step))
        writes = range(1, stand.calls("write") + 1, step)
        killed += kill_at(stand, writes, TORN, only="write")
        failed = fail_at(stand, writes, ERRNOS["ENOSPC"], on=True, only="write")
        for at, (name, value) in enumerate(ERRNOS.items(), start=1):
            failed += fail_at(stand, range(at, calls + 1, len(ERRNOS) * step), value, on=name in STAYS)
        failed += fail_at(stand, range(1, calls + 1, 4 * step), GONE)
        for do in (LATE, SHOWN):
            failed += fail_at(stand, range(1, stand.calls("rename") + 1, step), do, only="rename")
    return killed, failed


def _row(what: str, figures: Figures) -> None:
    print(f"| {what} | {figures.points} | {figures.states['old']} | {figures.states['new']} | {figures.points} |", flush=True)


if __name__ == "__main__":
    main()
