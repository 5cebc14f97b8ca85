"""Small entries without a compiler, for tests of stores, publishing and look-ups.

They are honest in every way but one: the libraries are arbitrary bytes, and their ELF facts made up.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kcache import archive, digest, fsops
from kcache.index import Index
from kcache.key import EntryKey
from kcache.manifest import Artifact, ElfFacts, Manifest, module_artifact_path, sources_digest
from kcache.probe.packages import assigned_text, scan, this_interpreter
from kcache.store.base import Store
from kcache.workflows.catalog import read_index, read_manifest

SOURCES = {"data/csrc/sampling.cu": digest.of_bytes(b"sampling"), "jit/core.py": digest.of_bytes(b"core")}

INGREDIENTS = {
    "platform.machine": "x86_64",
    "flashinfer.version": "0.7.4",
    "cuda.release": "13.0",
    "gpu.arch": "90a",
    "tvm_ffi.version": "0.1.15.post2",
    "build.flags": "default",
}


def make_key(
    *modules: str, kind: str = "sampling", sources: Mapping[str, str] = SOURCES, ingredients: Mapping[str, str] | None = None
) -> EntryKey:
    """A key of a real shape. `ingredients` replaces some of `INGREDIENTS`."""
    given = {**INGREDIENTS, "flashinfer.sources": sources_digest(sources), **(ingredients or {})}
    return EntryKey(kind=kind, modules=tuple(sorted(modules)), ingredients=given)


def build_name(key: EntryKey) -> str:
    """The name of an entry's two files in a build output directory, without their endings."""
    return f"{key.kind}-{key.ingredients['gpu.arch']}-{key.fingerprint.removeprefix('sha256:')[:16]}"


def make_entry(
    directory: Path,
    modules: Mapping[str, bytes] | None = None,
    *,
    kind: str = "sampling",
    sources: Mapping[str, str] = SOURCES,
    build_seconds: float = 5.5,
    ingredients: Mapping[str, str] | None = None,
    **more: str,
) -> Manifest:
    """Writes an entry into `directory` as `kcache build` lays it out, and returns its manifest.

    Args:
        modules: module name -> bytes of its library; one small `cascade` if left out.
        ingredients: replaces some of `INGREDIENTS`; also as keywords with `_` for the first dot, as in `gpu_arch="120f"`,
            `flashinfer_version="0.7.2"`, `tvm_ffi_version="0.1.9"`.
    """
    modules = modules if modules is not None else {"cascade": b"\x7fELF cascade" * 100}
    known = {name.replace(".", "_"): name for name in INGREDIENTS}
    given = {**(ingredients or {}), **{known[name]: value for name, value in more.items()}}
    key = make_key(*modules, kind=kind, sources=sources, ingredients=given)
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        files = {}
        for module, data in modules.items():
            files[module_artifact_path(module)] = path = Path(scratch) / module
            path.write_bytes(data)
        facts = archive.pack(files, directory / f"{build_name(key)}.tar.zst")
    manifest = Manifest(
        key=key,
        artifacts=tuple(
            Artifact(path=module_artifact_path(module), size=len(data), sha256=digest.of_bytes(data), elf=_elf(key))
            for module, data in sorted(modules.items())
        ),
        archive=facts,
        sources=sources,
        build_seconds=dict.fromkeys(modules, build_seconds),
        provenance={"tool": "tests"},
    )
    fsops.write_bytes(directory / f"{build_name(key)}.json", manifest.encode())
    return manifest


def _elf(key: EntryKey) -> ElfFacts:
    return ElfFacts(
        machine=key.ingredients["platform.machine"],
        needed=("libc.so.6",),
        versions={"GLIBC": "2.17"},
        gpu_archs=(f"sm_{key.ingredients['gpu.arch']}",),
    )


def make_fitting_entry(
    directory: Path,
    modules: Mapping[str, bytes] | None = None,
    *,
    kind: str = "modules",
    site: Path | None = None,
    arch: str = "90a",
) -> Manifest:
    """An entry that a restore with `--arch 9.0a` (or what `arch` says) takes on this host: of the installed FlashInfer and one of
    its real sources.

    Args:
        site: a directory with another FlashInfer, which comes first on PYTHONPATH.
    """
    installed = scan([*([str(site)] if site is not None else []), *this_interpreter().search_path])
    package, tvm_ffi = installed.package("flashinfer"), installed.package("tvm_ffi")
    if package is None or tvm_ffi is None:
        pytest.skip("no FlashInfer in this Python")
    ingredients = {
        "flashinfer.version": assigned_text(f"{package}/_build_meta.py", "__version__") or "",
        "tvm_ffi.version": assigned_text(f"{tvm_ffi}/_version.py", "__version__") or "",
        "gpu.arch": arch,
    }
    sources = {"jit/core.py": digest.of_file(f"{package}/jit/core.py")[0]}
    return make_entry(directory, modules, kind=kind, sources=sources, ingredients=ingredients)


def restored(store: Store, index: Index | None = None) -> dict[str, dict[str, bytes]]:
    """What a container gets from every line of an index: fingerprint -> files. Anything wrong raises."""
    index = index or read_index(store, INGREDIENTS)
    found: dict[str, dict[str, bytes]] = {}
    for entry in index.entries if index else ():
        manifest = read_manifest(store, entry)
        files: dict[str, bytes] = {}

        def sink(path: str, size: int, chunks: Iterator[bytes], files: dict[str, bytes] = files) -> None:
            files[path] = b"".join(chunks)

        archive.unpack_entry(store.read(entry.archive.path), manifest, sink)
        found[entry.key.fingerprint] = files
    return found


def publish(entries: Path, store: Path, *words: str) -> None:
    """`kcache publish`, which must succeed. A store that is not there is made."""
    store.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "kcache", "publish", str(entries), "--to", str(store), *words]
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
