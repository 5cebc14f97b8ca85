"""Putting CuTe-DSL kernels into FlashInfer's own cache directory, beside kernels that are the user's.

FlashInfer deletes a module's directory, whoever's kernels lie in it, when it builds a kernel there and `meta.json` is not what it
expects (`jit/cute_dsl_core.py`, compile_and_persist and build). So:

- our objects are never beside a `meta.json` that does not match: it is written first, then the objects, each whole;
- a directory with an equal `meta.json` is merged into, and what is there stays: one name under one meta is one kernel;
- a directory with another `meta.json`, or none, is of no use to this target, and its next build would delete it. It is renamed,
  not deleted, when it holds anything that is not ours, to the last byte: FlashInfer never looks at the new name, and the user has
  it back by renaming it again. A directory that holds nothing but ours is replaced.

All of it happens under FlashInfer's own lock for the module, which its builds take too. What is ours is written down before it
is there: whoever is killed in between leaves nothing that would later be taken for the user's. Decisions are pure
(`plan_install`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kcache import fsops
from kcache.digest import CHUNK
from kcache.errors import InstallError, TrustError
from kcache.fsops.failures import reason

META = "meta.json"
META_BYTES = 1 << 20
"""FlashInfer's are below a kilobyte. A larger one is not what it expects."""

FRESH = "fresh"
MERGE = "merge"
SET_ASIDE = "set-aside"
REPLACE = "replace"


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What lies in a module's directory now.

    exists:  whether there is a directory.
    meta:    its meta.json as FlashInfer reads it; None if there is none or it is no JSON.
    objects: name of each `.o` file -> its digest; empty for one that cannot be read.
    others:  names of anything else, meta.json left out.
    """

    exists: bool
    meta: object
    objects: Mapping[str, str]
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to do with a module's directory.

    how:    `fresh`, `merge`, `set-aside` or `replace`.
    write:  names of our objects that are to be written.
    keep:   names that are there already and stay: equal to ours, or the user's own kernel of that name.
    theirs: names that are not ours: merged with, or set aside.
    why:    one line for the report.
    """

    how: str
    write: tuple[str, ...]
    keep: tuple[str, ...]
    theirs: tuple[str, ...]
    why: str


def plan_install(found: Found, expected: Mapping[str, object], wanted: Mapping[str, str], owned: Mapping[str, str]) -> Plan:
    """What to do so that the target takes our objects, and no kernel of the user's is lost.

    Args:
        expected: the meta.json that the target's FlashInfer expects.
        wanted: name of each of our objects (`<kernel>.o`) -> its digest.
        owned: name -> digest of what kcache wrote here before.
    """
    theirs = tuple(sorted(name for name in (*found.objects, *found.others) if name not in owned))
    everything = tuple(sorted(wanted))
    if not found.exists or (found.meta is None and not found.objects and not found.others):
        return Plan(how=FRESH, write=everything, keep=(), theirs=(), why="nothing is there")
    if found.meta == expected:
        write: list[str] = []
        keep: list[str] = []
        for name in everything:
            there = found.objects.get(name)
            damaged = name in owned and there is not None and there != wanted[name]
            (write if there is None or damaged else keep).append(name)
        return Plan(how=MERGE, write=tuple(write), keep=tuple(keep), theirs=theirs, why="meta.json is what FlashInfer expects")
    why = (
        "meta.json is missing or unreadable" if found.meta is None else f"meta.json differs in {_differing(found.meta, expected)}"
    )
    # What FlashInfer has built since under the name of one of ours is the user's too.
    theirs = tuple(sorted({*theirs, *(name for name in owned if found.objects.get(name, owned[name]) != owned[name])}))
    if theirs:
        return Plan(
            how=SET_ASIDE, write=everything, keep=(), theirs=theirs, why=f"{why}: FlashInfer's next build would delete it"
        )
    return Plan(how=REPLACE, write=everything, keep=(), theirs=(), why=f"{why}, and only kcache's kernels are there")


def _differing(found: object, expected: Mapping[str, object]) -> str:
    if not isinstance(found, dict):
        return "everything"
    return ", ".join(sorted(str(key) for key in {*found, *expected} if found.get(key) != expected.get(key)))


def read_found(directory: Path) -> Found:
    """What lies in a module's directory. Temporary files of builds that go on are not seen.

    Raises:
        InstallError: it cannot be read, or is no directory.
    """
    try:
        names = sorted(path.name for path in directory.iterdir())
    except FileNotFoundError:
        return Found(exists=False, meta=None, objects={}, others=())
    except OSError as error:
        raise InstallError(f"cannot read {directory}", why=reason(error)) from error
    objects = {}
    others = []
    for name in names:
        path = directory / name
        if name == META or ".tmp." in name or name.startswith(fsops.TEMPORARY_PREFIX):
            continue
        if name.endswith(".o") and path.is_file() and not path.is_symlink():
            objects[name] = fsops.digest_or_none(path) or ""
        else:
            others.append(name)
    return Found(exists=True, meta=_read_meta(directory / META), objects=objects, others=tuple(others))


