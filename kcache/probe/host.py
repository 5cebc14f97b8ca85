"""What this host is, as one `Environment`: the facts that matching needs, found out cheaply.

On the path of every restore: nothing of the target is imported, no compiler is run where a file says the same, no CUDA context
is made. `probe_host` finds what every look-up needs; `resolve` adds, for the entries that are left, the libraries and source
files that their manifests name. Facts that only people need are added by `describe_host`.
"""

# On the path of every restore strings and os.path take a fifth of pathlib's time.
# ruff: noqa: PTH119
from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kcache import digest
from kcache.key import ABSENT, Environment, Fact, known, undetermined
from kcache.match import compiler_facts, sm_count_fact
from kcache.probe import cuda, gpus, libraries, packages
from kcache.probe.caches import cache_root, read_only_cache
from kcache.probe.libraries import Process
from kcache.probe.packages import Interpreter, Packages
from kcache.values import dataclass, replace

SOURCE_DIRECTORIES = ("data/csrc", "data/include", "data/cutlass", "data/cccl", "data/spdlog")
"""Where FlashInfer's modules take sources and headers from (jit/env.py, 0.7.4), inside the package."""

NO_RECIPES = ("data", "experimental")
"""Directories of the package whose Python files neither say how a module is compiled nor are compiled by CuTe-DSL for a kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPaths:
    """Where things lie on this host: for callers, never part of a key or of a saved document.

    interpreter: the Python of the server.
    packages:    what is installed for it; views that kcache made for FlashInfer are left out.
    flashinfer:  the directory of the flashinfer package, or None.
    jit_cache:   the directory of a real flashinfer_jit_cache package, or None.
    cubin:       the directory of the flashinfer_cubin package, or None.
    process:     the server's process, to look for libraries with.
    """

    interpreter: Interpreter
    packages: Packages
    flashinfer: str | None
    jit_cache: str | None
    cubin: str | None
    process: Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """This host: what matching sees, and what callers need beside it."""

    environment: Environment
    paths: HostPaths
    gpus: gpus.GpuReport


def probe_host(*, python: str | None, described_archs: Sequence[str], environ: Mapping[str, str]) -> Host:
    """Finds out what this host is, without libraries and sources.

    Args:
        python: path of the server's Python; None for the one that runs kcache.
        described_archs: architectures named by `--arch`, in any spelling; then GPUs here do not count.
        environ: the environment that the server will have.

    Raises:
        ProbeError: the Python given cannot be asked.
        UsageError: a described architecture is none.
    """
    interpreter = packages.this_interpreter() if python is None else packages.interpreter_at(python, environ)
    installed = packages.scan(_without_own_views(interpreter.search_path, environ))
    flashinfer, torch = installed.package("flashinfer"), installed.package("torch")
    facts = {**packages.flashinfer_facts(flashinfer), **packages.torch_facts(torch)}
    process = Process(
        executable=interpreter.executable,
        machine=os.uname().machine,
        environ=environ,
        search_path=installed.search_path,
        torch=torch,
        torch_cuda=facts["torch.cuda"].value,
        tvm_ffi=installed.package("tvm_ffi"),
    )
    paths = HostPaths(
        interpreter=interpreter,
        packages=installed,
        flashinfer=flashinfer,
        jit_cache=installed.package("flashinfer_jit_cache"),
        cubin=installed.package("flashinfer_cubin"),
        process=process,
    )
    report = gpus.find_gpus(environ, process.find(gpus.NVML_LIBRARY))
    facts["cuda.runtime"] = cuda_runtime(facts["torch.cuda"], installed, process)
    described_for = facts["cuda.runtime"] if described_archs else ABSENT
    chosen = gpus.choose_archs(
        described=described_archs,
        listed=environ.get(gpus.ARCH_LIST),
        gpus=report,
        release=lambda: cuda.naming_release(cuda.toolkit_release(environ), facts["torch.cuda"], described_for),
    )
    facts |= _machine_facts(interpreter)
    facts |= libraries.libstdcxx_facts(process.find("libstdc++.so.6"))
    facts |= {"gpu.names": report.names, "gpu.source": chosen.source, "driver.version": report.driver}
    facts |= {sm_count_fact(arch): gpus.sm_counts(report.gpus, arch) for arch in chosen.archs}
    facts |= package_facts(installed)
    return Host(environment=Environment(facts=facts, archs=chosen.archs), paths=paths, gpus=report)


def _without_own_views(search_path: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """The search path without the packages that kcache itself made for FlashInfer: they are not what was installed."""
    roots = (cache_root(environ, os.geteuid()).path, read_only_cache(environ))
    own = tuple(f"{root}/v1/site/" for root in roots if root is not None)
    return [entry for entry in search_path if not entry.startswith(own)]


def _machine_facts(interpreter: Interpreter) -> dict[str, Fact]:
    system = os.uname()
    return {
        "platform.machine": known(system.machine),
        "platform.system": known(system.sysname),
        "python.version": known(interpreter.version),
        "python.abi": known(interpreter.abi),
        **libraries.libc_facts(interpreter.libc),
    }


def package_facts(installed: Packages) -> dict[str, Fact]:
    return {
        "tvm_ffi.version": packages.tvm_ffi_version(installed),
        "flashinfer_jit_cache.version": packages.distribution_version(installed, "flashinfer-jit-cache"),
        "flashinfer_cubin.version": packages.distribution_version(installed, "flashinfer-cubin"),
    }


_RUNTIME_WHEELS = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12")
_RUNTIME_SONAMES = ("libcudart.so.13", "libcudart.so.12")


def cuda_runtime(torch_cuda: Fact, installed: Packages, process: Process) -> Fact:
    """The release of the CUDA runtime that the server would use: torch's, else the runtime wheel's, else the system's.

    A CUDA build of torch has loaded its libcudart before anything else asks for one. Of a system's library sometimes only the
    major is known (`13`), which is what is matched.
    """
    if torch_cuda.known:
        return torch_cuda
    for name in _RUNTIME_WHEELS:
        distribution = installed.distribution(name)
        if distribution and (found := re.match(r"\d+\.\d+", distribution.version)):
            return known(found[0])
    for soname in _RUNTIME_SONAMES:
        if path := process.find(soname):
            version = os.path.basename(os.path.realpath(process.seen(path))).partition(".so.")[2]
            return known(".".join(version.split(".")[:2]))
    return ABSENT


def resolve(
    host: Host, *, sonames: Iterable[str], source_paths: Iterable[str], seen: dict[str, os.stat_result] | None = None
) -> Environment:
    """The host's environment with the libraries and source files that entries name.

    Args:
        sonames: libraries, such as `libcudart.so.13`.
        source_paths: paths inside the flashinfer package, with `/`; exactly these are hashed.
        seen: takes in what each of these files was before it was read.
    """
    environment = host.environment
    found = libraries.library_facts(host.paths.process, sonames, driver_expected=driver_expected(host))
    sources = hash_sources(host.paths.flashinfer, source_paths, seen)
    return replace(environment, libraries={**environment.libraries, **found}, sources={**environment.sources, **sources})


def driver_expected(host: Host) -> bool:
    """Whether the driver's library is still to come: an architecture is named, and there is neither a GPU nor a driver here."""
    return bool(host.environment.archs) and not host.gpus.gpus and not host.gpus.problem and host.gpus.driver.absent


