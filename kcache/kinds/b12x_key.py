"""What enters the key of a program in b12x's compile cache, which of it a program depends on, and the key that a host asks for.

b12x (PyPI 1.5.1; `flashinfer/experimental/b12x` of 0.7.4 has the same code) names an object by the SHA-256 of a Python tuple's
`repr` (`_lib/compiler.py`, _compile_disk_cache_payload) and writes the name into the object's symbols. The tuple holds more than
the program depends on: Python's patch version, torch, CUDA_HOME, CC, ... So every ingredient has a rule here by what it does, as
those of CuTe-DSL kernels in FlashInfer have (kcache/docs/decisions/0005-cute-dsl-ingredients.md; what is peculiar to b12x is in
0006-b12x-package.md). Where all that must agree agrees, `expected_payload` is the host's own tuple, `key_of` its name. Pure; a
value that could not be found out never passes.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from kcache.errors import IntegrityError
from kcache.kernel_facts import COMPILER, Wheel
from kcache.key import Fact, known, undetermined
from kcache.match import EQUAL, SAME_RELEASE, Check, Decision
from kcache.values import dataclass

RECORDED = "recorded"
"""In b12x's key, and nothing that a program depends on: never a reason to refuse."""

SAME_ARCH = "same-arch"
"""CUTE_DSL_ARCH: unset, or the architecture that b12x's compiler workers take for the GPU anyway."""

EXPLICIT = "b12x_cute_compile_cache_v7_explicit_spec"
STRUCTURAL = "b12x_cute_compile_cache_v4"

_LENGTHS = {EXPLICIT: 11, STRUCTURAL: 9}
"""Formats of the tuple, and how many fields each has: the last two are the compiler's options and the environment."""

_ARCH_VARIABLE = "CUTE_DSL_ARCH"

TOOL_VARIABLES = (
    "CC", "CUDACXX", "CUDA_HOME", "CUDA_PATH", "CUDA_TOOLKIT_PATH", "CXX", "NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS",
)  # fmt: skip
"""Always in the key (`_compile_environment_key`), and of no effect: CuTe-DSL brings its compiler along."""

_FIXED_VARIABLES = (*TOOL_VARIABLES, _ARCH_VARIABLE)

_PREFIXES = ("B12X_", "CUTE_", "CUTLASS_")

_OPERATIONAL_VARIABLES = frozenset((
    "B12X_AUTOTUNE", "B12X_AUTOTUNE_EXHAUSTIVE", "B12X_TUNING_CACHE_VERSION", "B12X_COMPILE_CACHE_DIR",
    "B12X_COMPILE_DISK_CACHE", "B12X_COMPILE_MEMORY_CACHE", "B12X_COMPILE_MEMORY_CACHE_SIZE", "B12X_COMPILE_SPEC_MEMO",
    "B12X_LOG_CUTE_COMPILES", "B12X_LOG_CUTE_COMPILES_AFTER_ENGINE_START", "B12X_LOG_CUTE_COMPILE_ARGS",
    "B12X_LOG_CUTE_COMPILE_STACK", "B12X_LOG_CUTE_COMPILE_STACK_DEPTH", "B12X_PRINT_COMPILE_PROGRESS",
    "B12X_PREPARATION_TRACE_DIR", "B12X_TIMING", "B12X_TIMING_THRESHOLD_MS", "CUTE_DSL_CACHE_DIR",
))  # fmt: skip
"""Never in the key, whatever their prefix (`_compile_environment_key`)."""

_IDLE_VARIABLES = frozenset(("B12X_COMPILE_WORKERS", "B12X_ENGINE_STARTED"))
"""In the key for their prefix alone: how many processes compile (`preparation/session.py`), and a mark for the log."""

_VERSIONS = {
    "torch": "torch",
    "cutlass_dsl": "nvidia-cutlass-dsl",
    "cutlass_dsl_libs_base": "nvidia-cutlass-dsl-libs-base",
    "cutlass_dsl_libs_core": "nvidia-cutlass-dsl-libs-core",
    "cutlass_dsl_libs_cu12": "nvidia-cutlass-dsl-libs-cu12",
    "cutlass_dsl_libs_cu13": "nvidia-cutlass-dsl-libs-cu13",
    "cuda_python": "cuda-python",
    "cuda_bindings": "cuda-bindings",
}
"""Name in the tuple -> distribution (`_runtime_toolchain_key`). Without them: `missing`, or empty."""

