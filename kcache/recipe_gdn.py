"""The gated delta rule (linear attention of Qwen3-Next and Qwen3.5): which calls a model makes, and for which of them FlashInfer
keeps a kernel on disk. Pure decisions and one table; the dry run (`probe/children/gdn_calls.py`) makes the calls.

Each of FlashInfer's modules is one directory with one `meta.json`, and so one kind here. What enters the names of its kernels
(`gdn_kernels/*.py`, 0.7.0.post1 to 0.7.4; FlashInfer 0.6.18.post1 keeps none of them):

gdn_qk_l2norm            type and size of a head; nothing of the model's head counts, and no token count
gdn_decode_pretranspose  heads, types of parameters, strides of the states' pool
gdn_decode_bf16_state    heads, and the batch in steps; where these lie depends on how many SMs there are
gdn_decode_mtp           heads, tokens drafted, and the batch in steps

Prefill's own kernels (`delta_rule_dsl`) FlashInfer compiles in every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

HEAD_DIM = 128
"""Elements of a head. Decode of float32 states takes more (`gdn_decode.py`), bfloat16 states and prefill take only this."""

STATE_TYPES = ("float32", "bfloat16")
PARAMETER_TYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnKind:
    """One kind of entry.

    module: FlashInfer's name of the module.
    calls:  the calls that ask for its kernels (`CASE` of the dry run).
    state:  type of the recurrent state that they are made with.
    since:  the first FlashInfer release that keeps them on disk.
    """

    module: str
    calls: tuple[str, ...]
    state: str
    since: tuple[int, int, int]


GDN_KINDS = {
    "gdn-prefill": GdnKind(module="gdn_qk_l2norm", calls=("prefill",), state="float32", since=(0, 7, 2)),
    "gdn-decode": GdnKind(module="gdn_decode_pretranspose", calls=("decode", "pool"), state="float32", since=(0, 7, 0)),
    "gdn-decode-bf16": GdnKind(module="gdn_decode_bf16_state", calls=("decode", "pool"), state="bfloat16", since=(0, 7, 0)),
    "gdn-verify": GdnKind(module="gdn_decode_mtp", calls=("verify",), state="float32", since=(0, 7, 0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnModel:
    """Heads of one model's linear attention, before they are split over ranks.

    name, source: the model, and where its numbers are written.
    heads:        of q and k. value_heads: of v, a multiple of `heads`.
    dim:          elements of a head of q, k and v.
    """

    name: str
    source: str
    heads: int
    value_heads: int
    dim: int = HEAD_DIM


def gdn_model(config: Mapping[str, Any], *, name: str, source: str) -> GdnModel | None:
    """A model's heads from its Hub config file, or None where it has no such attention, or one of another shape.

    Args:
        config: the file's content; a model that also sees images holds the numbers under `text_config`.
    """
    text = config.get("text_config")
    found = text if isinstance(text, Mapping) else config
    names = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    numbers = [found.get(field) for field in names]
    heads, value_heads, key_dim, value_dim = (n if isinstance(n, int) and not isinstance(n, bool) else 0 for n in numbers)
    if min(heads, value_heads, key_dim) < 1 or key_dim != value_dim:
        return None
    return GdnModel(name=name, source=source, heads=heads, value_heads=value_heads, dim=key_dim)


def check_gdn(model: GdnModel, tp: int) -> tuple[str, ...]:
    """Why these kernels do not take a model on `tp` ranks, one line each; empty where they do."""
    problems = []
    if model.dim != HEAD_DIM:
        problems.append(f"head size {model.dim} is not {HEAD_DIM}")
    if model.heads % tp or model.value_heads % tp:
        problems.append(f"{model.heads} and {model.value_heads} heads do not split over {tp} ranks")
    if model.value_heads % model.heads:
        problems.append(f"{model.value_heads} value heads are no multiple of {model.heads} heads")
    return tuple(problems)


def gdn_cases(
    kind: str,
    model: GdnModel,
    *,
    tp: tuple[int, ...] = (1,),
    counts: tuple[int, ...],
    drafted: tuple[int, ...] = (),
    dt_bias: tuple[str, ...] = PARAMETER_TYPES,
) -> tuple[dict[str, Any], ...]:
    """The dry run's cases of one kind: every split that the kernels take, called in every way that asks for them.

    Args:
        kind: one of `GDN_KINDS`.
        counts: sequences of a decode or verify call: those that CUDA graphs are captured for.
        drafted: tokens that one sequence verifies in a call, its own included, each above 1; none where no model drafts.
        dt_bias: types in which an engine may hold that parameter.
    """
    about = GDN_KINDS[kind]
    cases = []
    for ranks, calls, bias in product(tp, about.calls, dt_bias if about.calls != ("prefill",) else dt_bias[:1]):
        if check_gdn(model, ranks):
            continue
        case = {
            "calls": calls,
            "heads": model.heads // ranks,
            "value_heads": model.value_heads // ranks,
            "dim": model.dim,
            "state": about.state,
            "dt_bias": bias,
            "tokens": sorted(set(counts)) if calls != "prefill" else [64],
        }
        named = calls if calls == "prefill" else f"{calls}-{bias}"
        for length in sorted(set(drafted)) if calls == "verify" else [1]:
            extra = f"-t{length}" if calls == "verify" else ""
            cases.append({"id": f"{named}{extra}-tp{ranks}", **case, "drafted": length})
    return tuple(cases)
