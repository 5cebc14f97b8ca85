"""What a saved environment says of its b12x: the facts that `kcache env --save` adds, and b12x's view of the host made of them.

Two facts, of a host that has the package alone: `b12x.package`, its fingerprint, and `b12x.host`, canonical JSON of what else
b12x's names of programs hold that is not of one GPU. Values of variables are among it, as far as they enter those names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kcache import digest
from kcache.documents import Reader
from kcache.errors import KcacheError, ProbeError
from kcache.kernel_facts import parse_wheel
from kcache.key import Environment, Fact, known, undetermined
from kcache.kinds.b12x_key import Target, environment_key
from kcache.kinds.b12x_package import find_package
from kcache.probe.host import Host
from kcache.workflows.b12x_target import host_package, host_target

PACKAGE, HOST = "b12x.package", "b12x.host"

_BAD = "what the saved environment says of its b12x is not what kcache writes"


def b12x_facts(host: Host, environ: Mapping[str, str]) -> dict[str, Fact]:
    """The facts of a host; none where it has no b12x.

    Args:
        environ: of the process that will use b12x.
    """
    interpreter = host.paths.interpreter
    if find_package(interpreter.search_path) is None:
        return {}
    machine = host.environment.fact("platform.machine").value or ""
    try:
        package = host_package(interpreter)
        # No GPU enters these facts: any will do.
        target = host_target(interpreter, package, machine=machine, capability=(0, 0), sm_count=0, environ=environ)
    except KcacheError as error:
        why = f"{error.what}: {error.why}" if error.why else error.what
        return {PACKAGE: undetermined(why), HOST: undetermined(why)}
    document = {
        "implementation": target.implementation,
        "python": list(target.python),
        "abi": target.abi,
        "versions": dict(target.versions),
        "torch_cuda": target.torch_cuda,
        "wheels": {name: wheel.to_json() for name, wheel in target.wheels.items()},
        "variables": {name: text for name, text in environment_key(environ) if name in environ},
    }
    return {PACKAGE: known(package.fingerprint), HOST: known(digest.canonical_json(document).decode())}


def saved_target(environment: Environment, capability: tuple[int, int], sm_count: int) -> Target:
    """What b12x's keys see of a saved environment, for a GPU that its key was matched for.

    Raises:
        ProbeError: it was saved without b12x, by a kcache that does not say, or its b12x could not be found out.
    """
    package, host = environment.fact(PACKAGE), environment.fact(HOST)
    if not package.known or not host.known:
        raise ProbeError(
            "the saved environment does not say which b12x it has",
            why=(package if package.undetermined else host).undetermined or "it is absent",
            remedy="Save it anew with `kcache env --save` where b12x is installed.",
        )
    reader = Reader()
    try:
        document: dict[str, Any] = json.loads(host.value or "")
        wheels = {name: parse_wheel(wheel, f"wheels.{name}", reader) for name, wheel in document["wheels"].items()}
        major, minor, micro = document["python"]
        target = Target(
            machine=environment.fact("platform.machine").value or "",
            implementation=document["implementation"],
            python=(major, minor, micro),
            abi=document["abi"],
            versions=document["versions"],
            torch_cuda=document["torch_cuda"],
            wheels=wheels,
            fingerprint=package.value or "",
            capability=capability,
            sm_count=sm_count,
            environ=document["variables"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProbeError(_BAD, why=repr(error)[:200]) from error
    if reader.problems:
        raise ProbeError(_BAD, why=reader.problems[0])
    return target
