"""One nvcc module of FlashInfer, built and loaded in this process by FlashInfer's own rules, with an end to every wait.

`JitSpec.build_and_load` (flashinfer/jit/core.py, 0.6.18 to 0.7.4) waits for its lock, and for ninja, as long as it takes. So its
steps are taken here: what AOT providers have is loaded as it is; else, under the module's lock, FlashInfer writes the build file,
ninja runs as `run_ninja` runs it (jit/cpp_ext.py), but ends with the deadline and with this process, and FlashInfer loads it.
Then FlashInfer's own function for the module is called once, so that no request waits for ninja to find nothing to do.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kcache.warmup import private
from kcache.warmup.locks import building
from kcache.warmup.report import BUILT, PRESENT, RESTORED, ModuleReport
from kcache.warmup.stopping import Stop, run_guarded

logger = logging.getLogger("kcache.warmup")

_NOTHING_TO_DO = "ninja: no work to do"
_STARTS_OVER = "starting over"
"""Ninja's warning (1.11 to 1.13, build_log.cc and deps_log.cc) where its log in a directory is that of another version."""
_OTHER_NINJA = "it was there, built by another version of ninja, whose log this one cannot read: everything was compiled again"


class BuildError(RuntimeError):
    """The toolchain failed; the message ends with what it printed."""


class UnknownModuleError(LookupError):
    """This FlashInfer has no module of this name that can be made without arguments."""


def find_generator(name: str) -> Callable[[], Any]:
    """FlashInfer's function that makes the module's spec, `gen_<name>_module`, wherever this version has it.

    Raises:
        UnknownModuleError: there is none.
    """
    wanted = f"gen_{name}_module"
    for place in (f"flashinfer.jit.{name}", "flashinfer.jit", f"flashinfer.{name}"):
        with suppress(ImportError):
            importlib.import_module(place)
    for place, module in sorted(sys.modules.items()):
        if place.startswith("flashinfer.") and callable(found := vars(module).get(wanted)):
            return found  # type: ignore[no-any-return]
    raise UnknownModuleError(f"this FlashInfer has no {wanted}")


def make_spec(name: str) -> Any:
    """FlashInfer's spec of a module. Makes FlashInfer's own cache directory, for the lock."""
    spec = find_generator(name)()
    Path(spec.lock_path).parent.mkdir(parents=True, exist_ok=True)
    return spec


def warm_module(name: str, jobs: int, stop: Stop) -> ModuleReport:
    """Makes one module ready in this process.

    Args:
        jobs: compilers at once.

    Raises:
        LateError: the end came first. Exception: whatever FlashInfer or the toolchain raised.
    """
    started = time.monotonic()
    spec = make_spec(name)
    status, reason = (RESTORED, "") if spec.try_load() is not None else _build(spec, jobs, stop)
    stop.check()
    from kcache.probe.children.verify_modules import accessor

    if (own := accessor(name)) is not None:
        own[0]()  # FlashInfer keeps what it returns
    return ModuleReport(name=name, status=status, seconds=time.monotonic() - started, reason=reason)


def _build(spec: Any, jobs: int, stop: Stop) -> tuple[str, str]:
    """The status, and why a module was built that was there already."""
    if os.environ.get("FLASHINFER_DISABLE_JIT"):
        raise BuildError(f"{spec.name} is not restored, and FLASHINFER_DISABLE_JIT is set")
    with building(Path(spec.lock_path), stop) as honest:
        if spec.try_load() is not None:
            return RESTORED, ""
        there = _whole(spec)
        spec.write_ninja()
        own = private.directory(spec) if not honest and not there else None
        folder = own or Path(spec.ninja_path).parent
        began = time.perf_counter()
        output = _ninja(folder, jobs, stop, spec.name)
        if _NOTHING_TO_DO not in output:
            _record(spec.name, time.perf_counter() - began)
        if own is not None:
            private.publish(spec, own)
        spec.load()
    if _NOTHING_TO_DO in output:
        return PRESENT, ""
    if not there or _STARTS_OVER not in output:
        return BUILT, ""
    logger.warning("%s: %s; keep one version of ninja for one cache directory", spec.name, _OTHER_NINJA)
    return BUILT, _OTHER_NINJA


def _record(name: str, seconds: float) -> None:
    """FlashInfer's own line about a build (FLASHINFER_JIT_BUILD_LOG), in the versions that write one."""
    core = sys.modules.get("flashinfer.jit.core")
    if (record := getattr(core, "_record_jit_build", None)) is not None:
        record("nvcc", name, seconds)


def _whole(spec: Any) -> bool:
    """Whether a library is there already. Then ninja is asked where it lies."""
    return Path(spec.ninja_path).with_name(f"{spec.name}.so").exists()


def _ninja(folder: Path, jobs: int, stop: Stop, name: str) -> str:
    """Ninja as FlashInfer starts it (jit/cpp_ext.py, run_ninja, 0.7.4); what it printed."""
    real = folder.resolve()
    command = ["ninja", "-v", "-C", str(real), "-f", str(real / "build.ninja"), "-j", str(jobs)]
    code, output = run_guarded(command, real, stop)
    if code != 0:
        raise BuildError(f"ninja could not build {name} (exit code {code}):\n{output[-4000:]}")
    return output
