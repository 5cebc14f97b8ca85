"""CuTe-DSL kernels: the meta.json that each FlashInfer expects, what must be equal, and installing beside the user's own."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcache import digest
from kcache.errors import IntegrityError, LockTimeoutError, NoSpaceError, ProbeError, TrustError
from kcache.kinds.cute_dsl import (
    RECORDS,
    VERSIONS,
    Installed,
    Target,
    expected_meta,
    meta_rule,
    module_directory,
    read_stack,
    relative_key_files,
    source_digest,
    stack_version,
)
from kcache.kinds.cute_dsl_install import FRESH, MERGE, REPLACE, SET_ASIDE, Found, install_module, plan_install, read_found

FLASHINFERS = [path for path in os.environ.get("KCACHE_TEST_FLASHINFERS", "").split(os.pathsep) if path]
"""Directories, each with another FlashInfer to put on PYTHONPATH; the installed one is always tested."""

PYTHONS = [path for path in os.environ.get("KCACHE_TEST_PYTHONS", "").split(os.pathsep) if path]
"""Other interpreters that have FlashInfer and all it needs (another minor version, installed with uv)."""

needs_flashinfer = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None or importlib.util.find_spec("cutlass") is None,
    reason="FlashInfer and CuTe-DSL are not installed",
)

KEY_FILES = ("fused_moe/cute_dsl/blackwell_sm12x/moe_dispatch.py", "cute_dsl/utils.py")

ASK_THE_LIBRARY = """
import json, os, sys, sysconfig
sys.path.insert(0, sys.argv[1])
import described_gpu
sys.path.pop(0)
fields = dict.fromkeys(described_gpu.FIELDS, 1) | {"name": "x", "major": 12, "minor": 0}
described_gpu.install(fields, "13.0")
import flashinfer
import flashinfer.jit.cute_dsl_core as core
package = os.path.dirname(flashinfer.__file__)
hashed = core._hash_source_files(tuple(os.path.join(package, path) for path in sys.argv[2:]))
spec = core.JitSpecCuteDsl("b12x_moe", "k", None, hashed)
print()
print(json.dumps({"meta": spec.expected_meta, "package": package, "search_path": [p for p in sys.path if p],
    "cache_tag": sys.implementation.cache_tag, "soabi": sysconfig.get_config_var("SOABI"), "module": spec.module_dir_name}))
