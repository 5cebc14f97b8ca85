"""May this entry be used in this environment? Pure decisions that explain themselves.

FlashInfer loads a module from its AOT path without looking whether it is still right for the host, so every rule that protects
the server is here. Two steps, because the second needs the entry's manifest: `match_key` decides from an index line,
`match_binary` from the manifest (sources, symbol versions, libraries). The rules and their evidence are
kcache/docs/decisions/0003-match-rules.md. A value that could not be found out never passes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from kcache.archs import cute_dsl_arch
from kcache.kernel_facts import COMPILER, KernelFacts, Wheel
from kcache.key import ABSENT, AUTOTUNE, NVCC, EntryKey, Environment, Fact, known, undetermined
from kcache.manifest import Manifest
from kcache.values import dataclass

EQUAL = "equal"
RUNS_ON = "runs-on"
SAME_MAJOR = "same-major"
NOT_OLDER = "not-older"
AT_LEAST = "at-least"
PRESENT = "present"
SAME_RELEASE = "same-release"
"""Of a package under another Python: the same version, and equal in every file that is not compiled for one Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One rule applied to one field: what the entry wants, what the environment has."""

    field: str
    rule: str
    wanted: str
    found: str
    passed: bool

    def describe(self) -> str:
        """For people: `flashinfer.version: wanted 0.7.4 (equal), found 0.7.2.post1`."""
        return f"{self.field}: wanted {self.wanted} ({self.rule}), found {self.found}"

    def to_json(self) -> dict[str, str]:
        return {"field": self.field, "rule": self.rule, "wanted": self.wanted, "found": self.found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether an entry may be used, and every rule that was applied.

    archs: the environment's architectures that the entry serves; empty when it is refused for its architecture.
    """

    checks: tuple[Check, ...]
    archs: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def differs(self) -> tuple[Check, ...]:
        """The rules that refuse, in order of application."""
        return tuple(check for check in self.checks if not check.passed)


def match_key(key: EntryKey, environment: Environment, *, strict: bool = False) -> Decision:
    """Decides by key alone.

    Args:
        strict: everything equal, nothing merely compatible.
    """
    wanted = key.ingredients
    checks = [
        _equal("flashinfer.version", wanted["flashinfer.version"], environment.fact("flashinfer.version")),
        _equal("platform.machine", wanted["platform.machine"], environment.fact("platform.machine")),
    ]
    archs, gpu = _runs_on(wanted, environment, strict=strict) if key.layout == NVCC else _kernels_run_on(wanted, environment)
    checks += gpu
    runtime = environment.fact("cuda.runtime")
    checks.append((_equal if strict else _same_major)("cuda.release", wanted["cuda.release"], runtime))
    if (built := wanted.get("tvm_ffi.version")) is not None:
        checks.append((_equal if strict else _not_older)("tvm_ffi.version", built, environment.fact("tvm_ffi.version")))
    flags = wanted.get("build.flags", "default")
    if flags != "default":
        found = "default: entries built with other compiler flags are never chosen"
        checks.append(Check(field="build.flags", rule=EQUAL, wanted=flags, found=found, passed=False))
    return Decision(checks=tuple(checks), archs=archs)


def match_binary(manifest: Manifest, environment: Environment, *, strict: bool = False) -> Decision:
    """Decides by what the manifest says of its binaries: sources, machine, symbol versions, libraries, the kernels' compiler.

    The environment must hold the facts that `requirements` names.

    Args:
        strict: everything equal, nothing merely compatible.
    """
    checks = [_source(path, wanted, environment.source(path)) for path, wanted in sorted(manifest.sources.items())]
    if manifest.kernels is not None:
        checks += _compiler(manifest.kernels, environment, strict=strict)
    if manifest.programs is not None:  # decided by `kcache.workflows.b12x_host`, which reads the host's own package
        found = "only the host that will use them can say what its b12x asks for"
        checks.append(Check(field="b12x", rule=EQUAL, wanted="a host", found=found, passed=False))
    if manifest.tunings is not None:  # likewise, by `kcache.workflows.tunings`
        found = "only the host that will use them can say what its FlashInfer would write"
        checks.append(Check(field="tuning.environment", rule=EQUAL, wanted="a host", found=found, passed=False))
    for artifact in manifest.artifacts:
        if artifact.elf is None:
            continue
        machine = environment.fact("platform.machine")
        checks.append(_equal(f"{artifact.path}: machine", artifact.elf.machine, machine))
        checks += [
            _symbol_floor(artifact.path, prefix, version, environment)
            for prefix, version in sorted(artifact.elf.versions.items())
        ]
        checks += [_present(artifact.path, soname, environment.library(soname)) for soname in artifact.elf.needed]
    return Decision(checks=tuple(checks))


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What has to be looked up on a host before `match_binary` can decide."""

    sonames: tuple[str, ...]
    sources: tuple[str, ...]
    compiler: bool
    """Whether the distributions of CuTe-DSL's compiler have to be known by content."""


