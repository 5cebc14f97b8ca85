"""`ci/faults`: all of it, and a table of the figures. Ends with 1 at the first thing that does not hold."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path

from faults.flips import LOADED, flip_bytes
from faults.kills import ERRNOS, KILL, LATE, SHOWN, STAYS, TORN, Figures, Stand, fail_at, kill_at
from faults.scenarios import SCENARIOS


def main() -> None:
    parser = argparse.ArgumentParser(prog="ci/faults", description=__doc__)
    parser.add_argument("--step", type=int, default=1, metavar="N", help="Kill at every Nth change only.")
    parser.add_argument("--flips", type=int, default=10_000, metavar="N", help="Bytes to flip.")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="Which bytes.")
    given = parser.parse_args()
    kills = Counter[str]()
    failures = Counter[str]()
    print("| what | tried | old state | new state | run again completes |\n|---|---|---|---|---|", flush=True)
    for scenario in SCENARIOS:
        with tempfile.TemporaryDirectory(prefix="kcache-faults-") as directory:
            stand = Stand(scenario, Path(directory))
            calls = stand.calls()
            killed = kill_at(stand, range(1, calls + 1, given.step), (KILL, TORN))
            kills.update(points=killed.points)
            _row(f"{scenario.name}: SIGKILL, {calls} changes", killed)
            failed = Figures()
            for number, (name, value) in enumerate(ERRNOS.items()):
                failed += fail_at(stand, range(1 + number, calls + 1, 8 * given.step), value, on=name in STAYS)
            for do in (LATE, SHOWN):
                failed += fail_at(stand, range(1, stand.calls("rename") + 1, given.step), do, only="rename")
            failures.update(points=failed.points)
            _row(f"{scenario.name}: {', '.join(ERRNOS)}; renames that fail and are done", failed)
    with tempfile.TemporaryDirectory(prefix="kcache-faults-") as directory:
        flips = flip_bytes(Path(directory), given.flips, given.seed)
    print(f"\n| byte flips (seed {given.seed}) | tried | refused | files right all the same | loaded |\n|---|---|---|---|---|")
    for part, found in flips.items():
        print(f"| {part} | {sum(found.values())} | " + " | ".join(str(count) for count in found.values()) + " |")
    loaded = sum(found[LOADED] for found in flips.values())
    print(f"\n{kills['points']} kills, {failures['points']} failing calls, {given.flips} flips: {loaded} loaded")
    raise SystemExit(1 if loaded else 0)


def _row(what: str, figures: Figures) -> None:
    print(f"| {what} | {figures.points} | {figures.states['old']} | {figures.states['new']} | {figures.points} |", flush=True)


if __name__ == "__main__":
    main()
