"""Where restored CuTe-DSL kernels are used: two real b12x MoE kernels, one change of the world at a time, and no compilation.

Built through the command line by the real CuTe-DSL for a GPU that is not here; proven by FlashInfer's public API under that GPU's
description, through FlashInfer's own loader. Compiled and loaded, not launched.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from container import ROOT, Container, Done, copy_flashinfer, open_up
from schemas import conforms
from small_models import small_manifest

from kcache.fsops import Identity
from kcache.gpu_products import product
from kcache.recipe import read_recipe

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("flashinfer") is None or importlib.util.find_spec("cutlass") is None,
        reason="FlashInfer and CuTe-DSL are not installed",
    ),
]
needs_root = pytest.mark.skipif(not ROOT, reason="needs root")

GPU = "rtx-pro-6000"
VERSION = "0.7.4"
MODULE = "b12x_moe_sm120a_cute_dsl"
PYTHONS = [path for path in os.environ.get("KCACHE_TEST_PYTHONS", "").split(os.pathsep) if path]
"""Other interpreters that have FlashInfer and all it needs (another minor version, installed with uv)."""

Stores = Callable[..., Path]


@pytest.fixture(scope="session")
def kernel_store(build_cache: Path, build_store: Callable[[Path], Path]) -> Stores:
    """A local store with the two kernels, built with a FlashInfer (and other packages) that shadow the installed ones."""
    done: dict[tuple[str, Path | None, str], Path] = {}

    def build(version: str = VERSION, site: Path | None = None, model: str = "test/small") -> Path:
        wanted = (version, site, model)
        if wanted not in done:
            place = build_cache / f"kernels-{hashlib.sha256(str((sys.version_info[:2], *wanted)).encode()).hexdigest()[:8]}"
            place.mkdir(exist_ok=True)
            (place / "model.toml").write_text(small_manifest(name=model, maximum=2, version=version))
            environ = {**os.environ, "PYTHONPATH": str(site or "")}
            words = ["build", "--manifest", str(place / "model.toml"), "-o", str(place / "out"), "--json"]
            with (place / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                command = [sys.executable, "-m", "kcache", *words]
                built = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=900)
            assert built.returncode == 0, built.stderr
            assert len(json.loads(built.stdout)["modules"]) == 2
            done[wanted] = build_store(place / "out")
        return done[wanted]

    return build


def restore(container: Container, store: Path, *words: str) -> Done:
    return container.kcache("restore", "--from", str(store), "--gpu", GPU, "--json", *words)


def proven(container: Container, store: Path, *words: str, action: str = "installed") -> None:
    """Restores, and proves in a fresh process that both kernels are used and nothing is compiled."""
    done = restore(container, store, *words)
    assert done.code == 0, done.err
    (entry,) = done.document["kinds"]["b12x-moe"]["entries"]
    assert (entry["action"], done.document["compiles_avoided"]) == (action, 2)
    verified = container.kcache("verify", "--gpu", GPU, "--json")
    assert verified.code == 0, verified.out + verified.err
    proof = verified.document
    conforms("verify", proof)
    assert (proof["status"], proof["compiler_runs"]) == ("proven", 0)
    assert [kernel["accepted"] for kernel in proof["kernels"]["kernels"]] == [True, True]
    assert proof["kernels"]["calls"] == 2


def directory(container: Container, base: Path | None = None, version: str = VERSION) -> Path:
    """Where FlashInfer looks for the kernels."""
    return (base or container.home) / ".cache" / "flashinfer" / version / "120f" / "cached_ops" / MODULE


def test_in_another_home_and_again_nothing_is_done(tmp_path: Path, kernel_store: Stores) -> None:
    container = Container(home=tmp_path / "home")
    proven(container, kernel_store())
    before = {path: Identity.of(path) for path in (tmp_path / "home").rglob("*")}
    again = restore(container, kernel_store())
    assert again.document["kinds"]["b12x-moe"]["entries"][0]["action"] == "in-place"
    assert {path: Identity.of(path) for path in (tmp_path / "home").rglob("*")} == before


def test_a_plain_copy_at_another_path_is_worth_nothing_and_a_restore_is(tmp_path: Path, kernel_store: Stores) -> None:
    """The same bytes under another site-packages path: FlashInfer hashes the path."""
    here = Container(home=tmp_path / "here")
    assert restore(here, kernel_store()).code == 0
    elsewhere = Container(home=tmp_path / "home", site=(copy_flashinfer(tmp_path / "elsewhere"),))
    proven(elsewhere, kernel_store())
    ours, theirs = (json.loads((directory(c) / "meta.json").read_text()) for c in (here, elsewhere))
    assert ours["source_sha256"] != theirs["source_sha256"]
    shutil.rmtree(directory(elsewhere))
    shutil.copytree(directory(here), directory(elsewhere))
    verified = elsewhere.kcache("verify", "--gpu", GPU, "--json")
    assert verified.code != 0
    kernels = verified.document["kernels"]
    assert {kernel["reason"] for kernel in kernels["kernels"]} == {"meta.json differs in source_sha256"}
    assert verified.document["compiler_runs"] == 2
    proven(elsewhere, kernel_store())  # the next start sees it


def test_with_the_compiler_installed_by_uv(tmp_path: Path, kernel_store: Stores) -> None:
    """Farm by pip, target by uv, and the other way round: the wheels are the same, RECORD is not."""
    uv = Path(os.environ.get("KCACHE_TEST_DIR", "")) / "uv"
    if not (uv / "nvidia_cutlass_dsl").is_dir():
        pytest.skip("no packages that uv installed (ci/other-versions)")
    proven(Container(home=tmp_path / "uv", site=(uv,)), kernel_store())
    proven(Container(home=tmp_path / "pip"), kernel_store(site=uv))
    metas = [json.loads((directory(Container(home=tmp_path / name)) / "meta.json").read_text()) for name in ("uv", "pip")]
    assert metas[0]["cute_dsl_version"] != metas[1]["cute_dsl_version"]


@pytest.mark.parametrize("version", ["0.6.18.post1", "0.7.0.post1", "0.7.2.post1"])
def test_with_every_supported_flashinfer(tmp_path: Path, version: str, kernel_store: Stores) -> None:
    site = Path(os.environ.get("KCACHE_TEST_DIR", "")) / "flashinfer" / version
    if not (site / "flashinfer").is_dir():
        pytest.skip(f"FlashInfer {version} is not installed (ci/other-versions)")
    container = Container(home=tmp_path / "home", site=(site,))
    proven(container, kernel_store(version, site))
    assert sorted(path.name for path in directory(container, version=version).glob("*.o"))


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: Path(path).parents[1].name)
def test_with_another_python(tmp_path: Path, kernel_store: Stores, python: str) -> None:
    """The server's Python is another one than kcache's: another minor version, another build of torch, another installer."""
    container = Container(home=tmp_path / "home")
    words = ("--gpu", GPU, "--python", python, "--json")
    done = container.kcache("restore", "--from", str(kernel_store()), *words)
    assert (done.code, done.document["compiles_avoided"]) == (0, 2), done.err
    proof = container.kcache("verify", *words).document
    assert (proof["status"], proof["compiler_runs"], len(proof["kernels"]["kernels"])) == ("proven", 0, 2)


LOADER = """
import json, os, sys, types
site, children, asked = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
sys.path.insert(0, children)
import compiler_doors, cutlass.cute, tvm_ffi
sys.modules["torch"] = torch = types.ModuleType("torch")  # named by FlashInfer's tables of types, and not called
torch.__getattr__ = lambda name: name
for name in ("flashinfer", "flashinfer.jit"):  # its own files, but for what the packages import that needs torch
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [os.path.join(site, *name.split("."))]
import flashinfer.jit.cute_dsl_core as core
compiles = []
compiler_doors.close(compiles)
files = [f"{site}/flashinfer/{path}" for path in asked["key_files"]]
def load(name):
    return core.build_and_load_cute_dsl_kernel("b12x_moe", name, lambda: compiles.append(name), files)
