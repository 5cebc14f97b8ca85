"""The parts of a build that need no compiler: its environment, and what ninja prints and records."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcache import digest
from kcache.errors import CollectError
from kcache.probe.ninja import Failure, Ninja, busy_seconds, dependencies, join, parse_dependencies, parse_log, run
from kcache.workflows.build_environ import FLAGS, REMOVED, build_environ, flags_ingredient
from kcache.workflows.compile import ModuleFiles, compile_modules, package_sources


def environ_for(**given: str) -> dict[str, str]:
    built = build_environ(given, arch="120f", cuda_home="/scratch/cuda", workspace="/scratch", python="/venv/bin/python")
    return dict(built.variables)


def test_a_build_says_itself_where_things_lie() -> None:
    given = environ_for(
        CUDA_HOME="/usr/local/cuda", CUDA_PATH="/other", FLASHINFER_CUDA_ARCH_LIST="8.0", PATH="/usr/bin", MAX_JOBS="99"
    )
    assert given["CUDA_HOME"] == "/scratch/cuda"
    assert (given["FLASHINFER_CUDA_ARCH_LIST"], given["CUTE_DSL_ARCH"]) == ("12.0f", "sm_120a")
    assert given["FLASHINFER_WORKSPACE_BASE"] == "/scratch"
    assert given["PATH"] == "/venv/bin:/usr/bin"
    assert not {"CUDA_PATH", "MAX_JOBS"} & set(given)


@pytest.mark.parametrize("name", REMOVED)
def test_what_changes_the_code_unseen_is_kept_out_and_named(name: str) -> None:
    built = build_environ({name: "x"}, arch="90a", cuda_home="/c", workspace="/w", python="/p/python")
    assert name not in built.variables
    assert built.removed == (name,)
    assert built.flags == "default"


@pytest.mark.parametrize("name", FLAGS)
def test_what_changes_flashinfers_flags_is_passed_on_and_enters_the_key(name: str) -> None:
    built = build_environ({name: "1"}, arch="90a", cuda_home="/c", workspace="/w", python="/p/python")
    assert built.variables[name] == "1"
    assert digest.is_digest(built.flags)


def test_flags_that_say_the_default_are_the_default() -> None:
    assert flags_ingredient({"FLASHINFER_JIT_DEBUG": "0", "FLASHINFER_EXTRA_CFLAGS": "", "CC": "gcc-12"}) == "default"
    one, other = flags_ingredient({"FLASHINFER_EXTRA_CFLAGS": "-g"}), flags_ingredient({"FLASHINFER_EXTRA_CFLAGS": "-g3"})
    assert one != other


def test_the_first_error_is_the_line_that_names_one() -> None:
    output = "nvcc --error-limit=9 -c a.cu\na.cu(3): warning: unused\na.cu(7): error: identifier x\n1 error detected\n"
    assert Failure(outputs=("a.o",), output=output).first_error == "a.cu(7): error: identifier x"
    killed = "nvcc -c a.cu\nKilled\nnvcc error   : 'ptxas' died due to signal 9 (Kill signal)\n"
    assert "Killed" in Failure(outputs=("a.o",), output=killed).first_error
    assert Failure(outputs=("a.o",), output="cc -c a.c\nsomething else\n").first_error == "something else"
    assert Failure(outputs=(), output="").first_error == "no output"


def test_stale_records_of_dependencies_are_left_out() -> None:
    text = (
        "/w/a.o: #deps 2, deps mtime 17 (VALID)\n    /src/a.cu\n    ../inc/a.h\n\n"
        "/w/b.o: #deps 1, deps mtime 17 (STALE)\n    /src/b.cu\n\n"
    )
    assert parse_dependencies(text, "/w/x") == {"/w/a.o": ("/src/a.cu", "/w/inc/a.h")}


def test_the_last_time_that_an_output_was_made_counts() -> None:
    log = "# ninja log v7\n0\t1500\t17\t/w/a.o\tabc\n10\t250\t18\t/w/a.o\tabd\n5\t9\t18\t/w/b.o\tabe\nhalf a li"
    assert parse_log(log) == {"/w/a.o": (0.01, 0.25), "/w/b.o": (0.005, 0.009)}


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [([], 0), ([(1, 3)], 2), ([(0, 2), (1, 3)], 3), ([(0, 1), (5, 6)], 2), ([(0, 9), (2, 3)], 9), ([(4, 5), (0, 1)], 2)],
)
def test_waiting_for_others_is_no_build_time(spans: list[tuple[float, float]], wanted: float) -> None:
    assert busy_seconds(spans) == wanted


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (min(pair), max(pair)))))
def test_build_time_is_the_number_of_busy_moments(spans: list[tuple[int, int]]) -> None:
    assert busy_seconds(spans) == len({moment for start, end in spans for moment in range(start, end)})


needs_ninja = pytest.mark.skipif(
    shutil.which("ninja") is None or shutil.which("gcc") is None, reason="needs ninja and gcc on PATH"
)

BUILD_FILE = """ninja_required_version = 1.3
rule compile
  command = gcc -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = gcc -shared $in -o $out

