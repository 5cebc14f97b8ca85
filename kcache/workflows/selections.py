"""Choices of the package b12x's own tuning: collected on the host that measured, and merged where the target's b12x looks.

b12x raises where a choice is not legal in the version that reads it, so the package has to be equal
(kcache/docs/decisions/0006-b12x-package.md); everything else is b12x's own identity of a selection cache. What is of
a model is in the names of the records: one file serves every model that was tuned on such a GPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcache.archs import capability, cute_dsl_arch, flashinfer_arch
from kcache.errors import CollectError, IntegrityError, KcacheError, ProbeError
from kcache.kinds.autotune import LeftOut
from kcache.kinds.autotune_entry import SelectionBuild, selection_parts
from kcache.kinds.b12x_selections import (
    Selections,
    collect_selections,
    identity_of,
    install_selections,
    match_selections,
    package_fact,
    parse_selections,
    selections_directory,
)
from kcache.kinds.nvcc_modules import required
from kcache.match import EQUAL, Check, Decision, sm_count_fact

if TYPE_CHECKING:
    from kcache.kinds.nvcc_modules import EntryParts
    from kcache.local_cache import InstalledEntry
    from kcache.tuning_facts import TuningFacts
    from kcache.workflows.target import Target

PREPARATION = "preparation"
"""b12x's directory of choices, below its compile cache."""


def directory_of(directory: Path) -> Path | None:
    """The directory of choices that somebody names by itself or by b12x's compile cache above it; None where it is no such."""
    if directory.name == PREPARATION:
        return directory
    return directory / PREPARATION if (directory / PREPARATION).is_dir() else None


def collect(directory: Path, target: Target) -> tuple[list[tuple[EntryParts, dict[str, bytes]]], list[LeftOut]]:
    """The parts of an entry for each file of choices, and the files that are none.

    Raises:
        ProbeError: there is no b12x here, and choices are worth nothing without the package that made them.
        TrustError: someone else could change the directory.
    """
    package = _package(target)
    found, lost = collect_selections(directory)
    left_out = [LeftOut(path=one.path, why=one.why) for one in lost]
    made = []
    for selections in found:
        try:
            made.append(selection_parts(_build(target, selections, package), selections))
        except KcacheError as error:
            left_out.append(LeftOut(path=selections.name, why=f"{error.what}: {error.why}" if error.why else error.what))
    return made, left_out


def _build(target: Target, selections: Selections, package: str) -> SelectionBuild:
    """Raises: CollectError: the choices were measured on another GPU than this environment has, or under other variables."""
    decision = _against(target, selections, package, package)
    if not decision.accepted:
        raise CollectError("it was not measured here", why=decision.differs[0].describe())
    cuda = required("cuda.runtime", target.environment.fact("cuda.runtime"))
    major, minor = (int(part) for part in cuda.split(".")[:2])
    text = ".".join(map(str, selections.identity["compute_capability"]))
    arch = cute_dsl_arch(flashinfer_arch(text, (major, minor)))
    return SelectionBuild(farm=target.environment, cuda=cuda, cute_arch=arch, package=package)


def _package(target: Target) -> str:
    host = target.b12x()
    if host is None:
        raise ProbeError("which b12x is installed is not in this saved environment", remedy="Ask on the host that will use it.")
    return host.package.fingerprint


def _against(target: Target, selections: Selections, built_with: str, package: str) -> Decision:
    """b12x's own rule, against what this environment's b12x would work out for its GPUs."""
    wanted = selections.identity
    host = {"compute_capability": "another GPU", "sm_count": "another GPU"}
    for arch in target.environment.archs:
        counts = (target.environment.fact(sm_count_fact(arch)).value or "").split()
        for count in counts if list(capability(arch)) == wanted.get("compute_capability") else ():
            if host["sm_count"] != wanted.get("sm_count"):
                host = identity_of(capability(arch), int(count), target.process_environ, wanted.get("namespace"))
    return match_selections(selections, host, built_with=package_fact(built_with), package=package_fact(package))


def decide(target: Target, facts: TuningFacts) -> Decision:
    """Whether an entry's choices may be used; a host without b12x, or with a variable that b12x refuses, is a refusal."""
    built_with = facts.environment.get("package", "")
    try:
        identity: Any = json.loads(facts.environment.get("identity", ""))
        return _against(target, Selections(identity=identity, records={}), built_with, _package(target))
    except (KcacheError, ValueError, AttributeError) as error:
        check = Check(field="b12x.package", rule=EQUAL, wanted=built_with[:12], found=str(error), passed=False)
        return Decision(checks=(check,))


def root_of(target: Target) -> Path | None:
    """Where this host's b12x looks for choices; None where there is no b12x."""
    host = target.b12x()
    try:
        return None if host is None or not host.package.fingerprint else Path(selections_directory(str(host.compile_cache)))
    except ProbeError:
        return None


def put(entry: InstalledEntry, root: Path, timeout: float) -> tuple[tuple[Path, ...], bool, tuple[str, ...]]:
    """Merges an entry's choices into the host's: the files, whether anything was added, and what to tell.

    Raises:
        IntegrityError: a file is not what it should be, or the host's own is one that b12x refuses; that one is not touched.
        TrustError, LockTimeoutError, NoSpaceError, InstallError: see `install_selections`.
    """
    files: list[Path] = []
    changed, kept = False, 0
    for artifact in entry.manifest.artifacts:
        path = entry.directory / artifact.path
        try:
            data = path.read_bytes()
        except OSError as error:
            raise IntegrityError(f"{path} cannot be read", why=error.strerror or "") from error
        merged = install_selections(root, parse_selections(data, path.name), timeout=timeout)
        changed, kept = changed or bool(merged.added), kept + len(merged.kept)
        files.append(root / path.name)
    notes = (f"{kept} choices of b12x in {root} were there, and stay",) if kept and changed else ()
    return tuple(files), changed, notes
