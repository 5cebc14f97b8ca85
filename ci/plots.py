"""`python -m ci.plots NUMBERS.json DOCS`: draws what `ci/bench --peers` or `--curves` wrote with `--json`.

Writes DOCS/peers.svg and .json, or DOCS/curves.svg and .json. Needs matplotlib (the extra `plots`).
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

OURS, OTHER = "#c44e52", "#3b75af"


def peers(found: dict[str, Any], file: Path) -> None:
    """Seconds to ready in another HOME, a bar for each way; those that a compiler ran in are hatched."""
    ways = found["ways"]
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(ways) + 1.5))
    for place, (name, row) in enumerate(reversed(ways.items())):
        seconds = [second for second in row["runs"]["seconds"] if second is not None]
        if not seconds:
            continue
        compiled = row.get("another HOME", row["same paths"])["compiles"]
        middle = statistics.median(seconds)
        low, high = middle - min(seconds), max(seconds) - middle
        colour = OURS if name.startswith("kcache") else OTHER
        axes.barh(place, middle, xerr=[[low], [high]], color=colour, hatch="//" if compiled else None, alpha=0.85)
        axes.text(max(seconds), place, f"  {middle:.1f} s{', compiles' if compiled else ''}", va="center", fontsize=9)
    axes.set_yticks(range(len(ways)), list(reversed(ways)))
    axes.set_xlabel("seconds from the first command to both modules loaded, in another HOME (with the import of FlashInfer)")
    axes.margins(x=0.2)
    figure.tight_layout()
    figure.savefig(file)


def curves(found: dict[str, Any], file: Path) -> None:
    """One panel for each curve, kcache and its physical limit, median with smallest and largest."""
    figure, panels = plt.subplots(2, 2, figsize=(10, 7))
    for axes, (name, points) in zip(panels.flat, found.items(), strict=True):
        for series, colour, label in (("kcache", OURS, "kcache restore"), ("limit", OTHER, "zstd -dc | tar x")):
            x = [point["x"] for point in points]
            middle = [statistics.median(point[series]) for point in points]
            axes.plot(x, middle, marker="o", color=colour, label=label)
            axes.fill_between(x, [min(p[series]) for p in points], [max(p[series]) for p in points], color=colour, alpha=0.15)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(name)
        axes.set_ylabel("seconds")
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    numbers, docs = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    mpl.rcParams["svg.hashsalt"] = "kcache"
    for name, draw in (("peers", peers), ("curves", curves)):
        if name in numbers:
            draw(numbers[name], docs / f"{name}.svg")
            (docs / f"{name}.json").write_text(json.dumps(numbers[name], indent=1) + "\n")


if __name__ == "__main__":
    main()
