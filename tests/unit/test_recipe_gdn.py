"""Which calls of the gated delta rule a model makes: the table of kinds, and what the kernels take."""

from __future__ import annotations

from typing import Any

import pytest

from kcache.recipe_gdn import GDN_KINDS, GdnModel, check_gdn, gdn_cases, gdn_model

QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MODEL = GdnModel(name="m", source="s", heads=16, value_heads=32)


@pytest.mark.parametrize("config", [QWEN3_NEXT, {"model_type": "qwen3_5", "text_config": QWEN3_NEXT}])
def test_heads_are_read_from_a_config_with_or_without_images(config: dict[str, Any]) -> None:
    assert gdn_model(config, name="m", source="s") == MODEL


@pytest.mark.parametrize(
    "change",
    [
        {"linear_num_key_heads": None},
        {"linear_num_value_heads": 0},
        {"linear_num_key_heads": True},
        {"linear_key_head_dim": "128"},
        {"linear_value_head_dim": 64},
    ],
)
def test_a_config_without_such_attention_gives_no_model(change: dict[str, Any]) -> None:
    assert gdn_model({**QWEN3_NEXT, **change}, name="m", source="s") is None
    assert gdn_model({"text_config": "none", "hidden_size": 1}, name="m", source="s") is None


@pytest.mark.parametrize(
    ("model", "tp", "told"),
    [
        (MODEL, 1, ()),
        (MODEL, 16, ()),
        (MODEL, 3, ("16 and 32 heads do not split over 3 ranks",)),
        (MODEL, 32, ("16 and 32 heads do not split over 32 ranks",)),
        (GdnModel(name="m", source="s", heads=16, value_heads=24), 1, ("24 value heads are no multiple of 16 heads",)),
        (GdnModel(name="m", source="s", heads=16, value_heads=32, dim=64), 1, ("head size 64 is not 128",)),
    ],
)
def test_what_the_kernels_do_not_take_is_said(model: GdnModel, tp: int, told: tuple[str, ...]) -> None:
    assert check_gdn(model, tp) == told
    assert bool(gdn_cases("gdn-decode", model, tp=(tp,), counts=(1,))) == (not told)


def test_heads_are_split_over_ranks_and_every_way_to_call_is_a_case() -> None:
    cases = gdn_cases("gdn-decode-bf16", MODEL, tp=(1, 3, 4), counts=(8, 1, 8), dt_bias=("bfloat16",))
    assert [case["id"] for case in cases] == [
        "decode-bfloat16-tp1",
        "pool-bfloat16-tp1",
        "decode-bfloat16-tp4",
        "pool-bfloat16-tp4",
    ]
    assert [(case["heads"], case["value_heads"], case["state"]) for case in cases[2:]] == [(4, 8, "bfloat16")] * 2
    assert {tuple(case["tokens"]) for case in cases} == {(1, 8)}


def test_verifying_is_a_case_for_each_number_of_drafted_tokens_and_none_without() -> None:
    cases = gdn_cases("gdn-verify", MODEL, counts=(1,), drafted=(4, 2, 4), dt_bias=("float32",))
    assert [(case["id"], case["drafted"]) for case in cases] == [("verify-float32-t2-tp1", 2), ("verify-float32-t4-tp1", 4)]
    assert gdn_cases("gdn-verify", MODEL, counts=(1,)) == ()


def test_prefill_is_one_case_a_split_as_its_kernel_depends_on_nothing_more() -> None:
    (case,) = gdn_cases("gdn-prefill", MODEL, counts=(1, 2, 4))
    assert (case["id"], case["tokens"]) == ("prefill-tp1", [64])


def test_ids_are_unique_within_a_kind() -> None:
    for kind in GDN_KINDS:
        ids = [case["id"] for case in gdn_cases(kind, MODEL, tp=(1, 2, 4), counts=(1, 64), drafted=(2, 3, 4))]
        assert ids
        assert len(set(ids)) == len(ids)