"""


def ask_the_library(python: str, path: str) -> dict[str, Any]:
    """What FlashInfer itself computes, in a process of its own."""
    children = Path(__file__).parents[2] / "kcache" / "probe" / "children"
    command = [python, "-c", ASK_THE_LIBRARY, str(children), *KEY_FILES]
    environ = {name: value for name, value in os.environ.items() if name != "CUTE_DSL_ARCH"} | {"PYTHONPATH": path}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ, timeout=600)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def worked_out(said: Mapping[str, Any]) -> dict[str, object]:
    target = Target(
        package=said["package"],
        search_path=tuple(said["search_path"]),
        cache_tag=said["cache_tag"],
        soabi=said["soabi"],
        arch="sm_120a",
        environ={},
    )
    return expected_meta(target, KEY_FILES)


@pytest.mark.real
@needs_flashinfer
@pytest.mark.parametrize("path", ["", *FLASHINFERS], ids=lambda path: Path(path).name or "installed")
def test_the_meta_is_what_the_library_computes(path: str) -> None:
    said = ask_the_library(sys.executable, path)
    assert worked_out(said) == said["meta"]
    assert module_directory("b12x_moe", "sm_120a") == said["module"]


@pytest.mark.real
@needs_flashinfer
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).parents[1].name)
def test_the_meta_is_what_the_library_computes_in_another_python(python: str) -> None:
    said = ask_the_library(python, "")
    assert worked_out(said) == said["meta"]
    assert said["cache_tag"] != sys.implementation.cache_tag


@pytest.mark.real
@needs_flashinfer
def test_another_path_and_a_second_copy_of_a_package_are_what_the_library_computes(tmp_path: Path) -> None:
    """A link to the package under another name of its directory, and metadata that shadows the installed one."""
    package = importlib.util.find_spec("flashinfer")
    assert package is not None
    assert package.origin is not None
    (tmp_path / "flashinfer").symlink_to(Path(package.origin).parent)
    extra = tmp_path / "apache_tvm_ffi-9.9.9.dist-info"
    extra.mkdir()
    (extra / "METADATA").write_text("Metadata-Version: 2.1\nName: Apache_TVM.ffi\nVersion: 9.9.9\n\nName: not this\n")
    (extra / "RECORD").write_bytes(b"a.py,sha256=x,1\r\nb.py,,\r\n")
    said = ask_the_library(sys.executable, str(tmp_path))
    assert said["package"] == str(tmp_path / "flashinfer")
    assert worked_out(said) == said["meta"]
    here = ask_the_library(sys.executable, "")
    assert said["meta"]["source_sha256"] != here["meta"]["source_sha256"]  # why a copy elsewhere is a silent miss


def flashinfer_at(directory: Path) -> str:
    """A package with nothing but the installed FlashInfer's rule in it."""
    package = importlib.util.find_spec("flashinfer")
    assert package is not None
    assert package.origin is not None
    jit = directory / "flashinfer" / "jit"
    jit.mkdir(parents=True)
    for name in ("cute_dsl_core.py", "_cute_dsl_source.py"):
        source = Path(package.origin).parent / "jit" / name
        if source.exists():
            (jit / name).write_bytes(source.read_bytes())
    return str(directory / "flashinfer")


@needs_flashinfer
def test_comments_and_docstrings_do_not_change_the_rule_and_code_does(tmp_path: Path) -> None:
    package = flashinfer_at(tmp_path)
    assert meta_rule(package) in (VERSIONS, RECORDS)
    core = Path(package) / "jit" / "cute_dsl_core.py"
    text = core.read_text()
    core.write_text(
        text.replace('    """The CuTe-DSL compilation target', '    """What is compiled for', 1).replace(
            "import torch\n", "import torch  # x\n"
        )
    )
    assert meta_rule(package) in (VERSIONS, RECORDS)
    core.write_text(text.replace('"arch": _get_compile_arch(),', '"arch": _get_compile_arch() + "x",'))
    with pytest.raises(ProbeError, match="decides in another way") as caught:
        meta_rule(package)
    assert "newer kcache" in caught.value.remedy


def test_a_flashinfer_without_the_rule_is_told(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="could not be read"):
        meta_rule(str(tmp_path))
    (tmp_path / "jit").mkdir()
    (tmp_path / "jit" / "cute_dsl_core.py").write_text("x = 1\n")
    with pytest.raises(ProbeError, match="another way"):
        meta_rule(str(tmp_path))


@pytest.mark.parametrize("switch", ["FLASHINFER_CUTE_DSL_DISABLE_CACHE", "FLASHINFER_CUTE_DSL_STRICT_CACHE_KEY"])
def test_a_switch_that_changes_the_rule_is_refused_by_name(switch: str) -> None:
    target = Target(package="/x", search_path=(), cache_tag="", soabi="", arch="sm_90a", environ={switch: "1"})
    with pytest.raises(ProbeError) as caught:
        expected_meta(target, ())
    assert switch in caught.value.why


def one(name: str, version: str = "1", record: str | None = None, direct_url: str | None = None) -> Installed:
    return Installed(name=name, version=version, record=record, direct_url=direct_url)


def test_versions_alone_name_the_stack_up_to_0_7_2() -> None:
    stack = [one("torch"), one("nvidia-cutlass-dsl-libs-base", "4.8.0"), one("nvidia-cutlass-dsl", "4.8.0", "a,b,1\n")]
    assert stack_version(VERSIONS, stack, "t", "s") == "nvidia-cutlass-dsl-libs-base==4.8.0;nvidia-cutlass-dsl==4.8.0"
    assert stack_version(VERSIONS, [one("torch")], "t", "s") == "unknown"


