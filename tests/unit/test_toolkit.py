"""Finding a CUDA toolchain: directories laid out as toolkits and wheels are, and the real wheels of this Python."""

from __future__ import annotations

import os
import platform
import subprocess
import sysconfig
from pathlib import Path

import pytest

from kcache.errors import ProbeError, UsageError
from kcache.probe.toolkit import RELEASE_WHEELS, find_toolkit, make_home, wheel_versions

MACHINE = platform.machine()
SITE = Path(sysconfig.get_path("purelib"))


def _nvcc(root: Path, version: str) -> None:
    """An nvcc that says its version, and with --dryrun where its toolkit lies, as the real one does."""
    (root / "bin").mkdir(parents=True)
    release = ".".join(version.split(".")[:2])
    script = root / "bin" / "nvcc"
    script.write_text(
        "#!/bin/sh\n"
        f'case "$1" in --dryrun) echo "#\\$ TOP={root}/bin/.." ;;\n'
        f'*) echo "Cuda compilation tools, release {release}, V{version}" ;; esac\n'
    )
    script.chmod(0o755)


def _toolkit(root: Path, version: str = "13.0.88", *, headers: tuple[str, ...] = ()) -> Path:
    _nvcc(root, version)
    (root / "include").mkdir()
    for header in ("cuda_runtime.h", *headers):
        (root / "include" / header).touch()
    (root / "include" / "cuda.h").write_text("CUresult CUDAAPI cuInit(unsigned int Flags);\n")
    (root / "lib64").mkdir()
    (root / "lib64" / "libcudart.so.13").touch()
    return root


def _wheels(site: Path, **versions: str | None) -> Path:
    """Site-packages with the release wheels of 13.0 and curand; `nvcc="13.5.1"` changes one, None leaves it out."""
    root = site / "nvidia" / "cu13"
    _nvcc(root, versions.get("nvcc") or "13.0.88")
    (root / "include").mkdir()
    (root / "include" / "cuda.h").write_text("CUresult CUDAAPI cuInit(unsigned int Flags);\n")
    (root / "include" / "curand_kernel.h").touch()
    (root / "lib").mkdir()
    for library in ("libcudart.so.13", "libcurand.so.10"):
        (root / "lib" / library).touch()
    for name in (*RELEASE_WHEELS, "nvidia-curand"):
        version = versions.get(name.split("-")[-1], "10.4.0.35" if name == "nvidia-curand" else "13.0.88")
        if version is not None:
            (site / f"{name.replace('-', '_')}-{version}.dist-info").mkdir()
    return site


def test_wheels_of_one_release_are_found_and_named(tmp_path: Path) -> None:
    found = find_toolkit({"PATH": ""}, [_wheels(tmp_path)])
    assert (found.source, found.nvcc, found.release, found.release_pair) == ("wheels", "13.0.88", "13.0", (13, 0))
    assert found.wheels["nvidia-curand"] == "10.4.0.35"


def test_wheels_of_two_releases_are_refused_with_their_names_and_the_pip_command(tmp_path: Path) -> None:
    with pytest.raises(ProbeError) as caught:
        find_toolkit({}, [_wheels(tmp_path, nvcc="13.5.20", cccl="13.5.11")])
    assert "nvidia-cuda-nvcc 13.5.20" in caught.value.what
    assert "nvidia-cuda-runtime 13.0.88" in caught.value.what
    assert "pip install" in caught.value.remedy
    for name in RELEASE_WHEELS:
        assert f"'{name}==13.0.*'" in caught.value.remedy


@pytest.mark.parametrize("name", ["crt", "nvvm", "runtime", "cccl"])
def test_a_missing_wheel_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ProbeError) as caught:
        find_toolkit({}, [_wheels(tmp_path, **{name: None})])
    wanted = next(wheel for wheel in RELEASE_WHEELS if wheel.endswith(f"-{name}"))
    assert wanted in caught.value.what
    assert f"'{wanted}==13.0.*'" in caught.value.remedy


def test_a_wheel_in_an_earlier_directory_hides_a_later_one(tmp_path: Path) -> None:
    first, second = _wheels(tmp_path / "a"), _wheels(tmp_path / "b", runtime="13.5.1")
    assert wheel_versions([first, second])["nvidia-cuda-runtime"] == "13.0.88"
    assert find_toolkit({}, [first, second]).root == first / "nvidia" / "cu13"


