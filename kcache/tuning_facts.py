"""What a manifest says of tuning results beyond their files: what was tuned in, how was measured, and what the results need.

FlashInfer takes results only where the environment that it works out is the one written beside them. An entry therefore keeps
that environment twice: as FlashInfer wrote it (`environment`), and as facts in which what is absent and what could not be found
out are two things (`host`), with the compiler by content, so that the results can be named anew for another installer
(`kcache.kinds.autotune`). Pure; part of the manifest's format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kcache import digest
from kcache.documents import Reader
from kcache.errors import ProbeError
from kcache.kernel_facts import Wheel, parse_wheel
from kcache.key import EntryKey, Fact, parse_fact
from kcache.values import dataclass

MODULE = "autotune"
"""What the key of such an entry has for its kind and its modules."""

FLASHINFER, VLLM, SGLANG, B12X = "flashinfer", "vllm", "sglang", "b12x"
PLACES = (FLASHINFER, VLLM, SGLANG, B12X)
"""Whose directory the results go to: FlashInfer's managed store (v2), an engine's directory of JSON files (v1), or the selection
cache of the package b12x."""

STORE_FILE = re.compile(r"entries/[0-9a-f]{24}\.json")
"""An artifact of an entry for FlashInfer's managed store."""

SELECTIONS = "selections"
SELECTION_FILE = re.compile(rf"{SELECTIONS}/[0-9a-f]{{64}}\.json")
"""An artifact of an entry for b12x's selection cache."""

FILES = "files"
"""The directory of an engine's files in an entry, by their paths below the engine's own root."""

