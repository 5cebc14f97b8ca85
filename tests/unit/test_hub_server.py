"""The local Hub, seen by the real huggingface_hub: what it promises has to be true before anything is tested against it."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from hub.process import READER, STRANGER, WRITER, HubProcess, local_hub

REPO = "farm/kernels"

PRELUDE = """
import json, os, sys
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, hf_hub_download, snapshot_download
from huggingface_hub import utils
utils.disable_progress_bars()
api = HfApi()
REPO = "farm/kernels"
def said(call):
    try:
        return call()
    except Exception as error:
        return type(error).__name__
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with local_hub(tmp_path_factory.mktemp("hub")) as hub:
        yield hub


@pytest.fixture
def hub(shared: HubProcess) -> HubProcess:
    """A Hub with one public repository and no faults."""
    for what, document in (("faults", []), ("limits", {}), ("options", {"page": 1000, "multipart": 20_000_000})):
        shared.admin(what, document)
    script(shared, f"api.create_repo({REPO!r}, exist_ok=True)")
    shared.repository(REPO, private=False, gated=False, granted=[])
    shared.requests()
    return shared


def script(hub: HubProcess, code: str, token: str | None = WRITER, **more: str) -> Any:
    """What a script that uses the real huggingface_hub prints as JSON, by `print(json.dumps(...))`; None if nothing."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environ |= {**hub.environ(token), "NO_PROXY": "*", **more}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else None


def asked(hub: HubProcess, method: str, path: str, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
    """One plain request, no redirects followed."""
    connection = http.client.HTTPConnection(urlsplit(hub.endpoint).netloc, timeout=30)
    connection.request(method, path, headers=headers or {})
    response = connection.getresponse()
    found = response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    connection.close()
    return found


def test_files_of_both_kinds_come_back_as_they_were(hub: HubProcess, tmp_path: Path) -> None:
    (tmp_path / "big.tar.zst").write_bytes(os.urandom(3_000_000))
    found = script(
        hub,
        f"""
big = {str(tmp_path / "big.tar.zst")!r}
info = api.create_commit(REPO, [CommitOperationAdd("a/big.tar.zst", big), CommitOperationAdd("a/b/small.json", b"{{}}")],
                         commit_message="both")
there = snapshot_download(REPO)
print(json.dumps({{
    "oid": info.oid,
    "big": open(hf_hub_download(REPO, "a/big.tar.zst"), "rb").read() == open(big, "rb").read(),
    "snapshot": sorted(os.path.relpath(os.path.join(d, f), there) for d, _, fs in os.walk(there) for f in fs),
    "tree": [[type(e).__name__, e.path] for e in api.list_repo_tree(REPO, recursive=True)],
    "lfs": [[i.path, i.size, i.lfs and i.lfs.sha256] for i in api.get_paths_info(REPO, ["a/big.tar.zst", "a/b/small.json", "x"])],
    "sha": api.repo_info(REPO).sha,
    "refs": [[b.name, b.target_commit] for b in api.list_repo_refs(REPO).branches],
    "commits": [c.title for c in api.list_repo_commits(REPO)],
    "name": api.whoami()["name"],
}}))""",
    )
    import hashlib

    assert found["big"] and found["name"] == "builder"
    assert {"a/big.tar.zst", "a/b/small.json"} <= set(found["snapshot"])
    assert ["RepoFolder", "a/b"] in found["tree"] and ["RepoFile", "a/b/small.json"] in found["tree"]
    digest = hashlib.sha256((tmp_path / "big.tar.zst").read_bytes()).hexdigest()
    assert found["lfs"] == [["a/big.tar.zst", 3_000_000, digest], ["a/b/small.json", 2, None]]
    assert found["refs"] == [["main", found["oid"]]] and found["sha"] == found["oid"]
    assert found["commits"][0] == "both" and found["commits"][-1] == "initial commit"


def test_what_is_there_is_not_uploaded_again(hub: HubProcess) -> None:
    code = 'api.create_commit(REPO, [CommitOperationAdd("same.tar.zst", b"x" * 1000)], commit_message="m")'
    script(hub, code)
    hub.requests()
    script(hub, code)
    seen = [(line["method"], line["path"].rpartition("/")[0]) for line in hub.requests()]
    assert not any(method == "PUT" or "/commit" in path for method, path in seen)


def test_a_large_file_goes_up_in_parts(hub: HubProcess, tmp_path: Path) -> None:
    (tmp_path / "f.bin").write_bytes(os.urandom(12_000_000))
    hub.admin("options", {"multipart": 1_000_000})
    found = script(
        hub,
        f"""
