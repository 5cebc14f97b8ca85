"""`kcache.warmup` in real processes with the real FlashInfer and nvcc. The rules are those of TensorRT-LLM's PR 17286."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from container import REPOSITORY, Container
from warmup_processes import WARM, Node, environment, running_below

from kcache.warmup import warmup

pytestmark = pytest.mark.real

BROKEN = "#!/bin/sh\necho 'nvcc: internal error' >&2\nexit 3\n"

CALL_SITE = """
import flashinfer.cascade, json
try:
    flashinfer.cascade.get_cascade_module()
    print(json.dumps({"error": ""}))
except Exception as error:
    print(json.dumps({"error": f"{type(error).__name__}: {error}"}))
"""
"""The real call site: what FlashInfer does when a request needs the module."""


@pytest.fixture
def broken_home(tmp_path: Path) -> dict[str, str]:
    """Variables of a host whose nvcc fails."""
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(BROKEN)
    nvcc.chmod(0o755)
    return {"FLASHINFER_NVCC": str(nvcc), "FLASHINFER_NVCC_LAUNCHER": ""}


def test_what_is_missing_is_built_and_a_second_call_does_nothing(node: Node) -> None:
    code = WARM + "\nimport os\nos.environ['PATH'] = '/nowhere'\nagain = warmup(kinds=(), modules=sys.argv[1:])\n"
    code += "print(json.dumps({'first': report.to_json(), 'second': again.to_json()}))"
    process = node.start(code, "cascade")
    document = process.document()
    first, second = document["first"], document["second"]
    assert (first["status"], first["modules"][0]["status"]) == ("warm", "built"), process.err
    assert (second["status"], second["modules"][0]["status"]) == ("warm", "present")
    assert first["agreed"] == ["cascade"]
    assert len(node.compilers) == 2


def test_the_next_process_builds_nothing_and_its_call_site_neither(node: Node) -> None:
    node.start(WARM, "cascade").document()
    built = node.compilers
    process = node.start(WARM + CALL_SITE, "cascade")
    assert process.document()["error"] == ""
    assert '"status": "present"' in process.out
    assert node.compilers == built


def test_a_directory_of_another_ninja_is_built_again_and_the_report_says_why(node: Node) -> None:
    node.start(WARM, "cascade").document()
    log = node.cached_ops / "cascade" / ".ninja_log"
    log.write_text("# ninja log v3\n" + log.read_text().split("\n", 1)[1])
    process = node.start(WARM, "cascade")
    (module,) = process.document()["modules"]
    assert (module["status"], len(node.compilers)) == ("built", 4)
    assert "another version of ninja" in module["reason"]
    assert "another version of ninja" in process.err


def test_after_a_warm_up_the_call_site_needs_no_ninja(node: Node) -> None:
    code = WARM + "\nimport os\nos.environ['PATH'] = '/nowhere'" + CALL_SITE
    assert node.start(code, "cascade").document()["error"] == ""


def test_flashinfers_own_log_of_builds_has_the_build(node: Node, tmp_path: Path) -> None:
    log = tmp_path / "builds"
    node.start(WARM, "cascade", environ={"FLASHINFER_JIT_BUILD_LOG": str(log)}, pause=1).document()
    builds = [json.loads(line) for line in log.read_text().splitlines()]
    assert [build["name"] for build in builds if build["seconds"] > 0.9] == ["cascade"]


def test_a_broken_compiler_is_logged_and_the_call_site_raises_its_own_error(node: Node, broken_home: dict[str, str]) -> None:
    process = node.start(WARM + CALL_SITE, "cascade", environ=broken_home)
    assert process.document()["error"].startswith("RuntimeError: Ninja build failed")
    assert '"status": "failed"' in process.out
    assert "Traceback" in process.err
    assert "nvcc: internal error" in process.err


def test_without_ninja_the_start_goes_on(node: Node) -> None:
    process = node.start(WARM, "cascade", environ={"PATH": "/nowhere"})
    assert process.document()["status"] == "failed"
    assert "Traceback" in process.err


def test_a_cache_that_cannot_be_written_is_logged(node: Node) -> None:
    (node.workspace / ".cache").write_text("not a directory")
    process = node.start(WARM + "\nprint(json.dumps(report.to_json()))", "cascade")
    document = process.document()
    assert document["status"] == "failed"
    assert "Traceback" in process.err


def test_a_library_that_does_not_load_is_logged_and_the_call_site_raises(node: Node) -> None:
    node.start(WARM, "cascade").document()
    library = node.cached_ops / "cascade" / "cascade.so"
    stamp = library.stat()
    library.unlink()
    library.write_bytes(b"no library")
    os.utime(library, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    process = node.start(WARM + CALL_SITE, "cascade")
    assert process.document()["error"]
    assert '"status": "failed"' in process.out
    assert "Traceback" in process.err


def test_a_module_that_does_not_exist_costs_only_itself(node: Node) -> None:
    document = node.start(WARM, "no_such", "cascade").document()
    assert [module["status"] for module in document["modules"]] == ["failed", "built"]
    assert document["status"] == "partial"


def test_jit_that_is_disabled_is_a_reason(node: Node) -> None:
    document = node.start(WARM, "cascade", environ={"FLASHINFER_DISABLE_JIT": "1"}).document()
    assert "FLASHINFER_DISABLE_JIT" in document["modules"][0]["reason"]
    assert not node.compilers


def test_an_unknown_kind_is_a_reason_and_no_exception(node: Node) -> None:
    code = "import json\nfrom kcache.warmup import warmup\nprint(json.dumps(warmup(kinds=('nothing',)).to_json()))"
    assert "nothing" in node.start(code).document()["reasons"][0]


def test_the_deadline_ends_it_and_keeps_finished_modules(node: Node) -> None:
    node.start(WARM, "cascade").document()
    code = WARM.replace("modules=sys.argv[1:]", "modules=sys.argv[1:], deadline=8, jobs=1")
    process = node.start(code, "cascade", "quantization", pause=600)
    document = process.document(60)
    assert [module["status"] for module in document["modules"]] == ["present", "late"]
    assert document["status"] == "partial"
    assert not running_below(node.workspace)


def test_the_heartbeat_says_what_is_in_work(node: Node) -> None:
    code = WARM.replace("modules=sys.argv[1:]", "modules=sys.argv[1:], heartbeat=beats.append, beat_seconds=0.2")
    process = node.start(
        "beats = []" + code + "\nprint(json.dumps({'beats': [list(beat.doing) for beat in beats]}))", "cascade", pause=1
    )
    assert ["cascade"] in process.document()["beats"]


def test_a_heartbeat_that_fails_is_no_obstacle(node: Node) -> None:
    code = WARM.replace("modules=sys.argv[1:]", "modules=sys.argv[1:], heartbeat=lambda beat: 1 / 0, beat_seconds=0.2")
    process = node.start(code, "cascade", pause=1)
    assert process.document()["status"] == "warm"
    assert "ZeroDivisionError" in process.err


def test_what_a_killed_process_left_is_finished_by_the_next(node: Node) -> None:
    process = node.start(WARM, "cascade", pause=600)
    while len(node.compilers) < 2:
        time.sleep(0.05)
    process.kill()
    assert process.wait(30) == -9
    assert not running_below(node.workspace), "its compilers go on"
    assert node.start(WARM, "cascade").document()["modules"][0]["status"] == "built"


def test_four_processes_build_once(node: Node) -> None:
    processes = [node.start(WARM, "cascade", pause=1) for _ in range(4)]
    documents = [process.document() for process in processes]
    assert sorted(document["modules"][0]["status"] for document in documents) == ["built"] + ["present"] * 3
    assert len(node.compilers) == 2


def test_a_lock_that_is_held_for_ever_is_waited_for_until_the_deadline(node: Node) -> None:
    node.start(WARM, "cascade").document()
    hold = "import fcntl, sys, time\nf = open(sys.argv[1], 'w')\nfcntl.flock(f, fcntl.LOCK_EX)\n"
    hold += "print('held', flush=True)\ntime.sleep(600)"
    lock = node.cached_ops / "tmp" / "cascade.lock"
    holder = subprocess.Popen([sys.executable, "-c", hold, str(lock)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        holder.stdout.readline()
        code = WARM.replace("modules=sys.argv[1:]", "modules=sys.argv[1:], deadline=3")
        document = node.start(code, "cascade").document(60)
        assert document["modules"][0]["status"] == "late"
    finally:
        holder.kill()
        holder.wait()


def test_without_flashinfer_it_returns_and_touches_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as Python marks a package that must not be imported
    report = warmup(kinds=("sampling", "b12x-moe"), modules=("cascade",))
    assert report.status == "nothing"
    assert report.modules == ()
    assert report.reasons == ("there is no FlashInfer in this Python",)


def test_a_flashinfer_that_cannot_be_imported_is_logged_and_is_the_reason(tmp_path: Path) -> None:
    broken = tmp_path / "flashinfer" / "__init__.py"
    broken.parent.mkdir()
    broken.write_text("raise RuntimeError('its import needs what this host lacks')\n")
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
    done = subprocess.run([sys.executable, "-c", WARM, "cascade"], env=variables, capture_output=True, text=True, check=True)
    (module,) = json.loads(done.stdout)["modules"]
    assert (module["status"], module["reason"]) == ("failed", "RuntimeError: its import needs what this host lacks")
    assert "Traceback" in done.stderr


def test_importing_it_imports_neither_torch_nor_flashinfer() -> None:
    code = "import sys, kcache.warmup; print([m for m in ('torch', 'flashinfer', 'filelock') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_restored_module_is_loaded_as_it_is_with_no_compiler_and_no_ninja(
    tmp_path: Path, cascade_store: Path, cuda_home: Path
) -> None:
    container = Container(home=tmp_path / "home", environ={"FLASHINFER_CUDA_ARCH_LIST": "9.0a"})
    restored = container.restore(cascade_store)
    done = container.run([container.python, "-c", WARM, "cascade"], env=restored.document["env"])
    assert '"status": "restored"' in done.out, done.err


ENGINE = "import sys; sys.path.insert(0, {tests!r}); import engine; engine.main()".format(tests=str(REPOSITORY / "tests"))
WAYS = ("", "no-kv-cache", "context-parallel", "no-cuda-graphs", "no-speculation")


@pytest.mark.parametrize("setting", WAYS)
def test_b01_whatever_way_an_engine_starts_the_build_is_before_ready(node: Node, setting: str) -> None:
    process = node.start(ENGINE, setting)
    document = process.document()
    assert document["warmup"]["modules"][0]["status"] == "built"
    assert document["sampling"] == ""
    assert len(node.compilers) == 2, "the request compiled"


def test_b01_a_greedy_server_starts_with_a_broken_compiler(node: Node, broken_home: dict[str, str]) -> None:
    document = node.start(ENGINE, environ=broken_home).document()
    assert document["warmup"]["status"] == "failed"
    assert document["greedy"] == 1
    assert "Ninja build failed" in document["sampling"]


LIAR = """
#include <sys/file.h>
int flock(int descriptor, int operation) { (void)descriptor; (void)operation; return 0; }
"""
PLAIN = "import sys, flashinfer.jit.core\n" + WARM
"""For a process that imports FlashInfer itself."""


@pytest.fixture
def lying_locks(tmp_path: Path) -> dict[str, str]:
    """Variables of a process for which every file lock is granted, as on some network file systems."""
    source, library = tmp_path / "liar.c", tmp_path / "liar.so"
    source.write_text(LIAR)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return {"LD_PRELOAD": str(library)}


def plain(node: Node, cuda_home: Path, environ: dict[str, str], *prefix: str) -> subprocess.Popen[str]:
    variables = {**environment(cuda_home), **node.variables(pause=3), **environ, "FLASHINFER_WORKSPACE_BASE": str(node.workspace)}
    command = [*prefix, sys.executable, "-c", PLAIN, "cascade"]
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answers(processes: list[subprocess.Popen[str]]) -> list[str]:
    told = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), told
    return sorted(json.loads(out.strip().splitlines()[-1])["modules"][0]["status"] for out, _ in told)


def test_where_locks_lie_a_node_still_builds_once(node: Node, cuda_home: Path, lying_locks: dict[str, str]) -> None:
    assert answers([plain(node, cuda_home, lying_locks) for _ in range(2)]) == ["built", "present"]
    assert len(node.compilers) == 2
    assert (node.cached_ops / "cascade").is_symlink()
    assert node.start(WARM, "cascade").document()["modules"][0]["status"] == "present"


@pytest.mark.root
def test_where_locks_lie_two_nodes_build_each_for_itself_and_the_last_name_wins(
    node: Node, cuda_home: Path, lying_locks: dict[str, str]
) -> None:
    unshare = shutil.which("unshare")
    if os.geteuid() != 0 or unshare is None:
        pytest.skip("needs root and unshare")
    assert answers([plain(node, cuda_home, lying_locks, unshare, "-n") for _ in range(2)]) == ["built", "built"]
    assert len(node.compilers) == 4
    built = node.compilers
    assert node.start(WARM + CALL_SITE, "cascade").document()["error"] == ""
    assert node.compilers == built


@pytest.mark.large
def test_sampling_is_every_module_that_its_calls_reach(node: Node) -> None:
    code = WARM.replace("kinds=(), modules=sys.argv[1:]", "deadline=300, jobs=1")
    processes = [node.start(code, environ={"FLASHINFER_DISABLE_JIT": "1"}) for _ in range(2)]
    for process in processes:  # one of them asks FlashInfer, and the other waits for the answer
        assert [module["name"] for module in process.document(400)["modules"]] == ["sampling", "topk"]
    again = node.start(code, environ={"FLASHINFER_DISABLE_JIT": "1"})
    assert [module["name"] for module in again.document(60)["modules"]] == ["sampling", "topk"]
    assert list(node.cached_ops.glob(".kcache-sampling-*.json"))
