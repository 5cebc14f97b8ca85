"""`ci/bench --hub`: restores from a local Hub beside what people do by hand, and from stores of ten and of 100,000 entries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from ci.bench import KCACHE, Bench, Sample, pairs, run, spread
from ci.fleet import REPO, publish
from kcache import archive, digest, index, index_parts, manifest
from kcache.key import EntryKey
from kcache.manifest import module_artifact_path
from kcache.values import replace
from kcache.workflows.build_output import build_name

if TYPE_CHECKING:
    from hub.process import HubProcess

REPOSITORY = Path(__file__).parents[1]
MANY, ELSEWHERE = 100_000, 100
"""Entries of other environments, and how many those are."""

FEW = 10
ARCHS = ("90a", "75", "80", "86", "89", "100a", "103a", "110a", "120f", "121a")
"""The first is for models that nobody asks for."""

BY_HUB = """
import subprocess, sys
from huggingface_hub import hf_hub_download
for path in sys.argv[2:]:
    file = hf_hub_download(sys.argv[1], path)
    subprocess.run(["/bin/sh", "-c", 'zstd -dc < "$0" | tar x', file], check=True)
"""


SIZES = (10, 100, 500)
"""Megabytes of archives, about, that are restored over loopback."""

LARGE_ENOUGH = 8 << 20
"""Bytes of modules from which archives of any size can be made: zstd looks back 4 MiB, so it does not see that they repeat."""


def over_loopback(bench: Bench, stack: ExitStack) -> None:
    """A local Hub with what the store has, and with more of the same bytes: restored by kcache, curl, huggingface_hub."""
    sys.path.insert(0, str(REPOSITORY / "tests"))
    from hub.process import local_hub

    hub = stack.enter_context(local_hub(bench.scratch / "hub"))
    repos = {REPO: bench.store} | {f"farm/of-{size}": made for size in SIZES if (made := enlarged(bench, size)) is not None}
    for repo, store in repos.items():
        publish(hub, store, bench.scratch, repo=repo)
        compare(bench, hub, repo, store)


def compare(bench: Bench, hub: HubProcess, repo: str, store: Path) -> None:
    """The rows of one repository."""
    paths = [str(path.relative_to(store)) for path in sorted((store / "v1" / "archives").rglob("*.tar.zst"))]
    size = sum((store / path).stat().st_size for path in paths) / 1e6

    def environ(home: Path) -> dict[str, str]:
        return {**bench.environ(home), "HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}

    def timed(command: list[str]) -> Sample:
        home = bench.fresh()
        sample = run(command, environ(home), directory=home)
        shutil.rmtree(home)
        return sample

    restore = [*KCACHE, "restore", "--from", f"hf://{repo}", "--arch", bench.arch]
    piped = " && ".join(f"curl -sfL {hub.endpoint}/{repo}/resolve/main/{path} | zstd -dc | tar x" for path in paths)
    hub.requests()
    timed(restore)
    asked = [line for line in hub.requests() if line["port"] == "hub"]
    api = sum(line["path"].startswith("/api/") for line in asked)
    name = f"{size:.1f} MB over loopback"
    bench.rows.append((f"{name}: requests of a cold container", f"{len(asked)}, of them {api} to the API", "", "", "3 and 0"))
    ours, curl = pairs(partial(timed, restore), partial(timed, ["/bin/sh", "-c", piped]), bench.runs)
    bench.add(f"{name}: restore / curl | zstd -dc | tar x", ours, curl, 1.5)
    by_hub = [sys.executable, "-c", BY_HUB, repo, *paths]
    again, theirs = pairs(partial(timed, restore), partial(timed, by_hub), bench.runs)
    bench.add(f"{name}: restore / hf_hub_download + untar", again, theirs, 1.0)
    floor(bench, [store / path for path in paths], restore, environ(bench.scratch))


def enlarged(bench: Bench, megabytes: int) -> Path | None:
    """A store with one entry of about that size, of the store's own modules again and again; None where those are too small."""
    like, libraries = largest(bench)
    each = sum(path.stat().st_size for path in libraries)
    if each < LARGE_ENOUGH:
        bench.rows.append((f"{megabytes} MB over loopback", "not measured: give --store with larger modules", "", "", ""))
        return None
    copies = max(1, round(megabytes * 1e6 / like.archive.size))
    files = {f"m{n}_{path.stem}": path for n in range(copies) for path in libraries}
    out, store = bench.scratch / f"of-{megabytes}", bench.scratch / f"store-of-{megabytes}"
    out.mkdir()
    store.mkdir()
    known = {PurePath(artifact.path).stem: artifact for artifact in like.artifacts}
    places = {module_artifact_path(name): (name, path) for name, path in files.items()}
    facts = archive.pack({place: path for place, (_, path) in places.items()}, out / "entry")
    made = replace(
        like,
        key=replace(like.key, modules=tuple(sorted(files))),
        artifacts=tuple(replace(known[path.stem], path=place) for place, (_, path) in sorted(places.items())),
        archive=facts,
        build_seconds=dict.fromkeys(files, 1.0),
    )
    (out / "entry").rename(out / f"{build_name(made.key)}.tar.zst")
    (out / f"{build_name(made.key)}.json").write_bytes(made.encode())
    run([*KCACHE, "publish", str(out), "--to", str(store)], bench.environ(bench.scratch))
    shutil.rmtree(out)
    return store


