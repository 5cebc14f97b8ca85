"""One zstd frame, read strictly and in bounded memory.

The frame's own structure (RFC 8878, sections 3.1.1.1 to 3.1.1.3) is walked here, so that its end is known to the byte, so that
libzstd only ever sees one block at a time (at most 128 KiB in, at most 128 KiB out: no bomb can expand further ahead than
that), and so that window, content size and checksum are checked before it sees any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kcache.archive.hashing import Background
from kcache.errors import IntegrityError
from kcache.manifest import ArchiveFacts

MAX_WINDOW = 8 << 20
"""Bytes that a decoder must keep. kcache writes 4 MiB (zstd level 9); RFC 8878 asks every decoder for 8 MiB."""

_MAGIC = 0xFD2FB528
_BLOCK_MAX = 128 << 10
_RAW, _RLE, _COMPRESSED = 0, 1, 2


class _Source:
    """Takes exact numbers of bytes from chunks, and counts and hashes the chunks as they come."""

    def __init__(self, chunks: Iterable[bytes], limit: int, background: Background) -> None:
        self._chunks = iter(chunks)
        self._limit = limit
        self._rest = memoryview(b"")
        self._hasher = background.sha256()
        self.received = 0

    def peek(self, count: int) -> bytes:
        """The next bytes, which stay there. For a few: what is left of a chunk is joined with the next."""
        while len(self._rest) < count:
            self._rest = memoryview(bytes(self._rest) + self._more())
        return bytes(self._rest[:count])

    def take(self, count: int) -> bytes:
        """The next bytes, copied once."""
        parts = []
        while len(self._rest) < count:
            parts.append(self._rest)
            count -= len(self._rest)
            self._rest = memoryview(self._more())
        parts.append(self._rest[:count])
        self._rest = self._rest[count:]
        return b"".join(parts)

    def block(self, count: int) -> bytes | memoryview:
        """The next bytes, not copied where one chunk holds them all."""
        if len(self._rest) < count:
            return self.take(count)
        piece, self._rest = self._rest[:count], self._rest[count:]
        return piece

    def _more(self) -> bytes:
        if chunk := self._next():
            return chunk
        raise IntegrityError(f"the archive ends after {self.received} bytes", why=f"its manifest says {self._limit}")

    def _next(self) -> bytes:
        """The next chunk that holds anything; empty at the end."""
        for chunk in self._chunks:
            self.received += len(chunk)
            if self.received > self._limit:
                raise IntegrityError(f"the archive is longer than the {self._limit} bytes that its manifest says")
            self._hasher.update(chunk)
            if chunk:
                return chunk
        return b""

    def finish(self, sha256: str) -> None:
        """Refuses anything that follows, and bytes that are not the ones announced."""
        if self._rest or self._next():
            raise IntegrityError("the archive goes on after its zstd frame")
        if self.received != self._limit:
            raise IntegrityError(f"the archive has {self.received} bytes", why=f"its manifest says {self._limit}")
        if (found := "sha256:" + self._hasher.hexdigest()) != sha256:
            raise IntegrityError(f"the archive has digest {found}", why=f"its manifest says {sha256}")


def decompress(chunks: Iterable[bytes], archive: ArchiveFacts, content_size: int, background: Background) -> Iterator[bytes]:
    """The content of the one frame that `chunks` holds, in pieces of at most 128 KiB.

    Only when the iterator has ended were size and digest of the compressed bytes found right.

    Args:
        chunks: the archive's bytes.
        archive: what the manifest says of them.
        content_size: bytes that must come out.
        background: hashes the archive's bytes.

    Raises:
        IntegrityError: anything else than exactly this frame.
    """
    import zstandard  # a start that has nothing to install does not pay for it

    source = _Source(chunks, archive.size, background)
    decoder = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompressobj(write_size=_BLOCK_MAX)
    produced = 0
    try:
        for piece in _pieces(source, content_size):
            if content := decoder.decompress(piece):
                produced += len(content)
                if produced > content_size:
                    raise IntegrityError(f"the archive unpacks to more than the {content_size} bytes that it announces")
                yield content
    except zstandard.ZstdError as error:
        raise IntegrityError("the archive cannot be decompressed", why=str(error)) from error
    source.finish(archive.sha256)
    if not decoder.eof or produced != content_size:
        raise IntegrityError(f"the archive unpacks to {produced} bytes", why=f"{content_size} were expected")


def _pieces(source: _Source, content_size: int) -> Iterator[bytes | memoryview]:
    """The frame's header, then each block, then the checksum."""
    yield _header(source, content_size)
    last = False
    while not last:
        field = int.from_bytes(source.peek(3), "little")
        last, kind, size = bool(field & 1), field >> 1 & 3, field >> 3
        if kind > _COMPRESSED or size > _BLOCK_MAX:
            raise IntegrityError("the archive holds a zstd block that is not valid")
        yield source.block(3 + (1 if kind == _RLE else size))
    yield source.take(4)


def _header(source: _Source, content_size: int) -> bytes:
    head = source.take(5)
    if int.from_bytes(head[:4], "little") != _MAGIC:
        raise IntegrityError("the archive is not a zstd frame")
    descriptor = head[4]
    single_segment = bool(descriptor & 0x20)
    if descriptor & 0x1B or not descriptor & 0x04:
        raise IntegrityError("the archive's zstd frame has no checksum, or needs a dictionary")
    window = b"" if single_segment else source.take(1)
    flag = descriptor >> 6
    size_field = source.take((1 if single_segment else 0, 2, 4, 8)[flag])
    if not size_field:
        raise IntegrityError("the archive's zstd frame does not say how much it holds")
    announced = int.from_bytes(size_field, "little") + (256 if flag == 1 else 0)
    if announced != content_size:
        raise IntegrityError(f"the archive's zstd frame holds {announced} bytes", why=f"its manifest's files need {content_size}")
    if (needed := _window_size(window[0]) if window else announced) > MAX_WINDOW:
        raise IntegrityError(
            f"the archive's zstd frame needs a window of {needed} bytes", why=f"at most {MAX_WINDOW} are allowed"
        )
    return head + window + size_field


def _window_size(descriptor: int) -> int:
    base = 1 << (10 + (descriptor >> 3))
    return base + (base >> 3) * (descriptor & 7)
