"""What enters b12x's key: every ingredient by name and rule, and which of them refuse."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from b12x_samples import ABI, FARM, VERSIONS, WHEELS, payload_values, target

from kcache.errors import IntegrityError
from kcache.kernel_facts import Wheel
from kcache.kinds.b12x_key import (
    TOOL_VARIABLES,
    Payload,
    Target,
    environment_key,
    expected_payload,
    ingredients_of_program,
    ingredients_of_target,
    key_of,
    match_program,
    parse_payload,
    patch_status,
)
from kcache.match import Decision

BUILT = Payload(values=payload_values())
ONE = WHEELS["nvidia-cutlass-dsl"]


def match(host: Target, *, payload: Payload = BUILT, strict: bool = False, **changes: Any) -> Decision:
    values: dict[str, Any] = {"machine": "x86_64", "abi": ABI, "wheels": WHEELS}
    return match_program(payload, host, strict=strict, **(values | changes))


def environ(**changes: str) -> dict[str, str]:
    return {**FARM, **changes}


def other_wheel(**changes: str) -> dict[str, Wheel]:
    values = {"version": "4.8.0", "content": "sha256:" + "1" * 64, "portable": "sha256:" + "2" * 64}
    return {"nvidia-cutlass-dsl": Wheel(**(values | changes))}


def test_the_same_host_asks_for_the_same_key() -> None:
    assert expected_payload(BUILT, target()) == BUILT
    assert match(target(), strict=True).accepted


@pytest.mark.parametrize(
    ("host", "field"),
    [
        (target(machine="aarch64"), "platform.machine"),
        (target(fingerprint="97" * 32), "b12x.package"),
        (target(capability=(12, 1)), "gpu.capability"),
        (target(sm_count=170), "gpu.sm_count"),
        (target(implementation="pypy"), "python.implementation"),
        (target(versions=VERSIONS | {"nvidia-cutlass-dsl": "4.8.1"}), "nvidia-cutlass-dsl.version"),
        (target(versions={**VERSIONS, "nvidia-cutlass-dsl-libs-cu12": ""}), "nvidia-cutlass-dsl-libs-cu12.version"),
        (target(wheels=other_wheel(content="sha256:" + "3" * 64)), "package nvidia-cutlass-dsl"),
        (target(wheels=other_wheel(content="")), "package nvidia-cutlass-dsl"),
        (target(wheels={}), "package nvidia-cutlass-dsl"),
        (target(wheels=WHEELS | {"nvidia-cutlass-dsl-libs-more": ONE}), "package nvidia-cutlass-dsl-libs-more"),
        (target(environ=environ(B12X_MOE_TILE_MN="64x128")), "env B12X_MOE_TILE_MN"),
        (target(environ=environ(CUTE_DSL_LINEINFO="1")), "env CUTE_DSL_LINEINFO"),
        (target(environ=environ(CUTLASS_DSL_X="1")), "env CUTLASS_DSL_X"),
        (target(environ=environ(CUTE_DSL_ARCH="sm_120f")), "env CUTE_DSL_ARCH"),
        (target(environ=environ(B12X_DISABLE_CUTLASS_RUNTIME_PATCHES="1")), "b12x.patches"),
        (target(fingerprint=""), "b12x.package"),
    ],
)  # fmt: skip
def test_what_a_program_depends_on_refuses_and_is_named(host: Target, field: str) -> None:
    assert field in [check.field for check in match(host).differs]


@pytest.mark.parametrize(
    ("host", "field"),
    [
        (target(python=(3, 11, 9)), "python.version"),
        (target(versions=VERSIONS | {"torch": "2.14.0"}), "torch.version"),
        (target(torch_cuda=""), "torch.cuda"),
        (target(versions=VERSIONS | {"cuda-python": "12.9.0"}), "cuda-python.version"),
        (target(versions={name: text for name, text in VERSIONS.items() if name != "cuda-bindings"}), "cuda-bindings.version"),
        *((target(environ=environ(**{name: "/else"})), f"env {name}") for name in TOOL_VARIABLES),
        (target(environ=environ(B12X_COMPILE_WORKERS="4")), "env B12X_COMPILE_WORKERS"),
        (target(environ=environ(CUTE_DSL_ARCH="sm_120a")), "env CUTE_DSL_ARCH"),
    ],
)
def test_what_only_b12x_counts_changes_the_key_is_told_and_does_not_refuse(host: Target, field: str) -> None:
    decision = match(host)
    assert decision.accepted
    assert key_of(expected_payload(BUILT, host).values) != key_of(BUILT.values)
    told = {check.field: check for check in decision.checks}[field]
    assert told.wanted != told.found
    assert [check.field for check in match(host, strict=True).differs] == [field]


def test_a_variable_that_b12x_leaves_out_leaves_the_key_alone() -> None:
    host = target(environ=environ(B12X_TIMING="1", B12X_AUTOTUNE="0", CUTE_DSL_CACHE_DIR="/x", HOME="/else", MAX_JOBS="3"))
    assert expected_payload(BUILT, host) == BUILT


def test_a_variable_of_the_farm_refuses_where_it_is_not_set() -> None:
    built = Payload(values=payload_values(environ=environ(B12X_MOE_TILE_MN="64x128")))
    assert [check.describe() for check in match(target(), payload=built).differs] == [
        "env B12X_MOE_TILE_MN: wanted 64x128 (equal), found unset"
    ]


def test_under_another_python_only_what_is_the_same_for_every_python_counts() -> None:
    host = target(abi="cpython-312-x86_64-linux-gnu", python=(3, 12, 1), wheels=other_wheel(content="sha256:" + "3" * 64))
    assert match(host).accepted
    assert not match(target(wheels=host.wheels)).accepted
    for portable in ("sha256:" + "4" * 64, ""):
        assert not match(target(abi=host.abi, wheels=other_wheel(content="sha256:" + "3" * 64, portable=portable))).accepted


def test_what_its_builder_did_not_state_never_passes() -> None:
    assert [check.field for check in match(target(), machine="").differs] == ["platform.machine"]
    assert [check.field for check in match(target(wheels={}), wheels={}).differs] == ["packages"]


def test_a_program_and_its_host_have_the_same_ingredients() -> None:
    """Else a rule would compare a value with nothing."""
    program = ingredients_of_program(BUILT, machine="x86_64", wheels=WHEELS)
    assert program == ingredients_of_target(target())
    assert not [item.name for item in program if not item.in_key and item.rule == "recorded"]


def test_a_payload_is_read_back_only_if_it_gives_its_key() -> None:
    text = repr(BUILT.values)
    assert parse_payload(text, key_of(BUILT.values)) == BUILT
    with pytest.raises(IntegrityError, match="gives another key"):
        parse_payload(text.replace("2.13.0", "2.13.1"), key_of(BUILT.values))


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (("b12x_cute_compile_cache_v8", *BUILT.values[1:]), "format"),
        (BUILT.values[:-1], "format"),
        ((*BUILT.values[:3], BUILT.values[3][:-1], *BUILT.values[4:]), "other parts"),
        ((*BUILT.values[:4], None, *BUILT.values[5:]), "other parts"),
        ((*BUILT.values[:-1], (("CC", 1),)), "other parts"),
        ([*BUILT.values], "plain values"),
    ],
)
def test_a_payload_of_another_form_is_refused(values: Any, why: str) -> None:
    with pytest.raises(IntegrityError, match=why):
        parse_payload(repr(values), key_of(values))


def test_what_is_absent_here_and_there_is_equal() -> None:
    """The key says `missing` on both sides."""
    less = {name: text for name, text in VERSIONS.items() if name != "nvidia-cutlass-dsl-libs-cu12"}
    host = target(versions=less)
    payload = expected_payload(BUILT, host)
    assert payload.toolchain["cutlass_dsl_libs_cu12"] == "missing"
    assert match(host, payload=payload).accepted
    assert not match(target(), payload=payload).accepted


def test_the_key_of_another_gpu_is_that_gpus() -> None:
    assert expected_payload(BUILT, target(capability=(12, 1), sm_count=48)).values[4] == ("cuda", (12, 1), 48)


@pytest.mark.parametrize("text", [repr(BUILT.values)[:-1] + ", <object at 0x7f>)", repr(BUILT.values) + " "])
def test_a_payload_that_is_not_spelt_as_python_does_is_refused(text: str) -> None:
    with pytest.raises(IntegrityError, match="plain values"):
        parse_payload(text, hashlib.sha256(text.encode()).hexdigest())


def test_the_variables_of_a_key_are_sorted_and_unset_ones_are_empty() -> None:
    key = environment_key({"CUTE_X": "1", "B12X_TIMING": "1", "CUDA_HOME": "/c", "OTHER": "2"})
    assert dict(key)["CUDA_HOME"] == "/c"
    assert [name for name, _ in key] == sorted({*TOOL_VARIABLES, "CUTE_DSL_ARCH", "CUTE_X"})
    assert dict(key)["CC"] == ""


def test_patches_follow_their_switches() -> None:
    assert dict(patch_status({})) == {"compile_only_warning": True, "memory_debug": True, "direct_frameinfo": True}
    assert dict(patch_status({"CUTLASS_DSL_CUDA_MEMORY_DEBUG": "1"}))["memory_debug"] is False
    assert not any(dict(patch_status({"B12X_DISABLE_CUTLASS_RUNTIME_PATCHES": "yes"})).values())
    assert all(dict(patch_status({"B12X_DISABLE_CUTLASS_RUNTIME_PATCHES": "off"})).values())
