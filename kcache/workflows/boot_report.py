"""What happened since a boot: which modules were built, in a warm-up or while serving, and what the restore had spared.

The serving processes say it themselves: FlashInfer's log of builds, and the libraries in its cache that are newer than the boot
(for versions without a log, and because the log has a line for a ninja that found nothing to do). Pure, but for `read_boot`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcache.errors import NotFoundError
from kcache.workflows.boot import BOOT, BUILD_LOG, FORMAT, ROOM

SURELY = 1.0
"""Seconds from which a logged build is one where the library cannot be found; less may be ninja that found nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One module or kernel that was built since the boot. `toolchain` is FlashInfer's word: `nvcc`, or another one for kernels.

    seconds: wall time, 0 where nobody measured it. at: seconds since the epoch, when it was done.
    warmup:  whether a warm-up did it, before the server said that it was ready.
    """

    name: str
    toolchain: str = "nvcc"
    seconds: float = 0.0
    at: float = 0.0
    warmup: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "toolchain": self.toolchain,
            "seconds": round(self.seconds, 3),
            "at": round(self.at, 3),
            "warmup": self.warmup,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BootReport:
    """One boot and what came after it.

    server:   its program, without arguments; empty where a shell started it.
    restore:  the restore's report, as its --json prints it.
    logged:   whether this FlashInfer writes a log of its builds; else only nvcc modules are known, by their libraries.
    warmups:  what `kcache.warmup.warmup()` said in the server's processes.
    """

    at: float
    server: tuple[str, ...]
    restore: Mapping[str, Any]
    builds: tuple[Build, ...]
    logged: bool
    warmups: tuple[Mapping[str, Any], ...] = ()

    @property
    def serving(self) -> tuple[Build, ...]:
        """What was built outside a warm-up: a request, or the engine's start, waited for it."""
        return tuple(build for build in self.builds if not build.warmup)

    @property
    def status(self) -> str:
        """`nothing-built`, `warmed-up` (only warm-ups built something) or `built`."""
        return "built" if self.serving else "warmed-up" if self.builds or self._fallback_built() else "nothing-built"

    def _fallback_built(self) -> tuple[str, ...]:
        """What `restore --fallback warmup` built before the server started."""
        told = self.restore.get("warmup") or {}
        return tuple(str(module["name"]) for module in told.get("modules", []) if module.get("status") == "built")

    @property
    def missing(self) -> dict[str, tuple[str, ...]]:
        """What the farm should build next: `modules` for `kcache build --modules`; `kernels` are for a model's manifest."""
        nvcc = {build.name for build in self.builds if build.toolchain == "nvcc"}
        kernels = {build.name for build in self.builds if build.toolchain != "nvcc"}
        return {"modules": tuple(sorted(nvcc | set(self._fallback_built()))), "kernels": tuple(sorted(kernels))}

    def to_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "at": self.at,
            "server": list(self.server),
            "builds": [build.to_json() for build in self.builds],
            "logged": self.logged,
            "warmups": [dict(told) for told in self.warmups],
            "missing": {name: list(found) for name, found in self.missing.items()},
            "restore": dict(self.restore),
        }


def builds_since(
    at: float, log: Iterable[Mapping[str, Any]], libraries: Mapping[str, float], warmed: Iterable[str]
) -> tuple[Build, ...]:
    """What was really built.

    Args:
        at: the boot, seconds since the epoch.
        log: FlashInfer's lines: name, toolchain, seconds, time.
        libraries: module -> when its library in FlashInfer's own cache was written.
        warmed: modules that a warm-up says it built.
    """
    by_warmup, found = set(warmed), dict[str, Build]()
    for line in log:
        name, toolchain = str(line.get("name", "")), str(line.get("toolchain", "nvcc"))
        seconds, ended = float(line.get("seconds", 0.0)), float(line.get("time", 0.0))
        if not name or ended < at:
            continue
        if toolchain == "nvcc" and not (libraries[name] >= at if name in libraries else seconds >= SURELY):
            continue  # ninja found nothing to do
        before = found.get(name)
        if before is None or before.seconds < seconds:
            found[name] = Build(name=name, toolchain=toolchain, seconds=seconds, at=ended, warmup=name in by_warmup)
    for name, written in libraries.items():
        if written >= at and name not in found:
            found[name] = Build(name=name, at=written, warmup=name in by_warmup)
    return tuple(sorted(found.values(), key=lambda build: (build.at, build.name)))


