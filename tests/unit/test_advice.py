"""Why an entry does not fit, in a sentence, and what would make it fit."""

from __future__ import annotations

import pytest
from b12x_samples import ABI, VERSIONS, WHEELS, program, target
from entries import make_key

from kcache.advice import advise
from kcache.kernel_facts import Wheel
from kcache.key import Environment, known
from kcache.kinds.b12x_key import TOOL_VARIABLES, match_program
from kcache.match import Check, match_key

HERE = Environment(
    facts={
        "platform.machine": known("x86_64"),
        "flashinfer.version": known("0.7.4"),
        "cuda.runtime": known("13.0"),
        "tvm_ffi.version": known("0.1.15.post2"),
    },
    archs=("90a",),
)


@pytest.mark.parametrize(
    ("ingredient", "value", "why", "to_hit"),
    [
        (
            "flashinfer.version",
            "0.7.2",
            "It was built for FlashInfer 0.7.2, here it is 0.7.4.",
            "rebuild for FlashInfer 0.7.4, or install flashinfer-python==0.7.2",
        ),
        (
            "cuda.release",
            "12.9",
            "It was built for CUDA 12.9, here it is 13.0.",
            "rebuild for CUDA 13.0, or install a torch build for CUDA 12.9",
        ),
        (
            "tvm_ffi.version",
            "0.2.1",
            "It was built for tvm-ffi 0.2.1, here it is 0.1.15.post2.",
            "rebuild for tvm-ffi 0.1.15.post2, or install apache-tvm-ffi==0.2.1",
        ),
        ("gpu.arch", "120f", "It is for architecture 12.0f, here is 9.0a.", "rebuild with --arch 9.0a"),
    ],
)
def test_each_key_ingredient_has_a_sentence_and_a_remedy(ingredient: str, value: str, why: str, to_hit: str) -> None:
    key = make_key("cascade", ingredients={ingredient: value})
    advice = advise(key, match_key(key, HERE).differs)
    assert (advice.why, advice.to_hit) == (why, (to_hit,))


def test_without_a_gpu_the_architecture_is_asked_for_and_nothing_is_to_be_rebuilt() -> None:
    key = make_key("cascade")
    advice = advise(key, match_key(key, Environment(facts=HERE.facts)).differs)
    assert advice.why == "It is for architecture 9.0a, and no GPU is visible here."
    assert advice.to_hit == ("name the GPU's architecture with --arch or --gpu",)


def check(field: str, wanted: str, found: str) -> Check:
    return Check(field=field, rule="equal", wanted=wanted, found=found, passed=False)


def test_many_sources_are_one_sentence_and_what_binaries_need_is_said() -> None:
    differs = [check(f"flashinfer.sources: data/{name}.cuh", "sha256:a", "sha256:b") for name in "abcde"]
    differs += [
        check("cascade/cascade.so: GLIBC_2.38", "2.38", "2.36"),
        check("cascade/cascade.so: needs libcublas.so.13", "libcublas.so.13", "absent"),
        check("package nvidia-cutlass-dsl", "4.8.0 sha256:a", "4.8.0 sha256:b"),
    ]
    advice = advise(make_key("cascade"), differs)
    assert "5 of FlashInfer's files" in advice.why and "a.cuh, data/b.cuh, data/c.cuh and 2 more" in advice.why
    assert "needs glibc symbols GLIBC_2.38, here they end with 2.36" in advice.why
    assert "nvidia-cutlass-dsl 4.8.0, whose files are others here" in advice.why
    assert len(advice.to_hit) == 4 and any("libcublas.so.13 in the image" in step for step in advice.to_hit)


def test_an_architecture_that_this_kcache_does_not_know_is_named_as_it_is() -> None:
    key = make_key("cascade", ingredients={"gpu.arch": "72"})
    advice = advise(key, match_key(key, HERE).differs)
    assert advice is not None and advice.why == "It is for architecture 72, here is 9.0a."


