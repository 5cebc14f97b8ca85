"""Tuning results from one home to another through the command line: collected, published, restored, found by FlashInfer.

Real FlashInfer writes and reads them in processes of its own; the GPU is described.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from entries import make_entry
from tuning_children import TUNE, environ_of, request_of, tuned

from kcache.kinds import autotune_v2
from kcache.kinds.autotune_v1 import parse_file
from kcache.values import replace
from kcache.workflows.build_tunings import collect_tunings
from kcache.workflows.target import TargetRequest, find_target

VLLM = "0" * 64 + "/autotune_configs_tp_0-1.json"


def kcache(environ: Mapping[str, str], *words: object) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "kcache", *map(str, words), "--json"],
        env=dict(environ), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def at(home: Path) -> dict[str, str]:
    home.mkdir(parents=True, exist_ok=True)
    environ = environ_of("", home, {})
    return {name: text for name, text in environ.items() if not name.startswith(("KCACHE_", "VLLM_", "SGLANG_", "XDG_"))}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """A local store with what FlashInfer tuned on a farm, as a managed store and as vLLM's file; and the keys of both."""
    top = tmp_path_factory.mktemp("tuned")
    farm = at(top / "farm")
    saved = top / "farm" / ".cache" / "vllm" / "flashinfer_autotune_cache" / "x" / "90a" / VLLM
    keys = {"v2": tuned(farm, [16, 32]), "v1": tuned(farm, [64], file=str(saved))}
    places = [autotune_v2.store_root(farm, farm["HOME"]), top / "farm" / ".cache" / "vllm"]
    collect = [word for place in places for word in ("--collect", place)]
    code, said, errors = kcache(farm, "build", "--kinds", "autotune", *collect, "--gpu", "h200", "-o", top / "entries")
    assert (code, said.get("status")) == (0, "built"), errors
    assert [(one["kind"], one["variant"]) for one in said["entries"]] == [
        ("autotune", "flashinfer"),
        ("autotune", "vllm-0000000000000000"),
    ]
    code, _, errors = kcache(farm, "publish", top / "entries", "--to", top / "store")
    assert code == 0, errors
    return top / "store", keys