def _read_meta(path: Path) -> object:
    """As FlashInfer's `_read_meta` does: whatever is wrong, there is none."""
    data = fsops.read_small(path, META_BYTES)
    try:
        return None if data is None else json.loads(data.decode())
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What an install did.

    plan:      what was decided.
    set_aside: where a directory that did not match lies now; None where there was none.
    objects:   name -> digest of what kcache wrote, now and before, and what is still its own.
    """

    plan: Plan
    set_aside: Path | None
    objects: Mapping[str, str]


def install_module(
    cached_ops: Path,
    module: str,
    expected: Mapping[str, object],
    objects: Mapping[str, Path],
    *,
    digests: Mapping[str, str],
    owned: Mapping[str, str] | Callable[[], Mapping[str, str]],
    timeout: float,
    remember: Callable[[Mapping[str, str], AbstractSet[str]], None] | None = None,
) -> Placed:
    """Put our objects into a module's directory, under FlashInfer's own lock.

    Args:
        cached_ops: FlashInfer's JIT directory on the target.
        module: the module's directory below it, such as `b12x_moe_sm120a_cute_dsl`.
        objects: name of each object (`<kernel>.o`) -> a verified file that holds it.
        digests: name -> its digest; checked once more while it is written.
        owned: name -> digest of what kcache wrote here before, or what gives it, asked under the lock.
        timeout: seconds to wait for a build that holds the lock.
        remember: takes name -> digest of what is kcache's, and the names of which it is known that their bytes are those. Called
            under the lock, before anything is written and after.

    Raises:
        LockTimeoutError: a build goes on for longer.
        InstallError, IntegrityError, TrustError: see `kcache.fsops`.
    """
    directory = cached_ops / module
    with _flashinfers_own():
        fsops.ensure_directory(cached_ops / "tmp")
        # FlashInfer's JitSpecCuteDsl.lock_path: `tmp/<module>.lock`, taken with flock (filelock's UnixFileLock).
        with fsops.locked(cached_ops / "tmp" / f"{module}.lock", timeout):
            before = owned() if callable(owned) else owned
            found = read_found(directory)
            plan = plan_install(found, expected, digests, before)
            fsops.require_space(cached_ops, sum(objects[name].stat().st_size for name in plan.write))
            ours = _ours(plan, found, before, digests)
            whole = {name for name in ours if plan.how == MERGE and found.objects.get(name) == ours[name]}
            if remember is not None:
                remember(ours, whole)
            aside = _carry_out(plan, directory, expected, objects, digests)
            if remember is not None:
                remember(ours, whole | set(plan.write))
    return Placed(plan=plan, set_aside=aside, objects=ours)


def _ours(plan: Plan, found: Found, owned: Mapping[str, str], digests: Mapping[str, str]) -> dict[str, str]:
    """Name -> digest of what is kcache's once a plan is carried out."""
    there = owned.keys() & found.objects.keys() if plan.how == MERGE else set()
    return {name: owned[name] for name in there} | {name: digests[name] for name in plan.write}


def _carry_out(
    plan: Plan, directory: Path, expected: Mapping[str, object], objects: Mapping[str, Path], digests: Mapping[str, str]
) -> Path | None:
    """Does what was planned; where a directory that did not match lies now."""
    aside = None
    if plan.how == SET_ASIDE:
        aside = _set_aside(directory)
    elif plan.how == REPLACE:
        _remove(directory)
    fsops.ensure_directory(directory)
    if plan.how != MERGE:
        fsops.write_bytes(directory / META, json.dumps(expected, indent=2).encode())
    for name in plan.write:
        fsops.write_stream(directory, name, _chunks(objects[name]), expected_size=None, expected_sha256=digests[name])
    return aside


@contextmanager
def _flashinfers_own() -> Iterator[None]:
    """Errors about FlashInfer's directory name the variable that moves it; KCACHE_DIR does not."""
    try:
        yield
    except (InstallError, TrustError) as error:
        if "KCACHE_DIR" in error.remedy:
            error.remedy = "It is FlashInfer's own directory: mend it, or set FLASHINFER_WORKSPACE_BASE to another place."
        raise


def _remove(directory: Path) -> None:
    """Remove a directory that holds nothing but what kcache made."""
    import shutil

    try:
        shutil.rmtree(directory)
    except OSError as error:
        raise InstallError(f"cannot remove {directory}", why=reason(error)) from error


def _set_aside(directory: Path) -> Path:
    """Rename a directory to a free name beside it."""
    for number in range(1, 1000):
        target = directory.with_name(f"{directory.name}.set-aside-{number}")
        if not target.exists():
            try:
                directory.rename(target)
            except OSError as error:
                raise InstallError(f"cannot rename {directory}", why=reason(error)) from error
            return target
    raise InstallError(f"too many directories were set aside beside {directory}", remedy="Remove those that nobody needs.")


def _chunks(path: Path) -> Iterable[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            yield chunk
