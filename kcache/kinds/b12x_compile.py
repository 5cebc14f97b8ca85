"""b12x's compile cache: finished programs collected, named anew for another host, installed, and judged as b12x judges them.

A program is `<k2>/<key>.o` beside `<key>.json` (`_lib/compiler.py`, 1.5.1): b12x takes the object only if the manifest names this
key and the object's size and SHA-256 (`_lib/cache_integrity.py`, valid_object). The key is in the object's symbols too. So:

- only bytes that a manifest vouches for are collected, and they are read once: what was verified is what is kept;
- for a host whose key differs in what is only recorded (`kcache.kinds.b12x_key`), `rename` writes the host's key into the object
  in place of the builder's, and the manifest that the host's own b12x would have written. Both are then byte for byte what a
  compilation there gives (`tests/real/test_b12x_package_builds.py`);
- a manifest is never above bytes that it does not vouch for: the old one goes first, the new one comes last, under b12x's own
  lock. A pair that is whole stays, whoever's it is: one key is one program.
"""

# ruff: noqa: PTH208 -- names are compared as strings
from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kcache import fsops
from kcache.errors import IntegrityError, KcacheError
from kcache.kinds.b12x_key import EXPLICIT, STRUCTURAL, Payload, Target, expected_payload, key_of, parse_payload
from kcache.values import dataclass

SCHEMA = "b12x._lib.compile_manifest.v3"

MAX_OBJECT = 64 << 20
"""Bytes; the largest program seen had 0.3 MB."""

MAX_MANIFEST = 4 << 20

_KEY = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"[0-9a-f]{2}")


