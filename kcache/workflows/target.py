"""The environment that a command works for: this host, or one that was saved by `kcache env --save`.

The one place where probing and matching meet: it brings each manifest the facts that its rules ask for, and remembers digests of
FlashInfer's files by identity so that a second restore reads none of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from kcache import digest
from kcache.documents import decode
from kcache.errors import ProbeError, UsageError
from kcache.key import Environment, Fact, known, parse_environment, undetermined
from kcache.local_cache import LocalCache, SourceMemo
from kcache.manifest import Manifest
from kcache.match import Decision, match_binary, requirements, sm_count_fact
from kcache.probe.host import Host, resolve
from kcache.values import dataclass, replace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from kcache.gpu_products import GpuProduct
    from kcache.kinds.cute_dsl import Target as KernelTarget
    from kcache.probe.caches import CacheRoot
    from kcache.tuning_facts import TuningHost
    from kcache.workflows.b12x_host import B12xHost

ENVIRONMENT_BYTES = 64 << 20

PRODUCT = "gpu.product"
"""The fact that holds the name, as CUDA reports it, of the one GPU product that was described; there only where one was."""


class Target:
    """One environment.

    environment: its facts and architectures.
    python:      the interpreter that will import FlashInfer; empty for a saved environment.
    exports:     variables that a server needs whatever is restored (an unusable HOME, say).
    base:        what FLASHINFER_WORKSPACE_BASE is, or has to be; None where that is not known.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        host: Host | None = None,
        exports: Mapping[str, str] | None = None,
        base: str | None = None,
    ) -> None:
        self.environment = environment
        self.base = base
        self.exports = dict(exports or {})
        self._host = host
        self._memo: SourceMemo | None = None
        self._cache: LocalCache | None = None
        self._libraries = dict(environment.libraries)
        self._compiler_facts: Mapping[str, Fact] = {}
        self._b12x: B12xHost | None = None
        self._tuning_host: TuningHost | ProbeError | None = None
        self.python = host.paths.interpreter.executable if host is not None else ""

    @property
    def is_here(self) -> bool:
        """Whether this is the host that kcache runs on, and not one that was saved elsewhere."""
        return self._host is not None

    def remember_in(self, cache: LocalCache) -> None:
        """Uses the cache's memos of what files are from now on."""
        self._cache = cache
        if self._host is not None and self._host.paths.flashinfer is not None:
            self._memo = SourceMemo(cache, Path(self._host.paths.flashinfer))

    def save_memory(self) -> None:
        """Keeps the digests that were worked out since; best effort."""
        if self._memo is not None:
            self._memo.save()

    @property
    def id(self) -> str:
        """Sixteen hex digits that name this environment below a cache root: its FlashInfer, its Python and its GPUs."""
        place = self._host.paths.flashinfer if self._host is not None else ""
        facts = self.environment.facts
        named = {name: fact.to_json() for name, fact in facts.items() if name in ("flashinfer.version", "python.abi")}
        document = {"flashinfer": place, "facts": named, "archs": list(self.environment.archs)}
        return digest.of_document(document).removeprefix("sha256:")[:16]

    def index_ingredients(self) -> dict[str, str]:
        """The ingredients that name an index.

        Raises:
            ProbeError: one of them is absent or could not be found out.
        """
        facts = {
            "flashinfer.version": ("flashinfer.version", "Install flashinfer-python, or name the server's Python with --python."),
            "platform.machine": ("platform.machine", ""),
            "cuda.release": ("cuda.runtime", "Install a CUDA build of torch, or the CUDA runtime."),
        }
        ingredients = {}
        for ingredient, (name, remedy) in facts.items():
            fact = self.environment.fact(name)
            if not fact.known or fact.value is None:
                raise ProbeError(f"{name} is {fact.describe()}", why="no entry can be chosen without it", remedy=remedy)
            ingredients[ingredient] = fact.value
        return ingredients

    def facts_for(self, manifest: Manifest) -> Environment:
        """The environment with the libraries and sources that a manifest asks for."""
        if self._host is None:
            return self.environment
        needed = requirements([manifest])
        recalled = self._memo.recall(needed.sources) if self._memo is not None else {}
        unread = [path for path in needed.sources if path not in recalled]
        unseen = [soname for soname in needed.sonames if soname not in self._libraries]
        seen: dict[str, os.stat_result] = {}
        resolved = resolve(self._host, sonames=unseen, source_paths=unread, seen=seen)
        self._libraries |= resolved.libraries
        if self._memo is not None:
            self._memo.remember({path: fact.value for path, fact in resolved.sources.items() if fact.value is not None}, seen)
        sources = {**resolved.sources, **{path: known(sha256) for path, sha256 in recalled.items()}}
        facts = {**self.environment.facts, **self._compiler()} if needed.compiler else self.environment.facts
        return replace(self.environment, facts=facts, libraries=self._libraries, sources=sources)

    def decide(self, manifest: Manifest, *, strict: bool = False) -> Decision:
        """Whether what a manifest says of its binaries fits this environment, each layout by its own rules.

        Raises:
            KcacheError: the manifest says something that is not known.
        """
        if manifest.programs is not None:
            from kcache.workflows.b12x_host import decide

            return decide(self.b12x() or self.environment, manifest, strict=strict)
        if manifest.tunings is not None:
            from kcache.workflows.tunings import decide as decide_tunings

            return decide_tunings(self, manifest.tunings, strict=strict)
        return match_binary(manifest, self.facts_for(manifest), strict=strict)

    def tuning_host(self) -> TuningHost:
        """What FlashInfer's tuner would write of this environment, asked once.

        Raises:
            ProbeError: this is a saved environment, or FlashInfer is not there or keys its results in another way.
        """
        if self._tuning_host is None:
            try:
                self._tuning_host = self._ask_tuning_host()
            except ProbeError as error:
                self._tuning_host = error
        if isinstance(self._tuning_host, ProbeError):
            raise self._tuning_host
        return self._tuning_host

    def _ask_tuning_host(self) -> TuningHost:
        if self._host is None:
            raise ProbeError(
                "a saved environment does not say what FlashInfer's tuner would write", remedy="Ask on the host that will tune."
            )
        from kcache.workflows.tuning_host import tuning_host

        return tuning_host(self._host, gpu=self.environment.facts.get(PRODUCT))

    @property
    def flashinfer_package(self) -> str | None:
        """The directory of the flashinfer package that the target's Python imports."""
        return self._host.paths.flashinfer if self._host is not None else None

    @property
    def process_environ(self) -> dict[str, str]:
        """The variables that a server of this host will have: its own, and those that kcache exports."""
        return {**(self._host.paths.process.environ if self._host is not None else {}), **self.exports}

    def has_package(self, name: str) -> bool:
        """Whether the target's Python would import a package of this name."""
        return self._host is not None and self._host.paths.packages.package(name) is not None

    def b12x(self) -> B12xHost | None:
        """The b12x that this environment's Python would import, asked when it is looked at; None for a saved environment."""
        if self._b12x is None and self._host is not None:
            from kcache.workflows.b12x_host import B12xHost

            self._b12x = B12xHost(self._host, self.process_environ, self._cache)
        return self._b12x

    def _compiler(self) -> Mapping[str, Fact]:
        """CuTe-DSL's compiler by content, found out once."""
        if not self._compiler_facts and self._host is not None:
            from kcache.probe.host import compiler_of

            self._compiler_facts = compiler_of(self._host)
        return self._compiler_facts

    def preload(self) -> list[str]:
        """Libraries that entries need and that a server's torch has loaded by then; for `kcache verify`."""
        names = ("libcudart.", "libcublas", "libcurand.", "libnvrtc.")
        return [fact.value for name, fact in sorted(self._libraries.items()) if name.startswith(names) and fact.value]

    def aot_directory(self) -> Path:
        """`data/aot` of the target's flashinfer package (flashinfer/jit/env.py, FLASHINFER_AOT_DIR, 0.7.4)."""
        if self._host is None or self._host.paths.flashinfer is None:
            raise UsageError("there is no flashinfer package to copy into", remedy="Restore without --into-package.")
        return Path(self._host.paths.flashinfer) / "data" / "aot"

    def cached_ops(self) -> Path:
        """FlashInfer's JIT directory on this host (jit/env.py, FLASHINFER_JIT_DIR, 0.6.18 to 0.7.4).

        Raises:
            ProbeError: it is not known which one that is.
        """
        version, base = self.environment.fact("flashinfer.version").value, self.base
        if self._host is None or base is None or not version or not self.environment.archs:
            raise ProbeError("it is not known where FlashInfer's cache lies", remedy="Restore on the host that will use it.")
        return Path(base) / ".cache" / "flashinfer" / version / "_".join(self.environment.archs) / "cached_ops"

    def kernel_target(self, arch: str) -> KernelTarget:
        """What FlashInfer's rule for CuTe-DSL kernels depends on here.

        Args:
            arch: what they are compiled for, in CuTe-DSL's spelling.

        Raises:
            ProbeError: this is a saved environment, or there is no FlashInfer.
        """
        from kcache.kinds.cute_dsl import Target as KernelTarget

        if self._host is None or self._host.paths.flashinfer is None:
            raise ProbeError("there is no FlashInfer to place kernels for", remedy="Restore on the host that will use them.")
        interpreter = self._host.paths.interpreter
        return KernelTarget(
            package=self._host.paths.flashinfer,
            search_path=interpreter.search_path,
            cache_tag=interpreter.cache_tag,
            soabi=interpreter.abi,
            arch=arch,
            environ=self._host.paths.process.environ,
        )

    def shadowing(self, module: str) -> str | None:
        """The library in `data/aot` that FlashInfer would take before any provider's, if there is one."""
        if self._host is None or self._host.paths.flashinfer is None:
            return None
        path = self.aot_directory() / module / f"{module}.so"
        return str(path) if path.exists() else None

    @property
    def real_package(self) -> str | None:
        """The directory of an installed `flashinfer_jit_cache` that is not ours."""
        return self._host.paths.jit_cache if self._host is not None else None

    def real_modules(self) -> dict[str, str]:
        """module -> library of a real `flashinfer_jit_cache`, laid out as its wheels are: `jit_cache/<m>/<m>.so`."""
        if self.real_package is None:
            return {}
        libraries = Path(self.real_package, "jit_cache").glob("*/*.so")
        return {path.stem: str(path) for path in libraries if path.stem == path.parent.name}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRequest:
    """Which environment is meant: `env_file`, or this host as `python` sees it, with `archs` and `gpus` instead of its GPUs.

    gpus: names of GPU products (`kcache.gpu_products`); each is an architecture with an SM count.
    """

    python: str | None = None
    archs: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    env_file: str | None = None


