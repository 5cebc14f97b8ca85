"""`kcache doctor`: every known reason, found on hosts that have it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from container import Container
from entries import make_fitting_entry, publish

from kcache import fsops
from kcache.key import known, undetermined
from kcache.probe.caches import cache_root
from kcache.probe.gpus import Gpu, GpuReport
from kcache.probe.host import Host, probe_host
from kcache.workflows import doctor
from kcache.workflows.doctor_kernels import check_compiler
from kcache.workflows.findings import ERROR, WARNING, Finding, Patient
from kcache.workflows.target import TargetRequest

REPOSITORY = Path(__file__).parents[2]


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def fake_site(site: Path, version: str = "0.7.4", env_py: str = "Ignoring incompatible") -> Path:
    """A FlashInfer, a torch for CUDA and a tvm_ffi, as far as they are read."""
    write(site / "flashinfer" / "__init__.py")
    write(site / "flashinfer" / "_build_meta.py", f'__version__ = "{version}"\n__git_commit__ = "c0ffee"\n')
    write(site / "flashinfer" / "jit" / "env.py", f"# {env_py}\n")
    return site


def findings(*archs: str, site: Path | None = None, **environ: str) -> dict[str, Finding]:
    base = {"HOME": os.environ["HOME"], "PATH": os.environ["PATH"], "PYTHONPATH": str(site or "")}
    found = doctor.examine(TargetRequest(python=sys.executable, archs=archs), {**base, **environ})
    return {finding.code: finding for finding in found}


def test_a_good_host_has_no_findings() -> None:
    assert findings("9.0a") == {}


@pytest.mark.parametrize("name", ["flashinfer-jit-cache", "flashinfer-cubin"])
@pytest.mark.parametrize("check", ["", "1"])
@pytest.mark.parametrize("env_py", ["Ignoring incompatible", "raise"])
def test_b27_a_package_off_by_one_version_is_named_with_both(tmp_path: Path, name: str, check: str, env_py: str) -> None:
    site, module = fake_site(tmp_path, env_py=env_py), name.replace("-", "_")
    write(site / module / "__init__.py")
    write(site / f"{module}-0.7.3.dist-info" / "METADATA", f"Name: {name}\nVersion: 0.7.3\n\n")
    finding = findings("9.0a", site=site, FLASHINFER_DISABLE_VERSION_CHECK=check)["companion-version"]
    for word in (name, "0.7.3", "0.7.4", "FLASHINFER_DISABLE_VERSION_CHECK=1", "does not relax kcache's matching"):
        assert word in finding.what
    assert f"{name}==0.7.4" in finding.remedy
    stops = env_py == "raise" and not check
    assert finding.severity == (ERROR if stops else WARNING)


@pytest.mark.parametrize(
    ("name", "version", "fine"),
    [
        ("flashinfer-jit-cache", "0.7.4+cu130", True),
        ("flashinfer-jit-cache", "0.7.4", True),
        ("flashinfer-jit-cache", "0.7.40", False),
        ("flashinfer-jit-cache", "0.7.4.post1+cu130", False),
        ("flashinfer-cubin", "0.7.4", True),
        ("flashinfer-cubin", "0.7.4+cu130", False),
    ],
)
def test_only_the_suffix_that_flashinfer_allows_is_allowed(tmp_path: Path, name: str, version: str, fine: bool) -> None:
    site = fake_site(tmp_path)
    write(site / f"{name.replace('-', '_')}-{version}.dist-info" / "METADATA", f"Name: {name}\nVersion: {version}\n\n")
    assert ("companion-version" not in findings("9.0a", site=site)) == fine


def test_a_package_without_a_distribution_says_its_version_itself(tmp_path: Path) -> None:
    site = fake_site(tmp_path)
    write(site / "flashinfer_cubin" / "__init__.py", "__version__ = '0.7.3'\n")
    assert "0.7.3" in findings("9.0a", site=site)["companion-version"].what


@pytest.mark.real
@pytest.mark.parametrize("name", ["flashinfer_jit_cache", "flashinfer_cubin"])
def test_whether_flashinfer_stops_is_what_it_does(tmp_path: Path, name: str) -> None:
    """The real import with a package of another version, and the severity that doctor gives."""
    write(tmp_path / name / "__init__.py", "__version__ = '0.0.1'\n")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "FLASHINFER_CUDA_ARCH_LIST": "9.0a"}
    environ["FLASHINFER_WORKSPACE_BASE"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", "import flashinfer"], env=environ, capture_output=True, timeout=300, check=False)
    finding = findings("9.0a", site=tmp_path)["companion-version"]
    assert (finding.severity == ERROR) == (done.returncode != 0)


def test_no_gpu_and_no_name_stops_use() -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this host has a GPU")
    finding = findings()["no-arch"]
    assert finding.severity == ERROR
    assert "--arch" in finding.remedy


def test_a_list_that_flashinfer_cannot_read_stops_use() -> None:
    finding = findings(FLASHINFER_CUDA_ARCH_LIST="9.0a,12.0f")["no-arch"]
    assert "9.0a,12.0f" in finding.what


@pytest.mark.parametrize(
    ("listed", "here", "severity"),
    [
        ("9.0a", [(9, 0)], None),
        ("9.0a", [(9, 0), (12, 0)], ERROR),
        ("12.0f", [(12, 1)], None),
        ("12.0a", [(12, 1)], ERROR),
        ("8.0", [(8, 9)], None),
        ("9.0a 12.0f", [(9, 0)], WARNING),
        ("9.0a", [], None),
    ],
)
def test_the_list_must_fit_the_gpus(listed: str, here: list[tuple[int, int]], severity: str | None) -> None:
    environ: Mapping[str, str] = {"FLASHINFER_CUDA_ARCH_LIST": listed, "HOME": os.environ["HOME"]}
    host = probe_host(python=None, described_archs=[], environ=environ)
    gpus = tuple(Gpu(index=i, name="a GPU", uuid=f"GPU-{i}", capability=capability) for i, capability in enumerate(here))
    # The CUDA release that 12.x is named by comes from torch where there is no toolkit.
    environment = replace(host.environment, facts={**host.environment.facts, "torch.cuda": known("13.0")})
    with_gpus = Host(environment=environment, paths=host.paths, gpus=GpuReport(gpus=gpus, driver=known("580")))
    patient = Patient(host=with_gpus, cache=cache_root(environ, 0), environ={**environ, "CUDA_HOME": "/nonexistent"})
    found = list(doctor.check_archs(patient))
    assert [finding.severity for finding in found] == ([] if severity is None else [severity])


def test_modules_in_the_package_itself_are_named(tmp_path: Path) -> None:
    site = fake_site(tmp_path)
    write(site / "flashinfer" / "data" / "aot" / "sampling" / "sampling.so")
    write(site / "flashinfer" / "data" / "aot" / "other" / "notes.so")
    finding = findings("9.0a", site=site)["aot-shadow"]
    assert "sampling" in finding.what
    assert "notes" not in finding.what
    write(site / "flashinfer" / "_build_meta.py", '__version__ = "0.6.18.post1"\n')
    assert "aot-shadow" not in findings("9.0a", site=site)


@pytest.mark.parametrize(
    ("variable", "code"),
    [("FLASHINFER_DISABLE_JIT", "jit-disabled"), ("FLASHINFER_EXTRA_CUDAFLAGS", "build-flags")],
)
def test_variables_that_change_what_flashinfer_does_are_named(variable: str, code: str) -> None:
    finding = findings("9.0a", site=None, **{variable: "1"})[code]
    assert finding.severity == WARNING
    assert variable in finding.what


def test_an_unusable_home_is_named_with_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "xdg").mkdir()
    finding = findings("9.0a", HOME="/nonexistent", XDG_CACHE_HOME=str(tmp_path / "xdg"))["home"]
    assert f"FLASHINFER_WORKSPACE_BASE={tmp_path}/xdg" in finding.remedy


@pytest.mark.parametrize("spoil", ["mode", "owner", "link"])
@pytest.mark.root
def test_a_root_that_others_could_change_stops_use(tmp_path: Path, spoil: str) -> None:
    root = tmp_path / "root"
    (root / "v1").mkdir(parents=True)
    root.chmod(0o755)
    assert findings("9.0a", KCACHE_DIR=str(root)) == {}
    if spoil == "mode":
        root.chmod(0o777)
    elif spoil == "owner":
        os.chown(root / "v1", 4242, 4242)
    else:
        root.rename(tmp_path / "other")
        root.symlink_to(tmp_path / "other")
    assert findings("9.0a", KCACHE_DIR=str(root))["untrusted-root"].severity == ERROR


def run(words: list[str], script: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """`kcache doctor` in a process, after a shell script in a mount namespace of its own."""
    base = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHON": sys.executable, **environ}
    inner = f'{script}\nexec "$PYTHON" -m kcache doctor {" ".join(words)}'
    prefix = ["unshare", "--mount", "--propagation", "private"] if script else []
    command = [*prefix, "sh", "-euc", inner]
    return subprocess.run(command, env=base, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.root
def test_a_file_system_that_forbids_loading_stops_use(tmp_path: Path) -> None:
    words = ["--arch", "9.0a", "--json"]
    mount = f"mount -t tmpfs -o size=100m,mode=755,{{0}} none {tmp_path}"
    spoiled = run(words, mount.format("noexec"), KCACHE_DIR=f"{tmp_path}/kcache")
    assert spoiled.returncode == 1
    assert [finding["code"] for finding in json.loads(spoiled.stdout)["findings"]] == ["noexec"]
    fine = run(words, mount.format("exec"), KCACHE_DIR=f"{tmp_path}/kcache")
    assert (fine.returncode, json.loads(fine.stdout)["findings"]) == (0, [])


@pytest.mark.root
def test_without_any_place_to_write_use_stops() -> None:
    """Root itself, with everything read-only."""
    places = " ".join(("/tmp", "/var/tmp", "/dev/shm", "/mnt", "/run"))
    script = f"for d in {places}; do mount -t tmpfs -o ro,size=1m none $d; done\nmount -o remount,bind,ro /"
    done = run(["--arch", "9.0a", "--json"], script, HOME="/")
    codes = {finding["code"] for finding in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1
    assert "no-cache-root" in codes


def test_without_flashinfer_use_stops_and_the_python_is_named(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True, timeout=120)
    python = str(tmp_path / "venv" / "bin" / "python")
    done = run(["--arch", "9.0a", "--python", python])
    assert done.returncode == 1
    assert python in done.stdout
    for code in ("flashinfer-missing", "torch-missing", "tvm-ffi-missing"):
        assert f"error {code}" in done.stdout


def test_warnings_alone_leave_the_exit_code_at_zero() -> None:
    done = run(["--arch", "9.0a", "--json"], FLASHINFER_DISABLE_JIT="1")
    document = json.loads(done.stdout)
    assert (done.returncode, document["status"]) == (0, "usable")
    assert [finding["severity"] for finding in document["findings"]] == ["warning"]


@pytest.mark.parametrize(
    ("environ", "code", "words"),
    [
        ({"FLASHINFER_CUTE_DSL_DISABLE_CACHE": "1"}, "cute-dsl-switch", "no kernel on disk"),
        ({"FLASHINFER_CUTE_DSL_STRICT_CACHE_KEY": "1"}, "cute-dsl-switch", "only FlashInfer can list"),
        ({"CUTE_DSL_ARCH": "sm_100a"}, "cute-dsl-arch", "sm_90a"),
    ],
)
def test_a_variable_that_keeps_flashinfer_from_restored_kernels_is_named(environ: dict[str, str], code: str, words: str) -> None:
    finding = findings("9.0a", site=None, **environ)[code]
    assert next(iter(environ)) in finding.what
    assert words in finding.what
    assert "cute-dsl-switch" not in findings("9.0a", FLASHINFER_CUTE_DSL_DISABLE_CACHE="0", CUTE_DSL_ARCH="sm_90a")


def test_a_flashinfer_whose_rule_for_kernels_is_not_known_is_named(tmp_path: Path) -> None:
    site = fake_site(tmp_path)
    write(site / "flashinfer" / "jit" / "cute_dsl_core.py", "class JitSpecCuteDsl(JitSpec):\n    pass\n")
    assert "decides in another way" in findings("9.0a", site=site)["cute-dsl-rule"].what


def test_a_compiler_whose_content_is_not_known_is_named(tmp_path: Path) -> None:
    write(tmp_path / "nvidia_cutlass_dsl-4.8.0.dist-info" / "METADATA", "Name: nvidia-cutlass-dsl\nVersion: 4.8.0\n\n")
    assert "nvidia-cutlass-dsl " in findings("9.0a", site=tmp_path)["cute-dsl-unknown"].what


@pytest.mark.root
def test_full_places_are_named(tmp_path: Path) -> None:
    """Real file systems of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    words = ["--arch", "9.0a", "--json"]
    script = f"mount -t tmpfs -o size=1m,mode=755 none {tmp_path}"
    done = run(words, script, KCACHE_DIR=f"{tmp_path}/kcache", TMPDIR=str(tmp_path))
    assert {finding["code"] for finding in json.loads(done.stdout)["findings"]} == {"cache-full", "tmp-full"}
    assert done.returncode == 0


