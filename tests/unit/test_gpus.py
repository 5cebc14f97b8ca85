"""GPUs and architectures: what a process would see, and what FlashInfer would compile for (case B29)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kcache.errors import UsageError
from kcache.key import ABSENT
from kcache.probe import cuda, gpus
from kcache.probe.gpus import Gpu, GpuReport

H200 = Gpu(index=0, name="NVIDIA H200", uuid="GPU-aaaa1111-0000-0000-0000-000000000000", capability=(9, 0))
RTX = Gpu(index=1, name="NVIDIA RTX PRO 6000", uuid="GPU-aaaa2222-0000-0000-0000-000000000000", capability=(12, 0))
SPARK = Gpu(index=2, name="NVIDIA GB10", uuid="GPU-bbbb3333-0000-0000-0000-000000000000", capability=(12, 1))
B300 = Gpu(index=3, name="NVIDIA B300", uuid="GPU-cccc4444-0000-0000-0000-000000000000", capability=(10, 3))
MIXED = (H200, RTX, SPARK, B300)
TWINS = (H200, Gpu(index=1, name="NVIDIA H200", uuid="GPU-dddd5555-0000-0000-0000-000000000000", capability=(9, 0)))

FAKE_NVML = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* Says what FAKE_GPUS says: "name|uuid|major|minor" separated by ';'. FAKE_INIT is what nvmlInit_v2 returns. */
static char rows[8][4][96];
static unsigned count;
int nvmlInit_v2(void) {
  const char *code = getenv("FAKE_INIT");
  char text[4096];
  if (code && atoi(code)) return atoi(code);
  strncpy(text, getenv("FAKE_GPUS"), sizeof text - 1);
  char *save, *row = strtok_r(text, ";", &save);
  for (count = 0; row; row = strtok_r(0, ";", &save), count++)
    sscanf(row, "%95[^|]|%95[^|]|%95[^|]|%95s", rows[count][0], rows[count][1], rows[count][2], rows[count][3]);
  return 0;
}
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "Driver/library version mismatch" : "other"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "580.65.06"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { *out = count; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) { *out = rows[index]; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) {
  *major = atoi(((char (*)[96])gpu)[2]); *minor = atoi(((char (*)[96])gpu)[3]); return 0;
}
int nvmlDeviceGetName(void *gpu, char *out, unsigned size) { snprintf(out, size, "%s", ((char (*)[96])gpu)[0]); return 0; }
int nvmlDeviceGetUUID(void *gpu, char *out, unsigned size) { snprintf(out, size, "%s", ((char (*)[96])gpu)[1]); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **out) {
  if (strcmp(uuid, "MIG-second")) return 6;
  *out = rows[1]; return 0;
}
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *mig, void **out) { *out = mig; return 0; }
"""


