"""`ci/bench --hub`: restores from a local Hub beside what people do by hand, and from stores of ten and of 100,000 entries."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ci.bench import KCACHE, Bench, Sample, pairs, run, spread
from ci.fleet import REPO, publish
from kcache import digest, index, manifest
from kcache.key import EntryKey
from kcache.values import replace

REPOSITORY = Path(__file__).parents[1]
MANY, ELSEWHERE = 100_000, 100
"""Entries of other environments, and how many those are."""

BY_HUB = """
import subprocess, sys
from huggingface_hub import hf_hub_download
for path in sys.argv[2:]:
    file = hf_hub_download(sys.argv[1], path)
    subprocess.run(["/bin/sh", "-c", 'zstd -dc < "$0" | tar x', file], check=True)
"""


def over_loopback(bench: Bench, stack: ExitStack) -> None:
    """A local Hub with what the store has: restored by kcache, by curl, and by huggingface_hub."""
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from hub.process import local_hub

    hub = stack.enter_context(local_hub(bench.scratch / "hub"))
    publish(hub, bench.store, bench.scratch)
    paths = [str(path.relative_to(bench.store)) for path in sorted((bench.store / "v1" / "archives").rglob("*.tar.zst"))]

    def environ(home: Path) -> dict[str, str]:
        return {**bench.environ(home), "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}

    def ours() -> Sample:
        return run([*KCACHE, "restore", "--from", f"hf://{REPO}", "--arch", bench.arch], environ(bench.fresh()))

    def curl() -> Sample:
        home = bench.fresh()
        lines = [f"curl -sfL {hub.endpoint}/{REPO}/resolve/main/{path} | zstd -dc | tar x -C '{home}'" for path in paths]
        return run(["/bin/sh", "-c", " && ".join(lines)], environ(home))

    def by_hub() -> Sample:
        home = bench.fresh()
        return run(["/bin/sh", "-c", f'cd "$HOME" && exec {sys.executable} -c "$0" "$@"', BY_HUB, REPO, *paths], environ(home))

    hub.requests()
    ours()
    asked = [line for line in hub.requests() if line["port"] == "hub"]
    api = sum(line["path"].startswith("/api/") for line in asked)
    bench.rows.append(("requests of a cold container", f"{len(asked)}, of them {api} to the API", "", "", "3 and 0"))
    bench.add("restore over loopback / curl | zstd -dc | tar x", *pairs(ours, curl, bench.runs), 1.5)
    bench.add("restore over loopback / hf_hub_download + untar", *pairs(ours, by_hub, bench.runs), 1.0)


def many_entries(bench: Bench) -> None:
    """The same store with 100,000 entries of other environments beside it: restoring and looking up."""
    many = bench.scratch / "many"
    shutil.copytree(bench.store, many)
    path = next((many / "v1" / "env").glob("*/*/index.json"))
    lines = index.parse_index(path.read_bytes()).entries
    crowd(many, manifest.parse_manifest((many / lines[0].manifest.path).read_bytes()))
    few = bench.store

    def restore(store: Path) -> Sample:
        return run([*KCACHE, "restore", "--from", str(store), "--arch", bench.arch], bench.environ(bench.fresh()))

    def lookup(store: Path) -> Sample:
        return run([*KCACHE, "lookup", "--from", str(store), "--arch", bench.arch, "--json"], bench.environ(bench.fresh()))

    for name, one in (("restore", restore), ("lookup", lookup)):
        ours, theirs = pairs(partial(one, many), partial(one, few), bench.runs)
        bench.add(f"{name} of {MANY + len(lines):,} entries / of {len(lines)}", ours, theirs, 1.1)


def crowd(store: Path, like: manifest.Manifest, many: int = MANY) -> None:
    """Publishes entries of other FlashInfers, an index for each. Their archives are not there: nothing here asks for them."""
    places = min(ELSEWHERE, many)
    for number in range(places):
        entries = []
        for each in range(many // places):
            changed = {"flashinfer.version": f"0.{number}.0", "flashinfer.sources": digest.of_bytes(b"%d" % each)}
            key: EntryKey = replace(like.key, ingredients={**like.key.ingredients, **changed})
            other = replace(like, key=key, sources={})  # nothing here reads it, and a list of files is its bulk
            encoded = other.encode()
            entries.append(index.index_entry(other, encoded))
            path = store / entries[-1].manifest.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encoded)
        place = store / index.index_path(entries[0].key.ingredients)
        place.write_bytes(index.Index(entries=tuple(entries)).encode())


def floor(bench: Bench) -> None:
    """What a restore cannot go below: Python's own start, and the digest of the archives."""
    start = [bench.python("pass") for _ in range(bench.runs)]
    archives = sorted((bench.store / "v1" / "archives").rglob("*.tar.zst"))
    hashed = [run(["sha256sum", *map(str, archives)], dict(os.environ)) for _ in range(bench.runs)]
    bench.rows.append(("floor: python's start; sha256sum of the archives", f"{spread(start)}; {spread(hashed)}", "", "", ""))


def measure(bench: Bench) -> None:
    """Every row."""
    with ExitStack() as stack:
        over_loopback(bench, stack)
    floor(bench)
    many_entries(bench)
