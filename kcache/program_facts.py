"""What a manifest says of programs of the package b12x beyond their files: what b12x names them by, and how to prove them.

b12x names a program by the digest of a tuple that holds more than the program depends on (`kcache.kinds.b12x_key`). An entry
therefore says what the tuple does not (the builder's machine, the content of its compiler, the files of its b12x), and keeps one
program's tuple, so that a host can be compared before anything is downloaded: programs of one entry share all of it that is the
host's. Pure; part of the manifest's format.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from kcache.documents import Reader
from kcache.kernel_facts import Wheel, kernels_digest, parse_wheel, wheels_digest
from kcache.key import EntryKey
from kcache.values import dataclass

MODULE = "b12x"
"""What the key of such an entry has for its modules."""

PROGRAMS = "programs"
"""The directory of CuTe-DSL programs in an entry."""

_KEY = re.compile(r"[0-9a-f]{64}")
_GROUP = re.compile(r"[A-Z2-7]{52}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramFacts:
    """The programs of one entry.

    kernels:        b12x's key of a program (64 hex digits) -> what it calls the kernel.
    payload:        the `repr` of the tuple that one of these keys is the digest of.
    package:        path inside the b12x package -> digest, of every file that b12x hashes.
    abi:            of the builder's Python: says which of a wheel's two digests counts.
    wheels:         normalised name -> the compiler's distributions.
    gpu:            the described GPU (`kcache.gpu_products.GpuProduct.describe`).
    cases:          the plans that ask for the programs (`CASE` in `probe/children/b12x_programs.py`); none in a recording.
    configurations: `default`, or `all`: every candidate of b12x's tuning too; `recorded`: those that a program asked for.
    groups:         directory in Triton's cache -> name of the group, of the Triton programs that the plans need.
    triton:         version and content of the builder's Triton; empty where it could not be found out.
    switches:       the builder's variables that may enter a key of Triton's.
    """

    kernels: Mapping[str, str]
    payload: str
    package: Mapping[str, str]
    abi: str
    wheels: Mapping[str, Wheel]
    gpu: Mapping[str, Any]
    cases: tuple[Mapping[str, Any], ...]
    configurations: str
    groups: Mapping[str, str]
    triton: str
    switches: Mapping[str, str]

    @property
    def payload_key(self) -> str:
        """The key of the program whose tuple is `payload`."""
        return hashlib.sha256(self.payload.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {
            "kernels": dict(sorted(self.kernels.items())),
            "payload": self.payload,
            "package": dict(sorted(self.package.items())),
            "abi": self.abi,
            "wheels": {name: wheel.to_json() for name, wheel in sorted(self.wheels.items())},
            "gpu": dict(self.gpu),
            "cases": [dict(case) for case in self.cases],
            "configurations": self.configurations,
            "groups": dict(sorted(self.groups.items())),
            "triton": self.triton,
            "switches": dict(sorted(self.switches.items())),
        }


def program_paths(key: str) -> tuple[str, str]:
    """Where a program's object and its manifest lie below its entry."""
    return f"{PROGRAMS}/{key}.o", f"{PROGRAMS}/{key}.json"


def parse_program_facts(value: Any, path: str, reader: Reader) -> ProgramFacts:
    """The facts from their JSON form; what is wrong is added to the reader's problems."""
    document = reader.object(value, path)
    cases = document.get("cases")
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        reader.problems.append(f"{path}.cases: not a list of objects")
        cases = []
    triton = document.get("triton")
    if not isinstance(triton, str):
        reader.problems.append(f"{path}.triton: not a text")
    return ProgramFacts(
        kernels=_texts(document, "kernels", path, reader, _KEY),
        payload=reader.text(document.get("payload"), f"{path}.payload"),
        package={
            name: reader.sha256(sha256, f"{path}.package.{name}")
            for name, sha256 in reader.object(document.get("package"), f"{path}.package").items()
        },
        abi=reader.text(document.get("abi"), f"{path}.abi"),
        wheels={
            name: parse_wheel(wheel, f"{path}.wheels.{name}", reader)
            for name, wheel in reader.object(document.get("wheels"), f"{path}.wheels").items()
        },
        gpu=reader.object(document.get("gpu"), f"{path}.gpu"),
        cases=tuple(cases),
        configurations=reader.text(document.get("configurations"), f"{path}.configurations"),
        groups=_texts(document, "groups", path, reader, _GROUP),
        triton=str(triton),
        switches=_texts(document, "switches", path, reader, None),
    )


def _texts(document: Mapping[str, Any], name: str, path: str, reader: Reader, names: re.Pattern[str] | None) -> dict[str, str]:
    found = reader.object(document.get(name), f"{path}.{name}")
    for key, text in found.items():
        if names is not None and not names.fullmatch(key):
            reader.problems.append(f"{path}.{name}: {key[:80]!r} is not a name of one")
        if not isinstance(text, str):
            reader.problems.append(f"{path}.{name}.{key}: not a text")
    return found


def check_program_facts(facts: ProgramFacts, key: EntryKey, paths: tuple[str, ...], reader: Reader) -> None:
    """What the facts say must be what the key and the artifacts add up to; problems are added to the reader's."""
    problems = reader.problems
    if key.modules != (MODULE,):
        problems.append(f"key.modules: not {MODULE}")
    if key.ingredients["programs"] != kernels_digest(paths):
        problems.append("artifacts: their names are not those in the key")
    if key.ingredients["cutlass_dsl.wheels"] != wheels_digest(facts.wheels):
        problems.append("programs.wheels: their digest is not the one in the key")
    if facts.payload_key not in facts.kernels:
        problems.append("programs.payload: it is not of one of these programs")
    if repr(key.ingredients["b12x.package"]) not in facts.payload:
        problems.append("programs.payload: it is not of the package in the key")
    wanted = {path for name in facts.kernels for path in program_paths(name)}
    problems += [f"artifacts: no {path}" for path in sorted(wanted - set(paths))]
    held = {f"{directory}/{group}" for directory, group in facts.groups.items()}
    problems += [f"artifacts: no {path}" for path in sorted(held - set(paths))]
    for number, path in enumerate(paths):
        directory, _, name = path.partition("/")
        if path not in wanted and (directory not in facts.groups or not name or "/" in name):
            problems.append(f"artifacts[{number}].path: neither of a program nor of a group")