@pytest.mark.parametrize(
    "other", [one("torch", "2"), one("torch", record=""), one("torch", direct_url="{}"), one("Torch", record="x")]
)
def test_every_text_of_a_package_names_the_stack_from_0_7_4_on(other: Installed) -> None:
    base = [one("nvidia-cutlass-dsl"), one("apache_tvm_ffi"), one("numpy")]
    first = stack_version(RECORDS, [*base, one("torch")], "cpython-311", "abi")
    second = stack_version(RECORDS, [*base, other], "cpython-311", "abi")
    assert first != second
    assert first.startswith("cpython-311;abi;apache-tvm-ffi==1:")
    assert "numpy" not in first


def test_a_package_that_does_not_say_what_it_is_is_told(tmp_path: Path) -> None:
    (tmp_path / "torch-2.dist-info").mkdir()
    with pytest.raises(ProbeError, match="does not say what it is"):
        read_stack([str(tmp_path)])
    (tmp_path / "torch-2.dist-info" / "METADATA").write_bytes(b"Name: torch\nVersion: \xff\n")
    with pytest.raises(ProbeError, match="cannot be read"):
        read_stack([str(tmp_path)])


def test_only_packages_of_the_stack_are_read(tmp_path: Path) -> None:
    for name in ("numpy-1.dist-info", "torchvision-1.dist-info", "nvidia_cutlass_dsl_libs_cu13-1.dist-info", "torch.egg-info"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "PKG-INFO").write_text(f"Name: {name.partition('-')[0].removesuffix('.egg')}\nVersion: 1\n")
    assert [found.name for found in read_stack([str(tmp_path), "", f"{tmp_path}/", "/no/such"])] == [
        "nvidia_cutlass_dsl_libs_cu13",
        "torch",
    ]


def test_key_sources_are_named_by_path_inside_the_package(tmp_path: Path) -> None:
    assert relative_key_files("/a/flashinfer", ["/a/flashinfer/x/y.py"]) == ("x/y.py",)
    with pytest.raises(ProbeError, match="outside FlashInfer"):
        relative_key_files("/a/flashinfer", ["/a/flashinfer2/x.py"])
    with pytest.raises(ProbeError, match="cannot be read"):
        source_digest([str(tmp_path / "missing.py")])


META: dict[str, object] = {"arch": "sm120a", "cute_dsl_version": "v", "source_sha256": "s"}
OTHER: dict[str, object] = META | {"source_sha256": "t"}


def found(meta: object, objects: dict[str, str] | None = None, others: tuple[str, ...] = ()) -> Found:
    return Found(exists=True, meta=meta, objects=objects or {}, others=others)


