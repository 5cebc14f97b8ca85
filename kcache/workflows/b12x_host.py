"""What the b12x of a restore's host asks for, and whether an entry's programs may be used by it. Reads files; imports nothing of
them.

The decision by manifest for entries of layout `b12x`, as `kcache.match.match_binary` is for the others: it needs the host's own
package, Python and variables, or what a saved environment says of them (`kcache.workflows.b12x_saved`).
A host without b12x, or with one whose rule is not known, is a refusal with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kcache import digest
from kcache.archs import capability
from kcache.errors import InstallError, KcacheError, TrustError
from kcache.kinds.b12x_compile import compile_cache_directory
from kcache.kinds.b12x_key import Payload, Target, match_program, parse_payload
from kcache.kinds.b12x_package import RULES, B12xPackage, differing_files, find_package, package_paths, read_package
from kcache.kinds.triton_groups import Facts, switches_of, triton_cache_directory
from kcache.manifest import Manifest
from kcache.match import EQUAL, Check, Decision
from kcache.probe.packages import Packages, content_digest
from kcache.program_facts import ProgramFacts
from kcache.workflows.b12x_saved import PACKAGE, saved_target
from kcache.workflows.b12x_target import host_package, host_target

if TYPE_CHECKING:
    from kcache.key import EntryKey, Environment
    from kcache.local_cache import LocalCache
    from kcache.probe.host import Host
    from kcache.probe.packages import Interpreter


class B12xHost:
    """A host's b12x; what costs time is found out once."""

    def __init__(self, host: Host, environ: Mapping[str, str], cache: LocalCache | None = None) -> None:
        """cache: remembers what the package's files are, by their identities."""
        self._host = host
        self._cache = cache
        self._package: B12xPackage | None = None
        self._targets: dict[tuple[tuple[int, int], int], Target] = {}
        self.environ = environ

    @property
    def package(self) -> B12xPackage:
        """Raises: ProbeError: there is none, or its rule for keys is not known."""
        if self._package is None:
            interpreter = self._host.paths.interpreter
            self._package = host_package(interpreter) if self._cache is None else remembered_package(self._cache, interpreter)
        return self._package

    def target(self, key: EntryKey) -> Target:
        """What b12x's keys depend on here, for the GPU of an entry that `match_key` accepted. Raises as `package`."""
        gpu = (capability(key.arch), int(key.ingredients["gpu.sm_count"]))
        if gpu not in self._targets:
            self._targets[gpu] = host_target(
                self._host.paths.interpreter,
                self.package,
                machine=os.uname().machine,
                capability=gpu[0],
                sm_count=gpu[1],
                environ=self.environ,
            )
        return self._targets[gpu]

    def triton(self, key: EntryKey) -> Facts:
        """What Triton's keys depend on here. Raises as `package`."""
        return triton_facts(self.target(key), self._host.paths.packages)

    @property
    def compile_cache(self) -> Path:
        """Where b12x looks for programs. Raises: IntegrityError: nothing says so."""
        return Path(compile_cache_directory(self.environ))

    @property
    def triton_cache(self) -> Path:
        """Where Triton looks for programs. Raises: IntegrityError: nothing says so."""
        return Path(triton_cache_directory(self.environ))


ROOM = "b12x"
"""Below the cache root: what each package's files were when they were read last."""


def remembered_package(cache: LocalCache, interpreter: Interpreter) -> B12xPackage:
    """`host_package`, without reading five hundred files that have not changed since: the same paths, and of each the size,
    times, inode and device. A cache that cannot be written is no obstacle: the files are read again."""
    found = find_package(interpreter.search_path)
    if found is None:
        return host_package(interpreter)
    root, embedded = found
    name = digest.of_bytes(root.encode()).removeprefix("sha256:")[:16]
    # Taken before the files are read: a change in between is noticed the next time.
    state = {"root": root, "rules": list(RULES), "files": _identities(root)}
    known = cache.read(ROOM, name)
    if known is not None and all(known.get(part) == value for part, value in state.items()):
        with suppress(KeyError, TypeError, AttributeError):
            files = {path: str(sha256) for path, sha256 in known["digests"].items()}
            return B12xPackage(root=root, embedded=embedded, files=files, fingerprint=str(known["fingerprint"]))
    package = read_package(root, embedded=embedded)
    with suppress(InstallError, TrustError):
        cache.write(ROOM, name, {**state, "digests": dict(package.files), "fingerprint": package.fingerprint})
    return package


