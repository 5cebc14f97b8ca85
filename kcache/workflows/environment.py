"""What a host is, described for people, for `--save` and for `--json`.

The saved document is an `Environment` and nothing else: it stands in for its host wherever a command takes `--env`. What is
shown beside it (cache locations, paths) is of this host alone and is not saved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcache import archs, digest, fsops
from kcache.key import Environment, Fact, known, undetermined
from kcache.match import sm_count_fact
from kcache.probe.caches import CacheRoot, cache_root
from kcache.probe.host import Host, describe_host
from kcache.values import replace
from kcache.workflows.b12x_saved import HOST, PACKAGE, b12x_facts
from kcache.workflows.target import TargetRequest, arch_names_of, find_host, find_target, with_products

NVCC_MODULES = "nvcc modules (kinds sampling, modules)"
CUTE_DSL = "CuTe-DSL kernels"
B12X = "programs of the package b12x"
RECORDED = "recorded, never matched"


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """An environment, and what is known only on its own host: empty for a saved one.

    places: name -> path, such as `flashinfer` -> the package's directory.
    """

    environment: Environment
    cache: CacheRoot | None = None
    places: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The document that `--save` writes, with more beside it; readers of environments pass over the rest."""
        document = self.environment.to_json()
        document["kinds"] = {
            title: [{"ingredient": row.name, "rule": row.rule, **row.fact.to_json()} for row in rows]
            for title, rows in sections(self.environment).items()
        }
        document["arch_names"] = arch_names(self.environment)
        if self.cache is not None:
            document["cache"] = {
                "root": self.cache.path,
                "base": self.cache.base,
                "reason": self.cache.reason,
                "exports": dict(self.cache.exports),
                "rejected": list(self.cache.rejected),
            }
        document["places"] = dict(self.places)
        return document


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One ingredient or fact, and how it is compared (kcache.match)."""

    name: str
    rule: str
    fact: Fact


def describe(request: TargetRequest, environ: Mapping[str, str]) -> Description:
    """This host as the request's Python sees it, or the saved environment that the request names.

    Raises:
        ProbeError, UsageError, ManifestError: as `find_target` says.
    """
    if request.env_file is not None:
        return Description(environment=find_target(request, environ).environment)
    host = find_host(request, environ)
    cache = cache_root(environ, os.geteuid())
    found = describe_host(host)
    found = replace(found, facts={**found.facts, **b12x_facts(host, {**environ, **cache.exports})})
    return Description(environment=found, cache=cache, places=_places(host, environ))


def describe_image(root: Path, request: TargetRequest) -> Description:
    """An unpacked root file system: nothing of it is run or imported.

    Args:
        request: `python` is the server's Python by its path in the image; `archs` and `gpus` are those of the host to come.

    Raises:
        ProbeError, UsageError: it holds no Python that can be told, or the request cannot be met.
    """
    from kcache.probe.image import image_host

    found, toolkit = image_host(root, python=request.python, archs=arch_names_of(request))
    environment = with_products(describe_host(found, toolkit), request)
    paths = found.paths
    places = {"python": paths.interpreter.executable, "flashinfer": paths.flashinfer, "flashinfer_cubin": paths.cubin}
    return Description(environment=environment, places={name: path for name, path in places.items() if path is not None})


def _places(host: Host, environ: Mapping[str, str]) -> dict[str, str]:
    found = {
        "python": host.paths.interpreter.executable,
        "flashinfer": host.paths.flashinfer,
        "flashinfer_jit_cache": host.paths.jit_cache,
        "flashinfer_cubin": host.paths.cubin,
    }
    variables = ("FLASHINFER_WORKSPACE_BASE", "HOME", "XDG_CACHE_HOME", "KCACHE_DIR", "FLASHINFER_CUBIN_DIR", "CUDA_HOME")
    return {
        **{name: path for name, path in found.items() if path is not None},
        **{f"${name}": environ[name] for name in variables if name in environ},
    }


def save(environment: Environment, path: Path) -> None:
    """Writes the document for `--env`, whole or not at all.

    Raises:
        InstallError, TrustError: it cannot be written.
    """
    fsops.write_bytes(path.parent.resolve() / path.name, digest.canonical_json(environment.to_json()) + b"\n")


def arch_names(environment: Environment) -> list[dict[str, str]]:
    """Every architecture in the three spellings: FlashInfer's, its variable's and CuTe-DSL's."""
    return [
        {"flashinfer": arch, "FLASHINFER_CUDA_ARCH_LIST": archs.arch_list_entry(arch), "CUTE_DSL_ARCH": archs.cute_dsl_arch(arch)}
        for arch in environment.archs
    ]


def sections(environment: Environment) -> dict[str, list[Row]]:
    """Every fact under what it is an ingredient of, in the order in which people look for it."""
    matched = [
        Row(name="gpu.arch", rule="runs on", fact=_archs(environment)),
        Row(name="flashinfer.version", rule="equal", fact=environment.fact("flashinfer.version")),
        Row(name="flashinfer.sources", rule="equal, file by file", fact=environment.fact("flashinfer.tree")),
        Row(name="cuda.release", rule="same major", fact=environment.fact("cuda.runtime")),
        Row(name="tvm_ffi.version", rule="same series, not older", fact=environment.fact("tvm_ffi.version")),
        Row(name="platform.machine", rule="equal", fact=environment.fact("platform.machine")),
        *(_floor(environment, name) for name in ("libc.version", "libstdcxx.GLIBCXX", "libstdcxx.CXXABI")),
    ]
    dsl = [
        *(Row(name=sm_count_fact(arch), rule="equal", fact=environment.fact(sm_count_fact(arch))) for arch in environment.archs),
        *(
            Row(name=name, rule="equal under another Python" if name.endswith(".portable") else "equal by content", fact=fact)
            for name, fact in sorted(environment.facts.items())
            if name.startswith("cutlass_dsl.")
        ),
    ]
    b12x = [Row(name=PACKAGE, rule="equal", fact=environment.facts[PACKAGE])] if PACKAGE in environment.facts else []
    shown = {row.name for row in (*matched, *dsl, *b12x)} | {"flashinfer.tree", "cuda.runtime", HOST}
    recorded = [Row(name=name, rule="", fact=fact) for name, fact in sorted(environment.facts.items()) if name not in shown]
    return {NVCC_MODULES: matched, CUTE_DSL: dsl, **({B12X: b12x} if b12x else {}), RECORDED: recorded}


def _archs(environment: Environment) -> Fact:
    if environment.archs:
        return known(" ".join(environment.archs))
    source = environment.fact("gpu.source")
    why = source.undetermined or "no GPU is visible and none is described by --arch or FLASHINFER_CUDA_ARCH_LIST"
    return undetermined(why)


def _floor(environment: Environment, name: str) -> Row:
    return Row(name=name, rule="at least", fact=environment.fact(name))
