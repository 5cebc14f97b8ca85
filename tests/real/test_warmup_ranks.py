"""Warm-ups of real `torch.distributed` ranks (gloo), one process each. A hang is a failure: every wait here has an end."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from warmup_processes import Node
from zygote import Process

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

RANK = """
import json, logging, os, sys
from datetime import timedelta
import torch.distributed as dist
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
rank, size, where, settings = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
dist.init_process_group("gloo", init_method=where, rank=rank, world_size=size, timeout=timedelta(seconds=60))
print("initialised", flush=True)
if settings.get("no_flashinfer"):
    sys.modules["flashinfer"] = None
if settings.get("never_calls"):
    import time
    time.sleep(60)
    sys.exit(0)
from kcache.warmup import warmup
import time
given = {"join_seconds": settings.get("join", 60), "deadline": settings.get("deadline", 120)}
report = warmup(kinds=(), modules=("cascade",), stall_seconds=5, **given)
print(json.dumps({**report.to_json(), "at": time.time()}), flush=True)
"""


@pytest.fixture
def tcp() -> str:
    """Where ranks meet: rank 0 keeps the store."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


@pytest.fixture
def file(tmp_path: Path) -> str:
    """Where ranks meet: a file, which outlives every rank."""
    return f"file://{tmp_path}/meeting"


def start(
    node: Node, size: int, where: str, *, special: dict[int, dict[str, Any]] | None = None, pause: float = 0.0, **common: Any
) -> list[Process]:
    """The ranks. `special`: settings of single ranks, and their variables under `environ`."""
    processes = []
    for rank in range(size):
        settings = {**common, **(special or {}).get(rank, {})}
        environ = settings.pop("environ", {})
        processes.append(node.start(RANK, str(rank), str(size), where, json.dumps(settings), pause=pause, environ=environ))
    return processes


def statuses(documents: list[dict[str, Any]]) -> list[str]:
    return sorted(document["modules"][0]["status"] for document in documents)


def wait_for_compilers(node: Node) -> None:
    for _ in range(1200):
        if node.compilers:
            return
        time.sleep(0.05)
    raise AssertionError("no compiler was started")


@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_rank_builds_and_all_agree(node: Node, tcp: str, size: int) -> None:
    documents = [process.document(200) for process in start(node, size, tcp, pause=1)]
    assert statuses(documents) == ["built"] + ["present"] * (size - 1)
    assert len(node.compilers) == 2
    assert [document["agreed"] for document in documents] == [["cascade"]] * size
    assert all([rank["state"] for rank in document["ranks"]] == ["done"] * size for document in documents)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_without_the_library_is_known_to_all_and_holds_nobody(node: Node, tcp: str, size: int) -> None:
    documents = [process.document(200) for process in start(node, size, tcp, special={1: {"no_flashinfer": True}})]
    assert [document["agreed"] for document in documents] == [[]] * size
    assert documents[0]["modules"][0]["status"] == "built"
    assert documents[0]["ranks"][1] == {"rank": 1, "state": "done", "ready": []}


