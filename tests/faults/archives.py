"""Archives that someone made to do harm, or that broke on the way, and a directory that is watched while they are unpacked.

Every archive here is handed to `unpack` with facts that fit its own bytes (size and digest), as if whoever made the archive had
also made the manifest.
"""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import zstandard

from faults.watch import changes
from kcache import archive, digest, fsops
from kcache.archive import tar
from kcache.errors import IntegrityError
from kcache.manifest import ArchiveFacts

GOOD = {"a/a.so": b"A" * 700 + bytes(range(256)), "b/b.so": b"B" * 1024}
Expected = Mapping[str, tuple[int, str]]


def expect(files: Mapping[str, bytes]) -> dict[str, tuple[int, str]]:
    return {path: (len(data), digest.of_bytes(data)) for path, data in files.items()}


def block(path: str, data: bytes) -> bytes:
    return tar.header(path, len(data)) + data + bytes(tar.padding(len(data)))


def stream(files: Mapping[str, bytes]) -> bytes:
    return b"".join(block(path, data) for path, data in files.items()) + tar.END


def squeeze(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(data)


def facts(data: bytes, expected: Expected) -> ArchiveFacts:
    return ArchiveFacts(sha256=digest.of_bytes(data), size=len(data), unpacked_size=sum(size for size, _ in expected.values()))


class Watched:
    """A directory with something in it, inside another one, and a sink that installs as kcache does."""

    def __init__(self, directory: Path) -> None:
        self.outside = directory
        self.target = directory / "entry"
        for name in ("a", "b"):
            (self.target / name).mkdir(parents=True)
        (self.target / "a" / "a.so").write_bytes(b"before")
        (directory / "secret").write_bytes(b"secret")
        self.staged: list[fsops.Staged] = []
        self.before = self.state()

    def state(self) -> dict[str, tuple[int, bytes | None]]:
        found = {}
        for path in sorted(self.outside.rglob("*")):
            result = path.lstat()
            found[str(path)] = (result.st_mode, path.read_bytes() if path.is_file() else None)
        return found

    def sink(self, path: str, size: int, chunks: Iterator[bytes]) -> None:
        target = self.target / path
        self.staged.append(fsops.stage(target.parent, target.name, chunks, expected_size=size, expected_sha256=None))

    def unpack(self, data: bytes, archive_facts: ArchiveFacts, expected: Expected, size: int = 4096) -> None:
        chunks = (data[start : start + size] for start in range(0, len(data), size))
        try:
            archive.unpack(chunks, archive_facts, expected, self.sink)
        except BaseException:
            for staged in self.staged:
                staged.discard()
            raise
        for staged in self.staged:
            staged.commit()


def python_tar(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.USTAR_FORMAT) -> bytes:
    """An archive by Python's tarfile, without the record padding that it adds after the end mark."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as opened:
        for info, data in members:
            opened.addfile(info, io.BytesIO(data))
        end = opened.offset
    return buffer.getvalue()[:end] + tar.END


def info(name: str, size: int = 0, **attributes: object) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size = size
    for key, value in attributes.items():
        setattr(made, key, value)
    return made


def special(kind: bytes, path: str = "a/a.so", target: str = "") -> bytes:
    rest = block("b/b.so", GOOD["b/b.so"])
    return python_tar((info(path, type=kind, linkname=target), b""))[: -len(tar.END)] + rest


def patched(offset: int, value: bytes, *, fix: bool = True) -> bytes:
    """The good stream with some bytes of its first header changed, its checksum set right again."""
    data = bytearray(stream(GOOD))
    data[offset : offset + len(value)] = value
    if fix:
        total = sum(data[:148]) + sum(b" " * 8) + sum(data[156:512])
        data[148:156] = b"%06o\0 " % total
    return bytes(data)


PAX_LONG = "p" * 150 + "/" + "q" * 150

STREAMS: dict[str, tuple[bytes, str]] = {
    "absolute path": (block("/etc/passwd", b"x") + stream(GOOD), "not in the manifest"),
    "climbing path": (block("../../secret", b"x") + stream(GOOD), "not in the manifest"),
    "climbing path inside": (block("a/../../secret", b"x") + stream(GOOD), "not in the manifest"),
    "path with a dot": (block("./a/a.so", GOOD["a/a.so"]) + block("b/b.so", GOOD["b/b.so"]), "not in the manifest"),
    "symbolic link": (special(tarfile.SYMTYPE, target="/etc/passwd"), "member 'a/a.so'.*symbolic link"),
    "symbolic link that climbs": (special(tarfile.SYMTYPE, target="../../secret"), "symbolic link"),
    "symbolic link as a directory": (special(tarfile.SYMTYPE, "a", "/"), "member 'a' is not in the manifest"),
    "hard link": (special(tarfile.LNKTYPE, target="b/b.so"), "member 'a/a.so'.*hard link"),
    "hard link outside": (special(tarfile.LNKTYPE, target="../secret"), "hard link"),
    "character device": (special(tarfile.CHRTYPE), "character device"),
    "block device": (special(tarfile.BLKTYPE), "block device"),
    "named pipe": (special(tarfile.FIFOTYPE), "named pipe"),
    "contiguous file": (special(tarfile.CONTTYPE), "contiguous"),
    "old regular file": (patched(156, b"\0"), "refused"),
    "unknown type": (patched(156, b"Z"), "of type"),
    "directory": (special(tarfile.DIRTYPE), "member 'a/a.so/?'"),
    "directory beside": (python_tar((info("a", type=tarfile.DIRTYPE), b""))[:-1024] + stream(GOOD), "member 'a/?' is not"),
    "PAX path": (
        python_tar((info(PAX_LONG, 1), b"x"), form=tarfile.PAX_FORMAT)[:-1024] + stream(GOOD),
        "not in the manifest",
    ),
    "PAX header that renames a good member": (
        block("PaxHeader", b"20 path=../../secret\n").replace(b"\x000\x00\x00", b"\x00x\x00\x00", 1) + stream(GOOD),
        "not in the manifest",
    ),
    "PAX header under a good name": (patched(156, b"x"), "PAX header"),
    "global PAX header": (patched(156, b"g"), "global PAX header"),
    "GNU long name": (python_tar((info("n" * 300, 1), b"x"), form=tarfile.GNU_FORMAT)[:-1024] + stream(GOOD), "not in the"),
    "GNU long name under a good name": (patched(156, b"L"), "GNU long name"),
    "GNU long link under a good name": (patched(156, b"K"), "GNU long link"),
    "sparse file": (patched(156, b"S"), "sparse"),
    "GNU magic": (patched(257, b"ustar  \0"), "refused"),
    "no magic": (patched(257, bytes(8)), "not a tar header"),
    "duplicate": (block("a/a.so", GOOD["a/a.so"]) + stream(GOOD), "member 'a/a.so' is in the archive twice"),
    "other letter case": (block("A/A.so", b"x") + stream(GOOD), "member 'A/A.so' is not"),
    "NUL in the name": (patched(0, b"a/a.so\0/../../x"), "member 'a/a.so' is refused"),
    "rubbish after the name": (patched(50, b"x"), "refused"),
    "line break in the name": (block("a\nb", b"x") + stream(GOOD), r"'a\\nb'"),
    "no UTF-8 in the name": (patched(0, b"\xff\xfe/a.so"), "not in the manifest"),
    "empty name": (block("", b"x") + stream(GOOD), "member '' is not"),
    "prefix field": (patched(345, b".."), "member '../a/a.so' is not"),
    "unknown member": (block("c/c.so", b"x") + stream(GOOD), "member 'c/c.so' is not"),
    "unknown member at the end": (stream(GOOD)[:-1024] + block("c/c.so", b"x") + tar.END, "goes on after the members"),
    "missing member": (block("a/a.so", GOOD["a/a.so"]) + tar.END, "without member 'b/b.so'"),
    "no member": (tar.END, "without member 'a/a.so'"),
    "setuid": (patched(100, b"0004755\0"), "not one that kcache writes"),
    "owner": (patched(108, b"0001750\0"), "not one that kcache writes"),
    "time": (patched(136, b"14000000000\0"), "not one that kcache writes"),
    "owner's name": (patched(265, b"root"), "not one that kcache writes"),
    "wrong checksum": (patched(148, b"000000\0 ", fix=False), "checksum"),
    "flipped bit in the header": (patched(107, b"\1", fix=False), "checksum"),
    "smaller size": (patched(124, b"%011o\0" % 12), "another size"),
    "larger size": (patched(124, b"%011o\0" % 100_000), "another size"),
    "huge size": (patched(124, b"77777777777\0"), "another size"),
    "negative size": (patched(124, b"-0000001674\0"), "another size"),
    "base-256 size": (patched(124, b"\x80" + (956).to_bytes(11, "big")), "another size"),
    "negative base-256 size": (patched(124, b"\xff" * 12), "another size"),
    "size in spaces": (patched(124, b"       1674\0"), "another size"),
    "padding that says something": (stream(GOOD).replace(bytes(range(256)) + b"\0", bytes(range(256)) + b"!", 1), "padding"),
    "end mark that says something": (stream(GOOD)[:-1] + b"x", "goes on"),
    "one end block": (stream(GOOD)[:-512], "holds"),
    "third end block": (stream(GOOD) + bytes(512), "holds"),
    "second archive": (stream(GOOD) + stream(GOOD), "holds"),
    "other content": (stream({**GOOD, "a/a.so": b"x" * len(GOOD["a/a.so"])}), "member 'a/a.so' has digest"),
    "last member other content": (stream({**GOOD, "b/b.so": b"x" * 1024}), "member 'b/b.so' has digest"),
    "no tar at all": (b"\x7fELF" * 1000, ""),
    "nothing": (b"", "holds 0 bytes"),
}


def hostile() -> dict[str, bytes]:
    """Every hostile archive of this file, each by its name: the members that frames hold truly or fill up, and the frames."""
    total = tar.stream_size(size for size, _ in expect(GOOD).values())
    members = {name: squeeze(plain) for name, (plain, _) in STREAMS.items()}
    cut = {name: plain for name, (plain, message) in STREAMS.items() if not message.startswith("holds")}
    filled = {f"{name}, filled up": squeeze(plain[:total].ljust(total, b"\0")) for name, plain in cut.items()}
    return members | filled | {f"frame: {name}": data for name, (data, _) in frames().items()}


def refuse_all(directory: Path) -> tuple[int, list[str]]:
    """Unpacks every hostile archive in an empty directory: how many were refused, and what was written that is no hidden file of
    the stage, as the kernel saw it (inotify): names that were made and taken away again count.

    Raises:
        AssertionError: one was taken, or left something behind.
    """
    watched, archives = Watched(directory), hostile()
    with changes(watched.outside) as changed:
        for name, data in archives.items():
            try:
                watched.unpack(data, facts(data, expect(GOOD)), expect(GOOD))
            except IntegrityError:
                watched.staged.clear()
                continue
            raise AssertionError(f"{name} was taken")
    assert changed, "the watch saw nothing at all"
    assert watched.state() == watched.before
    outside = [path for path in changed if not Path(path).name.startswith(fsops.TEMPORARY_PREFIX)]
    return len(archives), outside + [path for path in changed if watched.target not in Path(path).parents]


# the frame ----------------------------------------------------------------------------------------------------------------

GOOD_FRAME = squeeze(stream(GOOD))
SKIPPABLE = struct.pack("<II", 0x184D2A50, 4) + b"skip"


def frames() -> dict[str, tuple[bytes, str]]:
    plain = stream(GOOD)
    unsized = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False).compress(plain)
    wide = zstandard.ZstdCompressionParameters.from_level(
        3, window_log=27, write_checksum=True, write_content_size=True, source_size=len(plain)
    )
    window = bytearray(zstandard.ZstdCompressor(compression_params=wide).compress(plain))
    if window[4] & 0x20:  # libzstd prefers a single segment here: give the frame a window of 2 GiB by hand
        flag = window[4] & ~0x20
        size = int.from_bytes(window[5:7], "little") if window[4] >> 6 == 1 else 0
        window[4:7] = bytes([flag, 21 << 3]) + size.to_bytes(2, "little")
    dictionary = GOOD_FRAME[:4] + bytes([GOOD_FRAME[4] | 1]) + GOOD_FRAME[5:6] + b"\x07" + GOOD_FRAME[6:]
    checksum = bytearray(GOOD_FRAME)
    checksum[-1] ^= 1
    return {
        "trailing byte": (GOOD_FRAME + b"\0", "goes on after its zstd frame"),
        "trailing text": (GOOD_FRAME + b"#!/bin/sh\n", "goes on after its zstd frame"),
        "second frame": (GOOD_FRAME * 2, "goes on after its zstd frame"),
        "empty second frame": (GOOD_FRAME + squeeze(b""), "goes on after its zstd frame"),
        "skippable frame behind": (GOOD_FRAME + SKIPPABLE, "goes on after its zstd frame"),
        "skippable frame before": (SKIPPABLE + GOOD_FRAME, "not a zstd frame"),
        "no checksum": (zstandard.ZstdCompressor().compress(plain), "no checksum"),
        "wrong checksum": (bytes(checksum), "cannot be decompressed"),
        "no content size": (unsized, "does not say how much it holds"),
        "huge window": (bytes(window), "window"),
        "dictionary": (dictionary, "needs a dictionary"),
        "other size": (squeeze(plain + b"\0"), "holds"),
        "gzip": (b"\x1f\x8b\x08" + bytes(100), "not a zstd frame"),
        "plain tar": (plain, "not a zstd frame"),
        "nothing": (b"", "ends after 0 bytes"),
        "magic only": (GOOD_FRAME[:4], "ends after 4 bytes"),
        "reserved bit": (GOOD_FRAME[:4] + bytes([GOOD_FRAME[4] | 8]) + GOOD_FRAME[5:], "no checksum, or"),
        "reserved block": (crafted(len(plain), [(3, 5, b"hello")]), "not valid"),
        "block too large": (crafted(len(plain), [(0, 200_000, bytes(200_000))]), "not valid"),
        "too little comes out": (crafted(len(plain), [(0, 512, plain[:512])]), ""),
        "too much comes out": (crafted(len(plain), [(1, 131072, b"\0")] * 3), ""),
        "bomb": (crafted(len(plain), [(1, 131072, b"\0")] * 30_000), ""),
    }


def crafted(content_size: int, blocks: list[tuple[int, int, bytes]]) -> bytes:
    """A frame by hand: (type, size, body) of each block; no valid checksum."""
    head = struct.pack("<IBB", 0xFD2FB528, 0x84, (17 - 10) << 3) + struct.pack("<I", content_size)
    body = b""
    parts = []
    for number, (kind, size, data) in enumerate(blocks):
        last = number == len(blocks) - 1
        parts.append((size << 3 | kind << 1 | last).to_bytes(3, "little") + data)
    return head + body.join(parts) + bytes(4)