UNKNOWN = "unknown"
"""What FlashInfer writes for a field that is absent, and for one that it could not find out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """CuTe-DSL's compiler, by content: what `DSL` stands for.

    wheels:  normalised name -> each nvidia-cutlass-dsl* that is installed.
    python:  the Python's ABI, such as `cpython-311-x86_64-linux-gnu`: says which of a wheel's two digests counts.
    tvm_ffi: the version of apache-tvm-ffi; empty where it is not installed.
    """

    wheels: Mapping[str, Wheel]
    python: str
    tvm_ffi: str

    def to_json(self) -> dict[str, Any]:
        wheels = {name: wheel.to_json() for name, wheel in sorted(self.wheels.items())}
        return {"wheels": wheels, "python": self.python, "tvm_ffi": self.tvm_ffi}


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningHost:
    """An environment as FlashInfer's tuner sees it.

    fields: name -> fact, the fields of `metadata_fields` in their order.
    stack:  its compiler by content.
    """

    fields: Mapping[str, Fact]
    stack: Stack

    def to_json(self) -> dict[str, Any]:
        return {"fields": {name: fact.to_json() for name, fact in self.fields.items()}, "stack": self.stack.to_json()}

    def written(self) -> dict[str, str]:
        """The metadata that FlashInfer writes here.

        Raises:
            ProbeError: a field could not be found out.
        """
        for name, fact in self.fields.items():
            if fact.undetermined:
                raise ProbeError(
                    f"what FlashInfer would write as {name} could not be found out",
                    why=fact.undetermined,
                    remedy="Tuning results are neither published from here nor restored to here until it can.",
                )
        return {name: UNKNOWN if fact.value is None else fact.value for name, fact in self.fields.items()}


def parse_tuning_host(value: Any, path: str, reader: Reader) -> TuningHost:
    """What `TuningHost.to_json` wrote; what is wrong is added to the reader's problems."""
    document = reader.object(value, path)
    fields = reader.object(document.get("fields"), f"{path}.fields")
    stack = reader.object(document.get("stack"), f"{path}.stack")
    tvm_ffi = stack.get("tvm_ffi")
    if not isinstance(tvm_ffi, str):
        reader.problems.append(f"{path}.stack.tvm_ffi: not a text")
    wheels = {
        name: parse_wheel(wheel, f"{path}.stack.wheels.{name}", reader)
        for name, wheel in reader.object(stack.get("wheels"), f"{path}.stack.wheels").items()
    }
    return TuningHost(
        fields={name: parse_fact(fact, f"{path}.fields.{name}", reader.problems) for name, fact in fields.items()},
        stack=Stack(wheels=wheels, python=reader.text(stack.get("python"), f"{path}.stack.python"), tvm_ffi=str(tvm_ffi)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningFacts:
    """The results of one entry.

    place:       one of `PLACES`.
    host:        the environment that tuned; every field of it was found out.
    environment: as FlashInfer wrote it: of a store the document that names it, measurement policy and all; of files `_metadata`.
                 Of b12x's choices `identity`, the JSON that names its file, and `package`, the fingerprint of that b12x.
    results:     how many there are.
    operations:  FlashInfer's names of the operations that were tuned.
    modules:     JIT modules that these operations load: the results are of use where these are built or restored too.
    calls:       the calls that tuned (`CALLS` in `probe/children/tuning_calls.py`); none where results were collected.
    """

    place: str
    host: TuningHost
    environment: Mapping[str, str]
    results: int
    operations: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    calls: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "place": self.place,
            "host": self.host.to_json(),
            "environment": dict(sorted(self.environment.items())),
            "results": self.results,
            "operations": list(self.operations),
            "modules": list(self.modules),
            "calls": [dict(call) for call in self.calls],
        }


def environment_digest(environment: Mapping[str, str]) -> str:
    """The key ingredient `tuning.environment`."""
    return digest.of_document(dict(environment))


def results_digest(artifacts: Mapping[str, str]) -> str:
    """The key ingredient `tuning.results`, from path -> digest of the entry's artifacts: two tunings are two entries."""
    return digest.of_document(dict(artifacts))


def parse_tuning_facts(value: Any, path: str, reader: Reader) -> TuningFacts:
    """The facts from their JSON form; what is wrong is added to the reader's problems."""
    document = reader.object(value, path)
    environment = reader.object(document.get("environment"), f"{path}.environment")
    if not environment or not all(isinstance(text, str) for text in environment.values()):
        reader.problems.append(f"{path}.environment: empty, or a field is no text")
        environment = {}
    results, calls = document.get("results"), document.get("calls")
    if type(results) is not int or results < 1:
        reader.problems.append(f"{path}.results: not a number of results")
        results = 0
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        reader.problems.append(f"{path}.calls: not a list of objects")
        calls = []
    return TuningFacts(
        place=reader.text(document.get("place"), f"{path}.place"),
        host=parse_tuning_host(document.get("host"), f"{path}.host", reader),
        environment=environment,
        results=results,
        operations=reader.texts(document.get("operations"), f"{path}.operations"),
        modules=reader.texts(document.get("modules"), f"{path}.modules"),
        calls=tuple(calls),
    )


def check_tuning_facts(facts: TuningFacts, key: EntryKey, artifacts: Mapping[str, str], reader: Reader) -> None:
    """What the facts say must be what the key and the artifacts add up to; problems are added to the reader's."""
    problems = reader.problems
    if key.modules != (MODULE,):
        problems.append(f"key.modules: not {MODULE}")
    if facts.place not in PLACES:
        problems.append(f"tunings.place: {facts.place!r}, this kcache reads {', '.join(PLACES)}")
    if key.ingredients["tuning.environment"] != environment_digest(facts.environment):
        problems.append("tunings.environment: its digest is not the one in the key")
    if key.ingredients["tuning.results"] != results_digest(artifacts):
        problems.append("artifacts: their digest is not the one in the key")
    for name, fact in facts.host.fields.items():
        if fact.undetermined:
            problems.append(f"tunings.host.fields.{name}: it was not found out")
    if facts.place == B12X and set(facts.environment) != {"identity", "package"}:
        problems.append("tunings.environment: not an identity and a package, as b12x's choices have")
    for number, path in enumerate(artifacts):
        if not _own(facts.place, path):
            problems.append(f"artifacts[{number}].path: not a file of tuning results of {facts.place}")


def _own(place: str, path: str) -> bool:
    """Whether an artifact of this path may be in an entry for a place."""
    if place in (FLASHINFER, B12X):
        return (STORE_FILE if place == FLASHINFER else SELECTION_FILE).fullmatch(path) is not None
    return path.startswith(f"{FILES}/") and path.endswith(".json")