taken, counted = [callable(load(name)) for name in asked["kernels"]], len(compiles)
os.unlink(asked["object"])  # and a compilation would be seen
try:
    load(os.path.basename(asked["object"]).removesuffix(".o"))
except Exception:
    pass
print(json.dumps([sys.version_info[:2], taken, counted, len(compiles)]))
"""


def test_under_another_minor_version_of_python(tmp_path: Path, kernel_store: Stores) -> None:
    """kcache itself and FlashInfer's own loader, in a Python of another minor version that has the compiler and no torch."""
    python = Path(os.environ.get("KCACHE_TEST_DIR", "")) / "python" / "bin" / "python"
    if not python.exists():
        pytest.skip("no other Python (ci/other-versions)")
    site = tmp_path / "site"
    site.mkdir()
    for found in ("flashinfer", "flashinfer_python-*.dist-info", "torch-*.dist-info", "nvidia_cuda_runtime-*.dist-info"):
        (path,) = Path(str(importlib.util.find_spec("flashinfer").origin)).parents[1].glob(found)  # type: ignore[union-attr]
        (site / path.name).symlink_to(path)
    container = Container(home=tmp_path / "home", site=(site,), python=str(python))
    done = restore(container, kernel_store())
    assert (done.code, done.document["compiles_avoided"]) == (0, 2), done.err
    (manifest,) = kernel_store().glob("v1/env/*/*/entries/*/*.json")
    document = json.loads(manifest.read_text())
    names = [Path(artifact["path"]).stem for artifact in document["artifacts"]]
    (tmp_path / "load.py").write_text(LOADER)
    children = Path(__file__).parents[2] / "kcache" / "probe" / "children"
    first = str(next(directory(container).glob("*.o")))
    asked = json.dumps({"key_files": document["kernels"]["key_files"], "kernels": names, "object": first})
    variables = {"CUTE_DSL_ARCH": "sm_120a", "FLASHINFER_CUDA_ARCH_LIST": "12.0f"}
    command = [str(python), str(tmp_path / "load.py"), str(site), str(children), asked]
    loaded = container.run(command, env=variables)
    assert loaded.code == 0, loaded.err
    version, taken, compiles, compiles_without_one = json.loads(loaded.out)
    assert tuple(version) != sys.version_info[:2]
    assert (taken, compiles, compiles_without_one) == ([True, True], 0, 1)