def _identities(root: str) -> dict[str, list[int]]:
    """Of each file that b12x hashes; one that is gone meanwhile has none, and the package is read."""
    found = {}
    for path in package_paths(root):
        with suppress(OSError):
            one = os.stat(f"{root}/{path}")  # what a link leads to counts  # noqa: PTH116
            found[path] = [one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino, one.st_dev]
    return found


def triton_text(packages: Packages) -> str:
    """Version and content of an installed Triton; empty where it could not be found out."""
    found = packages.distribution("triton")
    content = content_digest(found) if found is not None else None
    return f"{found.version} {content.value}" if found is not None and content is not None and content.known else ""


def triton_facts(target: Target, packages: Packages) -> Facts:
    """`Facts` of a host."""
    return Facts(
        triton=triton_text(packages),
        python=target.abi,
        package=target.fingerprint,
        gpu=f"{target.capability[0]}.{target.capability[1]}",
        switches=switches_of(target.environ),
    )


def built_triton(manifest: Manifest, facts: ProgramFacts) -> Facts:
    """`Facts` of an entry's builder."""
    major, minor = capability(manifest.key.arch)
    return Facts(
        triton=facts.triton,
        python=facts.abi,
        package=manifest.key.ingredients[PACKAGE],
        gpu=f"{major}.{minor}",
        switches=facts.switches,
    )


def payload_of(facts: ProgramFacts) -> Payload:
    """The tuple of one of an entry's programs. Raises: IntegrityError: it is none that is known."""
    return parse_payload(facts.payload, facts.payload_key)


def decide(host: B12xHost | Environment, manifest: Manifest, *, strict: bool) -> Decision:
    """Whether an entry's programs may be used; where the packages differ, every differing file is named (of a saved environment,
    which is the other thing that `host` may be, the fingerprints alone).

    Raises:
        IntegrityError: the entry's own tuple is none that is known.
    """
    facts, key = manifest.programs, manifest.key
    assert facts is not None
    payload = payload_of(facts)
    try:
        if isinstance(host, B12xHost):
            target = host.target(key)
        else:
            target = saved_target(host, capability(key.arch), int(key.ingredients["gpu.sm_count"]))
    except KcacheError as error:
        return _refused(f"{error.what}: {error.why}" if error.why else error.what, payload)
    machine = key.ingredients["platform.machine"]
    decision = match_program(payload, target, machine=machine, abi=facts.abi, wheels=facts.wheels, strict=strict)
    if not isinstance(host, B12xHost) or payload.fingerprint == target.fingerprint:
        return decision
    here = {path: f"sha256:{sha256}" for path, sha256 in host.package.files.items()}
    files = [
        Check(field=f"{PACKAGE}: {path}", rule=EQUAL, wanted=_told(facts.package, path), found=_told(here, path), passed=False)
        for path in differing_files(facts.package, here)
    ]
    checks: list[Check] = []
    for check in decision.checks:
        checks += files if files and check.field == PACKAGE else [check]
    return Decision(checks=tuple(checks))


def _told(files: Mapping[str, str], path: str) -> str:
    return files[path][7:19] if path in files else "absent"


def _refused(why: str, payload: Payload) -> Decision:
    check = Check(field=PACKAGE, rule=EQUAL, wanted=payload.fingerprint[:12], found=why, passed=False)
    return Decision(checks=(check,))
