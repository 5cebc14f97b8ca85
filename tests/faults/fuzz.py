"""`ci/fuzz`, and the targets that the normal tests fuzz for a moment: whatever the bytes, a value or a KcacheError.

Bytes come from mutations of good ones and, where atheris is installed (extra `fuzz`), from libFuzzer, led by which lines of
kcache they reach (`faults.guided`).
"""

from __future__ import annotations

import base64
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from entries import make_entry

from kcache import archive, digest
from kcache.errors import KcacheError
from kcache.index import PARTS_FORMAT, Index, decode_index, index_entry, parse_index
from kcache.index_parts import parse_root
from kcache.manifest import ArchiveFacts, Manifest, parse_manifest
from kcache.trust.envelope import parse_envelope
from kcache.trust.policy import parse_policy

FILES = {"cascade": b"\x7fELF" * 40}


def _sample() -> tuple[Manifest, bytes]:
    with TemporaryDirectory() as directory:
        manifest = make_entry(Path(directory), FILES)
        return manifest, next(Path(directory).glob("*.zst")).read_bytes()


MANIFEST, ARCHIVE = _sample()


def unpack(data: bytes) -> None:
    """An archive with facts that fit its bytes: the readers of frames and members themselves must refuse."""
    expected = {artifact.path: (artifact.size, artifact.sha256) for artifact in MANIFEST.artifacts}
    facts = ArchiveFacts(sha256=digest.of_bytes(data), size=len(data), unpacked_size=MANIFEST.archive.unpacked_size)
    found: dict[str, bytes] = {}
    archive.unpack([data], facts, expected, lambda path, size, chunks: found.update({path: b"".join(chunks)}))
    assert list(found.values()) == list(FILES.values())


_PUBLIC = f"ed25519:{base64.b64encode(bytes(32)).decode()}"
POLICY = f"""format = "kcache.policy/1"
revoked = ["{"0" * 64}"]
[[key]]
name = "a"
public = "{_PUBLIC}"
kinds = ["samp*"]
not_after = 2027-01-01T00:00:00Z
roles = ["entries", "index"]
[[store]]
match = "*"
keys = ["a"]
[index]
threshold = 1
freeze = "warn"
""".encode()
ENVELOPE = digest.canonical_json(
    {
        "payloadType": "application/vnd.in-toto+json",
        "payload": base64.b64encode(b'{"a": 1}').decode(),
        "signatures": [{"keyid": "0" * 64, "sig": base64.b64encode(bytes(64)).decode()}],
    }
)

ROOT = digest.canonical_json(
    {
        "format": PARTS_FORMAT,
        "lines": 1,
        "buckets": 1,
        "archs": ["90a"],
        "spread": ["90a"],
        "models": ["a/b"],
        "models_in_all": 1,
        "parts": {"0": ["0" * 64, 81234]},
    }
)


def read_root(data: bytes) -> None:
    """The root of an index in parts, and what it says of each part."""
    root = parse_root(decode_index(data, "it"), "it")
    for bucket in root.parts:
        root.blob("v1/env/a/b", bucket)
    root.buckets_of([("90a", ""), ("90a", "model b")])


TARGETS: Mapping[str, tuple[Callable[[bytes], object], bytes]] = {
    "archive": (unpack, ARCHIVE),
    "manifest": (parse_manifest, MANIFEST.encode()),
    "index": (parse_index, Index(entries=(index_entry(MANIFEST, MANIFEST.encode()),)).encode()),
    "root of an index in parts": (read_root, ROOT),
    "policy": (lambda data: parse_policy(data, "it"), POLICY),
    "envelope": (lambda data: parse_envelope(data, "it"), ENVELOPE),
}
"""Name -> what reads the bytes, and bytes that it takes."""

_TOKENS = (
    b"null",
    b"-1",
    b"1e999",
    b"[]",
    b"{}",
    b'""',
    b"true",
    b"\x00",
    b"\xff",
    b"9" * 30,
    b"\\ud800",
    b'"a":',
    b"[" * 600,
    b"NaN",
)


def attempt(name: str, data: bytes) -> None:
    """One input. Anything but a value or a KcacheError comes through."""
    try:
        TARGETS[name][0](data)
    except KcacheError:
        pass


def mutated(name: str, chance: random.Random) -> bytes:
    """The good bytes with some of them replaced by bytes, tokens, or other parts of themselves."""
    data = bytearray(TARGETS[name][1])
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice((0, 1, 1, 2, 8, 40)))
        at = chance.randrange(len(data) + 1)
        data[start:end] = chance.choice((chance.choice(_TOKENS), chance.randbytes(chance.randint(0, 4)), data[at : at + 20]))
    return bytes(data)


def main(seconds: float) -> None:
    seed = int(time.time())
    chance = random.Random(seed)
    for name in TARGETS:
        end, count = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            data = mutated(name, chance)
            try:
                attempt(name, data)
            except Exception:
                print(f"{name}: seed {seed}, input {count}: {data!r}", file=sys.stderr)
                raise
            count += 1
        print(f"| {name} | {count} mutations | {_guided(name, seconds)} led by coverage | no crash |", flush=True)


def _guided(name: str, seconds: float) -> str:
    """How many inputs atheris tried; what crashes is printed by it, and ends everything."""
    if find_spec("atheris") is None:
        return "0 (no atheris)"
    with TemporaryDirectory(prefix="kcache-fuzz-") as directory:
        Path(directory, "corpus").mkdir()
        Path(directory, "corpus", "good").write_bytes(TARGETS[name][1])
        command = [sys.executable, "-m", "faults.guided", name, str(max(1, round(seconds))), directory]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=seconds * 4 + 120, check=False)
    executed = re.search(r"stat::number_of_executed_units: +([0-9]+)", done.stderr)
    if done.returncode != 0 or executed is None:
        raise SystemExit(f"{name}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
    return executed[1]


if __name__ == "__main__":
    main(float(sys.argv[1]))
