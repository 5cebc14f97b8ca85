"""The driver of the b12x child: cases from a build manifest, and what its answers mean. The real child is in tests/real."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kcache.errors import CollectError, ProbeError
from kcache.gpu_products import product
from kcache.recipe import Recipe, read_recipe
from kcache.workflows.b12x_build import (
    ProgramAnswer,
    ProgramRun,
    check_programs,
    compile_programs,
    name_programs,
    program_cases,
    refused_shapes,
)

MANIFESTS = Path(__file__).parents[2] / "manifests"

ANSWER = """
import json, sys
request = json.load(sys.stdin)
cute = {"dialect": "cute", "key": "ab", "name": "micro", "path": "/c/ab/ab.o", "default": True, "cases": {"c": [1]},
        "status": "found", "seconds": 1.5, "error": "", "size": 3}
triton = dict(cute, dialect="triton", key="cd", name="route", path="/t/QQ")
answer = {"package": "/site/b12x", "compile_cache": "/c", "triton_cache": "/t", "context": {}, "programs": [cute, triton],
          "cases": [{"id": "c", "configurations": 2, "prepared": 2, "missing": [], "errors": []}], "compiles": [], "loads": 2,
          "seconds": {}, "request": request}
def give(answer):
    open(request["answer"], "w").write(json.dumps(answer))
"""


def recipe(name: str = "qwen3-30b-a3b") -> Recipe:
    return read_recipe(str(MANIFESTS / f"{name}.toml"))


def run_of(tmp_path: Path, what_the_child_does: str) -> ProgramRun:
    """A run whose interpreter is a script that does this in place of the child."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{ANSWER}\n{what_the_child_does}\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return ProgramRun(python=str(script), gpu=product("gb10"), cases=[{"id": "c"}], environ=dict(os.environ))


def test_a_build_manifest_gives_a_case_for_each_mode_and_split() -> None:
    cases = {case["id"]: case for case in program_cases(recipe())}
    assert set(cases) == {f"{mode}-tp{tp}-ep1" for mode in ("nvfp4", "w4a16") for tp in (1, 2)}
    case = cases["nvfp4-tp2-ep1"]
    assert (case["experts"], case["top_k"], case["hidden"], case["inter"]) == (128, 8, 2048, 384)
    assert (case["source"], case["mode"]) == ("modelopt_nvfp4", "a4")
    assert (cases["w4a16-tp1-ep1"]["source"], cases["w4a16-tp1-ep1"]["mode"]) == ("modelopt_nvfp4", "a16")
    assert case["maximum"] == 8192
    assert case["tokens"] == [1, 2, 4, 8, 16, 32, 64, 128, 512, 2048, 8192]


def test_what_b12x_has_not_is_told_and_not_asked_for() -> None:
    whole = recipe()
    split = replace(whole, parallel=replace(whole.parallel, ep=(1, 2)))
    assert {problem.shape.name for problem in refused_shapes(split)} == {
        f"{mode}-tp{tp}-ep2" for mode in ("nvfp4", "w4a16") for tp in (1, 2)
    }
    assert program_cases(split) == program_cases(whole)
    gelu = replace(whole, model=replace(whole.model, activation="gelu_tanh"))
    assert program_cases(gelu) == ()
    assert {problem.why for problem in refused_shapes(gelu)} == {"b12x has no activation gelu_tanh"}


@pytest.mark.parametrize("path", sorted(MANIFESTS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_manifest_gives_cases_or_reasons(path: Path) -> None:
    one = read_recipe(str(path))
    assert program_cases(one) or refused_shapes(one)


def answer_of(tmp_path: Path, change: str) -> ProgramAnswer:
    return check_programs(run_of(tmp_path, f"{change}; give(answer)"))


def test_an_answer_is_taken_apart(tmp_path: Path) -> None:
    answer = answer_of(tmp_path, "pass")
    assert [(program.dialect, program.key, program.status, program.cases) for program in answer.programs] == [
        ("cute", "ab", "found", {"c": (1,)}),
        ("triton", "cd", "found", {"c": (1,)}),
    ]
    assert answer.triton_groups() == {"QQ": "route.json"}
    assert answer.proven


@pytest.mark.parametrize(
    "change",
    [
        "answer['compiles'] = ['cute:x']",
        "cute['status'] = 'missing'",
        "answer['programs'] = []",
        "answer['cases'][0]['prepared'] = 1",
        "answer['cases'][0]['errors'] = [{'tokens': 1, 'error': 'no'}]",
        "answer['cases'][0]['missing'] = [{'tokens': 1, 'error': 'no'}]",
    ],
)
def test_one_thing_amiss_is_no_proof(tmp_path: Path, change: str) -> None:
    assert not answer_of(tmp_path, change).proven


def test_the_request_says_what_is_asked(tmp_path: Path) -> None:
    run = replace(run_of(tmp_path, "assert False"), configurations="all", only=["ab"], compile_cache="/c")
    request = run.request("build", "/a", 3, 7.0)
    assert (request["mode"], request["jobs"], request["seconds_per_job"], request["only"]) == ("build", 3, 7.0, ["ab"])
    assert (request["configurations"], request["compile_cache"], request["triton_cache"]) == ("all", "/c", None)
    assert request["gpu"]["sm_count"] == 48


def test_a_child_without_an_answer_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(CollectError, match="no answer") as caught:
        compile_programs(run_of(tmp_path, "print('torn', file=sys.stderr); sys.exit(3)"), jobs=1)
    assert "exit code 3" in caught.value.why
    assert "torn" in caught.value.why


@pytest.mark.parametrize(("kind", "what"), [("assumption", "is not as kcache expects"), ("failed", "could not be named")])
def test_another_b12x_is_told_by_what_was_asked_for(tmp_path: Path, kind: str, what: str) -> None:
    child = f"give({{'error': {{'kind': '{kind}', 'what': 'b12x has no _run_job', 'trace': []}}}})"
    with pytest.raises(ProbeError, match=what) as caught:
        name_programs(run_of(tmp_path, child))
    assert "_run_job" in caught.value.why