def requirements(manifests: Iterable[Manifest]) -> Requirements:
    """The union of what these manifests need to know of a host."""
    sonames: set[str] = set()
    sources: set[str] = set()
    compiler = False
    for manifest in manifests:
        sources.update(manifest.sources)
        compiler = compiler or manifest.kernels is not None
        for artifact in manifest.artifacts:
            if artifact.elf is not None:
                sonames.update(artifact.elf.needed)
    return Requirements(sonames=tuple(sorted(sonames)), sources=tuple(sorted(sources)), compiler=compiler)


def rank(key: EntryKey, environment: Environment, arch: str, *, size: int = 0) -> tuple[int, int, int, int, str]:
    """Orders accepted entries for one architecture, best highest.

    Exact architecture before family, then the toolkit release nearest to the host's CUDA runtime, then the newest tvm-ffi, then
    of a model's entries and of tuning results the one with more in it (`size`, bytes), and last the fingerprint, so that every
    process of a fleet chooses the same.
    """
    release = _numbers(key.ingredients["cuda.release"])
    runtime = _numbers(environment.fact("cuda.runtime").value or "")
    minor = release[1] if len(release) > 1 else 0
    host_minor = runtime[1] if len(runtime) > 1 else 0
    tvm = _version(key.ingredients.get("tvm_ffi.version", ""))
    patch = tvm[2] * 1000 + tvm[3] if tvm else 0
    score = arch_score(key.arch, arch) or 0
    return (score, -abs(minor - host_minor), patch, size if key.model or key.layout == AUTOTUNE else 0, key.fingerprint)


_ARCH = re.compile(r"([0-9]{1,2})([0-9])([af]?)")


def arch_score(built: str, device: str) -> int | None:
    """How well code built for `built` serves `device`, both in FlashInfer's spelling; None where it does not run.

    FlashInfer's own rule for providers (`jit/_cuda_architecture.py`, cuda_binary_target_compatibility_score, 0.7.4): equal is
    best; an `a` target runs on its own compute capability alone; `f` and plain ones run on later minors of the same major.
    """
    one, other = _ARCH.fullmatch(built), _ARCH.fullmatch(device)
    if one is None or other is None:
        return None
    major, minor, suffix = int(one[1]), int(one[2]), one[3]
    device_major, device_minor = int(other[1]), int(other[2])
    if built == device:
        return 400 + minor
    if suffix == "a":
        return 300 + minor if (major, minor) == (device_major, device_minor) else None
    if major != device_major or minor > device_minor:
        return None
    return (200 if suffix == "f" else 100) + minor


def _check(field: str, rule: str, wanted: str, found: Fact, passed: bool) -> Check:
    return Check(field=field, rule=rule, wanted=wanted, found=found.describe(), passed=passed and found.known)


def _equal(field: str, wanted: str, found: Fact) -> Check:
    return _check(field, EQUAL, wanted, found, found.value == wanted)


def _same_major(field: str, wanted: str, found: Fact) -> Check:
    return _check(field, SAME_MAJOR, wanted, found, wanted.partition(".")[0] == (found.value or "").partition(".")[0])


def _not_older(field: str, wanted: str, found: Fact) -> Check:
    """The loader's ABI series is major.minor; within it a module may only meet a loader at least as new as its headers."""
    built, host = _version(wanted), _version(found.value or "")
    passed = found.value == wanted
    if built is not None and host is not None:
        passed = built[:2] == host[:2] and host >= built
    return _check(field, NOT_OLDER, wanted, found, passed)


_NO_GPU = "no GPU is visible and no architecture was described (--arch, --gpu, FLASHINFER_CUDA_ARCH_LIST)"


def _runs_on(wanted: Mapping[str, str], environment: Environment, *, strict: bool) -> tuple[tuple[str, ...], list[Check]]:
    built, archs = wanted["gpu.arch"], environment.archs
    served = tuple(arch for arch in archs if (built == arch if strict else arch_score(built, arch) is not None))
    rule = EQUAL if strict else RUNS_ON
    return served, [Check(field="gpu.arch", rule=rule, wanted=built, found=" ".join(archs) or _NO_GPU, passed=bool(served))]


