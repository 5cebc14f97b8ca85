"""File operations: whole or not at all, exact modes, no links, bounded locks. Real file systems, real processes, real uids."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kcache import digest, fsops
from kcache.errors import InstallError, IntegrityError, KcacheError, LockTimeoutError, NoSpaceError, TrustError

DATA = b"native code " * 1000
SHA256 = digest.of_bytes(DATA)
NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def chunks(data: bytes = DATA, size: int = 1000) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write(
    directory: Path, data: bytes = DATA, *, name: str = "lib.so", size: int = len(DATA), sha256: str = SHA256
) -> fsops.Written:
    return fsops.write_stream(directory, name, chunks(data), expected_size=size, expected_sha256=sha256)


@contextmanager
def umask(value: int) -> Iterator[None]:
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def as_user(uid: int, action: Callable[[], object]) -> str:
    """Runs `action` in a forked child with another uid; returns the class and text of what it raised, or an empty text."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - whatever it was, the parent must hear it
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        return stream.read()


@contextmanager
def mounted(where: Path, kind: str, options: str) -> Iterator[Path]:
    where.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", "-t", kind, "-o", options, "none", str(where)], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"no mounts here: {done.stderr.decode().strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


# write_stream -------------------------------------------------------------------------------------------------------------


def test_a_written_file_has_its_bytes_its_mode_and_a_true_record(tmp_path: Path) -> None:
    with umask(0o077):
        written = write(tmp_path)
    assert written.path.read_bytes() == DATA
    assert (written.size, written.sha256) == (len(DATA), SHA256)
    assert stat.S_IMODE(written.path.stat().st_mode) == 0o644
    assert written.identity == fsops.Identity.of(written.path)
    assert names(tmp_path) == ["lib.so"]


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755, 0o444])
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
def test_the_mode_is_exact_whatever_the_umask(tmp_path: Path, mode: int, mask: int) -> None:
    with umask(mask):
        fsops.write_bytes(tmp_path / "file", b"x", mode)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


@pytest.mark.parametrize(
    ("data", "size", "sha256"),
    [
        pytest.param(DATA[:-1], len(DATA), SHA256, id="too short"),
        pytest.param(DATA + b"x", len(DATA), SHA256, id="too long"),
        pytest.param(b"y" + DATA[1:], len(DATA), SHA256, id="other bytes"),
        pytest.param(b"", len(DATA), SHA256, id="empty"),
        pytest.param(DATA, len(DATA), digest.of_bytes(b""), id="other digest expected"),
    ],
)
def test_wrong_bytes_leave_nothing_behind_and_what_was_there_untouched(
    tmp_path: Path, data: bytes, size: int, sha256: str
) -> None:
    (tmp_path / "lib.so").write_bytes(b"before")
    before = fsops.Identity.of(tmp_path / "lib.so")
    with pytest.raises(IntegrityError):
        write(tmp_path, data, size=size, sha256=sha256)
    assert names(tmp_path) == ["lib.so"]
    assert fsops.Identity.of(tmp_path / "lib.so") == before


@pytest.mark.parametrize("size", [len(DATA) - 1, len(DATA) + 1])
def test_a_wrong_size_is_refused_where_no_digest_is_known(tmp_path: Path, size: int) -> None:
    with pytest.raises(IntegrityError):
        fsops.write_stream(tmp_path, "f", chunks(), expected_size=size, expected_sha256=None)
    assert names(tmp_path) == []


def test_a_target_that_cannot_be_replaced_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    def never() -> Iterator[bytes]:
        pytest.fail("read")
        yield b""

    (tmp_path / "link").symlink_to("goal")
    (tmp_path / "d").mkdir()
    for name in ("link", "d"):
        with pytest.raises(TrustError, match="not a regular file"):
            fsops.stage(tmp_path, name, never(), expected_size=None, expected_sha256=None)


def test_an_endless_stream_is_left_as_soon_as_it_is_too_long(tmp_path: Path) -> None:
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while True:
            taken += 1
            yield b"x" * 1000

    with pytest.raises(IntegrityError, match="larger than the 10000 bytes"):
        fsops.write_stream(tmp_path, "f", endless(), expected_size=10_000, expected_sha256=SHA256)
    assert taken == 11
    assert names(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "source"), ValueError("source"), KeyboardInterrupt()])
