"""Entries of the package b12x's programs: their manifests, the rules by key, and the decision about a host.

The rules: kcache/docs/decisions/0006-b12x-package.md; those of single ingredients are in tests/unit/test_b12x_key.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from b12x_samples import ABI, FINGERPRINT, WHEELS, program, target

from kcache.errors import CollectError, IntegrityError, ManifestError, ProbeError
from kcache.gpu_products import product
from kcache.key import B12X, INGREDIENTS, Environment, Fact, known, undetermined
from kcache.kinds.b12x_entry import ProgramBuild, program_parts
from kcache.kinds.b12x_key import Target
from kcache.kinds.b12x_package import B12xPackage
from kcache.kinds.triton_groups import Group
from kcache.local_cache import InstalledEntry, LocalCache
from kcache.manifest import ArchiveFacts, ElfFacts, Manifest, parse_manifest
from kcache.match import match_binary, match_key, requirements
from kcache.workflows import programs as placing
from kcache.workflows.b12x_host import B12xHost, decide

ELF = ElfFacts(machine="x86_64", needed=(), versions={}, gpu_archs=("sm_120a",))
FILES = {"__init__.py": "1" * 64, "moe/kernel.py": "2" * 64}
GROUP = Group(directory="A" * 52, name="_route.json", files={"_route.json": b"{}", "_route.cubin": b"c"})
FARM = Environment(facts={"platform.machine": known("x86_64"), "flashinfer.version": known("0.7.4"), "python.abi": known(ABI)})
PROGRAMS = (program("0"), program("1"))


def build(**changes: Any) -> ProgramBuild:
    return replace(
        ProgramBuild(
            kind="b12x-programs",
            model="test/small",
            variant="nvfp4-tp1-ep1",
            farm=FARM,
            target=target(),
            package=FILES,
            cuda="13.0",
            cute_arch="sm_120a",
            gpu=product("rtx-pro-6000").describe(),
            cases=({"id": "nvfp4-tp1-ep1"},),
            configurations="default",
            triton="3.7.1 x",
            switches={},
            seconds=3.0,
        ),
        **changes,
    )


def manifest(**changes: Any) -> Manifest:
    parts = program_parts(build(**changes), PROGRAMS, {one.key: ELF for one in PROGRAMS}, (GROUP,))
    return Manifest(
        key=parts.key,
        artifacts=parts.artifacts,
        archive=ArchiveFacts(sha256="sha256:" + "d" * 64, size=1, unpacked_size=20),
        sources=parts.sources,
        build_seconds=parts.build_seconds,
        provenance={},
        programs=parts.programs,
    )


def host(archs: tuple[str, ...] = ("120f",), **facts: Fact) -> Environment:
    given = {name.replace("__", "."): fact for name, fact in facts.items()}
    return Environment(
        facts={**FARM.facts, "cuda.runtime": known("13.0"), "gpu.sm_count.120f": known("188"), **given}, archs=archs
    )


class Described(B12xHost):
    """A host whose b12x was found out beforehand; everything else is the real one's."""

    def __init__(self, target: Target, files: dict[str, str] | None = None) -> None:
        self.environ = target.environ
        self._package = B12xPackage(root="/b12x", embedded=False, files=files or FILES, fingerprint=target.fingerprint)
        self._targets = {(target.capability, target.sm_count): target, ((12, 0), 188): target}


def test_a_manifest_of_programs_survives_a_round_trip() -> None:
    entry = manifest()
    assert parse_manifest(entry.encode()) == entry
    assert (entry.key.layout, entry.key.arch, set(entry.key.ingredients)) == (B12X, "120a", set(INGREDIENTS[B12X]))
    assert entry.key.title == "b12x of test/small nvfp4-tp1-ep1"
    assert entry.compiles == 3
    assert requirements([entry]).sources == ()
    assert not requirements([entry]).compiler
    assert len(entry.artifacts) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"variant": "nvfp4-tp2-ep1"},
        {"cuda": "13.1"},
        {"kind": "b12x-candidates"},
        {"farm": replace(FARM, facts={**FARM.facts, "flashinfer.version": known("0.7.2")})},
    ],
)
def test_every_ingredient_changes_the_fingerprint(changes: dict[str, Any]) -> None:
    assert manifest(**changes).fingerprint != manifest().fingerprint


