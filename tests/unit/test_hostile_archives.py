"""Archives that someone made to do harm, or that broke on the way: each is refused with one line, and nothing is written.

Every archive here is handed to `unpack` with facts that fit its own bytes (size and digest), as if whoever made the archive had
also made the manifest, except where the manifest itself is what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from faults.archives import (
    GOOD,
    GOOD_FRAME,
    STREAMS,
    Expected,
    Watched,
    crafted,
    expect,
    facts,
    frames,
    refuse_all,
    squeeze,
    stream,
)
from faults.watch import changes
from hypothesis import given, settings
from hypothesis import strategies as st

from kcache import archive, digest
from kcache.archive import frame, tar
from kcache.archive.hashing import Background
from kcache.documents import LIMITS
from kcache.errors import IntegrityError
from kcache.manifest import ArchiveFacts


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


def test_no_hostile_archive_writes_outside_the_stage_as_the_kernel_sees_it(tmp_path: Path) -> None:
    """All of them, watched with inotify; `ci/faults` prints how many."""
    tried, outside = refuse_all(tmp_path)
    assert tried >= 30
    assert outside == []


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
