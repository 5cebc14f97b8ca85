"""Which packages a Python would import, found by reading directories, without importing any of them.

Invariants: nothing of the target is imported into this process; what comes first on the search path wins, as in Python itself;
a version is read from the text of the file that the library itself reads it from. `importlib.metadata` is not used: it costs
about 70 ms where this costs one or two. Not a resolver and not a dependency check.
"""

# On the path of every restore strings and os.path take a fifth of pathlib's time.
# ruff: noqa: PTH112, PTH113, PTH119, PTH208
from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from kcache import digest
from kcache.errors import ProbeError
from kcache.key import ABSENT, Fact, known, undetermined
from kcache.values import dataclass, field

FLASHINFER_UNKNOWN_VERSION = "0.0.0+unknown"
"""What FlashInfer calls itself when it has no `_build_meta.py` (flashinfer/version.py, 0.6.18 to 0.7.4): no version at all."""

_INTERPRETER_TIMEOUT = 60.0
"""Seconds that another Python may take to describe itself; a cold network file system was seen to need ten."""

# Printed on the last line: a .pth file of the target may print before it.
_DESCRIBE = """
import importlib.machinery, json, os, sys
try:
    libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
except (ValueError, OSError):
    libc = ""
print()
print(json.dumps({
    "executable": sys.executable, "search_path": [p for p in sys.path if p], "version": "%d.%d.%d" % sys.version_info[:3],
    "suffix": importlib.machinery.EXTENSION_SUFFIXES[0], "cache_tag": sys.implementation.cache_tag or "", "libc": libc,
}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """A Python that will import FlashInfer.

    executable:  path of the interpreter.
    search_path: its `sys.path`, without the current directory.
    version:     such as `3.11.7`.
    abi:         the tag of its extension modules, such as `cpython-311-x86_64-linux-gnu`.
    cache_tag:   such as `cpython-311`.
    libc:        what `confstr(CS_GNU_LIBC_VERSION)` says in it, such as `glibc 2.36`; empty where the libc is another.
    """

    executable: str
    search_path: tuple[str, ...]
    version: str
    abi: str
    cache_tag: str
    libc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """An installed distribution. `name` is normalised (PEP 503); `metadata` is its .dist-info or .egg-info directory."""

    name: str
    version: str
    metadata: str


@dataclass(frozen=True, slots=True)
class Packages:
    """What is installed on one search path. Made by `scan`."""

    search_path: tuple[str, ...]
    _metadata: Mapping[str, str] = field(repr=False)
    _finders: tuple[str, ...] = field(repr=False)

    def names(self) -> tuple[str, ...]:
        """The normalised names of all distributions, sorted."""
        return tuple(sorted(self._metadata))

    def distribution(self, name: str) -> Distribution | None:
        """The distribution that this name means on the search path, or None."""
        normal = normalise(name)
        metadata = self._metadata.get(normal)
        if metadata is None:
            return None
        return Distribution(name=normal, version=_metadata_version(metadata), metadata=metadata)

    def package(self, name: str) -> str | None:
        """The directory of an importable package, or None. Editable installs are followed.

        A directory without `__init__.py` counts last, as in Python (a namespace package).
        """
        namespace = None
        for entry in self.search_path:
            directory = f"{entry}/{name}"
            if os.path.isfile(f"{directory}/__init__.py"):
                return directory
            if namespace is None and os.path.isdir(directory):
                namespace = directory
        for finder in self._finders:
            mapped = _editable_mapping(finder).get(name)
            if mapped is not None and os.path.isfile(f"{mapped}/__init__.py"):
                return mapped
        return namespace


def this_interpreter() -> Interpreter:
    """The Python that runs kcache."""
    from importlib.machinery import EXTENSION_SUFFIXES

    return Interpreter(
        executable=sys.executable,
        search_path=tuple(entry for entry in sys.path if entry),
        version=".".join(map(str, sys.version_info[:3])),
        abi=_abi(EXTENSION_SUFFIXES[0]),
        cache_tag=sys.implementation.cache_tag or "",
        libc=_libc_version(),
    )


def interpreter_at(python: str, environ: Mapping[str, str]) -> Interpreter:
    """Another Python, asked by one short run of it; it imports nothing but what its own start imports.

    Raises:
        ProbeError: it does not start, or does not answer.
    """
    import json
    import subprocess

    remedy = "Name the interpreter that starts the server, such as `--python /opt/venv/bin/python`."
    if not python:
        raise ProbeError("--python is given without a path", remedy=remedy)
    command = [python, "-c", _DESCRIBE]
    try:
        done = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=_INTERPRETER_TIMEOUT, check=True
        )
        answer = json.loads("{" + done.stdout.rpartition("\n{")[2])
        return Interpreter(
            executable=answer["executable"] or python,
            search_path=tuple(answer["search_path"]),
            version=answer["version"],
            abi=_abi(answer["suffix"]),
            cache_tag=answer["cache_tag"],
            libc=answer["libc"],
        )
    except subprocess.CalledProcessError as error:
        why = (error.stderr.strip().splitlines() or [f"it ended with code {error.returncode}"])[-1]
        raise ProbeError(f"the Python {python} could not be asked", why=why, remedy=remedy) from error
    except OSError as error:
        raise ProbeError(f"the Python {python} could not be asked", why=error.strerror or str(error), remedy=remedy) from error
    except subprocess.TimeoutExpired as error:
        why = f"it gave no answer for {_INTERPRETER_TIMEOUT:g} s"
        raise ProbeError(f"the Python {python} could not be asked", why=why, remedy=remedy) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = "it ran, and did not answer as a Python does"
        raise ProbeError(f"the Python {python} could not be asked", why=why, remedy=remedy) from error


def _abi(suffix: str) -> str:
    """`.cpython-311-x86_64-linux-gnu.so` -> `cpython-311-x86_64-linux-gnu`, which is sysconfig's SOABI, read 10 ms sooner."""
    return suffix.removeprefix(".").removesuffix(".so").removesuffix(".")


