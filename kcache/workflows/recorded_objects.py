"""What the objects of recorded modules were compiled from, kept from one recording to the next.

Ninja compares times, and a source that changed can be older than the object (case B21). So an object that is new is trusted if
nothing that it was made of was touched since: the change time of a file, which no program can set back. That time also moves when
a file is linked, as installers do; then it has to be what its wheel says. Digests of the first time are written down, by object
and its time, and decide from then on.
"""

from __future__ import annotations

import base64
import csv
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kcache import digest, fsops

_FORMAT = "kcache.recorded/1"


class RecordedObjects:
    """The record in a file, and digests of files, each read once.

    Args:
        path: of the record.
        wheels: metadata directories (`.dist-info`) of wheels whose files may have been linked meanwhile.
    """

    def __init__(self, path: Path, wheels: Sequence[Path] = ()) -> None:
        self._path, self._wheels = path, wheels
        self._installed: dict[str, str] | None = None
        self._digests: dict[str, str] = {}
        self._objects: dict[str, Any] = _read(path)

    def made_of(self, output: Path, paths: Sequence[str]) -> tuple[dict[str, str], str]:
        """Digests of the files that an object was compiled from; and the first that changed since, or an empty text.

        Raises:
            OSError: a file cannot be read.
        """
        status = output.stat()
        stamp = [status.st_mtime_ns, status.st_size]
        known = self._objects.get(str(output))
        found = {path: self._digest(path) for path in paths}
        if isinstance(known, dict) and known.get("stamp") == stamp and isinstance(known.get("read"), dict):
            changed = (path for path, value in found.items() if known["read"].get(path) != value)
        else:
            touched = (path for path in paths if Path(path).stat().st_ctime_ns > status.st_mtime_ns)
            changed = (path for path in touched if not self._as_installed(path))
        if not (late := next(changed, "")):
            self._objects[str(output)] = {"stamp": stamp, "read": found}
        return found, late

    def write(self) -> None:
        """Writes the record for the next time."""
        fsops.write_bytes(self._path, digest.canonical_json({"format": _FORMAT, "objects": self._objects}))

    def _digest(self, path: str) -> str:
        if path not in self._digests:
            self._digests[path] = digest.of_file(path)[0]
        return self._digests[path]

    def _as_installed(self, path: str) -> bool:
        if self._installed is None:
            self._installed = {}
            for wheel in self._wheels:
                self._installed |= _recorded_hashes(wheel)
        return self._installed.get(os.path.realpath(path)) == self._digest(path)


def _recorded_hashes(metadata: Path) -> dict[str, str]:
    """Absolute path -> digest of each file that a wheel's RECORD lists (PyPA, Binary distribution format)."""
    try:
        with (metadata / "RECORD").open(encoding="utf-8", newline="") as stream:
            rows = [row for row in csv.reader(stream) if len(row) == 3 and row[1].startswith("sha256=")]
        root = os.path.realpath(metadata.parent)
        return {f"{root}/{path}": f"sha256:{_hex(text)}" for path, text, _ in rows}
    except (OSError, ValueError, csv.Error):
        return {}


def _hex(text: str) -> str:
    """`sha256=` and 43 characters of base64 without padding, as hexadecimal digits."""
    encoded = text.removeprefix("sha256=")
    return base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex()


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    good = isinstance(document, dict) and document.get("format") == _FORMAT and isinstance(document.get("objects"), dict)
    return document["objects"] if good else {}
