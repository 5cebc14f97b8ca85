"""A recipe from a model's config.json on the Hub.

The names that model families give to the same numbers are in one place here. What a config does not say (layouts, token counts,
targets) is filled with values that a person has to look at, and said so; a model that is no mixture of experts, or whose numbers
are not found, is refused with all problems at once. Parsing does no I/O; nothing that a config holds makes it raise otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kcache.recipe import FORMAT, SWIGLU, Recipe, RecipeError, recipe_from_document
from kcache.recipe_fields import told

MAX_BYTES = 4 << 20
"""The largest published config.json files list every layer by name, and have about 1 MiB."""

CAPTURE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Capture sizes of a recipe that is made from a config."""

REMARKS = {
    "parallel.tp": "To fill in: the layouts that the model is served with.",
    "tokens.capture": "To fill in: the token counts of the engine's CUDA graphs.",
    "tokens.maximum": "To fill in: the engine's own maximum (vLLM: --max-num-batched-tokens); it is part of the kernels.",
    "targets.gpus": "To fill in: the servers' GPUs, CUDA release and FlashInfer versions.",
}
"""What no config says: field -> what to do. A comment in the file that is written."""

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multi-modal configs keep that of their language model (Llama 4 and Qwen3-VL; InternVL; DeepSeek-VL2; Qwen3-Omni)."""

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_top_k", "moe_k", "top_k_experts", "num_experts_per_token")
_INTER = ("moe_intermediate_size", "expert_ffn_hidden_size")
_HIDDEN = ("hidden_size", "d_model")
_ACT = ("hidden_act", "mlp_hidden_act", "hidden_activation")

_ALL_EXPERTS = (
    "gpt_oss", "granitemoe", "granitemoehybrid", "jamba", "llama4", "llama4_text", "minimax", "minimax_m2", "minimax_text_01",
    "mixtral", "olmoe", "phimoe",
)  # fmt: skip
"""Families whose `intermediate_size` is that of an expert, by model_type (transformers, their configuration classes)."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
    "relu_squared": "relu2",
}


REMEDY = "Give the config.json that lies beside the weights of a mixture-of-experts model."


@dataclass(frozen=True, slots=True, kw_only=True)
class FromConfig:
    """A recipe, and what a person should know of how it came about: each line begins with a field's path."""

    recipe: Recipe
    notes: tuple[str, ...]


def parse_config(data: bytes, what: str) -> dict[str, Any]:
    """The object in a config.json.

    Raises:
        RecipeError: too large, not UTF-8, not JSON, or no object.
    """
    problem = ""
    try:
        document = json.loads(data.decode("utf-8-sig")) if len(data) <= MAX_BYTES else None
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: byte {error.start}"
    except RecursionError:
        problem = "not JSON: nested too deep"
    except ValueError as error:
        problem = f"not JSON: {str(error)[:200]}"
    if len(data) > MAX_BYTES:
        problem = f"larger than {MAX_BYTES >> 20} MiB"
    if problem or not isinstance(document, dict):
        raise RecipeError(f"{what} is not a model's config.json", problems=(problem or "not a JSON object",), remedy=REMEDY)
    return document


def recipe_from_config(config: Mapping[str, Any], *, name: str = "", source: str = "", what: str = "the config") -> FromConfig:
    """A recipe from the object in a model's config.json.

    Args:
        name: the model's name, such as `Qwen/Qwen3-30B-A3B`; without it, the config's own `_name_or_path` or model type.
        source: where the config was published.
        what: how messages name the config, such as its path.

    Raises:
        RecipeError: the config is not of a mixture of experts, or a number is missing or out of range; all problems at once.
    """
    inner, where = _language_model(config)
    if not any(inner.get(name) for name in _EXPERTS):
        problem = f"it names no number of experts ({', '.join(_EXPERTS)})"
        raise RecipeError(f"{what} is not the config of a mixture of experts", problems=(problem,), remedy=REMEDY)
    reader = _Reader(inner, [f"model: read from {where} of the config"] if where else [])
    model_type = _text(inner.get("model_type"))
    own = _text(config.get("_name_or_path"))
    title = name or own or model_type or "model"
    if not name:
        kind = "the config's own name" if own else "its model type"
        reader.notes.append(f"model.name: {told(title)} is {kind}; name the model with --name")
    if not source:
        reader.notes.append("model.source: the config does not say where it was published; name it with --source")
    inter = _INTER + (("intermediate_size",) if model_type in _ALL_EXPERTS else ())
    model: dict[str, Any] = {
        "name": title,
        "source": source or "config.json",
        "hidden_size": reader.number(_HIDDEN),
        "moe_intermediate_size": reader.number(inter),
        "experts": reader.number(_EXPERTS),
        "top_k": reader.number(_TOP_K),
        **_activation(reader, model_type),
        "quantization": _modes(config, inner, reader.notes),
    }
    if reader.problems:
        raise RecipeError(f"{what} lacks what a build manifest needs", problems=tuple(reader.problems), remedy=REMEDY)
    if inner.get("moe_latent_size") is not None:
        reader.notes.append("model.hidden_size: the config names a moe_latent_size; if its experts work on that, it belongs here")
    recipe = recipe_from_document(_document(model), f"the manifest for {what}")
    return FromConfig(recipe=recipe, notes=(*reader.notes, *(f"{path}: {text}" for path, text in REMARKS.items())))


