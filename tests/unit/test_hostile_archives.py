"""Archives that someone made to do harm, or that broke on the way: each is refused with one line, and nothing is written.

Every archive here is handed to `unpack` with facts that fit its own bytes (size and digest), as if whoever made the archive had
also made the manifest, except where the manifest itself is what is wrong.
"""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard
from faults.watch import changes
from hypothesis import given, settings
from hypothesis import strategies as st

from kcache import archive, digest, fsops
from kcache.archive import frame, tar
from kcache.archive.hashing import Background
from kcache.documents import LIMITS
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


@pytest.fixture
def watched(tmp_path: Path) -> Watched:
    return Watched(tmp_path)


def refuse(watched: Watched, data: bytes, archive_facts: ArchiveFacts, expected: Expected, message: str = "") -> None:
    with pytest.raises(IntegrityError, match=message or None) as caught:
        watched.unpack(data, archive_facts, expected)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert watched.state() == watched.before


def test_the_good_archive_is_accepted(watched: Watched) -> None:
    """Else every refusal below would prove nothing."""
    data = squeeze(stream(GOOD))
    watched.unpack(data, facts(data, expect(GOOD)), expect(GOOD))
    assert (watched.target / "a/a.so").read_bytes() == GOOD["a/a.so"]
    assert (watched.target / "b/b.so").read_bytes() == GOOD["b/b.so"]


def test_members_may_come_in_any_order(watched: Watched) -> None:
    data = squeeze(stream(dict(reversed(GOOD.items()))))
    watched.unpack(data, facts(data, expect(GOOD)), expect(GOOD))


# members ------------------------------------------------------------------------------------------------------------------


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


def test_no_hostile_archive_writes_outside_the_stage_as_the_kernel_sees_it(watched: Watched) -> None:
    """All of them, watched with inotify: names that were made and taken away again count. The stage holds hidden names only."""
    archives = hostile()
    assert len(archives) >= 30
    with changes(watched.outside) as changed:
        for data in archives.values():
            with pytest.raises(IntegrityError):
                watched.unpack(data, facts(data, expect(GOOD)), expect(GOOD))
            watched.staged.clear()
    outside = [path for path in changed if not Path(path).name.startswith(fsops.TEMPORARY_PREFIX)]
    outside += [path for path in changed if watched.target not in Path(path).parents]
    assert changed and outside == []
    assert watched.state() == watched.before


def test_the_watch_sees_a_file_that_is_gone_again(tmp_path: Path) -> None:
    """Else the test above would prove nothing."""
    with changes(tmp_path) as changed:
        (tmp_path / "evil").touch()
        (tmp_path / "evil").unlink()
    assert f"{tmp_path}/evil" in changed


@pytest.mark.parametrize("name", STREAMS)
def test_a_hostile_member_is_refused(watched: Watched, name: str) -> None:
    """The frame says what it holds, truly: refused at the latest when that is not what the manifest's files need."""
    plain, _ = STREAMS[name]
    data = squeeze(plain)
    refuse(watched, data, facts(data, expect(GOOD)), expect(GOOD))


@pytest.mark.parametrize("name", [name for name, (_, message) in STREAMS.items() if not message.startswith("holds")])
def test_a_hostile_member_is_refused_where_it_stands(watched: Watched, name: str) -> None:
    """The frame's size is the right one (the stream is cut or filled up), so that the reader of members itself must refuse."""
    plain, message = STREAMS[name]
    total = tar.stream_size(size for size, _ in expect(GOOD).values())
    data = squeeze(plain[:total].ljust(total, b"\0"))
    refuse(watched, data, facts(data, expect(GOOD)), expect(GOOD), message)


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


@pytest.mark.parametrize("name", frames())
def test_a_hostile_frame_is_refused(watched: Watched, name: str) -> None:
    data, message = frames()[name]
    refuse(watched, data, facts(data, expect(GOOD)), expect(GOOD), message)


def test_a_bomb_is_left_before_it_unfolds(watched: Watched) -> None:
    """90 kB that hold 3.9 GB and say that they hold less: what comes out is counted piece by piece."""
    total = tar.stream_size(size for size, _ in expect(GOOD).values())
    data = crafted(total, [(1, 131072, b"\0")] * 30_000)
    pieces = 0
    with pytest.raises(IntegrityError):
        for piece in frame.decompress([data], facts(data, expect(GOOD)), total, Background()):
            assert len(piece) <= 131072
            pieces += 1
    assert pieces <= 1


def test_an_honest_bomb_is_refused_by_its_ratio_before_it_is_read(watched: Watched) -> None:
    files = {"a/a.so": bytes(300_000_000)}
    data = squeeze(stream(files))

    def never() -> Iterator[bytes]:
        pytest.fail("read")
        yield data

    with pytest.raises(IntegrityError, match="200 times its size"):
        archive.unpack(never(), facts(data, expect(files)), expect(files), watched.sink)


def test_truncation_at_every_byte_is_refused(watched: Watched) -> None:
    """With the manifest of the whole archive (a broken download), and with one that fits the part."""
    for length in range(len(GOOD_FRAME)):
        part = GOOD_FRAME[:length]
        refuse(watched, part, facts(GOOD_FRAME, expect(GOOD)), expect(GOOD), "ends after")
        refuse(watched, part, facts(part, expect(GOOD)), expect(GOOD), "ends after")


def test_truncation_of_the_tar_at_every_block_is_refused(watched: Watched) -> None:
    plain = stream(GOOD)
    for length in range(0, len(plain), 512):
        data = squeeze(plain[:length])
        refuse(watched, data, facts(data, expect(GOOD)), expect(GOOD), "holds")
        data = squeeze(plain[:length].ljust(len(plain), b"\0"))
        if length < len(plain) - 1024:
            refuse(watched, data, facts(data, expect(GOOD)), expect(GOOD))