def test_an_error_of_the_source_passes_through_and_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def failing() -> Iterator[bytes]:
        yield b"x"
        raise error

    with pytest.raises(type(error)) as caught:
        fsops.write_stream(tmp_path, "f", failing(), expected_size=9, expected_sha256=SHA256)
    assert caught.value is error
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "a\0b"])
def test_a_name_is_one_segment(tmp_path: Path, name: str) -> None:
    with pytest.raises(InstallError, match="not a file name"):
        fsops.write_stream(tmp_path, name, [b""], expected_size=0, expected_sha256=None)


def test_a_symbolic_link_at_the_target_is_refused_and_its_goal_untouched(tmp_path: Path) -> None:
    goal = tmp_path / "goal"
    goal.write_bytes(b"goal")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "lib.so").symlink_to(goal)
    with pytest.raises(TrustError, match="symbolic link"):
        write(tmp_path / "d")
    assert goal.read_bytes() == b"goal"
    assert names(tmp_path / "d") == ["lib.so"]


def test_a_symbolic_link_as_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(TrustError, match="symbolic link"):
        write(tmp_path / "link")
    assert names(tmp_path / "real") == []


def test_a_missing_directory_is_an_install_error(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="No such file"):
        write(tmp_path / "none")


@pytest.mark.root
@needs_root
def test_a_full_file_system_leaves_no_part_and_the_old_file(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", "tmpfs", "size=1m") as where:
        (where / "big").write_bytes(b"before")
        data = os.urandom(3 << 20)
        with pytest.raises(NoSpaceError, match="No space left"):
            write(where, data, name="big", size=len(data), sha256=digest.of_bytes(data))
        assert names(where) == ["big"]
        assert (where / "big").read_bytes() == b"before"
        with pytest.raises(NoSpaceError, match="are needed"):
            fsops.require_space(where / "not" / "yet", len(data))
        fsops.require_space(where, 1000)


@pytest.mark.root
@needs_root
def test_a_read_only_file_system_is_an_install_error(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", "tmpfs", "ro") as where:
        for action in (lambda: write(where), lambda: fsops.ensure_directory(where / "a" / "b")):
            with pytest.raises(InstallError, match="Read-only"):
                action()
        with pytest.raises(InstallError, match=r"cannot lock .*lock: Read-only"), fsops.locked(where / "lock", 0):
            pass


@pytest.mark.root
@needs_root
def test_a_directory_in_a_lower_overlay_layer_is_written_into(tmp_path: Path) -> None:
    """Case B11: renaming such a directory gives EXDEV; renaming files inside it does not."""
    with mounted(tmp_path / "t", "tmpfs", "size=8m") as base:
        for part in ("lower/entry", "upper", "work", "merged"):
            (base / part).mkdir(parents=True)
        (base / "lower/entry/lib.so").write_bytes(b"before")
        options = f"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work"
        with mounted(base / "merged", "overlay", options) as merged:
            with pytest.raises(OSError, match="cross-device"):
                (merged / "entry").rename(merged / "other")
            written = write(merged / "entry")
            assert written.path.read_bytes() == DATA
            assert written.identity == fsops.Identity.of(written.path)


@pytest.mark.root
@needs_root
def test_another_users_directory_is_an_install_error_with_a_remedy(tmp_path: Path) -> None:
    with TemporaryDirectory() as made:  # pytest's own directories are closed to other users
        directory = Path(made)
        directory.chmod(0o755)
        said = as_user(NOBODY, lambda: write(directory))
    assert said.startswith("InstallError: cannot write") and "Set KCACHE_DIR" in said


KILLED = """
import os, sys
from kcache import fsops
data = bytes(range(256)) * 4096
def chunks():
    for start in range(0, len(data), 65536):
        yield data[start : start + 65536]
print("go", flush=True)
while True:
    fsops.write_stream(sys.argv[1], "f", chunks(), expected_size=len(data), expected_sha256=None)
"""


def test_a_writer_killed_at_any_moment_leaves_the_old_or_the_new_bytes(tmp_path: Path) -> None:
    whole = bytes(range(256)) * 4096
    (tmp_path / "f").write_bytes(b"before")
    for number in range(25):
        with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline() == b"go\n"
            time.sleep(0.0007 * number)
            process.send_signal(signal.SIGKILL)
        assert (tmp_path / "f").read_bytes() in (b"before", whole)
    for leftover in tmp_path.glob(f"{fsops.TEMPORARY_PREFIX}*"):
        os.utime(leftover, (1, 1))
    fsops.sweep(tmp_path)
    assert names(tmp_path) == ["f"]


def test_sweep_leaves_fresh_files_and_everything_else_alone(tmp_path: Path) -> None:
    for name in ("fresh", "old"):
        (tmp_path / f"{fsops.TEMPORARY_PREFIX}{name}").write_bytes(b"")
    (tmp_path / "lib.so").write_bytes(b"")
    for name in (f"{fsops.TEMPORARY_PREFIX}old", "lib.so"):
        os.utime(tmp_path / name, (1, 1))
    assert fsops.sweep(tmp_path) == 1
    assert names(tmp_path) == [f"{fsops.TEMPORARY_PREFIX}fresh", "lib.so"]
    assert fsops.sweep(tmp_path / "none") == 0


def test_a_staged_file_has_no_name_until_it_is_committed(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"before")
    staged = fsops.stage(tmp_path, "f", chunks(), mode=0o755, expected_size=len(DATA), expected_sha256=SHA256)
    assert (tmp_path / "f").read_bytes() == b"before" and len(names(tmp_path)) == 2
    written = staged.commit()
    assert written.path.read_bytes() == DATA and written.identity == fsops.Identity.of(tmp_path / "f")
    staged.discard()
    assert names(tmp_path) == ["f"] and stat.S_IMODE(written.path.stat().st_mode) == 0o755


def test_a_discarded_file_leaves_nothing(tmp_path: Path) -> None:
    staged = fsops.stage(tmp_path, "f", chunks(), expected_size=None, expected_sha256=None)
    staged.discard()
    staged.discard()
    assert names(tmp_path) == []
    with pytest.raises(InstallError):
        staged.commit()


def test_a_link_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    staged = fsops.stage(tmp_path, "f", chunks(), expected_size=None, expected_sha256=None)
    (tmp_path / "f").symlink_to("goal")
    with pytest.raises(TrustError, match="symbolic link"):
        staged.commit()
    assert names(tmp_path) == ["f"]


def test_a_link_is_exchanged_and_nothing_else_is_replaced_by_one(tmp_path: Path) -> None:
    for target in ("one", "two"):
        fsops.write_link(tmp_path / "link", target)
        assert str((tmp_path / "link").readlink()) == target
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "d").mkdir()
    for name in ("file", "d"):
        with pytest.raises(TrustError, match="not a symbolic link"):
            fsops.write_link(tmp_path / name, "one")
    with pytest.raises(InstallError, match="cannot make the link"):
        fsops.write_link(tmp_path / "none" / "link", "one")
    assert names(tmp_path) == ["d", "file", "link"]


# directories and trust ----------------------------------------------------------------------------------------------------


def test_every_made_level_has_the_exact_mode(tmp_path: Path) -> None:
    with umask(0o077):
        made = fsops.ensure_directory(tmp_path / "a" / "b" / "c", root=tmp_path / "a")
    assert made == tmp_path / "a" / "b" / "c"
    for level in (made, made.parent, made.parent.parent):
        assert stat.S_IMODE(level.stat().st_mode) == 0o755
    assert fsops.ensure_directory(made) == made


def test_links_above_the_root_are_followed_and_below_it_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "home").symlink_to("data")
    root = fsops.ensure_directory(tmp_path / "home" / "cache")
    assert (tmp_path / "data" / "cache").is_dir()
    (root / "v1").symlink_to(tmp_path)
    for path in (root / "v1" / "x", root / "v1"):
        with pytest.raises(TrustError, match="symbolic link"):
            fsops.ensure_directory(path, root=root)
    assert names(tmp_path) == ["data", "home"]


