"""Asks FlashInfer about its modules, in a child process: `children/flashinfer_specs.py` says what is asked and answered."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcache.errors import ProbeError

CHILD = Path(__file__).parent / "children" / "flashinfer_specs.py"

TIMEOUT = 900.0
"""Seconds. Importing FlashInfer takes 2 to 15, walking every module that it knows about 30 more; disks may be cold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What to ask. `arch` in FlashInfer's spelling; `offline` refuses the network; `everything` lists all modules."""

    arch: str
    cuda_release: str
    kinds: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    everything: bool = False
    offline: bool = False


def ask(python: str, question: Question, environ: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """The child's answer.

    Args:
        python: the interpreter that has FlashInfer.
        environ: the child's whole environment.
        folder: the child's working directory; its log and answer are written here.

    Raises:
        ProbeError: FlashInfer cannot be imported, or the child failed otherwise.
    """
    answer, log = folder / "answer.json", folder / "flashinfer.log"
    answer.unlink(missing_ok=True)
    request = {
        "answer": str(answer),
        "arch": question.arch,
        "cuda_release": question.cuda_release,
        "kinds": list(question.kinds),
        "modules": list(question.modules),
        "list": question.everything,
        "offline": question.offline,
    }
    try:
        with log.open("w", encoding="utf-8") as stream:
            done = subprocess.run(
                [python, str(CHILD)],
                input=json.dumps(request),
                text=True,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=dict(environ),
                cwd=folder,
                timeout=TIMEOUT,
                check=False,
            )
    except subprocess.TimeoutExpired as error:
        raise ProbeError(f"FlashInfer did not answer within {TIMEOUT:g} s", remedy=f"See {log}.") from error
    except OSError as error:
        raise ProbeError(f"{python} cannot be run", why=str(error), remedy="Name another Python with --python.") from error
    try:
        document = json.loads(answer.read_bytes())
    except (OSError, ValueError) as error:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit status {done.returncode}"
        remedy = f"Install FlashInfer and torch for {python}, or name another Python with --python. The whole log: {log}"
        raise ProbeError("FlashInfer could not be asked about its modules", why=why, remedy=remedy) from error
    assert isinstance(document, dict)
    return document
