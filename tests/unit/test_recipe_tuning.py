"""What a manifest asks to be tuned, as calls."""

from __future__ import annotations

from typing import Any

import pytest

from kcache.recipe import recipe_from_document
from kcache.recipe_tuning import OPERATIONS, tuning_calls


def calls(operations: list[str], *, tp: int = 1, ep: int = 1, **tuning: Any) -> tuple[dict[str, Any], ...]:
    document = {
        "format": "kcache.recipe/1",
        "kinds": ["autotune"],
        "model": {
            "name": "a model", "source": "config.json", "hidden_size": 2048, "moe_intermediate_size": 768, "experts": 128,
            "top_k": 8, "activation": "silu", "quantization": ["nvfp4"],
        },
        "parallel": {"tp": [tp], "ep": [ep]},
        "tokens": {"capture": [1, 16], "maximum": 4096},
        "tuning": {"operations": operations, **tuning},
        "targets": {"gpus": ["h200"], "cuda": "13.0", "flashinfer": ["0.7.4"]},
    }  # fmt: skip
    return tuning_calls(recipe_from_document(document, "test"), tp, ep)


def test_the_largest_token_count_is_called_and_covers_the_smaller_ones() -> None:
    (one, other) = calls(["mm-bf16-cublaslt"], matrices=["7168x2048", "2048x768"])
    assert one == {"operation": "mm_bf16", "backend": "cublaslt", "m": 4096, "covers": [1, 16], "n": 7168, "k": 2048}
    assert (other["n"], other["k"], other["m"]) == (2048, 768, 4096)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name.startswith("moe")])
def test_a_mixture_of_experts_has_the_sizes_of_one_rank(operation: str) -> None:
    found = calls([operation], tp=2, ep=4)
    sizes = {"hidden": 2048, "intermediate": 384, "experts": 128, "local_experts": 32, "top_k": 8, "maximum": 4096}
    assert all(sizes.items() <= call.items() for call in found)
    assert found[0]["m"] == 4096
    assert sorted({call["m"] for call in found} | {count for call in found for count in call["covers"]}) == [1, 16, 4096]


def test_a_tuner_that_looks_at_its_own_bucket_alone_is_called_for_every_token_count() -> None:
    assert [(call["m"], call["covers"]) for call in calls(["moe-bf16-cutile"])] == [(4096, []), (16, []), (1, [])]
    assert [(call["m"], call["covers"]) for call in calls(["moe-bf16-cutlass"])] == [(4096, [1, 16])]


def test_token_counts_that_are_finalised_later_are_calls_of_their_own() -> None:
    now, later = calls(["moe-bf16-trtllm"], deferred=[64, 2])
    assert "finalize" not in now
    assert (later["m"], later["covers"], later["finalize"]) == (64, [2], False)
