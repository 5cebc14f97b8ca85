"""Many containers restore from one Hub at once, within its limits and beyond; see `ci/fleet`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ci.bench import KCACHE, small_store

if TYPE_CHECKING:
    from hub.process import HubProcess

QUOTA, WINDOW = 3000, 300.0
"""Requests that the Hub's resolver takes from one address without a token, and seconds for them (hub-docs, rate limits)."""

REPO = "farm/kernels"
CMD = ["--", "/bin/sh", "-c", "echo started"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """One container: whether its command ran, after how many seconds, what it was started with, and what kcache said."""

    started: bool
    seconds: float
    status: str
    said: str


def start(hub: HubProcess, scratch: Path, number: int, options: argparse.Namespace) -> Start:
    """One container, from an empty home to its command's end."""
    home = scratch / f"home-{number}"
    home.mkdir()
    environ = {"HOME": str(home), "PATH": os.environ["PATH"], "HF_ENDPOINT": hub.endpoint}
    words = [*KCACHE, "restore", "--from", f"hf://{REPO}", "--arch", options.arch, "--deadline", f"{options.deadline}s", *CMD]
    began = time.monotonic()
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - began
    shutil.rmtree(home)
    status = "hit" if "kcache: restored" in done.stderr else "miss"
    return Start(started=done.stdout == "started\n", seconds=seconds, status=status, said=done.stderr.strip())


def publish(hub: HubProcess, store: Path, scratch: Path, *, repo: str = REPO) -> None:
    bundle = scratch / f"{repo.replace('/', '-')}.tar"
    subprocess.run([*KCACHE, "export", "--from", str(store), "-o", str(bundle)], check=True)
    words = [*KCACHE, "import", str(bundle), "--to", f"hf://{repo}", "--create"]
    subprocess.run(words, env={**os.environ, **hub.environ()}, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="ci/fleet")
    parser.add_argument("--containers", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=8, help="processes at a time")
    parser.add_argument("--deadline", type=float, default=30, help="seconds that each container allows")
    parser.add_argument("--store", type=Path)
    parser.add_argument("--arch", default="9.0a")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from hub.process import local_hub

    with tempfile.TemporaryDirectory(prefix="kcache-fleet-") as name:
        scratch = Path(name)
        with local_hub(scratch / "hub") as hub:
            publish(hub, options.store or small_store(scratch, options.arch), scratch)
            hub.requests()
            hub.admin("limits", {"resolvers": {"quota": QUOTA, "window": WINDOW}})
            began = time.monotonic()
            with ThreadPoolExecutor(options.at_once) as pool:
                starts = list(pool.map(lambda number: start(hub, scratch, number, options), range(options.containers)))
            seconds = time.monotonic() - began
            asked = [line for line in hub.requests() if line["port"] == "hub"]
    return say(options, starts, asked, seconds)


def say(options: argparse.Namespace, starts: list[Start], asked: list[dict[str, object]], seconds: float) -> int:
    """The figures; 1 where a container did not start its command, or not in time."""
    late = [one for one in starts if not one.started or one.seconds > options.deadline + 5]  # to start and end the processes
    found = {
        "containers": len(starts),
        "started": sum(one.started for one in starts),
        "late": len(late),
        **{f"status {status}": count for status, count in sorted(Counter(one.status for one in starts).items())},
        "requests": len(asked),
        "requests refused (429)": sum(line["status"] == 429 for line in asked),
        "requests to the API": sum(str(line["path"]).startswith("/api/") for line in asked),
        "requests for each container": round(len(asked) / len(starts), 2),
        "seconds of a container, median": round(statistics.median(one.seconds for one in starts), 2),
        "seconds of a container, longest": round(max(one.seconds for one in starts), 2),
        "seconds in all": round(seconds, 1),
    }
    for name, value in found.items():
        print(f"{name:34}{value}")
    for said, count in Counter(one.said for one in starts if one.status != "hit").items():
        print(f"{count} said: {said}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2))
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
