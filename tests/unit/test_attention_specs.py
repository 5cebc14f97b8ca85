"""What an attention module's name says of its generator's arguments."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import kcache

CHILD = Path(kcache.__file__).parent / "probe" / "children" / "attention_specs.py"


def arguments(name: str) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("attention_specs", CHILD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.arguments(name)
    assert isinstance(found, dict)
    return found


FP16 = {"dtype_q": "f16", "dtype_kv": "f16", "dtype_o": "f16"}
PLAIN = {"pos_encoding_mode": 0, "use_sliding_window": False, "use_logits_soft_cap": False}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "single_decode_with_kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16_head_dim_qk_64_head_dim_vo_128_posenc_0_"
            "use_swa_False_use_logits_cap_False",
            {**FP16, **PLAIN, "head_dim_qk": 64, "head_dim_vo": 128, "backend": "fa2", "use_token_head_sf": False},
        ),
        (
            "batch_prefill_with_kv_cache_dtype_q_f16_dtype_kv_fp4x2_e2m1_dtype_o_f16_dtype_idx_i32_head_dim_qk_192_head_dim_vo_128_"
            "posenc_1_use_swa_True_use_logits_cap_True_f16qk_False_token_head_sf_sm90",
            {
                **FP16, "dtype_kv": "fp4x2_e2m1", "dtype_idx": "i32", "head_dim_qk": 192, "head_dim_vo": 128, "backend": "fa3",
                "pos_encoding_mode": 1, "use_sliding_window": True, "use_logits_soft_cap": True, "use_fp16_qk_reduction": False,
                "use_token_head_sf": True,
            },
        ),
        (
            "pod_with_kv_cache_dtype_q_f16_dtype_kv_f16_dtype_o_f16_head_dim_64_posenc_p_0_use_swa_p_False_use_logits_cap_p_True_"
            "posenc_d_1_use_swa_d_True_use_logits_cap_d_False_dtype_idx_i32_f16qk_True",
            {
                **FP16, "dtype_idx": "i32", "head_dim": 64, "use_fp16_qk_reduction": True, "backend": "fa2",
                "pos_encoding_mode_p": 0, "use_sliding_window_p": False, "use_logits_soft_cap_p": True,
                "pos_encoding_mode_d": 1, "use_sliding_window_d": True, "use_logits_soft_cap_d": False,
                "use_token_head_sf": False,
            },
        ),
        (
            "batch_mla_attention_dtype_q_bf16_dtype_kv_e4m3_dtype_o_bf16_dtype_idx_i32_head_dim_ckv_512_head_dim_kpe_64_"
            "profiler_False_planabi2_sm90",
            {
                "dtype_q": "bf16", "dtype_kv": "e4m3", "dtype_o": "bf16", "dtype_idx": "i32", "head_dim_ckv": 512,
                "head_dim_kpe": 64, "use_profiler": False, "backend": "fa3", "use_token_head_sf": False,
            },
        ),
        ("cascade", {"backend": "fa2", "use_token_head_sf": False}),
    ],
    ids=["decode", "prefill", "pod", "mla", "cascade"],
)  # fmt: skip
def test_arguments_are_read_out_of_a_name(name: str, wanted: dict[str, Any]) -> None:
    assert arguments(name) == wanted