def test_a_flipped_bit_in_every_byte_is_refused(watched: Watched) -> None:
    for position in range(len(GOOD_FRAME)):
        data = bytearray(GOOD_FRAME)
        data[position] ^= 1 << position % 8
        refuse(watched, bytes(data), facts(GOOD_FRAME, expect(GOOD)), expect(GOOD))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_whatever_is_done_to_the_bytes_only_the_right_files_come_out(data: st.DataObject) -> None:
    """Splices, repeats and changes, with facts that fit: refused, or by chance exactly the files of the manifest."""
    base = data.draw(st.sampled_from([GOOD_FRAME, squeeze(STREAMS["duplicate"][0]), frames()["second frame"][0]]))
    made = bytearray(base)
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(made)))
        end = data.draw(st.integers(start, len(made)))
        made[start:end] = data.draw(st.binary(max_size=20))
    found: dict[str, bytes] = {}

    def sink(path: str, size: int, chunks: Iterator[bytes]) -> None:
        found[path] = b"".join(chunks)

    try:
        archive.unpack([bytes(made)], facts(bytes(made), expect(GOOD)), expect(GOOD), sink)
    except IntegrityError:
        assert all(GOOD[path] == content for path, content in found.items())
    else:
        assert found == GOOD


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=3000))
def test_any_tar_stream_is_refused_or_right(noise: bytes) -> None:
    total = tar.stream_size(size for size, _ in expect(GOOD).values())
    data = squeeze(noise[:total].ljust(total, b"\0"))
    with pytest.raises(IntegrityError):
        archive.unpack([data], facts(data, expect(GOOD)), expect(GOOD), lambda path, size, chunks: None)


# the manifest -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../secret",
        "a/../../secret",
        "a/./b",
        "./a",
        "a//b",
        "a/",
        "",
        ".",
        "..",
        ".hidden",
        "-rf",
        "a b",
        "a\0b",
        "a\nb",
        "a\\b",
        "C:/x",
        "ä/x",
        "d/" * 8 + "deep",
        "n" * 401,
        "x/" + "n" * 256,
    ],
)
def test_an_unsafe_path_in_the_manifest_is_refused_before_anything_is_read(watched: Watched, path: str) -> None:
    def never() -> Iterator[bytes]:
        pytest.fail("read")
        yield b""

    expected = {**expect(GOOD), path: (1, digest.of_bytes(b"x"))}
    with pytest.raises(IntegrityError, match="unsafe path") as caught:
        archive.unpack(never(), facts(GOOD_FRAME, expected), expected, watched.sink)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({}, "1 to 100000 members"),
        ({f"f{n}": (0, digest.of_bytes(b"")) for n in range(LIMITS.members + 1)}, "1 to 100000 members"),
        (expect({"a": b"", "A": b""}), "letter case"),
        (expect({"a": b"", "a/b": b""}), "directory of another"),
        (expect({"A": b"", "a/b": b""}), "directory of another"),
        ({"a": (LIMITS.unpacked_bytes + 1, digest.of_bytes(b""))}, "are allowed"),
        ({"a": (LIMITS.unpacked_bytes, digest.of_bytes(b""))}, "times its size"),
        ({**expect(GOOD), "a/a.so": (955, expect(GOOD)["a/a.so"][1])}, "another size|holds"),
        ({**expect(GOOD), "a/a.so": (956, digest.of_bytes(b"other"))}, "member 'a/a.so' has digest"),
        (expect({**GOOD, "c": b"more"}), "holds"),
        (expect({"a/a.so": GOOD["a/a.so"]}), "holds"),
        (expect({"a/a.so": GOOD["a/a.so"], "c/c.so": GOOD["b/b.so"]}), "member 'b/b.so' is not in the manifest"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(watched: Watched, expected: Expected, message: str) -> None:
    refuse(watched, GOOD_FRAME, facts(GOOD_FRAME, expected), expected, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: replace(f, size=f.size - 1), "longer than"),
        (lambda f: replace(f, size=f.size + 1), "has .* bytes"),
        (lambda f: replace(f, size=0), "longer than"),
        (lambda f: replace(f, size=LIMITS.archive_bytes + 1), "are allowed"),
        (lambda f: replace(f, sha256=digest.of_bytes(b"")), "has digest"),
        (lambda f: replace(f, unpacked_size=1), "sum of its files"),
    ],
)
def test_other_facts_of_the_archive_are_refused(
    watched: Watched, change: Callable[[ArchiveFacts], ArchiveFacts], message: str
) -> None:
    refuse(watched, GOOD_FRAME, change(facts(GOOD_FRAME, expect(GOOD))), expect(GOOD), message)


def test_an_endless_archive_is_left_as_soon_as_it_is_too_long(watched: Watched) -> None:
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        yield GOOD_FRAME
        while True:
            taken += 1
            yield b"\0" * 1000

    with pytest.raises(IntegrityError, match="longer than"):
        archive.unpack(endless(), facts(GOOD_FRAME, expect(GOOD)), expect(GOOD), lambda path, size, chunks: None)
    assert taken == 1


def test_empty_chunks_are_nothing(watched: Watched) -> None:
    chunks = [b"", *(GOOD_FRAME[n : n + 1] for n in range(len(GOOD_FRAME))), b"", b""]
    archive.unpack(chunks, facts(GOOD_FRAME, expect(GOOD)), expect(GOOD), lambda path, size, pieces: None)
