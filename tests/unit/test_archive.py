"""Archives: the same bytes from the same files, exactly the named files out of them, in bounded memory."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from kcache import archive, digest
from kcache.archive import tar
from kcache.documents import Limits
from kcache.errors import CollectError, IntegrityError, UnavailableError
from kcache.manifest import ArchiveFacts, parse_manifest

FILES = {
    "topk/topk.so": os.urandom(20_000) * 100,
    "sampling/sampling.so": b"\x7fELF" + bytes(300_000),
    "empty": b"",
    "block": b"x" * 512,
    "a/b/c/d": b"deep",
    "long/" + "d" * 90 + "/" + "n" * 100: b"needs the prefix field",
}
GOLDEN = Path(__file__).parent.parent / "golden" / "entry-1"


def lay(directory: Path, files: dict[str, bytes]) -> dict[str, Path]:
    paths = {}
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
        paths[path] = directory / path
    return paths


def expect(files: dict[str, bytes]) -> dict[str, tuple[int, str]]:
    return {path: (len(data), digest.of_bytes(data)) for path, data in files.items()}


def pieces(path: Path, size: int = 65536) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(size):
            yield chunk


def unpacked(path: Path, facts: ArchiveFacts, files: dict[str, bytes], size: int = 65536) -> dict[str, bytes]:
    found: dict[str, bytes] = {}

    def sink(name: str, count: int, chunks: Iterator[bytes]) -> None:
        found[name] = b"".join(chunks)
        assert len(found[name]) == count

    archive.unpack(pieces(path, size), facts, expect(files), sink)
    return found


def test_what_goes_in_comes_out(tmp_path: Path) -> None:
    facts = archive.pack(lay(tmp_path / "in", FILES), tmp_path / "a.tar.zst")
    assert digest.of_file(str(tmp_path / "a.tar.zst")) == (facts.sha256, facts.size)
    assert facts.unpacked_size == sum(map(len, FILES.values()))
    assert unpacked(tmp_path / "a.tar.zst", facts, FILES) == FILES


@pytest.mark.parametrize("size", [1, 3, 511, 8192, 1 << 24])
def test_the_cut_of_the_chunks_does_not_matter(tmp_path: Path, size: int) -> None:
    files = {"a/a": os.urandom(5000), "b": b"x" * 9000}
    facts = archive.pack(lay(tmp_path / "in", files), tmp_path / "a")
    assert unpacked(tmp_path / "a", facts, files, size) == files


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z0-9_]{1,8}(/[a-z]{1,4}\.so)?", fullmatch=True), st.binary(max_size=2000), min_size=1))
def test_any_files_survive(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    tops = {path.split("/")[0] for path in files if "/" in path}
    files = {path: data for path, data in files.items() if "/" in path or path not in tops}
    directory = tmp_path_factory.mktemp("any")
    facts = archive.pack(lay(directory / "in", files), directory / "a")
    assert unpacked(directory / "a", facts, files) == files


def test_time_order_mode_and_owner_do_not_matter(tmp_path: Path) -> None:
    first = archive.pack(lay(tmp_path / "one", FILES), tmp_path / "a")
    paths = lay(tmp_path / "two", dict(reversed(FILES.items())))
    for path in paths.values():
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert archive.pack(dict(reversed(paths.items())), tmp_path / "b") == first
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


PACKER = """
import sys
from pathlib import Path
from kcache import archive
root = Path(sys.argv[1])
files = {str(path.relative_to(root)): path for path in root.rglob("*") if path.is_file()}
print(archive.pack(files, Path(sys.argv[2])).sha256)
"""


def interpreters() -> list[str]:
    """Pythons of other versions, with zstandard, from KCACHE_TEST_PYTHONS (paths joined by `:`)."""
    return [path for path in os.environ.get("KCACHE_TEST_PYTHONS", "").split(":") if path]


def test_every_python_packs_the_same_bytes(tmp_path: Path) -> None:
    """With one version of zstandard; KCACHE_TEST_PYTHONS names more interpreters than the one that runs the tests."""
    lay(tmp_path / "in", {**FILES, "text": b"".join(b"line %d\n" % n for n in range(200_000))})
    root = Path(archive.__file__).parent.parent.parent
    found = set()
    for number, python in enumerate([sys.executable, *interpreters()]):
        target = tmp_path / f"{number}.tar.zst"
        command = [python, "-c", PACKER, str(tmp_path / "in"), str(target)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True, check=True)
        found.add((done.stdout.strip(), digest.of_file(str(target))))
    assert len(found) == 1


def test_the_threads_of_the_packer_are_part_of_the_format(tmp_path: Path) -> None:
    """libzstd writes other bytes with jobs than without; and then the same for any number of them."""
    data = b"".join(b"%d %d\n" % (n, n * n % 977) for n in range(600_000))
    archive.pack(lay(tmp_path / "in", {"x": data}), tmp_path / "a")
    plain = tar.header("x", len(data)) + data + bytes(tar.padding(len(data))) + tar.END

    def packed(threads: int) -> bytes:
        encoder = zstandard.ZstdCompressor(level=9, write_checksum=True, threads=threads).compressobj(size=len(plain))
        return encoder.compress(plain) + encoder.flush()

    assert (tmp_path / "a").read_bytes() == packed(0) != packed(2)


@pytest.mark.parametrize("size", [0, 4, 6, 5000])
def test_a_file_that_changes_while_it_is_packed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(archive, "_size", lambda path: size)
    with pytest.raises(CollectError, match="its size changed"):
        archive.pack(lay(tmp_path / "in", {"x": b"12345"}), tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_tar_and_tarfile_read_it(tmp_path: Path) -> None:
    archive.pack(lay(tmp_path / "in", FILES), tmp_path / "a.tar.zst")
    plain = zstandard.ZstdDecompressor().decompress((tmp_path / "a.tar.zst").read_bytes())
    with tarfile.open(fileobj=io.BytesIO(plain)) as opened:
        members = {member.name: member for member in opened}
        assert list(members) == sorted(FILES)
        for name, member in members.items():
            stream = opened.extractfile(member)
            assert stream is not None and stream.read() == FILES[name]
            assert (member.mode, member.mtime, member.uid, member.gid, member.type) == (0o644, 0, 0, 0, tarfile.REGTYPE)
    if shutil.which("tar") is None:
        pytest.skip("no tar here")
    (tmp_path / "out").mkdir()
    done = subprocess.run(["tar", "-x", "-C", str(tmp_path / "out")], input=plain, capture_output=True, check=True)
    assert done.stderr == b""
    assert {str(p.relative_to(tmp_path / "out")): p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()} == FILES


@pytest.mark.parametrize("length", [1, 99, 100, 101, 155, 200, 255])
def test_headers_are_those_of_tarfile(length: int) -> None:
    path = ("d" * 50 + "/") * 4 + "n" * 100
    path = path[-length:].lstrip("/")
    info = tarfile.TarInfo(path)
    info.size = 12345
    theirs = tarfile.TarInfo.frombuf(tar.header(path, 12345), "utf-8", "strict")
    assert (theirs.name, theirs.size, theirs.mode, theirs.type) == (path, 12345, 0o644, tarfile.REGTYPE)


LONG = ["n" * 101, "d" * 156 + "/n", "d/" + "n" * 101, f"{'m' * 190}/{'m' * 190}.so"]


@pytest.mark.parametrize("path", LONG)
def test_a_path_that_fits_into_no_header_has_a_name_made_of_its_digest(tmp_path: Path, path: str) -> None:
    files = {path: b"long", "short": b"short"}
    made = archive.pack(lay(tmp_path / "in", files), tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    found: dict[str, bytes] = {}
    expected = {path: (len(content), digest.of_bytes(content)) for path, content in files.items()}
    archive.unpack([data], made, expected, lambda path, size, chunks: found.update({path: b"".join(chunks)}))
    assert found == files
    with tarfile.open(fileobj=io.BytesIO(zstandard.ZstdDecompressor().decompress(data))) as opened:
        assert opened.getnames() == [f"long-path/{digest.of_bytes(path.encode()).removeprefix('sha256:')}", "short"]


def test_a_path_that_is_the_name_of_another_is_refused(tmp_path: Path) -> None:
    taken = f"long-path/{digest.of_bytes(LONG[0].encode()).removeprefix('sha256:')}"
    with pytest.raises(IntegrityError, match="two members have one name"):
        archive.pack(lay(tmp_path / "in", {LONG[0]: b"1", taken: b"2"}), tmp_path / "a")


def test_what_cannot_be_packed_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.write_bytes(b"x")
    (tmp_path / "link").symlink_to("good")
    (tmp_path / "d").mkdir()
    for path in (tmp_path / "link", tmp_path / "d", tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(CollectError, match="cannot pack"):
            archive.pack({"a": good, "b": path}, tmp_path / "out")
    with pytest.raises(IntegrityError, match="unsafe path"):
        archive.pack({"../a": good}, tmp_path / "out")
    with pytest.raises(IntegrityError, match="letter case"):
        archive.pack({"a": good, "A": good}, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "good", "link"]


def test_a_file_of_zeros_is_no_bomb(tmp_path: Path) -> None:
    files = {"zeros": bytes(500_000)}
    facts = archive.pack(lay(tmp_path / "in", files), tmp_path / "a")
    assert unpacked(tmp_path / "a", facts, files) == files
    with pytest.raises(IntegrityError, match="200 times its size"):
        archive.pack(lay(tmp_path / "in", {"zeros": bytes(50_000_000)}), tmp_path / "b")


def test_what_a_sink_leaves_is_verified_all_the_same(tmp_path: Path) -> None:
    facts = archive.pack(lay(tmp_path / "in", FILES), tmp_path / "a")
    archive.unpack(pieces(tmp_path / "a"), facts, expect(FILES), lambda path, size, chunks: None)
    wrong = expect(FILES) | {"block": (512, digest.of_bytes(b""))}
    with pytest.raises(IntegrityError, match="member 'block' has digest"):
        archive.unpack(pieces(tmp_path / "a"), facts, wrong, lambda path, size, chunks: None)


def test_an_error_of_the_store_passes_through(tmp_path: Path) -> None:
    facts = archive.pack(lay(tmp_path / "in", FILES), tmp_path / "a")

    def failing() -> Iterator[bytes]:
        yield from list(pieces(tmp_path / "a"))[:3]
        raise UnavailableError("connection reset")

    with pytest.raises(UnavailableError):
        archive.unpack(failing(), facts, expect(FILES), lambda path, size, chunks: None)


def test_limits_are_held(tmp_path: Path) -> None:
    facts = archive.pack(lay(tmp_path / "in", FILES), tmp_path / "a")
    for limits in (Limits(members=5), Limits(unpacked_bytes=1000), Limits(archive_bytes=1000)):
        with pytest.raises(IntegrityError, match=r"allowed|members"):
            archive.unpack(iter(()), facts, expect(FILES), lambda path, size, chunks: None, limits=limits)


MEMORY = """
import json, resource, sys
from pathlib import Path
import zstandard
from kcache import archive
from kcache.manifest import ArchiveFacts
facts, expected = json.loads(sys.argv[2])
def chunks():
    with open(sys.argv[1], "rb") as stream:
        while chunk := stream.read(1 << 20):
            yield chunk
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
archive.unpack(chunks(), ArchiveFacts(**facts), expected, lambda path, size, pieces: [None for _ in pieces] and None)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_stays_bounded(tmp_path: Path) -> None:
    """200 MB unpack within 32 MiB."""
    block = os.urandom(1 << 20)
    source = tmp_path / "big"
    with source.open("wb") as stream:
        for number in range(200):
            stream.write(block[: number * 5000] + os.urandom((1 << 20) - number * 5000))
    facts = archive.pack({"big": source}, tmp_path / "a")
    argument = json.dumps([facts.to_json(), {"big": [source.stat().st_size, digest.of_file(str(source))[0]]}])
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "a"), argument]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < 32 << 10, f"{grown} KiB"


def test_the_golden_archive_of_format_1_is_read_for_ever() -> None:
    """Made once and committed: a reader that no longer accepts it breaks every store in the world."""
    manifest = parse_manifest(GOLDEN.with_suffix(".json").read_bytes())
    found: dict[str, bytes] = {}

    def sink(path: str, size: int, chunks: Iterator[bytes]) -> None:
        found[path] = b"".join(chunks)

    archive.unpack_entry(pieces(GOLDEN.with_suffix(".tar.zst")), manifest, sink)
    assert {path: digest.of_bytes(data) for path, data in found.items()} == {a.path: a.sha256 for a in manifest.artifacts}
