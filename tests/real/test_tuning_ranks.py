"""Real `torch.distributed` ranks (gloo) that agree on tuning results, one process each, and real FlashInfer that finds them.

A hang is a failure: every wait here has an end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from warmup_processes import Node
from zygote import Process

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

TESTS = Path(__file__).parents[1]

RANK = """
import json, os, signal, sys, time
from datetime import timedelta
from pathlib import Path
rank, size, where, settings = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
sys.path.insert(0, settings["tests"])
import torch.distributed as dist
dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timedelta(seconds=60))
from flashinfer.autotuner import AutoTuner, _collect_metadata
from flashinfer.autotune_cache import ManagedAutotuneCache
from kcache.kinds import autotune_v1, autotune_v2, autotune_v2_install
from kcache.warmup import share_tunings, tunings as sharing
from tunings import an_entry, file_document
root, file, environment = Path(settings["root"]), None, _collect_metadata()
if settings.get("foreign"):
    sharing._environment = lambda: environment | {"gpu": "another"}
if settings.get("v1"):
    file = root / "autotune_configs.json"
if settings["tactic"] and file is not None:
    file.parent.mkdir(parents=True)
    document = file_document([16, 32], tactic=settings["tactic"])
    document["_metadata"] = environment
    file.write_text(json.dumps(document))
elif settings["tactic"]:
    entries = tuple(an_entry(m, settings["tactic"]) for m in settings["sizes"])
    store = autotune_v2.TuningStore(environment=environment | {"cache_schema": "v2"}, entries=entries)
    autotune_v2_install.install(root, store)
if settings.get("never_calls"):
    time.sleep(60)
if settings.get("dies"):
    sharing._held = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
shared = share_tunings(root=root, file=file, stall_seconds=5, join_seconds=settings.get("join", 60))
tactics = []
if shared.root is not None:
    found = ManagedAutotuneCache(environment, str(shared.root))
    tactics = [found.preload()[1:]] + [json.dumps(found.lookup(an_entry(m).key).tactic) for m in (16, 32)]
if shared.file is not None:
    tuner = AutoTuner.get()
    tactics = [tuner.load_configs(str(shared.file))] + sorted(json.dumps(one[1]) for one in tuner._file_configs.values())
print(json.dumps({"agreed": shared.agreed, "digest": shared.digest, "results": shared.results, "tactics": tactics,
    "why": shared.why, "place": str(shared.root or shared.file or "")}), flush=True)
dist.destroy_process_group()
"""


def run(node: Node, tmp_path: Path, size: int, special: dict[int, dict[str, Any]], **common: Any) -> list[Process]:
    """The ranks, each with a store of its own. Their store of states is a file, which outlives every rank."""
    processes = []
    for rank in range(size):
        settings = {"tests": str(TESTS), "root": str(tmp_path / f"rank{rank}" / "store"), "tactic": 3, "sizes": [16, 32]}
        settings |= {**common, **special.get(rank, {})}
        processes.append(node.start(RANK, str(rank), str(size), f"file://{tmp_path}/meeting", json.dumps(settings)))
    return processes


@pytest.mark.parametrize(("size", "v1"), [(2, False), (4, True), (8, False)])
def test_a_rank_without_results_and_one_with_others_use_those_of_the_first(
    node: Node, tmp_path: Path, size: int, v1: bool
) -> None:
    special: dict[int, dict[str, Any]] = {size - 1: {"tactic": 9, "sizes": [16, 64]}, 0: {"tactic": 0}, 1: {"tactic": 5}}
    said = [process.document(200) for process in run(node, tmp_path, size, special, v1=v1)]
    assert [(one["agreed"], one["results"]) for one in said] == [(True, 2)] * size, said
    assert len({one["digest"] for one in said}) == 1
    assert all(one["tactics"] == [True if v1 else [2, 0], "5", "5"] for one in said), said
    assert len({one["place"] for one in said}) == size, "each rank has a home of its own"


@pytest.mark.parametrize("bad", [{"foreign": True}, {"never_calls": True}], ids=lambda bad: next(iter(bad)))
def test_where_one_rank_cannot_use_the_results_or_says_nothing_none_uses_them(
    node: Node, tmp_path: Path, bad: dict[str, Any]
) -> None:
    processes = run(node, tmp_path, 2, {1: bad}, join=4)
    said = [process.document(60) for process in processes[: 1 if "never_calls" in bad else 2]]
    assert [(one["agreed"], one["place"]) for one in said] == [(False, "")] * len(said)
    assert all(one["why"] for one in said)
    if "never_calls" in bad:
        processes[1].kill()


def test_the_rank_that_offered_dies_and_the_others_agree_without_it(node: Node, tmp_path: Path) -> None:
    processes = run(node, tmp_path, 4, {0: {"dies": True, "tactic": 7}})
    said = [process.document(100) for process in processes[1:]]
    assert [(one["agreed"], one["tactics"]) for one in said] == [(True, [[2, 0], "7", "7"])] * 3
    assert processes[0].wait(10) == -9
