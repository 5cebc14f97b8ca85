"""Digests: SHA-256 of bytes, and of documents in one canonical form.

Every digest in a document is written `sha256:<64 hex digits>`. Documents are hashed as canonical JSON (sorted keys, no white
space, no NaN, UTF-8), so equal documents have equal digests on every Python and platform.
"""

from __future__ import annotations

import hashlib
import json
import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

CHUNK = 1 << 20
"""Bytes read at a time: large enough that system calls do not show, small enough that memory does not."""

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def is_digest(text: object) -> bool:
    """Whether `text` is a well-formed digest."""
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def of_bytes(data: bytes) -> str:
    """The digest of `data`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def of_stream(stream: BinaryIO) -> tuple[str, int]:
    """The digest and the length in bytes of everything left in `stream`, read in chunks of `CHUNK`."""
    hasher = hashlib.sha256()
    size = 0
    while chunk := stream.read(CHUNK):
        hasher.update(chunk)
        size += len(chunk)
    return "sha256:" + hasher.hexdigest(), size


def of_file(path: str) -> tuple[str, int]:
    """The digest and size of a file.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as stream:
        return of_stream(stream)


def canonical_json(document: Any) -> bytes:
    """The one byte form of a JSON document that kcache hashes and writes.

    Raises:
        ValueError: the document holds NaN or infinity.
        TypeError: the document holds something that is not JSON.
    """
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def of_document(document: Any) -> str:
    """The digest of a document's canonical form."""
    return of_bytes(canonical_json(document))
