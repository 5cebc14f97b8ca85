"""Cache kinds whose artifacts are programs of the package b12x: which configurations they hold, and for which GPUs. A table."""

from __future__ import annotations

from kcache.values import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class B12xKind:
    """One kind.

    configurations: `default` for those that b12x takes untuned, `all` for every candidate of its tuning
                    (`kcache.workflows.b12x_build`).
    capabilities:   compute capabilities that have such programs.
    """

    configurations: str
    capabilities: tuple[tuple[int, int], ...]


_CAPABILITIES = ((12, 0), (12, 1))

B12X_KINDS = {
    "b12x-programs": B12xKind(configurations="default", capabilities=_CAPABILITIES),
    "b12x-candidates": B12xKind(configurations="all", capabilities=_CAPABILITIES),
}
