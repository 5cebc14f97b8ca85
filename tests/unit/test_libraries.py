"""Where the loader finds a library: held equal to what the real loader does, and to pyelftools."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection

from kcache.key import ABSENT, known
from kcache.probe import packages
from kcache.probe.elf import NotElfError, machine_of, read_library
from kcache.probe.libraries import (
    DRIVER_LIBRARY,
    EXPECTED_FROM_DRIVER,
    Process,
    libc_facts,
    library_facts,
    libstdcxx_facts,
    read_loader_cache,
)

MACHINE = os.uname().machine


def process(executable: str | Path = sys.executable, **attributes: object) -> Process:
    values: dict[str, object] = {"environ": {}, **attributes}
    return Process(executable=str(executable), machine=MACHINE, **values)  # type: ignore[arg-type]


def compile_c(output: Path, text: str, *options: str) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    source = output.parent / f"{output.name}.c"
    source.write_text(text)
    subprocess.run(["cc", "-o", str(output), str(source), *options], check=True, capture_output=True, timeout=60)
    return output


def shared(output: Path, *options: str, text: str = "int found(void) { return 1; }\n") -> Path:
    return compile_c(output, text, "-shared", "-fPIC", f"-Wl,-soname,{output.name}", *options)


def system_libraries() -> list[str]:
    cached = read_loader_cache("/etc/ld.so.cache", MACHINE)
    names = [name for name in ("libstdc++.so.6", "libc.so.6", "libm.so.6", "libgcc_s.so.1", "libz.so.1") if name in cached]
    found = packages.scan(sys.path)
    extra = [f"{found.package('tvm_ffi')}/lib/libtvm_ffi.so", f"{found.package('torch')}/lib/libtorch_cpu.so", sys.executable]
    return [cached[name] for name in names] + [path for path in extra if Path(path).exists()]


@pytest.mark.parametrize("path", system_libraries(), ids=lambda path: Path(path).name)
def test_a_library_is_read_as_pyelftools_reads_it(path: str) -> None:
    ours = read_library(path)
    with open(path, "rb") as stream:
        elf = ELFFile(stream)
        section = elf.get_section_by_name(".dynamic")
        assert isinstance(section, DynamicSection)
        tags = list(section.iter_tags())
        defined = elf.get_section_by_name(".gnu.version_d")
        versions: list[str] = []
        if isinstance(defined, GNUVerDefSection):
            versions = [next(iter(aux)).name for entry, aux in defined.iter_versions() if not entry["vd_flags"] & 1]
    assert list(ours.needed) == [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
    assert ours.soname == next((tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"), "")
    assert list(ours.rpath) == [part for tag in tags if tag.entry.d_tag == "DT_RPATH" for part in tag.rpath.split(":")]
    assert list(ours.runpath) == [part for tag in tags if tag.entry.d_tag == "DT_RUNPATH" for part in tag.runpath.split(":")]
    assert list(ours.defines) == versions
    assert ours.machine == machine_of(path) == MACHINE


def test_damaged_files_are_an_error_and_nothing_worse(tmp_path: Path) -> None:
    data = shared(tmp_path / "libwhole.so").read_bytes()
    damaged = tmp_path / "libdamaged.so"
    for length in (0, 3, 10, 40, 64, 200, 500, len(data) // 3):
        damaged.write_bytes(data[:length])
        with pytest.raises(NotElfError):
            read_library(str(damaged))
    for position in range(0, 1200, 7):
        damaged.write_bytes(data[:position] + b"\xff\xff\xff\xff" + data[position + 4 :])
        try:
            read_library(str(damaged))
        except NotElfError:
            continue


def test_the_machine_of_other_files_is_none(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no library")
    (tmp_path / "elf32").write_bytes(b"\x7fELF\x01\x01" + bytes(100))
    assert machine_of(str(tmp_path / "text")) is None
    assert machine_of(str(tmp_path / "elf32")) is None
    assert machine_of(str(tmp_path / "none")) is None


def test_the_cache_is_read_as_ldconfig_prints_it() -> None:
    printed = subprocess.run(["ldconfig", "-p"], check=True, capture_output=True, text=True, timeout=60).stdout
    expected: dict[str, str] = {}
    wanted = {"x86_64": "(libc6,x86-64", "aarch64": "(libc6,AArch64"}[MACHINE]
    for line in printed.splitlines():
        name, _, rest = line.strip().partition(" ")
        if rest.startswith(wanted) and "hwcap" not in rest:
            expected.setdefault(name, rest.partition(" => ")[2])
    assert expected
    assert read_loader_cache("/etc/ld.so.cache", MACHINE) == expected


def test_what_the_cache_names_is_found_wherever_it_lies() -> None:
    here = process()
    for soname, path in read_loader_cache("/etc/ld.so.cache", MACHINE).items():
        found = here.find(soname)
        assert found is not None, soname
        assert Path(found).samefile(path), soname


def test_a_cache_that_cannot_be_read_is_empty(tmp_path: Path) -> None:
    whole = Path("/etc/ld.so.cache").read_bytes()
    for data in (b"", b"glibc-ld.so.cache1.1", whole[:100], whole[:-2000], b"x" * 500):
        (tmp_path / "cache").write_bytes(data)
        read_loader_cache(str(tmp_path / "cache"), MACHINE)
    assert read_loader_cache(str(tmp_path / "none"), MACHINE) == {}
    old = b"ld.so-1.7.0\0" + struct.pack("<I", 0)
    (tmp_path / "cache").write_bytes(old + whole)
    assert read_loader_cache(str(tmp_path / "cache"), MACHINE) == read_loader_cache("/etc/ld.so.cache", MACHINE)


LOADER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
int main(int argc, char **argv) {
  for (int i = 1; i < argc; i++) {
    void *handle = dlopen(argv[i], RTLD_NOW);
    struct link_map *map;
    if (!handle || dlinfo(handle, RTLD_DI_LINKMAP, &map)) { printf("none\\n"); continue; }
    printf("%s\\n", map->l_name);
  }
  return 0;
}
"""


