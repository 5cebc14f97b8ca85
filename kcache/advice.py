"""Why an entry does not fit an environment, in a sentence, and what would make it fit. Pure: from the checks of `kcache.match`.

Two ways lead to a hit: a farm builds for what the environment is, or the environment changes one package. Both are named where
both exist. Advice is for people; what decides are the checks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set

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
    package = [check for check in differs if check.field.startswith(_B12X_FILES)]
    named = {check.field for check in differs}
    others = [check for check in differs if check not in sources and check not in package and not _follows(check.field, named)]
    found = [_one(key, check) for check in others]
    if sources:
        files = f"{len(sources)} of FlashInfer's files that it was compiled from are others ({_names(sources)})"
        found.append((files, "rebuild with this environment's FlashInfer, or install the unchanged wheel"))
    if package:
        found.append((f"{len(package)} of b12x's files are others ({_names(package)})", _SAME_B12X))
    why = "; ".join(dict.fromkeys(what for what, _ in found))
    return Advice(why=f"{why[:1].upper()}{why[1:]}.", to_hit=tuple(dict.fromkeys(remedy for _, remedy in found)))


def _names(checks: Sequence[Check]) -> str:
    """The first files that checks name after a colon, and how many more there are."""
    names = [check.field.partition(": ")[2] for check in checks]
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _follows(field: str, named: Set[str]) -> bool:
    """Whether what differs is only the consequence of something else that does, which is told instead."""
    if field == "b12x.patches":  # two variables decide which patches b12x applies
        return any(name.startswith("env ") for name in named)
    return field.startswith("package ") and f"{field.removeprefix('package ')}.version" in named


Told = tuple[str, str]
"""What differs, and what would mend it."""


def _one(key: EntryKey, check: Check) -> Told:
    for rule in (_gpu, _version, _variable, _choices, _b12x_package, _package, _library):
        if (told := rule(key, check)) is not None:
            return told
    what = f"{check.field} is {check.wanted} there and {check.found} here"
    return what, "rebuild for this environment (`kcache build --env FILE`)"


_VERSIONS = {
    "flashinfer.version": ("FlashInfer", "flashinfer-python=={}"),
    "cuda.release": ("CUDA", "a torch build for CUDA {}"),
    "tvm_ffi.version": ("tvm-ffi", "apache-tvm-ffi=={}"),
    "platform.machine": ("machine", "an image for {}"),
}
"""Fields that are versions: what people call it, and what to install so that it is the entry's."""


def _version(key: EntryKey, check: Check) -> Told | None:
    """Those of `_VERSIONS`, and `DISTRIBUTION.version`, which b12x has in the names of its programs."""
    wanted, found = check.wanted, check.found
    distribution = re.fullmatch(r"(\S+)\.version", check.field)
    if check.field in _VERSIONS:
        name, package = _VERSIONS[check.field]
    elif distribution is not None:
        name, package = distribution[1], f"{distribution[1]}=={{}}"
    else:
        return None
    here = f"this environment's could not be told ({found})" if _unknown(found) else f"here it is {found}"
    install = f"install {package.format(wanted)}"
    return f"it was built for {name} {wanted}, {here}", install if _unknown(
        found
    ) else f"rebuild for {name} {found}, or {install}"


def _unknown(found: str) -> bool:
    return found == "absent" or found.startswith("could not be found out")


def _variable(key: EntryKey, check: Check) -> Told | None:
    """Variables that enter the names of b12x's programs, or the identity of its choices.

    A farm builds without them (`kcache.workflows.build_environ.program_environ`): to rebuild would change nothing, the server's
    own environment has to.
    """
    if not check.field.startswith("env ") and check.field != "selections.tuning_cache_version":
        return None
    name = check.field.removeprefix("env ")
    if name == check.field:
        name = "B12X_TUNING_CACHE_VERSION"
    built = "without it" if check.wanted == "unset" else f"with {check.wanted}"
    here = "not set" if check.found == "unset" else check.found
    step = f"unset {name}" if check.wanted == "unset" else f"set {name}={check.wanted}"
    return f"{name} is {here} here, and it was built {built}", f"{step} where the server starts"


def _choices(key: EntryKey, check: Check) -> Told | None:
    """Choices of b12x's own tuning are measured: no farm makes them."""
    if not check.field.startswith("selections."):
        return None
    name = check.field.removeprefix("selections.")
    what = f"b12x chose on a GPU with {name} {check.wanted}, here it is {check.found}"
    return what, "tune on such a GPU as this, and collect there"


_B12X, _B12X_FILES = "b12x.package", "b12x.package: "

_SAME_B12X = "rebuild with this environment's b12x, or install the one that it was built with"

_FINGERPRINT = re.compile(r"[0-9a-f]{12,64}")
"""A package's, whole or as a check shortens it; anything else says why there is none."""


def _b12x_package(key: EntryKey, check: Check) -> Told | None:
    if check.field != _B12X:
        return None
    if _FINGERPRINT.fullmatch(check.found):
        return "its b12x is another than this environment's", _SAME_B12X
    return f"there is no b12x here that it could serve ({check.found})", f"install b12x; {_SAME_B12X}"


def _package(key: EntryKey, check: Check) -> Told | None:
    """A compiler's distribution by content: `VERSION DIGEST`, or the digest where the version is a check of its own."""
    if not check.field.startswith("package "):
        return None
    package = check.field.removeprefix("package ")
    version, there = check.wanted.partition(" ")[0], check.found.partition(" ")[0]
    if version.startswith("sha256:"):
        unknown = f"the files of this environment's {package} could not be told ({check.found})"
        what = unknown if _unknown(check.found) else f"the files of {package} are others here"
        return what, f"rebuild with this environment's {package}, or install the one that it was compiled by"
    what = f"it was compiled by {package} {version}, here is {there}"
    if there == version:
        what = f"it was compiled by {package} {version}, whose files are others here"
    return what, f"rebuild with this environment's {package}, or install {package}=={version}"


def _library(key: EntryKey, check: Check) -> Told | None:
    """What a binary needs of the system's libraries."""
    if match := re.fullmatch(r"(.+): ((GLIBC|GLIBCXX|CXXABI)_[0-9.]+)", check.field):
        library = "glibc" if match[3] == "GLIBC" else "libstdc++"
        what = f"{match[1]} needs {library} symbols {match[2]}, here they end with {check.found}"
        return what, f"rebuild on an image whose {library} is not newer than this one's, or take an image with a newer {library}"
    if match := re.fullmatch(r"(.+): needs (\S+)", check.field):
        what = f"{match[1]} needs {match[2]}, which is not here ({check.found})"
        return what, f"install the package that has {match[2]} in the image"
    return None


_GPU = ("gpu.arch", "gpu.cute_arch", "gpu.sm_count")


def _gpu(key: EntryKey, check: Check) -> Told | None:
    if check.field not in _GPU:
        return None
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
