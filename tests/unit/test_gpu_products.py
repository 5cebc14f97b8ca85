"""Described GPUs: every row is whole, names are found as people write them, unknown ones are told with what comes near."""

from __future__ import annotations

import pytest

from kcache.errors import UsageError
from kcache.gpu_products import PRODUCTS, GpuProduct, did_you_mean, find_product, product


@pytest.mark.parametrize("gpu", PRODUCTS, ids=lambda gpu: gpu.slug)
def test_every_product_is_whole(gpu: GpuProduct) -> None:
    assert gpu.name.startswith("NVIDIA ")
    assert 40 <= gpu.sm_count <= 200
    assert 8 << 30 <= gpu.memory_bytes <= 300 << 30
    assert 16 << 20 <= gpu.l2_bytes <= 128 << 20
    assert gpu.shared_block_bytes + 1024 == gpu.shared_sm_bytes  # one KB of an SM belongs to the system
    assert "20" in gpu.source
    assert gpu.clusters == {1: gpu.sm_count}


def test_names_are_unique() -> None:
    slugs = [gpu.slug for gpu in PRODUCTS]
    names = [name for gpu in PRODUCTS for name in (gpu.name, *gpu.aliases)]
    assert len(set(slugs)) == len(slugs)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("rtx-pro-6000", "rtx-pro-6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000"),
        ("RTX PRO 6000 Blackwell", "rtx-pro-6000"),
        ("rtx 5090", "rtx-5090"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx-5070-ti"),
        ("rtx_5070", "rtx-5070"),
        ("DGX Spark", "gb10"),
        ("NVIDIA GB10", "gb10"),
        ("H200", "h200"),
        ("H100", "h100-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("b300", "b300"),
        ("NVIDIA B300 SXM6 AC", "b300"),
    ],
)
def test_a_product_is_found_as_people_write_it(name: str, slug: str) -> None:
    assert product(name).slug == slug


@pytest.mark.parametrize(
    ("name", "near"), [("rtx 5091", "rtx-5090"), ("gb11", "gb10"), ("H201", "h200"), ("rtx pro 600", "rtx-pro-6000")]
)
def test_an_unknown_product_is_told_with_what_comes_near(name: str, near: str) -> None:
    with pytest.raises(UsageError) as caught:
        product(name)
    assert caught.value.exit_code == 2
    assert near in caught.value.why
    assert "gb300" in caught.value.remedy


@pytest.mark.parametrize("name", ["", "   ", "NVIDIA", "GeForce"])
def test_a_name_that_names_nothing_finds_nothing(name: str) -> None:
    assert find_product(name) is None


def test_nothing_is_suggested_for_what_is_like_nothing() -> None:
    assert did_you_mean("zzzz") == ""


def test_editions_of_one_chip_have_the_same_facts_and_the_h200_is_as_measured() -> None:
    assert product("NVIDIA RTX PRO 6000 Blackwell Workstation Edition") is product("NVIDIA RTX PRO 6000 Blackwell Server Edition")
    h200 = product("h200")
    assert (h200.shared_block_bytes, h200.shared_sm_bytes) == (232448, 233472)
    assert (h200.sm_count, h200.l2_bytes, h200.capability, h200.arch) == (132, 62914560, (9, 0), "9.0")


def test_the_description_for_a_child_is_json() -> None:
    import json

    described = product("gb10").describe()
    assert json.loads(json.dumps(described)) == described
    assert (described["major"], described["minor"], described["max_active_clusters"]) == (12, 1, {"1": 48})