def hash_sources(package: str | None, paths: Iterable[str], seen: dict[str, os.stat_result] | None = None) -> dict[str, Fact]:
    """path -> digest of the file inside the flashinfer package; absent where there is no such file. `seen` is that of `resolve`.

    In one thread: 1,500 files of 16 MB in all take 24 ms, with two threads 34 ms.
    """
    found = {} if seen is None else seen
    return {path: _hash_source(package, path, found) for path in paths}


def _hash_source(package: str | None, path: str, seen: dict[str, os.stat_result]) -> Fact:
    if package is None:
        return ABSENT
    try:
        sha256, seen[path] = _digest(f"{package}/{path}")
        return known(sha256)
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError as error:
        return undetermined(f"cannot be read: {error.strerror}")


def _digest(path: str) -> tuple[str, os.stat_result]:
    """`kcache.digest.of_file`'s digest in half its time: a source is read at once, into no more memory than it needs."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        data = os.read(descriptor, found.st_size + 1)
        hasher = hashlib.sha256(data)
        if len(data) != found.st_size:  # it changed meanwhile, or is no plain file
            while data := os.read(descriptor, digest.CHUNK):
                hasher.update(data)
        return f"sha256:{hasher.hexdigest()}", found
    finally:
        os.close(descriptor)


def describe_host(host: Host, toolkit: Fact | None = None) -> Environment:
    """The whole environment for people and for `--save`: every FlashInfer source, cutlass-dsl by content. Takes seconds.

    Args:
        toolkit: the CUDA toolkit's release; None to look for one on this host.
    """
    sources = hash_sources(host.paths.flashinfer, sorted(_source_files(host.paths.flashinfer)))
    facts = dict(host.environment.facts)
    facts["cuda.toolkit"] = cuda.toolkit_release(host.paths.process.environ) if toolkit is None else toolkit
    facts["flashinfer.tree"] = _tree_digest(host.paths.flashinfer, sources)
    facts |= compiler_of(host)
    found = libraries.library_facts(
        host.paths.process, _usual_sonames(host.paths.process.machine), driver_expected=driver_expected(host)
    )
    return replace(host.environment, facts=facts, libraries={**host.environment.libraries, **found}, sources=sources)


def _usual_sonames(machine: str) -> tuple[str, ...]:
    """What FlashInfer's modules need in all, as built with CUDA 12 and 13 (jit/cpp_ext.py and the ldflags of modules, 0.7.4)."""
    system = "libc.so.6 libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1 libgcc_s.so.1 libstdc++.so.6 libgomp.so.1"
    loader = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}.get(machine, "")
    ours = "libcuda.so.1 libtvm_ffi.so"
    runtime = " ".join(
        f"libcudart.so.{major} libcublas.so.{major} libcublasLt.so.{major} libnvrtc.so.{major}" for major in (12, 13)
    )
    return tuple(f"{system} {loader} {ours} {runtime} libcurand.so.10 libnvidia-ml.so.1".split())


