"""Every known reason why a restored cache would not be used on this host, each with its remedy.

Checks are functions from what was probed to findings; they change nothing and import nothing of the server. A finding of
severity `error` stops the use of the cache (or FlashInfer itself); a `warning` makes it smaller or slower than it could be.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from kcache import fsops, match
from kcache.errors import TrustError
from kcache.key import ABSENT
from kcache.probe import cuda, gpus, packages
from kcache.probe.caches import cache_root, is_noexec
from kcache.probe.host import Host, resolve
from kcache.probe.libraries import DRIVER_LIBRARY, TVM_FFI_LIBRARY
from kcache.workflows import doctor_system
from kcache.workflows.doctor_kernels import check_compiler, check_kernel_switches
from kcache.workflows.doctor_trust import check_policy
from kcache.workflows.findings import ERROR, WARNING, Finding, Patient
from kcache.workflows.target import TargetRequest, find_host


def examine(request: TargetRequest, environ: Mapping[str, str]) -> tuple[Finding, ...]:
    """All findings for a server that the request's Python starts with this environment, errors first.

    Raises:
        ProbeError, UsageError: the Python cannot be asked, or a described architecture is none.
    """
    host = find_host(request, environ)
    patient = Patient(host=host, cache=cache_root(environ, os.geteuid()), environ=environ)
    findings = [finding for check in CHECKS for finding in check(patient)]
    return tuple(sorted(findings, key=lambda finding: finding.severity != ERROR))


def check_packages(patient: Patient) -> Iterator[Finding]:
    """FlashInfer and what it cannot do without."""
    for name, distribution in (("flashinfer", "flashinfer-python"), ("torch", "torch"), ("tvm_ffi", "apache-tvm-ffi")):
        fact = patient.fact(f"{name}.version")
        if not fact.known:
            yield Finding(
                code=f"{name.replace('_', '-')}-missing",
                severity=ERROR,
                what=f"{distribution} is {fact.describe()} for {patient.host.paths.interpreter.executable}",
                remedy=f"Install {distribution}, or name the server's Python with --python.",
            )


def check_companions(patient: Patient) -> Iterator[Finding]:
    """flashinfer-jit-cache and flashinfer-cubin must be of FlashInfer's own version (case B27)."""
    version = patient.fact("flashinfer.version").value
    if version is None:
        return
    for name, package in (("flashinfer-jit-cache", patient.host.paths.jit_cache), ("flashinfer-cubin", patient.host.paths.cubin)):
        found = _companion_version(patient.host, name, package)
        if found is None or found == version or (name == "flashinfer-jit-cache" and found.startswith(f"{version}+")):
            continue
        yield Finding(
            code="companion-version",
            severity=ERROR if _stops_import(patient) else WARNING,
            what=f"{name} is {found}, flashinfer-python is {version}: {_effect(patient)}",
            remedy=f"Install {name}=={version} or uninstall it.",
        )


def _companion_version(host: Host, name: str, package: str | None) -> str | None:
    """The version of the distribution; of a package without one (on PYTHONPATH, say) what it says itself."""
    distribution = host.paths.packages.distribution(name)
    if distribution is not None:
        return distribution.version
    for file in ("_build_meta.py", "__init__.py") if package is not None else ():
        try:
            if version := packages.assigned_text(f"{package}/{file}", "__version__"):
                return version
        except OSError:
            continue
    return None


def _stops_import(patient: Patient) -> bool:
    """Up to 0.7.2 FlashInfer's import raises on a difference, from 0.7.4 on it warns and goes on (jit/env.py says which)."""
    if patient.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        return False
    try:
        return "Ignoring incompatible" not in Path(f"{patient.host.paths.flashinfer}/jit/env.py").read_text(encoding="utf-8")
    except OSError:
        return True