path = {str(tmp_path / "f.bin")!r}
api.create_commit(REPO, [CommitOperationAdd("f.bin", path)], commit_message="parts")
print(json.dumps(open(hf_hub_download(REPO, "f.bin", force_download=True), "rb").read() == open(path, "rb").read()))""",
    )
    assert found is True
    assert sum(line["method"] == "PUT" and "/part/" in line["path"] for line in hub.requests()) == 3


def test_a_commit_on_an_old_parent_is_refused_and_changes_nothing(hub: HubProcess) -> None:
    found = script(
        hub,
        """
first = api.create_commit(REPO, [CommitOperationAdd("x.txt", b"1")], commit_message="1").oid
api.create_commit(REPO, [CommitOperationAdd("x.txt", b"2")], commit_message="2", parent_commit=first)
try:
    api.create_commit(REPO, [CommitOperationAdd("x.txt", b"3")], commit_message="3", parent_commit=first)
except Exception as error:
    print(json.dumps([error.response.status_code, open(hf_hub_download(REPO, "x.txt")).read()]))""",
    )
    assert found == [412, "2"]


def test_branches_tags_deletions_and_revisions(hub: HubProcess) -> None:
    found = script(
        hub,
        """
one = api.create_commit(REPO, [CommitOperationAdd("d/v.txt", b"1")], commit_message="1").oid
api.create_branch(REPO, branch="team/b"), api.create_tag(REPO, tag="v1")
api.create_commit(REPO, [CommitOperationAdd("d/v.txt", b"2")], commit_message="2", revision="team/b")
api.create_commit(REPO, [CommitOperationDelete("d/")], commit_message="3")
read = lambda r: said(lambda: open(hf_hub_download(REPO, "d/v.txt", revision=r)).read())
print(json.dumps([read("v1"), read("team/b"), read(one), read("main"), read("none")]))""",
    )
    assert found == ["1", "2", "1", "RemoteEntryNotFoundError", "RevisionNotFoundError"]


def test_a_listing_has_pages(hub: HubProcess) -> None:
    hub.admin("options", {"page": 3})
    found = script(
        hub,
        """
api.create_commit(REPO, [CommitOperationAdd(f"pages/{n}.txt", b"%d" % n) for n in range(10)], commit_message="m")
print(json.dumps([e.path for e in api.list_repo_tree(REPO, "pages")]))""",
    )
    assert found == [f"pages/{n}.txt" for n in range(10)]
    assert sum("/tree/" in line["path"] for line in hub.requests()) == 4


def test_who_may_not_is_told_as_the_hub_tells(hub: HubProcess, tmp_path: Path) -> None:
    counter = iter(range(100))

    def run(code: str, token: str) -> Any:
        return script(hub, code, token, FRESH=str(tmp_path / str(next(counter))))

    code = """