def loaded(program: Path, soname: str, environ: dict[str, str]) -> str | None:
    """What the real loader takes, in a program that stands for the interpreter."""
    done = subprocess.run([str(program), soname], env=environ, check=True, capture_output=True, text=True, timeout=60)
    answer = done.stdout.strip()
    return None if answer == "none" else answer


@pytest.fixture
def rooms(tmp_path: Path) -> Path:
    """The same soname in several directories, as conda, a container and LD_LIBRARY_PATH have it."""
    for name in ("prefix/lib", "library_path", "second", "preload"):
        shared(tmp_path / name / "libkcachetest.so.6")
    return tmp_path


@pytest.mark.parametrize("tags", ["--disable-new-dtags", "--enable-new-dtags"], ids=["rpath", "runpath"])
@pytest.mark.parametrize("library_path", ["", "library_path", "missing:second:library_path"])
@pytest.mark.parametrize("preload", [False, True])
def test_the_first_library_is_the_one_that_the_loader_takes(rooms: Path, tags: str, library_path: str, preload: bool) -> None:
    """An interpreter's DT_RPATH (conda's) comes before LD_LIBRARY_PATH; its DT_RUNPATH is not for what modules need."""
    program = compile_c(rooms / "prefix" / "bin" / "python", LOADER, f"-Wl,{tags},-rpath,$ORIGIN/../lib", "-ldl")
    linked = rooms / "elsewhere" / "python"
    linked.parent.mkdir()
    linked.symlink_to(program)
    environ = {}
    if library_path:
        environ["LD_LIBRARY_PATH"] = ":".join(str(rooms / part) for part in library_path.split(":"))
    if preload:
        environ["LD_PRELOAD"] = str(rooms / "preload" / "libkcachetest.so.6")
    # The program's own dlopen would use its DT_RUNPATH, so a module asks, and then the program for what is there by then.
    module = shared(rooms / "modules" / "libmodule.so", f"-L{rooms}/second", "-Wl,--no-as-needed", "-l:libkcachetest.so.6")
    done = subprocess.run(
        [str(linked), str(module), "libkcachetest.so.6"], env=environ, check=True, capture_output=True, text=True, timeout=60
    )
    module_found, found = done.stdout.split()
    ours = process(linked, environ=environ).find("libkcachetest.so.6")
    if module_found == "none":
        assert ours is None
    else:
        assert ours is not None
        assert Path(ours).samefile(found)


