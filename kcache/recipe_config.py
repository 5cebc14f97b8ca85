"""A recipe from a model's config.json on the Hub, and a recipe as the TOML file that a person goes on with.

The names that model families give to the same numbers are in one place here. What a config does not say (layouts, token counts,
targets) is filled with values to be edited; a model that is no mixture of experts, or whose numbers are not found, is refused
with all problems at once. Pure.
"""

from __future__ import annotations

from typing import Any

from kcache.recipe import FORMAT, Model, Recipe, RecipeError, Tokens, recipe_from_document

# Families whose `intermediate_size` is that of an expert: they have no dense layers, and no `moe_intermediate_size`.
_ALL_EXPERTS = ("gpt_oss", "minimax_m2", "mixtral", "phimoe")

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k", "num_experts_per_token")
_INTER = ("moe_intermediate_size", "expert_ffn_hidden_size")
_ACT = ("hidden_act", "mlp_hidden_act", "hidden_activation")

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "relu2": "relu2",
    "relu_squared": "relu2",
}

CAPTURE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Capture sizes of a recipe that is made from a config."""


def recipe_from_config(config: dict[str, Any], *, name: str = "", source: str = "") -> Recipe:
    """A recipe from the JSON of a model's config.json.

    Args:
        name: the model's name, such as `Qwen/Qwen3-30B-A3B`; without it, the config's own `_name_or_path` or model type.
        source: where the config lies.

    Raises:
        RecipeError: the config is not of a mixture of experts, or a number is missing or out of range; all problems at once.
    """
    if not isinstance(config, dict):
        raise RecipeError("the config is not a model's config.json", problems=("not a JSON object",))
    text = config.get("text_config")
    inner: dict[str, Any] = {**config, **text} if isinstance(text, dict) else config
    model_type = str(inner.get("model_type", ""))
    title = name or str(config.get("_name_or_path") or model_type or "model")
    problems: list[str] = []
    found: dict[str, Any] = {
        "name": title,
        "source": source or "config.json",
        "hidden_size": _first(inner, ("hidden_size", "d_model"), problems),
        "moe_intermediate_size": _first(inner, _INTER + (("intermediate_size",) if model_type in _ALL_EXPERTS else ()), problems),
        "experts": _first(inner, _EXPERTS, problems),
        "top_k": _first(inner, _TOP_K, problems),
        "quantization": _modes(config, inner),
        **_activation(inner, model_type, problems),
    }
    if problems:
        raise RecipeError(f"the config of {title} names no mixture of experts that can be built", problems=tuple(problems))
    return recipe_from_document(_document(found), f"the config of {title}")


def _document(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kinds": ["sampling", "b12x-moe"],
        "model": model,
        "parallel": {"tp": [1], "ep": [1]},
        "tokens": {"capture": list(CAPTURE), "maximum": 8192},
        "targets": {"gpus": ["rtx-pro-6000"], "cuda": "13.0", "flashinfer": ["0.7.4"]},
    }


def _first(config: dict[str, Any], names: tuple[str, ...], problems: list[str]) -> Any:
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if value is None:
        problems.append(f"{names[0]}: missing" + (f" (nor {', '.join(names[1:])})" if len(names) > 1 else ""))
    return value


def _activation(config: dict[str, Any], model_type: str, problems: list[str]) -> dict[str, Any]:
    """Activation fields. With a clamp, SwiGLU is built as `swigluoai_uninterleave`, of which it is a special case."""
    limit = config.get("swiglu_limit")
    if model_type == "gpt_oss":
        # transformers, modeling_gpt_oss.py: alpha 1.702, (up + 1), limit 7 where the config names none.
        return {"activation": "swigluoai_uninterleave", "swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": limit or 7.0}
    named = _first(config, _ACT, []) or "silu"
    activation = _ACTIVATIONS.get(str(named))
    if activation is None:
        problems.append(f"hidden_act: {named!r} is none of {', '.join(sorted(_ACTIVATIONS))}")
        return {}
    if limit is not None and activation == "silu":
        return {"activation": "swigluoai_uninterleave", "swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": limit}
    return {"activation": activation}


def _modes(config: dict[str, Any], inner: dict[str, Any]) -> list[str]:
    """The modes that fit the checkpoint: its own where it is FP4 already, else NVFP4, which it would be converted to."""
    quantization = inner.get("quantization_config") or config.get("quantization_config") or {}
    if not isinstance(quantization, dict):
        return ["nvfp4"]
    words = f"{quantization.get('quant_method', '')} {quantization.get('quant_algo', '')}".lower()
    if "mxfp4" in words or inner.get("expert_dtype") == "fp4":
        return ["mxfp4", "w4a16"]
    return ["nvfp4"]


def render_recipe(recipe: Recipe, note: str = "") -> str:
    """The recipe as TOML, in the form that `parse_recipe` takes; `note` becomes a comment at the top."""
    model, targets = recipe.model, recipe.targets
    lines = [f"# {line}".rstrip() for line in note.splitlines()]
    lines += [_line("format", FORMAT), _line("kinds", recipe.kinds), "", "[model]"]
    lines += [_line(name, getattr(model, name)) for name in Model.__slots__ if name != "swiglu"]
    if model.swiglu is not None:
        lines += [_line("swiglu_alpha", model.swiglu.alpha), _line("swiglu_beta", model.swiglu.beta)]
        lines += [] if model.swiglu.limit is None else [_line("swiglu_limit", model.swiglu.limit)]
    lines += ["", "[parallel]", _line("tp", recipe.parallel.tp), _line("ep", recipe.parallel.ep)]
    lines += ["", "[tokens]", *(_line(name, getattr(recipe.tokens, name)) for name in Tokens.__slots__)]
    lines += ["", "[targets]", _line("gpus", tuple(gpu.slug for gpu in targets.gpus)), _line("arches", targets.arches)]
    lines += [_line("cuda", targets.cuda), _line("flashinfer", targets.flashinfer)]
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any) -> str:
    return f"{name} = {_toml(value)}"


def _toml(value: Any) -> str:
    import json

    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML's basic string is JSON's, but for DEL
    return repr(value)
