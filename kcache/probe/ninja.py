"""Runs ninja over FlashInfer's build files, and reads back what it recorded: what failed, what each object was made of, how long.

FlashInfer writes one `build.ninja` per module with absolute paths (`jit/cpp_ext.py`, generate_ninja_build_for_op, 0.7.4); a
file of `subninja` lines joins them into one run with one bound on jobs. Ninja goes on after a failure, so that one module does
not cost the others. Not here: what a module is, and whether its objects are still good (`kcache.workflows.compile`).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kcache.errors import CollectError, ProbeError

_STATUS = "[kcache %f/%t] "
_FINISHED = re.compile(r"\[kcache ([0-9]+)/([0-9]+)\] (.*)")
_FAILED = re.compile(r"FAILED: (?:\[code=-?[0-9]+\] )?(.*?)\s*$")
_ERROR_LINE = re.compile(r"\berror\b|\bfatal\b|died due to signal|: not found|No such file|Killed", re.IGNORECASE)

STOP_SECONDS = 20.0
"""How long compilers may take to end after an interruption, before they are killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ninja:
    """One joined build. `program` is ninja; `folder` is where it keeps its log; `file` joins the modules' build files."""

    program: str
    folder: Path
    file: Path
    environ: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A command that failed: what it should have made, and everything it printed."""

    outputs: tuple[str, ...]
    output: str

    @property
    def first_error(self) -> str:
        """The first line that names an error, or the last line there is."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        return next((line for line in lines[1:] if _ERROR_LINE.search(line)), lines[-1] if lines else "no output")[:500]


def find_ninja(path: str) -> str:
    """Ninja on this search path.

    Raises:
        ProbeError: there is none.
    """
    if found := shutil.which("ninja", path=path):
        return found
    raise ProbeError("ninja was not found", remedy="Run: pip install ninja")


def join(build: Ninja, files: Iterable[Path]) -> None:
    """Writes the file that joins the build files of modules."""
    lines = ["ninja_required_version = 1.3", *(f"subninja {str(file).replace(' ', '$ ')}" for file in sorted(files)), ""]
    build.file.write_text("\n".join(lines), encoding="utf-8")


def run(
    build: Ninja, targets: Sequence[str], jobs: int, log: Path, on_edge: Callable[[int, int, str], None] = lambda *_: None
) -> list[Failure]:
    """Builds the targets; returns the commands that failed.

    Args:
        jobs: how many commands may run at once.
        log: receives everything that ninja and the compilers print.
        on_edge: called after each command with how many are done, how many there are, and the command.

    Raises:
        CollectError: ninja itself could not work; the reason is its last line.
        KeyboardInterrupt: after all compilers have ended.
    """
    command = [build.program, "-C", str(build.folder), "-f", str(build.file), "-j", str(jobs), "-k", "0", *targets]
    process = subprocess.Popen(
        command,
        env={**build.environ, "NINJA_STATUS": _STATUS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # ^C reaches kcache, which then stops ninja, which stops its compilers
    )
    try:
        with log.open("w", encoding="utf-8") as stream:
            assert process.stdout is not None
            failures, last = _follow(process.stdout, stream.write, on_edge)
        code = process.wait()
    except BaseException:
        _stop(process)
        raise
    if code != 0 and not failures:
        raise CollectError("ninja could not build", why=last, remedy=f"See {log}.")
    return failures


def _follow(
    lines: Iterable[str], write: Callable[[str], object], on_edge: Callable[[int, int, str], None]
) -> tuple[list[Failure], str]:
    failures: list[tuple[str, list[str]]] = []
    collecting, last = False, ""
    for line in lines:
        write(line)
        if finished := _FINISHED.match(line):
            collecting = False
            on_edge(int(finished[1]), int(finished[2]), finished[3])
        elif failed := _FAILED.match(line):
            collecting = True
            failures.append((failed[1], []))
        elif line.startswith("ninja: "):
            collecting, last = False, line.strip()
        elif collecting:
            failures[-1][1].append(line)
    return [Failure(outputs=tuple(outputs.split()), output="".join(text)) for outputs, text in failures], last


def _stop(process: subprocess.Popen[str]) -> None:
    """Ends ninja and its compilers: asked first, so that ninja removes half-written objects."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def dependencies(build: Ninja) -> dict[str, tuple[str, ...]]:
    """What each object was compiled from, as the compilers said it: object -> absolute paths. Stale records are left out.

    Raises:
        CollectError: ninja cannot say.
    """
    command = [build.program, "-C", str(build.folder), "-f", str(build.file), "-t", "deps"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", env=dict(build.environ))
    if done.returncode != 0:
        raise CollectError("ninja does not say what the modules were compiled from", why=done.stderr.strip()[:500])
    return parse_dependencies(done.stdout, str(build.folder))


def parse_dependencies(text: str, folder: str) -> dict[str, tuple[str, ...]]:
    """The records of `ninja -t deps`; relative paths are below `folder`."""
    found: dict[str, tuple[str, ...]] = {}
    for record in text.split("\n\n"):
        head, _, rest = record.strip("\n").partition("\n")
        output, marker, facts = head.partition(": #deps ")
        if marker and facts.rstrip().endswith("(VALID)"):
            paths = [line.strip() for line in rest.splitlines() if line.strip()]
            found[output] = tuple(os.path.normpath(os.path.join(folder, path)) for path in paths)  # noqa: PTH118
    return found


def parse_log(text: str) -> dict[str, tuple[float, float]]:
    """Start and end of the last command that made each output, in seconds since its run of ninja began (log version 5 to 7)."""
    found: dict[str, tuple[float, float]] = {}
    for line in text.splitlines():
        fields = line.split("\t")
        if len(fields) == 5 and fields[0].isdigit() and fields[1].isdigit():
            found[fields[3]] = (int(fields[0]) / 1000, int(fields[1]) / 1000)
    return found


def busy_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Wall seconds during which at least one of these commands ran: waiting for other modules is not counted."""
    total, reached = 0.0, 0.0
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def unfinished(build: Ninja, target: str) -> str:
    """What ninja would still have to do for a target, in a line; empty if it is whole and newer than all it was made of."""
    command = [build.program, "-n", "-v", "-C", str(build.folder), "-f", str(build.file), target]
    environ = {**build.environ, "NINJA_STATUS": ""}
    done = subprocess.run(command, check=False, capture_output=True, text=True, errors="replace", env=environ)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("ninja: Entering directory")]
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or lines or ["ninja failed"])[-1][:300]
    if any(line.startswith("ninja: no work to do") for line in lines):
        return ""
    return f"ninja would run {len(lines)} command{'s' if len(lines) != 1 else ''}"
