"""Archives: a deterministic tar in one zstd frame, written and read as a stream.

Invariants:
- Packing the same files gives the same bytes, on every Python (with one version of libzstd; files are compared by their own
  digests, never by the archive's).
- Unpacking gives exactly the files that the manifest names, each once, each verified before its last piece is handed on, and
  refuses everything else with one line that names the member.
- Memory does not grow with the archive: the window, and pieces of 128 KiB.

Not here: where files go. A sink decides; it must not make them visible under their names before `unpack` has returned, because
only then was the archive as a whole found right (`kcache.fsops.stage`).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from kcache import digest, fsops
from kcache.archive import frame, tar
from kcache.archive.hashing import Background
from kcache.documents import LIMITS, Limits, unsafe_path
from kcache.errors import CollectError, IntegrityError
from kcache.manifest import ArchiveFacts, Manifest

Sink = Callable[[str, int, Iterator[bytes]], None]
"""Takes one member: path, size in bytes, content in pieces. The iterator raises IntegrityError in place of ending if the
content is not the right one; what a sink leaves untaken is verified all the same."""

_LEVEL = 9
_RATIO_FLOOR = 1 << 20
"""Bytes: small archives may unpack to this much whatever their ratio (a file of zeros is no bomb yet)."""


def pack(files: Mapping[str, Path], destination: Path) -> ArchiveFacts:
    """Writes an archive of `files` (path in the archive -> file), whole or not at all.

    Raises:
        CollectError: a file cannot be read, is not regular, or changes meanwhile.
        IntegrityError: the archive would break a limit that readers hold.
        InstallError: it cannot be written.
    """
    import zstandard

    sizes = {path: _size(files[path]) for path in sorted(files)}
    total = _check_expected({path: (size, digest.of_bytes(b"")) for path, size in sizes.items()}, LIMITS)
    # The number of threads is part of the format: with any, libzstd cuts the input into jobs and writes other bytes.
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True, write_content_size=True, threads=0)
    encoder = compressor.compressobj(size=total)

    def compressed() -> Iterator[bytes]:
        for piece in _tar_stream(files, sizes):
            if data := encoder.compress(piece):
                yield data
        yield encoder.flush()

    written = fsops.write_stream(destination.parent, destination.name, compressed(), expected_size=None, expected_sha256=None)
    facts = ArchiveFacts(sha256=written.sha256, size=written.size, unpacked_size=sum(sizes.values()))
    _check_archive(facts, total, LIMITS)
    return facts


def _size(path: Path) -> int:
    try:
        found = path.lstat()
    except OSError as error:
        raise CollectError(f"cannot pack {path}", why=error.strerror or "") from error
    if not stat.S_ISREG(found.st_mode):
        raise CollectError(f"cannot pack {path}", why="it is not a regular file")
    return found.st_size


def _tar_stream(files: Mapping[str, Path], sizes: Mapping[str, int]) -> Iterator[bytes]:
    for path, size in sizes.items():
        yield tar.header(path, size)
        yield from _content(files[path], size)
        yield bytes(tar.padding(size))
    yield tar.END


def _content(path: Path, size: int) -> Iterator[bytes]:
    left = size
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as stream:
            while chunk := stream.read(min(digest.CHUNK, left + 1)):
                left -= len(chunk)
                if left < 0:
                    break
                yield chunk
    except OSError as error:
        raise CollectError(f"cannot pack {path}", why=error.strerror or "") from error
    if left:
        raise CollectError(f"cannot pack {path}", why="its size changed while it was read")


def unpack_entry(chunks: Iterable[bytes], manifest: Manifest, sink: Sink) -> None:
    """`unpack` for the archive of an entry."""
    expected = {artifact.path: (artifact.size, artifact.sha256) for artifact in manifest.artifacts}
    unpack(chunks, manifest.archive, expected, sink)


def unpack(
    chunks: Iterable[bytes],
    archive: ArchiveFacts,
    expected: Mapping[str, tuple[int, str]],
    sink: Sink,
    *,
    limits: Limits = LIMITS,
) -> None:
    """Hands every member of an archive to `sink`, verified; returns only if the archive is right to its last byte.

    Args:
        chunks: the archive's bytes; errors that it raises pass through.
        archive: size and digest of these bytes, from a verified manifest.
        expected: path -> (size in bytes, digest) of each member, from a verified manifest; any order.
        sink: called once for each member.

    Raises:
        IntegrityError: the archive is not exactly what is expected. Members may have been handed on before this is known.
    """
    total = _check_expected(expected, limits)
    _check_archive(archive, total, limits)
    if archive.unpacked_size != sum(size for size, _ in expected.values()):
        raise IntegrityError(f"the manifest says {archive.unpacked_size} unpacked bytes, which is not the sum of its files")
    background = Background()
    try:
        _unpack(_Tape(frame.decompress(chunks, archive, total, background)), expected, sink, background)
    finally:
        background.close()


def _unpack(tape: _Tape, expected: Mapping[str, tuple[int, str]], sink: Sink, background: Background) -> None:
    missing = dict(expected)
    paths = {tar.member_name(path): path for path in expected}
    while missing:
        head = tape.exactly(tar.BLOCK)
        path = paths.get(name := tar.claimed_name(head), name)
        size, sha256 = _admit(head, path, missing, expected)
        content = _verified(path, size, sha256, tape, background)
        sink(path, size, content)
        for _ in content:
            pass
        if any(tape.exactly(tar.padding(size))):
            raise IntegrityError(f"member {path!r} is followed by bytes that are not padding")
    if any(tape.exactly(len(tar.END))):
        raise IntegrityError("the archive goes on after the members that its manifest names")
    tape.finish()


def _admit(
    head: bytes, path: str, missing: dict[str, tuple[int, str]], expected: Mapping[str, tuple[int, str]]
) -> tuple[int, str]:
    if not any(head):
        raise IntegrityError(f"the archive ends without member {min(missing)!r}")
    if path not in missing:
        if path in expected:
            raise IntegrityError(f"member {path!r} is in the archive twice")
        raise IntegrityError(f"member {_shown(path)!r} is not in the manifest")
    size, sha256 = missing.pop(path)
    if head != (wanted := tar.header(path, size)):
        raise IntegrityError(f"member {path!r} is refused", why=tar.why_refused(head, wanted))
    return size, sha256


def _shown(path: str) -> str:
    """A path that may be anything, short enough for a message of one line."""
    return path if len(path) <= 80 else f"{path[:80]}..."


def _verified(path: str, size: int, sha256: str, tape: _Tape, background: Background) -> Iterator[bytes]:
    hasher = background.sha256()
    for piece in tape.pieces(size):
        hasher.update(piece)
        yield piece
    if (found := "sha256:" + hasher.hexdigest()) != sha256:
        raise IntegrityError(f"member {path!r} has digest {found}", why=f"its manifest says {sha256}")


class _Tape:
    """Takes exact numbers of bytes from decompressed pieces."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._rest: bytes | memoryview = b""

    def pieces(self, count: int) -> Iterator[bytes]:
        while count:
            if not self._rest:
                self._rest = next(self._pieces, b"")
                if not self._rest:
                    raise IntegrityError("the archive ends in the middle of a member")
            if len(self._rest) <= count:
                piece, self._rest = self._rest, b""
            else:
                whole = memoryview(self._rest)
                piece, self._rest = whole[:count], whole[count:]
            count -= len(piece)
            yield bytes(piece)  # the same object where it is one already

    def exactly(self, count: int) -> bytes:
        return b"".join(self.pieces(count))

    def finish(self) -> None:
        """Runs to the end of the frame, where its size and digest are checked."""
        if self._rest or any(self._pieces):
            raise IntegrityError("the archive goes on after its end mark")


