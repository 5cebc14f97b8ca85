"""A container as far as kcache is concerned: a home, a PATH without compilers, and the real command line in real processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas import conforms

from kcache.probe.packages import scan, this_interpreter

REPOSITORY = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Done:
    """One finished command. `document` is the JSON of its standard output, where that is a JSON object."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        document = json.loads(self.out)
        assert isinstance(document, dict)
        return document


@dataclass(frozen=True, kw_only=True)
class Container:
    """A place to restore into.

    home:   its HOME, made by the container.
    site:   directories that come first on PYTHONPATH, such as another FlashInfer.
    environ: further variables.
    python: the interpreter.
    prefix: words before every command, such as `setpriv ...`.
    """

    home: Path
    site: tuple[Path, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable
    prefix: tuple[str, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        empty = self.home / "no-programs"
        empty.mkdir(parents=True, exist_ok=True)
        given = {
            "HOME": str(self.home),
            "PATH": str(empty),
            "CUDA_HOME": str(self.home / "no-cuda"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": ":".join(map(str, self.site)),
        }
        return given | dict(self.environ)

    def kcache(self, *words: str, env: Mapping[str, str] | None = None, timeout: float = 300) -> Done:
        """`kcache WORDS` in this container."""
        return self.run([self.python, "-m", "kcache", *words], env=env, timeout=timeout)

    def run(self, command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 300) -> Done:
        """Any command in this container; relative programs are not found, as PATH leads nowhere."""
        variables = {**self.variables, **(env or {})}
        # A checkout that is not installed for this interpreter is found all the same.
        variables["PYTHONPATH"] = ":".join(part for part in (variables.get("PYTHONPATH", ""), str(REPOSITORY)) if part)
        done = subprocess.run(
            [*self.prefix, *command], env=variables, capture_output=True, text=True, timeout=timeout, check=False, cwd=self.home
        )
        return Done(code=done.returncode, out=done.stdout, err=done.stderr)

    def restore(self, store: Path, *words: str, arch: str = "9.0a", timeout: float = 300) -> Done:
        """`kcache restore --json` from a local store, for a described GPU."""
        done = self.kcache("restore", "--from", str(store), "--arch", arch, "--json", *words, timeout=timeout)
        if done.code in (0, 3, 10) and "--" not in words:
            conforms("restore", done.document)
        return done

    def verify(self, *words: str, arch: str = "9.0a") -> dict[str, Any]:
        """`kcache verify --json`, its document."""
        done = self.kcache("verify", "--arch", arch, "--json", *words)
        assert done.out, done.err
        conforms("error" if done.document["status"] == "error" else "verify", done.document)
        return done.document

    @property
    def libraries(self) -> list[Path]:
        """Every installed library below the cache root."""
        return sorted((self.home / ".cache" / "kcache" / "v1" / "entries").glob("*/*/*.so"))


ROOT = os.geteuid() == 0


def copy_flashinfer(directory: Path) -> Path:
    """The installed FlashInfer at another path: its files hard-linked, so that it costs no space."""
    package = scan(this_interpreter().search_path).package("flashinfer")
    assert package is not None
    directory.mkdir(parents=True)
    for source in (Path(package), next(Path(package).parent.glob("flashinfer_python-*.dist-info"))):
        shutil.copytree(source, directory / source.name, copy_function=os.link, ignore=shutil.ignore_patterns("__pycache__"))
    return directory


def open_up(*directories: Path) -> None:
    """Lets other users reach directories that pytest made for this one alone."""
    for directory in directories:
        for level in (directory, *directory.parents):
            if level != Path("/") and level.stat().st_uid == os.getuid():
                level.chmod(level.stat().st_mode | 0o755)