def _effect(patient: Patient) -> str:
    if patient.environ.get("FLASHINFER_DISABLE_VERSION_CHECK"):
        return (
            "FLASHINFER_DISABLE_VERSION_CHECK=1 makes FlashInfer load kernels of another version; it does not relax kcache's "
            "matching, which uses none of them"
        )
    if _stops_import(patient):
        return (
            "FlashInfer's import stops. FLASHINFER_DISABLE_VERSION_CHECK=1 would hide this and does not relax kcache's matching"
        )
    return "FlashInfer ignores it. FLASHINFER_DISABLE_VERSION_CHECK=1 would hide this and does not relax kcache's matching"


def check_archs(patient: Patient) -> Iterator[Finding]:
    """Some architecture must be known, and the list that FlashInfer obeys must fit the GPUs that are here."""
    source = patient.fact("gpu.source")
    if source.undetermined or not patient.environment.archs:
        yield Finding(
            code="no-arch",
            severity=ERROR,
            what=source.undetermined or "no GPU is visible, and no architecture is named",
            remedy="Give the container a GPU, or name the architecture: --arch 9.0a, or FLASHINFER_CUDA_ARCH_LIST=9.0a.",
        )
        return
    if source.value == gpus.ARCH_LIST:
        yield from _check_list(patient)


def _check_list(patient: Patient) -> Iterator[Finding]:
    listed = patient.environment.archs
    release = cuda.naming_release(cuda.toolkit_release(patient.environ), patient.fact("torch.cuda"))
    here = gpus.choose_archs(described=(), listed=None, gpus=patient.host.gpus, release=lambda: release).archs
    lacking = [arch for arch in here if all(match.arch_score(name, arch) is None for name in listed)]
    idle = [name for name in listed if here and all(match.arch_score(name, arch) is None for arch in here)]
    value = patient.environ.get(gpus.ARCH_LIST, "")
    if lacking:
        yield Finding(
            code="arch-list",
            severity=ERROR,
            what=f"{gpus.ARCH_LIST}={value} names nothing that runs on {', '.join(lacking)}, which is here",
            remedy=f"Unset {gpus.ARCH_LIST}; FlashInfer then asks the GPUs.",
        )
    elif idle:
        yield Finding(
            code="arch-list",
            severity=WARNING,
            what=f"{gpus.ARCH_LIST}={value} names {', '.join(idle)}, which no GPU here is; a module must serve all to be used",
            remedy=f"Unset {gpus.ARCH_LIST}, or name only the GPUs that are here.",
        )


def check_cache(patient: Patient) -> Iterator[Finding]:
    """There must be a place to install to, that only we can write and that libraries can be loaded from."""
    cache = patient.cache
    if cache.path is None:
        yield Finding(
            code="no-cache-root",
            severity=ERROR,
            what=f"{cache.reason}: {'; '.join(cache.rejected)}",
            remedy="Mount a writable volume and set KCACHE_DIR to a directory on it.",
        )
        return
    if cache.exports:
        settings = " ".join(f"{name}={value}" for name, value in cache.exports.items())
        yield Finding(
            code="home",
            severity=WARNING,
            what=f"FlashInfer cannot start with this environment as it is ({'; '.join(cache.rejected) or 'no home directory'})",
            remedy=f"`kcache restore -- CMD` sets what is missing; without it set {settings} for the server.",
        )
    existing = next(path for path in (Path(cache.path), *Path(cache.path).parents) if path.exists())
    if is_noexec(str(existing)):
        yield Finding(
            code="noexec",
            severity=ERROR,
            what=f"{cache.path} is on a file system mounted noexec: no library can be loaded from it",
            remedy="Set KCACHE_DIR to a directory on another file system, or mount this one with exec.",
        )
    for directory in (Path(cache.path), Path(cache.path) / "v1"):
        if directory.is_symlink() or directory.exists():
            try:
                fsops.check_root(directory)
            except TrustError as error:
                yield Finding(code="untrusted-root", severity=ERROR, what=f"{error.what}: {error.why}", remedy=error.remedy)


