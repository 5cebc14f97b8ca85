"""`kcache restore -- CMD` reaches CMD, whatever is wrong with options, stores, streams and directories, and leaves it nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from container import Container
from entries import make_fitting_entry, publish

from kcache.cli import restoring
from kcache.errors import StoreError, UnavailableError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    directory = tmp_path / "store"
    directory.mkdir()
    return directory


@pytest.fixture
def container(tmp_path: Path) -> Container:
    home = tmp_path / "home"
    home.mkdir()
    return Container(home=home)


def shell(container: Container, script: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A shell script with `$KCACHE`, as an entrypoint is one."""
    environ = {**container.variables, "KCACHE": f"{sys.executable} -m kcache", "PATH": "/usr/bin:/bin", **more}
    environ["PYTHONPATH"] = str(Path(restoring.__file__).parents[2])
    return subprocess.run(
        ["/bin/sh", "-c", script], env=environ, cwd=container.home, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "redirection", [">&-", ">/dev/full", "2>&-", "2>/dev/full", "<&-", ">&- 2>&- <&-", ">/dev/full 2>/dev/full", "| true"]
)
@pytest.mark.parametrize("options", ["--from {store} --json", "--from {store} --shell", "--from {store} --bogus", "--from /none"])
def test_a_standard_stream_that_cannot_be_used_does_not_keep_the_server_from_starting(
    container: Container, store: Path, redirection: str, options: str
) -> None:
    shell(container, f"$KCACHE restore {options.format(store=store)} -- /usr/bin/touch reached {redirection}")
    assert (container.home / "reached").exists()


@pytest.mark.parametrize("form", ["--json", "--shell"])
def test_a_result_that_cannot_be_printed_is_a_failure_without_a_traceback(container: Container, store: Path, form: str) -> None:
    done = shell(container, f"$KCACHE restore --from {store} {form} >/dev/full")
    assert done.returncode != 0
    assert "the result could not be printed" in done.stderr
    assert "Traceback" not in done.stderr