@pytest.mark.parametrize(
    ("there", "owned", "how", "write", "keep", "theirs"),
    [
        (Found(exists=False, meta=None, objects={}, others=()), {}, FRESH, ("a.o", "b.o"), (), ()),
        (found(None), {}, FRESH, ("a.o", "b.o"), (), ()),
        (found(META), {}, MERGE, ("a.o", "b.o"), (), ()),
        (found(META, {"u.o": "9"}), {}, MERGE, ("a.o", "b.o"), (), ("u.o",)),
        (found(META, {"a.o": "1"}), {"a.o": "1"}, MERGE, ("b.o",), ("a.o",), ()),
        (found(META, {"a.o": "cut"}), {"a.o": "1"}, MERGE, ("a.o", "b.o"), (), ()),
        (found(META, {"a.o": "their own"}), {}, MERGE, ("b.o",), ("a.o",), ("a.o",)),
        (found(OTHER, {"u.o": "9"}), {}, SET_ASIDE, ("a.o", "b.o"), (), ("u.o",)),
        (found(OTHER, {"u.o": "9", "a.o": "1"}), {"a.o": "1"}, SET_ASIDE, ("a.o", "b.o"), (), ("u.o",)),
        (found(OTHER, {"a.o": "1"}), {"a.o": "1"}, REPLACE, ("a.o", "b.o"), (), ()),
        (found(None, {"u.o": "9"}), {}, SET_ASIDE, ("a.o", "b.o"), (), ("u.o",)),
        (found(None, {}, ("notes.txt",)), {}, SET_ASIDE, ("a.o", "b.o"), (), ("notes.txt",)),
        (found(["not an object"], {"u.o": "9"}), {}, SET_ASIDE, ("a.o", "b.o"), (), ("u.o",)),
        (found(OTHER), {}, REPLACE, ("a.o", "b.o"), (), ()),
    ],
)
def test_what_is_done_with_a_directory(
    there: Found, owned: dict[str, str], how: str, write: tuple[str, ...], keep: tuple[str, ...], theirs: tuple[str, ...]
) -> None:
    plan = plan_install(there, META, {"a.o": "1", "b.o": "2"}, owned)
    assert (plan.how, plan.write, plan.keep, plan.theirs) == (how, write, keep, theirs)


def test_the_field_that_differs_is_told() -> None:
    assert "meta.json differs in source_sha256" in plan_install(found(OTHER, {"u.o": "9"}), META, {"a.o": "1"}, {}).why


_names = st.sampled_from(["a.o", "b.o", "u.o", "v.o"])


@given(
    meta=st.sampled_from([META, OTHER, None]),
    objects=st.dictionaries(_names, st.sampled_from(["1", "2"])),
    owned=st.dictionaries(_names, st.sampled_from(["1", "2"])),
    wanted=st.dictionaries(_names, st.sampled_from(["1", "2"]), min_size=1),
)
def test_no_plan_loses_a_kernel_of_the_user_or_leaves_ours_beside_another_meta(
    meta: object, objects: dict[str, str], owned: dict[str, str], wanted: dict[str, str]
) -> None:
    plan = plan_install(found(meta, objects), META, wanted, owned)
    of_the_user = {name for name in objects if objects[name] != owned.get(name)} if meta != META else set(objects) - set(owned)
    assert set(plan.theirs) == of_the_user
    if plan.how == MERGE:
        assert meta == META
        assert not of_the_user & set(plan.write)
        assert set(plan.write) | set(plan.keep) == set(wanted)
    else:
        assert set(plan.write) == set(wanted)
        if of_the_user:
            assert plan.how == SET_ASIDE


MODULE = "b12x_moe_sm120a_cute_dsl"


def make(directory: Path, meta: object, **objects: str) -> Path:
    module = directory / MODULE
    module.mkdir(parents=True)
    if meta is not None:
        (module / "meta.json").write_text(json.dumps(meta))
    for name, text in objects.items():
        (module / f"{name}.o").write_text(text)
    return module


def ours(tmp_path: Path, **objects: str) -> tuple[dict[str, Path], dict[str, str]]:
    files, digests = {}, {}
    (tmp_path / "from").mkdir(exist_ok=True)
    for name, text in objects.items():
        files[f"{name}.o"] = tmp_path / "from" / name
        files[f"{name}.o"].write_text(text)
        digests[f"{name}.o"] = digest.of_bytes(text.encode())
    return files, digests


def content(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(directory.iterdir())}


def install(tmp_path: Path, owned: dict[str, str] | None = None, timeout: float = 5.0, **objects: str) -> Any:
    files, digests = ours(tmp_path, **objects)
    return install_module(tmp_path / "ops", MODULE, META, files, digests=digests, owned=owned or {}, timeout=timeout)


def test_a_fresh_directory_holds_the_objects_and_the_meta_as_flashinfer_writes_it(tmp_path: Path) -> None:
    placed = install(tmp_path, a="one", b="two")
    assert content(tmp_path / "ops" / MODULE) == {"a.o": "one", "b.o": "two", "meta.json": json.dumps(META, indent=2)}
    assert placed.plan.how == FRESH
    assert set(placed.objects) == {"a.o", "b.o"}


