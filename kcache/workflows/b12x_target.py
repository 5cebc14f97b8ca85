"""The host's b12x as its keys see it: package, compiler, torch, GPU, environment. Reads files; imports nothing of them."""

from __future__ import annotations

from collections.abc import Mapping

from kcache.errors import ProbeError
from kcache.gpu_products import GpuProduct
from kcache.kinds.b12x_key import DISTRIBUTIONS, Target
from kcache.kinds.b12x_package import B12xPackage, find_package, read_package
from kcache.probe.packages import Interpreter, scan, torch_facts
from kcache.probe.wheels import compiler_wheels


def host_package(interpreter: Interpreter) -> B12xPackage:
    """The b12x that this Python imports.

    Raises:
        ProbeError: there is none, it cannot be read, or its rule for keys is not known.
    """
    found = find_package(interpreter.search_path)
    if found is None:
        raise ProbeError("no b12x is installed", why=f"{interpreter.executable} would not find it", remedy="Install b12x.")
    return read_package(found[0], embedded=found[1])


def host_target(
    interpreter: Interpreter,
    package: B12xPackage,
    *,
    machine: str,
    capability: tuple[int, int],
    sm_count: int,
    environ: Mapping[str, str],
) -> Target:
    """What b12x's keys and kcache's rules see of a host.

    Args:
        capability, sm_count: of the GPU that its programs are for (`GpuProduct`, or the probe of the host's own).
        environ: of the process that will use b12x.

    Raises:
        ProbeError: its Python or torch does not say its version.
    """
    packages = scan(interpreter.search_path)
    distributions = {name: packages.distribution(name) for name in DISTRIBUTIONS}
    cuda = torch_facts(packages.package("torch"))["torch.cuda"]
    try:
        major, minor, micro = (int(part) for part in interpreter.version.split("."))
    except ValueError as error:
        raise ProbeError("this Python's version is not a final one", why=interpreter.version) from error
    if cuda.undetermined:
        raise ProbeError("what torch was built for could not be found out", why=cuda.undetermined)
    return Target(
        machine=machine,
        implementation=interpreter.cache_tag.partition("-")[0],
        python=(major, minor, micro),
        abi=interpreter.abi,
        versions={name: found.version for name, found in distributions.items() if found is not None},
        torch_cuda=cuda.value or "",
        wheels=compiler_wheels(packages),
        fingerprint=package.fingerprint,
        capability=capability,
        sm_count=sm_count,
        environ=environ,
    )


def described_target(
    interpreter: Interpreter, package: B12xPackage, gpu: GpuProduct, *, machine: str, environ: Mapping[str, str]
) -> Target:
    """`host_target` for a described GPU."""
    return host_target(interpreter, package, machine=machine, capability=gpu.capability, sm_count=gpu.sm_count, environ=environ)
