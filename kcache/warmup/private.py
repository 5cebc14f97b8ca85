"""Building a module where locks lie: in a directory of its own, which then takes the module's name; the last rename wins.

FlashInfer writes resolved paths into build files (jit/cpp_ext.py, generate_ninja_build_for_op). So a directory that a symbolic
link of the module's name leads to is, for FlashInfer and ninja, the module's own: what was built there under its resolved path is
up to date. Readers see one whole directory or another, and libraries that are loaded stay as they were opened.
"""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path
from typing import Any

ROOM = ".kcache-built"
"""Below FlashInfer's `cached_ops`; each directory in it has a name that nobody else uses."""

_TRIES = 200


def directory(spec: Any) -> Path:
    """A new directory with the module's build file for that place."""
    home = Path(spec.ninja_path).parent
    text = Path(spec.ninja_path).read_text(encoding="utf-8")
    parent = Path(os.path.realpath(home.parent))
    own = parent / ROOM / f"{spec.name}-{uuid.uuid4().hex}"
    own.mkdir(parents=True)
    (own / "build.ninja").write_text(text.replace(f"{os.path.realpath(home)}{os.sep}", f"{own}{os.sep}"), encoding="utf-8")
    return own


def publish(spec: Any, own: Path) -> None:
    """Gives the directory the module's name. What has it so far goes on existing for those who opened it.

    Raises:
        OSError: the name cannot be given.
    """
    home = Path(spec.ninja_path).parent
    link = home.parent / f".kcache-link-{uuid.uuid4().hex}"
    link.symlink_to(Path(ROOM) / own.name)
    try:
        for _ in range(_TRIES):
            try:
                link.rename(home)
                return
            except OSError as error:
                if error.errno not in (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST):
                    raise
            try:  # a directory cannot be replaced by a link, only moved out of its way
                home.rename(home.parent / ROOM / f"aside-{uuid.uuid4().hex}")
            except FileNotFoundError:
                continue  # somebody else did
        raise OSError(errno.EBUSY, "the module's directory kept coming back", str(home))
    finally:
        link.unlink(missing_ok=True)