@pytest.mark.parametrize("name", ["HUGGING_FACE_HUB_TOKEN", "HF_HUB_ENABLE_HF_TRANSFER", "TORCH_CUDA_ARCH_LIST"])
def test_a_variable_of_other_times_is_named_with_the_one_that_counts(name: str) -> None:
    finding = findings("9.0a", site=None, **{name: "1"})["old-variable"]
    assert name in finding.what and finding.remedy.startswith("Set ")


def test_a_clock_behind_the_files_is_named(tmp_path: Path) -> None:
    receipt = write(tmp_path / "v1" / "entries" / "0" / "receipt.json")
    assert "clock" not in findings("9.0a", KCACHE_DIR=str(tmp_path))
    os.utime(receipt, (1e10, 1e10))
    assert "days after now" in findings("9.0a", KCACHE_DIR=str(tmp_path))["clock"].what


def test_a_path_without_what_is_restored_is_named(tmp_path: Path) -> None:
    make_fitting_entry(tmp_path / "out")
    publish(tmp_path / "out", tmp_path / "store")
    host = Container(home=tmp_path / "home")
    env = host.restore(tmp_path / "store").document["env"]
    for given, codes in ((env, []), ({}, ["not-on-path"])):
        found = host.kcache("doctor", "--arch", "9.0a", "--json", env=given).document["findings"]
        assert [finding["code"] for finding in found] == codes
    assert "kcache restore ... -- CMD" in found[0]["remedy"]


