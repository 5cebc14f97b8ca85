"""Puts programs of the package b12x where the target's b12x looks for them, under the names that it asks for, and asks by b12x's
own rules whether it will take them.

Entries lie verified below the cache root; b12x wants copies in its compile cache, named by what the host is (`kcache.kinds.
b12x_key`), and Triton's programs lie in Triton's cache. What kcache put there is remembered with its identity and with the host's
own name of a program, so that a second restore of an unchanged host reads no program, takes no lock and writes nothing. Whole
programs that are there already stay, whoever's they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kcache import digest
from kcache.errors import InstallError, IntegrityError, KcacheError, ProbeError, TrustError
from kcache.fsops import Identity
from kcache.fsops.failures import reason
from kcache.kinds.b12x_compile import Program, accepted, for_target, install, verify_program
from kcache.kinds.b12x_entry import host_part
from kcache.kinds.b12x_key import expected_payload, key_of
from kcache.kinds.triton_groups import Group, found_by_triton, install_group, match_group
from kcache.local_cache import InstalledEntry, LocalCache
from kcache.program_facts import program_paths
from kcache.workflows.b12x_host import B12xHost, built_triton, payload_of
from kcache.workflows.outcome import Placement
from kcache.workflows.target import Target

ROOM = "programs"
"""Below the cache root: what each environment uses (`<environment>.json`) and what was written where (`at-<place>.json`)."""


def place_programs(cache: LocalCache, target: Target, installed: Sequence[InstalledEntry], *, timeout: float) -> Placement:
    """Gives b12x the programs of these entries, which `kcache.workflows.b12x_host.decide` accepted.

    Args:
        timeout: seconds to wait for a compilation that holds b12x's lock for a program.
    """
    host = target.b12x()
    refusals: dict[str, str] = {}
    failures: dict[str, KcacheError] = {}
    new: set[str] = set()
    notes: list[str] = []
    for entry in installed:
        fingerprint = entry.manifest.fingerprint
        try:
            if host is None:
                raise ProbeError("there is no b12x to place programs for", remedy="Restore on the host that will use them.")
            changed, told = _place(cache, host, entry, timeout)
        except ProbeError as error:
            refusals[fingerprint] = str(error)
            continue
        except KcacheError as error:
            failures[fingerprint] = error
            continue
        except OSError as error:
            failures[fingerprint] = InstallError("programs of b12x cannot be placed", why=f"{error.filename}: {reason(error)}")
            continue
        notes += told
        if changed:
            new.add(fingerprint)
    taken = [entry.manifest.fingerprint for entry in installed if entry.manifest.fingerprint not in {*refusals, *failures}]
    if taken or cache.read(ROOM, target.id):
        _remember(cache, target.id, {"entries": sorted(taken)})
    return Placement(refusals=refusals, failures=failures, new=frozenset(new), notes=tuple(dict.fromkeys(notes)))


def _place(cache: LocalCache, host: B12xHost, entry: InstalledEntry, timeout: float) -> tuple[bool, list[str]]:
    """Places one entry's programs unless they are; whether anything had to be done, and notes."""
    facts = entry.manifest.programs
    assert facts is not None
    target = host.target(entry.manifest.key)
    named = key_of(expected_payload(payload_of(facts), target).values)
    decision = match_group(built_triton(entry.manifest, facts), host.triton(entry.manifest.key))
    notes = []
    if facts.groups and not decision.accepted:
        names = ", ".join(sorted(name.removesuffix(".json") for name in facts.groups.values()))
        notes = [f"Triton's programs of b12x are left to warmup ({names}): {decision.differs[0].describe()}"]
    root, triton = host.compile_cache, host.triton_cache
    state = {
        "compile_cache": str(root),
        "triton_cache": str(triton),
        "named": named,
        "triton": decision.accepted,
    }
    place = "at-" + digest.of_document([entry.manifest.fingerprint, str(root), str(triton)]).removeprefix("sha256:")[:16]
    if _in_place(cache.read(ROOM, place), state):
        return False, notes
    programs = [for_target(program, target) for program in programs_of(entry)]
    groups = _groups(entry) if decision.accepted else []
    before = all(accepted(root, program.key) == "" for program in programs)
    before = before and all(found_by_triton(triton / group.directory, group.name) for group in groups)
    placed = install(root, programs, timeout=timeout)
    notes += [f"{root}/{path} was not a program that b12x takes; it was set aside" for path in placed.set_aside]
    for group in groups:
        install_group(triton, group, timeout=timeout)
    _check(root, programs, triton, groups)
    files = [f"{root}/{path}" for program in programs for path in (program.path, program.path.removesuffix("o") + "json")]
    files += [f"{triton}/{group.directory}/{name}" for group in groups for name in (*group.files, f"__grp__{group.name}")]
    identities = {path: found.to_json() for path in files if (found := Identity.of(Path(path))) is not None}
    _remember(cache, place, {**state, "files": identities})
    return not before, notes