print(json.dumps([said(lambda: bool(hf_hub_download(REPO, ".gitattributes", cache_dir=os.environ["FRESH"]))),
                  said(lambda: bool(api.repo_info(REPO))), said(lambda: bool(hf_hub_download("farm/none", "x"))),
                  said(lambda: bool(api.create_commit(REPO, [CommitOperationAdd("y", os.urandom(9))], commit_message="m")))]))"""
    missing = "RepositoryNotFoundError"
    assert run(code, READER) == [True, True, missing, "HfHubHTTPError"]
    hub.repository(REPO, private=True)
    assert run(code, READER)[:2] == [True, True]
    assert run(code, STRANGER) == [missing] * 4
    hub.repository(REPO, private=False, gated=True)
    assert run(code, STRANGER)[:2] == ["GatedRepoError", True]
    hub.repository(REPO, granted=["stranger"])
    assert run(code, STRANGER)[0] is True
    bad = run(code, "hf_wrong")
    assert bad[1:3] == ["HfHubHTTPError", "HfHubHTTPError"]
    status, headers, _ = asked(hub, "GET", f"/{REPO}/resolve/main/x", {"Authorization": "Bearer hf_wrong"})
    assert (status, headers["x-error-message"]) == (401, "Invalid credentials in Authorization header")


def test_resolving_has_the_headers_ranges_and_redirects_of_the_hub(hub: HubProcess) -> None:
    script(
        hub,
        'api.create_commit(REPO, [CommitOperationAdd("r/s.txt", b"0123456789"), CommitOperationAdd("r/b.zst", b"0123456789")],'
        ' commit_message="m")',
    )
    status, headers, body = asked(hub, "GET", f"/{REPO}/resolve/main/r/s.txt", {"Range": "bytes=4-"})
    assert (status, body, headers["content-range"]) == (206, b"456789", "bytes 4-9/10")
    assert len(headers["x-repo-commit"]) == 40 and headers["etag"]
    status, _, body = asked(hub, "GET", f"/{REPO}/resolve/main/r/s.txt", {"Range": "bytes=10-"})
    assert status == 416
    status, headers, _ = asked(hub, "HEAD", f"/{REPO}/resolve/main/r/b.zst")
    assert status == 302 and headers["x-linked-size"] == "10" and headers["x-linked-etag"] == headers["etag"]
    assert urlsplit(headers["location"]).netloc != urlsplit(hub.endpoint).netloc
    status, headers, _ = asked(hub, "GET", f"/{REPO}/resolve/main/none")
    assert (status, headers["x-error-code"]) == (404, "EntryNotFound") and headers["x-repo-commit"]
    hub.admin("options", {"resolve_cache": True})
    status, headers, _ = asked(hub, "GET", f"/{REPO}/resolve/main/r/s.txt")
    assert status == 307 and headers["location"].startswith("/api/resolve-cache/models/")
    hub.admin("options", {"resolve_cache": False})


def test_a_limit_is_kept_and_said(hub: HubProcess) -> None:
    hub.admin("limits", {"resolvers": {"quota": 2, "window": 1.5}})
    seen = [asked(hub, "GET", f"/{REPO}/resolve/main/.gitattributes") for _ in range(3)]
    assert [status for status, _, _ in seen] == [200, 200, 429]
    assert seen[0][1]["ratelimit"].startswith('"resolvers";r=1;t=') and "q=2;w=1.5" in seen[2][1]["ratelimit-policy"]
    time.sleep(1.6)
    assert asked(hub, "GET", f"/{REPO}/resolve/main/.gitattributes")[0] == 200


PATH = f"/{REPO}/resolve/main/.gitattributes"


def test_every_fault_does_what_it_says(hub: HubProcess) -> None:
    whole = asked(hub, "GET", PATH)[2]

    def broken(**rule: Any) -> str:
        hub.fault({"path": "/resolve/", **rule})
        started = time.monotonic()
        try:
            status, headers, body = asked(hub, "GET", PATH)
        except Exception as error:  # noqa: BLE001 - which one, is the question
            return f"{type(error).__name__} {time.monotonic() - started > 0.9}"
        if status == 200 and body != whole and len(body) == len(whole):
            return f"differs at {[n for n in range(len(body)) if body[n] != whole[n]]}"
        return f"{status} {headers.get('retry-after') or headers.get('location') or headers['content-type']} {body == whole}"

    assert broken(action="status", status=503) == "503 application/json False"
    assert broken(action="status", status=429, headers={"Retry-After": "7"}) == "429 7 False"
    assert broken(action="reset") == "ConnectionResetError False"
    assert broken(action="reset", after=5) == "ConnectionResetError False"
    assert broken(action="close") == "RemoteDisconnected False"
    assert broken(action="close", after=5) == "IncompleteRead False"
    assert broken(action="hang", seconds=1) == "RemoteDisconnected True"
    assert broken(action="hang", after=5, seconds=1) == "IncompleteRead True"
    assert broken(action="flip", after=5) == "differs at [5]"
    assert broken(action="redirect", to="{url}") == f"302 {hub.endpoint}{PATH} False"
    assert broken(action="html").startswith("200 text/html")
    assert broken(action="garbage") == "BadStatusLine False"
    started = time.monotonic()
    assert broken(action="slow", rate=50).endswith("True") and time.monotonic() - started > 1
    assert broken(action="status", skip=1, count=1).startswith("200")
    assert asked(hub, "GET", PATH)[0] == 500 and asked(hub, "GET", PATH)[0] == 200


def test_a_fault_can_hide_the_answer_to_something_that_was_done(hub: HubProcess) -> None:
    hub.fault({"method": "POST", "path": "/commit/", "action": "reset", "effect": True, "count": 1})
    found = script(
        hub,
        """
