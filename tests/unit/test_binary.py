"""Facts of built binaries: GPU code of the real nvcc in each spelling, symbol versions of the real linker, damaged files."""

from __future__ import annotations

import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcache.errors import CollectError
from kcache.probe.binary import binary_facts, highest
from kcache.probe.fatbin import FatbinError, gpu_archs
from kcache.probe.toolkit import find_toolkit, make_home

SITE = Path(sysconfig.get_path("purelib"))

needs_nvcc = pytest.mark.skipif(not (SITE / "nvidia" / "cu13" / "bin" / "nvcc").exists(), reason="no CUDA wheels in this Python")
needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc on this host")

KERNEL = "__global__ void kernel(int* p) { *p = 1; }\n"


@pytest.fixture(scope="module")
def cuda_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = find_toolkit({"PATH": ""}, [SITE])
    return make_home(found, tmp_path_factory.mktemp("toolkit") / "cuda", "x86_64").home


def compile_kernel(cuda_home: Path, folder: Path, *flags: str) -> Path:
    (folder / "a.cu").write_text(KERNEL)
    command = [str(cuda_home / "bin" / "nvcc"), "-shared", "-Xcompiler", "-fPIC", "a.cu", "-o", "a.so", f"-L{cuda_home}/lib64"]
    subprocess.run([*command, "-isystem", str(cuda_home / "include"), *flags], cwd=folder, check=True)
    return folder / "a.so"


@pytest.mark.real
@needs_nvcc
@pytest.mark.parametrize("packing", [("-Xfatbin=-compress-all", "--compress-mode=size"), ("--no-compress",)])
@pytest.mark.parametrize("arch", ["89", "90", "90a", "100f", "120a", "120f"])
def test_the_suffix_of_real_gpu_code_is_told(cuda_home: Path, tmp_path: Path, arch: str, packing: tuple[str, ...]) -> None:
    library = compile_kernel(cuda_home, tmp_path, f"-gencode=arch=compute_{arch},code=sm_{arch}", *packing)
    assert binary_facts(library).gpu_archs == (f"sm_{arch}",)


@pytest.mark.real
@needs_nvcc
def test_several_architectures_and_ptx_are_all_told(cuda_home: Path, tmp_path: Path) -> None:
    targets = ["-gencode=arch=compute_90a,code=sm_90a", "-gencode=arch=compute_120f,code=[sm_120f,compute_120f]"]
    library = compile_kernel(cuda_home, tmp_path, *targets)
    assert binary_facts(library).gpu_archs == ("compute_120f", "sm_120f", "sm_90a")


@pytest.mark.real
@needs_nvcc
def test_relocatable_device_code_is_told(cuda_home: Path, tmp_path: Path) -> None:
    library = compile_kernel(cuda_home, tmp_path, "-rdc=true", "-gencode=arch=compute_90a,code=sm_90a")
    assert "sm_90a" in binary_facts(library).gpu_archs


def entry(arch: int, flags: int, payload: bytes, kind: int = 2) -> bytes:
    return struct.pack("<HHIQIIIIIIQ", kind, 0x101, 64, len(payload), 0, 0, 0x10008, arch, 0, 0, flags).ljust(64, b"\0") + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def cubin(osabi: int, flags: int) -> bytes:
    return (b"\x7fELF\x02\x01\x01" + bytes([osabi])).ljust(48, b"\0") + struct.pack("<I", flags) + bytes(12)


@pytest.mark.parametrize(
    ("osabi", "elf_flags", "wanted"),
    [(51, 0x5A0D5A, "sm_90a"), (51, 0x5A055A, "sm_90"), (65, 0x600780A, "sm_90a"), (65, 0x6005A04, "sm_90")],
)
def test_older_toolkits_say_the_suffix_in_the_cubin(osabi: int, elf_flags: int, wanted: str) -> None:
    # The flags are those that ptxas 12.8.93, 12.9.86 and 13.0.88 were seen to write.
    import zstandard

    plain = cubin(osabi, elf_flags)
    assert gpu_archs(container(entry(90, 0x11, plain))) == (wanted,)
    packed = zstandard.ZstdCompressor().compress(plain)
    assert gpu_archs(bytes(8) + container(entry(90, 0x8011, packed))) == (wanted,)


@pytest.mark.parametrize(
    "section",
    [
        b"\x50\xed\x55\xbb" + bytes(20),
        container(entry(90, 0x11, cubin(65, 0)))[:-1],
        struct.pack("<IHHQ", 0xBA55ED50, 1, 8, 0),
        container(entry(90, 0x11, b"not an ELF file")),
        container(entry(90, 0x8011, b"not zstd")),
        container(entry(90, 0x11, cubin(65, 0))[:-4]),
    ],
)
def test_a_layout_that_is_not_known_is_an_error_and_no_guess(section: bytes) -> None:
    with pytest.raises(FatbinError):
        gpu_archs(section)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_end_in_names_or_in_the_one_error(data: bytes) -> None:
    for section in (data, container(data)):
        try:
            gpu_archs(section)
        except FatbinError:
            pass


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ([], {}),
        (["GLIBC_2.2.5", "GLIBC_2.14", "GLIBC_2.4"], {"GLIBC": "2.14"}),
        (["GLIBCXX_3.4", "GLIBCXX_3.4.9", "GLIBCXX_3.4.29"], {"GLIBCXX": "3.4.29"}),
        (["CXXABI_1.3", "GCC_3.0", "libcudart.so.13", "GLIBC_PRIVATE"], {"CXXABI": "1.3"}),
        (["GLIBC_2.34", "GLIBC_ABI_DT_RELR"], {"GLIBC": "2.36"}),
        (["GLIBC_2.38", "GLIBC_ABI_DT_RELR"], {"GLIBC": "2.38"}),
    ],
)
def test_the_highest_version_of_each_prefix_is_kept(names: list[str], wanted: dict[str, str]) -> None:
    assert highest(names) == wanted


@needs_gcc
def test_a_library_without_gpu_code_names_machine_libraries_and_versions(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text(
        "#include <math.h>\n#include <string.h>\ndouble f(double x, void* p) { memset(p, 0, 9); return exp(x); }\n"
    )
    subprocess.run(["gcc", "-O0", "-shared", "-fPIC", "a.c", "-o", "a.so", "-lm"], cwd=tmp_path, check=True)
    facts = binary_facts(tmp_path / "a.so")
    assert facts.machine in ("x86_64", "aarch64")
    assert "libc.so.6" in facts.needed and "libm.so.6" in facts.needed
    said = subprocess.run(["readelf", "-VW", "a.so"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert f"GLIBC_{facts.versions['GLIBC']}" in said
    assert facts.gpu_archs == ()


@needs_gcc
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "executable", "text"])
def test_what_is_no_built_library_is_refused_with_its_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.so"
    (tmp_path / "a.c").write_text("int main(void) { return 0; }\n")
    subprocess.run(["gcc", "-no-pie", "a.c", "-o", "a.so"], cwd=tmp_path, check=True)
    if damage == "missing":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:40])
    elif damage == "text":
        path.write_text("#!/bin/sh\n")
    with pytest.raises(CollectError, match=r"a\.so"):
        binary_facts(path)