def compiler_of(host: Host) -> dict[str, Fact]:
    """CuTe-DSL's compiler, by content: the facts that entries of its kernels ask for (`kcache.match.compiler_facts`)."""
    from kcache.probe.wheels import compiler_wheels

    return compiler_facts(compiler_wheels(host.paths.packages))


def _tree_digest(package: str | None, sources: Mapping[str, Fact]) -> Fact:
    if package is None:
        return ABSENT
    if unread := [path for path, fact in sources.items() if not fact.known]:
        return undetermined(f"{unread[0]} could not be read")
    return known(digest.of_document({path: fact.value for path, fact in sources.items()}))


def _source_files(package: str | None) -> Iterator[str]:
    """Every file that may decide what a module becomes, by its path inside the flashinfer package."""
    if package is None:
        return
    yield from _python_files(package)
    for directory in SOURCE_DIRECTORIES:
        # Editable installs of FlashInfer link data/ to its source tree; links below that are followed by the compiler as well.
        for where, folders, names in os.walk(f"{package}/{directory}", followlinks=True):
            folders[:] = [folder for folder in folders if folder not in ("__pycache__", ".git")]
            inside = where[len(package) + 1 :]
            yield from (f"{inside}/{name}" for name in names)


def _python_files(package: str) -> Iterator[str]:
    """The Python files that say how a module is compiled, and those that CuTe-DSL compiles."""
    for where, folders, names in os.walk(package):
        inside = where[len(package) + 1 :]
        folders[:] = [folder for folder in folders if folder != "__pycache__" and (inside or folder not in NO_RECIPES)]
        yield from (f"{inside}/{name}" if inside else name for name in names if name.endswith(".py"))