@needs_root
@pytest.mark.root
def test_as_a_user_without_a_passwd_entry(
    tmp_path: Path, kernel_store: Stores, open_python: tuple[str, tuple[Path, ...]]
) -> None:
    python, site = open_python
    setpriv = shutil.which("setpriv")
    assert setpriv is not None
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, 4242, 4242)
    open_up(tmp_path, kernel_store())
    (home / "no-programs").mkdir()
    prefix = (setpriv, "--reuid", "4242", "--regid", "4242", "--clear-groups")
    proven(Container(home=home, prefix=prefix, python=python, site=site), kernel_store())


@needs_root
@pytest.mark.root
def test_from_a_cache_that_root_filled_and_the_server_may_only_read(
    tmp_path: Path, kernel_store: Stores, open_python: tuple[str, tuple[Path, ...]]
) -> None:
    """An image: root restores when it is built, another user starts the server in another home."""
    python, site = open_python
    shared = {"KCACHE_DIR": str(tmp_path / "shared")}
    (tmp_path / "shared").mkdir(mode=0o755)
    assert restore(Container(home=tmp_path / "root", environ=shared), kernel_store()).code == 0
    home = tmp_path / "home"
    (home / "no-programs").mkdir(parents=True)
    for place in (home, home / "no-programs"):
        os.chown(place, 4242, 4242)
    open_up(tmp_path, kernel_store())
    prefix = (shutil.which("setpriv") or "setpriv", "--reuid", "4242", "--regid", "4242", "--clear-groups")
    container = Container(home=home, prefix=prefix, python=python, site=site, environ=shared)
    for action in ("installed", "in-place"):
        done = restore(container, kernel_store())
        assert done.code == 0, done.err
        assert done.document["kinds"]["b12x-moe"]["entries"][0]["action"] == action
    assert len(list(directory(container).glob("*.o"))) == 2


@needs_root
@pytest.mark.root
def test_with_read_only_packages_and_another_cache_home(tmp_path: Path, kernel_store: Stores) -> None:
    site = tmp_path / "elsewhere"
    copy_flashinfer(site)
    mount = f'mount --bind {site} {site} && mount -o remount,ro,bind {site} && exec "$@"'
    prefix = (shutil.which("unshare") or "unshare", "-m", "/bin/sh", "-c", f"PATH=/usr/sbin:/usr/bin:/sbin:/bin; {mount}", "sh")
    container = Container(home=tmp_path / "home", site=(site,), prefix=prefix, environ={"XDG_CACHE_HOME": str(tmp_path / "xdg")})
    assert "Read-only file system" in container.run(["/bin/touch", str(site / "x")]).err
    proven(container, kernel_store())


def test_below_another_workspace(tmp_path: Path, kernel_store: Stores) -> None:
    (tmp_path / "workspace").mkdir()
    container = Container(home=tmp_path / "home", environ={"FLASHINFER_WORKSPACE_BASE": str(tmp_path / "workspace")})
    proven(container, kernel_store())
    assert len(list(directory(container, tmp_path / "workspace").glob("*.o"))) == 2