build {folder}/{name}.o: compile {source}
build {folder}/{name}.so: link {folder}/{name}.o
default {folder}/{name}.so
"""


def c_module(tmp_path: Path, name: str, text: str) -> ModuleFiles:
    """A module laid out as FlashInfer lays out its own, in C: the workflow does not ask what the compiler is."""
    package = tmp_path / "package"
    (package / "data").mkdir(parents=True, exist_ok=True)
    (package / "recipe.py").write_text("recipe")
    (package / "data" / "common.h").write_text("#define COMMON 1\n")
    source = package / "data" / f"{name}.c"
    source.write_text(f'#include "common.h"\n{text}\n')
    folder = tmp_path / "ops" / name
    folder.mkdir(parents=True)
    (folder / "build.ninja").write_text(BUILD_FILE.format(folder=folder, name=name, source=source))
    return ModuleFiles(name=name, ninja=folder / "build.ninja", library=folder / f"{name}.so", recipe=("recipe.py",))


@pytest.fixture
def ninja(tmp_path: Path) -> Ninja:
    folder = tmp_path / "ops"
    folder.mkdir()
    return Ninja(program=shutil.which("ninja") or "", folder=folder, file=folder / "kcache.ninja", environ=os.environ)


@needs_ninja
def test_one_module_that_fails_costs_no_other(tmp_path: Path, ninja: Ninja) -> None:
    modules = [c_module(tmp_path, "bad", "int f(void) { return undeclared; }"), c_module(tmp_path, "good", "int g = COMMON;")]
    seen: list[tuple[int, int, str]] = []
    bad, good = compile_modules(modules, ninja, "gcc", 1, lambda *edge: seen.append(edge))
    assert "undeclared" in bad.failed and "error" in bad.failed
    assert bad.log is not None and "undeclared" in bad.log.read_text()
    assert good.failed == "" and good.seconds > 0
    assert {module for _, _, module in seen} == {"bad", "good"}
    sources = package_sources(good, tmp_path / "package")
    assert set(sources) == {"data/good.c", "data/common.h", "recipe.py"}
    assert sources["data/common.h"] == digest.of_bytes(b"#define COMMON 1\n")


@needs_ninja
def test_a_first_build_in_which_everything_fails_says_why(tmp_path: Path, ninja: Ninja) -> None:
    (bad,) = compile_modules([c_module(tmp_path, "bad", "int f(void) { return undeclared; }")], ninja, "gcc", 1)
    assert "undeclared" in bad.failed


@needs_ninja
def test_finished_objects_are_kept_and_those_whose_sources_changed_are_made_again(tmp_path: Path, ninja: Ninja) -> None:
    modules = [c_module(tmp_path, "one", "int a = COMMON;"), c_module(tmp_path, "two", "int b = 2;")]
    compile_modules(modules, ninja, "gcc", 1)
    before = {module.name: module.library.stat().st_mtime_ns for module in modules}
    compile_modules(modules, ninja, "gcc", 1)
    assert {module.name: module.library.stat().st_mtime_ns for module in modules} == before
    source = tmp_path / "package" / "data" / "two.c"
    source.write_text('#include "common.h"\nint b = 3;\n')
    os.utime(source, (1, 1))  # older than the object: ninja alone would not see it
    one, two = compile_modules(modules, ninja, "gcc", 1)
    after = {module.name: module.library.stat().st_mtime_ns for module in modules}
    assert after["one"] == before["one"] and after["two"] > before["two"]
    assert two.read[str(source)] == digest.of_file(str(source))[0]
    assert one.failed == two.failed == ""


@needs_ninja
@pytest.mark.parametrize("change", ["toolchain", "no record", "foreign object"])
def test_objects_that_nobody_vouches_for_are_made_again(tmp_path: Path, ninja: Ninja, change: str) -> None:
    module = c_module(tmp_path, "one", "int a = COMMON;")
    compile_modules([module], ninja, "gcc 12", 1)
    right = module.library.read_bytes()
    if change == "no record":
        (ninja.folder / "kcache-objects.json").unlink()
    if change == "foreign object":
        (module.library.parent / "embedded_0_one.o").write_bytes(b"left by someone")
    before = module.library.stat().st_mtime_ns
    compile_modules([module], ninja, "gcc 13" if change == "toolchain" else "gcc 12", 1)
    assert module.library.stat().st_mtime_ns > before
    assert module.library.read_bytes() == right


@needs_ninja
def test_a_build_of_other_modules_does_not_forget_what_the_first_were_made_of(tmp_path: Path, ninja: Ninja) -> None:
    first, second = c_module(tmp_path, "one", "int a = COMMON;"), c_module(tmp_path, "two", "int b = 2;")
    compile_modules([first], ninja, "gcc", 1)
    compile_modules([second], ninja, "gcc", 1)
    before = first.library.stat().st_mtime_ns
    (again,) = compile_modules([first], ninja, "gcc", 1)
    assert (again.failed, first.library.stat().st_mtime_ns) == ("", before)


@needs_ninja
def test_ninja_that_cannot_work_is_an_error_with_its_own_words(tmp_path: Path, ninja: Ninja) -> None:
    module = c_module(tmp_path, "one", "int a = COMMON;")
    module.ninja.write_text("this is no build file\n")
    join(ninja, [module.ninja])
    with pytest.raises(CollectError) as caught:
        run(ninja, [str(module.library)], 1, tmp_path / "log")
    assert "ninja: error" in caught.value.why
    with pytest.raises(CollectError):
        dependencies(ninja)


@needs_ninja
def test_sources_of_an_editable_install_are_named_by_their_place_in_the_package(tmp_path: Path, ninja: Ninja) -> None:
    module = c_module(tmp_path, "one", "int a = COMMON;")
    package = tmp_path / "package"
    (package / "data").rename(tmp_path / "csrc")
    (package / "data").mkdir()
    (package / "data" / "csrc").symlink_to(tmp_path / "csrc")
    text = module.ninja.read_text().replace(str(package / "data"), str(tmp_path / "csrc"))
    module.ninja.write_text(text)
    (built,) = compile_modules([module], ninja, "gcc", 1)
    assert set(package_sources(built, package)) == {"data/csrc/one.c", "data/csrc/common.h", "recipe.py"}