def test_kernels_of_the_user_under_an_equal_meta_stay_beside_ours(tmp_path: Path) -> None:
    module = make(tmp_path / "ops", META, u="theirs", a="their a")
    before = (module / "meta.json").stat()
    placed = install(tmp_path, a="one", b="two")
    assert content(module) | {"meta.json": ""} == {"a.o": "their a", "b.o": "two", "u.o": "theirs", "meta.json": ""}
    assert (module / "meta.json").stat() == before
    assert set(placed.objects) == {"b.o"}


def test_a_directory_under_another_meta_is_renamed_whole_and_ours_is_fresh(tmp_path: Path) -> None:
    for number in (1, 2):
        make(tmp_path / "ops", OTHER, u="theirs")
        placed = install(tmp_path, a="one")
        aside = tmp_path / "ops" / f"{MODULE}.set-aside-{number}"
        assert placed.set_aside == aside
        assert content(aside) == {"u.o": "theirs", "meta.json": json.dumps(OTHER)}
        assert content(tmp_path / "ops" / MODULE) == {"a.o": "one", "meta.json": json.dumps(META, indent=2)}
        (tmp_path / "ops" / MODULE).rename(tmp_path / f"done{number}")


def test_what_is_only_ours_is_replaced_and_a_damaged_object_of_ours_is_mended(tmp_path: Path) -> None:
    owned = {"a.o": digest.of_bytes(b"one"), "old.o": digest.of_bytes(b"old")}
    make(tmp_path / "ops", OTHER, a="one", old="old")
    assert install(tmp_path, owned, a="one").objects == {"a.o": owned["a.o"]}
    assert sorted(content(tmp_path / "ops" / MODULE)) == ["a.o", "meta.json"]
    assert not list((tmp_path / "ops").glob("*.set-aside-*"))
    (tmp_path / "ops" / MODULE / "a.o").write_text("on")
    assert install(tmp_path, owned, a="one").plan.write == ("a.o",)
    assert (tmp_path / "ops" / MODULE / "a.o").read_text() == "one"


def test_a_second_install_writes_nothing(tmp_path: Path) -> None:
    first = install(tmp_path, a="one", b="two")
    second = install(tmp_path, dict(first.objects), a="one", b="two")
    assert second.plan.write == ()
    assert second.objects == first.objects


def test_bytes_that_are_not_the_entrys_are_refused_and_never_take_the_name(tmp_path: Path) -> None:
    files, digests = ours(tmp_path, a="one")
    files["a.o"].write_text("swapped")
    with pytest.raises(IntegrityError):
        install_module(tmp_path / "ops", MODULE, META, files, digests=digests, owned={}, timeout=5.0)
    assert not (tmp_path / "ops" / MODULE / "a.o").exists()


def test_a_link_in_the_place_of_an_object_is_refused(tmp_path: Path) -> None:
    module = make(tmp_path / "ops", META)
    (tmp_path / "elsewhere").write_text("x")
    (module / "a.o").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrustError):
        install(tmp_path, a="one")
    assert (tmp_path / "elsewhere").read_text() == "x"


def test_what_flashinfer_built_since_under_the_name_of_one_of_ours_is_set_aside_not_deleted(tmp_path: Path) -> None:
    make(tmp_path / "ops", OTHER, a="rebuilt by FlashInfer")
    placed = install(tmp_path, {"a.o": digest.of_bytes(b"one")}, a="one")
    assert placed.set_aside is not None
    assert content(placed.set_aside)["a.o"] == "rebuilt by FlashInfer"


