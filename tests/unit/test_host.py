"""What this host is: the facts together, held equal to what the libraries themselves say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kcache import digest
from kcache.errors import UsageError
from kcache.key import ABSENT, parse_environment
from kcache.probe import host, packages
from kcache.probe.libraries import EXPECTED_FROM_DRIVER, Process

REPOSITORY = Path(__file__).parents[2]
FACTS = {
    "platform.machine",
    "platform.system",
    "libc.name",
    "libc.version",
    "libstdcxx.GLIBCXX",
    "libstdcxx.CXXABI",
    "python.version",
    "python.abi",
    "gpu.names",
    "gpu.source",
    "driver.version",
    "cuda.runtime",
    "flashinfer.version",
    "flashinfer.commit",
    "tvm_ffi.version",
    "torch.version",
    "torch.cuda",
    "flashinfer_jit_cache.version",
    "flashinfer_cubin.version",
}


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def probe(*archs: str, environ: dict[str, str] | None = None, python: str | None = None) -> host.Host:
    return host.probe_host(python=python, described_archs=archs, environ={"HOME": os.environ["HOME"], **(environ or {})})


def fake_flashinfer(site: Path, version: str = "0.7.4") -> Path:
    """A package as far as the probe looks at it: it is read, never imported."""
    package = site / "flashinfer"
    write(package / "__init__.py")
    write(package / "_build_meta.py", f'__version__ = "{version}"\n__git_commit__ = "c0ffee"\n')
    write(package / "jit" / "core.py", "recipe\n")
    write(package / "jit" / "gemm" / "core.py", "recipe\n")
    write(package / "jit" / "notes.txt", "no recipe\n")
    write(package / "compilation_context.py", "archs\n")
    write(package / "data" / "csrc" / "sampling.cu", "kernel\n")
    write(package / "data" / "include" / "a" / "b.cuh", "header\n")
    write(package / "data" / "aot" / "x" / "x.so", "library\n")
    return package


def test_every_fact_is_there_and_none_was_forgotten() -> None:
    assert set(probe("9.0a").environment.facts) == FACTS | {"gpu.sm_count.90a"}


def test_nothing_of_the_target_is_imported_and_nothing_is_run(tmp_path: Path) -> None:
    """The path of every restore: no torch, no FlashInfer, no subprocess, no NVML where there is no GPU."""
    script = (
        "import os, sys\nfrom kcache.probe.host import probe_host, resolve\n"
        "h = probe_host(python=None, described_archs=['9.0a'], environ=dict(os.environ))\n"
        "resolve(h, sonames=['libcudart.so.13', 'libc.so.6'], source_paths=['jit/core.py'])\n"
        "banned = {'torch', 'flashinfer', 'tvm_ffi', 'cutlass', 'numpy', 'pynvml', 'subprocess', 'importlib.metadata',\n"
        "          'pathlib', 'elftools', 'rich', 'click', 'packaging', 'sysconfig', 'shutil', 'platform'}\n"
        "print(sorted(banned & set(sys.modules)))"
    )
    # -S: the .pth files of this environment import what they like.
    paths = [str(REPOSITORY), *(entry for entry in sys.path if entry.endswith("site-packages"))]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], env=environ, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_a_described_arch_stands_for_a_gpu_that_is_to_come() -> None:
    found = probe("9.0", "12.0f")
    assert found.environment.archs == ("90a", "120f")
    assert found.environment.fact("gpu.source").value == "described"
    if not found.gpus.gpus and found.paths.process.find("libcuda.so.1") is None:
        resolved = host.resolve(found, sonames=["libcuda.so.1"], source_paths=[])
        assert resolved.library("libcuda.so.1").value == EXPECTED_FROM_DRIVER
        undescribed = host.resolve(probe(), sonames=["libcuda.so.1"], source_paths=[])
        assert undescribed.library("libcuda.so.1") == ABSENT


def test_a_described_arch_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError):
        probe("hopper")


def test_exactly_the_named_sources_are_hashed(tmp_path: Path) -> None:
    package = fake_flashinfer(tmp_path)
    (package / "data" / "csrc" / "closed.cu").mkdir()
    found = probe("9.0a", environ={"PYTHONPATH": str(tmp_path)}, python=sys.executable)
    assert found.paths.flashinfer == str(package)
    names = ["data/csrc/sampling.cu", "data/csrc/none.cu", "data/csrc/sampling.cu/x", "jit/core.py", "data/csrc/closed.cu"]
    resolved = host.resolve(found, sonames=[], source_paths=names)
    assert set(resolved.sources) == set(names)
    assert resolved.source("data/csrc/sampling.cu").value == digest.of_bytes(b"kernel\n")
    assert resolved.source("jit/core.py").value == digest.of_bytes(b"recipe\n")
    assert resolved.source("data/csrc/none.cu") == resolved.source("data/csrc/sampling.cu/x") == ABSENT
    assert resolved.source("data/csrc/closed.cu").undetermined
    assert resolved.source("data/csrc/other.cu").undetermined


def test_a_large_source_is_hashed_whole(tmp_path: Path) -> None:
    large = write(tmp_path / "large.cuh", "x" * 5_000_000)
    for path in (large, write(tmp_path / "empty.cuh"), Path("/proc/self/mountinfo")):
        facts = host.hash_sources(str(path.parent), [path.name])
        assert facts[path.name].value == digest.of_bytes(path.read_bytes())


def test_without_flashinfer_everything_about_it_is_absent(tmp_path: Path) -> None:
    facts = {**packages.flashinfer_facts(None), **host.hash_sources(None, ["jit/core.py"])}
    assert set(facts.values()) == {ABSENT}


def test_the_views_that_kcache_made_are_not_what_is_installed(tmp_path: Path) -> None:
    view = tmp_path / "cache" / "v1" / "site" / "0123"
    real = tmp_path / "real"
    for place in (view, real):
        write(place / "flashinfer_jit_cache" / "__init__.py")
    environ = {"PYTHONPATH": f"{view}:{real}", "KCACHE_DIR": str(tmp_path / "cache")}
    assert probe("9.0a", environ=environ, python=sys.executable).paths.jit_cache == str(real / "flashinfer_jit_cache")
    environ["KCACHE_DIR"] = str(tmp_path / "other")
    assert probe("9.0a", environ=environ, python=sys.executable).paths.jit_cache == str(view / "flashinfer_jit_cache")


@pytest.mark.parametrize(
    ("torch_cuda", "wheel", "expected"),
    [("'12.8'", "13.0.96", "12.8"), ("None", "13.0.96", "13.0"), ("None", None, None)],
    ids=["a CUDA build of torch decides", "then the wheel", "then the system"],
)
def test_the_runtime_is_the_one_that_the_server_would_use(
    tmp_path: Path, torch_cuda: str, wheel: str | None, expected: str | None
) -> None:
    write(tmp_path / "torch" / "__init__.py")
    write(tmp_path / "torch" / "version.py", f"__version__ = '2.13.0'\ncuda: Optional[str] = {torch_cuda}\n")
    if wheel:
        write(tmp_path / f"nvidia_cuda_runtime-{wheel}.dist-info" / "METADATA", f"Name: x\nVersion: {wheel}\n\n")
    found = packages.scan([str(tmp_path)])
    process = Process(executable=sys.executable, machine=os.uname().machine, environ={})
    release = host.cuda_runtime(packages.torch_facts(found.package("torch"))["torch.cuda"], found, process)
    system = next((s for s in ("libcudart.so.13", "libcudart.so.12") if process.find(s)), None)
    if expected is None and system is not None:
        assert (release.value or "").partition(".")[0] == system.rpartition(".")[2]
    else:
        assert release.value == expected


def test_the_saved_document_holds_every_source_and_comes_back_equal(tmp_path: Path) -> None:
    fake_flashinfer(tmp_path)
    whole = host.describe_host(probe("9.0a", environ={"PYTHONPATH": str(tmp_path)}, python=sys.executable))
    assert set(whole.sources) == {
        "compilation_context.py",
        "data/csrc/sampling.cu",
        "data/include/a/b.cuh",
        "__init__.py",
        "_build_meta.py",
        "jit/core.py",
        "jit/gemm/core.py",
    }
    assert whole.fact("flashinfer.tree").known
    assert parse_environment(json.loads(digest.canonical_json(whole.to_json()))) == whole


def test_the_tree_changes_with_one_byte_and_not_with_the_place(tmp_path: Path) -> None:
    def tree(site: Path) -> str | None:
        environ = {"PYTHONPATH": str(site)}
        return host.describe_host(probe("9.0a", environ=environ, python=sys.executable)).fact("flashinfer.tree").value

    package = fake_flashinfer(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two" / "deeper")
    assert tree(tmp_path / "one") == tree(tmp_path / "two" / "deeper")
    before = tree(tmp_path / "one")
    write(package / "data" / "include" / "a" / "b.cuh", "Header\n")
    assert tree(tmp_path / "one") != before


@pytest.mark.real
def test_facts_and_archs_are_what_the_libraries_compute(tmp_path: Path) -> None:
    """`KCACHE_TEST_FLASHINFERS` may name directories, separated by colons, that each hold another FlashInfer."""
    script = (
        "import json, platform, sysconfig, torch, types\n"
        # 0.6.18 asks a GPU for its size while it is imported; a described one answers where there is none.
        "if not torch.cuda.is_available():\n"
        "    torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(multi_processor_count=132, major=9, minor=0)\n"
        "import flashinfer, tvm_ffi\nfrom flashinfer.jit import env\n"
        "try: from flashinfer.version import __git_commit__ as commit\n"
        "except ImportError: from flashinfer.version import __git_version__ as commit\n"
        "print(json.dumps({'flashinfer.version': flashinfer.__version__, 'flashinfer.commit': commit,\n"
        " 'tvm_ffi.version': tvm_ffi.__version__, 'torch.version': str(torch.__version__), 'torch.cuda': torch.version.cuda,\n"
        " 'python.version': platform.python_version(), 'python.abi': sysconfig.get_config_var('SOABI'),\n"
        " 'platform.machine': platform.machine(), 'libc.version': platform.libc_ver()[1],\n"
        " 'workspace': env.FLASHINFER_WORKSPACE_DIR.name, 'package': flashinfer.__path__[0]}))"
    )
    for site in ("", *filter(None, os.environ.get("KCACHE_TEST_FLASHINFERS", "").split(":"))):
        environ = {
            **os.environ,
            "PYTHONPATH": site,
            "FLASHINFER_CUDA_ARCH_LIST": "12.0f 9.0a",
            "FLASHINFER_WORKSPACE_BASE": str(tmp_path),
        }
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        theirs = json.loads(done.stdout.splitlines()[-1])
        ours = host.probe_host(python=sys.executable, described_archs=[], environ=environ)
        assert ours.paths.flashinfer == theirs.pop("package")
        assert "_".join(ours.environment.archs) == theirs.pop("workspace")
        assert {name: ours.environment.fact(name).value for name in theirs} == theirs