def test_libraries_of_another_machine_are_passed_over(rooms: Path) -> None:
    other = rooms / "missing" / "libkcachetest.so.6"
    other.parent.mkdir()
    data = bytearray((rooms / "second" / "libkcachetest.so.6").read_bytes())
    data[18:20] = struct.pack("<H", 183 if MACHINE == "x86_64" else 62)
    other.write_bytes(data)
    environ = {"LD_LIBRARY_PATH": f"{other.parent}:{rooms / 'second'}"}
    program = compile_c(rooms / "bin" / "python", LOADER, "-ldl")
    assert loaded(program, "libkcachetest.so.6", environ) == str(rooms / "second" / "libkcachetest.so.6")
    assert process(program, environ=environ).find("libkcachetest.so.6") == str(rooms / "second" / "libkcachetest.so.6")


def torch_like(folder: Path, *, dtags: str) -> Path:
    """A torch package whose global dependencies need a CUDA library of a wheel, as in a CUDA build."""
    site = folder / "site"
    shared(site / "nvidia" / "cu13" / "lib" / "libcudart.so.13")
    shared(site / "nvidia" / "cu13" / "lib" / "libcurand.so.10")
    shared(
        site / "torch" / "lib" / "libtorch_global_deps.so",
        f"-L{site}/nvidia/cu13/lib",
        "-Wl,--no-as-needed",
        "-l:libcudart.so.13",
        f"-Wl,{dtags},-rpath,$ORIGIN:$ORIGIN/../../nvidia/cu13/lib",
    )
    return site


@pytest.mark.parametrize("dtags", ["--disable-new-dtags", "--enable-new-dtags"], ids=["rpath", "runpath"])
@pytest.mark.parametrize("other", [False, True], ids=["alone", "beside LD_LIBRARY_PATH"])
def test_a_cuda_build_of_torch_has_loaded_its_runtime_before_a_module_asks(tmp_path: Path, dtags: str, other: bool) -> None:
    site = torch_like(tmp_path, dtags=dtags)
    environ = {}
    if other:
        shared(tmp_path / "toolkit" / "libcudart.so.13")
        environ["LD_LIBRARY_PATH"] = str(tmp_path / "toolkit")
    program = compile_c(tmp_path / "bin" / "python", LOADER, "-ldl")
    command = [str(program), str(site / "torch" / "lib" / "libtorch_global_deps.so"), "libcudart.so.13"]
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=60)
    ours = process(program, environ=environ, search_path=(str(site),), torch=str(site / "torch"), torch_cuda="13.0").find(
        "libcudart.so.13"
    )
    assert ours is not None
    assert Path(ours).samefile(done.stdout.split()[1])


def test_wheels_count_only_where_torch_loads_them(tmp_path: Path) -> None:
    site = torch_like(tmp_path, dtags="--disable-new-dtags")
    cuda = process(search_path=(str(site),), torch=str(site / "torch"), torch_cuda="13.0")
    assert cuda.find("libcurand.so.10") == f"{site}/nvidia/cu13/lib/libcurand.so.10"
    assert process(search_path=(str(site),), torch=str(site / "none")).find("libcurand.so.10") in (
        None,
        read_loader_cache("/etc/ld.so.cache", MACHINE).get("libcurand.so.10"),
    )


def test_a_cpu_build_of_torch_counts_wheels_only_where_the_gpu_host_is_still_to_come(tmp_path: Path) -> None:
    """A farm and an image build have a CPU torch and the runtime's wheel; the GPU host's torch loads what lies in that wheel."""
    library = shared(tmp_path / "nvidia" / "cu13" / "lib" / "libcufile.so.77")
    cpu = process(search_path=(str(tmp_path),), torch=str(tmp_path / "none"))
    assert library_facts(cpu, ["libcufile.so.77"], driver_expected=True)["libcufile.so.77"] == known(str(library))
    assert library_facts(cpu, ["libcufile.so.77"], driver_expected=False)["libcufile.so.77"] == ABSENT


