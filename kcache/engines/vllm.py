"""vLLM: a plug-in of the entry-point group `vllm.general_plugins`.

vLLM calls it in every process that it creates, perhaps several times, before there is a process group, and does not catch what it
raises (vllm/plugins/__init__.py, load_general_plugins). Each worker runs `Worker.compile_or_warm_up_model` before it is ready
(vllm/v1/worker/gpu_worker.py): that is where the ranks can agree. VLLM_PLUGINS chooses among plug-ins; ours is named `kcache`.
"""

from __future__ import annotations

from kcache.engines import asked, logger, warm_up_before


def register() -> None:
    """The plug-in. Does nothing unless KCACHE_WARMUP is set."""
    if not asked():
        return
    try:
        from vllm.v1.worker.gpu_worker import Worker

        warm_up_before(Worker, "compile_or_warm_up_model")
    except Exception:  # a server's start is at stake  # noqa: BLE001
        logger.exception("kcache cannot hook into this vLLM; the start goes on")
