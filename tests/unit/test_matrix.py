"""`kcache matrix`: what a store's indexes say, in every form, through the real command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from entries import make_entry, publish
from matrix_samples import make_line, make_store

from kcache.index import Index, parse_index
from kcache.matrix import make_matrix, natural
from kcache.matrix_text import markdown, page_section


def matrix(*words: object, columns: int = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kcache", "matrix", *map(str, words)]
    environ = {**os.environ, "COLUMNS": str(columns)}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environ)


def test_cells_of_a_published_store_say_entries_sizes_dates_and_seconds(tmp_path: Path) -> None:
    one = make_entry(tmp_path / "out", {"page": b"p"}, kind="modules", build_seconds=7.25)
    make_entry(tmp_path / "out", {"page": b"p"}, kind="modules", gpu_arch="120f", build_seconds=2.5)
    make_entry(tmp_path / "out", {"sampling": b"s"}, flashinfer_version="0.7.2")
    publish(tmp_path / "out", tmp_path / "store")
    done = matrix("--from", tmp_path / "store", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["format"], document["totals"]["entries"]) == ("kcache.matrix/1", 3)
    assert [(cell["kind"], cell["module"], cell["flashinfer"], cell["arch"]) for cell in document["cells"]] == [
        ("modules", "page", "0.7.4", "90a"),
        ("modules", "page", "0.7.4", "120f"),
        ("sampling", "", "0.7.2", "90a"),
    ]
    assert document["cells"][0] | {"unpacked_bytes": 0} == {
        **{"kind": "modules", "module": "page", "model": "", "flashinfer": "0.7.4", "cuda": "13.0", "machine": "x86_64"},
        **{"arch": "90a", "entries": 1, "bytes": one.archive.size, "unpacked_bytes": 0, "build_seconds": 7.2},
        **{"first_built": "", "last_built": "", "signers": [], "signer_not_stated": 1, "variants": []},
    }
    narrowed = json.loads(matrix("--from", tmp_path / "store", "--json", "--arch", "12.0f").stdout)
    assert [cell["arch"] for cell in narrowed["cells"]] == ["120f"]


def test_a_terminal_gets_a_table_and_a_narrow_one_a_list_that_fits(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", models=2, archs=3, versions=2)
    wide, narrow = matrix("--from", store), matrix("--from", store, columns=40)
    assert any("90a" in line and "103a" in line for line in wide.stdout.splitlines())
    assert max(map(len, narrow.stdout.splitlines())) <= 40
    assert narrow.stdout.index("0.7.1") < narrow.stdout.index("0.7.0")
    for text in ("model-001-moe", "1.7 MB", "33 s", "2026-12-01"):
        assert text in wide.stdout and text in narrow.stdout


def test_an_index_that_cannot_be_used_costs_only_itself(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", models=1, archs=1, versions=2)
    (store / "v1/env/flashinfer-0.7.0/x86_64-cuda13/index.json").write_text("{")
    done = matrix("--from", store, "--json")
    document = json.loads(done.stdout)
    assert (done.returncode, len(document["cells"]), len(document["problems"])) == (3, 1, 1)
    assert "flashinfer-0.7.0" in done.stderr


def test_an_entry_of_two_stores_is_counted_once_and_signers_are_told() -> None:
    line = make_line("a/b", "sm_90a", "0.7.4", signer="farm")
    (cell,) = make_matrix(["one", "two"], [line, line, make_line("a/b", "sm_90a", "0.7.4", kind="b12x-moe")]).cells
    assert (cell.entries, cell.size) == (1, 1_700_000)
    cell = make_matrix(["one"], [line, make_line("a/c", "sm_90a", "0.7.4")]).cells[0]
    assert (cell.signers, cell.signer_not_stated, cell.last) == (("farm",), 0, "2026-12-01T09:00:00Z")


def test_index_lines_keep_what_is_only_shown_and_drop_what_would_attack_a_terminal() -> None:
    line = make_line("a/b", "sm_90a", "0.7.4", signer="farm")
    encoded = Index(entries=(line,)).encode()
    assert parse_index(encoded).entries == (line,)
    (read,) = parse_index(encoded.replace(b'"farm"', b'"\\u001b[2J"')).entries
    assert (read.signer, read.built) == ("", "2026-12-01T09:00:00Z")


def test_versions_and_architectures_are_ordered_as_people_order_them() -> None:
    assert sorted(["0.6.18", "0.6.9", "0.7.0.post1", "0.7.0"], key=natural) == ["0.6.9", "0.6.18", "0.7.0", "0.7.0.post1"]
    assert sorted(["120f", "90a", "100a"], key=natural) == ["90a", "100a", "120f"]


def test_markdown_has_a_table_for_each_environment_and_a_page_counts_what_it_does_not_list() -> None:
    lines = [make_line(f"a/m{number}", "sm_90a", version) for number in range(200) for version in ("0.7.4", "0.7.2")]
    made = make_matrix(["store"], lines)
    assert markdown(made).count("| b12x-moe of a/m") == 400
    section = page_section(made)
    assert section.count("| b12x-moe of a/m") == 300
    assert "100 more rows of FlashInfer 0.7.2, CUDA 13.0, x86_64" in section
    assert markdown(make_matrix(["store"], [])) == "Nothing is published yet.\n"