def _damage(change: Callable[[dict[str, Any]], object]) -> bytes:
    document = json.loads(manifest().encode())
    change(document)
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: d.pop("programs"), "programs: there if"),
        (lambda d: d["programs"].update(payload="('x',)"), "programs.payload"),
        (lambda d: d["programs"].update(abi=""), "programs.abi"),
        (lambda d: d["programs"].update(wheels={}), "programs.wheels"),
        (lambda d: d["programs"].update(groups={}), "neither of a program nor of a group"),
        (lambda d: d["programs"].update(groups={"x": "y"}), "programs.groups"),
        (lambda d: d["programs"].update(cases=[1]), "programs.cases"),
        (lambda d: d["programs"].update(triton=None), "programs.triton"),
        (lambda d: d["programs"].update(switches={"A": 1}), "programs.switches.A"),
        (lambda d: d["programs"]["package"].update({"moe/kernel.py": "2"}), "programs.package.moe/kernel.py"),
        (lambda d: d["programs"]["kernels"].update({"f" * 64: "k"}), "artifacts: no programs/ffff"),
        (lambda d: d["programs"]["kernels"].update({"f": "k"}), "programs.kernels"),
        (lambda d: d["artifacts"].pop(), "artifacts"),
        (lambda d: d["key"]["ingredients"].update({"b12x.package": "0"}), "programs.payload"),
        (lambda d: d["key"].update(modules=["c12x"]), "key.modules"),
        (lambda d: d["key"].update(layout="cute-dsl"), "key.ingredients"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(change: Callable[[dict[str, Any]], object], named: str) -> None:
    with pytest.raises(ManifestError) as error:
        parse_manifest(_damage(change))
    assert named in str(error.value)


@pytest.mark.parametrize(
    ("environment", "fields"),
    [
        (host(), []),
        (host(cuda__runtime=known("13.2")), []),
        (host(tvm_ffi__version=known("0.9.0")), []),
        (host(python__abi=known("cpython-312-x86_64-linux-gnu")), []),
        (host(platform__machine=known("aarch64")), ["platform.machine"]),
        (host(flashinfer__version=known("0.7.2.post1")), ["flashinfer.version"]),
        (host(cuda__runtime=known("12.9")), ["cuda.release"]),
        (host(archs=("121a",)), ["gpu.cute_arch"]),
        (host(gpu__sm_count__120f=known("170")), ["gpu.sm_count"]),
        (host(gpu__sm_count__120f=undetermined("no driver")), ["gpu.sm_count"]),
    ],
)
def test_by_key(environment: Environment, fields: list[str]) -> None:
    assert [check.field for check in match_key(manifest().key, environment).differs] == fields


def test_strict_takes_no_other_cuda_release() -> None:
    decision = match_key(manifest().key, host(cuda__runtime=known("13.2")), strict=True)
    assert [check.field for check in decision.differs] == ["cuda.release"]


def test_without_its_host_nothing_is_accepted() -> None:
    assert [check.field for check in match_binary(manifest(), host()).differs] == ["b12x"]
    (check,) = decide(host(), manifest(), strict=False).differs
    assert check.found == "the saved environment does not say which b12x it has: not recorded in this environment"


@pytest.mark.parametrize(
    ("changes", "strict", "fields"),
    [
        ({}, False, []),
        ({}, True, []),
        ({"environ": {"CUDA_HOME": "/x", "CC": "clang"}}, False, []),
        ({"environ": {"CUDA_HOME": "/x"}}, True, ["env CUDA_HOME"]),
        ({"environ": {"CUTE_DSL_LINEINFO": "1"}}, False, ["env CUTE_DSL_LINEINFO"]),
        ({"wheels": {}}, False, ["package nvidia-cutlass-dsl"]),
    ],
)
def test_by_what_its_host_asks_for(changes: dict[str, Any], strict: bool, fields: list[str]) -> None:
    decision = decide(Described(target(**changes)), manifest(), strict=strict)
    assert [check.field for check in decision.differs] == fields
    assert "env CUDA_HOME" in [check.field for check in decision.checks]


def test_another_package_is_refused_by_the_names_of_its_files() -> None:
    files = {"__init__.py": "1" * 64, "moe/kernel.py": "3" * 64, "new.py": "4" * 64}
    decision = decide(Described(target(fingerprint="77" * 32), files), manifest(), strict=False)
    assert [check.field for check in decision.differs] == ["b12x.package: moe/kernel.py", "b12x.package: new.py"]


def test_a_host_without_b12x_is_a_refusal_and_says_so() -> None:
    class Without(Described):
        def target(self, key: object) -> Target:
            raise ProbeError("no b12x is installed")

    (check,) = decide(Without(target()), manifest(), strict=False).differs
    assert (check.field, check.found) == ("b12x.package", "no b12x is installed")


@pytest.mark.parametrize(
    ("changes", "elf", "named"),
    [
        ({"target": target(fingerprint="77" * 32)}, ELF, "another b12x"),
        ({"target": target(sm_count=70)}, ELF, "another GPU"),
        ({"target": target(wheels={"nvidia-cutlass-dsl": replace(WHEELS["nvidia-cutlass-dsl"], content="")})}, ELF, "content"),
        ({}, replace(ELF, machine="aarch64"), "aarch64"),
        ({}, replace(ELF, gpu_archs=()), "does not hold code"),
    ],
)
def test_a_false_entry_is_not_made(changes: dict[str, Any], elf: ElfFacts, named: str) -> None:
    with pytest.raises(CollectError) as error:
        program_parts(build(**changes), PROGRAMS, {one.key: elf for one in PROGRAMS}, ())
    assert named in str(error.value)
    with pytest.raises(CollectError):
        program_parts(build(), (), {}, ())
    other = program("2", environ={"CC": "gcc"})
    with pytest.raises(CollectError, match="another environment"):
        program_parts(build(), (*PROGRAMS, other), {one.key: ELF for one in (*PROGRAMS, other)}, ())


def installed(root: Path) -> InstalledEntry:
    entry = manifest()
    for one in PROGRAMS:
        (root / "programs").mkdir(parents=True, exist_ok=True)
        (root / "programs" / f"{one.key}.o").write_bytes(one.object)
        (root / "programs" / f"{one.key}.json").write_bytes(one.manifest)
    (root / GROUP.directory).mkdir()
    for name, data in GROUP.files.items():
        (root / GROUP.directory / name).write_bytes(data)
    return InstalledEntry(manifest=entry, manifest_sha256="", directory=root)


class _Host(Described):
    """The same with a Triton."""

    triton_version = "3.7.1 x"

    def triton(self, key: Any) -> Any:
        from kcache.workflows.b12x_host import built_triton

        entry = manifest()
        assert entry.programs is not None
        return replace(built_triton(entry, entry.programs), triton=self.triton_version)


def _place(cache: LocalCache, host: B12xHost, entry: InstalledEntry) -> tuple[bool, list[str]]:
    return placing._place(cache, host, entry, 5.0)


def test_programs_are_placed_once_under_the_names_that_the_host_asks_for(tmp_path: Path) -> None:
    cache, entry = LocalCache(tmp_path / "kcache"), installed(tmp_path / "entry")
    cache.prepare()
    home = tmp_path / "home"
    home.mkdir()
    same = _Host(target(environ={"HOME": str(home)}))
    assert _place(cache, same, entry) == (True, [])
    objects = sorted(path.name for path in home.rglob("*.o"))
    assert objects == sorted(f"{one.key}.o" for one in PROGRAMS)
    assert (home / ".triton/cache" / GROUP.directory / "__grp___route.json").is_file()
    before = sorted((str(path), path.stat().st_mtime_ns) for path in home.rglob("*"))
    assert _place(cache, same, entry) == (False, [])
    assert sorted((str(path), path.stat().st_mtime_ns) for path in home.rglob("*")) == before
    damaged = next(iter(sorted(home.rglob("*.o"))))
    damaged.write_bytes(b"x")
    changed, notes = _place(cache, same, entry)
    assert changed
    assert "set aside" in notes[0]
    assert _place(cache, same, entry) == (False, [])
    other = _Host(target(environ={"HOME": str(home), "CUDA_HOME": "/x"}))
    assert _place(cache, other, entry)[0]
    assert len(list(home.rglob("[0-9a-f]*.o"))) == 4


def test_of_another_triton_its_programs_are_left_out_and_named(tmp_path: Path) -> None:
    cache, entry = LocalCache(tmp_path / "kcache"), installed(tmp_path / "entry")
    cache.prepare()
    (tmp_path / "home").mkdir()
    host = _Host(target(environ={"HOME": str(tmp_path / "home")}))
    host.triton_version = "3.8.0 y"
    for changed in (True, False):
        found, notes = _place(cache, host, entry)
        assert found is changed
        assert "left to warmup (_route): triton: wanted 3.7.1 x (equal), found 3.8.0 y" in notes[0]
    assert not (tmp_path / "home/.triton").exists()


def test_a_program_of_another_host_than_its_entry_says_is_not_placed(tmp_path: Path) -> None:
    entry = installed(tmp_path / "entry")
    (tmp_path / "home").mkdir()
    facts = entry.manifest.programs
    assert facts is not None
    foreign = program("3", environ={"CC": "gcc"})
    (entry.directory / "programs" / f"{foreign.key}.o").write_bytes(foreign.object)
    (entry.directory / "programs" / f"{foreign.key}.json").write_bytes(foreign.manifest)
    lying = replace(entry.manifest, programs=replace(facts, kernels={**facts.kernels, foreign.key: "k"}))
    with pytest.raises(IntegrityError, match="compiled elsewhere"):
        _place(
            LocalCache(tmp_path / "kcache"),
            _Host(target(environ={"HOME": str(tmp_path / "home")})),
            replace(entry, manifest=lying),
        )
    assert not list((tmp_path / "home").rglob("*.o"))
    assert FINGERPRINT in facts.payload


def test_what_is_in_the_way_is_an_error_of_that_entry_alone(tmp_path: Path) -> None:
    class _Target:
        id = "0" * 16

        def b12x(self) -> B12xHost:
            return _Host(target(environ={"HOME": str(tmp_path / "home")}))

    cache, entry = LocalCache(tmp_path / "kcache"), installed(tmp_path / "entry")
    cache.prepare()
    (tmp_path / "home/.cache").mkdir(parents=True)
    (tmp_path / "home/.cache/b12x").write_text("in the way")
    done = placing.place_programs(cache, _Target(), [entry], timeout=1.0)  # type: ignore[arg-type]
    assert set(done.failures) == {entry.manifest.fingerprint}
    assert not done.refusals
    (tmp_path / "home/.cache/b12x").unlink()
    done = placing.place_programs(cache, _Target(), [entry], timeout=1.0)  # type: ignore[arg-type]
    assert not done.failures
    assert set(done.new) == {entry.manifest.fingerprint}
    assert cache.read("programs", "0" * 16) == {"entries": [entry.manifest.fingerprint]}
