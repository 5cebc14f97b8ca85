"""Where this process keeps its cache, and which variables the server then needs.

The first place that can be written wins: KCACHE_DIR, FLASHINFER_WORKSPACE_BASE, HOME, XDG_CACHE_HOME, then a writable mount.
FlashInfer itself makes directories below its base while it is imported (jit/core.py, 0.6.18 to 0.7.4), so where its own choice
cannot work the server would not start; the variables returned here mend that. Nothing is created here, and a root that others
could change is refused by `kcache.fsops`, not here. Never raises for what a host is like: a host without any place is a value.
"""

# On the path of every restore strings and os.path take a fifth of pathlib's time.
# ruff: noqa: PTH112, PTH116, PTH120
from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping

from kcache.values import dataclass, field

WORKSPACE_BASE = "FLASHINFER_WORKSPACE_BASE"

_NOT_FOR_DATA = ("/proc", "/sys", "/dev", "/run", "/etc", "/boot", "/var/run", "/usr", "/lib", "/lib64", "/bin", "/sbin")
"""Mounts below these are the system's, or secrets; /dev/shm is tried by name, last."""

_USUAL_NAMES = ("/cache",)
_TEMPORARY = ("/tmp", "/var/tmp", "/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoot:
    """The cache root in force.

    path:     the directory, which may not exist yet; None where nothing can be written.
    base:     what FLASHINFER_WORKSPACE_BASE is, or has to be; None like `path`.
    reason:   what decided, such as `KCACHE_DIR`, `HOME` or `writable mount /cache`; where `path` is None, why.
    exports:  variables that the server needs besides its own, so that FlashInfer's import can write.
    rejected: places that came first and were passed over, each with the reason, such as `HOME=/: it is the root directory`.
    """

    path: str | None
    base: str | None
    reason: str
    exports: Mapping[str, str] = field(default_factory=dict)
    rejected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A candidate: the name to report, FlashInfer's base, our root in it.

    explicit: a person named it for a cache; it is made if it is missing, and `kcache doctor` speaks up about a bad choice.
    named:    a variable names a directory that should be there; neither is true of a fallback.
    """

    name: str
    base: str
    path: str
    explicit: bool = False
    named: bool = False


def cache_root(environ: Mapping[str, str], uid: int) -> CacheRoot:
    """Chooses the cache root.

    Args:
        environ: read are KCACHE_DIR, FLASHINFER_WORKSPACE_BASE, HOME, XDG_CACHE_HOME, TMPDIR.
        uid: this process's effective user, for its passwd entry and for the name of a private directory in a shared one.
    """
    rejected: list[str] = []
    chosen: _Place | None = None
    base: str | None = None
    for place in _places(environ, uid):
        why = _refusal(place) or _unspeakable(place.path)
        if why:
            rejected.append(f"{place.name}: {why}")
            continue
        chosen = chosen or place
        # KCACHE_DIR says where kcache writes, not where FlashInfer does: its base is the next place that works.
        if place.name != "KCACHE_DIR":
            base = place.base
            break
    if chosen is None:
        return CacheRoot(path=None, base=None, reason="no directory can be written", rejected=tuple(rejected))
    base = base or chosen.base
    return CacheRoot(
        path=chosen.path,
        base=base,
        reason=chosen.name.partition("=")[0],
        exports=_exports(environ, uid, base),
        rejected=tuple(rejected),
    )


def read_only_cache(environ: Mapping[str, str]) -> str | None:
    """KCACHE_DIR where it holds a cache that this process can read and not write: installed by root for a server that is not,
    or part of an image. `cache_root` passes it over."""
    directory = environ.get("KCACHE_DIR", "")
    entries = f"{directory}/v1/entries"
    if not directory.startswith("/") or _unspeakable(directory) or not _unwritable(directory):
        return None
    return directory if os.access(entries, os.R_OK | os.X_OK, effective_ids=True) else None


def home_directory(environ: Mapping[str, str], uid: int) -> str | None:
    """What `pathlib.Path.home()` is in a process with this environment; None where it raises (no HOME, no passwd entry)."""
    if (home := environ.get("HOME")) is not None:
        return home.rstrip("/") or "/"
    import pwd

    try:
        return pwd.getpwuid(uid).pw_dir.rstrip("/") or "/"
    except KeyError:
        return None


def _exports(environ: Mapping[str, str], uid: int, base: str) -> dict[str, str]:
    """What FlashInfer lacks to start with a cache below `base`.

    jit/env.py (0.6.18 to 0.7.4) evaluates `Path.home()` even where FLASHINFER_WORKSPACE_BASE is set, so without a home
    directory it needs HOME as well. CuTe-DSL, which it imports, stops without a directory for temporary files
    (nvidia-cutlass-dsl 4.8.0, base_dsl/cache_helpers.py).
    """
    exports: dict[str, str] = {}
    home = home_directory(environ, uid)
    if home is None:
        exports["HOME"] = base
    own = environ.get(WORKSPACE_BASE, home)
    explicit = WORKSPACE_BASE in environ
    place = _Place(name="", base=own or "", path=f"{own}/.cache/flashinfer", explicit=explicit, named=not explicit)
    if own != base and _refusal(place):
        exports[WORKSPACE_BASE] = base
    if not _has_temporary_directory(environ):
        exports["TMPDIR"] = _nearest(base)
    return exports


def _has_temporary_directory(environ: Mapping[str, str]) -> bool:
    """Whether Python's tempfile finds a directory (tempfile.py, _candidate_tempdir_list)."""
    named = [environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)]
    candidates = (*named, "/tmp", "/var/tmp", "/usr/tmp", os.curdir)
    return any(os.path.isdir(directory) and not _unwritable(directory) for directory in candidates)


