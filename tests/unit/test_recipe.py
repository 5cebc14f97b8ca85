"""Build manifests: what is good parses, what is bad is told whole, and a config becomes a recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcache.recipe import MAX_BYTES, Recipe, RecipeError, parse_recipe, read_recipe, recipe_from_document
from kcache.recipe_config import recipe_from_config, render_recipe
from kcache.recipe_shapes import check_shapes, dry_run_cases, shapes

MANIFESTS = sorted((Path(__file__).parents[2] / "manifests").glob("*.toml"))


def good() -> dict[str, Any]:
    return {
        "format": "kcache.recipe/1",
        "kinds": ["sampling", "b12x-moe"],
        "model": {
            "name": "Qwen/Qwen3-30B-A3B",
            "source": "config.json",
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "experts": 128,
            "top_k": 8,
            "activation": "silu",
            "quantization": ["nvfp4"],
        },
        "parallel": {"tp": [1, 2], "ep": [1]},
        "tokens": {"capture": [1, 2, 4], "maximum": 8192},
        "targets": {"gpus": ["rtx-pro-6000"], "cuda": "13.0", "flashinfer": ["0.7.4"]},
    }


def problems(document: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as caught:
        recipe_from_document(document, "test")
    assert caught.value.exit_code == 2
    return caught.value.problems


def changed(path: str, value: Any) -> dict[str, Any]:
    """The good document with one field set, or taken out (`...`)."""
    document = good()
    table: dict[str, Any] = document
    *parents, name = path.split(".")
    for parent in parents:
        table = table[parent]
    if value is ...:
        del table[name]
    else:
        table[name] = value
    return document


def test_the_good_document_parses() -> None:
    recipe = recipe_from_document(good(), "test")
    assert recipe.model.experts == 128
    assert recipe.tokens.counts == (1, 2, 4, 8192)
    assert recipe.tokens.calls == ("wrapper",)
    assert recipe.targets.gpus[0].sm_count == 188


REQUIRED = [
    "format", "kinds", "model", "parallel", "tokens", "targets", "model.name", "model.source", "model.hidden_size",
    "model.moe_intermediate_size", "model.experts", "model.top_k", "model.activation", "model.quantization", "parallel.tp",
    "parallel.ep", "tokens.capture", "tokens.maximum", "targets.cuda", "targets.flashinfer",
]  # fmt: skip


@pytest.mark.parametrize("path", REQUIRED)
def test_a_missing_field_is_named(path: str) -> None:
    assert f"{path}: missing" in problems(changed(path, ...))


@pytest.mark.parametrize("path", [*REQUIRED, "tokens.calls", "tokens.scales", "targets.gpus", "targets.arches"])
@pytest.mark.parametrize("value", [True, 1.5, {"a": 1}, "", [[]], [""], -1, [None]], ids=repr)
def test_a_field_of_a_wrong_type_is_named(path: str, value: Any) -> None:
    if isinstance(value, dict) and "." not in path and path in ("model", "parallel", "tokens", "targets"):
        assert any(problem.startswith(f"{path}.") for problem in problems(changed(path, value)))
    else:
        assert any(problem.startswith(path) for problem in problems(changed(path, value)))


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("model.hidden_size", 15, "from 16 to 131072"),
        ("model.hidden_size", 1 << 18, "but 262144"),
        ("model.experts", 0, "from 1 to 4096"),
        ("model.experts", 4097, "from 1 to 4096"),
        ("model.top_k", 65, "from 1 to 64"),
        ("model.name", "x" * 201, "a text of 1 to 200 characters"),
        ("model.activation", "swish", "one of silu"),
        ("model.quantization", ["fp8"], "one of nvfp4, mxfp4, w4a16"),
        ("kinds", ["sampling", "b12x"], "one of sampling, b12x-moe, autotune"),
        ("kinds", [], "not a list"),
        ("parallel.tp", [0], "from 1 to 1024"),
        ("tokens.maximum", 1 << 21, "from 1 to 1048576"),
        ("tokens.capture", list(range(1, 5000)), "not a list"),
        ("tokens.calls", ["graph"], "one of wrapper"),
        ("targets.cuda", "13", "a CUDA release such as 13.0"),
        ("targets.flashinfer", ["latest"], "a version such as 0.7.4"),
        ("targets.arches", ["sm_90a"], "an architecture such as 9.0a"),
        ("targets.gpus", ["rtx 5091"], "did you mean rtx-5090"),
    ],
)
def test_a_value_out_of_range_is_told_with_what_is_wanted(path: str, value: Any, told: str) -> None:
    (problem,) = [problem for problem in problems(changed(path, value)) if problem.startswith(path)]
    assert told in problem


@pytest.mark.parametrize("path", ["colour", "model.expert", "parallel.pp", "tokens.max", "targets.gpu"])
def test_an_unknown_field_is_named_with_the_known_ones(path: str) -> None:
    (problem,) = problems(changed(path, 1))
    assert problem.startswith(f"{path}: unknown; known are ")


def model(**fields: Any) -> dict[str, Any]:
    document = good()
    document["model"] |= fields
    return document


@pytest.mark.parametrize(
    ("document", "path", "told"),
    [
        (model(top_k=8, experts=4), "model.top_k", "more than the 4 experts"),
        (model(swiglu_limit=7.0), "model.swiglu_limit", "only with activation swigluoai_uninterleave"),
        (model(activation="swigluoai_uninterleave", swiglu_limit=0.0), "model.swiglu_limit", "above 0"),
        (model(activation="swigluoai_uninterleave", swiglu_beta=float("inf")), "model.swiglu_beta", "finite"),
        (model(activation="swigluoai_uninterleave", swiglu_alpha=float("nan")), "model.swiglu_alpha", "finite"),
        (changed("parallel.tp", [1, 5]), "parallel.tp", "5 does not divide model.moe_intermediate_size (768)"),
        (changed("parallel.ep", [3]), "parallel.ep", "3 does not divide model.experts (128)"),
        (changed("parallel.tp", [2, 2]), "parallel.tp[1]", "twice"),
        (changed("tokens.capture", [1, 16384]), "tokens.maximum", "less than the capture size 16384"),
        (changed("targets.gpus", ["h200"]), "targets.gpus", "compute capability 12.0 or 12.1"),
        (changed("targets.gpus", ["rtx-5090", "RTX 5090"]), "targets.gpus[1]", "there already"),
        (changed("targets.cuda", "12.8"), "targets.cuda", "needs CUDA 13"),
        ({**good(), "kinds": ["sampling"], "targets": {"cuda": "13.0", "flashinfer": ["0.7.4"]}}, "targets.gpus", "neither"),
    ],
)
def test_a_contradiction_is_told(document: dict[str, Any], path: str, told: str) -> None:
    (problem,) = problems(document)
    assert problem.startswith(f"{path}: ")
    assert told in problem


def test_all_problems_are_told_at_once() -> None:
    document = changed("model.experts", "many")
    document["tokens"] = {"capture": [], "maxima": 3}
    document["targets"]["cuda"] = 13
    paths = {problem.partition(":")[0] for problem in problems(document)}
    assert paths == {"model.experts", "tokens.capture", "tokens.maximum", "tokens.maxima", "targets.cuda"}


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"format = ", "not TOML"),
        (b"\xff\xfe", "not UTF-8: byte 0"),
        (b"#" * (MAX_BYTES + 1), "larger than 256 KiB"),
        (b"a = " + b"[" * 100_000, "not TOML"),
        (b"", "format: missing"),
        (b'format = "kcache.recipe/2"', "format: not 'kcache.recipe/1', but 'kcache.recipe/2'"),
        (b"{}", "not TOML"),
    ],
    ids=["half", "utf-16", "huge", "deep", "empty", "future", "json"],
)
def test_what_is_no_manifest_at_all_gives_one_message(data: bytes, told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(data, "x.toml")
    assert caught.value.exit_code == 2
    assert "x.toml" in str(caught.value)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.toml"):
        with pytest.raises(RecipeError, match="cannot be read"):
            read_recipe(str(path))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_nothing_in_a_document_raises_anything_else(value: Any) -> None:
    for name in ("kinds", "model", "parallel", "tokens", "targets"):
        with pytest.raises(RecipeError):
            recipe_from_document({**good(), name: value}, "test")


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.stem))
def test_every_shipped_manifest_parses_and_says_what_is_not_built(path: Path) -> None:
    recipe = read_recipe(str(path))
    text = path.read_text()
    assert text.startswith("# Values: ")
    assert recipe.model.name in text.partition("format =")[0]
    assert bool(dry_run_cases(recipe, "0.7.4")) != ("nothing of b12x-moe" in text)
    refused = check_shapes(recipe, "0.7.4")
    assert ("Not allowed" in text) == bool(refused)


def test_at_least_eight_models_are_shipped() -> None:
    assert len({read_recipe(str(path)).model.name for path in MANIFESTS}) >= 8


def test_the_example_in_the_documentation_is_the_shipped_one() -> None:
    readme = (MANIFESTS[0].parent / "README.md").read_text()
    example = readme.partition("```toml\n")[2].partition("```")[0]
    assert parse_recipe(example.encode(), "README") == read_recipe(str(MANIFESTS[0].parent / "qwen3-30b-a3b.toml"))


def test_every_field_is_documented() -> None:
    readme = (MANIFESTS[0].parent / "README.md").read_text()
    for path in [*REQUIRED, "tokens.calls", "tokens.scales", "targets.gpus", "targets.arches"]:
        if path not in ("model", "parallel", "tokens", "targets"):
            assert f"`{path}`" in readme


def recipe(**fields: Any) -> Recipe:
    return recipe_from_document(model(**fields), "test")


@pytest.mark.parametrize(
    ("fields", "flashinfer", "told"),
    [
        ({"hidden_size": 2880}, "0.7.4", "hidden size 2880 is not a multiple of 128"),
        ({"moe_intermediate_size": 48}, "0.7.4", "intermediate size 24 of a rank is not a multiple of 16"),
        ({"moe_intermediate_size": 96, "quantization": ["mxfp4"]}, "0.7.4", "48 of a rank is not a multiple of 32"),
        ({"activation": "gelu_tanh", "quantization": ["w4a16"]}, "0.7.4", "activation gelu_tanh is not for w4a16"),
        ({"hidden_size": 2080, "quantization": ["w4a16"]}, "0.7.4", "hidden size 2080 is not a multiple of 64"),
        ({"moe_intermediate_size": 96, "quantization": ["w4a16"]}, "0.7.4", "48 of a rank does not fill tiles"),
    ],
)
def test_a_shape_that_a_mode_does_not_allow_is_told(fields: dict[str, Any], flashinfer: str, told: str) -> None:
    assert any(told in problem.why for problem in check_shapes(recipe(**fields), flashinfer))


@pytest.mark.parametrize(
    ("mode", "flashinfer", "allowed"),
    [
        ("nvfp4", "0.7.4", False),
        ("mxfp4", "0.7.4", False),
        ("w4a16", "0.7.4", True),
        ("w4a16", "0.7.2.post1", True),
        ("w4a16", "0.7.0.post1", False),
    ],
)
def test_expert_parallelism_is_for_w4a16_from_0_7_2_on(mode: str, flashinfer: str, allowed: bool) -> None:
    document = model(quantization=[mode])
    document["parallel"] = {"tp": [1], "ep": [2]}
    assert (not check_shapes(recipe_from_document(document, "test"), flashinfer)) == allowed


def test_every_mode_with_every_layout_becomes_a_case_of_the_dry_run() -> None:
    document = model(quantization=["nvfp4", "w4a16"])
    document["parallel"] = {"tp": [1, 2], "ep": [1, 4]}
    document["tokens"]["calls"] = ["wrapper", "function", "function-ascending"]
    made = recipe_from_document(document, "test")
    cases = {case["id"]: case for case in dry_run_cases(made, "0.7.4")}
    assert len(shapes(made)) == 8
    assert len(cases) == 3 * (2 + 4)  # nvfp4 without expert parallelism, w4a16 with both
    assert cases["w4a16-tp2-ep4-wrapper"]["inter"] == 384
    assert cases["w4a16-tp2-ep4-wrapper"]["local_experts"] == 32
    assert cases["nvfp4-tp1-ep1-function"]["tokens"] == [8192, 4, 2, 1]
    assert cases["nvfp4-tp1-ep1-function-ascending"]["tokens"] == [1, 2, 4, 8192]


# Fields of the models' published config.json files, as far as a recipe reads them.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
              "num_experts": 128, "num_experts_per_tok": 8, "hidden_act": "silu"},
    "gpt-oss": {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128,
                "num_experts_per_tok": 4, "hidden_act": "silu", "swiglu_limit": 7.0,
                "quantization_config": {"quant_method": "mxfp4"}},
    "deepseek": {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
                 "n_routed_experts": 256, "num_experts_per_tok": 8, "hidden_act": "silu"},
    "kimi": {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "hidden_size": 7168, "num_experts_per_tok": 8,
             "moe_intermediate_size": 2048, "n_routed_experts": 384}},
    "minimax": {"model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_local_experts": 256,
                "num_experts_per_tok": 8, "hidden_act": "silu"},
    "v4": {"model_type": "deepseek_v4", "hidden_size": 4096, "moe_intermediate_size": 2048, "n_routed_experts": 256,
           "num_experts_per_tok": 6, "hidden_act": "silu", "swiglu_limit": 10.0},
}  # fmt: skip


def config(name: str) -> dict[str, Any]:
    return dict(CONFIGS[name])


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("qwen3", "qwen3-30b-a3b"),
        ("gpt-oss", "gpt-oss-120b"),
        ("deepseek", "deepseek-v3"),
        ("kimi", "kimi-k2"),
        ("minimax", "minimax-m2"),
        ("v4", "deepseek-v4-flash"),
    ],
)
def test_a_config_gives_the_numbers_of_the_shipped_manifest(name: str, manifest: str) -> None:
    made = recipe_from_config(config(name), name="x/y", source="x/y, config.json").model
    shipped = read_recipe(str(MANIFESTS[0].parent / f"{manifest}.toml")).model
    for field in ("hidden_size", "moe_intermediate_size", "experts", "top_k", "activation", "swiglu"):
        assert getattr(made, field) == getattr(shipped, field), field


def test_gpt_oss_is_clamped_also_where_its_config_names_no_limit() -> None:
    made = recipe_from_config({name: value for name, value in config("gpt-oss").items() if name != "swiglu_limit"})
    assert made.model.swiglu is not None
    assert made.model.swiglu.limit == 7.0


def test_a_config_of_no_mixture_of_experts_is_told_whole() -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_from_config({"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "hidden_act": "tanh"})
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "hidden_act",
    ]


@pytest.mark.parametrize("change", [{"num_experts": "many"}, {"hidden_size": -1}, {"num_experts_per_tok": 500}])
def test_a_config_with_absurd_numbers_is_refused_as_a_manifest_is(change: dict[str, Any]) -> None:
    with pytest.raises(RecipeError):
        recipe_from_config({**config("qwen3"), **change})


@pytest.mark.parametrize("not_a_config", [None, [], "x", 3])
def test_what_is_no_object_is_no_config(not_a_config: Any) -> None:
    with pytest.raises(RecipeError):
        recipe_from_config(not_a_config)


def _shipped() -> list[Callable[[], Recipe]]:
    return [lambda path=path: read_recipe(str(path)) for path in MANIFESTS]  # type: ignore[misc]


@pytest.mark.parametrize("make", [*_shipped(), lambda: recipe_from_config(config("v4"), name='a "b" \\ \x7f \n')])
def test_a_rendered_recipe_parses_to_itself(make: Callable[[], Recipe]) -> None:
    made = make()
    assert parse_recipe(render_recipe(made, note="one\n\ntwo").encode(), "rendered") == made


def test_importing_recipes_loads_no_toml_reader() -> None:
    code = "import sys, json, kcache.recipe, kcache.recipe_shapes; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert not {"tomllib", "torch", "flashinfer", "subprocess", "difflib"} & set(loaded)