def find_target(request: TargetRequest, environ: Mapping[str, str], root: CacheRoot | None = None) -> Target:
    """The target of a command.

    Args:
        root: the cache in force, for commands that put something into FlashInfer's own cache.

    Raises:
        UsageError: the request contradicts itself, names no GPU product, or a file that cannot be read.
        ProbeError: the Python cannot be asked. ManifestError: the file is no environment.
    """
    if request.env_file is not None:
        return Target(with_products(_saved(request), request), exports=root.exports if root else None)
    host = find_host(request, environ)
    return Target(host.environment, host=host, exports=root.exports if root else None, base=root.base if root else None)


def find_host(request: TargetRequest, environ: Mapping[str, str]) -> Host:
    """This host as the request sees it; for what a saved environment does not hold. Raises as `find_target`."""
    from kcache.probe.host import probe_host

    host = probe_host(python=request.python, described_archs=arch_names_of(request), environ=environ)
    return replace(host, environment=with_products(host.environment, request))


def read_environment(path: str) -> Environment:
    """An environment that `kcache env --save` wrote.

    Raises:
        UsageError: the file cannot be read. ManifestError: it is no environment.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(ENVIRONMENT_BYTES + 1)  # a file that never ends is too large, not out of memory
    except OSError as error:
        raise UsageError(f"{path} cannot be read", why=str(error.strerror)) from error
    return parse_environment(decode(data, path, ENVIRONMENT_BYTES))


def _saved(request: TargetRequest) -> Environment:
    """A saved environment, with the architectures that the request names instead."""
    assert request.env_file is not None
    environment = read_environment(request.env_file)
    if names := arch_names_of(request):
        from kcache.archs import flashinfer_arch
        from kcache.probe.cuda import naming_release

        facts = (environment.fact(name) for name in ("cuda.toolkit", "torch.cuda", "cuda.runtime"))
        release = naming_release(*facts) or (0, 0)
        environment = replace(environment, archs=tuple(sorted({flashinfer_arch(arch, release) for arch in names})))
    return environment


def arch_names_of(request: TargetRequest) -> tuple[str, ...]:
    """The architectures that a request names, those of its GPU products among them."""
    return (*request.archs, *(found.arch for found in _products(request)))


def _products(request: TargetRequest) -> list[GpuProduct]:
    if not request.gpus:
        return []
    from kcache.gpu_products import product

    return [product(name) for name in request.gpus]


def with_products(environment: Environment, request: TargetRequest) -> Environment:
    """The environment with the SM counts of the GPU products that the request describes, and the name of a single one."""
    from kcache.archs import capability

    products = _products(request)
    facts = dict(environment.facts)
    for arch in environment.archs if products else ():
        counts = sorted({found.sm_count for found in products if found.capability == capability(arch)})
        if counts:
            facts[sm_count_fact(arch)] = known(" ".join(map(str, counts)))
    if products:
        one = len(products) == 1
        facts[PRODUCT] = known(products[0].name) if one else undetermined("several GPU products are described")
    return replace(environment, facts=facts)
