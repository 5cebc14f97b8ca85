"""What FlashInfer's tuner writes of an environment: worked out by kcache, and by the library in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tuning_children import CHILDREN, FLASHINFERS, GPU, environ_of, host_of, worked_out

from kcache.errors import ProbeError
from kcache.key import ABSENT, known
from kcache.kinds.autotune import (
    DSL,
    FIELDS,
    check_store_rule,
    environment_hash,
    meant,
    metadata_fields,
)

ASK_THE_LIBRARY = """
import json, sys
sys.path.insert(0, sys.argv[1])
import described_gpu
sys.path.pop(0)
import torch
cuda = torch.version.cuda
described_gpu.describe(described_gpu.of_capability(9, 0) | {"name": sys.argv[2]}, "13.0")
import flashinfer
torch.version.cuda = cuda
from flashinfer.autotuner import _collect_metadata
answer = {"metadata": _collect_metadata()}
try:
    from flashinfer.autotune_cache import ManagedAutotuneCache, MeasurementPolicy, get_default_cache_root
    policy = MeasurementPolicy(execution_mode="eager", cold_l2=False)
    plain = ManagedAutotuneCache(answer["metadata"])
    measured = ManagedAutotuneCache(answer["metadata"] | policy.manifest_fields())
    answer |= {"env_hash": plain.env_hash, "measured_hash": measured.env_hash, "measured": measured.manifest,
        "root": str(plain.root), "env_dir": str(plain.env_dir)}
except ImportError:
    pass
print()
print(json.dumps(answer))
"""


def ask_the_library(environ: Mapping[str, str], python: str = sys.executable) -> dict[str, Any]:
    command = [python, "-c", ASK_THE_LIBRARY, str(CHILDREN), GPU]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environ, timeout=600)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compiled(directory: Path, soname: str, function: str, body: str) -> None:
    """A shared library that answers as NVIDIA's does."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    directory.mkdir(parents=True, exist_ok=True)
    source = directory / f"{soname}.c"
    source.write_text(f"#include <stddef.h>\n{function} {{ {body} }}\n")
    target = str(directory / soname)
    subprocess.run([compiler, "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", target, str(source)], check=True, timeout=60)


def cublas_at(directory: Path, soname: str, version: tuple[int, int, int], prefix: str = "cublas") -> None:
    body = f"static const int numbers[] = {{{', '.join(map(str, version))}}}; *value = numbers[which]; return 0;"
    compiled(directory, soname, f"int {prefix}GetProperty(int which, int *value)", body)


@pytest.mark.real
@pytest.mark.parametrize("path", ["", *FLASHINFERS], ids=lambda path: Path(path).name or "installed")
def test_the_environment_is_what_the_library_writes(path: str, tmp_path: Path) -> None:
    """Without any of NVIDIA's libraries: FlashInfer writes `unknown` for what is absent, and kcache knows that it is."""
    environ = environ_of(path, tmp_path, {})
    said, host = ask_the_library(environ), worked_out(environ)
    assert host.written() == said["metadata"]
    assert tuple(host.fields) == tuple(sorted(said["metadata"], key=[*FIELDS, DSL].index))
    assert host.fields["cuda_version"].absent
    assert host.fields["cublas_version"].absent
    assert host.fields["cudnn_version"].absent
    assert host.fields["cudnn_frontend_version"].known
    if "env_hash" in said:
        assert environment_hash(host.written()) == said["env_hash"]
        assert environment_hash(said["measured"]) == said["measured_hash"] != said["env_hash"]
        assert said["env_dir"] == f"{tmp_path}/.cache/flashinfer/autotune/v2/{said['env_hash']}"
    else:
        assert DSL not in said["metadata"]


PYTHONS = [path for path in os.environ.get("KCACHE_TEST_PYTHONS", "").split(os.pathsep) if path]


@pytest.mark.real
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).parents[1].name)
def test_the_environment_is_what_the_library_writes_in_another_python(python: str, tmp_path: Path) -> None:
    """With a CUDA build of torch, cuBLAS and cuDNN come from its wheels, and torch says which cuDNN."""
    environ = environ_of("", tmp_path, {})
    assert worked_out(environ, python).written() == ask_the_library(environ, python)["metadata"]


