"""Publishing to the local Hub: batches, conflicts and lost answers, kills and races, and the page that people see."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from entries import INGREDIENTS, make_entry, restored
from hub.process import READER, WRITER, HubProcess, local_hub

from kcache.errors import StoreError
from kcache.index import index_path
from kcache.store.hf import HfStore
from kcache.workflows.catalog import read_index

INDEX = index_path(INGREDIENTS)
_numbers = count()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with local_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture
def hub(shared: HubProcess) -> HubProcess:
    shared.fault()
    shared.admin("limits", {})
    shared.requests()
    return shared


@pytest.fixture
def repo(hub: HubProcess) -> str:
    """The address of a repository that is not there yet."""
    return f"hf://farm/published{next(_numbers)}"


def publisher(hub: HubProcess, directory: Path, repo: str, *words: str, token: str | None = WRITER) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kcache", "publish", str(directory), "--to", repo, "--json", *words]
    environ = {**os.environ, **hub.environ(token)}
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def publish(hub: HubProcess, directory: Path, repo: str, *words: str, token: str | None = WRITER) -> tuple[Any, str]:
    """The report of `kcache publish --json` (None if it failed), and what it said."""
    out, err = publisher(hub, directory, repo, *words, token=token).communicate(timeout=300)
    document = json.loads(out) if out else None
    return None if document is None or document.get("status") == "error" else document, err


def reader(hub: HubProcess, repo: str) -> HfStore:
    return HfStore(repo, stall=10, environ={**os.environ, **hub.environ(READER)})


def commits(requests: Sequence[Mapping[str, Any]]) -> int:
    return sum("/commit/" in line["path"] and line["status"] == 200 for line in requests)


def entries(directory: Path, number: int, prefix: str = "m") -> list[str]:
    """Fingerprints of some small entries."""
    return [make_entry(directory, {f"{prefix}{n}": b"\x7fELF %d" % n * 50}, kind="modules").fingerprint for n in range(number)]


def test_what_is_published_is_whole_and_has_a_page(hub: HubProcess, repo: str, tmp_path: Path) -> None:
    fingerprints = entries(tmp_path / "out", 3)
    report, said = publish(hub, tmp_path / "out", repo, "--create")
    assert report is not None, said
    assert {entry["status"] for entry in report["entries"]} == {"uploaded"}
    assert commits(hub.requests()) == 3  # archives and manifests, index, page
    store = reader(hub, repo)
    assert sorted(restored(store)) == sorted(fingerprints)
    page = store.read_bytes("README.md", 10_000).decode()
    assert f"kcache restore --from {repo} --" in page and "| 0.7.4 | x86_64 | 13 | modules | 90a | 3 |" in page


def test_publishing_again_uploads_nothing(hub: HubProcess, repo: str, tmp_path: Path) -> None:
    entries(tmp_path / "out", 2)
    publish(hub, tmp_path / "out", repo, "--create")
    hub.requests()
    report, said = publish(hub, tmp_path / "out", repo)
    assert [entry["status"] for entry in report["entries"]] == ["present"] * 2 and report["bytes_uploaded"] == 0, said
    assert not [line for line in hub.requests() if line["method"] in ("POST", "PUT") and "paths-info" not in line["path"]]


def test_other_files_under_the_same_key_are_refused_unless_they_may_be_replaced(
    hub: HubProcess, repo: str, tmp_path: Path
) -> None:
    ours = make_entry(tmp_path / "a", {"cascade": b"one"})
    theirs = make_entry(tmp_path / "b", {"cascade": b"two"})
    publish(hub, tmp_path / "a", repo, "--create")
    report, said = publish(hub, tmp_path / "b", repo)
    assert report is None and "--replace" in said and len(said.splitlines()) == 1
    assert ours.archive.sha256 in said and theirs.archive.sha256 in said
    assert restored(reader(hub, repo)) == {ours.fingerprint: {"cascade/cascade.so": b"one"}}
    report, said = publish(hub, tmp_path / "b", repo, "--replace")
    assert report["entries"][0]["status"] == "replaced", said
    assert restored(reader(hub, repo)) == {ours.fingerprint: {"cascade/cascade.so": b"two"}}


def prune(hub: HubProcess, repo: str, *words: str, token: str | None = WRITER) -> dict[str, Any]:
    command = [sys.executable, "-m", "kcache", "prune", "--in", repo, "--json", *words]
    done = subprocess.run(
        command, env={**os.environ, **hub.environ(token)}, capture_output=True, text=True, timeout=300, check=False
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_pruning_takes_lines_out_first_and_files_after_the_grace_time_in_few_commits(
    hub: HubProcess, repo: str, tmp_path: Path
) -> None:
    kept = entries(tmp_path / "out", 2)
    for number in range(5):
        make_entry(tmp_path / "out", {f"old{number}": b"old %d" % number}, kind="modules", flashinfer_version="0.6.18")
    publish(hub, tmp_path / "out", repo, "--create")
    ingredients = {**INGREDIENTS, "flashinfer.version": "0.6.18"}
    old = read_index(reader(hub, repo), ingredients)
    assert old is not None and len(old.entries) == 5
    assert prune(hub, repo, "--version", "0.6.*", token=READER)["status"] == "error"
    assert len(restored(reader(hub, repo), old)) == 5
    hub.requests()
    done = prune(hub, repo, "--version", "0.6.*")
    assert (len(done["deleted"]), len(done["waiting"])) == (0, 10)
    assert commits(hub.requests()) == 4  # markers, index, page, when what was seen
    now = read_index(reader(hub, repo), ingredients)
    assert now is not None and now.entries == ()
    assert len(restored(reader(hub, repo), old)) == 5  # who has read the old index
    assert "0.6.18" not in reader(hub, repo).read_bytes("README.md", 10_000).decode()
    assert len(prune(hub, repo, "--grace", "0s")["deleted"]) == 10
    assert commits(hub.requests()) == 2  # the times without what left, ten files
    left = list(reader(hub, repo).list("v1/archives"))
    assert len(left) == 2 and sorted(restored(reader(hub, repo))) == sorted(kept)
    assert prune(hub, repo, "--grace", "0s")["deleted"] == []
    report, said = publish(hub, tmp_path / "out", repo)
    assert [entry["status"] for entry in report["entries"]].count("uploaded") == 5, said  # asked for again


def test_many_entries_are_few_commits(hub: HubProcess, repo: str, tmp_path: Path) -> None:
    fingerprints = entries(tmp_path / "out", 60)
    publish(hub, tmp_path / "out", repo, "--create")
    assert commits(hub.requests()) == 4  # 120 files in two, index, page
    assert sorted(restored(reader(hub, repo))) == sorted(fingerprints)


def test_a_dry_run_asks_and_changes_nothing(hub: HubProcess, repo: str, tmp_path: Path) -> None:
    entries(tmp_path / "out", 2)
    report, said = publish(hub, tmp_path / "out", repo, "--create", "--dry-run")
    assert report["dry_run"] and report["bytes_uploaded"] > 0, said
    assert {line["method"] for line in hub.requests()} <= {"GET", "HEAD"}
    assert publish(hub, tmp_path / "out", repo)[0] is None


def test_a_branch_and_a_directory_of_a_private_repository(hub: HubProcess, repo: str, tmp_path: Path) -> None:
    fingerprints = entries(tmp_path / "out", 1)
    report, said = publish(hub, tmp_path / "out", f"{repo}/deep/er", "--create", "--private", "--revision", "team/x")
    assert report is not None, said
    assert hub.repository(repo.removeprefix("hf://"))["private"] is True
    assert list(restored(reader(hub, f"{repo}@team%2Fx/deep/er"))) == fingerprints
    with pytest.raises(StoreError, match="no revision"):
        read_index(reader(hub, f"{repo}@none"), INGREDIENTS)
    assert read_index(reader(hub, repo), INGREDIENTS) is None


def test_a_page_that_somebody_wrote_is_left_alone(hub: HubProcess, repo: str, tmp_path: Path) -> None:
    entries(tmp_path / "out", 1)
    store = HfStore(repo, settle=False, create=True, environ={**os.environ, **hub.environ()})
    os.environ["HF_HUB_DISABLE_XET"] = "1"
    store.write("README.md", b"# Ours\n", if_absent=True)
    report, _ = publish(hub, tmp_path / "out", repo)
    assert "written by somebody else" in report["warnings"][0]
    assert reader(hub, repo).read_bytes("README.md", 100) == b"# Ours\n"


MESSAGES: dict[str, tuple[str | None, list[str], str]] = {
    "no repository": (WRITER, [], "Publish with --create to make it"),
    "no token": (None, ["--create"], "wants a token"),
    "a token that may only read": (READER, ["--create"], "rights to create"),
    "a wrong token": ("hf_wrong", ["--create"], "does not know the token"),
}


@pytest.mark.parametrize(("token", "words", "message"), MESSAGES.values(), ids=MESSAGES)
def test_what_is_refused_is_one_line(
    hub: HubProcess, repo: str, tmp_path: Path, token: str | None, words: list[str], message: str
) -> None:
    entries(tmp_path / "out", 1)
    report, said = publish(hub, tmp_path / "out", repo, *words, token=token)
    assert report is None and message in said and len(said.splitlines()) == 1, said


def test_a_token_that_may_only_read_cannot_publish(hub: HubProcess, repo: str, tmp_path: Path) -> None:
    entries(tmp_path / "out", 1)
    publish(hub, tmp_path / "out", repo, "--create")
    entries(tmp_path / "out", 2, "other")
    report, said = publish(hub, tmp_path / "out", repo, token=READER)
    assert report is None and "write token" in said and len(said.splitlines()) == 1, said


FAULTS: dict[str, list[dict[str, Any]]] = {
    "409": [{"path": "/commit/", "action": "status", "status": 409, "count": 3}],
    "412": [{"path": "/commit/", "action": "status", "status": 412, "count": 3}],
    "429": [{"path": "/commit/", "action": "status", "status": 429, "headers": {"Retry-After": "1"}, "count": 2}],
    "500": [{"path": "/commit/", "action": "status", "status": 500, "count": 2}],
    "503 of a listing": [{"path": "paths-info", "action": "status", "status": 503, "count": 2}],
    "503 of an upload": [{"path": "^cdn:/upload", "action": "status", "status": 503, "count": 1}],
    "reset": [{"path": "/commit/", "action": "reset", "count": 2}],
    "an answer that is lost": [{"path": "/commit/", "action": "reset", "effect": True, "count": 1}],
    "each answer is lost": [{"path": "/commit/", "action": "reset", "effect": True}],
    "a 500 for what was done": [{"path": "/commit/", "action": "status", "status": 500, "effect": True, "count": 2}],
    "a 412 for what was done": [{"path": "/commit/", "action": "status", "status": 412, "effect": True, "count": 1}],
}


@pytest.mark.parametrize("rules", FAULTS.values(), ids=FAULTS)
def test_a_fault_while_publishing_is_got_over_and_nothing_is_done_twice(
    hub: HubProcess, repo: str, tmp_path: Path, rules: list[dict[str, Any]]
) -> None:
    fingerprints = entries(tmp_path / "out", 2)
    hub.fault(*rules)
    report, said = publish(hub, tmp_path / "out", repo, "--create")
    assert report is not None, said
    hub.fault()
    store = reader(hub, repo)
    assert sorted(restored(store)) == sorted(fingerprints)
    # It knows what it did, but for a refusal of what was done: then somebody else may have done it.
    everything = sum(len(store.read_bytes(name, 1 << 20)) for name in store.list(""))
    assert report["indexes"] == [INDEX]
    assert report["bytes_uploaded"] == everything or (rules[0].get("status") == 412 and rules[0].get("effect"))
    titles = history(hub, repo)
    assert len(titles) == len(set(titles)) == 4, titles  # the Hub's first, files, index, page


def history(hub: HubProcess, repo: str) -> list[str]:
    import urllib.request

    address = f"{hub.endpoint}/api/models/{repo.removeprefix('hf://')}/commits/main"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(address) as answer:
        return [commit["title"] for commit in json.loads(answer.read())]


def test_other_bytes_than_were_given_are_noticed(hub: HubProcess, repo: str, tmp_path: Path) -> None:
    entries(tmp_path / "out", 1)
    publish(hub, tmp_path / "out", repo, "--create")
    entries(tmp_path / "more", 1, "other")
    body = json.dumps([])
    hub.fault({"path": "paths-info", "action": "status", "status": 200, "body": body, "skip": 1, "count": 1})
    report, said = publish(hub, tmp_path / "more", repo)
    assert report is None and "the Hub has other bytes for" in said


def test_a_publisher_killed_at_any_point_leaves_what_restores_and_the_next_one_completes_it(
    hub: HubProcess, repo: str, tmp_path: Path
) -> None:
    first = entries(tmp_path / "out", 1)
    publish(hub, tmp_path / "out", repo, "--create")
    everything = {*first}
    for number in range(6):
        added = entries(tmp_path / f"{number}", 4, f"k{number}x")
        # Slow down what comes, and kill in the middle: before the commit, at it, between it and the index, at the index.
        hub.fault({"path": "(commit|preupload|paths-info)", "action": "hang", "skip": number + 1, "seconds": 60, "effect": True})
        process = publisher(hub, tmp_path / f"{number}", repo)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            rule = hub.admin("faults")[0]
            if rule["hits"] > rule["skip"]:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        hub.fault()
        assert everything <= restored(reader(hub, repo)).keys() <= everything | {*added}
        report, said = publish(hub, tmp_path / f"{number}", repo)
        assert report is not None, said
        everything |= {*added}
        assert restored(reader(hub, repo)).keys() == everything


PUBLISHERS = """
import os, sys
from pathlib import Path
import huggingface_hub.hf_api
from kcache.store.open import open_store
from kcache.workflows.publish import publish
children = []
for place in sorted(Path(sys.argv[1]).iterdir()):  # processes of their own, that share an import of two seconds
    if (child := os.fork()) == 0:
        publish(place, open_store(sys.argv[2], writing=True), page=True)
        os._exit(0)
    children.append(child)
