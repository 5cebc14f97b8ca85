"""Checks of `kcache doctor` for the system around the cache: room, locks, clock, and variables of other times."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kcache import fsops
from kcache.errors import TrustError
from kcache.local_cache import LocalCache
from kcache.workflows.findings import ERROR, WARNING, Finding, Patient

_ROOM = 64 << 20
"""Bytes below which hardly an entry fits, and no compiler finishes."""

_SKEW = 86400.0
"""Seconds that a file may lie in the future before the clock is doubted: hosts of one mount differ by less."""

_OLD_NAMES = {
    "HUGGING_FACE_HUB_TOKEN": ("HF_TOKEN", "huggingface_hub reads it only where HF_TOKEN is not set"),
    "HUGGINGFACE_HUB_CACHE": ("HF_HUB_CACHE", "huggingface_hub calls it by its new name"),
    "HF_HUB_ENABLE_HF_TRANSFER": ("HF_XET_HIGH_PERFORMANCE", "huggingface_hub 1.x does not use hf_transfer"),
    "TORCH_CUDA_ARCH_LIST": ("FLASHINFER_CUDA_ARCH_LIST", "FlashInfer 0.6.18 and later do not read it"),
}
"""Old name -> what is read instead (huggingface_hub 1.x, constants.py and utils/_auth.py; FlashInfer 0.7.4 nowhere reads
TORCH_CUDA_ARCH_LIST)."""


def check_room(patient: Patient) -> Iterator[Finding]:
    """The cache and the temporary directory need room."""
    places = {"cache": patient.cache.path, "temporary directory": patient.environ.get("TMPDIR") or "/tmp"}
    for name, path in places.items():
        free = fsops.free_bytes(path) if path is not None else None
        if free is not None and free < _ROOM:
            yield Finding(
                code="cache-full" if name == "cache" else "tmp-full",
                severity=WARNING,
                what=f"the {name} {path} has room for {free / 1e6:.1f} MB",
                remedy="Free some space (`kcache prune`), or set KCACHE_DIR elsewhere."
                if name == "cache"
                else "Free some space, or set TMPDIR to a directory on a larger file system.",
            )


def check_writable(patient: Patient) -> Iterator[Finding]:
    """A cache directory that a person chose must be able to take in what is restored."""
    for line in patient.cache.rejected:
        if line.startswith("KCACHE_DIR") and patient.cache.path is not None:
            yield Finding(
                code="cache-passed-over",
                severity=WARNING,
                what=f"{line}: what it lacks is restored into {patient.cache.path}",
                remedy="Mount it writable, or set KCACHE_DIR to a directory that this user can write.",
            )


def check_lock(patient: Patient) -> Iterator[Finding]:
    """A lock that others could take for ever, or that somebody holds now. One left by a dead process is none: the kernel's
    locks end with their holder."""
    path = Path(patient.cache.path or "/nonexistent", "v1", "lock")
    if not os.path.lexists(path):
        return
    try:
        fsops.check_regular(path)
    except TrustError as error:
        yield Finding(code="untrusted-lock", severity=ERROR, what=f"{error.what}: {error.why}", remedy=error.remedy)
        return
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 300).decode("utf-8", "replace").strip()
            yield Finding(
                code="lock-held",
                severity=WARNING,
                what=f"{path} is held by another process ({holder or 'which one is not known'}): restores wait for it",
                remedy="If that is no restore or warm-up at work, end it; the file itself need not be removed.",
            )
        finally:
            os.close(descriptor)


def check_clock(patient: Patient) -> Iterator[Finding]:
    """A clock that is behind the files on this host makes every certificate, and every signed index, look wrong."""
    package = patient.host.paths.flashinfer
    cache = Path(patient.cache.path or "/nonexistent")
    places = [*([Path(package, "__init__.py")] if package else []), *cache.glob("v1/entries/*/receipt.json")]
    now = time.time()
    for path in places:
        with suppress(OSError):
            ahead = path.lstat().st_mtime - now
            if ahead > _SKEW:
                yield Finding(
                    code="clock",
                    severity=WARNING,
                    what=f"{path} was written {ahead / 86400:.0f} days after now, as the clock says: one of them is wrong",
                    remedy="Set the clock; TLS certificates and the expiry of signed indexes are judged by it.",
                )
                return


def check_old_names(patient: Patient) -> Iterator[Finding]:
    """Variables that once did what another does now."""
    for name, (new, why) in _OLD_NAMES.items():
        if patient.environ.get(name) and not patient.environ.get(new):
            yield Finding(
                code="old-variable",
                severity=WARNING,
                what=f"{name} is set and {new} is not: {why}",
                remedy=f"Set {new}.",
            )


def check_path(patient: Patient) -> Iterator[Finding]:
    """Modules that are restored are used by a server whose PYTHONPATH has their view."""
    if patient.cache.path is None:
        return
    cache = LocalCache(Path(patient.cache.path))
    documents = [cache.read("current", path.stem) or {} for path in sorted((cache.base / "current").glob("*.json"))]
    views = [str(document["view"]) for document in documents if document.get("view")]
    given = patient.environ.get("PYTHONPATH", "").split(":")
    if views and not any(view in given for view in views):
        yield Finding(
            code="not-on-path",
            severity=WARNING,
            what=f"PYTHONPATH names nothing of what is restored in {cache.root}: a server that is started with it compiles",
            remedy='Start the server by `kcache restore ... -- CMD`, or in a shell after `eval "$(kcache restore ... --shell)"`.',
        )


CHECKS = (check_writable, check_room, check_lock, check_clock, check_old_names, check_path)