def test_tvm_ffi_comes_from_its_package_and_from_nowhere_else(tmp_path: Path) -> None:
    shared(tmp_path / "path" / "libtvm_ffi.so")
    environ = {"LD_LIBRARY_PATH": str(tmp_path / "path")}
    assert process(environ=environ).find("libtvm_ffi.so") is None
    inside = shared(tmp_path / "tvm_ffi" / "lib" / "libtvm_ffi.so")
    assert process(environ=environ, tvm_ffi=str(tmp_path / "tvm_ffi")).find("libtvm_ffi.so") == str(inside)


def test_the_driver_is_expected_only_where_it_is_to_come(tmp_path: Path) -> None:
    host = process(environ={})
    if host.find(DRIVER_LIBRARY) is not None:
        pytest.skip("this host has a driver")
    assert library_facts(host, [DRIVER_LIBRARY], driver_expected=True)[DRIVER_LIBRARY].value == EXPECTED_FROM_DRIVER
    assert library_facts(host, [DRIVER_LIBRARY], driver_expected=False)[DRIVER_LIBRARY] == ABSENT
    assert library_facts(host, ["libnone.so.1"], driver_expected=True)["libnone.so.1"] == ABSENT
    here = shared(tmp_path / DRIVER_LIBRARY)
    found = library_facts(process(environ={"LD_LIBRARY_PATH": str(tmp_path)}), [DRIVER_LIBRARY], driver_expected=True)
    assert found[DRIVER_LIBRARY].value == str(here)


@pytest.mark.parametrize(
    ("text", "expected"), [("glibc 2.36", "2.36"), ("", None), ("musl 1.2.4", None), ("glibc", None), ("glibc x", None)]
)
def test_only_glibc_has_a_version(text: str, expected: str | None) -> None:
    facts = libc_facts(text)
    assert facts["libc.version"].value == expected
    assert bool(facts["libc.name"].undetermined) == (expected is None)


def test_the_highest_version_counts_by_numbers(tmp_path: Path) -> None:
    names = ["GLIBCXX_3.4", "GLIBCXX_3.4.9", "GLIBCXX_3.4.30", "CXXABI_1.3.13", "CXXABI_1.3.9"]
    of_other_series = ["GLIBCXX_LDBL_3.4.99", "CXXABI_TM_9", "CXXABI_1.3.99_private"]
    text = "".join(f"void f{number}(void) {{}}\n" for number, _ in enumerate([*names, *of_other_series]))
    script = "".join(f"{name} {{ global: f{number}; }};\n" for number, name in enumerate([*names, *of_other_series]))
    (tmp_path / "map").write_text(script)
    path = shared(tmp_path / "libstdc++.so.6", f"-Wl,--version-script={tmp_path}/map", text=text)
    facts = libstdcxx_facts(str(path))
    assert (facts["libstdcxx.GLIBCXX"].value, facts["libstdcxx.CXXABI"].value) == ("3.4.30", "1.3.13")


def test_without_libstdcxx_the_versions_are_absent_and_without_versions_undetermined(tmp_path: Path) -> None:
    assert set(libstdcxx_facts(None).values()) == {ABSENT}
    assert all(fact.undetermined for fact in libstdcxx_facts(str(shared(tmp_path / "libstdc++.so.6"))).values())
    (tmp_path / "text").write_text("no library")
    assert all(fact.undetermined for fact in libstdcxx_facts(str(tmp_path / "text")).values())


@pytest.mark.real
def test_the_libraries_of_this_host_are_those_that_a_process_with_flashinfer_has(tmp_path: Path) -> None:
    script = (
        "import flashinfer, ctypes\nprint('\\n'.join(sorted({l.split()[-1] for l in open('/proc/self/maps') if '.so' in l})))"
    )
    environ = {**os.environ, "FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environ, check=True, capture_output=True, text=True, timeout=300)
    theirs = {os.path.realpath(path) for path in done.stdout.split()}
    found = packages.scan(sys.path)
    host = process(environ=environ, search_path=found.search_path, torch=found.package("torch"), tvm_ffi=found.package("tvm_ffi"))
    for soname in ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libtvm_ffi.so", "libgomp.so.1"):
        ours = host.find(soname)
        assert ours is not None, soname
        assert os.path.realpath(ours) in theirs, soname