def test_a_rank_whose_cache_cannot_be_used_is_known_to_all(node: Node, tcp: str, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    (blocked / ".cache").write_text("not a directory")
    other = Node(zygote=node.zygote, workspace=blocked, keep=node.keep)
    processes = [
        one.start(RANK, str(rank), "2", tcp, json.dumps({}), environ=node.variables(0.0))
        for rank, one in enumerate((node, other))
    ]
    documents = [process.document(200) for process in processes]
    assert [document["modules"][0]["status"] for document in documents] == ["built", "failed"]
    assert [document["agreed"] for document in documents] == [[], []]


def test_nobody_goes_on_before_the_slowest_rank_is_ready(node: Node, tcp: str, tmp_path: Path) -> None:
    slow = Node(zygote=node.zygote, workspace=tmp_path / "slow", keep=node.keep)
    slow.workspace.mkdir()
    processes = [
        one.start(RANK, str(rank), "2", tcp, json.dumps({}), pause=pause)
        for rank, (one, pause) in enumerate(((node, 0.0), (slow, 4.0)))
    ]
    documents = [process.document(200) for process in processes]
    assert [document["modules"][0]["status"] for document in documents] == ["built", "built"]
    assert abs(documents[0]["at"] - documents[1]["at"]) < 3.5


def test_a_leader_that_dies_is_followed(node: Node, file: str) -> None:
    processes = start(node, 4, file, pause=2)
    wait_for_compilers(node)
    processes[0].kill()  # ranks that start together are led by the first
    documents = [process.document(200) for process in processes[1:]]
    assert statuses(documents) == ["built", "present", "present"]
    assert [document["agreed"] for document in documents] == [["cascade"]] * 3
    assert all(document["ranks"][0]["state"] == "dead" for document in documents)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_the_rank_that_keeps_the_store_dies_and_the_others_go_on(node: Node, tcp: str, size: int) -> None:
    processes = start(node, size, tcp, pause=2)
    wait_for_compilers(node)
    processes[0].kill()
    documents = [process.document(200) for process in processes[1:]]
    assert statuses(documents) == ["built"] + ["present"] * (size - 2)
    assert [document["agreed"] for document in documents] == [[]] * (size - 1), "nobody could be asked"


def test_a_follower_that_dies_holds_nobody(node: Node, tcp: str) -> None:
    processes = start(node, 4, tcp, pause=3)
    wait_for_compilers(node)
    processes[2].kill()
    documents = [processes[rank].document(200) for rank in (0, 1, 3)]
    assert [document["agreed"] for document in documents] == [["cascade"]] * 3
    assert {document["ranks"][2]["state"] for document in documents} == {"dead"}


def test_a_rank_that_hangs_is_not_waited_for(node: Node, tcp: str) -> None:
    processes = start(node, 2, tcp, pause=3)
    wait_for_compilers(node)
    os.kill(processes[1].pid, signal.SIGSTOP)
    try:
        document = processes[0].document(100)
        assert document["agreed"] == ["cascade"]
        assert document["ranks"][1]["state"] == "dead"
    finally:
        processes[1].kill()


def test_a_rank_that_never_calls_is_waited_for_a_bounded_time(node: Node, tcp: str) -> None:
    processes = start(node, 2, tcp, special={1: {"never_calls": True}}, join=3)
    document = processes[0].document(50)
    assert document["modules"][0]["status"] == "built"
    assert (document["agreed"], document["ranks"][1]["state"]) == ([], "absent")
    processes[1].kill()


def test_the_deadline_ends_the_barrier(node: Node, tcp: str) -> None:
    processes = start(node, 2, tcp, special={0: {"deadline": 6}, 1: {"never_calls": True}})
    begun = time.monotonic()
    document = processes[0].document(100)
    assert time.monotonic() - begun < 50
    assert document["ranks"][1]["state"] == "absent"
    processes[1].kill()


def test_what_one_rank_could_not_build_the_others_do_not_try(node: Node, tcp: str, tmp_path: Path) -> None:
    log, nvcc = tmp_path / "nvcc.log", tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho start >>{log}\nexit 3\n")
    nvcc.chmod(0o755)
    environ = {"environ": {"FLASHINFER_NVCC": str(nvcc), "FLASHINFER_NVCC_LAUNCHER": ""}}
    documents = [process.document(200) for process in start(node, 4, tcp, special={rank: dict(environ) for rank in range(4)})]
    assert statuses(documents) == ["failed"] * 4
    assert len(log.read_text().splitlines()) <= 2, "it was tried more than once"
    assert [document["agreed"] for document in documents] == [[]] * 4


def test_a_second_warm_up_of_the_same_ranks_agrees_again(node: Node, tcp: str) -> None:
    code = RANK + "\nagain = warmup(kinds=(), modules=('cascade',), stall_seconds=5, join_seconds=60)\n"
    code += "print(json.dumps(again.to_json()))"
    processes = [node.start(code, str(rank), "2", tcp, "{}") for rank in range(2)]
    for process in processes:
        document = process.document(200)
        assert (document["agreed"], document["modules"][0]["status"]) == (["cascade"], "present")