def visible(wanted: str | None, found: tuple[Gpu, ...] = MIXED, *, by_bus: bool = True) -> list[int] | str:
    chosen = gpus.select_visible(found, wanted, by_bus=by_bus, mig_parents={"MIG-one": 1})
    return chosen if isinstance(chosen, str) else [gpu.index for gpu in chosen]


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("-1", []),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 3 ", [1, 3]),
        ("1gpu,2ampere", [1, 2]),
        ("+1", [1]),
        ("0,-1,1", [0]),
        ("0,7,1", [0]),
        ("0,x,1", [0]),
        ("0,0", []),
        ("nothing", []),
        ("GPU-bbbb3333", [2]),
        (f"{B300.uuid},{H200.uuid}", [3, 0]),
        ("GPU-aaaa", []),
        ("GPU-bbbb,GPU-bbbb3333", []),
        ("GPU-bbbb,1", [2]),
        ("GPU-none,GPU-bbbb", []),
        ("MIG-one", [1]),
        ("MIG-one,MIG-two", [1]),
        ("MIG-two", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(wanted: str | None, expected: list[int]) -> None:
    assert visible(wanted) == expected


@pytest.mark.parametrize("wanted", ["0", "1", "1,0"])
def test_a_number_among_different_gpus_counted_by_speed_is_not_guessed(wanted: str) -> None:
    assert "CUDA_DEVICE_ORDER" in str(visible(wanted, by_bus=False))
    assert visible(wanted, TWINS, by_bus=False) == [int(part) for part in wanted.split(",")]


def test_all_of_different_gpus_need_no_order() -> None:
    assert visible("3,2,1,0", by_bus=False) == [3, 2, 1, 0]
    assert visible(None, by_bus=False) == [0, 1, 2, 3]


@pytest.mark.real
def test_the_visible_devices_are_those_that_torch_counts() -> None:
    values = [None, "", "-1", "0", "1,0", "0,0", "0,9,1", "1gpu,0x", "GPU-aaaa1", "GPU-a", "GPU-aaaa1,GPU-d", "GPU-a,GPU-a"]
    script = """
import json, os, sys
import torch.cuda as c
uuids, answers = json.loads(sys.argv[1]), []
for value in json.loads(sys.argv[2]):
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if value is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = value
    devices = c._parse_visible_devices()
    if devices and isinstance(devices[0], str):
        devices = c._transform_uuid_to_ordinals(devices, uuids)
    first_bad = next((i for i, device in enumerate(devices) if device >= len(uuids)), len(devices))
    answers.append(devices[:first_bad])
print(json.dumps(answers))
"""
    command = [sys.executable, "-c", script, json.dumps([gpu.uuid for gpu in TWINS]), json.dumps(values)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    assert [visible(value, TWINS) for value in values] == json.loads(done.stdout)


def choose(
    *,
    described: tuple[str, ...] = (),
    listed: str | None = None,
    report: GpuReport | None = None,
    release: tuple[int, int] | None = (13, 0),
) -> gpus.ArchChoice:
    return gpus.choose_archs(described=described, listed=listed, gpus=report or GpuReport(), release=lambda: release)


@pytest.mark.parametrize(
    ("capability", "release", "expected"),
    [
        ((8, 0), (12, 8), "80"),
        ((8, 9), (13, 0), "89"),
        ((9, 0), (12, 8), "90a"),
        ((10, 0), (13, 0), "100a"),
        ((10, 3), (13, 0), "103a"),
        ((12, 0), (12, 8), "120a"),
        ((12, 0), (12, 9), "120f"),
        ((12, 0), (13, 0), "120f"),
        ((12, 1), (12, 9), "121a"),
    ],
)
def test_the_arch_of_a_gpu_depends_on_the_cuda_release(
    capability: tuple[int, int], release: tuple[int, int], expected: str
) -> None:
    report = GpuReport(gpus=(Gpu(index=0, name="a GPU", uuid="GPU-1", capability=capability),))
    chosen = choose(report=report, release=release)
    assert (chosen.archs, chosen.source.value) == ((expected,), "gpu")


def test_mixed_gpus_are_joined_in_the_order_of_flashinfers_directories() -> None:
    assert choose(report=GpuReport(gpus=(B300, RTX, H200, SPARK, H200))).archs == ("90a", "103a", "120f", "121a")


def test_no_gpu_and_no_list_is_no_arch_and_not_an_error() -> None:
    chosen = choose()
    assert chosen.archs == ()
    assert chosen.source == ABSENT


@pytest.mark.parametrize(("capability", "release"), [((12, 1), (12, 8)), ((12, 0), (12, 6)), ((12, 0), None)])
def test_a_gpu_that_this_cuda_cannot_name_has_no_arch_and_a_reason(
    capability: tuple[int, int], release: tuple[int, int] | None
) -> None:
    chosen = choose(report=GpuReport(gpus=(Gpu(index=0, name="a GPU", uuid="GPU-1", capability=capability),)), release=release)
    assert chosen.archs == ()
    assert "CUDA" in chosen.source.undetermined


def test_the_release_is_only_asked_when_a_name_needs_it() -> None:
    def never() -> tuple[int, int] | None:
        raise AssertionError("asked")

    for described in (("9.0",), ("12.0f", "12.1a"), ("10.3",)):
        gpus.choose_archs(described=described, listed=None, gpus=GpuReport(), release=never)


def test_described_comes_before_the_list_and_the_list_before_gpus() -> None:
    report = GpuReport(gpus=(H200,))
    assert choose(described=("12.0f",), listed="10.0", report=report).archs == ("120f",)
    chosen = choose(listed="12.1a 10.0", report=report)
    assert (chosen.archs, chosen.source.value) == (("100a", "121a"), "FLASHINFER_CUDA_ARCH_LIST")


@pytest.mark.parametrize(
    "listed", ["", " ", "9.0a ", "9.0a  12.0f", "9.0a,12.0f", "9.0a;12.0f", "90a", "sm_90a", "x.y", "9.", ".0"]
)
def test_a_list_that_flashinfer_would_stumble_over_is_undetermined(listed: str) -> None:
    chosen = choose(listed=listed, report=GpuReport(gpus=(H200,)))
    assert chosen.archs == ()
    assert "FLASHINFER_CUDA_ARCH_LIST" in chosen.source.undetermined


def test_a_described_arch_that_is_none_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        choose(described=("hopper",))


def fake_nvcc(folder: Path, release: str) -> Path:
    path = folder / f"cuda-{release}" / "bin" / "nvcc"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
    path.chmod(0o755)
    return path.parent.parent


@pytest.mark.real
def test_archs_and_release_are_what_flashinfer_computes(tmp_path: Path) -> None:
    """Every list with every toolkit, in FlashInfer itself and in kcache."""
    lists = ["9.0", "9.0a", "12.0", "12.0f", "12.0a", "12.1", "10.3", "8.0 9.0a", "12.1a 9.0 10.3", "12.0 12.1", "8.9", "11.0"]
    lists += ["", "9.0a ", "9.0a,12.0f", "90a", "10.0f"]
    homes = [str(fake_nvcc(tmp_path, release)) for release in ("12.6", "12.8", "12.9", "13.0")] + [str(tmp_path / "none")]
    script = (
        "import json, os, sys\nfrom flashinfer.jit import cpp_ext\n"
        "from flashinfer.compilation_context import CompilationContext\n"
        "answers = []\n"
        "for home in json.loads(sys.argv[1]):\n"
        "    os.environ['CUDA_HOME'] = home; cpp_ext.get_cuda_path.cache_clear(); cpp_ext.get_cuda_version.cache_clear()\n"
        "    for listed in json.loads(sys.argv[2]):\n"
        "        os.environ['FLASHINFER_CUDA_ARCH_LIST'] = listed\n"
        "        try: answers.append([f'{a}{b}' for a, b in sorted(CompilationContext().TARGET_CUDA_ARCHS)])\n"
        "        except Exception: answers.append(None)\n"
        "print(json.dumps(answers))"
    )
    environ = {**os.environ, "FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    command = [sys.executable, "-c", script, json.dumps(homes), json.dumps(lists)]
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=300)
    answers = iter(json.loads(done.stdout.splitlines()[-1]))
    for home in homes:
        release = cuda.naming_release(cuda.toolkit_release({"CUDA_HOME": home}), ABSENT)
        for listed in lists:
            theirs, ours = next(answers), choose(listed=listed, release=release)
            assert list(ours.archs) == (theirs or []), (home, listed)
            assert bool(ours.source.undetermined) == (theirs is None), (home, listed)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A library that speaks NVML's C interface: what is tested is our side of it, on a host that has no GPU."""
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "fake.c").write_text(FAKE_NVML)
    library = folder / gpus.NVML_LIBRARY
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(folder / "fake.c")], check=True, timeout=60)
    return str(library)