def test_cuda_home_comes_before_wheels_and_is_not_judged_by_them(tmp_path: Path) -> None:
    home = _toolkit(tmp_path / "cuda", "12.8.93")
    found = find_toolkit({"CUDA_HOME": str(home)}, [_wheels(tmp_path / "site", nvcc="13.5.20")])
    assert (found.source, found.root, found.release) == ("CUDA_HOME", home, "12.8")


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_cuda_home_without_nvcc_is_refused(tmp_path: Path, variable: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_toolkit({variable: str(tmp_path)}, [_wheels(tmp_path / "site")])
    assert variable in caught.value.what


def test_nvcc_on_path_is_the_last_choice_also_through_a_wrapper(tmp_path: Path) -> None:
    home = _toolkit(tmp_path / "cuda")
    (tmp_path / "local" / "bin").mkdir(parents=True)
    wrapper = tmp_path / "local" / "bin" / "nvcc"
    wrapper.write_text(f'#!/bin/sh\nexec {home}/bin/nvcc "$@"\n')
    wrapper.chmod(0o755)
    found = find_toolkit({"PATH": f"{wrapper.parent}:/usr/bin:/bin"}, [tmp_path])
    assert (found.source, found.root) == ("PATH", home)


def test_no_toolchain_at_all_is_refused_with_the_pip_command(tmp_path: Path) -> None:
    with pytest.raises(ProbeError) as caught:
        find_toolkit({"PATH": str(tmp_path)}, [tmp_path])
    assert "nvidia-cuda-nvcc" in caught.value.remedy


def test_an_nvcc_that_fails_is_reported_with_its_last_line(tmp_path: Path) -> None:
    home = _toolkit(tmp_path / "cuda")
    (home / "bin" / "nvcc").write_text("#!/bin/sh\necho cannot find libnvvm >&2\nexit 3\n")
    with pytest.raises(ProbeError, match="code 3") as caught:
        find_toolkit({"CUDA_HOME": str(home)}, [])
    assert caught.value.why == "cannot find libnvvm"


def test_a_home_without_curand_is_completed_from_wheels_of_its_major(tmp_path: Path) -> None:
    home = _toolkit(tmp_path / "cuda", headers=("thrust.h",))
    found = find_toolkit({"CUDA_HOME": str(home)}, [_wheels(tmp_path / "site")])
    toolkit = make_home(found, tmp_path / "scratch", MACHINE)
    include = toolkit.home / "include"
    assert (include / "curand_kernel.h").is_file()
    assert (include / "thrust.h").resolve() == home / "include" / "thrust.h"
    assert (include / "cuda.h").resolve() == home / "include" / "cuda.h"
    assert (toolkit.home / "lib64" / "libcurand.so").exists()
    assert toolkit.missing == ("cublas",)
    assert sorted(path.name for path in (home / "include").iterdir()) == ["cuda.h", "cuda_runtime.h", "thrust.h"]


def test_the_folder_is_its_own_parent_of_bin_with_all_that_the_toolkit_has(tmp_path: Path) -> None:
    home = _toolkit(tmp_path / "cuda")
    (home / "targets" / "x86_64-linux" / "include").mkdir(parents=True)
    (home / "targets" / "x86_64-linux" / "include" / "a.h").touch()
    scratch = make_home(find_toolkit({"CUDA_HOME": str(home)}, []), tmp_path / "scratch", MACHINE).home
    assert (scratch / "bin" / ".." / "include").resolve() == home / "include"
    assert (scratch / "bin" / "..").resolve() == scratch
    assert (scratch / "targets" / "x86_64-linux" / "include" / "a.h").is_file()


def test_wheels_of_another_major_complete_nothing(tmp_path: Path) -> None:
    home = _toolkit(tmp_path / "cuda", "12.8.93")
    found = find_toolkit({"CUDA_HOME": str(home)}, [_wheels(tmp_path / "site")])
    toolkit = make_home(found, tmp_path / "scratch", MACHINE)
    assert toolkit.missing == ("curand", "cublas")
    assert not (toolkit.home / "include" / "curand_kernel.h").exists()


def test_a_toolkit_with_its_own_stub_keeps_it_and_the_folder_is_made_anew(tmp_path: Path) -> None:
    home = _toolkit(tmp_path / "cuda")
    found = find_toolkit({"CUDA_HOME": str(home)}, [])
    stub = make_home(found, tmp_path / "scratch", MACHINE).home / "lib64" / "stubs" / "libcuda.so"
    assert stub.read_bytes()[:4] == b"\x7fELF"
    (home / "lib64" / "stubs").mkdir()
    (home / "lib64" / "stubs" / "libcuda.so").write_bytes(b"own")
    make_home(found, tmp_path / "scratch", MACHINE)
    assert stub.read_bytes() == b"own"


@pytest.mark.skipif(not (SITE / "nvidia" / "cu13" / "bin" / "nvcc").exists(), reason="no CUDA wheels in this Python")
def test_the_real_wheels_compile_and_link_with_the_driver_library(tmp_path: Path) -> None:
    found = find_toolkit({"PATH": ""}, [SITE])
    toolkit = make_home(found, tmp_path / "scratch", MACHINE)
    assert (toolkit.home / "lib64" / "libcudart.so").resolve().name == f"libcudart.so.{found.release_pair[0]}"
    (tmp_path / "a.cu").write_text(
        "#include <cuda.h>\n#include <curand_kernel.h>\n"
        '__global__ void k(int* p) { *p = 1; }\nextern "C" int f(int* p) { k<<<1, 1>>>(p); return cuInit(0); }\n'
    )
    home = toolkit.home
    command = [str(home / "bin" / "nvcc"), "-shared", "-Xcompiler", "-fPIC", "-arch=sm_90a", "a.cu", "-o", "a.so"]
    paths = ["-isystem", f"{home}/include", f"-L{home}/lib64", f"-L{home}/lib64/stubs", "-lcudart", "-lcuda"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA", "NVCC"))}
    subprocess.run([*command, *paths], cwd=tmp_path, env=environ, check=True)
    assert b"libcuda.so.1" in (tmp_path / "a.so").read_bytes()
