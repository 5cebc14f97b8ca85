"""CuTe-DSL kernels: the `meta.json` that a target's own FlashInfer expects, worked out without importing torch or flashinfer.

FlashInfer keeps these kernels in `cached_ops/<module>_<arch>_cute_dsl/`, objects beside one `meta.json`, and takes an object only
if that file is what it works out itself (`jit/cute_dsl_core.py`, JitSpecCuteDsl.try_load). It hashes absolute paths and, from
0.7.4 on, what installers write, so the same bytes elsewhere are not taken. Where everything that the object depends on is
equal by content (`kcache.kinds.cute_dsl_key`), kcache writes the file that the target expects (`kcache.kinds.cute_dsl_install`).
It says nothing that is not true of the target: which compiler and sources are there. The rule is worked out from files, and only
if FlashInfer's own text of that rule is one that is known here.
"""

# On the path of every restore strings and os.path take a fifth of pathlib's time.
# ruff: noqa: PTH208
from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence

from kcache.errors import ProbeError
from kcache.kinds.library_text import digest_of_parts, function_text, read_source
from kcache.values import dataclass

VERSIONS = "versions"
"""The stack is named by the versions of nvidia-cutlass-dsl* (0.6.18, 0.7.0, 0.7.2)."""

RECORDS = "records"
"""The stack is named by Python's ABI and by digests of RECORD of torch, apache-tvm-ffi and nvidia-cutlass-dsl* (0.7.4)."""

_PARTS = ("_get_cute_dsl_version", "_get_compile_arch", "sanitize_symbol_name", "__init__", "try_load", "_read_meta")
"""What decides about meta.json in `jit/cute_dsl_core.py`; `_SOURCE_PARTS` lie beside it up to 0.7.2, in their own file since."""

_SOURCE_PARTS = ("_hash_source_files", "_key_sources")

_RULE = "FlashInfer's rule for CuTe-DSL kernels"

_RULES = {
    "599b76d6c9d9fcf9": VERSIONS,
    "a7b6df44fb126756": RECORDS,
}
"""Digest of FlashInfer's own text of the rule (`rule_digest`) -> which rule it is. Others are not judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The Python that will load the kernels, as far as meta.json depends on it.

    package:     the directory of its flashinfer package, spelt as its `sys.path` entry spells it: this text is hashed.
    search_path: its `sys.path`.
    cache_tag:   its `sys.implementation.cache_tag`, such as `cpython-311`.
    soabi:       its `SOABI`, such as `cpython-311-x86_64-linux-gnu`.
    arch:        what it compiles for: its `CUTE_DSL_ARCH`, else made from its GPU (`sm_120a`).
    environ:     its environment, for the switches that change the rule.
    """

    package: str
    search_path: tuple[str, ...]
    cache_tag: str
    soabi: str
    arch: str
    environ: Mapping[str, str]


def module_directory(module: str, arch: str) -> str:
    """The directory of a module's kernels below `cached_ops`, such as `b12x_moe_sm120a_cute_dsl` (JitSpecCuteDsl.__init__)."""
    return _sanitize(f"{module}_{_sanitize(arch.replace('_', ''))}_cute_dsl")


def expected_meta(target: Target, key_files: Sequence[str], *, tvm_ffi: bool = True) -> dict[str, object]:
    """What the target's FlashInfer expects in a module's `meta.json`.

    Args:
        key_files: the module's key sources, relative to the flashinfer package, as often as FlashInfer lists them.
        tvm_ffi: False for kernels that are exported without TVM-FFI (from 0.7.4 on they have a mark of their own).

    Raises:
        ProbeError: this FlashInfer's rule is not known here, a switch changes it, or a file cannot be read.
    """
    _refuse_switches(target.environ)
    rule = meta_rule(target.package)
    meta: dict[str, object] = {
        "arch": _sanitize(target.arch.replace("_", "")),
        "cute_dsl_version": stack_version(rule, read_stack(target.search_path), target.cache_tag, target.soabi),
        "source_sha256": source_digest([f"{target.package}/{path}" for path in key_files]),
    }
    if not tvm_ffi:
        if rule == VERSIONS:
            raise ProbeError("this FlashInfer keeps no kernels without TVM-FFI on disk")
        meta["tvm_ffi"] = False
    return meta


def _refuse_switches(environ: Mapping[str, str]) -> None:
    if environ.get("FLASHINFER_CUTE_DSL_DISABLE_CACHE", "0") == "1":
        raise ProbeError(
            "FlashInfer's CuTe-DSL cache is switched off",
            why="FLASHINFER_CUTE_DSL_DISABLE_CACHE=1 is set: no kernel on disk is looked at",
            remedy="Unset it where the server runs.",
        )
    if environ.get("FLASHINFER_CUTE_DSL_STRICT_CACHE_KEY", "0") == "1":
        raise ProbeError(
            "FlashInfer's strict cache key is on",
            why="FLASHINFER_CUTE_DSL_STRICT_CACHE_KEY=1 is set: the key then covers sources that only FlashInfer can list",
            remedy="Unset it where the server runs: kcache compares these sources itself.",
        )


def meta_rule(package: str) -> str:
    """Which of the known rules this FlashInfer uses.

    Raises:
        ProbeError: none, or its source cannot be read.
    """
    found = rule_digest(package)
    if found in _RULES:
        return _RULES[found]
    raise ProbeError(
        "this FlashInfer decides in another way which CuTe-DSL kernels it takes",
        why=f"jit/cute_dsl_core.py has a rule with digest {found}, which this kcache does not know",
        remedy="Use a newer kcache; until then kernels are compiled on first use, as without kcache.",
    )


