"""Architecture names (case B29): the table of the report, and FlashInfer's own answer where it can be asked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcache.archs import arch_list_entry, capability, cute_dsl_arch, flashinfer_arch, flashinfer_archs
from kcache.errors import UsageError


@pytest.mark.parametrize(
    ("text", "release", "wanted"),
    [
        ("9.0", (13, 0), "90a"),
        ("9.0a", (13, 0), "90a"),
        ("90a", (13, 0), "90a"),
        ("90", (12, 6), "90a"),
        ("sm_90a", (13, 0), "90a"),
        ("SM90", (13, 0), "90a"),
        (" 9.0A ", (13, 0), "90a"),
        ("10.0", (12, 8), "100a"),
        ("100f", (13, 0), "100f"),
        ("10.3", (12, 9), "103a"),
        ("12.0", (12, 8), "120a"),
        ("12.0", (12, 9), "120f"),
        ("120", (13, 0), "120f"),
        ("12.0a", (13, 0), "120a"),
        ("12.0f", (13, 0), "120f"),
        ("12.1", (12, 9), "121a"),
        ("12.1f", (13, 0), "121f"),
        ("8.9", (12, 4), "89"),
        ("7.5", (12, 4), "75"),
    ],
)
def test_a_name_becomes_the_target_that_flashinfer_compiles_for(text: str, release: tuple[int, int], wanted: str) -> None:
    assert flashinfer_arch(text, release) == wanted


@pytest.mark.parametrize(("text", "release", "needs"), [("12.0", (12, 6), "12.8"), ("12.1", (12, 8), "12.9")])
def test_an_architecture_that_the_toolkit_is_too_old_for_is_refused_with_the_release_it_needs(
    text: str, release: tuple[int, int], needs: str
) -> None:
    with pytest.raises(UsageError) as caught:
        flashinfer_arch(text, release)
    assert needs in caught.value.what
    assert caught.value.remedy


@pytest.mark.parametrize(
    "text", ["", "a", "9", "9.0b", "9.0aa", "hopper", "7.0", "6.1", "9.0\n8.0", "-9.0", "sm", "9..0", "1000"]
)
def test_what_is_no_architecture_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        flashinfer_arch(text, (13, 0))


def test_a_list_is_joined_each_architecture_once_in_the_order_given() -> None:
    assert flashinfer_archs("9.0a, 12.0 90a;10.3", (13, 0)) == ("90a", "120f", "103a")
    with pytest.raises(UsageError):
        flashinfer_archs(" , ", (13, 0))


@pytest.mark.parametrize(
    ("arch", "cute", "listed"),
    [("90a", "sm_90a", "9.0a"), ("120f", "sm_120a", "12.0f"), ("103a", "sm_103a", "10.3a"), ("89", "sm_89", "8.9")],
)
def test_one_gpu_has_three_spellings(arch: str, cute: str, listed: str) -> None:
    assert cute_dsl_arch(arch) == cute
    assert arch_list_entry(arch) == listed


@given(st.sampled_from([(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1)]))
def test_spellings_lead_back_to_the_same_target(gpu: tuple[int, int]) -> None:
    arch = flashinfer_arch(f"{gpu[0]}.{gpu[1]}", (13, 0))
    assert capability(arch) == gpu
    assert flashinfer_arch(arch_list_entry(arch), (13, 0)) == arch
    assert flashinfer_arch(arch, (13, 0)) == arch
