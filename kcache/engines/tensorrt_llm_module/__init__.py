"""TensorRT-LLM: a directory for `trtllm-serve --custom_module_dirs`, which imports it; importing it is the hook.

    trtllm-serve MODEL --custom_module_dirs "$(python -c 'import kcache.engines.tensorrt_llm_module as m; print(m.__path__[0])')"

TensorRT-LLM has no plug-in group. The hook puts a warm-up before `PyTorchModelEngine.warmup`
(tensorrt_llm/_torch/pyexecutor/model_engine.py), which since pull request 17286 warms up `sampling` itself, and not `topk`. It
reaches the processes that import the directory, no others.
"""

from __future__ import annotations

from kcache.engines import asked, logger, warm_up_before


def install() -> None:
    """The hook. Does nothing unless KCACHE_WARMUP is set, and never raises."""
    try:
        from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine

        warm_up_before(PyTorchModelEngine, "warmup")
    except Exception:  # a server's start is at stake  # noqa: BLE001
        logger.exception("kcache cannot hook into this TensorRT-LLM; the start goes on")


if asked():
    install()