DISTRIBUTIONS = tuple(_VERSIONS.values())
"""Distributions whose versions `Target.versions` holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ingredient:
    """One thing that decides about a program.

    name:   as it is told to people, such as `b12x.package`, `env CUDA_HOME`, `package nvidia-cutlass-dsl`.
    rule:   `equal`, `same-release`, `same-arch`, `recorded`.
    in_key: whether b12x's own key holds it. What it does not hold (the machine, the compiler's content) is kcache's own care.
    """

    name: str
    rule: str
    value: Fact
    in_key: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A host's Python, package and GPU, as far as b12x's key depends on them. Nothing of it needs an import.

    machine:        `uname -m`.
    implementation: `sys.implementation.name`.
    python:         its version, such as (3, 11, 7).
    abi:            of its extension modules: says which of a wheel's two digests counts.
    versions:       distribution (of `DISTRIBUTIONS`) -> version as its metadata gives it; missing where it is not installed.
    torch_cuda:     `torch.version.cuda`; empty in a CPU build.
    wheels:         the compiler's distributions.
    fingerprint:    of the b12x package (`kcache.kinds.b12x_package`).
    capability, sm_count: of the GPU.
    environ:        the environment of the process that will use b12x.
    """

    machine: str
    implementation: str
    python: tuple[int, int, int]
    abi: str
    versions: Mapping[str, str]
    torch_cuda: str
    wheels: Mapping[str, Wheel]
    fingerprint: str
    capability: tuple[int, int]
    sm_count: int
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """The tuple that b12x named a program by. `values` is the whole of it."""

    values: tuple[Any, ...]

    @property
    def format(self) -> str:
        return str(self.values[0])

    @property
    def fingerprint(self) -> str:
        return str(self.values[2])

    @property
    def toolchain(self) -> dict[str, Any]:
        return {entry[0]: entry[1:] if len(entry) > 2 else entry[1] for entry in self.values[3]}

    @property
    def capability(self) -> tuple[int, int]:
        major, minor = self.values[4][1]
        return int(major), int(minor)

    @property
    def sm_count(self) -> int:
        return int(self.values[4][2])

    @property
    def environment(self) -> dict[str, str]:
        return dict(self.values[-1])


def key_of(values: tuple[Any, ...]) -> str:
    """b12x's name of a program: 64 hex digits (`_build_compile_disk_cache_key`)."""
    return hashlib.sha256(repr(values).encode()).hexdigest()


def parse_payload(text: str, key: str) -> Payload:
    """The tuple from its `repr`, as b12x's manifest keeps it (`cache_payload_repr`).

    Raises:
        IntegrityError: it is no such tuple, has a format that is not known, or does not give `key`.
    """
    what = f"the program {key[:16]} is not named as kcache knows it"
    if hashlib.sha256(text.encode()).hexdigest() != key:
        raise IntegrityError(what, why="its manifest's cache_payload_repr gives another key")
    try:
        values = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        values = None
    if not isinstance(values, tuple) or not values or repr(values) != text:
        raise IntegrityError(what, why="its payload is not made of plain values")
    if values[0] not in _LENGTHS or len(values) != _LENGTHS[values[0]]:
        raise IntegrityError(what, why=f"its payload has format {str(values[0])[:80]!r}")
    payload = Payload(values=values)
    try:
        _ = payload.toolchain, payload.environment, payload.capability, payload.sm_count
        regular = all(isinstance(name, str) and isinstance(value, str) for name, value in values[-1])
    except (TypeError, ValueError, IndexError, KeyError):
        regular = False
    if not regular or set(payload.toolchain) != {"python", "torch_cuda", "b12x_runtime_patches", *_VERSIONS}:
        raise IntegrityError(what, why="its payload has other parts than b12x 1.5.1 writes")
    return payload


