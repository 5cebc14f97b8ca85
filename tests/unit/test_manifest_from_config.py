"""A model's config.json becomes a build manifest: the numbers of each family, what is guessed and said, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcache.recipe import RecipeError, parse_recipe, read_recipe
from kcache.recipe_config import MAX_BYTES, REMARKS, FromConfig, parse_config, recipe_from_config

MANIFESTS = Path(__file__).parents[2] / "manifests"

# Fields of the models' published config.json files, as far as a recipe reads them.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
                      "num_experts": 128, "num_experts_per_tok": 8, "hidden_act": "silu"},
    "gpt-oss-120b": {"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 128,
                     "num_experts_per_tok": 4, "hidden_act": "silu", "swiglu_limit": 7.0,
                     "quantization_config": {"quant_method": "mxfp4"}},
    "deepseek-v3": {"model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
                    "n_routed_experts": 256, "num_experts_per_tok": 8, "hidden_act": "silu",
                    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}},
    "kimi-k2": {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "hidden_size": 7168, "num_experts_per_tok": 8,
                "moe_intermediate_size": 2048, "n_routed_experts": 384}},
    "minimax-m2": {"model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_local_experts": 256,
                   "num_experts_per_tok": 8, "hidden_act": "silu"},
    "deepseek-v4-flash": {"model_type": "deepseek_v4", "hidden_size": 4096, "moe_intermediate_size": 2048, "expert_dtype": "fp4",
                          "n_routed_experts": 256, "num_experts_per_tok": 6, "hidden_act": "silu", "swiglu_limit": 10.0},
    "qwen3-235b-a22b": {"model_type": "qwen3_moe", "hidden_size": 4096, "intermediate_size": 12288, "num_experts": 128,
                        "moe_intermediate_size": 1536, "num_experts_per_tok": 8, "hidden_act": "silu"},
    "qwen3-next-80b-a3b": {"model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_experts": 512,
                           "moe_intermediate_size": 512, "num_experts_per_tok": 10, "hidden_act": "silu"},
    "glm-4.5-air": {"model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
                    "n_routed_experts": 128, "num_experts_per_tok": 8, "hidden_act": "silu"},
    "nemotron-3-nano-30b-a3b": {"model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856,
                                "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
                                "n_routed_experts": 128, "num_experts_per_tok": 6, "mlp_hidden_act": "relu2"},
}  # fmt: skip


def config(name: str = "qwen3-30b-a3b", **changes: Any) -> dict[str, Any]:
    return {**CONFIGS[name], **changes}


def notes(made: FromConfig) -> dict[str, str]:
    return {line.partition(": ")[0]: line.partition(": ")[2] for line in made.notes}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_numbers_of_the_shipped_manifest(name: str) -> None:
    made = recipe_from_config(config(name), name="x/y", source="x/y, config.json").recipe.model
    shipped = read_recipe(str(MANIFESTS / f"{name}.toml")).model
    for field in ("hidden_size", "moe_intermediate_size", "experts", "top_k", "activation", "swiglu"):
        assert getattr(made, field) == getattr(shipped, field), field


def test_every_shipped_manifest_is_held_against_a_config() -> None:
    assert {path.stem for path in MANIFESTS.glob("*.toml")} == set(CONFIGS)


def test_gpt_oss_is_clamped_also_where_its_config_names_no_limit() -> None:
    made = recipe_from_config(config("gpt-oss-120b", swiglu_limit=None)).recipe
    assert made.model.swiglu is not None
    assert made.model.swiglu.limit == 7.0


@pytest.mark.parametrize(
    ("path", "outer"),
    [
        ("text_config", {"model_type": "llama4"}),
        ("llm_config", {"model_type": "internvl_chat"}),
        ("language_config", {"model_type": "deepseek_vl_v2", "hidden_size": 1}),
        ("thinker_config.text_config", {"model_type": "qwen3_omni_moe"}),
    ],
)
def test_the_language_model_of_a_multi_modal_config_is_found(path: str, outer: dict[str, Any]) -> None:
    nested: dict[str, Any] = config()
    for name in reversed(path.split(".")):
        nested = {name: nested}
    made = recipe_from_config({**outer, **nested, "vision_config": {"hidden_size": 1152}})
    assert made.recipe.model.hidden_size == 2048
    assert notes(made)["model"] == f"read from {path} of the config"


def test_a_quantization_beside_the_language_model_counts() -> None:
    outer = {"text_config": config(), "quantization_config": {"quant_method": "mxfp4"}}
    assert recipe_from_config(outer).recipe.model.quantization == ("mxfp4", "w4a16")


def test_the_intermediate_size_of_dense_layers_is_not_that_of_experts() -> None:
    with pytest.raises(RecipeError, match="moe_intermediate_size: missing"):
        recipe_from_config(config(moe_intermediate_size=None))
    made = recipe_from_config(config(moe_intermediate_size=None, model_type="mixtral"))
    assert made.recipe.model.moe_intermediate_size == 6144


GROUP = {"weights": {"num_bits": 4, "type": "float", "group_size": 16}, "input_activations": {"num_bits": 4, "type": "float"}}
ONLY_WEIGHTS = {**GROUP, "input_activations": None}


@pytest.mark.parametrize(
    ("quantization", "modes"),
    [
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, ("mxfp4", "w4a16")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}}, ("nvfp4", "w4a16")),
        ({"quant_method": "modelopt_mixed", "config_groups": {"group_0": {"quant_algo": "NVFP4"}}}, ("nvfp4", "w4a16")),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}, ("w4a16",)),
        ({"format": "nvfp4-pack-quantized", "config_groups": {"g": GROUP}}, ("nvfp4", "w4a16")),
        ({"format": "nvfp4-pack-quantized", "config_groups": {"g": ONLY_WEIGHTS}}, ("w4a16",)),
        ({"format": "mxfp4-pack-quantized", "config_groups": {"g": ONLY_WEIGHTS}}, ("w4a16",)),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}}, ("mxfp4", "w4a16")),
        ({"quant_method": "fp8"}, ("nvfp4",)),
        ({"quant_method": "awq", "bits": 4}, ("nvfp4",)),
        ({"format": "pack-quantized", "config_groups": {"g": ONLY_WEIGHTS}}, ("nvfp4",)),
        (None, ("nvfp4",)),
        ("nvfp4", ("nvfp4",)),
        ({"quant_method": 3, "config_groups": [1]}, ("nvfp4",)),
    ],
)  # fmt: skip
def test_a_published_quantization_becomes_modes(quantization: Any, modes: tuple[str, ...]) -> None:
    made = recipe_from_config(config(quantization_config=quantization))
    assert made.recipe.model.quantization == modes
    assert ("names no 4-bit floats" in notes(made)["model.quantization"]) == (modes == ("nvfp4",))


def test_a_checkpoint_of_another_quantization_is_said() -> None:
    made = recipe_from_config(config("deepseek-v3"))
    assert notes(made)["model.quantization"] == (
        "the config names no 4-bit floats (it names fp8); nvfp4 is for a checkpoint converted to it"
    )
    assert recipe_from_config(config("deepseek-v4-flash")).recipe.model.quantization == ("mxfp4", "w4a16")


def test_what_a_person_has_to_fill_in_is_said() -> None:
    made = recipe_from_config(config(hidden_act=None))
    assert set(REMARKS) <= set(notes(made))
    assert notes(made)["model.name"].startswith("'qwen3_moe' is its model type")
    assert "silu is what most models have" in notes(made)["model.activation"]
    named = recipe_from_config(config(), name="Qwen/Qwen3-30B-A3B", source="x")
    assert not {"model.name", "model.source", "model.activation", "model"} & set(notes(named))
    assert recipe_from_config(config(_name_or_path="/data/m")).recipe.model.name == "/data/m"


def refused(given: dict[str, Any]) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        recipe_from_config(given, what="c.json")
    assert str(caught.value).isprintable()
    return [problem.partition(":")[0] for problem in caught.value.problems]


@pytest.mark.parametrize("experts", [{}, {"num_experts": None}, {"num_experts": 0}, {"num_experts": []}])
def test_a_dense_model_is_refused_in_one_clear_line(experts: dict[str, Any]) -> None:
    dense = {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "hidden_act": "tanh", **experts}
    with pytest.raises(RecipeError, match=r"c\.json is not the config of a mixture of experts: it names no number of experts"):
        recipe_from_config(dense, what="c.json")


def test_all_that_is_not_found_is_told_at_once() -> None:
    assert refused({"num_experts": 8, "hidden_act": "tanh"}) == [
        "hidden_size", "moe_intermediate_size", "num_experts_per_tok", "hidden_act",
    ]  # fmt: skip


def test_a_number_for_each_layer_counts_if_all_are_equal() -> None:
    assert recipe_from_config(config(num_experts_per_tok=[8, 8])).recipe.model.top_k == 8
    assert refused(config(moe_intermediate_size=[1536, 512])) == ["moe_intermediate_size"]


@pytest.mark.parametrize(
    ("change", "paths"),
    [
        ({"num_experts": "many"}, ["num_experts"]),
        ({"num_experts": True}, ["num_experts"]),
        ({"hidden_size": -1}, ["model.hidden_size"]),
        ({"num_experts_per_tok": 500}, ["model.top_k"]),
        ({"num_experts": 10**5000}, ["model.experts"]),
        ({"swiglu_limit": "x"}, ["model.swiglu_limit"]),
        ({"swiglu_limit": float("nan")}, ["model.swiglu_limit"]),
        ({"hidden_act": ["silu"]}, ["hidden_act"]),
        ({"_name_or_path": "x" * 300}, ["model.name"]),
        ({"_name_or_path": "two\nlines"}, ["model.name"]),
    ],
)
def test_a_config_with_absurd_values_is_refused_by_their_names(change: dict[str, Any], paths: list[str]) -> None:
    assert refused(config(**change)) == paths


@given(
    st.sampled_from(
        ["num_experts", "hidden_act", "quantization_config", "text_config", "model_type", "_name_or_path", "swiglu_limit"]
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.just("config_groups") | st.just("text_config"), inner),
    ),
)
def test_nothing_in_a_config_raises_anything_else(name: str, value: Any) -> None:
    try:
        recipe_from_config(config(**{name: value}))
    except RecipeError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'"x"', "not a JSON object"),
        (b"{'a': 1}", "not JSON"),
        (b"\xff\xfe{}", "not UTF-8: byte 0"),
        (b"[" * 500_000, "not JSON"),
        (b" " * (MAX_BYTES + 1), "larger than 4 MiB"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON: Exceeds the limit"),
    ],
    ids=["empty", "list", "text", "python", "utf-16", "deep", "huge", "digits"],
)
def test_what_is_no_config_gives_one_message(data: bytes, told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_config(data, "c.json")
    assert caught.value.exit_code == 2
    assert str(caught.value).startswith("c.json is not a model's config.json: ")
    assert told in str(caught.value)
    assert str(caught.value).isprintable()


def kcache(*words: object) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "kcache", "manifest", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config("gpt-oss-120b")))
    return path


def test_what_is_written_is_a_manifest_that_says_what_to_fill_in(config_file: Path) -> None:
    output = config_file.parent / "m.toml"
    code, out, err = kcache("from-config", config_file, "--name", "openai/gpt-oss-120b", "-o", output)
    assert (code, out) == (0, "")
    text = output.read_text()
    assert text.startswith(
        "# Values: openai/gpt-oss-120b, from openai/gpt-oss-120b, config.json, by `kcache manifest from-config`.\n"
    )
    for path, remark in REMARKS.items():
        assert f"# {remark}\n{path.rpartition('.')[2]} = " in text
        assert f"kcache: {path}: {remark}" in err
    assert "# Not allowed: mxfp4 with tp 1, ep 1: hidden size 2880 is not a multiple of 128" in text
    assert kcache("check", output)[0] == 0


def test_without_an_output_the_manifest_alone_is_on_stdout(config_file: Path) -> None:
    code, out, err = kcache("from-config", config_file)
    assert code == 0
    assert parse_recipe(out.encode(), "stdout").model.experts == 128
    assert "kcache: model.name: 'gpt_oss' is its model type" in err


def test_a_file_that_is_there_is_kept(config_file: Path) -> None:
    output = config_file.parent / "m.toml"
    output.write_text("mine")
    code, _, err = kcache("from-config", config_file, "-o", output)
    assert code == 2
    assert f"{output} is there already" in err
    assert output.read_text() == "mine"
    assert kcache("from-config", config_file, "-o", output / "x")[0] == 2


def test_json_has_the_manifest_its_notes_and_its_shapes(config_file: Path) -> None:
    code, out, _ = kcache("from-config", config_file, "--json")
    assert code == 0
    document = json.loads(out)
    assert parse_recipe(document["manifest"].encode(), "json").model.top_k == 4
    assert any(note.startswith("parallel.tp: ") for note in document["notes"])
    assert [shape["allowed"] for shape in document["shapes"]] == [False, False]
    assert document["output"] is None


@pytest.mark.parametrize("content", [b"not json", b'{"hidden_size": 3}', None])
def test_a_bad_config_is_one_line_and_exit_code_2(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "config.json"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    code, out, err = kcache("from-config", path)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert str(path) in err
    assert not err.startswith("kcache: kcache failed")
