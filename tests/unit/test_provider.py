"""The generated package `flashinfer_jit_cache`, run by real Pythons without FlashInfer: what it offers, and to whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kcache.kinds.provider import ProvidedEntry, acceptance, make_view, python_path, uses_providers

ENTRY = ProvidedEntry(fingerprint="sha256:" + "ab" * 32, directory="/cache/entries/ab", arch="90a", modules=("sampling", "topk"))

ASK = """
import json, flashinfer_jit_cache as package
print(json.dumps({
    "version": package.__version__,
    "providers": [[p.provider_id, p.version, str(p.jit_cache_dir), sorted(p.cuda_architectures), sorted(p.modules)]
                  for p in package.get_jit_cache_providers()],
    "directory": package.get_jit_cache_dir(),
    "extra": getattr(package, "EXTRA", None),
}))
"""

REAL = '''
"""Laid out as FlashInfer's own wheel is: a version in a submodule, providers as objects."""
from types import SimpleNamespace
from pathlib import Path
from ._build_meta import __version__
import flashinfer_jit_cache._build_meta as again
EXTRA = again.__version__

def get_jit_cache_dir():
    return str(Path(__file__).parent / "jit_cache")

def get_jit_cache_providers():
    return [SimpleNamespace(provider_id="flashinfer-jit-cache-cu130", distribution="flashinfer-jit-cache", version=__version__,
                            jit_cache_dir=get_jit_cache_dir(), cuda_architectures=["sm90a"], modules=["page"])]