print(json.dumps([said(lambda: api.create_commit(REPO, [CommitOperationAdd("h.txt", os.urandom(5))], commit_message="hidden")),
                  api.list_repo_commits(REPO)[0].title]))""",
    )
    assert found == ["ReadError", "hidden"]


def test_files_go_and_come_by_xet(tmp_path: Path) -> None:
    with local_hub(tmp_path / "hub", "--xet") as hub:
        (tmp_path / "big.tar.zst").write_bytes(os.urandom(2_000_000))
        (tmp_path / "text.bin").write_bytes(b"compressible " * 100_000)
        found = script(
            hub,
            f"""
api.create_repo(REPO)
names = ["big.tar.zst", "text.bin"]
api.create_commit(REPO, [CommitOperationAdd(n, {str(tmp_path)!r} + "/" + n) for n in names]
                  + [CommitOperationAdd("bytes.bin", b"z" * 5000)], commit_message="xet")
same = [open(hf_hub_download(REPO, n), "rb").read() == open({str(tmp_path)!r} + "/" + n, "rb").read() for n in names]
print(json.dumps([same, all(info.xet_hash for info in api.get_paths_info(REPO, [*names, "bytes.bin"]))]))""",
            HF_HUB_DISABLE_XET="0",
        )
        assert found == [[True, True], True]
        log = hub.requests()
        assert any("/xet-write-token/" in line["path"] for line in log) and any(
            "/xet-read-token/" in line["path"] for line in log
        )
        assert not any("/lfs/" in line["path"] for line in log)
        # Who has no xet gets the same bytes over HTTP.
        plain = script(
            hub, "print(json.dumps(len(open(hf_hub_download(REPO, 'text.bin'), 'rb').read())))", HF_HOME=str(tmp_path / "h")
        )
        assert plain == 1_300_000 and any("/lfs/" in line["path"] for line in hub.requests())


def test_without_xet_on_the_hub_the_library_does_not_fall_back(hub: HubProcess) -> None:
    found = script(
        hub,
        'add = [CommitOperationAdd("n.zst", os.urandom(9))]; '
        'print(json.dumps(said(lambda: api.create_commit(REPO, add, commit_message="m"))))',
        HF_HUB_DISABLE_XET="0",
    )
    assert isinstance(found, str) and found.endswith("Error")


def test_what_was_committed_outlives_the_server(tmp_path: Path) -> None:
    with local_hub(tmp_path) as hub:
        script(hub, f'api.create_repo({REPO!r}); api.create_commit(REPO, [CommitOperationAdd("a", b"1")], commit_message="m")')
    with local_hub(tmp_path) as hub:
        assert asked(hub, "GET", f"/{REPO}/resolve/main/a")[2] == b"1"
