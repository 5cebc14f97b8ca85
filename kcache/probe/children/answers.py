"""What child processes share when they answer: an error as people read it, and an answer file that is there whole or not at all.

Lies beside the scripts that use it. Stdlib only; imports nothing of kcache.
"""

from __future__ import annotations

import gc
import json
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def trace() -> list[str]:
    """The last lines of the traceback of the exception that is handled."""
    return traceback.format_exc().strip().splitlines()[-7:]


def plain(error: BaseException) -> str:
    """An error in one line, without a terminal's colours (CuTe-DSL writes them into its messages)."""
    return " ".join(re.sub("\x1b\\[[0-9;]*m", "", f"{type(error).__name__}: {error}").split())[:600]


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], about: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Reads the request, writes the answer, also where it is an error; the exit status.

    Args:
        answer: request -> answer. An exception named `Assumption` says that a library is not as expected.
        about: request -> what an error's record says of it besides `kind`, `what` and `trace`.
    """
    gc.disable()  # imports and traces make millions of objects and few cycles: collecting them takes half a second of the start
    request = json.load(sys.stdin)
    try:
        result = answer(request)
    except Exception as error:  # noqa: BLE001 -- the parent must learn why, whatever it was
        kind = "assumption" if type(error).__name__ == "Assumption" else "failed"
        result = {"error": {"kind": kind, "what": plain(error), "trace": trace(), **about(request)}}
    temporary = Path(request["answer"] + ".tmp")
    temporary.write_text(json.dumps(result, indent=1))
    temporary.replace(request["answer"])
    return 1 if "error" in result else 0
