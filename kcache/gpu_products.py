"""GPUs that can be described without being there: what their drivers report, and where that is written.

A build for a GPU that the farm lacks needs the facts that kernels are compiled against: compute capability, SM count, memory
limits. Keys hold those facts, never the product's name, so two products of one chip share entries. Only a row whose source says
`measured` was read off hardware. The other sources are the maker's own documents, which round memory sizes and differ from what
CUDA reports (an H200's L2 is 50 MB on paper, 60 MiB in CUDA): no kernel that kcache builds depends on memory or L2 sizes.
Pure data and lookup; nothing here looks at a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kcache.errors import ManifestError, UsageError
from kcache.values import dataclass

_MIB, _GIB = 1 << 20, 1 << 30

# Bytes of shared memory of (one block that opts in, one SM), by compute capability: CUDA C++ Programming Guide 13.0 (2025),
# "Technical Specifications per Compute Capability": 227/228 KB for 9.0, 10.0 and 10.3, 99/100 KB for 12.0 and 12.1.
_SHARED = {
    (9, 0): (227 << 10, 228 << 10),
    (10, 0): (227 << 10, 228 << 10),
    (10, 3): (227 << 10, 228 << 10),
    (12, 0): (99 << 10, 100 << 10),
    (12, 1): (99 << 10, 100 << 10),
}

_RTX = "NVIDIA RTX Blackwell GPU Architecture whitepaper, v1.1 (2025)"
_RTX_PRO = "NVIDIA RTX PRO Blackwell GPU Architecture whitepaper, v1.0 (2025)"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture whitepaper, v1.04 (2023)"
_SPARK = "NVIDIA DGX Spark data sheet (2025): 6144 CUDA cores, 128 GB unified memory; 128 cores in an SM"
_BLACKWELL = (
    "NVIDIA Blackwell Architecture technical brief (2024): GPU memory; SM count and L2 as CUDA 12.8 deviceQuery prints them"
)
_ULTRA = (
    "NVIDIA Inside Blackwell Ultra, technical blog (2025): memory; SM count of the HGX product as CUDA 13.0 deviceQuery prints it"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuProduct:
    """One GPU as its driver describes it.

    slug:          what people type, such as `rtx-pro-6000`.
    name:          the product name as CUDA reports it (`cudaDeviceProp.name`).
    capability:    compute capability, such as (12, 0).
    sm_count:      streaming multiprocessors that are enabled in this product.
    memory_bytes:  device memory, bytes.
    l2_bytes:      L2 cache, bytes.
    source:        document and year, or the measurement.
    aliases:       other names of the same facts: other editions as CUDA reports them.
    """

    slug: str
    name: str
    capability: tuple[int, int]
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    source: str
    aliases: tuple[str, ...] = ()

    @property
    def shared_block_bytes(self) -> int:
        """Shared memory that one block may have when it opts in, bytes."""
        return _SHARED[self.capability][0]

    @property
    def shared_sm_bytes(self) -> int:
        """Shared memory of one SM, bytes."""
        return _SHARED[self.capability][1]

    @property
    def arch(self) -> str:
        """The compute capability as people name it, such as `12.0`; `kcache.archs` makes the compiler's names from it."""
        return f"{self.capability[0]}.{self.capability[1]}"

    @property
    def clusters(self) -> dict[int, int]:
        """Most active clusters by cluster size, as far as they follow from the SM count: one block, one cluster.

        FlashInfer takes the smaller of this and the SM count (`cute_dsl/utils.py`, get_max_active_clusters, 0.7.4).
        """
        return {1: self.sm_count}

    def describe(self) -> dict[str, object]:
        """The form in which `kcache/probe/children/described_gpu.py` takes it."""
        return {
            "name": self.name,
            "major": self.capability[0],
            "minor": self.capability[1],
            "sm_count": self.sm_count,
            "memory_bytes": self.memory_bytes,
            "l2_bytes": self.l2_bytes,
            "shared_block_bytes": self.shared_block_bytes,
            "shared_sm_bytes": self.shared_sm_bytes,
            "max_active_clusters": {str(size): count for size, count in self.clusters.items()},
        }


