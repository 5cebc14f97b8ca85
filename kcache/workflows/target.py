"""The environment that a command works for: this host, or one that was saved by `kcache env --save`.

The one place where probing and matching meet: it brings each manifest the facts that its rules ask for, and remembers digests of
FlashInfer's files by identity so that a second restore reads none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from kcache import digest
from kcache.documents import decode
from kcache.errors import ProbeError, UsageError
from kcache.fsops import Identity
from kcache.key import Environment, known, parse_environment
from kcache.local_cache import LocalCache, SourceMemo
from kcache.manifest import Manifest
from kcache.match import requirements
from kcache.probe.host import Host, resolve
from kcache.values import dataclass, replace

ENVIRONMENT_BYTES = 64 << 20


class Target:
    """One environment.

    environment: its facts and architectures.
    python:      the interpreter that will import FlashInfer; empty for a saved environment.
    exports:     variables that a server needs whatever is restored (an unusable HOME, say).
    """

    def __init__(self, environment: Environment, *, host: Host | None = None, exports: Mapping[str, str] | None = None) -> None:
        self.environment = environment
        self.exports = dict(exports or {})
        self._host = host
        self._memo: SourceMemo | None = None
        self._libraries = dict(environment.libraries)
        self.python = host.paths.interpreter.executable if host is not None else ""

    def remember_in(self, cache: LocalCache) -> None:
        """Uses the cache's memo of source digests from now on."""
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
        identities = self._identities(unread)
        unseen = [soname for soname in needed.sonames if soname not in self._libraries]
        resolved = resolve(self._host, sonames=unseen, source_paths=unread)
        self._libraries |= resolved.libraries
        read = {path: fact.value for path, fact in resolved.sources.items() if fact.value is not None and path in identities}
        if self._memo is not None and read:
            self._memo.remember(read, identities)
        sources = {**resolved.sources, **{path: known(sha256) for path, sha256 in recalled.items()}}
        return replace(self.environment, libraries=self._libraries, sources=sources)

    def _identities(self, paths: Iterable[str]) -> dict[str, Identity]:
        """Taken before the files are read, so that a change in between is noticed the next time."""
        package = self._host.paths.flashinfer if self._host is not None else None
        if package is None:
            return {}
        found = {path: Identity.of(f"{package}/{path}") for path in paths}
        return {path: identity for path, identity in found.items() if identity is not None}

    def preload(self) -> list[str]:
        """Libraries that entries need and that a server's torch has loaded by then; for `kcache verify`."""
        names = ("libcudart.", "libcublas", "libcurand.", "libnvrtc.")
        return [fact.value for name, fact in sorted(self._libraries.items()) if name.startswith(names) and fact.value]

    def aot_directory(self) -> Path:
        """`data/aot` of the target's flashinfer package (flashinfer/jit/env.py, FLASHINFER_AOT_DIR, 0.7.4)."""
        if self._host is None or self._host.paths.flashinfer is None:
            raise UsageError("there is no flashinfer package to copy into", remedy="Restore without --into-package.")
        return Path(self._host.paths.flashinfer) / "data" / "aot"

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
    """Which environment is meant: `env_file`, or this host as `python` sees it, with `archs` instead of its GPUs."""

    python: str | None = None
    archs: tuple[str, ...] = ()
    env_file: str | None = None


def find_target(request: TargetRequest, environ: Mapping[str, str], exports: Mapping[str, str] | None = None) -> Target:
    """The target of a command.

    Raises:
        UsageError: the request contradicts itself or names a file that cannot be read. ProbeError: the Python cannot be asked.
        ManifestError: the file is no environment.
    """
    if request.env_file is None:
        from kcache.probe.host import probe_host

        host = probe_host(python=request.python, described_archs=request.archs, environ=environ)
        return Target(host.environment, host=host, exports=exports)
    try:
        data = Path(request.env_file).read_bytes()
    except OSError as error:
        raise UsageError(f"{request.env_file} cannot be read", why=str(error.strerror)) from error
    environment = parse_environment(decode(data, request.env_file, ENVIRONMENT_BYTES))
    if request.archs:
        from kcache.archs import flashinfer_arch
        from kcache.probe.cuda import naming_release

        release = naming_release(environment.fact("cuda.toolkit"), environment.fact("torch.cuda")) or (0, 0)
        environment = replace(environment, archs=tuple(sorted({flashinfer_arch(arch, release) for arch in request.archs})))
    return Target(environment, exports=exports)
