"""A build manifest of a model that nobody has, small enough to compile in seconds."""

from __future__ import annotations

_TEXT = """
format = "kcache.recipe/1"
kinds = ["{kind}"]
[model]
name = "{name}"
source = "made up"
hidden_size = 256
moe_intermediate_size = {intermediate}
experts = {experts}
top_k = 2
activation = "silu"
quantization = ["nvfp4"]
[parallel]
tp = [1]
ep = [1]
[tokens]
capture = [1]
maximum = {maximum}
[targets]
gpus = ["rtx-pro-6000"]
cuda = "13.0"
flashinfer = ["{version}"]
"""


def small_manifest(
    *,
    name: str = "test/small",
    kind: str = "b12x-moe",
    intermediate: int = 768,
    experts: int = 8,
    maximum: int = 1,
    version: str = "0.7.4",
) -> str:
    """Its text. `maximum` is the largest token count, `version` FlashInfer's."""
    return _TEXT.format(kind=kind, name=name, intermediate=intermediate, experts=experts, maximum=maximum, version=version)