def rule_digest(package: str) -> str:
    """A digest of FlashInfer's own text of the rule, without its comments and docstrings: sixteen hex digits.

    Raises:
        ProbeError: `jit/cute_dsl_core.py` cannot be read or has no such parts.
    """
    core = read_source(f"{package}/jit/cute_dsl_core.py", _RULE)
    try:
        sources = read_source(f"{package}/jit/_cute_dsl_source.py", _RULE)
    except ProbeError:
        sources = core
    spec = core.partition("class JitSpecCuteDsl(")[2]
    parts = [function_text(spec if name in ("__init__", "try_load") else core, name) for name in _PARTS]
    parts += [function_text(sources, name) for name in _SOURCE_PARTS]
    return digest_of_parts(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """One installed distribution as `importlib.metadata` reads it; texts are None where there is no such file."""

    name: str
    version: str
    record: str | None
    direct_url: str | None


def read_stack(search_path: Iterable[str]) -> tuple[Installed, ...]:
    """Every installed distribution that FlashInfer's fingerprint may cover, those that others shadow included.

    `importlib.metadata.distributions()` goes through the whole search path and leaves out no second one of a name; so here.

    Raises:
        ProbeError: metadata is there and cannot be read.
    """
    found = []
    for entry in dict.fromkeys(path.rstrip("/") or "/" for path in search_path if path):
        try:
            names = sorted(os.listdir(entry))
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")) and _may_matter(name):
                found.append(_read_installed(f"{entry}/{name}"))
    return tuple(found)


_STACK = ("torch", "apache-tvm-ffi")
_CUTLASS = "nvidia-cutlass-dsl"


def _may_matter(directory: str) -> bool:
    name = directory.rpartition(".")[0].partition("-")[0]
    plain = re.sub(r"[-_.]+", "-", name).lower()
    return plain in _STACK or plain.startswith(_CUTLASS)


def _read_installed(directory: str) -> Installed:
    headers = _metadata_text(directory, "METADATA")
    if headers is None:
        headers = _metadata_text(directory, "PKG-INFO") or ""
    values = {}
    for field in ("Name", "Version"):
        match = re.search(rf"^{field}:[ \t]*(\S+)", headers.partition("\n\n")[0], re.MULTILINE | re.IGNORECASE)
        if match is None:
            raise ProbeError("an installed package does not say what it is", why=f"{directory} has no {field}")
        values[field] = match[1]
    record, direct_url = _metadata_text(directory, "RECORD"), _metadata_text(directory, "direct_url.json")
    return Installed(name=values["Name"], version=values["Version"], record=record, direct_url=direct_url)


def _metadata_text(directory: str, name: str) -> str | None:
    """As `Distribution.read_text` gives it: UTF-8, line ends made `\\n`, None where there is none or it may not be read."""
    try:
        with open(f"{directory}/{name}", encoding="utf-8") as stream:
            return stream.read()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ProbeError("an installed package's metadata cannot be read", why=f"{directory}/{name}: {error}") from error


def stack_version(rule: str, stack: Iterable[Installed], cache_tag: str, soabi: str) -> str:
    """FlashInfer's `_get_cute_dsl_version` (jit/cute_dsl_core.py) from what is installed."""
    if rule == VERSIONS:
        named = sorted(f"{one.name}=={one.version}" for one in stack if one.name.lower().startswith(_CUTLASS))
        return ";".join(named) or "unknown"
    parts = []
    for one in stack:
        name = one.name.lower().replace("_", "-")
        if name in _STACK or name.startswith(_CUTLASS):
            provenance = json.dumps([one.record, one.direct_url]).encode()
            parts.append(f"{name}=={one.version}:{hashlib.sha256(provenance).hexdigest()}")
    return ";".join([cache_tag, soabi, *sorted(parts)])


def source_digest(paths: Iterable[str]) -> str:
    """FlashInfer's `_hash_source_files` (jit/cute_dsl_core.py, from 0.7.4 jit/_cute_dsl_source.py): paths and bytes, by path.

    Raises:
        ProbeError: a file cannot be read. (FlashInfer then goes past its disk cache.)
    """
    sha = hashlib.sha256()
    for path in sorted(paths):
        sha.update(path.encode())
        try:
            with open(path, "rb") as stream:
                sha.update(stream.read())
        except OSError as error:
            raise ProbeError("a source that keys CuTe-DSL kernels cannot be read", why=f"{path}: {error.strerror}") from error
    return sha.hexdigest()


def _sanitize(name: str) -> str:
    """FlashInfer's `sanitize_symbol_name`."""
    return re.sub(r"[^0-9a-zA-Z_]", "_", name)


def relative_key_files(package: str, paths: Iterable[str]) -> tuple[str, ...]:
    """Key sources by path inside the flashinfer package, as entries name them.

    Raises:
        ProbeError: one lies elsewhere: then it is none of FlashInfer's, and nothing is known of it on another host.
    """
    prefix = f"{package.rstrip('/')}/"
    outside = [path for path in paths if not path.startswith(prefix)]
    if outside:
        raise ProbeError("a source that keys CuTe-DSL kernels lies outside FlashInfer", why=", ".join(outside))
    return tuple(path[len(prefix) :] for path in paths)