def test_beside_kernels_of_the_user(tmp_path: Path, kernel_store: Stores) -> None:
    container = Container(home=tmp_path / "home")
    assert restore(container, kernel_store()).code == 0
    (directory(container) / "users.o").write_bytes(b"theirs")
    ours = sorted(directory(container).glob("micro*.o"))
    ours[0].unlink()
    ours[1].write_bytes(b"damaged")
    proven(container, kernel_store())
    assert (directory(container) / "users.o").read_bytes() == b"theirs"
    # Under another meta.json FlashInfer would delete the directory at its next build.
    meta = directory(container) / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"source_sha256": "another"}))
    done = restore(container, kernel_store())
    assert done.code == 0
    aside = directory(container).with_name(f"{MODULE}.set-aside-1")
    assert (aside / "users.o").read_bytes() == b"theirs"
    assert str(aside) in " ".join(done.document["warnings"])


@pytest.mark.parametrize("kind", ["directory", "pipe", "endless", "link", "unreadable meta", "truncated"])
def test_whatever_lies_in_a_kernels_place_it_is_mended_or_said_in_one_line(
    tmp_path: Path, kernel_store: Stores, kind: str
) -> None:
    """Nothing is waited for, nothing is a traceback, and what cannot be mended is an error, not a miss."""
    container = Container(home=tmp_path / "home")
    assert restore(container, kernel_store()).code == 0
    (path, _) = sorted(directory(container).glob("*.o"))
    whole = path.read_bytes()
    if kind == "unreadable meta":
        path = directory(container) / "meta.json"
    path.unlink()
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(b"other")
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "truncated":
        path.write_bytes(whole[:-1])
    else:
        os.mkfifo(path)
    done = restore(container, kernel_store(), "--deadline", "20s")
    assert "Traceback" not in done.err
    assert "hung" not in done.err
    if kind in ("truncated", "unreadable meta"):
        assert done.code == 0, done.err
        assert path.read_bytes() == whole or kind != "truncated"
    else:
        assert (done.code, done.document["status"]) == (12, "error")
        assert f"{path} is a" in done.err


def test_a_build_that_holds_flashinfers_lock_is_an_error_with_its_own_code(tmp_path: Path, kernel_store: Stores) -> None:
    container = Container(home=tmp_path / "home")
    (directory(container).parent / "tmp").mkdir(parents=True)
    lock = directory(container).parent / "tmp" / f"{MODULE}.lock"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = restore(container, kernel_store(), "--lock-timeout", "200ms")
    assert (done.code, done.document["status"], done.document["compiles_avoided"]) == (11, "error", 0)
    assert str(lock) in done.err


def test_a_directory_of_flashinfers_that_others_can_write_is_refused_with_a_remedy_that_helps(
    tmp_path: Path, kernel_store: Stores
) -> None:
    container = Container(home=tmp_path / "home")
    place = directory(container).parent / "tmp"
    place.mkdir(parents=True)
    place.chmod(0o777)
    done = restore(container, kernel_store())
    assert (done.code, done.document["status"]) == (12, "error")
    assert "KCACHE_DIR" not in done.err
    assert "FLASHINFER_WORKSPACE_BASE" in done.err


def test_a_replaced_entry_replaces_what_was_given_to_flashinfer(tmp_path: Path, kernel_store: Stores) -> None:
    """The record of what kcache wrote names other bytes than the entry's: as after `publish --replace`."""
    container = Container(home=tmp_path / "home")
    assert restore(container, kernel_store()).code == 0
    (path, _) = sorted(directory(container).glob("*.o"))
    whole = path.read_bytes()
    path.write_bytes(b"what the first publication held")
    (record,) = (container.home / ".cache" / "kcache" / "v1" / "kernels").glob("at-*.json")
    known = json.loads(record.read_text())
    identity = Identity.of(path)
    assert identity is not None
    known["objects"][path.name] = {
        "sha256": f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}",
        "identity": identity.to_json(),
    }
    record.write_text(json.dumps(known))
    assert restore(container, kernel_store()).code == 0
    assert path.read_bytes() == whole


