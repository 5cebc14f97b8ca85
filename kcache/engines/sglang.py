"""SGLang: a plug-in of the entry-point group `sglang.srt.plugins`.

SGLang calls it in every process and then applies the hooks that it registered (python/sglang/srt/plugins/__init__.py,
load_plugins; hook_registry.py: a BEFORE hook that returns None leaves the arguments as they are). A target that a version lacks
is a line in SGLang's own log. SGLANG_PLUGINS chooses among plug-ins; ours is named `kcache`.
"""

from __future__ import annotations

from typing import Any

from kcache.engines import asked, logger, warm_up

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.kernel_warmup"


def register() -> None:
    """The plug-in. Does nothing unless KCACHE_WARMUP is set."""
    if not asked():
        return
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(TARGET, before, HookType.BEFORE)
    except Exception:  # a server's start is at stake  # noqa: BLE001
        logger.exception("kcache cannot hook into this SGLang; the start goes on")


def before(*_arguments: Any, **_named: Any) -> None:
    """Runs before SGLang's own warm-up of kernels."""
    warm_up()
