"""A b12x package read from its files; the real one's fingerprint is in tests/real."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kcache.errors import ProbeError
from kcache.kinds import b12x_package
from kcache.kinds.b12x_package import differing_files, find_package, read_package, rule_digest
from kcache.local_cache import LocalCache
from kcache.probe.packages import this_interpreter
from kcache.values import replace
from kcache.workflows import b12x_host


def make(site: Path, name: str = "b12x", compiler: str = "def _cache_prefix(key):\n    return key\n") -> Path:
    root = site / name
    (root / "_lib").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "_lib" / "compiler.py").write_text(compiler)
    return root


@pytest.fixture
def known_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = make(tmp_path)
    monkeypatch.setattr(b12x_package, "RULES", (rule_digest(str(root)),))
    return root


def test_the_fingerprint_is_over_paths_and_bytes_in_order_of_their_parts(known_rule: Path) -> None:
    (known_rule / "_lib-more").mkdir()
    (known_rule / "_lib-more" / "x.cu").write_bytes(b"\xff")
    (known_rule / "__pycache__").mkdir()
    (known_rule / "__pycache__" / "x.cpython-311.pyc").write_text("byte code")
    (known_rule / "__pycache__" / "x.nbi").write_text("numba's")
    (known_rule / "old.pyc").write_text("byte code")
    files = ["__init__.py", "_lib/compiler.py", "_lib-more/x.cu"]
    expected = hashlib.sha256()
    for path in sorted(files, key=Path):
        expected.update(path.encode() + b"\0" + (known_rule / path).read_bytes() + b"\0")
    found = read_package(str(known_rule))
    assert found.fingerprint == expected.hexdigest()
    assert sorted(found.files) == sorted(files)


def test_another_rule_for_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="in another way"):
        read_package(str(make(tmp_path)))
    with pytest.raises(ProbeError, match="could not be read"):
        rule_digest(str(tmp_path / "nowhere"))


def test_comments_docstrings_and_other_functions_are_not_of_the_rule(tmp_path: Path) -> None:
    plain = rule_digest(str(make(tmp_path / "a")))
    told = 'def _cache_prefix(key):\n    """Says what."""\n\n    return key  # the same\n\n\ndef other():\n    pass\n'
    assert rule_digest(str(make(tmp_path / "b", compiler=told))) == plain
    changed = "def _cache_prefix(key):\n    return key + '2'\n"
    assert rule_digest(str(make(tmp_path / "c", compiler=changed))) != plain


def test_the_package_that_python_imports_is_found(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    make(second)
    first.mkdir()
    assert find_package(["", str(first), f"{second}/"]) == (f"{second}/b12x", False)
    assert find_package([str(first)]) is None


def test_flashinfers_copy_is_found_behind_its_small_package(tmp_path: Path) -> None:
    site, own = tmp_path / "site", tmp_path / "own"
    (site / "b12x").mkdir(parents=True)
    (site / "b12x" / "__init__.py").write_text("# loads the copy")
    assert find_package([str(site)]) is None
    (site / "flashinfer" / "experimental").mkdir(parents=True)
    (site / "flashinfer" / "__init__.py").write_text("")
    copy = make(site / "flashinfer" / "experimental")
    assert find_package([str(site)]) == (str(copy), True)
    make(own)
    assert find_package([str(own), str(site)]) == (f"{own}/b12x", False)
    assert find_package([str(site), str(own)]) == (str(copy), True)


def test_files_that_differ_are_named() -> None:
    assert differing_files({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"}) == ("b", "c", "d")


def rewritten(path: Path) -> None:
    path.write_bytes(b"new")


def replaced_with_its_time(path: Path) -> None:
    """As an installer does that keeps times: only the inode and the change time tell."""
    times = path.stat()
    path.with_name("other").write_bytes(path.read_bytes()[:-1] + b"\t")
    os.utime(path.with_name("other"), ns=(times.st_atime_ns, times.st_mtime_ns))
    path.with_name("other").replace(path)


def joined_by_another(path: Path) -> None:
    path.with_name("another.py").write_bytes(b"new")


@pytest.mark.parametrize("change", [rewritten, replaced_with_its_time, joined_by_another, Path.unlink])
def test_a_package_is_read_once_and_again_after_any_change(
    known_rule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    (known_rule / "moe.py").write_bytes(b"code\n")
    interpreter = replace(this_interpreter(), search_path=(str(known_rule.parent),))
    cache = LocalCache(tmp_path / "cache")
    first = b12x_host.remembered_package(cache, interpreter)
    reads: list[str] = []

    def counted(root: str, *, embedded: bool = False) -> b12x_package.B12xPackage:
        reads.append(root)
        return read_package(root, embedded=embedded)

    monkeypatch.setattr(b12x_host, "read_package", counted)
    assert b12x_host.remembered_package(cache, interpreter) == first
    assert reads == []
    change(known_rule / "moe.py")
    assert b12x_host.remembered_package(cache, interpreter) == read_package(str(known_rule))
    assert len(reads) == 1


def test_a_rule_that_a_newer_kcache_no_longer_knows_is_not_remembered(
    known_rule: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = replace(this_interpreter(), search_path=(str(known_rule.parent),))
    b12x_host.remembered_package(LocalCache(tmp_path / "cache"), interpreter)
    for module in (b12x_host, b12x_package):
        monkeypatch.setattr(module, "RULES", ("another",))
    with pytest.raises(ProbeError, match="in another way"):
        b12x_host.remembered_package(LocalCache(tmp_path / "cache"), interpreter)
