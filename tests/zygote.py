"""Real processes that have FlashInfer already: one process imports torch and FlashInfer once, and forks for each request.

Importing takes 5 to 20 seconds on a busy host. A child gets its own variables, and FlashInfer's directories as an import under
them would have set them (flashinfer/jit/env.py says that they are there to be overridden).
"""

from __future__ import annotations

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, kw_only=True)
class Process:
    """One child. `folder` holds what it printed and its exit status."""

    pid: int
    folder: Path

    @property
    def out(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "err").read_text(errors="replace")

    @property
    def ended(self) -> bool:
        return (self.folder / "code").exists()

    def wait(self, timeout: float = 300.0) -> int:
        """Its exit code, negative for a signal; a hang is a failure."""
        until = time.monotonic() + timeout
        while not self.ended:
            if time.monotonic() > until:
                self.kill()
                raise AssertionError(f"it hung:\n{self.out}\n{self.err}")
            time.sleep(0.02)
        return int((self.folder / "code").read_text())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def document(self, timeout: float = 300.0) -> dict[str, Any]:
        """The JSON of its last line, once it ended well."""
        code = self.wait(timeout)
        assert code == 0, f"exit code {code}\n{self.out}\n{self.err}"
        return cast("dict[str, Any]", json.loads(self.out.strip().splitlines()[-1]))


class Zygote:
    """The process that forks."""

    def __init__(self, folder: Path, environ: Mapping[str, str]) -> None:
        self._folder, self._number = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=dict(environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._answer()["ready"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the zygote ended"
        return cast("dict[str, Any]", json.loads(line))

    def start(self, code: str, workspace: Path, environ: Mapping[str, str] | None = None, *words: str) -> Process:
        """Forks a process that runs `code` with `sys.argv[1:]` = words."""
        self._number += 1
        folder = self._folder / str(self._number)
        folder.mkdir()
        request = {
            "code": code,
            "workspace": str(workspace),
            "environ": dict(environ or {}),
            "words": words,
            "folder": str(folder),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Process(pid=int(self._answer()["pid"]), folder=folder)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def _serve() -> None:
    for name in ("flashinfer", "flashinfer.jit.core", "torch.distributed"):
        importlib.import_module(name)

    running: dict[int, str] = {}
    requests = open(0, "rb", buffering=0, closefd=False)  # nothing is read ahead: select must see what is left  # noqa: SIM115
    print(json.dumps({"ready": True}), flush=True)
    while True:
        readable, _, _ = select.select([0], [], [], 0.02)
        for pid, folder in list(running.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del running[pid]
                Path(folder, "code.part").write_text(str(os.waitstatus_to_exitcode(status)))
                Path(folder, "code.part").rename(Path(folder, "code"))
        if not readable:
            continue
        line = requests.readline()
        if not line:
            return
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(request)
        running[pid] = request["folder"]
        print(json.dumps({"pid": pid}), flush=True)


def _child(request: dict[str, Any]) -> None:
    from flashinfer.jit import env

    out = os.open(f"{request['folder']}/out", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    err = os.open(f"{request['folder']}/err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.environ.update(request["environ"])
    os.environ["FLASHINFER_WORKSPACE_BASE"] = request["workspace"]
    base = Path(request["workspace"]) / ".cache" / "flashinfer"
    below = env.FLASHINFER_JIT_DIR.relative_to(env.FLASHINFER_CACHE_DIR)
    env.FLASHINFER_CACHE_DIR, env.FLASHINFER_JIT_DIR = base, base / below
    env.FLASHINFER_WORKSPACE_DIR, env.FLASHINFER_GEN_SRC_DIR = base / below.parent, base / below.parent / "generated"
    sys.argv = ["-c", *request["words"]]
    code = 1
    try:
        exec(compile(request["code"], "<test>", "exec"), {"__name__": "__main__"})  # noqa: S102
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
