"""Where vLLM and SGLang look for FlashInfer's tuning results, as their sources spell it."""

from __future__ import annotations

import pytest

from kcache.kinds.autotune_places import (
    parse_sglang_path,
    parse_vllm_path,
    sglang_file,
    sglang_root,
    vllm_file,
    vllm_root,
)

HASH = "31931eb956f6ba4d6883239cd070b73e95547a853348645ef2d654002844916b"


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"HOME": "/home/u"}, "/home/u/.cache/vllm/flashinfer_autotune_cache/0.7.4/121a"),
        ({"HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/x/vllm/flashinfer_autotune_cache/0.7.4/121a"),
        ({"HOME": "/h", "VLLM_CACHE_ROOT": "~/v"}, "/h/v/flashinfer_autotune_cache/0.7.4/121a"),
        ({"HOME": "/h", "VLLM_CACHE_ROOT": "/v", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": "~/tuned"}, "/h/tuned"),
        (
            {"HOME": "/h", "VLLM_CACHE_ROOT": "/v", "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR": ""},
            "/v/flashinfer_autotune_cache/0.7.4/121a",
        ),
    ],
)
def test_vllms_root(environ: dict[str, str], root: str) -> None:
    assert vllm_root(environ, flashinfer_version="0.7.4", archs="121a") == root


@pytest.mark.parametrize(
    ("ranks", "path"),
    [
        ((), f"{HASH}/autotune_configs.json"),
        ((2, 3), f"{HASH}/autotune_configs_tp_2-3.json"),
        ((4,), f"{HASH}/autotune_configs_tp_4.json"),
    ],
)
def test_vllms_file_names_the_ranks_of_a_pipeline_stage(ranks: tuple[int, ...], path: str) -> None:
    assert vllm_file(HASH, ranks) == path
    assert parse_vllm_path(path) == (HASH, ranks)


@pytest.mark.parametrize(
    "path",
    [
        f"{HASH}/.autotune_configs.rank-1.json",
        f"{HASH}/autotune_configs_tp_.json",
        f"{HASH[:16]}/autotune_configs.json",
        "autotune_configs.json",
    ],
)
def test_what_is_not_vllms_file_is_not_taken_for_one(path: str) -> None:
    assert parse_vllm_path(path) is None


def test_sglangs_files_are_one_for_each_rank_of_a_group() -> None:
    assert sglang_root({"HOME": "/h"}) == "/h/.cache/sglang/flashinfer/autotune"
    assert sglang_root({"HOME": "/h", "SGLANG_CACHE_DIR": "/s"}) == "/s/flashinfer/autotune"
    path = sglang_file(flashinfer_version="0.7.4", capability=(10, 3), model_hash="a" * 16, tp=3, pp=1, dp=0)
    assert path == f"0.7.4/sm103/{'a' * 16}/rank_tp3_pp1_dp0.json"
    assert parse_sglang_path(path) == (f"0.7.4/sm103/{'a' * 16}", (3, 1, 0))
    assert parse_sglang_path(f"0.7.4/sm103/{'a' * 16}/runs/rank_tp3_pp1_dp0.20261201_000000.json") is None