def from_description(document: Mapping[str, Any]) -> GpuProduct:
    """A GPU from what `GpuProduct.describe` wrote; a number that is missing, none, or no GPU's raises `ManifestError`."""
    try:
        found = GpuProduct(
            slug="described",
            name=str(document["name"]),
            capability=(int(document["major"]), int(document["minor"])),
            sm_count=int(document["sm_count"]),
            memory_bytes=int(document["memory_bytes"]),
            l2_bytes=int(document["l2_bytes"]),
            source="an entry's manifest",
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ManifestError("an entry's description of its GPU cannot be used", problems=(repr(error),)) from error
    numbers = (found.sm_count, found.memory_bytes, found.l2_bytes)
    if found.capability not in _SHARED or not all(0 < number < 1 << 62 for number in numbers):
        raise ManifestError(
            "an entry's description of its GPU cannot be used",
            problems=(f"no GPU that this kcache knows has {found.capability} and {numbers}",),
        )
    return found


def _product(  # noqa: PLR0917 -- a table reads as a table
    slug: str, name: str, capability: tuple[int, int], sm_count: int, memory: int, l2: int, source: str, *aliases: str
) -> GpuProduct:
    return GpuProduct(
        slug=slug,
        name=name,
        capability=capability,
        sm_count=sm_count,
        memory_bytes=memory,
        l2_bytes=l2,
        source=source,
        aliases=aliases,
    )


PRODUCTS = (
    _product(
        "rtx-pro-6000",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        (12, 0),
        188,
        96 * _GIB,
        128 * _MIB,
        _RTX_PRO,
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell",
    ),
    _product("rtx-5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 32 * _GIB, 96 * _MIB, _RTX),
    _product("rtx-5080", "NVIDIA GeForce RTX 5080", (12, 0), 84, 16 * _GIB, 64 * _MIB, _RTX),
    _product("rtx-5070-ti", "NVIDIA GeForce RTX 5070 Ti", (12, 0), 70, 16 * _GIB, 48 * _MIB, _RTX),
    _product("rtx-5070", "NVIDIA GeForce RTX 5070", (12, 0), 48, 12 * _GIB, 48 * _MIB, _RTX),
    _product("gb10", "NVIDIA GB10", (12, 1), 48, 128 * _GIB, 24 * _MIB, _SPARK, "DGX Spark", "dgx-spark"),
    _product(
        "h200", "NVIDIA H200", (9, 0), 132, 150_109_880_320, 60 * _MIB, "measured: cuDeviceGetAttribute, driver 580.159.04 (2026)"
    ),
    _product("h100-sxm", "NVIDIA H100 80GB HBM3", (9, 0), 132, 80 * _GIB, 50 * _MIB, _H100, "H100 SXM", "H100"),
    _product("h100-pcie", "NVIDIA H100 PCIe", (9, 0), 114, 80 * _GIB, 50 * _MIB, _H100),
    _product("b200", "NVIDIA B200", (10, 0), 148, 180 * _GIB, 126 * _MIB, _BLACKWELL),
    _product("gb200", "NVIDIA GB200", (10, 0), 152, 186 * _GIB, 126 * _MIB, _BLACKWELL),
    _product("b300", "NVIDIA B300 SXM6 AC", (10, 3), 148, 270 * _GIB, 126 * _MIB, _ULTRA, "NVIDIA B300"),
    _product("gb300", "NVIDIA GB300", (10, 3), 152, 270 * _GIB, 126 * _MIB, _ULTRA),
)
"""Every product that can be described; the first of several editions with the same facts carries the others as aliases."""


def _plain(name: str) -> str:
    """A name without what people leave out: case, spaces, dashes, the maker and the series."""
    return re.sub(r"[^a-z0-9]", "", re.sub(r"\b(nvidia|geforce|blackwell)\b", "", name.lower()))


def _names(product: GpuProduct) -> tuple[str, ...]:
    return (product.slug, product.name, *product.aliases)


def find_product(name: str) -> GpuProduct | None:
    """The product of this name, in any of its spellings (`rtx-5090`, `RTX 5090`, `NVIDIA GeForce RTX 5090`), or None."""
    wanted = _plain(name)
    if not wanted:
        return None
    return next((product for product in PRODUCTS if wanted in map(_plain, _names(product))), None)


def product(name: str) -> GpuProduct:
    """The product of this name, in any of its spellings.

    Raises:
        UsageError: kcache knows none of this name; the message holds the names that come near.
    """
    if (found := find_product(name)) is not None:
        return found
    raise UsageError(f"no GPU product named {name!r} is known", why=did_you_mean(name), remedy=_remedy())


def did_you_mean(name: str) -> str:
    """`did you mean ...?` with the known products that come near, or an empty text."""
    import difflib

    spellings = {_plain(spelling): known.slug for known in PRODUCTS for spelling in _names(known)}
    near = difflib.get_close_matches(_plain(name), spellings, n=3, cutoff=0.5)
    slugs = list(dict.fromkeys(spellings[spelling] for spelling in near))
    return f"did you mean {' or '.join(slugs)}?" if slugs else ""


def _remedy() -> str:
    return f"Known products: {', '.join(known.slug for known in PRODUCTS)}."
