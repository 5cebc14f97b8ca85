"""The match rules, one table row each: explicit environments, no host involved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kcache.key import ABSENT, EntryKey, Environment, Fact, known, undetermined
from kcache.manifest import ArchiveFacts, Artifact, ElfFacts, Manifest, sources_digest
from kcache.match import Decision, arch_score, match_binary, match_key, rank, requirements

SOURCES = {"data/csrc/cascade.cu": "sha256:" + "1" * 64, "jit/core.py": "sha256:" + "2" * 64}
INGREDIENTS = {
    "platform.machine": "x86_64",
    "flashinfer.version": "0.7.4",
    "flashinfer.sources": sources_digest(SOURCES),
    "cuda.release": "13.0",
    "gpu.arch": "90a",
    "tvm_ffi.version": "0.1.15.post2",
    "build.flags": "default",
}
FACTS = {
    "platform.machine": known("x86_64"),
    "flashinfer.version": known("0.7.4"),
    "cuda.runtime": known("13.0"),
    "tvm_ffi.version": known("0.1.15.post2"),
    "libc.version": known("2.36"),
    "libstdcxx.GLIBCXX": known("3.4.30"),
    "libstdcxx.CXXABI": known("1.3.13"),
}
ELF = ElfFacts(
    machine="x86_64",
    needed=("libcudart.so.13", "libtvm_ffi.so"),
    versions={"GLIBC": "2.34", "GLIBCXX": "3.4.29", "CXXABI": "1.3.9"},
    gpu_archs=("sm_90a",),
)


def key(**changes: str) -> EntryKey:
    return EntryKey(kind="modules", modules=("cascade",), ingredients=INGREDIENTS | changes)


def environment(changes: Mapping[str, Fact] | None = None, *, archs: tuple[str, ...] = ("90a",)) -> Environment:
    return Environment(
        facts=FACTS | {name.replace("__", "."): fact for name, fact in (changes or {}).items()},
        archs=archs,
        libraries={name: known(f"/lib/{name}") for name in ELF.needed},
        sources={path: known(digest) for path, digest in SOURCES.items()},
    )


def manifest(elf: ElfFacts = ELF) -> Manifest:
    return Manifest(
        key=key(),
        artifacts=(Artifact(path="cascade/cascade.so", size=1, sha256="sha256:" + "3" * 64, elf=elf),),
        archive=ArchiveFacts(sha256="sha256:" + "4" * 64, size=1, unpacked_size=1),
        sources=SOURCES,
        build_seconds={"cascade": 5.5},
        provenance={},
    )


def fields(decision: Decision) -> list[str]:
    return [check.field for check in decision.differs]


def test_the_same_environment_is_accepted() -> None:
    assert match_key(key(), environment()).accepted
    assert match_binary(manifest(), environment()).accepted


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"flashinfer__version": known("0.7.2.post1")}, "flashinfer.version"),
        ({"flashinfer__version": ABSENT}, "flashinfer.version"),
        ({"flashinfer__version": undetermined("no _build_meta.py")}, "flashinfer.version"),
        ({"platform__machine": known("aarch64")}, "platform.machine"),
        ({"cuda__runtime": known("12.9")}, "cuda.release"),
        ({"cuda__runtime": ABSENT}, "cuda.release"),
        ({"tvm_ffi__version": known("0.1.15")}, "tvm_ffi.version"),
        ({"tvm_ffi__version": known("0.1.11")}, "tvm_ffi.version"),
        ({"tvm_ffi__version": known("0.2.0")}, "tvm_ffi.version"),
        ({"tvm_ffi__version": known("0.1.16rc1")}, "tvm_ffi.version"),
        ({"tvm_ffi__version": undetermined("two of them")}, "tvm_ffi.version"),
    ],
)
def test_a_key_ingredient_that_differs_is_named(changes: dict[str, Fact], refused: str) -> None:
    assert fields(match_key(key(), environment(changes))) == [refused]


@pytest.mark.parametrize(
    "changes",
    [{"cuda__runtime": known("13.2")}, {"tvm_ffi__version": known("0.1.15.post3")}, {"tvm_ffi__version": known("0.1.16")}],
)
def test_what_the_loader_tolerates_is_accepted_but_not_under_strict(changes: dict[str, Fact]) -> None:
    assert match_key(key(), environment(changes)).accepted
    assert not match_key(key(), environment(changes), strict=True).accepted


def test_entries_with_other_compiler_flags_are_never_chosen() -> None:
    changed = EntryKey(kind="modules", modules=("cascade",), ingredients=INGREDIENTS | {"build.flags": "sha256:" + "5" * 64})
    assert fields(match_key(changed, environment())) == ["build.flags"]


@pytest.mark.parametrize(
    ("built", "device", "runs"),
    [
        ("90a", "90a", True),
        ("90a", "100a", False),
        ("100a", "103a", False),
        ("103a", "103a", True),
        ("120f", "120f", True),
        ("120f", "121a", True),
        ("120a", "121a", False),
        ("121a", "120f", False),
        ("80", "89", True),
        ("89", "80", False),
        ("80", "90a", False),
        ("9", "90a", False),
    ],
)
def test_architectures_run_where_flashinfer_says_they_do(built: str, device: str, runs: bool) -> None:
    assert (arch_score(built, device) is not None) is runs


def test_without_a_gpu_or_a_described_one_nothing_matches_and_the_remedy_is_named() -> None:
    decision = match_key(key(), environment(archs=()))
    assert fields(decision) == ["gpu.arch"]
    assert "--arch" in decision.differs[0].found


def test_a_mixed_host_is_served_for_the_architectures_that_fit() -> None:
    assert match_key(key(), environment(archs=("120f", "90a"))).archs == ("90a",)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"libc__version": known("2.31")}, "cascade/cascade.so: GLIBC_2.34"),
        ({"libc__version": known("2.4")}, "cascade/cascade.so: GLIBC_2.34"),
        ({"libc__version": undetermined("musl")}, "cascade/cascade.so: GLIBC_2.34"),
        ({"libstdcxx__GLIBCXX": known("3.4.28")}, "cascade/cascade.so: GLIBCXX_3.4.29"),
        ({"libstdcxx__CXXABI": ABSENT}, "cascade/cascade.so: CXXABI_1.3.9"),
        ({"platform__machine": known("aarch64")}, "cascade/cascade.so: machine"),
    ],
)
def test_a_host_that_lacks_a_symbol_version_is_refused_and_the_version_named(changes: dict[str, Fact], refused: str) -> None:
    assert fields(match_binary(manifest(), environment(changes))) == [refused]


def _with(environment: Environment, **parts: Any) -> Environment:
    values = {name: getattr(environment, name) for name in ("facts", "archs", "libraries", "sources")}
    return Environment(**(values | parts))


def test_an_absent_library_is_named() -> None:
    lacking = _with(environment(), libraries={"libcudart.so.13": ABSENT, "libtvm_ffi.so": known("/x")})
    assert fields(match_binary(manifest(), lacking)) == ["cascade/cascade.so: needs libcudart.so.13"]


@pytest.mark.parametrize("found", [known("sha256:" + "9" * 64), ABSENT, undetermined("unreadable")])
def test_one_changed_source_file_is_refused_and_named(found: Fact) -> None:
    changed = _with(environment(), sources={**environment().sources, "data/csrc/cascade.cu": found})
    assert fields(match_binary(manifest(), changed)) == ["flashinfer.sources: data/csrc/cascade.cu"]


def test_a_fact_that_nobody_looked_for_never_passes() -> None:
    assert not match_binary(manifest(), Environment(facts=FACTS, archs=("90a",))).accepted


def test_an_unknown_symbol_version_prefix_is_refused() -> None:
    odd = ElfFacts(machine="x86_64", needed=(), versions={"QUUX": "1.0"}, gpu_archs=("sm_90a",))
    assert fields(match_binary(manifest(odd), environment())) == ["cascade/cascade.so: QUUX_1.0"]


def test_requirements_name_every_library_and_source() -> None:
    needed = requirements([manifest()])
    assert needed.sonames == ("libcudart.so.13", "libtvm_ffi.so")
    assert needed.sources == ("data/csrc/cascade.cu", "jit/core.py")


def test_rank_prefers_the_exact_architecture_then_the_nearest_toolkit() -> None:
    host = environment(archs=("121a",))
    family, exact = key(**{"gpu.arch": "120f"}), key(**{"gpu.arch": "121a"})
    assert rank(exact, host, "121a") > rank(family, host, "121a")
    near, far = key(**{"cuda.release": "13.0"}), key(**{"cuda.release": "13.2"})
    assert rank(near, environment(), "90a") > rank(far, environment(), "90a")


def test_an_undetermined_fact_is_not_even_equal_to_itself() -> None:
    unknown = undetermined("no driver")
    assert not unknown.same(unknown)
    assert ABSENT.same(ABSENT)
