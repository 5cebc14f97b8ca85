"""Why an entry does not fit, in a sentence, and what would make it fit."""

from __future__ import annotations

import pytest
from entries import make_key

from kcache.advice import advise
from kcache.key import Environment, known
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