def _places(environ: Mapping[str, str], uid: int) -> Iterator[_Place]:
    if directory := environ.get("KCACHE_DIR"):
        yield _Place(name="KCACHE_DIR", base=directory, path=directory, explicit=True)
    if (base := environ.get(WORKSPACE_BASE)) is not None:
        yield _Place(name=WORKSPACE_BASE, base=base, path=f"{base}/.cache/kcache", explicit=True)
    home = home_directory(environ, uid)
    if home is not None:
        yield _Place(name="HOME" if "HOME" in environ else "home directory", base=home, path=f"{home}/.cache/kcache", named=True)
    if xdg := environ.get("XDG_CACHE_HOME"):
        yield _Place(name="XDG_CACHE_HOME", base=xdg, path=f"{xdg}/kcache", named=True)
    for directory in _fallbacks(environ):
        base = _private(directory, uid)
        yield _Place(name=f"writable mount {directory}", base=base, path=f"{base}/.cache/kcache")


def _refusal(place: _Place) -> str:
    """Why a place cannot hold the cache; empty if it can."""
    if not place.base.startswith("/"):
        return "not an absolute path"
    if place.base == "/" and not place.explicit:
        return "it is the root directory"
    if place.named and not os.path.isdir(place.base):
        return f"{place.base} is no directory"
    for kernels in ("/proc", "/sys"):
        if place.path == kernels or place.path.startswith(f"{kernels}/"):
            return f"{kernels} is the kernel's, no directory can be made there"
    existing = _nearest(place.path)
    if not os.path.isdir(existing):
        return f"{existing} is no directory"
    return _unwritable(existing) or ("" if place.explicit else _unusable(place, existing))


def _unspeakable(path: str) -> str:
    """Why a directory cannot be named to Python and FlashInfer, though it can be written."""
    if ":" in path:
        return f"{path} has a colon, which separates the directories of PYTHONPATH"
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"{path!r} is not UTF-8"
    return ""


def _unwritable(directory: str) -> str:
    return "" if os.access(directory, os.W_OK | os.X_OK, effective_ids=True) else f"{directory} cannot be written"


def _unusable(place: _Place, existing: str) -> str:
    """Why a place that nobody named for a cache is better not taken for one, though it can be written."""
    if is_noexec(existing):
        return f"{existing} is on a file system mounted noexec, from which no library can be loaded"
    return "" if place.named else _foreign(place.base)


def _nearest(path: str) -> str:
    """`path`, or the nearest directory above it that exists. A broken link counts as existing: nothing can be made there."""
    while not os.path.lexists(path) and path not in ("/", ""):
        path = os.path.dirname(path)
    return path or "/"


def is_noexec(path: str) -> bool:
    """Whether libraries below an existing path cannot be loaded, because of how its file system is mounted."""
    try:
        return bool(os.statvfs(path).f_flag & os.ST_NOEXEC)
    except OSError:
        return False


def _private(directory: str, uid: int) -> str:
    """A directory of our own inside one that everyone may write, such as /tmp; else the directory itself."""
    try:
        shared = bool(os.stat(directory).st_mode & (stat.S_IWOTH | stat.S_IWGRP))
    except OSError:
        return directory
    return f"{directory.rstrip('/')}/kcache-{uid}" if shared else directory


def _foreign(base: str) -> str:
    """Why a private directory that is already there is not ours: somebody may have made it before us. Empty if it is."""
    try:
        found = os.lstat(base)
    except OSError:
        return ""
    if stat.S_ISLNK(found.st_mode):
        return f"{base} is a symbolic link"
    if found.st_uid not in (os.geteuid(), 0):
        return f"{base} belongs to uid {found.st_uid}"
    return f"{base} can be written by others" if found.st_mode & (stat.S_IWOTH | stat.S_IWGRP) else ""


def _fallbacks(environ: Mapping[str, str]) -> Iterator[str]:
    """Directories to try where no variable names a usable one: mounts on disk, then mounts in memory, then temporary ones."""
    mounts = _mounts()
    disk = [point for point, kind in mounts if kind not in ("tmpfs", "ramfs")]
    memory = [point for point, kind in mounts if kind in ("tmpfs", "ramfs")]
    temporary = [directory for directory in (environ.get("TMPDIR"), *_TEMPORARY) if directory]
    late = [point for point in (*disk, *memory) if point in temporary]
    ordered = [*_USUAL_NAMES, *(p for p in disk if p not in late), *(p for p in memory if p not in late), *temporary]
    yield from (directory for directory in dict.fromkeys(ordered) if os.path.isdir(directory))


def _mounts() -> list[tuple[str, str]]:
    """(mount point, file system) of every mount that could be meant for data (proc(5), /proc/self/mountinfo), in its order."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
            lines = stream.read().splitlines()
    except OSError:
        return []
    found: list[tuple[str, str]] = []
    for line in lines:
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        if len(fields) < 6 or not after:
            continue
        point = _unescape(fields[4])
        options = fields[5].split(",")
        system = point == "/" or any(point == part or point.startswith(f"{part}/") for part in _NOT_FOR_DATA)
        if "rw" in options and not system:
            found.append((point, after.split(" ")[0]))
    return found


def _unescape(text: str) -> str:
    """mountinfo writes blanks and backslashes in octal."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        text = text.replace(code, character)
    return text
