"""Environments in which FlashInfer's tuner is asked, and what kcache works out for them, for tests with real FlashInfers."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from kcache.key import known
from kcache.probe.host import Host, probe_host
from kcache.tuning_facts import TuningHost
from kcache.workflows.tuning_host import tuning_host

FLASHINFERS = [path for path in os.environ.get("KCACHE_TEST_FLASHINFERS", "").split(os.pathsep) if path]

CHILDREN = Path(__file__).parents[1] / "kcache" / "probe" / "children"

GPU = "NVIDIA H200"


def environ_of(path: str, home: Path, extra: Mapping[str, str]) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if name not in ("CUTE_DSL_ARCH", "LD_LIBRARY_PATH")}
    return environ | {"PYTHONPATH": path, "HOME": str(home)} | dict(extra)


def host_of(environ: Mapping[str, str], python: str = sys.executable) -> Host:
    return probe_host(python=python, described_archs=["9.0a"], environ=environ)


def worked_out(environ: Mapping[str, str], python: str = sys.executable) -> TuningHost:
    return tuning_host(host_of(environ, python), gpu=known(GPU))
