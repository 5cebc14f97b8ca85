"""A local Hub as a process of its own, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parent.parent.parent

WRITER, READER, STRANGER = "hf_farm_write", "hf_farm_read", "hf_stranger"
"""Tokens of a member of the organisation `farm` who may write, of one who may read, and of somebody else."""


class HubProcess:
    """A running local Hub. `endpoint` is its address, `root` its directory."""

    def __init__(self, root: Path, *options: str) -> None:
        self.root = root
        command = [sys.executable, "-m", "tests.hub", "--root", str(root), *options]
        self._process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("export HF_ENDPOINT="), "the local Hub did not start"
        self.endpoint = line.strip().partition("=")[2]

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def environ(self, token: str | None = WRITER, **more: str) -> dict[str, str]:
        """Variables for a process that is to use this Hub, and nothing of the outer world's."""
        found = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(self.root / "hf-home"), "HF_HUB_DISABLE_XET": "1"}
        if token is not None:
            found["HF_TOKEN"] = token
        return found | more

    def admin(self, path: str, document: Any = None) -> Any:
        """GET `/_hub/<path>`, or PUT where there is a document."""
        data = None if document is None else json.dumps(document).encode()
        request = urllib.request.Request(f"{self.endpoint}/_hub/{path}", data=data, method="GET" if document is None else "PUT")
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as response:
            return json.loads(response.read())

    def fault(self, *rules: Mapping[str, Any]) -> None:
        """The faults in force from now on: see `tests.hub.faults`."""
        self.admin("faults", list(rules))

    def requests(self) -> list[dict[str, Any]]:
        """What was asked of both ports since the last call, in order, faults or not."""
        found: list[dict[str, Any]] = self.admin("log", [])
        return found

    def repository(self, name: str, **settings: Any) -> dict[str, Any]:
        """Settings of a model repository, some of them set."""
        found: dict[str, Any] = self.admin(f"repo/models/{name}", settings or None)
        return found


@contextmanager
def local_hub(root: Path, *options: str) -> Iterator[HubProcess]:
    hub = HubProcess(root, *options)
    try:
        yield hub
    finally:
        hub.stop()


@contextmanager
def variables(environ: Mapping[str, str]) -> Iterator[None]:
    """These variables in this process, and none other of the Hub's."""
    before = dict(os.environ)
    for name in [*os.environ]:
        if name.startswith("HF_") or name.lower().endswith("_proxy"):
            del os.environ[name]
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
