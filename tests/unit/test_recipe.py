"""Build manifests: what is shipped, which shapes are allowed, and how a config becomes one. Bad ones: test_bad_manifests.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcache.recipe import FIELDS, Recipe, parse_recipe, read_recipe, recipe_from_document
from kcache.recipe_fields import REQUIRED
from kcache.recipe_shapes import check_shapes, dry_run_cases, in_memory_only, shapes
from kcache.recipe_text import render_recipe

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


def test_the_good_document_parses() -> None:
    recipe = recipe_from_document(good(), "test")
    assert recipe.model.experts == 128
    assert recipe.tokens.counts == (1, 2, 4, 8192)
    assert recipe.tokens.calls == ("wrapper",)
    assert recipe.targets.gpus[0].sm_count == 188


def model(**fields: Any) -> dict[str, Any]:
    document = good()
    document["model"] |= fields
    return document


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: str(path.stem))
def test_every_shipped_manifest_parses_and_says_what_is_not_built(path: Path) -> None:
    recipe = read_recipe(str(path))
    text = path.read_text()
    assert text.startswith("# Values: ")
    head = text.partition("format =")[0]
    assert f"{recipe.model.name} on the Hugging Face Hub, config.json: " in " ".join(head.replace("#", "").split())
    assert recipe.model.source == f"{recipe.model.name}, config.json"
    assert bool(dry_run_cases(recipe, "0.7.4")) != ("nothing of b12x-moe" in text)
    refused = check_shapes(recipe, "0.7.4")
    assert ("Not allowed" in text) == bool(refused)
    told = " ".join(text.partition("Not allowed:")[2].partition("format =")[0].replace("#", "").split())
    assert all(problem.shape.mode in told or "either mode" in told for problem in refused)
    for tp in {problem.shape.tp for problem in refused} if len(recipe.parallel.tp) > 1 and len(recipe.parallel.ep) == 1 else ():
        assert f"tp {tp}" in told


def test_at_least_eight_models_are_shipped() -> None:
    assert len({read_recipe(str(path)).model.name for path in MANIFESTS}) >= 8


def test_the_example_in_the_documentation_is_the_shipped_one() -> None:
    readme = (MANIFESTS[0].parent / "README.md").read_text()
    example = readme.partition("```toml\n")[2].partition("```")[0]
    assert parse_recipe(example.encode(), "README") == read_recipe(str(MANIFESTS[0].parent / "qwen3-30b-a3b.toml"))


def test_every_field_is_documented() -> None:
    readme = (MANIFESTS[0].parent / "README.md").read_text()
    rows = {
        cells[1].strip(): cells[2].strip()
        for line in readme.splitlines()
        if (cells := line.split("|"))[0] == "" and len(cells) == 5
    }
    assert set(rows) - {"field", "---"} == {f"`{field.path}`" for field in FIELDS}
    for field in FIELDS:
        assert ("optional" in rows[f"`{field.path}`"]) == (field.default is not REQUIRED), field.path
        assert ("list" in rows[f"`{field.path}`"]) == (field.least is not None), field.path


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


def test_kernels_that_are_kept_in_no_file_are_told() -> None:
    made = recipe(moe_intermediate_size=1024, quantization=["nvfp4", "mxfp4", "w4a16"])
    told = {shape.name: in_memory_only(shape) for shape in shapes(made)}
    assert "direct micro" in told["nvfp4-tp2-ep1"]
    assert "all kernels" in told["w4a16-tp1-ep1"]
    assert told["nvfp4-tp1-ep1"] == told["mxfp4-tp1-ep1"] == told["mxfp4-tp2-ep1"] == ""


def _shipped() -> list[Callable[[], Recipe]]:
    return [lambda path=path: read_recipe(str(path)) for path in MANIFESTS]  # type: ignore[misc]


@pytest.mark.parametrize("make", [*_shipped(), lambda: recipe(name='a "b" \\ é', activation="swigluoai_uninterleave")])
def test_a_rendered_recipe_parses_to_itself(make: Callable[[], Recipe]) -> None:
    made = make()
    text = render_recipe(made, note="one\n\ntwo", remarks={"model.name": "three\nfour"})
    assert text.startswith("# one\n#\n# two\nformat")
    assert "# three\n# four\nname = " in text
    assert parse_recipe(text.encode(), "rendered") == made


def test_importing_recipes_loads_no_toml_reader() -> None:
    code = "import sys, json, kcache.recipe, kcache.recipe_shapes; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert not {"tomllib", "torch", "flashinfer", "subprocess", "difflib"} & set(loaded)
