"""Bundles in a store: `kcache compact`, and restores that take them where that saves requests. Real processes, a local Hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from entries import make_fitting_entry
from hub.process import HubProcess, local_hub

from kcache import digest
from kcache.index import Blob, Bundle, Index, IndexEntry, index_entry, parse_index
from kcache.workflows.bundled import SURPLUS, best_bundle

REPOSITORY = Path(__file__).parents[2]
NAMES = ["cascade", "page", "quantization", "sampling", "topk"]
_numbers = count()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with local_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


class Farm:
    """A repository with entries, and containers that restore from it."""

    def __init__(self, hub: HubProcess, scratch: Path) -> None:
        self.hub, self.scratch, self.store = hub, scratch, f"hf://farm/compact-{next(_numbers)}"
        self.made = 0

    def kcache(self, *words: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, **self.hub.environ(), "HOME": str(home or self.scratch)}
        environ.pop("KCACHE_DIR", None)
        environ.pop("FLASHINFER_WORKSPACE_BASE", None)
        return subprocess.run(
            [sys.executable, "-m", "kcache", *words], env=environ, cwd=REPOSITORY, capture_output=True, text=True, check=False
        )

    def publish(self, *names: str) -> None:
        self.made += 1
        out = self.scratch / f"out{self.made}"
        for name in names:
            make_fitting_entry(out, {name: os.urandom(30_000)})
        done = self.kcache("publish", str(out), "--to", self.store, "--create")
        assert done.returncode == 0, done.stderr

    def compact(self, *words: str) -> dict[str, Any]:
        done = self.kcache("compact", "--to", self.store, "--json", *words)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def restore(self, home: Path) -> dict[str, Any]:
        home.mkdir(exist_ok=True)
        done = self.kcache("restore", "--from", self.store, "--arch", "9.0a", "--json", home=home)
        return dict(json.loads(done.stdout))

    def asked(self) -> list[str]:
        """What the resolver was asked for since the last call, the last part of each path."""
        return [line["path"].rpartition("/")[2] for line in self.hub.requests() if line["port"] == "hub"]


@pytest.fixture
def farm(hub: HubProcess, tmp_path: Path) -> Farm:
    farm = Farm(hub, tmp_path)
    farm.publish(*NAMES)
    return farm


def modules(report: dict[str, Any]) -> list[str]:
    return sorted(module for kind in report["kinds"].values() for entry in kind["entries"] for module in entry["modules"])


def test_a_cold_container_asks_twice_however_many_entries_it_needs(farm: Farm, tmp_path: Path) -> None:
    (bundle,) = farm.compact()["bundles"]
    assert (bundle["entries"], bundle["status"]) == (5, "uploaded")
    farm.asked()
    report = farm.restore(tmp_path / "home")
    assert report["status"] == "hit" and modules(report) == NAMES, report
    assert farm.asked() == ["index.json", f"{bundle['sha256'].removeprefix('sha256:')}.tar"]
    assert not list((tmp_path / "home").rglob("*.tar"))
    assert farm.restore(tmp_path / "home")["bytes_downloaded"] < 10_000  # the index alone


def test_only_what_is_missing_is_fetched(farm: Farm, tmp_path: Path) -> None:
    farm.restore(tmp_path / "home")
    farm.compact()
    farm.publish("norm")
    farm.asked()
    assert modules(farm.restore(tmp_path / "home")) == sorted([*NAMES, "norm"])
    asked = farm.asked()
    assert len(asked) == 3 and not any(name.endswith(".tar") for name in asked)
    assert modules(farm.restore(tmp_path / "cold")) == sorted([*NAMES, "norm"])
    asked = farm.asked()
    assert len(asked) == 4 and sum(name.endswith(".tar") for name in asked) == 1  # the bundle, and what came after it


def test_made_again_it_is_the_same_one(farm: Farm) -> None:
    (first,), (second,) = farm.compact()["bundles"], farm.compact()["bundles"]
    assert second == {**first, "status": "present"}


def test_a_damaged_bundle_costs_nothing_but_its_request(farm: Farm, tmp_path: Path) -> None:
    farm.compact()
    farm.hub.fault({"path": "^cdn:.*", "action": "flip", "after": 3000, "count": 1})
    try:
        report = farm.restore(tmp_path / "home")
    finally:
        farm.hub.fault()
    assert report["status"] == "hit" and modules(report) == NAMES
    assert [line for line in report["warnings"] if "entries are fetched one by one" in line], report
    assert not list((tmp_path / "home").rglob("*.tar*"))


def test_eight_ranks_fetch_one_bundle(farm: Farm, tmp_path: Path) -> None:
    farm.compact()
    farm.asked()
    with ThreadPoolExecutor(8) as pool:
        reports = list(pool.map(lambda _: farm.restore(tmp_path / "home"), range(8)))
    assert [modules(report) for report in reports] == [NAMES] * 8, reports
    asked = farm.asked()
    assert sum(name.endswith(".tar") for name in asked) == 1 and not any(name.endswith(".zst") for name in asked)


def test_one_entry_alone_makes_no_bundle(farm: Farm) -> None:
    done = farm.kcache("compact", "--to", farm.store, "--modules", "page")
    assert done.returncode == 2 and "one entry of what was asked for" in done.stderr


def test_an_index_keeps_its_bundles_when_it_is_rebuilt(farm: Farm, tmp_path: Path) -> None:
    farm.compact()
    farm.publish("norm")
    bundle = tmp_path / "all.tar"
    assert farm.kcache("export", "--from", farm.store, "-o", str(bundle)).returncode == 0
    report = farm.restore(tmp_path / "home")
    assert report["status"] == "hit" and report["http_requests"] <= 6  # redirects among them


def entry(tmp_path: Path, name: str, size: int) -> IndexEntry:
    manifest = make_fitting_entry(tmp_path, {name: os.urandom(size)})
    return index_entry(manifest, manifest.encode())


def bundle_of(*entries: IndexEntry, size: int | None = None) -> Bundle:
    total = sum(one.archive.size for one in entries) + 4096 if size is None else size
    sha256 = digest.of_bytes(repr((total, [one.key.fingerprint for one in entries])).encode())
    return Bundle(
        file=Blob(path=f"v1/b/{sha256[7:]}.tar", size=total, sha256=sha256), manifests=tuple(e.manifest.sha256 for e in entries)
    )


def test_which_bundle_is_taken(tmp_path: Path) -> None:
    a, b, c = (entry(tmp_path, name, 20_000) for name in ("a", "b", "c"))
    of_two, of_all = bundle_of(a, b), bundle_of(a, b, c)
    assert best_bundle([a, b, c], [of_two, of_all]) == (of_all, [a, b, c])
    assert best_bundle([a, b], [of_all, of_two]) == (of_two, [a, b])  # fewer bytes, the same requests
    assert best_bundle([a], [of_two, of_all]) is None
    assert best_bundle([a, b], []) is None
    single = sum(one.archive.size + one.manifest.size for one in (a, b))
    assert best_bundle([a, b], [bundle_of(a, b, size=int(SURPLUS * single) + 1)]) is None


def test_an_index_with_bundles_is_read_as_it_was_written(tmp_path: Path) -> None:
    a, b = entry(tmp_path, "a", 100), entry(tmp_path, "b", 100)
    written = Index(entries=(a, b), bundles=(bundle_of(a, b),)).encode()
    assert parse_index(written).encode() == written
    assert b"bundles" not in Index(entries=(a, b)).encode()
