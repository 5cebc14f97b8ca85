"""The type of the fixture `build_modules` (tests/real/conftest.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class BuildModules(Protocol):
    """Builds modules, each its own entry, and returns the directory of entries. `flashinfer_site` shadows the installed one."""

    def __call__(self, modules: tuple[str, ...], arch: str = "9.0a", flashinfer_site: Path | None = None) -> Path: ...