def check_shadows(patient: Patient) -> Iterator[Finding]:
    """From 0.7 on FlashInfer takes `data/aot` of its own package before any provider (jit/env.py, get_aot_artifacts, 0.7.4)."""
    package, version = patient.host.paths.flashinfer, patient.fact("flashinfer.version").value or ""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if package is None or numbers is None or (int(numbers[1]), int(numbers[2])) < (0, 7):
        return
    found = sorted(path.stem for path in Path(package, "data", "aot").glob("*/*.so") if path.stem == path.parent.name)
    if found:
        named = ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        yield Finding(
            code="aot-shadow",
            severity=WARNING,
            what=f"flashinfer/data/aot holds {named}: FlashInfer takes these, unchecked, before what kcache restores",
            remedy=f"Remove them from {package}/data/aot, unless `kcache restore --into-package` put them there.",
        )


def check_variables(patient: Patient) -> Iterator[Finding]:
    """Variables that change what FlashInfer does with what was restored."""
    if patient.environ.get("FLASHINFER_DISABLE_JIT"):
        yield Finding(
            code="jit-disabled",
            severity=WARNING,
            what="FLASHINFER_DISABLE_JIT is set: a module that was not restored raises MissingJITCacheError, none is built",
            remedy="Unset it, unless that is what is wanted; `kcache verify` sets it by itself.",
        )
    flags = ("FLASHINFER_EXTRA_CFLAGS", "FLASHINFER_EXTRA_CUDAFLAGS", "FLASHINFER_EXTRA_LDFLAGS")
    if present := [name for name in flags if patient.environ.get(name)]:
        yield Finding(
            code="build-flags",
            severity=WARNING,
            what=f"{', '.join(present)} is set: restored modules were built without these flags",
            remedy="Unset it, or build entries with the same flags and name them yourself.",
        )


def check_libraries(patient: Patient) -> Iterator[Finding]:
    """What every module needs: a CUDA runtime, the driver, tvm-ffi's library, and a C library that was understood."""
    runtime = patient.fact("cuda.runtime")
    major = (runtime.value or "").partition(".")[0]
    if not runtime.known:
        yield Finding(
            code="no-cuda-runtime",
            severity=ERROR,
            what=f"the CUDA runtime is {runtime.describe()}",
            remedy="Install a CUDA build of torch, or the wheel nvidia-cuda-runtime.",
        )
    sonames = {DRIVER_LIBRARY: "no-driver"} if patient.environment.archs else {}
    if major:
        sonames[f"libcudart.so.{major}"] = "no-cuda-runtime"
    if patient.fact("tvm_ffi.version").known:
        sonames[TVM_FFI_LIBRARY] = "tvm-ffi-missing"
    resolved = resolve(patient.host, sonames=sonames, source_paths=())
    for soname, code in sonames.items():
        if resolved.library(soname) == ABSENT:
            yield Finding(
                code=code,
                severity=ERROR,
                what=f"the server's loader finds no {soname}, which every module needs",
                remedy=_LIBRARY_REMEDY[code],
            )
    if patient.fact("libc.version").undetermined:
        yield Finding(
            code="libc",
            severity=ERROR,
            what=f"the version of the C library {patient.fact('libc.version').describe()}",
            remedy="Use an image with glibc: FlashInfer's own dependencies need it too.",
        )


_LIBRARY_REMEDY = {
    "no-cuda-runtime": "Install a CUDA build of torch, or add the runtime's directory to LD_LIBRARY_PATH.",
    "tvm-ffi-missing": "Reinstall apache-tvm-ffi.",
    "no-driver": "Start the container with the GPU driver (--gpus all, or the device plugin's resource).",
}

CHECKS: tuple[Callable[[Patient], Iterator[Finding]], ...] = (
    check_packages,
    check_companions,
    check_archs,
    check_cache,
    check_shadows,
    check_variables,
    check_libraries,
    check_kernel_switches,
    check_compiler,
    *doctor_system.CHECKS,
    check_policy,
)
