"""A b12x package read from its files; the real one's fingerprint is in tests/real."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from kcache.errors import ProbeError
from kcache.kinds import b12x_package
from kcache.kinds.b12x_package import differing_files, find_package, read_package, rule_digest


def make(site: Path, name: str = "b12x", compiler: str = "def _cache_prefix(key):\n    return key\n") -> Path:
    root = site / name
    (root / "_lib").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "_lib" / "compiler.py").write_text(compiler)
    return root


@pytest.fixture
def known_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = make(tmp_path)
    monkeypatch.setattr(b12x_package, "_RULES", (rule_digest(str(root)),))
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