def _in_place(known: Mapping[str, Any] | None, state: Mapping[str, Any]) -> bool:
    """Whether what was put there is there, unchanged, for a host that asks for the same names."""
    if known is None or any(known.get(name) != value for name, value in state.items()):
        return False
    files = known.get("files")
    if not isinstance(files, dict) or not files:
        return False
    found = {path: Identity.of(Path(path)) for path in files}
    return all(one is not None and one.to_json() == files[path] for path, one in found.items())


def programs_of(entry: InstalledEntry) -> list[Program]:
    """An entry's programs, each verified, all of the host that the entry names.

    Raises:
        IntegrityError: a file is not what it should be.
    """
    facts = entry.manifest.programs
    assert facts is not None
    stated = host_part(payload_of(facts))
    programs = []
    for key in facts.kernels:
        data, manifest = (_bytes(entry.directory / path) for path in program_paths(key))
        program = verify_program(key, data, manifest)
        if host_part(program.payload) != stated:
            raise IntegrityError(f"the program {key[:16]} was compiled elsewhere than its entry says")
        programs.append(program)
    return programs


def _groups(entry: InstalledEntry) -> list[Group]:
    facts = entry.manifest.programs
    assert facts is not None
    names: dict[str, list[str]] = {directory: [] for directory in facts.groups}
    for artifact in entry.manifest.artifacts:
        directory, _, name = artifact.path.partition("/")
        if directory in names:
            names[directory].append(name)
    return [
        Group(
            directory=directory,
            name=facts.groups[directory],
            files={name: _bytes(entry.directory / directory / name) for name in found},
        )
        for directory, found in names.items()
    ]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise IntegrityError(f"{path} cannot be read", why=os.strerror(error.errno or 0)) from error


def _check(root: Path, programs: Sequence[Program], triton: Path, groups: Sequence[Group]) -> None:
    """b12x's and Triton's own rules, once everything is written."""
    for program in programs:
        if why := accepted(root, program.key):
            raise InstallError(f"{root} was changed while programs were placed", why=f"{program.key[:16]}: {why}")
    for group in groups:
        if not found_by_triton(triton / group.directory, group.name):
            raise InstallError(f"{triton} was changed while programs were placed", why=f"{group.directory} is not whole")


def _remember(cache: LocalCache, name: str, document: Mapping[str, Any]) -> None:
    """Keeps a document where that is possible: without it the next restore looks at every program again."""
    with suppress(InstallError, TrustError):
        cache.write(ROOM, name, document)


def programs_in_use(cache: LocalCache, target: Target) -> list[InstalledEntry]:
    """The entries whose programs the last restore gave to this environment, as far as they are whole."""
    named = (cache.read(ROOM, target.id) or {}).get("entries")
    found = [cache.find(str(fingerprint)) for fingerprint in (named if isinstance(named, list) else [])]
    return [entry for entry in found if isinstance(entry, InstalledEntry) and entry.manifest.programs is not None]