def _document(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kinds": ["sampling", "b12x-moe"],
        "model": model,
        "parallel": {"tp": [1], "ep": [1]},
        "tokens": {"capture": list(CAPTURE), "maximum": 8192},
        "targets": {"gpus": ["rtx-pro-6000"], "cuda": "13.0", "flashinfer": ["0.7.4"]},
    }


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _language_model(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The config of the language model, outer values behind inner ones; and where it lies, such as `text_config`."""
    merged, path = dict(config), []
    for _ in range(3):
        found = next((name for name in _NESTED if isinstance(merged.get(name), dict)), None)
        if found is None:
            break
        path.append(found)
        merged = {**{name: value for name, value in merged.items() if name not in _NESTED}, **merged[found]}
    return merged, ".".join(path)


class _Reader:
    """Looks numbers up under their names in different families; collects problems and notes."""

    def __init__(self, config: Mapping[str, Any], notes: list[str]) -> None:
        self.config, self.notes = config, notes
        self.problems: list[str] = []

    def first(self, names: tuple[str, ...]) -> tuple[str, Any]:
        return next(((name, self.config[name]) for name in names if self.config.get(name) is not None), ("", None))

    def number(self, names: tuple[str, ...]) -> Any:
        """A number under one of these names; a list of one number for each layer counts if all are equal."""
        name, value = self.first(names)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                self.problems.append(f"{name}: differs from layer to layer; write one manifest for each value")
                return None
            value = value[0]
        if not name:
            self.problems.append(f"{names[0]}: missing" + (f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""))
        elif not isinstance(value, int) or isinstance(value, bool):
            self.problems.append(f"{name}: not a whole number, but {told(value)}")
        return value


def _activation(reader: _Reader, model_type: str) -> dict[str, Any]:
    """Activation fields. With a clamp, SwiGLU is built as `swigluoai_uninterleave`, of which it is a special case."""
    limit = reader.config.get("swiglu_limit")
    if model_type == "gpt_oss":
        # transformers, modeling_gpt_oss.py: alpha 1.702, (up + 1), limit 7 where the config names none.
        return {"activation": SWIGLU, "swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": limit or 7.0}
    name, named = reader.first(_ACT)
    if not name:
        reader.notes.append("model.activation: the config names none; silu is what most models have")
        named = "silu"
    activation = _ACTIVATIONS.get(_text(named))
    if activation is None:
        reader.problems.append(f"{name}: {told(named)} is none of {', '.join(sorted(_ACTIVATIONS))}")
        return {}
    if limit is not None and activation == "silu":
        return {"activation": SWIGLU, "swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": limit}
    return {"activation": activation}


def _modes(config: Mapping[str, Any], inner: Mapping[str, Any], notes: list[str]) -> list[str]:
    """The modes that fit the checkpoint: its own where it is FP4 already, else NVFP4, which it would be converted to."""
    quantization = inner.get("quantization_config") or config.get("quantization_config") or {}
    words = _words(quantization)
    if inner.get("expert_dtype") == "fp4":  # DeepSeek V4: FP4 experts with E8M0 scales of 32, the rest FP8
        words.add("mxfp4")
    weights_only = bool(words & {"nvfp4a16", "w4a16_nvfp4", "mxfp4a16"})
    for mode in ("nvfp4", "mxfp4"):
        if any(mode in word for word in words):
            notes.append(f"model.quantization: the config says {mode}{', weights only' if weights_only else ''}")
            return ["w4a16"] if weights_only else [mode, "w4a16"]
    named = ", ".join(sorted(words)) or "none"
    notes.append(
        f"model.quantization: the config names no 4-bit floats (it names {named}); nvfp4 is for a checkpoint converted to it"
    )
    return ["nvfp4"]


def _words(quantization: Any) -> set[str]:
    """What a quantization_config says of itself, in lower case.

    Read are `quant_method` (mxfp4: gpt-oss), `quant_algo` (NVFP4: NVIDIA ModelOpt), `format` (nvfp4-pack-quantized:
    compressed-tensors, where `input_activations: null` means weights only) and the same within each of `config_groups`; AMD
    Quark's `dtype: fp4` has scales for 32 elements, which is MXFP4.
    """
    if not isinstance(quantization, dict):
        return set()
    groups = quantization.get("config_groups")
    parts = [part for part in groups.values() if isinstance(part, dict)] if isinstance(groups, dict) else []
    words = {
        _text(part.get(name)).lower() for part in (quantization, *parts) for name in ("quant_method", "quant_algo", "format")
    }
    if any(_is_quark_fp4(part) for part in (quantization.get("global_quant_config"), *_layers(quantization))):
        words.add("mxfp4")
    if parts and all("input_activations" in part and part["input_activations"] is None for part in parts):
        words |= {f"{mode}a16" for mode in ("nvfp4", "mxfp4") for word in words if word.startswith(f"{mode}-pack")}
    return words - {""}


def _layers(quantization: dict[str, Any]) -> list[Any]:
    layers = quantization.get("layer_quant_config")
    return list(layers.values()) if isinstance(layers, dict) else []


def _is_quark_fp4(part: Any) -> bool:
    weight = part.get("weight") if isinstance(part, dict) else None
    return isinstance(weight, dict) and weight.get("dtype") == "fp4" and weight.get("group_size") == 32