def _libc_version() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        return ""


def normalise(name: str) -> str:
    """A distribution's name in the one form that names are compared in (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def scan(search_path: Iterable[str]) -> Packages:
    """Lists the distributions on a search path; entries that are no directories are passed over."""
    metadata: dict[str, str] = {}
    finders: list[str] = []
    entries = tuple(dict.fromkeys(entry.rstrip("/") or "/" for entry in search_path if entry))
    for entry in entries:
        try:
            names = os.listdir(entry)
        except OSError:
            continue
        # Two versions of one distribution in one directory (a broken upgrade): sorted, so that the answer is always the same.
        for name in sorted(names):
            if name.endswith((".dist-info", ".egg-info")):
                metadata.setdefault(normalise(_split_metadata_name(name)[0]), f"{entry}/{name}")
            elif name.startswith("__editable__") and name.endswith("_finder.py"):
                finders.append(f"{entry}/{name}")
    return Packages(entries, metadata, tuple(finders))


def _split_metadata_name(directory: str) -> tuple[str, str]:
    """(name, version) from `name-version.dist-info`; a develop install's `name.egg-info` has no version."""
    stem = directory.rpartition(".")[0]
    name, _, version = stem.partition("-")
    return name, version.partition("-py")[0]


def _metadata_version(metadata: str) -> str:
    """The version from METADATA (PKG-INFO), which is what `importlib.metadata` reports; else from the directory's name."""
    for name in ("METADATA", "PKG-INFO"):
        try:
            with open(f"{metadata}/{name}", "rb") as stream:
                headers = stream.read(4096).partition(b"\n\n")[0]
        except OSError:
            continue
        if found := re.search(rb"^Version:[ \t]*(\S+)", headers, re.MULTILINE | re.IGNORECASE):
            return found[1].decode("utf-8", "replace")
    return _split_metadata_name(os.path.basename(metadata))[1]


def _editable_mapping(finder: str) -> dict[str, str]:
    """package -> directory, from the module that setuptools writes for an editable install (setuptools, editable_wheel.py)."""
    import ast

    try:
        with open(finder, encoding="utf-8") as stream:
            found = re.search(r"^MAPPING\b[^=\n]*=\s*(\{[^\n]*\})", stream.read(), re.MULTILINE)
        mapping = ast.literal_eval(found[1]) if found else {}
    except (OSError, ValueError, SyntaxError):
        return {}
    return {str(name): str(path) for name, path in mapping.items()}


