"""Why an entry does not fit an environment, in a sentence, and what would make it fit. Pure: from the checks of `kcache.match`.

Two ways lead to a hit: a farm builds for what the environment is, or the environment changes one package. Both are named where
both exist. Advice is for people; what decides are the checks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kcache.archs import arch_list_entry
from kcache.errors import UsageError
from kcache.key import EntryKey
from kcache.match import Check
from kcache.values import dataclass

_NAMED = 3
"""Files of FlashInfer that a sentence names; checks name them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """`why`: one sentence. `to_hit`: what has to be done, all of it: several things may differ."""

    why: str
    to_hit: tuple[str, ...]


def advise(key: EntryKey, differs: Sequence[Check]) -> Advice:
    """What to say about an entry that was refused for these checks. `differs` is not empty."""
    sources = [check for check in differs if check.field.startswith("flashinfer.sources: ")]
    others = [check for check in differs if check not in sources]
    found = [_one(key, check) for check in others]
    if sources:
        names = [check.field.partition(": ")[2] for check in sources]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        files = f"{len(names)} of FlashInfer's files that it was compiled from are others ({', '.join(names[:_NAMED])}{more})"
        found.append((files, "rebuild with this environment's FlashInfer, or install the unchanged wheel"))
    why = "; ".join(dict.fromkeys(what for what, _ in found))
    return Advice(why=f"{why[:1].upper()}{why[1:]}.", to_hit=tuple(dict.fromkeys(remedy for _, remedy in found)))


def _one(key: EntryKey, check: Check) -> tuple[str, str]:
    """What differs, and what would mend it."""
    wanted, found = check.wanted, check.found
    unknown = found == "absent" or found.startswith("could not be found out")
    if check.field in _GPU:
        return _gpu(key, check)
    if check.field in _VERSIONS:
        name, package = _VERSIONS[check.field]
        here = f"this environment's could not be told ({found})" if unknown else f"here it is {found}"
        install = f"install {package}" if "{}" not in package else f"install {package.format(wanted)}"
        return f"it was built for {name} {wanted}, {here}", install if unknown else f"rebuild for {name} {found}, or {install}"
    if check.field.startswith("package "):
        package = check.field.removeprefix("package ")
        version, there = wanted.partition(" ")[0], found.partition(" ")[0]
        what = f"it was compiled by {package} {version}, here is {there}"
        if there == version:
            what = f"it was compiled by {package} {version}, whose files are others here"
        return what, f"rebuild with this environment's {package}, or install {package}=={version}"
    if match := re.fullmatch(r"(.+): ((GLIBC|GLIBCXX|CXXABI)_[0-9.]+)", check.field):
        library = "glibc" if match[3] == "GLIBC" else "libstdc++"
        what = f"{match[1]} needs {library} symbols {match[2]}, here they end with {found}"
        return what, f"rebuild on an image whose {library} is not newer than this one's, or take an image with a newer {library}"
    if match := re.fullmatch(r"(.+): needs (\S+)", check.field):
        return (
            f"{match[1]} needs {match[2]}, which is not here ({found})",
            f"install the package that has {match[2]} in the image",
        )
    return f"{check.field} is {wanted} there and {found} here", "rebuild for this environment (`kcache build --env FILE`)"


_VERSIONS = {
    "flashinfer.version": ("FlashInfer", "flashinfer-python=={}"),
    "cuda.release": ("CUDA", "a torch build for CUDA {}"),
    "tvm_ffi.version": ("tvm-ffi", "apache-tvm-ffi=={}"),
    "platform.machine": ("machine", "an image for {}"),
}
"""Fields that are versions: what people call it, and what to install so that it is the entry's."""

_GPU = ("gpu.arch", "gpu.cute_arch", "gpu.sm_count")


def _gpu(key: EntryKey, check: Check) -> tuple[str, str]:
    if check.field == "gpu.sm_count":
        return f"it is for a GPU with {check.wanted} SMs, here are {check.found}", "rebuild with --gpu and this GPU's name"
    built = _spelled(key.arch)
    if "no GPU is visible" in check.found:
        return f"it is for architecture {built}, and no GPU is visible here", "name the GPU's architecture with --arch or --gpu"
    names = [name.removeprefix("sm_") for name in check.found.split()]
    here = ",".join(_spelled(name) for name in names)
    return f"it is for architecture {built}, here is {here}", f"rebuild with --arch {here}"


def _spelled(arch: str) -> str:
    """An architecture as `--arch` takes it; one that a store names and this kcache does not know stays as it is."""
    try:
        return arch_list_entry(arch)
    except UsageError:
        return arch