def _check_expected(expected: Mapping[str, tuple[int, str]], limits: Limits) -> int:
    """Refuses what no archive may hold; returns the bytes of the tar stream that the files need."""
    if not expected or len(expected) > limits.members:
        raise IntegrityError(f"an archive has 1 to {limits.members} members, not {len(expected)}")
    directories: set[str] = set()
    for path in expected:
        if (why := unsafe_path(path)) is not None:
            raise IntegrityError(f"member {_shown(path)!r} has an unsafe path", why=why)
        parts = path.lower().split("/")
        directories.update("/".join(parts[:depth]) for depth in range(1, len(parts)))
    folded = {path.lower() for path in expected}
    if len(folded) != len(expected):
        raise IntegrityError("two members differ only in letter case")
    if len({tar.member_name(path) for path in expected}) != len(expected):
        raise IntegrityError("two members have one name")
    if both := folded & directories:
        raise IntegrityError(f"member {min(both)!r} is a directory of another member")
    if (unpacked := sum(size for size, _ in expected.values())) > limits.unpacked_bytes:
        raise IntegrityError(f"the members have {unpacked} bytes", why=f"at most {limits.unpacked_bytes} are allowed")
    return tar.stream_size(size for size, _ in expected.values())


def _check_archive(archive: ArchiveFacts, total: int, limits: Limits) -> None:
    if archive.size > limits.archive_bytes:
        raise IntegrityError(f"the archive has {archive.size} bytes", why=f"at most {limits.archive_bytes} are allowed")
    if total > max(archive.size * limits.ratio, _RATIO_FLOOR):
        raise IntegrityError(
            f"the archive of {archive.size} bytes would unpack to {total}", why=f"more than {limits.ratio} times its size"
        )
