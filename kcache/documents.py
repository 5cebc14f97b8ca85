"""Taking documents from elsewhere apart: limits, safe paths, and a reader that reports every problem at once.

Nothing here knows what a document means. No I/O.
"""

from __future__ import annotations

import json
import math

from kcache import digest
from kcache.errors import IntegrityError, ManifestError
from kcache.key import NAME
from kcache.values import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a reader accepts at most, in one place. Chosen far above anything that was seen, far below harm.

    The largest module seen in FlashInfer 0.7.4 is below 200 MB; the largest closure of sources below 2,500 files.
    """

    manifest_bytes: int = 16 << 20
    index_bytes: int = 64 << 20
    archive_bytes: int = 8 << 30
    unpacked_bytes: int = 16 << 30
    members: int = 100_000
    ratio: int = 200
    """Unpacked bytes to archive bytes. zstd makes 2 to 8 of object code; 200 stops a bomb early."""
    path_length: int = 400
    path_depth: int = 8


LIMITS = Limits()


class Reader:
    """Takes a JSON document apart and collects every problem with its path."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def object(self, value: Any, path: str) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        self.problems.append(f"{path}: not an object")
        return {}

    def text(self, value: Any, path: str) -> str:
        if isinstance(value, str) and value:
            return value
        self.problems.append(f"{path}: not a text")
        return ""

    def size(self, value: Any, path: str, limit: int) -> int:
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit:
            return value
        self.problems.append(f"{path}: not a number of bytes up to {limit}")
        return 0

    def seconds(self, value: Any, path: str) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9:
            return float(value)
        self.problems.append(f"{path}: not a number of seconds")
        return 0.0

    def sha256(self, value: Any, path: str) -> str:
        if digest.is_digest(value):
            return str(value)
        self.problems.append(f"{path}: not a digest")
        return "sha256:" + "0" * 64

    def path(self, value: Any, path: str) -> str:
        why = unsafe_path(value) if isinstance(value, str) else "not a text"
        if why is None:
            return str(value)
        self.problems.append(f"{path}: unsafe path {value!r}: {why}")
        return ""

    def texts(self, value: Any, path: str) -> tuple[str, ...]:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        self.problems.append(f"{path}: not a list of texts")
        return ()

    def finish(self, what: str) -> None:
        if self.problems:
            raise ManifestError(f"{what} cannot be used", problems=tuple(self.problems))


def unsafe_path(path: str) -> str | None:
    """Why a relative path may not be written below a directory, or None if it may."""
    if not path or len(path.encode("utf-8", "surrogatepass")) > LIMITS.path_length:
        return "empty or too long"
    if path.startswith("/"):
        return "absolute"
    segments = path.split("/")
    if len(segments) > LIMITS.path_depth:
        return "too deep"
    for segment in segments:  # not a generator, which takes twice as long: indexes hold thousands of paths
        if NAME.fullmatch(segment) is None:
            return "a segment is not a plain name"
    return None


def decode(data: bytes, what: str, limit: int) -> Any:
    """JSON from bytes of bounded size.

    Raises:
        IntegrityError: larger than `limit` bytes.
        ManifestError: not UTF-8, not JSON, or something that could not be written again (infinity, half a surrogate pair).
    """
    if len(data) > limit:
        raise IntegrityError(f"{what} is larger than {limit} bytes")
    try:
        document = json.loads(data.decode("utf-8"), parse_constant=_finite, parse_float=_finite)
        if b"\\u" in data:  # half of a surrogate pair, which UTF-8 has no bytes for, can only come from an escape
            json.dumps(document, ensure_ascii=False).encode()
        return document
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{what} is not a JSON document", why=str(error)) from error


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no finite number")
    return number
