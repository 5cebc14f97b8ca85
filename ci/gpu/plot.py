"""`python ci/gpu/plot.py STORY DOCS`: the timelines of a `story.json`, as DOCS/serving.json, and drawn, as DOCS/serving.svg."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODES = ("cold", "warmup", "restored")
TITLES = {
    "cold": "cold: the first sampled request waits for the compiler, and so does everybody behind it",
    "warmup": "with a warm-up: the compiler runs before the server is ready",
    "restored": "restored: nothing is compiled",
}
WIDTH, HEIGHT, LEFT, TOP, GAP = 900, 150, 70, 30, 50
LOW, HIGH = 0.001, 200.0
COLOURS = {"greedy": "#3b75af", "sampled": "#c44e52"}


def summary(timeline: dict[str, Any]) -> dict[str, Any]:
    """What a timeline comes to, in seconds: when it was ready, the longest wait of a request, builds before and after ready."""
    ready = timeline["moments"]["ready"]
    waits = [wait for _, _, wait in timeline["requests"]]
    first = next((request for request in timeline["requests"] if request[1] == "sampled"), None)
    real = [build for build in timeline["builds"] if build["seconds"] >= 1.0]  # others: ninja found nothing to do
    return {
        "ready": ready,
        "first_sampled_wait": first[2] if first else None,
        "longest_wait": max(waits),
        "median_wait": sorted(waits)[len(waits) // 2],
        "waited_over_a_second": sum(wait > 1.0 for wait in waits),
        "requests": len(waits),
        "built_before_ready": [build["name"] for build in real if build["ended"] <= ready],
        "built_while_serving": [build["name"] for build in real if build["ended"] > ready],
        "compiler_and_ninja_runs": len(timeline["compilers"]),
    }


def svg(timelines: dict[str, dict[str, Any]]) -> str:
    """One panel for each start, on one time axis; requests are dots at their arrival, as high as they waited."""
    longest: float = max(timeline["moments"]["end"] for timeline in timelines.values())

    def across(seconds: float) -> float:
        return LEFT + seconds / longest * (WIDTH - LEFT - 20)

    parts: list[str] = []
    for number, mode in enumerate(mode for mode in MODES if mode in timelines):
        top = TOP + number * (HEIGHT + GAP)
        parts += _panel(timelines[mode], TITLES[mode], top, across, longest)
    height = TOP + len(timelines) * (HEIGHT + GAP) + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def _panel(timeline: dict[str, Any], title: str, top: float, across: Callable[[float], float], longest: float) -> list[str]:
    def up(wait: float) -> float:
        share: float = math.log(max(LOW, wait) / LOW) / math.log(HIGH / LOW)
        return top + HEIGHT * (1 - share)

    bottom = top + HEIGHT
    parts = [f'<text x="{LEFT}" y="{top - 6}" font-weight="bold">{title}</text>']
    for build in timeline["builds"]:
        begin, end = across(build["ended"] - build["seconds"]), across(build["ended"])
        parts.append(f'<rect x="{begin:.1f}" y="{top}" width="{end - begin:.1f}" height="{HEIGHT}" fill="#f2d9a8"/>')
        if build["seconds"] >= 1.0:
            words = f"compiling {build['name']}, {build['seconds']:.0f} s"
            parts.append(f'<text x="{(begin + end) / 2:.1f}" y="{top + 14}" text-anchor="middle">{words}</text>')
    for wait, name in ((0.001, "1 ms"), (0.01, "10 ms"), (0.1, "100 ms"), (1.0, "1 s"), (10.0, "10 s"), (100.0, "100 s")):
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{up(wait):.1f}" y2="{up(wait):.1f}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(wait) + 4:.1f}" text-anchor="end">{name}</text>')
    for second in range(0, int(longest) + 1, 10):
        parts.append(f'<text x="{across(second):.1f}" y="{bottom + 14}" text-anchor="middle">{second} s</text>')
    ready = across(timeline["moments"]["ready"])
    parts.append(f'<line x1="{ready:.1f}" x2="{ready:.1f}" y1="{top}" y2="{bottom}" stroke="green" stroke-width="2"/>')
    parts.append(f'<text x="{ready + 4:.1f}" y="{bottom - 4}" fill="green">ready</text>')
    seen: set[tuple[int, int]] = set()
    for at, kind, wait in timeline["requests"]:
        place = (round(across(at)), round(up(wait)))
        if place not in seen:  # dots that nobody could tell apart
            seen.add(place)
            parts.append(f'<circle cx="{across(at):.1f}" cy="{up(wait):.1f}" r="1.6" fill="{COLOURS[kind]}"/>')
    return parts


def main() -> int:
    story, docs = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    kept = {name: value for name, value in story.items() if name not in ("restore", "verify")}
    kept["restore"] = {"seconds": story["restore"]["report"]["seconds"], "bytes": story["restore"]["report"]["bytes_downloaded"]}
    kept["verify"] = {name: story["verify"][name] for name in ("status", "compiler_runs", "import_seconds")}
    lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in sorted(kept.items())]
    (docs / "serving.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    (docs / "serving.svg").write_text(svg({mode: story[mode] for mode in MODES}))
    for mode in MODES:
        print(mode, json.dumps(summary(story[mode])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