def test_signals_that_python_ignores_are_not_left_ignored_for_the_server(container: Container, store: Path) -> None:
    done = shell(container, f"$KCACHE restore --from {store} -- /bin/grep SigIgn /proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGALRM, signal.SIGINT, signal.SIGTERM):
        assert not ignored & 1 << (number - 1), number.name


@pytest.mark.parametrize("command", ["''", "no-such-program", "/etc/passwd", "/"])
def test_a_command_that_cannot_be_run_is_one_line_and_a_shells_exit_code(container: Container, store: Path, command: str) -> None:
    done = shell(container, f"$KCACHE -q restore --from {store} -- {command}")
    assert done.returncode == (127 if command in ("''", "no-such-program") else 126)
    assert "cannot be started" in done.stderr
    assert "Traceback" not in done.stderr


BAD_OPTIONS = {
    "no store": [],
    "unknown option": ["--from", "{store}", "--bogus"],
    "deadline": ["--from", "{store}", "--deadline", "soon"],
    "lock timeout": ["--from", "{store}", "--lock-timeout", "-1s"],
    "scheme": ["--from", "s3://bucket/x"],
    "empty store": ["--from", ""],
    "python": ["--from", "{store}", "--python", "/nonexistent"],
    "env": ["--from", "{store}", "--env", "/etc/passwd"],
    "arch": ["--from", "{store}", "--arch", "zz"],
    "two results": ["--from", "{store}", "--json", "--shell"],
}


@pytest.mark.parametrize("options", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_cost_one_line_and_never_the_server(container: Container, store: Path, options: list[str]) -> None:
    words = [word.format(store=store) for word in options]
    done = container.kcache("restore", *words, "--", sys.executable, "-c", "print('reached')")
    assert done.code == 0
    assert done.out.splitlines()[-1] == "reached"
    assert len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith("kcache: ")


@pytest.mark.parametrize("options", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_with_strict_bad_options_end_before_the_server(container: Container, store: Path, options: list[str]) -> None:
    words = [word.format(store=store) for word in options]
    done = container.kcache("restore", "--strict", *words, "--", sys.executable, "-c", "print('reached')")
    assert done.code != 0
    assert "reached" not in done.out
    assert len(done.err.splitlines()) == 1, done.err


def test_a_server_gets_what_it_needs_whatever_became_of_the_restore(container: Container) -> None:
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    for options in ([], ["--from", "/nonexistent"], ["--from", "s3://x"]):
        done = container.kcache("restore", *options, "--", sys.executable, "-c", code, env={"HOME": "/nonexistent"})
        environ: Mapping[str, str] = json.loads(done.out)
        assert int(environ["MAX_JOBS"]) >= 1
        assert Path(environ["FLASHINFER_WORKSPACE_BASE"]).is_absolute()


def test_a_store_given_by_a_relative_path_in_a_directory_that_is_gone_is_one_line(container: Container) -> None:
    done = shell(container, "mkdir gone && cd gone && rmdir ../gone && $KCACHE restore --from rel -- /bin/echo reached")
    assert done.stdout == "reached\n"
    assert "Traceback" not in done.stderr


REACH = ["--", sys.executable, "-c", "print('reached')"]


@pytest.mark.parametrize(
    "words",
    [
        ["restor", "--from", "{store}"],
        ["Restore", "--from", "{store}"],
        ["resotre"],
        ["restore", "--form", "{store}"],
        ["--bogus", "restore", "--from", "{store}"],
        ["--level", "high", "restore", "--from", "{store}"],
        ["-q", "restor", "--from={store}", "--json"],
    ],
)
def test_a_misspelt_restore_still_starts_the_command(container: Container, store: Path, words: list[str]) -> None:
    done = container.kcache(*[word.format(store=store) for word in words], *REACH)
    printed = done.out.removesuffix("reached\n")
    assert done.code == 0 and printed != done.out
    assert json.loads(printed)["exit_code"] == 2 if "--json" in words else not printed
    assert len(done.err.splitlines()) == 1, done.err
    assert done.err.startswith("kcache: ")


@pytest.mark.parametrize(
    "words",
    [
        ["publsh"],
        ["bogus"],
        [],
        ["--bogus"],
        ["verify", "--bogus", "restore"],
        ["restor", "--strict"],
        ["--strict", "restore", "--from", "{store}", "--bogus"],
        ["restor"],
        ["restore"],
    ],
)
def test_only_restore_starts_a_command_and_only_what_follows_two_dashes(
    container: Container, store: Path, words: list[str]
) -> None:
    reach = REACH if words not in (["restor"], ["restore"]) else REACH[1:]
    done = container.kcache(*[word.format(store=store) for word in words], *reach)
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1 or "Usage:" in done.err, done.err


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("/bin/true", "did not answer as a Python does"),
        ("/bin/echo", "did not answer as a Python does"),
        ("/none", "No such file"),
    ],
)
def test_a_python_that_is_none_is_one_clear_line(container: Container, store: Path, program: str, why: str) -> None:
    done = container.kcache("restore", "--from", str(store), "--python", program, *REACH)
    assert (done.code, done.out) == (0, "reached\n")
    [line] = done.err.splitlines()
    assert f"the Python {program} could not be asked: " in line
    assert why in line
    assert "Expecting" not in line


def test_an_empty_python_is_said_to_be_empty(container: Container, store: Path) -> None:
    done = container.kcache("restore", "--from", str(store), "--python", "", *REACH)
    assert (done.code, done.out) == (0, "reached\n")
    assert "--python is given without a path" in done.err


@pytest.mark.parametrize("chosen", ["relative", "{home}/a:b", "/dev/null", "/proc"])
def test_a_cache_directory_that_was_chosen_and_cannot_be_used_is_named(container: Container, store: Path, chosen: str) -> None:
    directory = chosen.format(home=container.home)
    done = container.kcache("restore", "--from", str(store), "--json", env={"KCACHE_DIR": directory})
    assert done.document["cache_root"] == str(container.home / ".cache" / "kcache")
    assert any(line.startswith("KCACHE_DIR: ") and "is used instead" in line for line in done.document["warnings"])


def test_hangs_one_after_another_are_each_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "HANG_GRACE", 0.05)
    before = signal.getsignal(signal.SIGALRM)
    started = time.monotonic()
    with pytest.raises(UnavailableError), restoring.bounded(0.05):
        for _ in range(3):
            try:
                time.sleep(30)
            except StoreError:
                continue
        raise UnavailableError("all of them hung")
    assert time.monotonic() - started < 25
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) == before


def test_many_modules_are_still_a_line_that_can_be_read(container: Container, store: Path, tmp_path: Path) -> None:
    make_fitting_entry(tmp_path / "entries", {f"module_{number:02}": b"\x7fELF" for number in range(30)})
    publish(tmp_path / "entries", store)
    said = container.kcache("restore", "--from", str(store), "--arch", "9.0a").err
    assert "restored: module_00, module_01, " in said
    assert "module_07, and 22 more in " in said