def asked(nvml: str, environ: Mapping[str, str]) -> dict[str, object]:
    """What `find_gpus` answers in a process of its own: a library is only loaded once in each."""
    script = (
        "import json, os, sys\nfrom kcache.probe.gpus import find_gpus\nr = find_gpus(os.environ, sys.argv[1])\n"
        "print(json.dumps({'gpus': [[g.index, g.name, g.uuid, *g.capability] for g in r.gpus], 'problem': r.problem,"
        " 'driver': r.driver.describe(), 'names': r.names.describe()}))"
    )
    base = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    command = [sys.executable, "-c", script, nvml]
    done = subprocess.run(command, env={**base, **environ}, check=True, capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


TWO = "NVIDIA H200|GPU-1111|9|0;NVIDIA RTX PRO 6000|GPU-2222|12|0"


def test_nvml_answers_become_gpus(nvml: str) -> None:
    answer = asked(nvml, {"FAKE_GPUS": TWO})
    assert answer["gpus"] == [[0, "NVIDIA H200", "GPU-1111", 9, 0], [1, "NVIDIA RTX PRO 6000", "GPU-2222", 12, 0]]
    assert answer["driver"] == "580.65.06"
    assert answer["names"] == "NVIDIA H200; NVIDIA RTX PRO 6000"


def test_a_mig_device_is_asked_for_its_gpu(nvml: str) -> None:
    assert asked(nvml, {"FAKE_GPUS": TWO, "CUDA_VISIBLE_DEVICES": "MIG-second"})["names"] == "NVIDIA RTX PRO 6000"
    assert asked(nvml, {"FAKE_GPUS": TWO, "CUDA_VISIBLE_DEVICES": "MIG-other"})["gpus"] == []


def test_a_driver_that_is_not_loaded_is_no_gpu(nvml: str) -> None:
    answer = asked(nvml, {"FAKE_GPUS": TWO, "FAKE_INIT": "9"})
    assert (answer["gpus"], answer["problem"], answer["driver"]) == ([], "", "absent")


def test_a_driver_that_does_not_answer_is_a_problem_and_never_no_gpu(nvml: str) -> None:
    answer = asked(nvml, {"FAKE_GPUS": TWO, "FAKE_INIT": "18"})
    assert "version mismatch" in str(answer["problem"])
    assert "could not be found out" in str(answer["names"])


def test_a_library_that_is_not_nvml_is_a_problem(tmp_path: Path) -> None:
    broken = tmp_path / gpus.NVML_LIBRARY
    broken.write_bytes(b"no library")
    assert asked(str(broken), {})["problem"]


def test_a_problem_with_the_gpus_leaves_the_archs_undetermined() -> None:
    chosen = choose(report=GpuReport(problem="NVML: it is broken"))
    assert chosen.archs == ()
    assert "broken" in chosen.source.undetermined


def test_without_driver_and_library_nothing_is_loaded() -> None:
    script = (
        "import sys\nfrom kcache.probe.gpus import find_gpus\nr = find_gpus({}, None)\n"
        "assert not r.gpus and r.driver.absent and not r.problem, r\n"
        "assert not {'ctypes', 'pynvml'} & set(sys.modules)"
    )
    if any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg")):
        pytest.skip("this host has a GPU")
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_toolkit_that_states_its_release_is_not_run(tmp_path: Path) -> None:
    home = fake_nvcc(tmp_path, "12.9")
    assert cuda.toolkit_release({"CUDA_HOME": str(home)}).value == "12.9"
    (home / "version.json").write_text('{"cuda_nvcc": {"name": "CUDA NVCC", "version": "12.8.93"}}')
    (home / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert cuda.toolkit_release({"CUDA_HOME": str(home)}).value == "12.8"


def test_an_nvcc_that_does_not_run_is_undetermined_and_none_is_absent(tmp_path: Path) -> None:
    home = fake_nvcc(tmp_path, "12.9")
    (home / "bin" / "nvcc").write_text("#!/bin/sh\nexit 1\n")
    assert cuda.toolkit_release({"CUDA_HOME": str(home)}).undetermined
    assert cuda.toolkit_release({"CUDA_PATH": str(tmp_path / "none"), "PATH": str(home / "bin")}) == ABSENT


def test_nvcc_is_looked_for_where_flashinfer_looks(tmp_path: Path) -> None:
    first, second = fake_nvcc(tmp_path, "12.8"), fake_nvcc(tmp_path, "12.9")
    assert cuda.find_nvcc({"CUDA_HOME": str(first), "CUDA_PATH": str(second)}) == f"{first}/bin/nvcc"
    assert cuda.find_nvcc({"CUDA_PATH": str(second), "PATH": str(first / "bin")}) == f"{second}/bin/nvcc"
    assert cuda.find_nvcc({"PATH": f"{tmp_path}:{first}/bin:{second}/bin"}) == f"{first}/bin/nvcc"


def test_the_toolkit_names_archs_before_torch_does() -> None:
    from kcache.key import known, undetermined

    assert cuda.naming_release(known("12.8"), known("13.0")) == (12, 8)
    assert cuda.naming_release(ABSENT, known("12.9")) == (12, 9)
    assert cuda.naming_release(undetermined("broken"), known("12.9")) == (12, 9)
    assert cuda.naming_release(ABSENT, ABSENT) is None
