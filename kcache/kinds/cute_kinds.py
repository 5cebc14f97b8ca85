"""Cache kinds whose artifacts are CuTe-DSL kernels: what FlashInfer calls them, and for which GPUs there are any. A table."""

from __future__ import annotations

from kcache.recipe_gdn import GDN_KINDS
from kcache.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CuteKind:
    """One kind.

    operation:    the dry run's name of it (`kcache/probe/children/<operation>_calls.py`).
    module:       FlashInfer's module, whose directory its kernels lie in.
    capabilities: compute capabilities that have such kernels.
    """

    operation: str
    module: str
    capabilities: tuple[tuple[int, int], ...]


CUTE_KINDS = {
    # fused_moe/cute_dsl/b12x_moe.py, `supported_compute_capability([120, 121])`, 0.6.18 to 0.7.4
    "b12x-moe": CuteKind(operation="b12x", module="b12x_moe", capabilities=((12, 0), (12, 1))),
    # gdn_prefill.py and gdn_decode.py; shown on 9.0 (kcache/docs/decisions/0005-cute-dsl-ingredients.md)
    **{kind: CuteKind(operation="gdn", module=about.module, capabilities=((9, 0),)) for kind, about in GDN_KINDS.items()},
}


def operation_of(kind: str) -> str:
    """The dry run's name of a kind."""
    return CUTE_KINDS[kind].operation