sys.exit(sum(os.waitpid(child, 0)[1] != 0 for child in children))
"""


def test_sixteen_publishers_of_twenty_entries_each_lose_nothing(hub: HubProcess, repo: str, tmp_path: Path) -> None:
    publishers, each = 16, 20
    fingerprints = []
    for number in range(publishers):
        fingerprints += entries(tmp_path / "all" / f"p{number}", each, f"r{number}x")
    make_entry(tmp_path / "seed", {"seed": b"1"})
    publish(hub, tmp_path / "seed", repo, "--create")
    hub.fault(
        {"path": "/commit/", "action": "status", "status": 409, "skip": 2, "count": 4},
        {"path": "/commit/", "action": "status", "status": 412, "skip": 7, "count": 4},
        {"path": "/commit/", "action": "status", "status": 429, "headers": {"Retry-After": "1"}, "skip": 13, "count": 2},
        {"path": "/commit/", "action": "reset", "effect": True, "skip": 17, "count": 2},
    )
    words = [sys.executable, "-c", PUBLISHERS, str(tmp_path / "all"), repo]
    done = subprocess.run(words, env={**os.environ, **hub.environ()}, timeout=600, check=False)
    assert done.returncode == 0
    assert all(rule["hits"] >= rule["skip"] + rule["count"] for rule in hub.admin("faults"))
    hub.fault()
    found = restored(reader(hub, repo))
    assert len(found) == publishers * each + 1 and {*fingerprints} <= found.keys()
    assert f"| {publishers * each + 1} |" in reader(hub, repo).read_bytes("README.md", 1 << 20).decode()


SWAPPER = """
import sys
from kcache.errors import ConflictError
from kcache.store.open import open_store
store = open_store(sys.argv[1], writing=True)
done = 0
while done < 6:
    data = store.read_bytes("counter", 100)
    try:
        store.replace("counter", str(int(data) + 1).encode(), data)
        done += 1
    except ConflictError:
        pass
