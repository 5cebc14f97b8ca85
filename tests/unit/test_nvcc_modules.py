"""From the facts of a build to an entry: what is refused, because the entry would not be true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kcache import digest
from kcache.errors import CollectError
from kcache.key import INGREDIENTS, NVCC, known, undetermined
from kcache.kinds.nvcc_modules import BuildFacts, BuiltModule, entry_parts, holds
from kcache.manifest import ElfFacts, sources_digest

FACTS = BuildFacts(
    machine=known("x86_64"),
    flashinfer=known("0.7.4"),
    cuda_release=known("13.0"),
    arch="90a",
    tvm_ffi=known("0.1.15"),
    flags=known("default"),
)
ELF = ElfFacts(machine="x86_64", needed=("libc.so.6",), versions={"GLIBC": "2.17"}, gpu_archs=("sm_90a",))


def module(name: str = "cascade", **changes: Any) -> BuiltModule:
    sources = {f"data/csrc/{name}.cu": digest.of_bytes(name.encode()), "jit/core.py": digest.of_bytes(b"core")}
    sha256 = digest.of_bytes(b"library")
    return replace(BuiltModule(name=name, size=7, sha256=sha256, elf=ELF, sources=sources, seconds=5.5), **changes)


def test_an_entry_holds_all_ingredients_and_the_sources_of_all_its_modules() -> None:
    parts = entry_parts("sampling", FACTS, (module("topk"), module("sampling")))
    assert parts.key.modules == ("sampling", "topk")
    assert set(parts.key.ingredients) == set(INGREDIENTS[NVCC])
    assert set(parts.sources) == {"data/csrc/sampling.cu", "data/csrc/topk.cu", "jit/core.py"}
    assert parts.key.ingredients["flashinfer.sources"] == sources_digest(parts.sources)
    assert [artifact.path for artifact in parts.artifacts] == ["sampling/sampling.so", "topk/topk.so"]
    assert parts.build_seconds == {"sampling": 5.5, "topk": 5.5}


@pytest.mark.parametrize(
    ("target", "arch", "wanted"),
    [
        ("90a", "90a", True),
        ("90", "90a", False),
        ("100f", "103a", True),
        ("103f", "100a", False),
        ("100f", "100a", True),
        ("120a", "120f", False),
        ("120f", "120f", True),
        ("120f", "121a", True),
        ("120f", "120a", True),
        ("80", "89", True),
        ("89", "80", False),
        ("90a", "100a", False),
        ("100a", "100", False),
        ("100", "100f", False),
    ],
)
def test_code_counts_only_where_it_runs_on_every_gpu_that_the_entry_is_given_to(target: str, arch: str, wanted: bool) -> None:
    assert holds(target, arch) is wanted


@pytest.mark.parametrize("archs", [(), ("sm_90",), ("compute_90a",), ("sm_100a", "sm_89")])
def test_a_binary_without_the_architecture_that_it_names_is_refused_with_what_it_holds(archs: tuple[str, ...]) -> None:
    with pytest.raises(CollectError) as caught:
        entry_parts("modules", FACTS, (module(elf=replace(ELF, gpu_archs=archs)),))
    assert "cascade" in caught.value.what and "90a" in caught.value.what
    assert all(arch in caught.value.why for arch in archs)


def test_a_binary_for_another_machine_is_refused() -> None:
    with pytest.raises(CollectError, match="aarch64"):
        entry_parts("modules", FACTS, (module(elf=replace(ELF, machine="aarch64")),))


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("machine", "platform.machine"),
        ("flashinfer", "flashinfer.version"),
        ("cuda_release", "cuda.release"),
        ("tvm_ffi", "tvm_ffi.version"),
        ("flags", "build.flags"),
    ],
)
def test_an_ingredient_that_could_not_be_found_out_is_refused_by_name(field: str, name: str) -> None:
    changes: dict[str, Any] = {field: undetermined("nobody said")}
    facts = replace(FACTS, **changes)
    with pytest.raises(CollectError) as caught:
        entry_parts("modules", facts, (module(),))
    assert name in caught.value.what
    assert "nobody said" in caught.value.why


def test_modules_that_disagree_about_a_source_are_refused() -> None:
    other = module("topk", sources={"data/csrc/topk.cu": digest.of_bytes(b"topk"), "jit/core.py": digest.of_bytes(b"other")})
    with pytest.raises(CollectError, match=r"jit/core\.py"):
        entry_parts("sampling", FACTS, (module("sampling"), other))


def test_a_module_of_unknown_sources_is_refused() -> None:
    with pytest.raises(CollectError, match="cascade"):
        entry_parts("modules", FACTS, (module(sources={"jit/core.py": digest.of_bytes(b"core")}),))
    with pytest.raises(CollectError):
        entry_parts("modules", FACTS, ())
