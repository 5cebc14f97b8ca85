"""Stores of any size with indexes alone, for tests of what reads nothing else: 200 models, 6 architectures, 10 versions."""

from __future__ import annotations

from pathlib import Path

from kcache import digest
from kcache.index import Blob, Index, IndexEntry, archive_path, index_path, manifest_path
from kcache.key import EntryKey

CUTE_ARCHS = ("sm_90a", "sm_100a", "sm_103a", "sm_110a", "sm_120a", "sm_121a")


def make_line(
    model: str, arch: str, flashinfer: str, *, kind: str = "b12x-moe", seconds: float = 33.0, signer: str = ""
) -> IndexEntry:
    """The index line of a model's kernels."""
    ingredients = {
        "platform.machine": "x86_64",
        "flashinfer.version": flashinfer,
        "flashinfer.sources": digest.of_bytes(b"sources"),
        "cuda.release": "13.0",
        "gpu.cute_arch": arch,
        "gpu.sm_count": "188",
        "tvm_ffi.version": "0.1.15.post2",
        "cutlass_dsl.wheels": digest.of_bytes(b"wheels"),
        "kernels": digest.of_bytes(f"{model} {arch}".encode()),
    }
    key = EntryKey(
        kind=kind, modules=("b12x_moe",), ingredients=ingredients, layout="cute-dsl", model=model, variant="nvfp4-tp1-ep1"
    )
    sha256 = digest.of_bytes(key.fingerprint.encode())
    return IndexEntry(
        key=key,
        manifest=Blob(path=manifest_path(key), size=4_000, sha256=sha256),
        archive=Blob(path=archive_path(sha256), size=1_700_000, sha256=sha256),
        unpacked_size=3_400_000,
        build_seconds=seconds,
        built="2026-12-01T09:00:00Z",
        signer=signer,
    )


def make_store(directory: Path, *, models: int, archs: int, versions: int) -> Path:
    """A directory with one index for each FlashInfer version."""
    names = [f"maker/model-{number:03}-moe" for number in range(models)]
    for version in range(versions):
        flashinfer = f"0.7.{version}"
        lines = [make_line(name, arch, flashinfer, signer="farm@example.org") for name in names for arch in CUTE_ARCHS[:archs]]
        path = directory / index_path(lines[0].key.ingredients)
        path.parent.mkdir(parents=True)
        path.write_bytes(Index(entries=tuple(lines)).encode())
    return directory