def test_one_changed_byte_of_a_source_is_refused_by_name(tmp_path: Path, kernel_store: Stores) -> None:
    site = copy_flashinfer(tmp_path / "elsewhere")
    source = site / "flashinfer" / "fused_moe" / "cute_dsl" / "blackwell_sm12x" / "moe_micro_kernel.py"
    content = source.read_bytes()
    source.unlink()  # the copy is hard-linked
    source.write_bytes(content + b"\n")
    container = Container(home=tmp_path / "home", site=(site,))
    done = restore(container, kernel_store())
    assert done.code == 10
    assert "moe_micro_kernel.py" in " ".join(done.document["kinds"]["b12x-moe"]["reasons"])
    assert not (tmp_path / "home" / ".cache" / "flashinfer").exists()


def test_strict_match_is_flashinfers_own_rule(tmp_path: Path, kernel_store: Stores) -> None:
    assert restore(Container(home=tmp_path / "same"), kernel_store(), "--strict-match").code == 0
    elsewhere = Container(home=tmp_path / "home", site=(copy_flashinfer(tmp_path / "elsewhere"),))
    done = restore(elsewhere, kernel_store(), "--strict-match")
    assert done.code == 10
    assert "source_sha256" in " ".join(done.document["kinds"]["b12x-moe"]["reasons"])
    assert not directory(elsewhere).exists()


@pytest.mark.parametrize("switch", ["FLASHINFER_CUTE_DSL_DISABLE_CACHE", "FLASHINFER_CUTE_DSL_STRICT_CACHE_KEY"])
def test_a_switch_that_makes_flashinfer_pass_over_them_is_named(tmp_path: Path, kernel_store: Stores, switch: str) -> None:
    container = Container(home=tmp_path / "home", environ={switch: "1"})
    done = restore(container, kernel_store())
    assert done.code == 10
    assert switch in " ".join(done.document["kinds"]["b12x-moe"]["reasons"])
    assert not directory(container).exists()


def test_linear_attention_for_hopper_from_its_shipped_manifest(tmp_path: Path, build_store: Callable[[Path], Path]) -> None:
    """The kind whose kernels were run on a real H200 (kcache/docs/decisions/0005-cute-dsl-ingredients.md)."""
    manifest = Path(__file__).parents[2] / "manifests" / "qwen3-next-80b-a3b.toml"
    words = ["build", "--manifest", str(manifest), "--kinds", "gdn-prefill", "--gpu", "h200", "-o", str(tmp_path / "out")]
    assert subprocess.run([sys.executable, "-m", "kcache", *words], check=False, capture_output=True).returncode == 0
    container = Container(home=tmp_path / "home")
    done = container.kcache("restore", "--from", str(build_store(tmp_path / "out")), "--gpu", "h200", "--prove", "--json")
    assert done.code == 0, done.out
    kernels = done.document["proof"]["kernels"]
    assert (kernels["status"], kernels["compiler_runs"], len(kernels["kernels"])) == ("proven", 0, 1)
    assert any("CPDeltaRulePrefillSm90" in line for line in kernels["left_out"])