@pytest.mark.real
@pytest.mark.parametrize("path", ["", *FLASHINFERS[:1]], ids=lambda path: Path(path).name or "installed")
def test_libraries_on_the_loaders_path_are_what_the_library_writes(path: str, tmp_path: Path) -> None:
    libraries = tmp_path / "lib"
    cublas_at(libraries, "libcublas.so", (13, 1, 7))
    compiled(libraries, "libcudnn.so.9", "size_t cudnnGetVersion(void)", "return 91501;")
    environ = environ_of(path, tmp_path, {"LD_LIBRARY_PATH": str(libraries)})
    said, host = ask_the_library(environ), worked_out(environ)
    assert host.written() == said["metadata"]
    assert (host.fields["cublas_version"], host.fields["cudnn_version"]) == (known("13.1.7"), known("91501"))


@pytest.mark.real
def test_cublas_of_the_second_name_and_of_a_wheel_are_what_the_library_writes(tmp_path: Path) -> None:
    wheels = tmp_path / "site"
    for name, version in (("nvidia_cublas-13.2.1.1", "13.2.1.1"), ("nvidia_cublas_cu12-12.9.1.4", "12.9.1.4")):
        info = wheels / f"{name}.dist-info"
        info.mkdir(parents=True)
        title = name.partition("-")[0].replace("_", "-")
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: {version}\n")
    environ = environ_of(str(wheels), tmp_path, {})
    assert worked_out(environ).written()["cublas_version"] == "12.9.1"
    assert worked_out(environ).written() == ask_the_library(environ)["metadata"]
    libraries = tmp_path / "lib"
    cublas_at(libraries, "libcublasLt.so", (13, 0, 2), prefix="cublasLt")
    environ["LD_LIBRARY_PATH"] = str(libraries)
    assert worked_out(environ).fields["cublas_version"] == known("13.0.2")
    assert worked_out(environ).written() == ask_the_library(environ)["metadata"]


@pytest.mark.real
def test_a_frontend_that_cannot_be_imported_could_not_be_found_out_and_one_that_is_missing_is_absent(tmp_path: Path) -> None:
    """FlashInfer writes `unknown` for both; only the second may be published or matched."""
    (tmp_path / "cudnn").mkdir()
    (tmp_path / "cudnn" / "__init__.py").write_text("raise ImportError('libcudnn.so.9: cannot open shared object file')\n")
    environ = environ_of(str(tmp_path), tmp_path, {})
    host = worked_out(environ)
    assert ask_the_library(environ)["metadata"]["cudnn_frontend_version"] == "unknown"
    assert "libcudnn.so.9" in host.fields["cudnn_frontend_version"].undetermined
    with pytest.raises(ProbeError, match="cudnn_frontend_version"):
        host.written()
    assert meant("unknown", host.fields["cudnn_frontend_version"]).undetermined
    assert meant("unknown", ABSENT) == ABSENT


def test_a_rule_that_is_not_known_is_not_applied(tmp_path: Path) -> None:
    package = Path(host_of(os.environ).paths.flashinfer or "")
    copy = tmp_path / "flashinfer"
    (copy / "autotuner").mkdir(parents=True)
    for name in ("autotuner/autotuner.py", "autotune_cache.py"):
        shutil.copyfile(package / name, copy / name)
    assert metadata_fields(str(copy)) == (*FIELDS, DSL)
    check_store_rule(str(copy))
    tuner, store = copy / "autotuner/autotuner.py", copy / "autotune_cache.py"
    tuner.write_text(tuner.read_text().replace("        # not fatal -- we just", "        # we just"))
    assert metadata_fields(str(copy)) == (*FIELDS, DSL)
    tuner.write_text(tuner.read_text().replace('meta["gpu"] = torch', 'meta["gpu_name"] = torch'))
    with pytest.raises(ProbeError, match="another way which tuning results"):
        metadata_fields(str(copy))
    store.write_text(store.read_text().replace('_SCHEMA = "v2"', '_SCHEMA = "v3"'))
    with pytest.raises(ProbeError, match="managed store"):
        check_store_rule(str(copy))
    with pytest.raises(ProbeError, match="could not be read"):
        check_store_rule(str(tmp_path))
