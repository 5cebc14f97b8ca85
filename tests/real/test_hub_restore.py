"""Restoring from the local Hub through the real command line: requests, faults, bounds, messages, and that CMD starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from container import REPOSITORY, ROOT, Container, Done
from hub.process import READER, STRANGER, WRITER, HubProcess, local_hub
from hub.static import static_site

from kcache import index_parts
from kcache.index import parse_index
from kcache.values import replace

REPO = "farm/kernels"
STORE = f"hf://{REPO}"
CMD = ("--", sys.executable, "-c", "print('started')")

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, cascade_build: Path) -> Iterator[HubProcess]:
    """A Hub to which `cascade` was published by the command line."""
    with local_hub(tmp_path_factory.mktemp("hub")) as hub:
        words = [sys.executable, "-m", "kcache", "publish", str(cascade_build), "--to", STORE, "--create"]
        done = subprocess.run(words, env={**os.environ, **hub.environ()}, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        yield hub


@pytest.fixture
def hub(published: HubProcess) -> HubProcess:
    published.fault()
    published.admin("limits", {})
    published.admin("options", {"resolve_cache": False})
    published.repository(REPO, private=False, gated=False, readers=[], granted=[])
    published.requests()
    return published


@pytest.fixture
def container(tmp_path: Path, hub: HubProcess) -> Container:
    """A container that asks this Hub, without a token."""
    home = tmp_path / "home"
    home.mkdir()
    environ = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home / "hf")}
    return Container(home=home, environ=environ)


class Timed:
    """A command that was run, and how long it took beyond what a restore from an empty directory takes."""

    def __init__(self, done: Done, seconds: float) -> None:
        self.done, self.seconds = done, seconds


def restore(container: Container, *words: str, env: Mapping[str, str] | None = None, store: str = STORE) -> Timed:
    started = time.monotonic()
    done = container.kcache("restore", "--from", store, "--arch", "9.0a", *words, env=env, timeout=120)
    return Timed(done, time.monotonic() - started)


def resolved(hub: HubProcess) -> list[str]:
    return [line["path"] for line in hub.requests() if line["port"] == "hub"]


def test_a_download_that_takes_long_is_drawn_for_people_and_for_nobody_else(hub: HubProcess, container: Container) -> None:
    slow = [{"path": CDN, "action": "slow", "rate": 30_000}]
    hub.fault(*slow)
    assert "━" not in restore(container, "--json").done.err
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "kcache", "restore", "--from", STORE, "--arch", "9.0a"]
    home = container.home.with_name("another")
    home.mkdir()
    environ = {**container.variables, "HOME": str(home), "TERM": "xterm-256color", "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    seen = b""
    with suppress(OSError):  # what a terminal's reader gets when the last writer is gone
        while chunk := os.read(ours, 1 << 16):
            seen += chunk
    os.close(ours)
    assert process.wait(timeout=60) == 0
    assert "cascade" in seen.decode() and "━" in seen.decode() and "kB" in seen.decode()


# hits ---------------------------------------------------------------------------------------------------------------------


def test_a_cold_container_asks_three_times_and_never_the_api(hub: HubProcess, container: Container) -> None:
    done = restore(container, "--json").done
    assert done.document["status"] == "hit", done.err
    log = hub.requests()
    paths = [line["path"] for line in log]
    assert len([line for line in log if line["port"] == "hub"]) == 3 and len(log) == 4  # the archive, from the second port
    assert not any(path.startswith("/api/") for path in paths)
    assert done.document["http_requests"] == 4
    # One commit is settled on with the first answer, and the rest is read from it.
    commit = paths[1].split("/resolve/")[1].partition("/")[0]
    assert paths[0].startswith(f"/{REPO}/resolve/main/") and len(commit) == 40
    assert paths[2].startswith(f"/{REPO}/resolve/{commit}/v1/archives/")
    assert container.libraries and container.verify()["status"] == "proven"


def test_a_second_restore_asks_once(hub: HubProcess, container: Container) -> None:
    restore(container, "--json")
    hub.requests()
    assert restore(container, "--json").done.document["status"] == "hit"
    assert len(resolved(hub)) == 1


def test_a_pinned_commit_needs_no_network_twice(hub: HubProcess, container: Container) -> None:
    restore(container, "--json")
    commit = hub.requests()[1]["path"].split("/resolve/")[1].partition("/")[0]
    assert restore(container, "--json", store=f"{STORE}@{commit}").done.document["status"] == "hit"
    hub.requests()
    hub.fault({"path": ".", "action": "reset"})
    again = restore(container, "--json", store=f"{STORE}@{commit}", env={"HF_HUB_OFFLINE": "1"})
    assert (again.done.document["status"], again.done.document["http_requests"]) == ("hit", 0)
    assert again.done.document["warnings"] == [] and resolved(hub) == []


def test_what_was_kept_of_a_pinned_commit_and_was_damaged_is_read_again(hub: HubProcess, container: Container) -> None:
    restore(container, "--json")
    commit = hub.requests()[1]["path"].split("/resolve/")[1].partition("/")[0]
    restore(container, "--json", store=f"{STORE}@{commit}")
    hub.requests()
    kept = list((container.home / ".cache/kcache/v1/pinned").iterdir())
    assert kept
    for path in kept:
        path.write_bytes(path.read_bytes().replace(b"sampling", b"Sampling").replace(b"cascade", b"Cascade"))
    assert restore(container, "--json", store=f"{STORE}@{commit}").done.document["status"] == "hit"
    assert len(resolved(hub)) == 1


def test_regular_files_behind_a_redirect_of_the_same_origin(hub: HubProcess, container: Container) -> None:
    hub.repository(REPO, private=True)
    hub.admin("options", {"resolve_cache": True})
    assert restore(container, "--json", env={"HF_TOKEN": READER}).done.document["status"] == "hit"
    log = hub.requests()
    assert all(line["authorization"] == f"Bearer {READER}" for line in log if line["port"] == "hub")
    assert all(line["authorization"] is None for line in log if line["port"] == "cdn")
    assert sum("/api/resolve-cache/" in line["path"] for line in log) == 2


def test_a_token_comes_from_the_file_that_the_hub_keeps(hub: HubProcess, container: Container) -> None:
    hub.repository(REPO, private=True)
    (container.home / "hf").mkdir()
    (container.home / "hf" / "token").write_text(f"{READER}\n")
    assert restore(container, "--json").done.document["status"] == "hit"
    refused = restore(container, "--json", env={"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "KCACHE_DIR": str(container.home / "o")})
    assert refused.done.document["status"] == "error"


def test_a_proxy_is_gone_through(hub: HubProcess, container: Container) -> None:
    hub.fault()
    other = {"HF_ENDPOINT": "http://hub.invalid", "http_proxy": hub.endpoint}
    done = restore(container, "--json", env=other).done
    # The proxy is the Hub itself, which is asked for whole addresses; only that it was asked is of interest here.
    assert any(line["path"].startswith("http://hub.invalid/") for line in hub.requests()), done.err
    direct = restore(container, "--json", env={"http_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}).done
    assert direct.document["status"] == "hit"


def test_lookup_decides_as_restore_does(hub: HubProcess, container: Container) -> None:
    done = container.kcache("lookup", "--from", STORE, "--arch", "9.0a", "--json")
    assert (done.code, done.document["status"]) == (0, "hit"), done.err
    miss = container.kcache("lookup", "--from", STORE, "--arch", "12.0f", "--json")
    assert (miss.code, miss.document["status"]) == (10, "miss")


def test_an_environment_for_which_nothing_is_published_is_a_miss_after_one_request(
    hub: HubProcess, container: Container, tmp_path: Path
) -> None:
    env = container.kcache("env", "--arch", "9.0a", "--save", str(tmp_path / "env.json"))
    assert env.code == 0, env.err
    text = (tmp_path / "env.json").read_text().replace("0.7.4", "0.9.9")
    (tmp_path / "env.json").write_text(text)
    hub.requests()
    done = container.kcache("restore", "--from", STORE, "--env", str(tmp_path / "env.json"), "--json")
    assert done.document["status"] == "miss", done.err
    assert len(resolved(hub)) == 1


def test_a_mirror_of_the_repository_is_a_store_too(hub: HubProcess, container: Container, cascade_store: Path) -> None:
    with static_site(cascade_store) as site:
        done = restore(container, "--json", store=site).done
        assert (done.document["status"], done.document["http_requests"]) == ("hit", 3), done.err
        looked = container.kcache("lookup", "--from", site, "--arch", "9.0a", "--json")
        assert looked.document["status"] == "hit", looked.err


def test_of_a_large_index_a_container_reads_its_own_part(container: Container, cascade_store: Path, tmp_path: Path) -> None:
    """A thousand entries of a hundred models in this very environment: one request more, and the models are named."""
    store = tmp_path / "store"
    shutil.copytree(cascade_store, store)
    path = next((store / "v1" / "env").glob("*/*/index.json"))
    found = parse_index(path.read_bytes())
    (line,) = found.entries
    more = []
    for number in range(1000):
        ingredients = {**line.key.ingredients, "gpu.arch": ("90a", "100a", "120f")[number % 3]}
        key = replace(
            line.key, kind="for-models", ingredients=ingredients, model=f"owner/model-{number % 100}", variant=f"v{number}"
        )
        more.append(replace(line, key=key))
    data, parts = index_parts.encode(replace(found, entries=(line, *more)), str(path.parent.relative_to(store)))
    path.write_bytes(data)
    for name, content in parts.items():
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(content)
    with static_site(store) as site:
        done = restore(container, "--json", store=site).done
        assert [entry["modules"] for entry in done.document["kinds"]["modules"]["entries"]] == [["cascade"]], done.err
        assert "published for 100 models; name yours with --model: owner/model-0" in done.document["reasons"][0]
        assert done.document["http_requests"] == 4  # the index, a part, the manifest, the archive
        assert container.libraries
        misspelt = restore(container, "--json", "--model", "model-1x", store=site).done
        assert misspelt.document["status"] == "hit" and "did you mean" in misspelt.document["warnings"][0]
    for part in parts:
        (store / part).write_bytes(b"{}")
    lost = restore(container, *CMD, store=str(store), env={"KCACHE_DIR": str(tmp_path / "other")}).done
    assert lost.out == "started\n" and "is not what the index says" in lost.err and len(lost.err.splitlines()) <= 2, lost.err


# faults -------------------------------------------------------------------------------------------------------------------

INDEX, ARCHIVE, CDN = "^hub:.*index.json", "^hub:.*archives", "^cdn:"

PASSING: dict[str, list[dict[str, Any]]] = {
    "429 with Retry-After": [{"path": INDEX, "action": "status", "status": 429, "headers": {"Retry-After": "1"}, "count": 1}],
    "429 with the draft's header": [
        {"path": INDEX, "action": "status", "status": 429, "headers": {"RateLimit": '"resolvers";r=0;t=1'}, "count": 1}
    ],
    "500": [{"path": ARCHIVE, "action": "status", "status": 500, "count": 2}],
    "503": [{"path": INDEX, "action": "status", "status": 503, "count": 2}],
    "503 of the storage": [{"path": CDN, "action": "status", "status": 503, "count": 2}],
    "reset": [{"path": INDEX, "action": "reset", "count": 2}],
    "closed": [{"path": INDEX, "action": "close", "count": 2}],
    "garbage": [{"path": INDEX, "action": "garbage", "count": 1}],
    "truncated index": [{"path": INDEX, "action": "close", "after": 100, "count": 1}],
    "truncated archive": [{"path": CDN, "action": "close", "after": 30_000, "count": 2}],
    "reset within the archive": [{"path": CDN, "action": "reset", "after": 30_000, "count": 2}],
    "hang before the headers": [{"path": INDEX, "action": "hang", "count": 1}],
    "hang after the headers": [{"path": CDN, "action": "hang", "after": 0, "count": 1}],
    "hang within the archive": [{"path": CDN, "action": "hang", "after": 30_000, "count": 1}],
    "a slow link that suffices": [{"path": INDEX, "action": "slow", "rate": 100_000}],
}


@pytest.mark.parametrize("rules", PASSING.values(), ids=PASSING)
def test_a_fault_that_passes_is_got_over(hub: HubProcess, container: Container, rules: list[dict[str, Any]]) -> None:
    hub.fault(*rules)
    timed = restore(container, "--json", "--deadline", "30s")
    assert timed.done.document["status"] == "hit", timed.done.err
    assert timed.done.document["warnings"] == []
    assert timed.seconds < 45


def test_a_download_goes_on_where_it_broke_off(hub: HubProcess, container: Container) -> None:
    hub.fault({"path": CDN, "action": "reset", "after": 30_000, "count": 2})
    assert restore(container, "--json").done.document["status"] == "hit"
    ranges = [line["range"] for line in hub.requests() if line["port"] == "cdn"]
    assert ranges[0] is None and len(ranges) == 3
    starts = [int(text.removeprefix("bytes=").rstrip("-")) for text in ranges[1:]]
    assert 0 < starts[0] < starts[1]


LASTING: dict[str, tuple[list[dict[str, Any]], str, float]] = {
    "503": ([{"path": INDEX, "action": "status", "status": 503}], "answers 503", 12),
    "429 for longer than there is time": (
        [{"path": INDEX, "action": "status", "status": 429, "headers": {"Retry-After": "300"}}],
        "asks to wait 300 s; there is time for",
        5,
    ),
    "429 with the draft's header": (
        [{"path": INDEX, "action": "status", "status": 429, "headers": {"RateLimit": '"resolvers";r=0;t=300'}}],
        "asks to wait 300 s; there is time for",
        5,
    ),
    "409": ([{"path": INDEX, "action": "status", "status": 409}], "answered 409", 5),
    "reset": ([{"path": INDEX, "action": "reset"}], "broke: Connection reset", 12),
    "closed": ([{"path": INDEX, "action": "close"}], "ended the connection without an answer", 12),
    "garbage": ([{"path": INDEX, "action": "garbage"}], "does not answer in HTTP", 12),
    "hang before the headers": ([{"path": INDEX, "action": "hang"}], "does not answer: nothing came for", 10),
    "hang after the headers": ([{"path": INDEX, "action": "hang", "after": 0}], "broke off after 0 bytes: nothing came for", 10),
    "hang within the archive": ([{"path": CDN, "action": "hang", "after": 9000}], "nothing came for", 10),
    "dripping headers": ([{"path": INDEX, "action": "drip", "seconds": 0.2}], "longer than the time that was allowed", 10),
    "slow index": ([{"path": INDEX, "action": "slow", "rate": 50}], "longer than the time that was allowed", 10),
    "slow link": ([{"path": CDN, "action": "slow", "rate": 2000}], "longer than", 10),
    "flipped bit in the index": ([{"path": INDEX, "action": "flip", "after": 20}], "index.json", 5),
    "flipped bit in the manifest": ([{"path": "entries/", "action": "flip", "after": 200}], "the index says sha256:", 5),
    "flipped bit in the archive": ([{"path": CDN, "action": "flip", "after": 2000}], "", 5),
    "redirect without end": ([{"path": INDEX, "action": "redirect", "to": "{url}"}], "was not answered by a Hub", 5),
    "captive portal": ([{"path": ".", "action": "html"}], "was answered with a web page", 5),
    "storage refuses": ([{"path": CDN, "action": "status", "status": 403}], "it answered 403", 5),
}


@pytest.mark.parametrize(("rules", "message", "seconds"), LASTING.values(), ids=LASTING)
def test_a_fault_that_lasts_costs_at_most_the_deadline_and_one_line(
    hub: HubProcess, container: Container, rules: list[dict[str, Any]], message: str, seconds: float
) -> None:
    hub.fault(*rules)
    timed = restore(container, "--deadline", "8s", *CMD)
    assert timed.done.code == 0 and timed.done.out == "started\n", timed.done.err
    lines = [line for line in timed.done.err.splitlines() if "restore failed" in line or "nothing restored" in line]
    assert len(lines) == 1 and message in lines[0], timed.done.err
    assert "Traceback" not in timed.done.err and len(timed.done.err.splitlines()) <= 2
    assert timed.seconds < seconds + 10  # this machine is slow, and others work on it
    assert not container.libraries


ANSWERS: dict[str, tuple[dict[str, str], str, str]] = {
    "wrong token": ({"HF_TOKEN": "hf_wrong"}, STORE, "does not know the token. Set HF_TOKEN"),
    "missing, no token": ({}, "hf://farm/none", "there is no repository farm/none on"),
    "missing, with a token": ({"HF_TOKEN": READER}, "hf://farm/none", "the token given may not see it"),
    "no such revision": ({}, f"{STORE}@v9", "has no revision v9"),
    "offline": ({"HF_HUB_OFFLINE": "1"}, STORE, "HF_HUB_OFFLINE is set"),
    "refused": ({"HF_ENDPOINT": "http://127.0.0.1:9"}, STORE, "no connection to http://127.0.0.1:9: Connection refused"),
    "no such host": ({"HF_ENDPOINT": "http://no-such-host.invalid"}, STORE, "the name no-such-host.invalid cannot be resolved"),
    "no address": ({"HF_ENDPOINT": "ftp://x"}, STORE, "is no address"),
    "no proxy": ({"http_proxy": "http://127.0.0.1:9"}, STORE, "no connection to the proxy 127.0.0.1:9"),
    "proxy of another kind": ({"http_proxy": "socks5://127.0.0.1:9"}, STORE, "kcache speaks to proxies by plain HTTP"),
    "plain http elsewhere": ({}, "http://mirror.invalid/x", "are for this host only"),
}


@pytest.mark.parametrize(("environ", "store", "message"), ANSWERS.values(), ids=ANSWERS)
def test_what_cannot_be_had_is_one_clear_line(
    hub: HubProcess, container: Container, environ: dict[str, str], store: str, message: str
) -> None:
    timed = restore(container, "--deadline", "20s", *CMD, env=environ, store=store)
    assert timed.done.out == "started\n"
    lines = timed.done.err.splitlines()
    assert message in lines[0] and "Traceback" not in timed.done.err and len(lines) <= 2, timed.done.err
    assert timed.seconds < 20
    strict = restore(container, "--strict", *CMD, env=environ, store=store)
    assert strict.done.out == "" and strict.done.code != 0


def test_a_private_and_a_gated_repository(hub: HubProcess, container: Container) -> None:
    hub.repository(REPO, private=True)
    assert "or it is private: there is no token" in restore(container, *CMD).done.err
    assert "the token given may not see it" in restore(container, *CMD, env={"HF_TOKEN": STRANGER}).done.err
    hub.repository(REPO, private=False, gated=True)
    refused = restore(container, *CMD, env={"HF_TOKEN": STRANGER}).done
    assert f"{REPO} on " in refused.err and "is gated: this token was not granted access" in refused.err
    assert "is gated: there is no token" in restore(container, *CMD).done.err
    hub.repository(REPO, granted=["stranger"])
    assert restore(container, "--json", env={"HF_TOKEN": STRANGER}).done.document["status"] == "hit"


def test_of_several_stores_one_bad_one_does_not_stop_the_next(hub: HubProcess, container: Container, cascade_store: Path) -> None:
    hub.fault({"path": ".", "action": "hang"})
    started = time.monotonic()
    stores = ["--from", "hf://farm/none", "--from", STORE, "--from", str(cascade_store)]
    done = container.kcache("restore", *stores, "--arch", "9.0a", "--deadline", "9s", "--json")
    assert done.document["status"] == "hit", done.err
    assert len(done.document["warnings"]) == 2
    assert time.monotonic() - started < 25


def test_what_was_installed_is_used_when_the_hub_is_gone(hub: HubProcess, container: Container) -> None:
    restore(container, "--json")
    hub.fault({"path": ".", "action": "status", "status": 503})
    done = restore(container, "--json", "--deadline", "5s").done
    assert done.document["status"] == "hit"
    assert "answers 503" in done.document["warnings"][0]


def test_restoring_imports_no_http_library(hub: HubProcess, container: Container) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "kcache", "restore", "--from", STORE, "--arch", "9.0a", "--json"]
    loaded = {
        line.rpartition("|")[2].strip() for line in container.run(command).err.splitlines() if line.startswith("import time")
    }
    assert "kcache.store.wire" in loaded
    assert not loaded & {
        "huggingface_hub",
        "httpx",
        "httpx2",
        "requests",
        "urllib.request",
        "http.client",
        "email",
        "ssl",
        "asyncio",
    }


def test_the_writers_token_is_not_needed_to_read(hub: HubProcess, container: Container) -> None:
    assert restore(container, "--json").done.document["status"] == "hit"
    assert all(line["authorization"] is None for line in hub.requests())
    assert restore(container, "--json", env={"HF_TOKEN": WRITER}).done.document["status"] == "hit"


def test_a_fleet_beyond_the_hubs_limit_waits_as_told_and_all_of_it_starts(hub: HubProcess, tmp_path: Path) -> None:
    """Forty containers, every fourth of them without a hit, need 100 requests of an address that may send 40 in 5 seconds."""
    hub.admin("limits", {"resolvers": {"quota": 40, "window": 5}})

    def start(number: int) -> tuple[Done, float]:
        home = tmp_path / f"home{number}"
        home.mkdir()
        container = Container(home=home, environ={"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home)})
        began = time.monotonic()
        arch = "12.0f" if number % 4 == 3 else "9.0a"
        done = container.kcache("restore", "--from", STORE, "--arch", arch, "--deadline", "60s", "--", "/bin/echo", "started")
        return done, time.monotonic() - began

    with ThreadPoolExecutor(8) as pool:
        ended = list(pool.map(start, range(40)))
    done = [each for each, _ in ended]
    assert [each.out for each in done] == ["started\n"] * 40
    assert max(seconds for _, seconds in ended) < 70
    found = ["restored: cascade" in each.err for each in done]
    assert found == [number % 4 != 3 for number in range(40)], [each.err for each in done]
    log = [line for line in hub.requests() if line["port"] == "hub"]
    assert sum(line["status"] in (200, 302) for line in log) == 30 * 3 + 10 and any(line["status"] == 429 for line in log)
    assert not any(line["path"].startswith("/api/") for line in log)


@pytest.mark.skipif(not ROOT, reason="needs root")
@pytest.mark.root
def test_b13_without_room_the_archive_is_not_asked_for_and_the_server_starts(hub: HubProcess, container: Container) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,mode=0755", "tmpfs", str(container.home)], check=True)
    try:
        timed = restore(container, "--deadline", "20s", *CMD)
        assert timed.done.out == "started\n" and timed.seconds < 20
        (line,) = timed.done.err.splitlines()
        assert f"{container.home}/.cache/kcache/v1 has room for" in line and "Free some space" in line, line
        assert not any("archives" in path for path in resolved(hub))
        assert not [path for path in (container.home / ".cache/kcache/v1/entries").rglob("*") if path.is_file()]
    finally:
        subprocess.run(["umount", str(container.home)], check=True)


def test_b14_eight_ranks_of_a_node_download_an_entry_once(hub: HubProcess, container: Container) -> None:
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: restore(container, "--json").done.document, range(8)))
    assert [document["status"] for document in done] == ["hit"] * 8
    actions = [entry["action"] for document in done for entry in document["kinds"]["modules"]["entries"]]
    assert sorted(actions) == ["in-place"] * 7 + ["installed"]
    assert sum("archives" in path for path in resolved(hub)) == 1
    assert len(container.libraries) == 1 and container.verify()["status"] == "proven"


def test_b38_eight_ranks_of_a_node_ask_once_and_start_where_the_hub_asks_for_more_time_than_there_is(
    hub: HubProcess, container: Container
) -> None:
    hub.fault({"path": INDEX, "action": "status", "status": 429, "headers": {"Retry-After": "300"}})
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: restore(container, "--deadline", "8s", *CMD).done, range(8)))
    assert [(each.code, each.out) for each in done] == [(0, "started\n")] * 8, done[0].err
    assert sum("asks to wait 300 s" in each.err for each in done) == 1
    assert sum("asked another process of this host to wait" in each.err for each in done) == 7
    assert len(resolved(hub)) == 1  # nobody asks again before the time that was named


def test_b38_eight_ranks_of_a_node_are_one_stream_of_requests_where_the_hub_asks_them_to_wait(
    hub: HubProcess, container: Container
) -> None:
    hub.fault({"path": INDEX, "action": "status", "status": 429, "headers": {"Retry-After": "2"}, "count": 1})
    with ThreadPoolExecutor(8) as pool:
        done = list(pool.map(lambda _: restore(container, "--deadline", "60s", *CMD).done, range(8)))
    assert [(each.code, each.out) for each in done] == [(0, "started\n")] * 8, done[0].err
    log = hub.requests()
    refused = next(number for number, line in enumerate(log) if line["status"] == 429)
    assert (
        refused == 0 and sum("index.json" in line["path"] for line in log) == 9 and sum("archives" in x["path"] for x in log) <= 2
    )
