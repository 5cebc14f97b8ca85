"""Thin hooks by which serving engines call `kcache.warmup.warmup()` themselves: one module for each engine.

They are off unless KCACHE_WARMUP says what to warm up: `sampling`, or names of nvcc modules, separated by commas. A hook finds
the engine's own warm-up method and puts ours before it. It never raises: an engine of another shape is a line in the log, and
starts. kcache is installed with each engine's Python anyway, so importing these modules imports no engine and no FlashInfer.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

logger = logging.getLogger("kcache.engines")

ASKED = "KCACHE_WARMUP"
"""The variable that turns the hooks on."""


def asked() -> tuple[str, ...]:
    """What KCACHE_WARMUP names."""
    return tuple(word for word in os.environ.get(ASKED, "").replace(",", " ").split())


def warm_up() -> None:
    """Warms up what KCACHE_WARMUP names, with all ranks of the process group. Never raises."""
    try:
        from kcache.warmup import warmup

        names = asked()
        warmup(tuple(name for name in names if name == "sampling"), modules=tuple(name for name in names if name != "sampling"))
    except Exception:  # a server's start is at stake
        logger.exception("kcache could not warm up; the start goes on")


def warm_up_before(owner: Any, method: str) -> bool:
    """Puts a warm-up before a method of a class, once.

    Returns:
        Whether it is there now; False, and a line in the log, where the class has no such method.
    """
    original = getattr(owner, method, None)
    if not callable(original):
        logger.warning("%s has no %s in this version: kcache warms up nothing by itself", owner, method)
        return False
    if getattr(original, "kcache_warms_up", False):
        return True

    @functools.wraps(original)
    def warmed(*arguments: Any, **named: Any) -> Any:
        warm_up()
        return original(*arguments, **named)

    warmed.kcache_warms_up = True  # type: ignore[attr-defined]
    setattr(owner, method, warmed)
    return True
