"""Ray Serve: replicas of a vLLM server that restore before Ray starts their process.

`py_executable` is what Ray starts instead of `python` for every worker of this application (ray.runtime_env): kcache restores,
sets the variables, and becomes the interpreter. Nothing else of the deployment changes; `KCACHE_WARMUP` turns on kcache's plug-in
in vLLM's workers for what the store does not have. Ray is not installed where kcache is developed: this file was not run there.

    serve run examples.ray_serve:app
"""

from __future__ import annotations

from typing import Any

RESTORING_PYTHON = "kcache -q restore --from hf://owner/kernels --deadline 60s -- python"

RUNTIME_ENV: dict[str, Any] = {
    "py_executable": RESTORING_PYTHON,
    "env_vars": {"KCACHE_DIR": "/var/cache/kcache", "KCACHE_WARMUP": "sampling"},
}


def build(arguments: dict[str, str]) -> Any:
    """The application. `arguments` may name the model."""
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    config = LLMConfig(
        model_loading_config={"model_id": arguments.get("model", "Qwen/Qwen3-30B-A3B")},
        accelerator_type="H200",
        runtime_env=RUNTIME_ENV,
    )
    application: serve.Application = build_openai_app({"llm_configs": [config]})
    return application


def __getattr__(name: str) -> Any:
    if name == "app":
        return build({})
    raise AttributeError(name)