def test_what_is_ours_is_written_down_before_it_is_written_and_whole_only_where_it_is(tmp_path: Path) -> None:
    said: list[tuple[dict[str, str], set[str], list[str]]] = []

    def remember(objects: Any, whole: Any) -> None:
        said.append((dict(objects), set(whole), sorted(path.name for path in (tmp_path / "ops" / MODULE).iterdir())))

    make(tmp_path / "ops", META, mine="damaged", kept="kept", u="theirs")
    owned = {"mine.o": digest.of_bytes(b"mine"), "kept.o": digest.of_bytes(b"kept"), "gone.o": digest.of_bytes(b"gone")}
    files, digests = ours(tmp_path, a="one")
    arguments: dict[str, Any] = {"digests": digests, "owned": lambda: owned, "timeout": 5.0, "remember": remember}
    install_module(tmp_path / "ops", MODULE, META, files, **arguments)
    everything = {"mine.o": owned["mine.o"], "kept.o": owned["kept.o"], **digests}
    assert said[0] == (everything, {"kept.o"}, ["kept.o", "meta.json", "mine.o", "u.o"])
    assert said[1] == (everything, {"kept.o", "a.o"}, ["a.o", "kept.o", "meta.json", "mine.o", "u.o"])


def test_no_room_in_flashinfers_directory_is_found_before_anything_is_touched(tmp_path: Path) -> None:
    module = make(tmp_path / "ops", OTHER, a="one")
    files, digests = ours(tmp_path, a="one", b="two")
    with files["b.o"].open("r+b") as stream:
        stream.truncate(1 << 43)  # sparse: more than any disk here has
    with pytest.raises(NoSpaceError) as told:
        install_module(tmp_path / "ops", MODULE, META, files, digests=digests, owned={"a.o": digests["a.o"]}, timeout=5.0)
    assert "FLASHINFER_WORKSPACE_BASE" in str(told.value)
    assert content(module) == {"a.o": "one", "meta.json": json.dumps(OTHER)}


@pytest.mark.parametrize("kind", ["pipe", "endless", "directory", "huge", "nested", "nothing"])
def test_whatever_lies_where_meta_json_should_is_no_meta_and_is_not_waited_for(tmp_path: Path, kind: str) -> None:
    module = make(tmp_path, None, a="one")
    path = module / "meta.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "huge":
        path.write_text(json.dumps(META) + " " * (1 << 20))
    elif kind == "nested":
        path.write_text("[" * 200_000)
    assert read_found(module).meta is None


def test_unfinished_files_of_builds_and_of_installs_are_nobodys(tmp_path: Path) -> None:
    module = make(tmp_path, META, a="one")
    (module / "b.o.tmp.123").write_text("half")
    (module / "meta.json.tmp.123").write_text("half")
    there = read_found(module)
    assert (set(there.objects), there.others, there.meta) == ({"a.o"}, (), META)


def test_the_lock_is_flashinfers_own_and_waiting_for_it_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "ops" / "tmp").mkdir(parents=True)
    with (tmp_path / "ops" / "tmp" / f"{MODULE}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(LockTimeoutError):
            install(tmp_path, timeout=0.2, a="one")
    assert not (tmp_path / "ops" / MODULE).exists()
    install(tmp_path, a="one")


@needs_flashinfer
def test_flashinfers_filelock_and_ours_exclude_each_other(tmp_path: Path) -> None:
    filelock = pytest.importorskip("filelock")
    (tmp_path / "ops" / "tmp").mkdir(parents=True)
    with filelock.FileLock(tmp_path / "ops" / "tmp" / f"{MODULE}.lock"), pytest.raises(LockTimeoutError):
        install(tmp_path, timeout=0.2, a="one")


def test_neither_torch_nor_flashinfer_nor_importlib_metadata_is_imported() -> None:
    modules = "kcache.kinds.cute_dsl, kcache.kinds.cute_dsl_install, kcache.workflows.kernels"
    code = f"import sys, {modules}; print(' '.join(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "flashinfer", "importlib.metadata", "subprocess", "shutil"} & set(loaded)