"""

ABSENT_WRITER = """
import sys
from kcache.store.open import open_store
store = open_store(sys.argv[1], writing=True)
name = sys.argv[2].encode()
print(sum(sum(store.write_many([(f"race/{n}/{m}", name) for m in range(3)], if_absent=True)) for n in range(5)))
"""


@pytest.fixture
def made(hub: HubProcess, repo: str) -> str:
    """The address of an empty repository."""
    os.environ["HF_HUB_DISABLE_XET"] = "1"
    store = HfStore(repo, settle=False, create=True, environ={**os.environ, **hub.environ()})
    store.write("counter", b"0", if_absent=True)
    return repo


def test_processes_that_swap_one_object_on_the_hub_lose_no_update(hub: HubProcess, made: str) -> None:
    environ = {**os.environ, **hub.environ()}
    # Every answer comes late, so that all of them have looked before one has written.
    hub.fault({"path": "preupload", "action": "slow", "rate": 200})
    processes = [subprocess.Popen([sys.executable, "-c", SWAPPER, made], env=environ) for _ in range(3)]
    assert [process.wait(300) for process in processes] == [0] * 3
    assert reader(hub, made).read_bytes("counter", 100) == b"18"


def test_of_many_writers_of_one_object_on_the_hub_exactly_one_wrote_it(hub: HubProcess, made: str) -> None:
    environ = {**os.environ, **hub.environ()}
    # Every answer comes late, so that all of them have looked before one has written.
    hub.fault({"path": "paths-info", "action": "slow", "rate": 100})
    command = [sys.executable, "-c", ABSENT_WRITER, made]
    processes = [subprocess.Popen([*command, f"w{n}"], env=environ, stdout=subprocess.PIPE) for n in range(3)]
    assert sum(int(process.communicate(timeout=300)[0]) for process in processes) == 15