def _kernels_run_on(wanted: Mapping[str, str], environment: Environment) -> tuple[tuple[str, ...], list[Check]]:
    """CuTe-DSL compiles for the GPU itself, whatever family nvcc modules are for (`120f` is sm_120a), and for its SM count."""
    built, count, archs = wanted["gpu.cute_arch"], wanted["gpu.sm_count"], environment.archs
    names = {arch: cute_dsl_arch(arch) for arch in archs}
    served = tuple(arch for arch in archs if names[arch] == built)
    found = " ".join(names.values()) or _NO_GPU
    checks = [Check(field="gpu.cute_arch", rule=EQUAL, wanted=built, found=found, passed=bool(served))]
    for arch in served:
        fact = environment.fact(sm_count_fact(arch))
        checks.append(_check("gpu.sm_count", EQUAL, count, fact, count in (fact.value or "").split()))
    return served, checks


def sm_count_fact(arch: str) -> str:
    """The name of the fact that holds the SM counts of the GPUs of one architecture, separated by spaces."""
    return f"gpu.sm_count.{arch}"


def compiler_facts(wheels: Mapping[str, Wheel]) -> dict[str, Fact]:
    """Distributions of CuTe-DSL's compiler as facts of an environment: version and content, and version and portable content."""
    facts: dict[str, Fact] = {}
    for name, wheel in wheels.items():
        facts[f"cutlass_dsl.{name}"] = _wheel_fact(name, wheel.version, wheel.content)
        facts[f"cutlass_dsl.{name}.portable"] = _wheel_fact(name, wheel.version, wheel.portable)
    return facts or {f"cutlass_dsl.{COMPILER}": ABSENT}


def _wheel_fact(name: str, version: str, content: str) -> Fact:
    return known(f"{version} {content}") if content else undetermined(f"the content of {name} could not be found out")


def _compiler(kernels: KernelFacts, environment: Environment, *, strict: bool) -> list[Check]:
    """Kernels are what their compiler makes of the sources: each of its distributions must be there, equal by content.

    Under another Python a distribution has other extension modules, and was built from the same source: then every file that
    is the same in its builds for every Python must be equal (kcache/docs/decisions/0005-cute-dsl-ingredients.md).
    """
    abi = environment.fact("python.abi")
    portable = not strict and abi.known and abi.value != kernels.python
    checks = [_equal("python.abi", kernels.python, abi)] if strict else []
    wanted, ending = compiler_facts(kernels.wheels), ".portable" if portable else ""
    prefix = "cutlass_dsl."
    found = {name for name, fact in environment.facts.items() if name.startswith(prefix) and not fact.absent}
    plain = sorted({name.removesuffix(".portable") for name in (*wanted, *found)})
    for name in plain:
        built, there = wanted.get(f"{name}{ending}", ABSENT), environment.facts.get(f"{name}{ending}", ABSENT)
        passed = built.known and there.known and built.value == there.value
        rule = SAME_RELEASE if portable else EQUAL
        field = f"package {name.removeprefix(prefix)}"
        checks.append(Check(field=field, rule=rule, wanted=built.describe(), found=there.describe(), passed=passed))
    return checks


def _source(path: str, wanted: str, found: Fact) -> Check:
    return _check(f"flashinfer.sources: {path}", EQUAL, wanted, found, found.value == wanted)


_FLOORS: Mapping[str, str] = {"GLIBC": "libc.version", "GLIBCXX": "libstdcxx.GLIBCXX", "CXXABI": "libstdcxx.CXXABI"}


def _symbol_floor(path: str, prefix: str, version: str, environment: Environment) -> Check:
    field = f"{path}: {prefix}_{version}"
    name = _FLOORS.get(prefix)
    if name is None:
        unknown = f"no rule for symbol versions of {prefix}"
        return Check(field=field, rule=AT_LEAST, wanted=version, found=unknown, passed=False)
    found = environment.fact(name)
    wanted_numbers, found_numbers = _numbers(version), _numbers(found.value or "")
    return _check(field, AT_LEAST, version, found, bool(found_numbers) and found_numbers >= wanted_numbers)


def _present(path: str, soname: str, found: Fact) -> Check:
    return _check(f"{path}: needs {soname}", PRESENT, soname, found, found.known)


def _numbers(version: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)*", version):
        return ()
    return tuple(int(part) for part in version.split("."))


_RELEASE = re.compile(r"([0-9]+)\.([0-9]+)\.([0-9]+)(?:\.post([0-9]+))?")


def _version(text: str) -> tuple[int, int, int, int] | None:
    """A final release or post release as numbers; None for anything else, which then only equals itself."""
    match = _RELEASE.fullmatch(text)
    return (int(match[1]), int(match[2]), int(match[3]), int(match[4] or 0)) if match else None