def environment_key(environ: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The variables in a key, with their values (`_compile_environment_key`)."""
    names = {*_FIXED_VARIABLES}
    names |= {name for name in environ if name.startswith(_PREFIXES) and name not in _OPERATIONAL_VARIABLES}
    return tuple((name, environ.get(name, "")) for name in sorted(names))


def patch_status(environ: Mapping[str, str]) -> tuple[tuple[str, bool], ...]:
    """Which of its patches to CuTe-DSL b12x applies (`_lib/runtime_patches.py`); each fits nvidia-cutlass-dsl 4.8.0."""
    applied = not _flag(environ.get("B12X_DISABLE_CUTLASS_RUNTIME_PATCHES"))
    memory = applied and not _flag(environ.get("CUTLASS_DSL_CUDA_MEMORY_DEBUG"))
    return (("compile_only_warning", applied), ("memory_debug", memory), ("direct_frameinfo", applied))


def _flag(raw: str | None) -> bool:
    return raw is not None and raw.strip().lower() not in {"", "0", "false", "no", "off"}


def expected_payload(payload: Payload, target: Target) -> Payload:
    """The tuple by which the target's b12x names the same program.

    What is asked for (kernel, its facts, options) is the program's own; that it is the same program is `match_ingredients`'s to
    say.
    """
    versions = target.versions
    texts = {
        name: versions.get(distribution, "missing" if name.startswith("cutlass_dsl") else "")
        for name, distribution in _VERSIONS.items()
    }
    parts: dict[str, tuple[Any, ...]] = {name: (name, text) for name, text in texts.items()}
    parts["python"] = ("python", target.implementation, target.python)
    parts["torch_cuda"] = ("torch_cuda", target.torch_cuda)
    parts["b12x_runtime_patches"] = ("b12x_runtime_patches", patch_status(target.environ))
    values = list(payload.values)
    values[2] = target.fingerprint
    values[3] = tuple(parts[entry[0]] for entry in payload.values[3])
    values[4] = ("cuda", target.capability, target.sm_count)
    values[-1] = environment_key(target.environ)
    return Payload(values=tuple(values))


def ingredients_of_target(target: Target) -> tuple[Ingredient, ...]:
    """Every ingredient of a host, with its rule."""
    toolchain = {name: target.versions.get(distribution, "") for name, distribution in _VERSIONS.items()}
    return _ingredients(
        machine=target.machine,
        fingerprint=target.fingerprint,
        python=(target.implementation, target.python),
        toolchain=toolchain | {"torch_cuda": target.torch_cuda},
        patches=patch_status(target.environ),
        gpu=(target.capability, target.sm_count),
        environment=dict(environment_key(target.environ)),
        wheels=target.wheels,
    )


def ingredients_of_program(payload: Payload, *, machine: str, wheels: Mapping[str, Wheel]) -> tuple[Ingredient, ...]:
    """Every ingredient of a program: what its key says, and what only its builder knows.

    Args:
        machine: `uname -m` of the builder: no key holds it, the object is machine code.
        wheels: the builder's compiler: a key holds versions only.
    """
    toolchain = payload.toolchain
    implementation, python = toolchain["python"]
    return _ingredients(
        machine=machine,
        fingerprint=payload.fingerprint,
        python=(str(implementation), tuple(python)),
        toolchain={name: "" if toolchain[name] == "missing" else str(toolchain[name]) for name in (*_VERSIONS, "torch_cuda")},
        patches=toolchain["b12x_runtime_patches"],
        gpu=(payload.capability, payload.sm_count),
        environment=payload.environment,
        wheels=wheels,
    )


def _ingredients(
    *,
    machine: str,
    fingerprint: str,
    python: tuple[str, tuple[Any, ...]],
    toolchain: Mapping[str, str],
    patches: Iterable[tuple[str, bool]],
    gpu: tuple[tuple[int, int], int],
    environment: Mapping[str, str],
    wheels: Mapping[str, Wheel],
) -> tuple[Ingredient, ...]:
    def told(text: str, unknown: str = "") -> Fact:
        return known(text) if text or not unknown else undetermined(unknown)

    found = [
        Ingredient(name="platform.machine", rule=EQUAL, value=told(machine, "not stated"), in_key=False),
        Ingredient(name="b12x.package", rule=EQUAL, value=told(fingerprint, "no b12x package")),
        Ingredient(name="gpu.capability", rule=EQUAL, value=known(f"{gpu[0][0]}.{gpu[0][1]}")),
        Ingredient(name="gpu.sm_count", rule=EQUAL, value=known(str(gpu[1]))),
        Ingredient(name="b12x.patches", rule=EQUAL, value=known(",".join(f"{name}={applied}" for name, applied in patches))),
        Ingredient(name="python.implementation", rule=EQUAL, value=told(python[0], "not stated")),
        Ingredient(name="python.version", rule=RECORDED, value=known(".".join(map(str, python[1])))),
        Ingredient(name="torch.cuda", rule=RECORDED, value=told(toolchain["torch_cuda"])),
    ]
    for name, distribution in _VERSIONS.items():
        rule = EQUAL if distribution.startswith(COMPILER) else RECORDED
        version = toolchain[name]
        found.append(Ingredient(name=f"{distribution}.version", rule=rule, value=known(version) if version else Fact()))
    for name, wheel in sorted(wheels.items()):
        content = known(wheel.content) if wheel.content else undetermined(f"the content of {name} could not be found out")
        found.append(Ingredient(name=f"package {name}", rule=SAME_RELEASE, value=content, in_key=False))
    for name, text in sorted(environment.items()):
        rule = RECORDED if name in TOOL_VARIABLES or name in _IDLE_VARIABLES else SAME_ARCH if name == _ARCH_VARIABLE else EQUAL
        found.append(Ingredient(name=f"env {name}", rule=rule, value=known(text)))
    return tuple(found)


def match_program(
    payload: Payload, target: Target, *, machine: str, abi: str, wheels: Mapping[str, Wheel], strict: bool = False
) -> Decision:
    """Whether a program may be used on this host; every refusal names the ingredient. What is only recorded is told, and passes.

    Args:
        machine, abi, wheels: of the program's builder; see `ingredients_of_program` and `Target.abi`.
        strict: b12x's own rule: all that its key holds must be equal, and the compiler's content too.
    """
    built = {item.name: item for item in ingredients_of_program(payload, machine=machine, wheels=wheels)}
    host = {item.name: item for item in ingredients_of_target(target)}
    portable = bool(not strict and abi and target.abi) and abi != target.abi
    arch = f"sm_{payload.capability[0]}{payload.capability[1]}a"
    checks = []
    for name in dict.fromkeys((*built, *host)):
        rule = (built.get(name) or host[name]).rule
        wanted, found = _value(name, built), _value(name, host)
        if rule == SAME_RELEASE and portable:
            distribution = name.removeprefix("package ")
            wanted, found = _portable(wheels.get(distribution)), _portable(target.wheels.get(distribution))
        elif rule == SAME_RELEASE or strict:
            rule = EQUAL
        checks.append(_check(name, rule, wanted, found, arch))
    if not any(name.startswith("package ") for name in built):
        checks.append(Check(field="packages", rule=EQUAL, wanted="a compiler", found="none is stated", passed=False))
    return Decision(checks=tuple(checks))


def _value(name: str, items: Mapping[str, Ingredient]) -> Fact:
    """A variable that is on neither list is unset, which in b12x's key is the empty text."""
    if name in items:
        return items[name].value
    return known("") if name.startswith("env ") else Fact()


def _portable(wheel: Wheel | None) -> Fact:
    if wheel is None:
        return Fact()
    return known(wheel.portable) if wheel.portable else undetermined("what is the same for every Python could not be found out")


def _check(name: str, rule: str, wanted: Fact, found: Fact, arch: str) -> Check:
    if rule == RECORDED:
        passed = True
    elif rule == SAME_ARCH:
        usual = ("", arch)
        passed = wanted.same(found) or (wanted.value in usual and found.value in usual)
    else:
        passed = wanted.same(found)
    return Check(field=name, rule=rule, wanted=_told(wanted), found=_told(found), passed=passed)


def _told(value: Fact) -> str:
    return "unset" if value.value == "" else value.describe()
