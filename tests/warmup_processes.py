"""What tests of warm-ups share: a place to build in, compilers that are counted, and programs to run there."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from container import REPOSITORY
from zygote import Process, Zygote

WARM = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from kcache.warmup import warmup
report = warmup(kinds=(), modules=sys.argv[1:])
print(json.dumps(report.to_json()))
"""
"""Warms up the modules that it is given, and prints its report."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One workspace of FlashInfer, and the compilers that work for it."""

    zygote: Zygote
    workspace: Path
    keep: Path

    @property
    def log(self) -> Path:
        return self.workspace / "compilers.log"

    @property
    def compilers(self) -> list[str]:
        """The sources that a compiler was started for."""
        return [line.split("/")[-1] for line in self.log.read_text().splitlines()] if self.log.exists() else []

    @property
    def cached_ops(self) -> Path:
        return next((self.workspace / ".cache" / "flashinfer").glob("*/*/cached_ops"))

    def start(self, code: str, *words: str, environ: Mapping[str, str] | None = None, pause: float = 0.0) -> Process:
        """A process that runs `code` here; each compiler waits `pause` seconds before it works."""
        return self.zygote.start(code, self.workspace, {**self.variables(pause), **(environ or {})}, *words)

    def variables(self, pause: float) -> dict[str, str]:
        launcher = f"{sys.executable} -I -S {REPOSITORY}/tests/compiler_launcher.py {self.log} {self.keep}"
        return {"FLASHINFER_NVCC_LAUNCHER": launcher, "KCACHE_TEST_PAUSE": str(pause)}


def environment(cuda_home: Path) -> dict[str, str]:
    """Variables of a host with a compiler and a GPU that is only described."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLASHINFER_", "KCACHE_", "MAX_JOBS"))}
    return {**kept, "CUDA_HOME": str(cuda_home), "FLASHINFER_CUDA_ARCH_LIST": "9.0a", "MAX_JOBS": "2"}


def running_below(folder: Path) -> list[str]:
    """Processes whose command names something in a folder, once they had some seconds to end. (`ps` cuts long lines.)"""
    found: list[str] = []
    for _ in range(150):
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found += [line] if str(folder) in line else []
        if not found:
            break
        time.sleep(0.2)
    return found