def largest(bench: Bench) -> tuple[manifest.Manifest, list[Path]]:
    """The manifest of the store's largest entry, and its unpacked libraries."""
    found = [manifest.parse_manifest(path.read_bytes()) for path in (bench.store / "v1" / "env").glob("*/*/entries/*/*.json")]
    like = max(found, key=lambda one: one.archive.size)
    target = bench.scratch / "unpacked"
    if not target.exists():
        target.mkdir()
        archived = bench.store / index.archive_path(like.archive.sha256)
        subprocess.run(["/bin/sh", "-c", 'zstd -dc "$0" | tar x', str(archived)], cwd=target, check=True)
    return like, sorted(target.rglob("*.so"))


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


def in_one_environment(bench: Bench) -> None:
    """Ten entries, and 100,000, of this very environment: models beside the one that is restored."""
    stores = {count: bench.scratch / f"one-{count}" for count in (FEW, MANY)}
    for count, store in stores.items():
        shutil.copytree(bench.store, store)
        fill(store, count)

    def asked(verb: str, count: int) -> Sample:
        words = ["--from", str(stores[count]), "--arch", bench.arch, "--model", "model-0", "--json"]
        home = bench.fresh()
        return run([*KCACHE, verb, *words], bench.environ(home), codes=(0, 3, 10))

    for verb in ("restore", "lookup"):
        ours, theirs = pairs(partial(asked, verb, MANY), partial(asked, verb, FEW), bench.runs)
        bench.add(f"{verb}, {MANY:,} entries in one environment / {FEW}", ours, theirs, 1.1)


def fill(store: Path, count: int) -> None:
    """Publishes entries of models, for ten architectures each. Their files are not there: nothing here asks for them."""
    path = next((store / "v1" / "env").glob("*/*/index.json"))
    found = index.parse_index(path.read_bytes())
    like = max(found.entries, key=lambda entry: entry.archive.size)
    others = []
    for number in range(count - len(found.entries)):
        model = number // 10
        arch = ARCHS[number % 10] if model % 2 else ARCHS[1 + number % 9]
        ingredients = {**like.key.ingredients, "gpu.arch": arch}
        key: EntryKey = replace(like.key, ingredients=ingredients, model=f"owner/model-{model}", kind="for-models")
        others.append(replace(like, key=key))
    data, parts = index_parts.encode(index.Index(entries=(*found.entries, *others)), str(path.parent.relative_to(store)))
    for name, content in parts.items():
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(content)
    path.write_bytes(data)


def floor(bench: Bench, archives: list[Path], command: list[str], environ: dict[str, str]) -> None:
    """What a restore cannot go below: Python's own start with what it imports of the standard library and zstandard, and the
    digest of the archives."""
    home = bench.fresh()
    said = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kcache", *command[len(KCACHE) :]],
        env={**environ, "HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    ).stderr
    names = [line.rpartition("|")[2].strip() for line in said.splitlines() if line.startswith("import time:")][1:]
    ours = ("kcache", "site", "runpy", "_distutils_hack")
    theirs = [name for name in names if name.partition(".")[0] not in ours]
    code = f"for name in {theirs}:\n try: __import__(name)\n except ImportError: pass"  # what is tried for, and not there, too
    start = [bench.python(code) for _ in range(bench.runs)]
    hashed = [run(["sha256sum", *map(str, archives)], dict(os.environ)) for _ in range(bench.runs)]
    row = f"{spread(start)}; {spread(hashed)}"
    bench.rows.append(("floor: an interpreter with these imports, without kcache; sha256sum of the archives", row, "", "", ""))


def measure(bench: Bench) -> None:
    """Every row."""
    with ExitStack() as stack:
        over_loopback(bench, stack)
    many_entries(bench)
    in_one_environment(bench)