def compile_cache_directory(environ: Mapping[str, str]) -> str:
    """Where b12x keeps programs, for a process with this environment (`_cute_compile_cache_dir`).

    Raises:
        IntegrityError: neither B12X_COMPILE_CACHE_DIR nor XDG_CACHE_HOME nor HOME says so.
    """
    if root := environ.get("B12X_COMPILE_CACHE_DIR"):
        return root
    if cache := environ.get("XDG_CACHE_HOME"):
        return f"{cache}/b12x/compile"
    if home := environ.get("HOME"):
        return f"{home}/.cache/b12x/compile"
    raise IntegrityError("b12x's compile cache has no place", why="HOME is not set", remedy="Set B12X_COMPILE_CACHE_DIR.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One finished program.

    key:      b12x's name of it: 64 hex digits.
    kernel:   what b12x calls the kernel, such as `integration.tp_moe.dynamic`; several programs share it.
    payload:  the tuple that the key is the digest of.
    object, manifest: the bytes of both files.
    """

    key: str
    kernel: str
    payload: Payload
    object: bytes
    manifest: bytes

    @property
    def sha256(self) -> str:
        """The object's digest."""
        return "sha256:" + hashlib.sha256(self.object).hexdigest()

    @property
    def path(self) -> str:
        """Of the object below the cache's root; the manifest's ends in `.json`."""
        return f"{self.key[:2]}/{self.key}.o"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A file that was not collected, by path below the cache's root, and why in one line."""

    path: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What lies in a compile cache: programs by key, and everything that is none. Locks are not mentioned."""

    programs: tuple[Program, ...]
    left_out: tuple[LeftOut, ...]


def collect(root: Path, only: Iterable[str] | None = None) -> Collected:
    """The finished programs of a compile cache.

    Args:
        only: keys to look for; all where None.

    Raises:
        TrustError: someone else could change the root.
    """
    fsops.check_root(root)
    wanted = None if only is None else set(only)
    programs: list[Program] = []
    left_out: list[LeftOut] = []
    for shard in sorted(os.listdir(root)):
        if not _SHARD.fullmatch(shard):
            continue
        try:
            fsops.check_root(root / shard)
        except KcacheError as error:
            left_out.append(LeftOut(path=shard, why=str(error)))
            continue
        names = sorted(os.listdir(root / shard))
        for stem in sorted({name.partition(".")[0] for name in names if _KEY.fullmatch(name.partition(".")[0])}):
            if wanted is not None and stem not in wanted:
                continue
            if f"{stem}.o" not in names and f"{stem}.json" not in names:
                continue  # a lock of a program that was never finished, or is being compiled
            try:
                programs.append(read_program(root, stem))
            except KcacheError as error:
                left_out.append(LeftOut(path=f"{shard}/{stem}.o", why=_why(error)))
        left_out += [
            LeftOut(path=f"{shard}/{name}", why="not a name that b12x gives a finished program")
            for name in names
            if not _KEY.fullmatch(name.partition(".")[0]) and wanted is None
        ]
    return Collected(programs=tuple(programs), left_out=tuple(left_out))


def _why(error: KcacheError) -> str:
    return f"{error.what}: {error.why}" if error.why else error.what


def read_program(root: Path, key: str) -> Program:
    """One program, verified by its own manifest.

    Raises:
        IntegrityError: it is not finished, or its manifest does not vouch for its bytes.
        TrustError: one of its files is a link, no regular file, or someone else could change it.
    """
    found = _files(root, key)
    for suffix, why in ((".json", "its object has no manifest"), (".o", "its manifest has no object")):
        if suffix not in found:
            raise IntegrityError("not finished", why=why)
    return verify_program(key, found[".o"], found[".json"])


def _files(root: Path, key: str) -> dict[str, bytes]:
    found = {}
    for suffix, limit in ((".o", MAX_OBJECT), (".json", MAX_MANIFEST)):
        path = root / key[:2] / f"{key}{suffix}"
        if not os.path.lexists(path):
            continue
        size = fsops.check_regular(path).size
        if size > limit:
            raise IntegrityError(f"{path.name} is too large", why=f"{size} bytes; at most {limit} are read")
        try:
            with path.open("rb") as stream:
                found[suffix] = stream.read(limit + 1)
        except OSError as error:
            raise IntegrityError(f"{path.name} cannot be read", why=error.strerror or str(error)) from error
    return found


def verify_program(key: str, data: bytes, manifest: bytes) -> Program:
    """A program from the bytes of its two files, by b12x's rule (`valid_object`) and, beyond it, by what its key says.

    Raises:
        IntegrityError: the manifest does not vouch for these bytes under this key, or is not one that kcache knows.
    """
    document = _document(key, manifest)
    if reason := refusal(key, data, document):
        raise IntegrityError("b12x would not take it", why=reason)
    if document.get("schema") != SCHEMA:
        raise IntegrityError("its manifest is of another kind", why=f"schema {str(document.get('schema'))[:60]!r}")
    text = document.get("cache_payload_repr")
    payload = parse_payload(text if isinstance(text, str) else "", key)
    if data.count(_symbol(key)) == 0:
        raise IntegrityError("its object does not export it", why="no symbol of the object holds the key")
    return Program(
        key=key, kernel=str(document.get("kernel_id") or document.get("target")), payload=payload, object=data, manifest=manifest
    )


def _document(key: str, manifest: bytes) -> dict[str, Any]:
    try:
        document = json.loads(manifest)
    except (ValueError, RecursionError) as error:
        raise IntegrityError("its manifest is not JSON", why=str(error)) from error
    if not isinstance(document, dict):
        raise IntegrityError("its manifest is not a JSON object", why=key)
    return document


def refusal(key: str, data: bytes, document: Mapping[str, Any]) -> str:
    """Why b12x would not take these bytes under this manifest (`cache_integrity.py`, _validate_object); empty if it would."""
    if document.get("cache_key") != key:
        return "the manifest is of another key"
    size, sha256 = document.get("object_bytes"), document.get("object_sha256")
    if type(size) is not int or size <= 0 or size != len(data):
        return f"the manifest says {size} bytes, the object has {len(data)}"
    if sha256 != hashlib.sha256(data).hexdigest():
        return "the object's SHA-256 is not the manifest's"
    return ""


def _symbol(key: str) -> bytes:
    """How b12x begins the names of a program's symbols (`_cache_prefix`)."""
    return f"b12x_cute_{key}".encode()


def for_target(program: Program, target: Target) -> Program:
    """The program as the target's b12x names it: itself where the keys agree. Whether it may be used is `match_program`'s to say.

    Raises:
        IntegrityError: it cannot be renamed; only its own key would be asked for.
    """
    expected = expected_payload(program.payload, target)
    return program if expected == program.payload else rename(program, expected)


def rename(program: Program, payload: Payload) -> Program:
    """The program under another key: the object with the new key in its symbols, and the manifest that b12x would write for it.

    Both keys have 64 digits, so nothing in the object moves.

    Raises:
        IntegrityError: the key is not in the object, or the manifest has parts that are not known.
    """
    old, new = program.key.encode(), key_of(payload.values).encode()
    if program.object.count(old) != program.object.count(_symbol(program.key)):
        raise IntegrityError("a program cannot be renamed", why="its object holds its key in places that are no symbols")
    data = program.object.replace(old, new)
    document = _document(program.key, program.manifest)
    if payload.format != program.payload.format or payload.format not in (EXPLICIT, STRUCTURAL):
        raise IntegrityError("a program cannot be renamed", why=f"its key has format {payload.format}")
    return verify_program(new.decode(), data, _manifest(document, payload, new.decode(), data))


def _manifest(document: Mapping[str, Any], payload: Payload, key: str, data: bytes) -> bytes:
    """`_build_compile_manifest` for a program whose manifest under another key is there."""
    values = _plain(payload.values)
    semantic = dict(document["semantic_payload"])
    semantic["compile_environment"] = values[-1]
    semantic["device_arch"] = values[4]
    sha256 = hashlib.sha256(data).hexdigest()
    evidence = {"cache_key": key, "object_sha256": sha256, "launch_metadata": document.get("launch_metadata")}
    made = dict(document) | {
        "cache_key": key,
        "cache_payload_repr": repr(payload.values),
        "cache_payload": values,
        "object_sha256": sha256,
        "object_bytes": len(data),
        "semantic_key": hashlib.sha256(_json(semantic)).hexdigest(),
        "semantic_payload": semantic,
        "package_fingerprint": payload.fingerprint,
        "toolchain": values[3],
        "compile_environment": values[-1],
        "artifact_evidence_sha256": hashlib.sha256(_json(evidence)).hexdigest(),
    }
    return _json(made) + b"\n"


def _json(value: Any) -> bytes:
    """As b12x writes its manifests."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def _plain(value: Any) -> Any:
    """b12x's `_manifest_json_value` for what a payload that was read back holds."""
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return {"kind": "bytes", "hex": value.hex()}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What an install did, by key.

    written:   programs that were written -> the object's digest.
    kept:      programs that were there, whole.
    set_aside: files that b12x would not have taken, and that were renamed.
    """

    written: Mapping[str, str]
    kept: tuple[str, ...]
    set_aside: tuple[str, ...]


def install(root: Path, programs: Sequence[Program], *, timeout: float) -> Placed:
    """Put programs into a compile cache, each whole or not at all, under b12x's own locks.

    Nothing is written before every program is verified and every place looked at.

    Args:
        root: see `compile_cache_directory`; it is made where it is missing.
        timeout: seconds to wait for each lock, which a compilation of the same program holds.

    Raises:
        TrustError: the root, a directory, a file or a lock is a link, or someone else could change it.
        IntegrityError: a program's bytes are not what its manifest vouches for.
        LockTimeoutError, NoSpaceError, InstallError: see `kcache.fsops`.
    """
    for program in programs:
        verify_program(program.key, program.object, program.manifest)
    fsops.ensure_directory(root)
    for program in programs:
        _look(root, program.key)
    fsops.require_space(root, sum(len(program.object) + len(program.manifest) for program in programs))
    written: dict[str, str] = {}
    kept, aside = [], []
    for program in programs:
        shard = fsops.ensure_directory(root / program.key[:2], root=root)
        with fsops.locked(shard / f"{program.key}.lock", timeout):
            if accepted(root, program.key) == "":
                kept.append(program.key)
                continue
            aside += _clear(shard, program.key)
            _write(shard, f"{program.key}.o", program.object)
            _write(shard, f"{program.key}.json", program.manifest)
            written[program.key] = program.sha256
    return Placed(written=written, kept=tuple(kept), set_aside=tuple(aside))


def _look(root: Path, key: str) -> None:
    """Refuses, before anything is written, places that nothing may be written to."""
    shard = root / key[:2]
    if not os.path.lexists(shard):
        return
    fsops.check_root(shard)
    for suffix in (".o", ".json", ".lock"):
        path = shard / f"{key}{suffix}"
        if os.path.lexists(path):
            fsops.check_regular(path)


def _clear(shard: Path, key: str) -> list[str]:
    """Takes what is not whole out of the way, the manifest first: it must not stand above other bytes, not for a moment."""
    aside = []
    for suffix in (".json", ".o"):
        path = shard / f"{key}{suffix}"
        if os.path.lexists(path):
            fsops.set_aside(path)
            aside.append(f"{shard.name}/{path.name}")
    return aside


def _write(shard: Path, name: str, data: bytes) -> None:
    sha256 = "sha256:" + hashlib.sha256(data).hexdigest()
    fsops.write_stream(shard, name, (data,), expected_size=len(data), expected_sha256=sha256)


def accepted(root: Path, key: str) -> str:
    """Why b12x would not take the program of this key from this cache; empty if it would. Reads two files, imports nothing.

    b12x itself does not care who else could change a file; kcache does.
    """
    try:
        found = _files(root, key)
        if set(found) != {".o", ".json"}:
            return "there is no object" if ".o" not in found else "its object has no manifest"
        return refusal(key, found[".o"], _document(key, found[".json"]))
    except KcacheError as error:
        return _why(error)