def test_an_sm_count_that_is_not_known_is_named() -> None:
    environ = {"HOME": os.environ["HOME"]}
    host = probe_host(python=None, described_archs=["9.0a"], environ=environ)
    facts = {**host.environment.facts, "gpu.source": known("gpu"), "gpu.sm_count.90a": undetermined("not to be asked")}
    unknown = replace(host, environment=replace(host.environment, facts=facts))
    patient = Patient(host=unknown, cache=cache_root(environ, 0), environ=environ)
    assert "not to be asked" in {one.code: one for one in check_compiler(patient)}["sm-count"].what


def test_a_lock_that_is_held_or_not_ours_alone_is_named(tmp_path: Path) -> None:
    lock = write(tmp_path / "v1" / "lock", "pid 1 on elsewhere\n")
    lock.chmod(0o600)
    assert "lock-held" not in findings("9.0a", KCACHE_DIR=str(tmp_path))
    with fsops.locked(lock, 0):
        assert str(os.getpid()) in findings("9.0a", KCACHE_DIR=str(tmp_path))["lock-held"].what
    lock.chmod(0o666)
    assert findings("9.0a", KCACHE_DIR=str(tmp_path))["untrusted-lock"].severity == ERROR


@pytest.mark.root
def test_a_cache_on_a_read_only_mount_is_named(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    script = f"mount -t tmpfs none {tmp_path} && mkdir {tmp_path}/k && mount -o remount,ro {tmp_path}"
    done = run(["--arch", "9.0a", "--json"], script, KCACHE_DIR=f"{tmp_path}/k")
    assert [finding["code"] for finding in json.loads(done.stdout)["findings"]] == ["cache-passed-over"]


def test_a_place_of_the_kernels_is_no_place_for_a_cache() -> None:
    found = cache_root({"KCACHE_DIR": "/proc/kcache", "HOME": os.environ["HOME"]}, os.geteuid())
    assert found.path is not None and not found.path.startswith("/proc")
    assert "/proc is the kernel's" in found.rejected[0]