@pytest.mark.parametrize(
    ("field", "wanted", "found", "why", "to_hit"),
    [
        (
            "env CUTE_DSL_LINEINFO", "unset", "1",
            "CUTE_DSL_LINEINFO is 1 here, and it was built without it.",
            "unset CUTE_DSL_LINEINFO where the server starts",
        ),
        (
            "env CUDA_HOME", "/usr/local/cuda", "unset",
            "CUDA_HOME is not set here, and it was built with /usr/local/cuda.",
            "set CUDA_HOME=/usr/local/cuda where the server starts",
        ),
        (
            "b12x.package", "98" * 6, "77" * 6,
            "Its b12x is another than this environment's.",
            "rebuild with this environment's b12x, or install the one that it was built with",
        ),
        (
            "b12x.package", "98" * 6, "no b12x is installed: /bin/python would not find it",
            "There is no b12x here that it could serve (no b12x is installed: /bin/python would not find it).",
            "install b12x; rebuild with this environment's b12x, or install the one that it was built with",
        ),
        (
            "nvidia-cutlass-dsl.version", "4.8.0", "4.8.1",
            "It was built for nvidia-cutlass-dsl 4.8.0, here it is 4.8.1.",
            "rebuild for nvidia-cutlass-dsl 4.8.1, or install nvidia-cutlass-dsl==4.8.0",
        ),
        (
            "package nvidia-cutlass-dsl", "sha256:a", "sha256:b",
            "The files of nvidia-cutlass-dsl are others here.",
            "rebuild with this environment's nvidia-cutlass-dsl, or install the one that it was compiled by",
        ),
        (
            "selections.tuning_cache_version", "1", "2",
            "B12X_TUNING_CACHE_VERSION is 2 here, and it was built with 1.",
            "set B12X_TUNING_CACHE_VERSION=1 where the server starts",
        ),
        (
            "selections.sm_count", "188", "170",
            "B12x chose on a GPU with sm_count 188, here it is 170.",
            "tune on such a GPU as this, and collect there",
        ),
    ],
)  # fmt: skip
def test_what_enters_b12x_own_names_has_a_sentence_and_a_remedy(
    field: str, wanted: str, found: str, why: str, to_hit: str
) -> None:
    advice = advise(make_key("cascade"), [check(field, wanted, found)])
    assert (advice.why, advice.to_hit) == (why, (to_hit,))


@pytest.mark.parametrize("strict", [False, True])
def test_whatever_of_b12x_own_key_differs_is_advised_on_by_name(strict: bool) -> None:
    """From the checks of the rule itself: none of them is left to the sentence for what is not known."""
    variables = {"CUTE_DSL_LINEINFO": "1", "B12X_DISABLE_CUTLASS_RUNTIME_PATCHES": "1", **dict.fromkeys(TOOL_VARIABLES, "/else")}
    host = target(
        environ=variables,
        fingerprint="77" * 32,
        versions=dict.fromkeys(VERSIONS, "9.9"),
        wheels={"nvidia-cutlass-dsl": Wheel(version="9.9", content="sha256:" + "3" * 64, portable="")},
        python=(3, 11, 8),
        sm_count=170,
        machine="aarch64",
    )
    decision = match_program(program().payload, host, machine="x86_64", abi=ABI, wheels=WHEELS, strict=strict)
    advice = advise(make_key("cascade"), decision.differs)
    told = f"{advice.why} {' '.join(advice.to_hit)}"
    assert ("unset CUDA_HOME where the server starts" in advice.to_hit) == strict
    assert "unset CUTE_DSL_LINEINFO where the server starts" in advice.to_hit
    for named in ("170", "aarch64", "B12X_DISABLE_CUTLASS_RUNTIME_PATCHES", "nvidia-cutlass-dsl==4.8.0", "b12x is another"):
        assert named in told
    assert "kcache build --env" not in told


def test_of_b12x_what_follows_from_something_else_is_not_told_twice() -> None:
    differs = [check(f"b12x.package: moe/{name}.py", "a", "b") for name in "abcd"]
    differs += [
        check("b12x.patches", "memory_debug=True", "memory_debug=False"),
        check("env CUTLASS_DSL_CUDA_MEMORY_DEBUG", "unset", "1"),
        check("nvidia-cutlass-dsl.version", "4.8.0", "4.8.1"),
        check("package nvidia-cutlass-dsl", "sha256:a", "sha256:b"),
    ]
    advice = advise(make_key("cascade"), differs)
    assert advice.why.count(";") == 2
    assert "4 of b12x's files are others (moe/a.py, moe/b.py, moe/c.py and 1 more)" in advice.why
    assert "CUTLASS_DSL_CUDA_MEMORY_DEBUG is 1 here" in advice.why
    assert "nvidia-cutlass-dsl 4.8.0, here it is 4.8.1" in advice.why
    assert len(advice.to_hit) == 3
