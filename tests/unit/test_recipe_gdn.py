"""Which calls of the gated delta rule a model makes: the table of kinds, and what the kernels take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kcache.recipe import Recipe, RecipeError, parse_recipe
from kcache.recipe_cases import plan_cases
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


def _recipe(**linear: Any) -> Recipe:
    text = (Path(__file__).parents[2] / "manifests" / "qwen3-next-80b-a3b.toml").read_text()
    recipe = parse_recipe(text.encode(), "shipped")
    return replace(recipe, linear=replace(recipe.linear, **linear), parallel=replace(recipe.parallel, tp=(1, 2, 32)))


def test_every_split_of_a_model_is_an_entry_and_one_that_is_not_taken_is_told() -> None:
    planned = plan_cases(_recipe(), "gdn-verify", "0.7.4")
    assert {(case["variant"], case["heads"], case["drafted"]) for case in planned.cases} == {
        ("tp1", 16, 2), ("tp1", 16, 4), ("tp2", 8, 2), ("tp2", 8, 4)
    }  # fmt: skip
    (problem,) = planned.problems
    assert "tp32 is not for gdn-verify: 16 and 32 heads do not split" in problem
    assert {case["tokens"][-1] for case in planned.cases} == {64}


def test_a_model_without_linear_attention_and_a_version_that_keeps_none_have_no_cases() -> None:
    assert "no table `linear`" in plan_cases(_recipe(heads=None), "gdn-decode", "0.7.4").problems[0]
    assert "from 0.7.2 on" in plan_cases(_recipe(), "gdn-prefill", "0.7.0.post1").problems[0]
    assert plan_cases(_recipe(), "gdn-prefill", "0.7.0.post1").cases == ()
    assert plan_cases(_recipe(), "gdn-decode", "0.7.0.post1").cases


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("heads = 16", "linear.heads: missing; kind gdn-prefill needs it"),
        ("value_heads = 32", "linear.value_heads: missing"),
        ("head_dim = 128", "linear.head_dim: missing"),
        ("drafted = [2, 4]", "linear.drafted: missing; kind gdn-verify needs it"),
        (', "h200"', "targets.gpus: kind gdn-prefill needs a GPU of compute capability 9.0"),
    ],
)
def test_a_manifest_of_linear_attention_says_what_it_lacks(change: str, told: str) -> None:
    text = (Path(__file__).parents[2] / "manifests" / "qwen3-next-80b-a3b.toml").read_text()
    with pytest.raises(RecipeError) as raised:
        parse_recipe(text.replace(f"\n{change}" if "=" in change else change, "\n" if "=" in change else "").encode(), "test")
    assert told in str(raised.value)


def test_value_heads_are_a_multiple_of_heads() -> None:
    text = (Path(__file__).parents[2] / "manifests" / "qwen3-next-80b-a3b.toml").read_text()
    with pytest.raises(RecipeError, match="30 is no multiple of the 16 heads"):
        parse_recipe(text.replace("value_heads = 32", "value_heads = 30").encode(), "test")
