"""The stand-in for libcuda: read back by a library that knows ELF, linked by real linkers, loaded by the real loader."""

from __future__ import annotations

import io
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from hypothesis import given
from hypothesis import strategies as st

from kcache.errors import ProbeError
from kcache.probe.stub_libcuda import driver_symbols, stub_bytes, write_stub

NAMES = ("cuInit", "cuLaunchKernelEx", "cuMemAlloc_v2", "cuTensorMapEncodeTiled")
HERE = platform.machine()

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on this host to link with")


def _tags(elf: ELFFile, tag: str) -> list[str]:
    section = elf.get_section_by_name(".dynamic")
    assert isinstance(section, DynamicSection)
    return [getattr(entry, tag[3:].lower()) for entry in section.iter_tags(tag)]


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", *arguments], check=False, capture_output=True, text=True)


@pytest.mark.parametrize(("machine", "number"), [("x86_64", "EM_X86_64"), ("aarch64", "EM_AARCH64")])
def test_a_reader_of_elf_finds_soname_and_functions(machine: str, number: str) -> None:
    elf = ELFFile(io.BytesIO(stub_bytes(machine, NAMES)))
    assert elf.header["e_machine"] == number
    assert elf.header["e_type"] == "ET_DYN"
    assert _tags(elf, "DT_SONAME") == ["libcuda.so.1"]
    assert _tags(elf, "DT_NEEDED") == []
    symbols = [symbol for symbol in elf.get_section_by_name(".dynsym").iter_symbols() if symbol.name]
    assert [symbol.name for symbol in symbols] == sorted(NAMES)
    text = elf.get_section_by_name(".text")
    assert {symbol["st_value"] for symbol in symbols} == {text["sh_addr"]}
    assert {segment["p_type"] for segment in elf.iter_segments()} == {"PT_LOAD", "PT_DYNAMIC", "PT_GNU_STACK"}


def test_the_aarch64_function_returns_34() -> None:
    elf = ELFFile(io.BytesIO(stub_bytes("aarch64", NAMES)))
    # mov w0, #34; ret: as assembled by LLVM 14's assembler.
    assert elf.get_section_by_name(".text").data() == bytes.fromhex("40048052c0035fd6")


@given(st.lists(st.from_regex(r"cu[A-Z][A-Za-z0-9_]{0,40}", fullmatch=True), max_size=60))
def test_every_name_is_found_through_the_hash_table(names: list[str]) -> None:
    elf = ELFFile(io.BytesIO(stub_bytes("x86_64", names)))
    table = elf.get_section_by_name(".hash")
    for name in names:
        assert table.get_symbol(name).name == name
    assert stub_bytes("x86_64", reversed(names)) == stub_bytes("x86_64", names)


def test_an_unknown_machine_is_refused_with_the_remedy() -> None:
    with pytest.raises(ProbeError) as caught:
        stub_bytes("riscv64", NAMES)
    assert "CUDA_HOME" in caught.value.remedy


def test_the_loader_takes_it_and_a_call_says_that_this_is_a_stub(tmp_path: Path) -> None:
    write_stub(tmp_path / "libcuda.so.1", HERE, NAMES)
    program = "import ctypes, sys, os; print(ctypes.CDLL(sys.argv[1], mode=os.RTLD_LAZY).cuMemAlloc_v2(0))"
    done = _python(program, str(tmp_path / "libcuda.so.1"))
    assert (done.returncode, done.stdout.strip()) == (0, "34"), done.stderr


@needs_gcc
@pytest.mark.parametrize("linker", ["bfd", "gold", "lld"])
def test_a_linker_that_drops_unused_libraries_keeps_it_where_the_driver_is_called(tmp_path: Path, linker: str) -> None:
    if shutil.which(f"ld.{linker}") is None:
        pytest.skip(f"no ld.{linker} on this host")
    (tmp_path / "stubs").mkdir()
    write_stub(tmp_path / "stubs" / "libcuda.so", HERE, NAMES)
    (tmp_path / "a.c").write_text("int cuInit(unsigned); int f(void) { return cuInit(0); }\n")
    link = ["gcc", f"-fuse-ld={linker}", "-shared", "-fPIC", "a.c", "-o", "a.so", "-Wl,--as-needed", "-Wl,--no-undefined"]
    subprocess.run([*link, f"-L{tmp_path}/stubs", "-lcuda"], cwd=tmp_path, check=True)
    with (tmp_path / "a.so").open("rb") as stream:
        assert "libcuda.so.1" in _tags(ELFFile(stream), "DT_NEEDED")


def test_names_are_taken_from_the_header() -> None:
    header = """
    #define cuMemAlloc                          cuMemAlloc_v2
    CUresult CUDAAPI cuInit(unsigned int Flags);
    CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap* tensorMap);
    typedef enum cudaError_enum { CUDA_SUCCESS = 0 } CUresult; /* acuX */
    """
    assert driver_symbols(header) == ("cuInit", "cuMemAlloc", "cuMemAlloc_v2", "cuTensorMapEncodeTiled")
