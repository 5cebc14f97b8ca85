"""Entries of CuTe-DSL kernels: their manifests, the rules by which they match, and which of them a command asks for.

The rules: kcache/docs/decisions/0005-cute-dsl-ingredients.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kcache.errors import CollectError, KcacheError, ManifestError
from kcache.gpu_products import from_description, product
from kcache.index import Blob, IndexEntry
from kcache.kernel_facts import Wheel
from kcache.key import ABSENT, CUTE_DSL, EntryKey, Environment, Fact, known, undetermined
from kcache.kinds.cute_entry import BuiltKernel, KernelBuild, kernel_parts
from kcache.local_cache import InstalledEntry
from kcache.manifest import ArchiveFacts, ElfFacts, Manifest, parse_manifest
from kcache.match import compiler_facts, match_binary, match_key, rank, requirements
from kcache.probe.packages import Distribution
from kcache.probe.wheels import compiler_wheels, portable_digest
from kcache.workflows.cute_build import DryRunAnswer, Kernel
from kcache.workflows.entrypoint import why_unproven
from kcache.workflows.resolve import Candidate, Choice, Wanted, ambiguous_models, choose, slot_text, why_missing
from kcache.workflows.target import Target
from kcache.workflows.verify_kernels import proof_of, prove_kernels

C, D, P, Q = (f"sha256:{letter * 64}" for letter in "cdef")
SOURCES = {"cute_dsl/utils.py": "sha256:" + "1" * 64, "fused_moe/x.py": "sha256:" + "2" * 64}
WHEELS = {"nvidia-cutlass-dsl": Wheel(version="4.8.0", content=C, portable=P)}
ABI = "cpython-311-x86_64-linux-gnu"
FARM = Environment(
    facts={
        "platform.machine": known("x86_64"),
        "flashinfer.version": known("0.7.4"),
        "tvm_ffi.version": known("0.1.15.post2"),
        "python.abi": known(ABI),
    }
)
ELF = ElfFacts(machine="x86_64", needed=(), versions={}, gpu_archs=("sm_120a",))


def build(**changes: Any) -> KernelBuild:
    return replace(
        KernelBuild(
            kind="b12x-moe",
            model="Qwen/Qwen3-30B-A3B",
            variant="nvfp4-tp1-ep1",
            farm=FARM,
            wheels=WHEELS,
            cuda="13.0",
            cute_arch="sm_120a",
            gpu=product("rtx-pro-6000").describe(),
            sources=SOURCES,
            key_files=("cute_dsl/utils.py", "fused_moe/x.py", "cute_dsl/utils.py"),
            meta={"arch": "sm120a", "cute_dsl_version": "v", "source_sha256": "s"},
            cases=({"id": "one", "tokens": [1]},),
            left_out=("kernel (triton)",),
        ),
        **changes,
    )


def kernel(name: str = "micro_m1", **changes: Any) -> BuiltKernel:
    return replace(BuiltKernel(name=name, size=10, sha256=C, elf=ELF, seconds=3.0), **changes)


def manifest(built: KernelBuild | None = None, *names: str) -> Manifest:
    parts = kernel_parts(built or build(), [kernel(name) for name in names or ("micro_m1", "static")])
    return Manifest(
        key=parts.key,
        artifacts=parts.artifacts,
        archive=ArchiveFacts(sha256=D, size=1, unpacked_size=20),
        sources=parts.sources,
        build_seconds=parts.build_seconds,
        provenance={},
        kernels=parts.kernels,
    )


def host(wheels: dict[str, Wheel] | None = None, archs: tuple[str, ...] = ("120f",), **facts: Fact) -> Environment:
    named = {name.replace("__", "."): fact for name, fact in facts.items()}
    return Environment(
        facts={
            **FARM.facts,
            "cuda.runtime": known("13.0"),
            "gpu.sm_count.120f": known("188"),
            **compiler_facts(WHEELS if wheels is None else wheels),
            **named,
        },
        archs=archs,
        sources={path: known(value) for path, value in SOURCES.items()},
    )


def differs(environment: Environment, *, strict: bool = False, entry: Manifest | None = None) -> list[str]:
    entry = entry or manifest()
    decisions = (match_key(entry.key, environment, strict=strict), match_binary(entry, environment, strict=strict))
    return [check.field for decision in decisions for check in decision.differs]


def wheel(version: str = "4.8.0", content: str = C, portable: str = P) -> dict[str, Wheel]:
    return {"nvidia-cutlass-dsl": Wheel(version=version, content=content, portable=portable)}


OTHER_PYTHON = known("cpython-312-x86_64-linux-gnu")


@pytest.mark.parametrize(
    "environment",
    [
        host(),
        host(tvm_ffi__version=known("0.1.16")),
        host(tvm_ffi__version=known("0.1.15.post3")),
        host(cuda__runtime=known("13.2")),
        host(wheel(content=D), python__abi=OTHER_PYTHON),
        host(torch__version=known("2.11")),
        host(archs=("90a", "120f")),
        replace(host(), facts={**host().facts, "gpu.sm_count.120f": known("170 188")}),
    ],
)
def test_what_is_equal_or_compatible_is_accepted(environment: Environment) -> None:
    assert differs(environment) == []


@pytest.mark.parametrize(
    ("environment", "field"),
    [
        (host(platform__machine=known("aarch64")), "platform.machine"),
        (host(flashinfer__version=known("0.7.2.post1")), "flashinfer.version"),
        (host(archs=("121a",)), "gpu.cute_arch"),
        (host(archs=()), "gpu.cute_arch"),
        (replace(host(), facts={**host().facts, "gpu.sm_count.120f": known("170")}), "gpu.sm_count"),
        (replace(host(), facts={**host().facts, "gpu.sm_count.120f": known("1188")}), "gpu.sm_count"),
        (replace(host(), facts={**host().facts, "gpu.sm_count.120f": undetermined("no driver")}), "gpu.sm_count"),
        (host(cuda__runtime=known("12.9")), "cuda.release"),
        (host(tvm_ffi__version=known("0.1.14")), "tvm_ffi.version"),
        (host(tvm_ffi__version=known("0.2.0")), "tvm_ffi.version"),
        (host(tvm_ffi__version=known("0.1.16rc1")), "tvm_ffi.version"),
        (host(tvm_ffi__version=ABSENT), "tvm_ffi.version"),
        (replace(host(), sources={**host().sources, "fused_moe/x.py": known(D)}), "flashinfer.sources: fused_moe/x.py"),
        (replace(host(), sources={**host().sources, "fused_moe/x.py": ABSENT}), "flashinfer.sources: fused_moe/x.py"),
        (host(wheel(content=D)), "package nvidia-cutlass-dsl"),
        (host(wheel(content="")), "package nvidia-cutlass-dsl"),
        (host(wheel(version="4.8.1")), "package nvidia-cutlass-dsl"),
        (host(wheel(version="4.8.1"), python__abi=OTHER_PYTHON), "package nvidia-cutlass-dsl"),
        (host(wheel(portable=Q), python__abi=OTHER_PYTHON), "package nvidia-cutlass-dsl"),
        (host(wheel(content=D), python__abi=undetermined("?")), "package nvidia-cutlass-dsl"),
        (host({}), "package nvidia-cutlass-dsl"),
        (host(wheel() | {"nvidia-cutlass-dsl-libs-cu13": WHEELS["nvidia-cutlass-dsl"]}), "package nvidia-cutlass-dsl-libs-cu13"),
    ],
)
def test_what_differs_is_refused_and_named(environment: Environment, field: str) -> None:
    fields = differs(environment)
    if field == "platform.machine":  # of the key, and of each object
        assert fields == [field, *(f"b12x_moe/{name}.o: machine" for name in ("micro_m1", "static"))]
    else:
        assert fields == [field]


def test_strict_takes_nothing_that_is_merely_compatible() -> None:
    for environment, field in (
        (host(tvm_ffi__version=known("0.1.16")), "tvm_ffi.version"),
        (host(cuda__runtime=known("13.2")), "cuda.release"),
        (host(python__abi=OTHER_PYTHON), "python.abi"),
    ):
        assert differs(environment) == []
        assert differs(environment, strict=True) == [field]
    assert differs(host(), strict=True) == []


def test_the_compiler_is_asked_for_only_where_there_are_kernels() -> None:
    entry = manifest()
    assert requirements([entry]).compiler
    assert requirements([entry]).sources == tuple(sorted(SOURCES))
    assert not requirements([]).compiler


def test_a_model_and_its_larger_entry_come_first() -> None:
    key = manifest().key
    assert rank(key, host(), "120f", size=9)[:-1] > rank(key, host(), "120f", size=8)[:-1]
    plain = replace(key, model="")
    assert rank(plain, host(), "120f", size=9) == rank(plain, host(), "120f", size=8)


def test_a_manifest_of_kernels_survives_a_round_trip() -> None:
    entry = manifest()
    assert parse_manifest(entry.encode()) == entry
    assert entry.key.layout == CUTE_DSL
    assert entry.key.arch == "120a"
    assert entry.key.title == "b12x_moe of Qwen/Qwen3-30B-A3B nvfp4-tp1-ep1"
    assert entry.build_seconds == {"b12x_moe": 6.0}
    assert [artifact.path for artifact in entry.artifacts] == ["b12x_moe/micro_m1.o", "b12x_moe/static.o"]


@pytest.mark.parametrize(
    "changed",
    [
        manifest(build(model="other")),
        manifest(build(variant="nvfp4-tp2-ep1")),
        manifest(build(cuda="13.1")),
        manifest(build(wheels=wheel(content=D))),
        manifest(build(sources={**SOURCES, "fused_moe/x.py": D})),
        manifest(build(gpu=product("rtx-5090").describe())),
        manifest(None, "micro_m1"),
    ],
)
def test_every_ingredient_changes_the_fingerprint(changed: Manifest) -> None:
    assert changed.fingerprint != manifest().fingerprint
    parse_manifest(changed.encode())


def test_what_does_not_decide_leaves_the_fingerprint_alone() -> None:
    others = [
        manifest(build(meta={"arch": "sm120a"})),
        manifest(build(cases=({"id": "two"},))),
        manifest(build(wheels=wheel(portable=Q))),
        manifest(build(gpu=product("rtx-pro-6000").describe() | {"name": "another edition"})),
    ]
    assert {other.fingerprint for other in others} == {manifest().fingerprint}


KERNEL_FIELDS = tuple(json.loads(manifest().encode())["kernels"])


def _without(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for part in path[:-1]:
            document = document[part]
        del document[path[-1]]

    return change


def _with(value: Any, *path: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        for part in path[:-1]:
            document = document[int(part)] if isinstance(document, list) else document[part]
        document[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_without("kernels"), "kernels: there if the layout is cute-dsl"),
        (_with([], "kernels"), "kernels: not an object"),
        *((_without("kernels", name), f"kernels.{name}") for name in KERNEL_FIELDS),
        (_with("other", "kernels", "module"), "kernels.module: not the module of the key"),
        (_with(["../x.py"], "kernels", "key_files"), "kernels.key_files[0]: unsafe path"),
        (_with(["cute_dsl/utils.py"], "kernels", "key_files"), "kernels.key_files: not the files of `sources`"),
        (_with("yes", "kernels", "tvm_ffi"), "kernels.tvm_ffi"),
        (_with([], "kernels", "cases"), "kernels.cases: not a list of objects, or empty"),
        (_with([{"tokens": [1]}], "kernels", "cases"), "kernels.cases[0].id"),
        (_with([{"id": 3, "tokens": [1]}], "kernels", "cases"), "kernels.cases[0].id"),
        (_with([{"id": "x"}], "kernels", "cases"), "kernels.cases[0].tokens: not a list of counts"),
        (_with([{"id": "x", "tokens": []}], "kernels", "cases"), "kernels.cases[0].tokens"),
        (_with([{"id": "x", "tokens": ["1"]}], "kernels", "cases"), "kernels.cases[0].tokens"),
        (_with([{"id": "x", "tokens": [-1]}], "kernels", "cases"), "kernels.cases[0].tokens"),
        (_with([{"id": "x", "tokens": [True]}], "kernels", "cases"), "kernels.cases[0].tokens"),
        (_with([{"id": "x", "tokens": [1], "operation": ["b12x"]}], "kernels", "cases"), "kernels.cases[0].operation"),
        (_with("x", "kernels", "wheels", "nvidia-cutlass-dsl", "content"), "content: not a digest"),
        (_with(D, "kernels", "wheels", "nvidia-cutlass-dsl", "content"), "kernels.wheels: their digest"),
        (_with("b12x_moe/other.o", "artifacts", "0", "path"), "artifacts: their names are not those in the key"),
        (_with("b12x_moe/sub/x.o", "artifacts", "0", "path"), "not an object of module b12x_moe"),
        (_with("nvcc", "key", "layout"), "key.layout"),
        (_with("a b", "key", "model"), "key.model: not a name"),
        (_with("../x", "key", "variant"), "key.variant: not a name"),
        (_without("key", "ingredients", "gpu.sm_count"), "key.ingredients.gpu.sm_count: missing"),
        (_with("x", "key", "ingredients", "build.flags"), "key.ingredients.build.flags: unknown"),
    ],
)
def test_a_manifest_that_is_not_whole_or_contradicts_itself_is_refused(
    change: Callable[[dict[str, Any]], None], told: str
) -> None:
    document = json.loads(manifest().encode())
    change(document)
    with pytest.raises(ManifestError) as raised:
        parse_manifest(json.dumps(document).encode())
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cases": ({"id": "x", "tokens": [1], "operation": "nope"},)}, "does not know what asks for kernels of nope"),
        ({"cases": ({"id": "x", "tokens": [1], "operation": "../../x"},)}, "does not know what asks for kernels of ../../x"),
        ({"cuda": "13.x"}, "'13.x' is no CUDA release"),
        ({"gpu": {"sm_count": 188}}, "description of its GPU cannot be used"),
        ({"gpu": {**product("h200").describe(), "sm_count": "many"}}, "description of its GPU cannot be used"),
        ({"gpu": {**product("h200").describe(), "major": 99}}, "description of its GPU cannot be used"),
        ({"gpu": {**product("h200").describe(), "sm_count": -5}}, "description of its GPU cannot be used"),
        ({"gpu": {**product("h200").describe(), "sm_count": float("inf")}}, "description of its GPU cannot be used"),
    ],
)
def test_an_entry_that_cannot_be_proven_says_so_in_one_line(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    entry = InstalledEntry(manifest=manifest(build(**changes)), manifest_sha256=D, directory=tmp_path)
    with pytest.raises(KcacheError) as raised:
        prove_kernels(Target(host(), base=str(tmp_path)), {}, [entry])
    assert told in str(raised.value)


def test_a_kind_that_this_kcache_does_not_know_is_not_proven(tmp_path: Path) -> None:
    unknown = replace(manifest(), key=replace(manifest().key, kind="what"))
    with pytest.raises(KcacheError, match="does not know what asks for kernels of what"):
        prove_kernels(
            Target(host(), base=str(tmp_path)), {}, [InstalledEntry(manifest=unknown, manifest_sha256=D, directory=tmp_path)]
        )


def test_a_proof_that_failed_says_why() -> None:
    kernels = [{"kernel": name, "accepted": name == "d", "reason": "it is missing"} for name in "abcd"]
    modules = [{"module": "topk", "loaded": True, "ours": False, "error": ""}]
    told = why_unproven(
        {"compiler_runs": 2, "modules": modules, "kernels": {"errors": ["one at 3 tokens: no"], "kernels": kernels}}
    )
    assert "2 compiler runs: topk: not the restored library; one at 3 tokens: no; a: it is missing; and 2 more" in told
    programs = {"errors": [], "programs": [{"program": "p", "accepted": False, "reason": "it is not there"}]}
    assert "0 compiler runs: p: it is not there." in why_unproven({"compiler_runs": 0, "programs": programs})
    assert "0 compiler runs." in why_unproven({"compiler_runs": 0})


@pytest.mark.parametrize(
    ("built", "kernels", "told"),
    [
        (build(), [], "without kernels"),
        (build(), [kernel(elf=replace(ELF, machine="aarch64"))], "compiled for aarch64"),
        (build(), [kernel(elf=replace(ELF, gpu_archs=("sm_90a",)))], "does not hold code for sm_120a"),
        (build(), [kernel(elf=replace(ELF, gpu_archs=()))], "no GPU code"),
        (build(wheels={}), [kernel()], "nvidia-cutlass-dsl could not be found out"),
        (build(wheels=wheel(content="")), [kernel()], "could not be found out"),
        (build(farm=replace(FARM, facts={**FARM.facts, "tvm_ffi.version": undetermined("x")})), [kernel()], "tvm_ffi.version"),
        (build(farm=replace(FARM, facts={**FARM.facts, "python.abi": ABSENT})), [kernel()], "python.abi"),
    ],
)
def test_an_entry_that_would_not_be_true_is_not_made(built: KernelBuild, kernels: list[BuiltKernel], told: str) -> None:
    with pytest.raises(CollectError) as raised:
        kernel_parts(built, kernels)
    assert told in str(raised.value)


def chosen(environment: Environment, *published: Manifest) -> Choice:
    """What is chosen where these entries, all of one model, are published."""
    blob = Blob(path="x", sha256=D, size=1)
    lines = {one.fingerprint: one for one in published}
    group = [
        Candidate(
            entry=IndexEntry(key=one.key, manifest=blob, archive=blob, unpacked_size=1, build_seconds=1.0),
            decision=match_key(one.key, environment, strict=False),
        )
        for one in published
    ]
    decide = partial(match_binary, environment=environment, strict=False)
    return choose(group, environment, read_manifest=lambda entry: lines[entry.key.fingerprint], decide=decide)


def built_for(sm_count: int) -> Manifest:
    return manifest(build(gpu={**build().gpu, "sm_count": sm_count}))


@pytest.mark.parametrize(
    ("counts", "published", "served", "told"),
    [
        ("188", (188,), ["120f"], []),
        ("170 188", (188, 170), ["120f with 170 SMs", "120f with 188 SMs"], []),
        ("170 188", (188,), ["120f with 188 SMs"], ["nothing published for 120f with 170 SMs"]),
        ("170 188", (170, 84), ["120f with 170 SMs"], ["gpu.sm_count", "nothing usable for 120f with 188 SMs"]),
    ],
)
def test_gpus_of_one_architecture_each_need_kernels_of_their_own_sm_count(
    counts: str, published: tuple[int, ...], served: list[str], told: list[str]
) -> None:
    environment = replace(host(), facts={**host().facts, "gpu.sm_count.120f": known(counts)})
    choice = chosen(environment, *(built_for(count) for count in published))
    assert [slot_text(slot) for slot in choice.slots if slot in choice.chosen] == served
    for (_, count), (entry, _) in choice.chosen.items():
        assert count in ("", entry.key.ingredients["gpu.sm_count"])
    lines = why_missing(choice) if choice.missing else []
    assert len(lines) == len(told) and all(text in line for text, line in zip(told, lines, strict=True))


def key(kind: str = "b12x-moe", model: str = "Qwen/Qwen3-30B-A3B", module: str = "b12x_moe") -> EntryKey:
    return EntryKey(kind=kind, modules=(module,), ingredients={}, model=model)


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [
        (Wanted(), True),
        (Wanted(models=("Qwen/Qwen3-30B-A3B",)), True),
        (Wanted(models=("qwen3-30b-a3b",)), True),
        (Wanted(models=("other", "Qwen/*")), True),
        (Wanted(models=("Qwen",)), False),
        (Wanted(kinds=("b12x-moe",)), True),
        (Wanted(kinds=("sampling",)), False),
        (Wanted(kinds=("b12x-moe",), models=("x",)), False),
        (Wanted(modules=("b12x_moe",)), False),
    ],
)
def test_what_a_command_asks_for(wanted: Wanted, taken: bool) -> None:
    assert wanted.takes(key()) is taken


def test_a_model_narrows_only_what_belongs_to_one() -> None:
    assert Wanted(models=("x",)).takes(key("sampling", "", "sampling"))
    assert Wanted(modules=("cascade",), models=("x",)).takes(key("modules", "", "cascade"))


def test_several_models_are_not_restored_unasked() -> None:
    keys = [key(), key(model="other"), key("sampling", "")]
    assert ambiguous_models(keys, Wanted()) == ("Qwen/Qwen3-30B-A3B", "other")
    assert ambiguous_models(keys, Wanted(models=("*",))) == ()
    assert ambiguous_models(keys[1:], Wanted()) == ()


def test_a_described_gpu_survives_its_manifest() -> None:
    described = product("rtx-5090").describe()
    assert from_description(json.loads(json.dumps(described))).describe() == described
    with pytest.raises(ManifestError, match="sm_count"):
        from_description({name: value for name, value in described.items() if name != "sm_count"})


RECORD = """nvidia_cutlass_dsl/a.py,sha256=a,1
nvidia_cutlass_dsl/__pycache__/a.cpython-311.pyc,,
nvidia_cutlass_dsl/_mlir/_cutlass_ir.cu13.cpython-311-x86_64-linux-gnu.so,sha256=b,2
nvidia_cutlass_dsl/_mlir/_cutlass_ir_version_cu13.py,sha256=c,3
nvidia_cutlass_dsl/cu13/lib/libx.a,sha256=d,4
nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so,sha256=e,5
x-1.dist-info/INSTALLER,sha256=f,6
../../../bin/x,sha256=g,7
"""


def installed(directory: Path, record: str | None, version: str = "1", name: str = "x") -> Distribution:
    metadata = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    if record is not None:
        (metadata / "RECORD").write_text(record)
    return Distribution(name=name, version=version, metadata=str(metadata))


def test_a_wheels_portable_digest_leaves_out_what_is_of_one_python_or_installer(tmp_path: Path) -> None:
    def digest_of(record: str | None, version: str = "1") -> Fact:
        return portable_digest(installed(tmp_path / str(abs(hash((record, version)))), record, version))

    other = RECORD.replace("311", "312")
    for letter in "bcdfg":
        other = other.replace(f"={letter},", f"={letter}2,")
    assert digest_of(RECORD).value == digest_of(other).value
    assert digest_of(RECORD).value == digest_of(RECORD.replace("../../../bin/x,", "bin/x,")).value
    assert digest_of(RECORD).value != digest_of(RECORD.replace("../../../bin/x,", "bin/x.py,")).value
    assert digest_of(RECORD).value != digest_of(RECORD, "2").value
    for letter in "ae":
        assert digest_of(RECORD).value != digest_of(RECORD.replace(f"={letter},", "=changed,")).value
    assert digest_of(None).undetermined
    assert digest_of("../../../bin/x,,\n").undetermined


def test_the_compiler_is_every_cutlass_package_and_the_first_of_two_counts(tmp_path: Path) -> None:
    from kcache.probe.packages import scan

    installed(tmp_path / "one", RECORD, "4.8.0", "nvidia-cutlass-dsl")
    installed(tmp_path / "two", RECORD, "4.7.0", "nvidia-cutlass-dsl")
    installed(tmp_path / "two", None, "4.8.0", "nvidia-cutlass-dsl-libs-cu13")
    installed(tmp_path / "two", RECORD, "2.13", "torch")
    wheels = compiler_wheels(scan([str(tmp_path / "one"), str(tmp_path / "two")]))
    assert {name: found.version for name, found in wheels.items()} == {
        "nvidia-cutlass-dsl": "4.8.0",
        "nvidia-cutlass-dsl-libs-cu13": "4.8.0",
    }
    assert wheels["nvidia-cutlass-dsl"].content.startswith("sha256:")
    assert wheels["nvidia-cutlass-dsl-libs-cu13"].content == ""


def test_a_kernel_that_no_call_asks_for_is_not_proven() -> None:
    def answer(*names: str) -> DryRunAnswer:
        kernels = tuple(
            Kernel(name=f"b12x_moe_sm120a_cute_dsl/{name}", kernel=name, module="b12x_moe_sm120a_cute_dsl", path="", cases={},
                   fallback=False, status="accepted")
            for name in names
        )  # fmt: skip
        return DryRunAnswer(
            flashinfer="0.7.4", package="", cache_tag="", soabi="", stack={}, jit_dir="", meta={}, sources={}, key_files=(),
            kernels=kernels, left_out=(), errors=(), compiles=0,
        )  # fmt: skip

    assert proof_of(answer("micro_m1", "static"), [manifest()], 2, 0).proven
    half = proof_of(answer("micro_m1"), [manifest()], 1, 0)
    assert not half.proven
    assert [(one.kernel, one.reason) for one in half.kernels if not one.accepted] == [
        ("static", "no call of its entry asks for it")
    ]
    assert not proof_of(answer("micro_m1", "static"), [manifest()], 2, 1).proven