@pytest.mark.real
def test_tuning_results_are_restored_at_another_home_and_found_by_the_library(
    published: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    store, keys = published
    server = at(tmp_path / "home")
    (tmp_path / "home" / ".cache" / "vllm").mkdir(parents=True)
    restore = ("restore", "--from", store, "--kinds", "autotune", "--gpu", "h200")
    code, said, errors = kcache(server, *restore)
    assert (code, said.get("status")) == (0, "hit"), errors
    from importlib.metadata import version

    file = tmp_path / "home/.cache/vllm/flashinfer_autotune_cache" / version("flashinfer-python") / "90a" / VLLM
    code, proof, errors = kcache(server, "verify", "--gpu", "h200")
    assert (code, proof["status"]) == (0, "proven"), errors
    told = proof["tunings"]
    assert (told["profiled"], [(one["found"], one["results"]) for one in told["tunings"]]) == (0, [(2, 2), (1, 1)])

    # In use: another result of the server's own stays, and a result that is lost comes back.
    own = parse_file(file.read_bytes())
    (first,) = own.results.values()
    theirs = replace(first, key=first.key.replace("((64, 64)", "((128, 64)"))
    file.write_bytes(replace(own, results={theirs.key: theirs}).encode())
    lost = next(Path(autotune_v2.store_root(server, server["HOME"])).glob("v2/*/entries/*.json"))
    lost.unlink()
    code, proof, _ = kcache(server, "verify", "--gpu", "h200")
    assert (code, [one["accepted"] for one in proof["tunings"]["tunings"]]) == (1, [False, True])
    assert kcache(server, *restore)[0] == 0
    assert lost.exists()
    assert set(parse_file(file.read_bytes()).results) == {*keys["v1"], theirs.key}


@pytest.mark.real
def test_another_product_of_one_chip_is_refused_by_the_name(published: tuple[Path, dict[str, list[str]]], tmp_path: Path) -> None:
    """Case B37, and B32's shape: the field is named, and nothing is written."""
    server = at(tmp_path / "home")
    words = ("--from", published[0], "--kinds", "autotune", "--gpu", "h100")
    code, said, _ = kcache(server, "lookup", *words)
    assert code != 0
    assert "gpu: wanted NVIDIA H200" in json.dumps(said) or '"field": "gpu"' in json.dumps(said)
    code, said, _ = kcache(server, "restore", *words)
    assert said["status"] == "miss"
    assert not (tmp_path / "home/.cache/flashinfer/autotune").exists()


@pytest.mark.real
def test_what_a_program_tuned_is_recorded(tmp_path: Path) -> None:
    farm = at(tmp_path / "farm")
    record = [
        sys.executable,
        "-m",
        "kcache",
        "build",
        "--record",
        "--gpu",
        "h200",
        "-o",
        str(tmp_path / "entries"),
        "--json",
        "--",
    ]
    done = subprocess.run(
        [*record, sys.executable, "-c", TUNE],
        env=farm, input=json.dumps(request_of([16, 32])), capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    said = json.loads(done.stdout)
    assert (done.returncode, said["status"], said["left_out"]) == (0, "built", []), done.stderr
    assert [(one["kind"], one["variant"]) for one in said["entries"]] == [("autotune", "flashinfer")]
    assert not (tmp_path / "farm/.cache/flashinfer/autotune").exists()


@pytest.mark.real
def test_what_was_tuned_elsewhere_is_not_collected(published: tuple[Path, dict[str, list[str]]], tmp_path: Path) -> None:
    farm = at(published[0].parent / "farm")
    root = autotune_v2.store_root(farm, farm["HOME"])
    code, said, errors = kcache(farm, "build", "--collect", root, "--gpu", "h100", "-o", tmp_path / "entries")
    assert code != 0
    assert "gpu is NVIDIA H200" in errors + json.dumps(said)
    assert not list(tmp_path.glob("entries/*.json"))


@pytest.mark.real
def test_a_lookup_says_when_tuning_results_and_their_modules_are_not_there_together(
    published: tuple[Path, dict[str, list[str]]], tmp_path: Path
) -> None:
    farm = at(published[0].parent / "farm")
    target = find_target(TargetRequest(gpus=("h200",)), farm)
    root = Path(autotune_v2.store_root(farm, farm["HOME"]))
    done = collect_tunings([root], target, tmp_path / "entries", model="small/model", modules=("page", "trtllm_utils"))
    assert [entry.model for entry in done.entries] == ["small/model"]
    publish = ("publish", tmp_path / "entries", "--to", tmp_path / "store")
    assert kcache(farm, *publish)[0] == 0

    def lacking(gpu: str) -> list[str]:
        said = kcache(farm, "lookup", "--from", tmp_path / "store", "--gpu", gpu)[1]
        return [str(line) for line in said["lacking"]]

    (line,) = lacking("h200")
    assert line.endswith("are there, and the modules that they choose kernels of are not: page")
    server = at(tmp_path / "home")
    _, said, errors = kcache(server, "restore", "--from", tmp_path / "store", "--gpu", "h200")
    assert (said["status"], [one for one in said["warnings"] if one.endswith("are not: page")] != []) == ("hit", True), errors
    make_entry(tmp_path / "entries", {"page": b"p"}, kind="modules")
    assert kcache(farm, *publish)[0] == 0
    assert lacking("h200") == []
    (line,) = lacking("h100")
    assert line.startswith("page are there, and no tuning results that fit here")


@pytest.mark.real
def test_tuning_results_travel_as_other_entries_do(published: tuple[Path, dict[str, list[str]]], tmp_path: Path) -> None:
    """Exported, carried in one file, compacted, listed, restored from the bundle, and kept by prune."""
    environ, file = at(tmp_path / "home"), tmp_path / "tunings.tar"
    assert kcache(environ, "export", "--from", published[0], "--kinds", "autotune", "-o", file)[0] == 0
    assert kcache(environ, "import", file, "--to", tmp_path / "store")[0] == 0
    assert kcache(environ, "compact", "--to", tmp_path / "store")[0] == 0
    _, said, _ = kcache(environ, "matrix", "--from", tmp_path / "store")
    assert [(cell["kind"], cell["entries"]) for cell in said["cells"]] == [("autotune", 2)]
    code, said, errors = kcache(environ, "restore", "--from", tmp_path / "store", "--gpu", "h200")
    assert (code, said["kinds"]["autotune"]["status"]) == (0, "hit"), errors
    assert any("for vllm are kept in the cache alone" in line for line in said["warnings"])
    code, said, errors = kcache(environ, "prune", "--dry-run", "--older-than", "1d")
    assert (code, [one["status"] for one in said["entries"]]) == (0, ["kept", "kept"]), errors