def find_boot(root: Path | None, environ: Mapping[str, str]) -> Path:
    """The record that KCACHE_BOOT names (in the server's own processes), else this host's newest, else the newest.

    Raises:
        NotFoundError: there is none.
    """
    if named := environ.get(BOOT):
        return Path(named)
    records = sorted((root / "v1" / ROOM).glob("*.json"), key=lambda path: path.stat().st_mtime) if root is not None else []
    own = [path for path in records if path.name.startswith(f"{os.uname().nodename}-")]
    if not records:
        remedy = "Start the server with `kcache restore ... -- CMD`, or name the record of its start with --boot."
        raise NotFoundError("no start of a server is on record here", why=f"no file in {root}/v1/{ROOM}", remedy=remedy)
    return (own or records)[-1]


def read_boot(path: Path, *, logged: bool) -> BootReport:
    """The record of a boot, compared with what FlashInfer's caches and its log say now.

    Args:
        logged: whether the server's FlashInfer writes a log of its builds.

    Raises:
        NotFoundError: it is not a record.
    """
    try:
        document = json.loads(path.read_bytes())
        at, restore, log = float(document["at"]), document["restore"], Path(document["build_log"])
        if document["format"] != FORMAT:
            raise ValueError(document["format"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotFoundError(f"{path} is not the record of a start", why=str(error)) from error
    warmups = tuple(_lines(path.with_suffix(".warmups")))
    warmed = [str(m.get("name")) for told in warmups for m in told.get("modules", []) if m.get("status") == "built"]
    return BootReport(
        at=at,
        server=tuple(document.get("server", ())),
        restore=restore,
        builds=builds_since(at, _lines(log), _libraries(Path(document.get("workspace") or "/nowhere")), warmed),
        logged=logged,
        warmups=warmups,
    )


def tell_boot(told: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Appends what a warm-up of this process did to the record of its boot, where there is one."""
    if not (named := environ.get(BOOT)):
        return
    line = (json.dumps({**told, "pid": os.getpid(), "time": round(time.time(), 3)}) + "\n").encode()
    descriptor = os.open(Path(named).with_suffix(".warmups"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(descriptor, line)  # one write, so that lines of several ranks do not mix
    finally:
        os.close(descriptor)


def knows_log(package: Path) -> bool:
    """Whether the FlashInfer in a directory writes a log of its builds."""
    try:
        return BUILD_LOG.encode() in (package / "jit" / "core.py").read_bytes()
    except OSError:
        return False


def _lines(path: Path) -> list[Mapping[str, Any]]:
    """The JSON objects of a file of lines. A line that a killed process left unfinished is passed over."""
    found: list[Mapping[str, Any]] = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return found
    for line in text.splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        if isinstance(document, dict):
            found.append(document)
    return found


def _libraries(base: Path) -> dict[str, float]:
    """Modules in FlashInfer's own cache (<base>/.cache/flashinfer/<version>/<archs>/cached_ops) and when each was linked."""
    found: dict[str, float] = {}
    for library in (base / ".cache" / "flashinfer").glob("*/*/cached_ops/*/*.so"):
        if library.stem == library.parent.name:
            found[library.stem] = max(found.get(library.stem, 0.0), library.stat().st_mtime)
    return found


def seconds_of(builds: Sequence[Build]) -> float:
    return sum(build.seconds for build in builds)