def test_a_file_in_the_way_is_reported(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(TrustError, match="a regular file, not a directory"):
        fsops.ensure_directory(tmp_path / "f")
    with pytest.raises(InstallError):
        fsops.ensure_directory(tmp_path / "f" / "g")


def test_a_root_must_be_above_the_path(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="not below"):
        fsops.ensure_directory(tmp_path / "a", root=tmp_path / "b")


def make_link(path: Path) -> None:
    path.symlink_to(path.parent)


def make_file(path: Path) -> None:
    path.write_bytes(b"x")


def make_directory(path: Path) -> None:
    path.mkdir()


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def make_hard_link(path: Path) -> None:
    path.write_bytes(b"x")
    os.link(path, path.with_name("other"))


def with_mode(make: Callable[[Path], None], mode: int) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        make(path)
        path.chmod(mode)

    return made


def owned_by(make: Callable[[Path], None], uid: int) -> Callable[[Path], None]:
    def made(path: Path) -> None:
        make(path)
        try:
            os.chown(path, uid, uid)
        except PermissionError:
            pytest.skip("needs root")

    return made


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_link, "symbolic link"),
        (make_file, "regular file, not a directory"),
        (make_fifo, "named pipe"),
        (with_mode(make_directory, 0o775), "mode 0775"),
        (with_mode(make_directory, 0o1777), "mode 1777"),
        (with_mode(make_directory, 0o757), "mode 0757"),
        (owned_by(make_directory, NOBODY), "uid 65534"),
        (lambda path: None, "cannot be checked"),
    ],
)
def test_a_root_that_others_could_change_is_refused(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    """Case B43."""
    make(tmp_path / "root")
    with pytest.raises(TrustError, match=message) as caught:
        fsops.check_root(tmp_path / "root")
    assert caught.value.remedy or "cannot be checked" in message
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (make_link, "symbolic link"),
        (make_directory, "a directory, not a regular file"),
        (make_fifo, "named pipe"),
        (make_socket, "socket"),
        (make_hard_link, "2 hard links"),
        (with_mode(make_file, 0o664), "mode 0664"),
        (with_mode(make_file, 0o646), "mode 0646"),
        (owned_by(make_file, NOBODY), "uid 65534"),
        (lambda path: None, "cannot be checked"),
    ],
)
def test_a_file_or_lock_that_others_could_change_is_refused(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    """Case B43."""
    make(tmp_path / "file")
    with pytest.raises(TrustError, match=message):
        fsops.check_regular(tmp_path / "file")
    if message == "cannot be checked":
        return
    # A directory or a socket cannot even be opened for writing, which is as good a refusal.
    refusals: tuple[type[KcacheError], ...] = (
        (TrustError, InstallError) if make in (make_directory, make_socket) else (TrustError,)
    )
    with pytest.raises(refusals) as caught, fsops.locked(tmp_path / "file", 0):
        pytest.fail("locked")
    assert not isinstance(caught.value, LockTimeoutError)


def test_ordinary_modes_and_roots_files_are_accepted(tmp_path: Path) -> None:
    for mode in (0o700, 0o755, 0o555):
        (tmp_path / "d").mkdir(exist_ok=True)
        (tmp_path / "d").chmod(mode)
        fsops.check_root(tmp_path / "d")
    (tmp_path / "f").write_bytes(b"x")
    for mode in (0o600, 0o644, 0o755, 0o444):
        (tmp_path / "f").chmod(mode)
        assert fsops.check_regular(tmp_path / "f") == fsops.Identity.of(tmp_path / "f")


@pytest.mark.root
@needs_root
def test_another_user_trusts_what_root_owns(tmp_path: Path) -> None:
    fsops.check_root("/usr")
    assert as_user(NOBODY, lambda: fsops.check_root("/usr")) == ""
    assert as_user(NOBODY, lambda: fsops.check_regular("/etc/passwd")) == ""


def test_identities_survive_json_and_notice_changes(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x")
    identity = fsops.Identity.of(path)
    assert identity is not None and fsops.Identity.from_json(identity.to_json()) == identity
    bad: object
    for bad in (None, {}, [], {**identity.to_json(), "more": 1}, {**identity.to_json(), "size": "1"}):
        assert fsops.Identity.from_json(bad) is None
    path.chmod(0o600)
    assert fsops.Identity.of(path) != identity
    assert fsops.Identity.of(tmp_path / "none") is None


def test_a_damaged_file_is_set_aside_once(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    for content in (b"first", b"second"):
        path.write_bytes(content)
        aside = fsops.set_aside(path)
        assert aside.name == ".damaged-lib.so" and aside.read_bytes() == content
        assert names(tmp_path) == [".damaged-lib.so"]
    with pytest.raises(InstallError, match="cannot set aside"):
        fsops.set_aside(path)


# locks --------------------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from kcache import fsops
with fsops.locked(sys.argv[1], 5):
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_lock_held_for_ever_ends_in_a_message_with_path_and_holder(tmp_path: Path) -> None:
    """Case B15."""
    with holder(tmp_path / "lock") as process:
        for timeout in (0, 0.2):
            with pytest.raises(LockTimeoutError) as caught, fsops.locked(tmp_path / "lock", timeout):
                pytest.fail("locked twice")
            assert str(tmp_path / "lock") in caught.value.what
            assert f"pid {process.pid} on {socket.gethostname()}" in caught.value.why


def test_a_lock_file_of_a_dead_process_is_no_obstacle(tmp_path: Path) -> None:
    """Case B15."""
    with holder(tmp_path / "lock") as process:
        process.kill()
        process.wait()
        with fsops.locked(tmp_path / "lock", 0):
            pass


def test_a_lock_passes_on_when_its_holder_dies(tmp_path: Path) -> None:
    with holder(tmp_path / "lock") as process:
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {process.pid}"]).wait(10)
        with fsops.locked(tmp_path / "lock", 30):
            pass


def test_a_lock_is_free_after_an_error_and_excludes_within_a_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="body"), fsops.locked(tmp_path / "lock", 0):
        with pytest.raises(LockTimeoutError), fsops.locked(tmp_path / "lock", 0):
            pass
        raise ValueError("body")
    with fsops.locked(tmp_path / "lock", 0):
        assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600


def test_a_lock_outlives_neither_a_forked_child(tmp_path: Path) -> None:
    with fsops.locked(tmp_path / "lock", 0):
        child = subprocess.Popen(["sleep", "60"])
        forked = os.fork()
        if forked == 0:
            time.sleep(60)
            os._exit(0)
    try:
        with fsops.locked(tmp_path / "lock", 0):
            pass
    finally:
        child.kill()
        child.wait()
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)


def test_an_unlinked_lock_is_not_taken_for_the_one_at_the_path(tmp_path: Path) -> None:
    """Two processes that lock two files of one name would both be inside."""
    path = tmp_path / "lock"
    with fsops.locked(path, 0):
        path.unlink()
        with fsops.locked(path, 0), pytest.raises(LockTimeoutError), fsops.locked(path, 0):
            pass


def test_a_lock_that_is_unlinked_between_opening_and_locking_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    real = fcntl.flock

    def flock(descriptor: int, operation: int) -> None:
        if not (tmp_path / "done").exists():
            path.rename(tmp_path / "done")
            (tmp_path / "done").write_bytes(b"")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with fsops.locked(path, 5), pytest.raises(LockTimeoutError), fsops.locked(path, 0):
        pass


COUNTER = """
import sys
from pathlib import Path
from kcache import fsops
lock, counter = sys.argv[1], Path(sys.argv[2])
for _ in range(40):
    with fsops.locked(lock, 60):
        number = int(counter.read_text())
        counter.write_text(str(number + 1))
        if number % 7 == 0:
            Path(lock).unlink()  # a cleaner removes the file while others wait for it
"""


def test_many_processes_exclude_each_other_even_while_the_file_is_removed(tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    counter.write_text("0")
    command = [sys.executable, "-c", COUNTER, str(tmp_path / "lock"), str(counter)]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    assert counter.read_text() == "160"


@pytest.mark.root
@needs_root
def test_a_lock_on_a_full_file_system_works_or_says_so(tmp_path: Path) -> None:
    with mounted(tmp_path / "m", "tmpfs", "size=64k,nr_inodes=3") as where:
        (where / "a").write_bytes(b"")
        (where / "b").write_bytes(b"")
        with pytest.raises(NoSpaceError, match="cannot lock"), fsops.locked(where / "lock", 0):
            pass
        (where / "b").unlink()
        with pytest.raises(OSError, match="No space"):
            (where / "a").write_bytes(b"x" * (1 << 20))
        with fsops.locked(where / "lock", 0):  # no room for the holder's name, which is no reason to fail
            pass


@pytest.mark.root
@needs_root
def test_another_user_cannot_hold_up_the_owner(tmp_path: Path) -> None:
    with fsops.locked(tmp_path / "lock", 0):
        pass

    def hold() -> None:
        os.close(os.open(tmp_path / "lock", os.O_RDONLY))

    assert as_user(NOBODY, hold).startswith("PermissionError")


def test_importing_it_is_cheap() -> None:
    """The start-up of a server pays for every import on the restore path."""
    code = "import sys; from kcache import fsops; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"subprocess", "tarfile", "tempfile", "click", "zstandard", "random", "logging"} & (set(loaded) - site_modules())


def site_modules() -> set[str]:
    """What this interpreter loads by itself (editable installs and `.pth` files bring modules in)."""
    code = "import sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())
