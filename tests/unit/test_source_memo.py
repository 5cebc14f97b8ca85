"""Digests of FlashInfer's files are remembered as long as the files are the same, and no longer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kcache import digest
from kcache.local_cache import LocalCache, SourceMemo
from kcache.probe.host import hash_sources

OLD, NEW = digest.of_bytes(b"old"), digest.of_bytes(b"new")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a plain file and one that is a link to elsewhere, both of the same content."""
    directory = tmp_path / "flashinfer"
    directory.mkdir()
    (directory / "plain.cu").write_bytes(b"old")
    (tmp_path / "elsewhere.cu").write_bytes(b"old")
    (directory / "linked.cu").symlink_to(tmp_path / "elsewhere.cu")
    return directory


def remembered(tmp_path: Path, package: Path, digests: dict[str, str]) -> dict[str, str]:
    """What a process recalls, which then remembers `digests`."""
    memo = SourceMemo(LocalCache(tmp_path / "cache"), package)
    recalled = memo.recall(["plain.cu", "linked.cu", "none.cu"])
    memo.remember(digests, {path: (package / path).stat() for path in digests})
    memo.save()
    return recalled


def rewritten(path: Path) -> None:
    path.write_bytes(b"new")


def touched(path: Path) -> None:
    os.utime(path)


def replaced_with_its_time(path: Path) -> None:
    """As an installer does that keeps times: only the inode and the change time tell."""
    times = path.stat()
    other = path.with_name("other")
    other.write_bytes(b"new")
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)


def written_with_the_clock_set_back(path: Path) -> None:
    path.write_bytes(b"new")
    os.utime(path, (0, 0))


@pytest.mark.parametrize("change", [rewritten, touched, replaced_with_its_time, written_with_the_clock_set_back])
@pytest.mark.parametrize("name", ["plain.cu", "linked.cu"])
def test_a_changed_file_is_read_again_and_the_others_are_not(
    tmp_path: Path, package: Path, name: str, change: Callable[[Path], None]
) -> None:
    digests = {"plain.cu": OLD, "linked.cu": OLD}
    assert remembered(tmp_path, package, digests) == {}
    assert remembered(tmp_path, package, {}) == digests
    change((package / name).resolve())
    other = next(other for other in digests if other != name)
    assert remembered(tmp_path, package, {name: NEW}) == {other: OLD}
    assert remembered(tmp_path, package, {}) == {other: OLD, name: NEW}


def test_a_file_that_changes_while_it_is_read_is_read_again_next_time(tmp_path: Path, package: Path) -> None:
    memo = SourceMemo(LocalCache(tmp_path / "cache"), package)
    before = (package / "plain.cu").stat()
    rewritten(package / "plain.cu")
    memo.remember({"plain.cu": OLD}, {"plain.cu": before})
    memo.save()
    assert remembered(tmp_path, package, {}) == {}


def test_the_probe_tells_what_a_file_was_before_it_was_read(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: (package / path).stat() for path in ("plain.cu", "linked.cu")}
    read = os.read

    def watched(descriptor: int, count: int) -> bytes:
        data = read(descriptor, count)
        if data == b"old":
            Path(f"/proc/self/fd/{descriptor}").resolve().write_bytes(b"newer")
        return data

    monkeypatch.setattr(os, "read", watched)
    seen: dict[str, os.stat_result] = {}
    assert hash_sources(str(package), [*before, "none.cu"], seen)["none.cu"].absent
    assert {path: found.st_size for path, found in seen.items()} == dict.fromkeys(before, 3)
    assert {path: found.st_ino for path, found in seen.items()} == {path: found.st_ino for path, found in before.items()}


def test_a_link_that_leads_elsewhere_is_noticed(tmp_path: Path, package: Path) -> None:
    remembered(tmp_path, package, {"linked.cu": OLD})
    (package / "linked.cu").unlink()
    (package / "linked.cu").symlink_to(package / "plain.cu")
    assert remembered(tmp_path, package, {}) == {}


@pytest.mark.parametrize(
    "text", ["[]", '{"files": []}', '{"files": {"plain.cu": {"sha256": "x"}}}', '{"files": {"plain.cu": []}}']
)
def test_a_memo_of_another_shape_is_no_memo(tmp_path: Path, package: Path, text: str) -> None:
    remembered(tmp_path, package, {"plain.cu": OLD})
    [path] = (tmp_path / "cache" / "v1" / "sources").glob("*.json")
    path.write_text(text)
    assert remembered(tmp_path, package, {}) == {}