def assigned_text(path: str, name: str) -> str | None:
    """The string that a Python file assigns to `name` at its top level, read as text; None if there is none.

    `a = b = 'x'` and annotations are understood, as in the files that setuptools-scm, torch and FlashInfer generate.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, encoding="utf-8", errors="replace") as stream:
        text = stream.read()
    pattern = rf"^{re.escape(name)}\s*(?::[^=\n]+)?=\s*(?:\w+\s*=\s*)*(['\"])([^'\"\n]*)\1"
    found = re.search(pattern, text, re.MULTILINE)
    return found[2] if found else None


def flashinfer_facts(package: str | None) -> dict[str, Fact]:
    """`flashinfer.version` and `flashinfer.commit`, from the file that FlashInfer reads them from.

    flashinfer/version.py (0.6.18 to 0.7.4) takes both from `_build_meta.py`, and calls itself `0.0.0+unknown` without it; that
    names no version, so here it could not be found out.
    """
    if package is None:
        return {"flashinfer.version": ABSENT, "flashinfer.commit": ABSENT}
    path = f"{package}/_build_meta.py"
    try:
        version = assigned_text(path, "__version__")
        commit = assigned_text(path, "__git_commit__") or assigned_text(path, "__git_version__")
    except OSError:
        why = "FlashInfer has no _build_meta.py: a source tree that was never built"
        return {"flashinfer.version": undetermined(why), "flashinfer.commit": undetermined(why)}
    return {
        "flashinfer.version": known(version)
        if version and version != FLASHINFER_UNKNOWN_VERSION
        else undetermined("FlashInfer's _build_meta.py names no version"),
        "flashinfer.commit": known(commit)
        if commit and commit != "unknown"
        else undetermined("FlashInfer's _build_meta.py names no commit"),
    }


def torch_facts(package: str | None) -> dict[str, Fact]:
    """`torch.version` and `torch.cuda`, the CUDA release it was built for (absent in a CPU build), from torch/version.py."""
    if package is None:
        return {"torch.version": ABSENT, "torch.cuda": ABSENT}
    path = f"{package}/version.py"
    try:
        version, cuda = assigned_text(path, "__version__"), assigned_text(path, "cuda")
    except OSError:
        why = "torch has no version.py"
        return {"torch.version": undetermined(why), "torch.cuda": undetermined(why)}
    if not version:
        why = "torch/version.py names no version"
        return {"torch.version": undetermined(why), "torch.cuda": undetermined(why)}
    return {"torch.version": known(version), "torch.cuda": known(cuda) if cuda else ABSENT}


def tvm_ffi_version(packages: Packages) -> Fact:
    """The version of apache-tvm-ffi: `tvm_ffi.__version__` of the package that would be imported, else its distribution's."""
    package = packages.package("tvm_ffi")
    if package is None:
        return ABSENT
    try:
        if version := assigned_text(f"{package}/_version.py", "__version__"):
            return known(version)
    except OSError:
        pass
    distribution = packages.distribution("apache-tvm-ffi")
    return known(distribution.version) if distribution and distribution.version else undetermined("tvm_ffi names no version")


def distribution_version(packages: Packages, name: str) -> Fact:
    """The version of a distribution; absent where it is not installed."""
    distribution = packages.distribution(name)
    if distribution is None:
        return ABSENT
    return known(distribution.version) if distribution.version else undetermined(f"{name} is installed without a version")


_INSTALLER_FILES = frozenset(
    ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "provenance_url.json", "uv_cache.json", "uv_build.json")
)
"""Files that pip or uv add to a .dist-info directory: they are of the installer, not of the wheel."""


def content_digest(distribution: Distribution) -> Fact:
    """A digest of what the wheel held, equal for one wheel whichever installer unpacked it.

    It covers path, hash and size of each line of RECORD, without what installers make: their own files, byte code, and scripts
    (their first line names the interpreter). FlashInfer hashes RECORD whole (jit/cute_dsl_core.py, 0.7.4), so there pip and uv
    differ. RECORD says what was installed; files changed later are not seen.
    """
    import csv

    if _is_editable(distribution):
        return undetermined(f"{distribution.name} is installed editable: its content is wherever its source is")
    try:
        with open(f"{distribution.metadata}/RECORD", encoding="utf-8", newline="") as stream:
            rows = [row for row in csv.reader(stream) if row]
    except (OSError, UnicodeDecodeError, csv.Error):
        return undetermined(f"{distribution.name} has no RECORD")
    lines = sorted([_inside(row[0]), *row[1:3]] for row in rows if not _made_by_installer(row[0]))
    if not lines:
        return undetermined(f"the RECORD of {distribution.name} lists no file of the wheel")
    return known(digest.of_document(lines))


def _is_editable(distribution: Distribution) -> bool:
    """Whether direct_url.json says so (PEP 610)."""
    import json

    try:
        with open(f"{distribution.metadata}/direct_url.json", encoding="utf-8") as stream:
            return json.load(stream)["dir_info"]["editable"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _inside(path: str) -> str:
    """A RECORD path without the steps up to the prefix, whose number depends on the layout of the environment."""
    return re.sub(r"^(\.\./)+", "", path)


def _made_by_installer(path: str) -> bool:
    segments: Sequence[str] = path.split("/")
    if path.endswith(".pyc") or "__pycache__" in segments:
        return True
    if len(segments) >= 2 and segments[-2].endswith(".dist-info") and segments[-1] in _INSTALLER_FILES:
        return True
    inside = _inside(path)
    return is_target_script(path) or ((inside != path or path.startswith("/")) and ("bin" in inside.split("/")[:-1]))


def is_target_script(path: str) -> bool:
    """Whether a RECORD path is a script of an installation with `--target`, which puts `bin` beside the packages."""
    directory, _, name = path.rpartition("/")
    return directory == "bin" and not name.endswith((".py", ".so", ".pyi"))