'''


def write_view(site: Path, entries: list[ProvidedEntry], version: str = "0.7.4", real: Mapping[str, str] | None = None) -> Path:
    view = make_view(entries, version, real or {})
    directory = site / view.id
    for path, data in view.files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    for path, target in view.links.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).symlink_to(target)
    return directory


def write_real(directory: Path, version: str, body: str = REAL) -> Path:
    package = directory / "flashinfer_jit_cache"
    (package / "jit_cache" / "page").mkdir(parents=True)
    (package / "jit_cache" / "page" / "page.so").write_bytes(b"page")
    (package / "_build_meta.py").write_text(f'__version__ = "{version}"\n')
    (package / "__init__.py").write_text(body)
    return directory


def ask(*path: Path, **environ: str) -> dict[str, object]:
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(map(str, path)), **environ}
    done = subprocess.run([sys.executable, "-c", ASK], env=variables, capture_output=True, text=True, check=True)
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer | {"said": done.stderr}


def test_a_view_offers_each_entry_as_a_provider(tmp_path: Path) -> None:
    answer = ask(write_view(tmp_path, [ENTRY]))
    assert answer["version"] == "0.7.4"
    assert answer["providers"] == [["kcache-" + "ab" * 8, "0.7.4", "/cache/entries/ab", ["sm90a"], ["sampling", "topk"]]]


def test_a_real_package_of_the_same_version_goes_on_serving_and_lends_its_version(tmp_path: Path) -> None:
    view, real = write_view(tmp_path / "site", [ENTRY]), write_real(tmp_path / "real", "0.7.4+cu130")
    answer = ask(view, real)
    # FlashInfer drops a provider whose version differs from the package's.
    assert answer["version"] == "0.7.4+cu130"
    assert [line[:2] for line in answer["providers"]] == [  # type: ignore[attr-defined]
        ["kcache-" + "ab" * 8, "0.7.4+cu130"],
        ["flashinfer-jit-cache-cu130", "0.7.4+cu130"],
    ]
    assert answer["extra"] == "0.7.4+cu130"


def test_a_real_package_of_another_version_is_left_out_and_both_versions_are_named(tmp_path: Path) -> None:
    answer = ask(write_view(tmp_path / "site", [ENTRY]), write_real(tmp_path / "real", "0.7.3+cu130"))
    assert answer["version"] == "0.7.4"
    assert len(answer["providers"]) == 1  # type: ignore[arg-type]
    assert "0.7.3+cu130" in str(answer["said"]) and "0.7.4" in str(answer["said"])


def test_with_the_version_check_disabled_the_real_package_is_taken_as_flashinfer_would(tmp_path: Path) -> None:
    view, real = write_view(tmp_path / "site", [ENTRY]), write_real(tmp_path / "real", "0.7.3+cu130")
    assert len(ask(view, real, FLASHINFER_DISABLE_VERSION_CHECK="1")["providers"]) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("body", ["raise RuntimeError('broken wheel')", "import not_there", "x = (", "__version__ = '0.7.4'"])
def test_a_broken_real_package_never_breaks_ours(tmp_path: Path, body: str) -> None:
    answer = ask(write_view(tmp_path / "site", [ENTRY]), write_real(tmp_path / "real", "0.7.4", body))
    assert len(answer["providers"]) == 1  # type: ignore[arg-type]
    assert answer["said"]


def test_another_view_behind_ours_is_not_taken_for_a_real_package(tmp_path: Path) -> None:
    other = ProvidedEntry(fingerprint="sha256:" + "cd" * 32, directory="/cache/entries/cd", arch="90a", modules=("page",))
    answer = ask(write_view(tmp_path, [ENTRY]), write_view(tmp_path, [other]))
    assert len(answer["providers"]) == 1  # type: ignore[arg-type]


def test_before_0_7_one_directory_holds_restored_and_real_modules(tmp_path: Path) -> None:
    real = write_real(tmp_path / "real", "0.6.18+cu130")
    library = real / "flashinfer_jit_cache" / "jit_cache" / "page" / "page.so"
    view = write_view(tmp_path / "site", [ENTRY], "0.6.18", {"page": str(library)})
    directory = Path(str(ask(view, real)["directory"]))
    assert sorted(path.name for path in directory.iterdir()) == ["page", "sampling", "topk"]
    assert (directory / "page" / "page.so").read_bytes() == b"page"
    assert (directory / "topk" / "topk.so").readlink() == Path("/cache/entries/ab/topk/topk.so")


def test_a_view_is_named_by_its_content() -> None:
    assert make_view([ENTRY], "0.7.4", {}).id == make_view([ENTRY], "0.7.4", {}).id
    assert make_view([ENTRY], "0.7.4", {}).id != make_view([ENTRY], "0.7.2", {}).id


def test_python_path_has_one_view_first() -> None:
    assert python_path("", "/c/site", "/c/site/new") == "/c/site/new"
    assert python_path("/c/site/old:/lib:", "/c/site", "/c/site/new") == "/c/site/new:/lib"
    assert python_path("/c/site/new:/lib", "/c/site", "/c/site/new") == "/c/site/new:/lib"


@pytest.mark.parametrize(
    ("version", "expected"), [("0.6.18.post1", False), ("0.7.0.post1", True), ("0.10.0", True), ("1.0", True)]
)
def test_versions_that_ask_for_providers(version: str, expected: bool) -> None:
    assert uses_providers(version) is expected


def decide(**changes: object) -> tuple[bool, str]:
    given: dict[str, object] = {
        "flashinfer_version": "0.7.4",
        "shadowing": None,
        "library_in_place": True,
        "archs": ["90a"],
        "served": ["90a"],
    }
    decision = acceptance("sampling", **(given | changes))  # type: ignore[arg-type]
    return decision.accepted, decision.reason


def test_acceptance_by_flashinfers_rules() -> None:
    assert decide() == (True, "")
    assert not decide(library_in_place=False)[0]
    assert not decide(archs=["90a", "120f"])[0]
    assert "data/aot" in decide(shadowing="/x/flashinfer/data/aot/sampling/sampling.so")[1]
    # Up to 0.6.18 the directory of flashinfer_jit_cache takes the place of data/aot.
    assert decide(shadowing="/x/flashinfer/data/aot/sampling/sampling.so", flashinfer_version="0.6.18.post1")[0]
    assert not decide(flashinfer_version="0.6.18.post1", archs=["90a", "120f"], served=["90a", "120f"])[0]