def test_every_token_count_of_a_shipped_manifest_is_served_without_a_compilation(
    tmp_path: Path, build_cache: Path, build_store: Callable[[Path], Path]
) -> None:
    """The manifest as it is shipped, of those with b12x kernels the one with the fewest; in another home and site-packages."""
    path = Path(__file__).parents[2] / "manifests" / "qwen3-next-80b-a3b.toml"
    words = ["build", "--manifest", str(path), "--kinds", "b12x-moe", "--gpu", GPU, "-o", str(build_cache / "kernels-shipped")]
    with (build_cache / "kernels-shipped.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = subprocess.run([sys.executable, "-m", "kcache", *words], capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    container = Container(home=tmp_path / "home", site=(copy_flashinfer(tmp_path / "elsewhere"),))
    done = restore(container, build_store(build_cache / "kernels-shipped"), "--prove")
    assert done.code == 0, done.out + done.err
    tokens = read_recipe(str(path)).tokens
    counts = {*tokens.capture, tokens.maximum}
    proof = done.document["proof"]["kernels"]
    assert (proof["status"], proof["calls"], proof["compiler_runs"]) == ("proven", len(counts), 0)
    assert len(proof["kernels"]) == done.document["compiles_avoided"] > 2


def test_of_several_models_one_has_to_be_named(tmp_path: Path, kernel_store: Stores, build_cache: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(kernel_store(), store)
    other = next(iter(sorted(build_cache.glob("kernels-*/out/*.json")))).parent.parent
    (tmp_path / "model.toml").write_text(small_manifest(name="test/other", maximum=2, version=VERSION))
    words = ["build", "--manifest", str(tmp_path / "model.toml"), "-o", str(tmp_path / "out"), "--json"]
    if (work := other / "out" / ".build").is_dir():
        shutil.copytree(work, tmp_path / "out" / ".build", symlinks=True)
    for command in (words, ["publish", str(tmp_path / "out"), "--to", str(store)]):
        assert subprocess.run([sys.executable, "-m", "kcache", *command], capture_output=True, check=False).returncode == 0
    container = Container(home=tmp_path / "home")
    unclear = restore(container, store)
    assert unclear.code == 10
    assert "name yours with --model: test/other, test/small" in " ".join(unclear.document["reasons"])
    named = restore(container, store, "--model", "OTHER")
    assert named.code == 0
    assert [entry["model"] for entry in named.document["kinds"]["b12x-moe"]["entries"]] == ["test/other"]


def test_a_build_for_an_environment_that_would_refuse_it_fails_with_the_reason(tmp_path: Path, kernel_store: Stores) -> None:
    kernel_store()
    saved = tmp_path / "there.json"
    save = [sys.executable, "-m", "kcache", "env", "--gpu", GPU, "--save", str(saved)]
    assert subprocess.run(save, capture_output=True, check=False).returncode == 0
    (tmp_path / "model.toml").write_text(small_manifest(maximum=2, version=VERSION))
    build = ["build", "--manifest", str(tmp_path / "model.toml"), "-o", str(tmp_path / "out"), "--env", str(saved), "--json"]
    fits = subprocess.run([sys.executable, "-m", "kcache", *build], capture_output=True, text=True, check=False)
    assert fits.returncode == 0, fits.stderr
    document = json.loads(saved.read_text())
    name = "cutlass_dsl.nvidia-cutlass-dsl"
    document["facts"][name] = {"value": document["facts"][name]["value"].replace("sha256:", "sha256:0")[:-1]}
    saved.write_text(json.dumps(document))
    refused = subprocess.run([sys.executable, "-m", "kcache", *build], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "package nvidia-cutlass-dsl" in json.loads(refused.stdout)["entries"][0]["reason"]


PROGRAM = """
import json, os, subprocess, sys
children, gpu = sys.argv[1], json.loads(sys.argv[2])
case = {"id": "a server", "experts": 8, "local_experts": 8, "top_k": 2, "hidden": 256, "inter": 768, "activation": "silu",
        "swiglu": None, "quant": "nvfp4", "scales": "per_expert", "calls": "wrapper", "maximum": 2, "tokens": [1, 2]}
request = {"mode": "build", "operation": "b12x", "answer": "answer.json", "workspace": os.environ["FLASHINFER_WORKSPACE_BASE"],
           "gpu": gpu, "cuda": "13.0", "cute_dsl_arch": "sm_120a", "arch_list": "12.0f", "jobs": 2, "seconds_per_kernel": 600,
           "only": None, "cases": [case]}
done = subprocess.run([sys.executable, children + "/cute_dry_run.py"], input=json.dumps(request), text=True)
base = os.environ["FLASHINFER_WORKSPACE_BASE"] + "/.cache/flashinfer/0.7.4/120f/cached_ops/"
os.makedirs(base + "own_sm120a_cute_dsl")
open(base + "own_sm120a_cute_dsl/x.o", "w").write("x")
open(base + "b12x_moe_sm120a_cute_dsl/half.o.tmp.77", "w").write("x")
sys.exit(done.returncode or 7)
"""


def test_what_a_program_compiled_is_recorded_restored_and_proven(tmp_path: Path, build_store: Callable[[Path], Path]) -> None:
    """The program's own failure keeps nothing from being recorded; what kcache knows nothing of is left out by name."""
    (tmp_path / "program.py").write_text(PROGRAM)
    children = Path(__file__).parents[2] / "kcache" / "probe" / "children"
    words = ["build", "--record", "--gpu", GPU, "-o", str(tmp_path / "out"), "--json", "--", sys.executable]
    words += [str(tmp_path / "program.py"), str(children), json.dumps(product(GPU).describe())]
    done = subprocess.run([sys.executable, "-m", "kcache", *words], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    report = json.loads(done.stdout)
    assert [entry["kind"] for entry in report["entries"]] == ["b12x-moe"]
    left_out = {one["name"]: one["reason"] for one in report["left_out"]}
    assert "does not know which sources" in left_out["own_sm120a_cute_dsl"]
    container = Container(home=tmp_path / "home", site=(copy_flashinfer(tmp_path / "elsewhere"),))
    proven(container, build_store(tmp_path / "out"))
