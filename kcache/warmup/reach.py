"""Which modules FlashInfer's sampling API reaches here: asked once, in a process of its own, and remembered.

Asking means making the API's calls with stand-ins in place of its modules (`kcache.probe.children.sampling_reach`), which must
not happen in a process that serves. A restored entry of kind `sampling` says it without a question; an answer is kept beside
what FlashInfer builds, under the digest of the sources that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from kcache.archs import arch_list_entry
from kcache.warmup.locks import building
from kcache.warmup.stopping import Stop, run_guarded

_SOURCES = ("sampling.py", "topk.py", "utils.py", "jit/sampling.py", "jit/topk.py", "version.py")
"""Files whose change makes the question worth asking again."""

_known: dict[str, list[str]] = {}
_lock = threading.Lock()


def sampling_modules(stop: Stop) -> list[str]:
    """The nvcc modules that sampling reaches on this process's GPUs (or those of FLASHINFER_CUDA_ARCH_LIST).

    Raises:
        LateError: the end came first. RuntimeError: FlashInfer gave no answer.
    """
    import flashinfer
    from flashinfer.jit import core, env

    package = Path(flashinfer.__file__).parent
    archs = sorted(f"{major}{minor}" for major, minor in core.current_compilation_context.TARGET_CUDA_ARCHS)
    if not archs:
        raise RuntimeError("there is no GPU, and FLASHINFER_CUDA_ARCH_LIST names none")
    found: set[str] = set()
    for arch in archs:
        key = _key(package, arch)
        with _lock:
            if key not in _known:
                _known[key] = _restored(arch) or _asked_before(env, key) or _ask_once(env, key, arch, stop)
            found.update(_known[key])
    return sorted(found)


def _key(package: Path, arch: str) -> str:
    digest = hashlib.sha256(f"{package} {arch}".encode())
    for name in _SOURCES:
        path = package / name
        digest.update(path.read_bytes() if path.is_file() else b"-")
    return digest.hexdigest()[:16]


def _restored(arch: str) -> list[str]:
    """What an entry of kind `sampling` that this process was given holds; empty where there is none."""
    package: Any = sys.modules.get("flashinfer_jit_cache")
    try:
        view = json.loads(Path(package.__file__).with_name("kcache.json").read_bytes())
        for provider in view["providers"]:
            key = json.loads((Path(provider["directory"]) / "manifest.json").read_bytes())["key"]
            if key["kind"] == "sampling" and f"sm{arch}" in provider["cuda_architectures"]:
                return [str(name) for name in key["modules"]]
    except (AttributeError, OSError, ValueError, KeyError, TypeError):
        pass  # no package, or not one of ours
    return []


def _file(env: Any, key: str) -> Path:
    return Path(env.FLASHINFER_JIT_DIR) / f".kcache-sampling-{key}.json"


def _asked_before(env: Any, key: str) -> list[str]:
    try:
        found = json.loads(_file(env, key).read_bytes())
        return [str(name) for name in found] if isinstance(found, list) else []
    except (OSError, ValueError):
        return []


def _ask_once(env: Any, key: str, arch: str, stop: Stop) -> list[str]:
    """Asks, unless another process of this node is asking: then its answer is waited for."""
    lock = Path(env.FLASHINFER_JIT_DIR) / "tmp" / "kcache-sampling.lock"
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
    except OSError:  # nothing can be kept here, so nobody's answer would be found
        return _ask(env, key, arch, stop)
    with building(lock, stop):
        return _asked_before(env, key) or _ask(env, key, arch, stop)


def _ask(env: Any, key: str, arch: str, stop: Stop) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="kcache-warmup-") as folder:
        answer = Path(folder) / "answer.json"
        question = {
            "answer": str(answer),
            "arch": arch,
            "cuda_release": _cuda_release(),
            "kinds": ["sampling"],
            "modules": [],
            "offline": True,
        }
        command = [sys.executable, "-c", _CALL, json.dumps(question), folder, arch_list_entry(arch)]
        code, output = run_guarded(command, Path(folder), stop)
        try:
            modules = json.loads(answer.read_bytes())["kinds"]["sampling"]["modules"]
        except (OSError, ValueError, KeyError) as error:
            raise RuntimeError(f"FlashInfer gave no answer (exit code {code}): {output[-2000:]}") from error
    _remember(_file(env, key), modules)
    return [str(name) for name in modules]


_CALL = """
import io, os, runpy, sys
question, folder, arch = sys.argv[1:]
# Its build files go into a workspace of its own; the request is what the script reads from standard input.
os.environ["FLASHINFER_WORKSPACE_BASE"], os.environ["FLASHINFER_CUDA_ARCH_LIST"] = folder, arch
sys.stdin = io.StringIO(question)
script = {script!r}
sys.argv = [script]
sys.path.insert(0, os.path.dirname(script))
runpy.run_path(script, run_name="__main__")
""".replace("{script!r}", repr(str(Path(__file__).parents[1] / "probe" / "children" / "flashinfer_specs.py")))


def _remember(path: Path, modules: list[str]) -> None:
    """Keeps an answer; a cache that cannot be written is no obstacle."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        part.write_text(json.dumps(modules), encoding="utf-8")
        part.replace(path)
    except OSError:
        pass


def _cuda_release() -> str:
    torch: Any = sys.modules.get("torch")
    return str(getattr(getattr(torch, "version", None), "cuda", None) or "13.0")
