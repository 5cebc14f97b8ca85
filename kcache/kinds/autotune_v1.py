"""FlashInfer's JSON files of tuning results (v1), which vLLM and SGLang keep too: collected, matched, merged, named anew.

One file holds all results of one environment, stated in `_metadata` (`flashinfer/autotuner/autotuner.py`, save_configs and
load_configs, 0.6.18 to 0.7.4): `{key: [runner, tactic, policy?, selection?]}`. FlashInfer passes over a whole file on any
difference, unless the file's owner wrote `*`; a file without `_metadata` it takes unseen, so kcache does not. Its writers read,
merge and rename without a lock. So, here:

- what is merged into a file is only ever added: a result that is there stays; a file of another environment is not touched;
- a file that is no such file (torn, or tuned where the writer could not tell in what) is set aside, never deleted;
- kcache's own writers exclude each other where locks work, and each looks again after it has written, for where they do not.

Decisions and documents are pure; `install` does the writing. Where engines look is `kcache.kinds.autotune_places`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kcache import digest, fsops
from kcache.errors import InstallError, IntegrityError, KcacheError
from kcache.fsops import Identity
from kcache.key import Fact, known
from kcache.kinds.autotune import (
    DSL,
    INDETERMINATE,
    WILDCARD,
    LeftOut,
    check_fields,
    check_stack,
    json_object,
    meant,
    operation_of,
    why,
)
from kcache.kinds.autotune_v2_install import move_aside
from kcache.match import EQUAL, Check, Decision
from kcache.tuning_facts import TuningHost
from kcache.values import dataclass, replace

METADATA = "_metadata"
RECORDS = "_records"
GENERATION = "_generation"

MAX_FILE = 64 << 20

_TRIES = 20
"""How often a merge begins anew because somebody else wrote meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """How the winner was chosen, where FlashInfer says so (from 0.7.4 on): milliseconds, of the first measurement.

    margin:     runner_up_ms / time_ms - 1; negative where a near tie was settled for an earlier candidate.
    candidates: how many could be measured.
    """

    time_ms: float
    runner_up_ms: float | None
    margin: float | None
    candidates: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One result. `value` is FlashInfer's own list: runner, tactic, and what it says of the measurement."""

    key: str
    value: tuple[Any, ...]

    @property
    def operation(self) -> str:
        return operation_of(self.key)[0]

    @property
    def runner(self) -> str:
        return str(self.value[0])

    @property
    def tactic(self) -> Any:
        return self.value[1]

    @property
    def policy(self) -> tuple[Any, ...] | None:
        """How was measured (replays, L2 cache, ...), where FlashInfer says so."""
        return tuple(self.value[2]) if len(self.value) > 2 else None

    @property
    def selection(self) -> Selection | None:
        found = self.value[3] if len(self.value) > 3 else None
        if not isinstance(found, dict):
            return None
        return Selection(
            time_ms=float(found["time_ms"]),
            runner_up_ms=found.get("runner_up_ms"),
            margin=found.get("margin"),
            candidates=int(found["candidates"]),
        )

    @property
    def passed_over(self) -> bool:
        """FlashInfer loads no index into a list of cuDNN's plans (`load_configs`): such a result has no effect."""
        return self.runner.startswith("Cudnn") and type(self.tactic) is int and self.tactic >= 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningFile:
    """One file. `records` are those of FlashInfer's products (`_records`), passed on as they are; `generation` was written."""

    metadata: Mapping[str, Any]
    results: Mapping[str, Result]
    records: Mapping[str, Any]
    generation: bool = True

    @property
    def wildcards(self) -> frozenset[str]:
        """Fields that the file's owner wants to match everything."""
        return frozenset(name for name, value in self.metadata.items() if value == WILDCARD)

    @property
    def content(self) -> str:
        """A digest of the results, whatever environment they are named for; ranks of a group compare it."""
        results = {key: list(result.value) for key, result in self.results.items()}
        return digest.of_document({"results": results, "records": dict(self.records)})

    def encode(self) -> bytes:
        """The file as FlashInfer writes it (`save_configs`)."""
        document: dict[str, Any] = {METADATA: dict(self.metadata)}
        if self.records:
            document[RECORDS] = dict(self.records)
        document |= {key: list(self.results[key].value) for key in sorted(self.results)}
        if self.generation:
            text = json.dumps(document, sort_keys=True, separators=(",", ":"))
            document[GENERATION] = hashlib.sha256(text.encode()).hexdigest()
        return json.dumps(document, indent=2).encode()


def parse_file(data: bytes) -> TuningFile:
    """A file from its bytes.

    Raises:
        IntegrityError: torn, foreign, or without `_metadata`: nothing says for which environment its results are.
    """
    document = json_object(data, MAX_FILE)
    metadata = document.pop(METADATA, None)
    if not isinstance(metadata, dict):
        raise IntegrityError("it does not say what it was tuned in", why=f"it has no {METADATA}")
    generation = document.pop(GENERATION, None) is not None
    records = document.pop(RECORDS, {})
    if not isinstance(records, dict):
        raise IntegrityError("it is no file of tuning results", why=f"{RECORDS} is no object")
    results = {key: _parse_result(key, value) for key, value in document.items()}
    return TuningFile(metadata=metadata, results=results, records=records, generation=generation)


def _parse_result(key: str, value: Any) -> Result:
    shaped = isinstance(value, list) and 2 <= len(value) <= 4 and isinstance(value[0], str) and bool(value[0])
    if not shaped or not operation_of(key)[0] or (len(value) > 2 and not isinstance(value[2], list)):
        raise IntegrityError("it is no file of tuning results", why=f"{key[:80]!r} is no result")
    result = Result(key=key, value=tuple(value))
    try:
        _ = result.selection
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError("it is no file of tuning results", why=f"{key[:80]!r} has no selection") from error
    return result


def built_fields(file: TuningFile, here: TuningHost) -> dict[str, Fact]:
    """What a file's metadata means that was written on this host: wildcards stay what the host really has."""
    return {name: fact if name in file.wildcards else meant(file.metadata.get(name), fact) for name, fact in here.fields.items()}


def refuse_foreign(file: TuningFile, here: TuningHost) -> None:
    """Refuses a file that may not be published from here: tuned elsewhere, or in an environment that was not found out.

    Raises:
        IntegrityError: it names the field.
        ProbeError: a field of this host could not be found out.
    """
    here.written()
    for check in check_fields(built_fields(file, here), here.fields, wildcards=file.wildcards):
        if not check.passed:
            raise IntegrityError("tuned in another environment", why=check.describe())
    if DSL in here.fields and DSL not in file.wildcards and not built_fields(file, here)[DSL].same(here.fields[DSL]):
        raise IntegrityError("tuned in another environment", why=f"{DSL} is not that of this host")
    if not file.results and not file.records:
        raise IntegrityError("no result is in it")


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedFile:
    """A file that may be published, by its path below the directory that was looked through."""

    path: str
    file: TuningFile


def collect_files(root: Path, here: TuningHost, *, depth: int = 4) -> tuple[tuple[CollectedFile, ...], tuple[LeftOut, ...]]:
    """The files below a directory that were tuned in this very environment; everything else with its reason.

    Args:
        depth: segments of a path at most, below `root`; SGLang's have four.

    Raises:
        ProbeError: a field of this host could not be found out.
        TrustError: someone else could change the directory.
    """
    here.written()
    fsops.check_root(root)
    collected: list[CollectedFile] = []
    left_out: list[LeftOut] = []
    for where, folders, names in os.walk(root):
        folders.sort()
        inside = os.path.relpath(where, root)
        if (0 if inside == "." else inside.count("/") + 1) + 2 > depth:
            folders.clear()
        for name in sorted(names):
            path = name if inside == "." else f"{inside}/{name}"
            try:
                if not name.endswith(".json"):
                    unfinished = name.endswith(".tmp") or name.startswith((fsops.TEMPORARY_PREFIX, fsops.DAMAGED_PREFIX))
                    raise IntegrityError("a writer did not finish it" if unfinished else "not a name of such a file")
                fsops.check_root(Path(where))
                file = parse_file(fsops.read_checked(Path(where) / name, MAX_FILE))
                refuse_foreign(file, here)
            except KcacheError as error:
                left_out.append(LeftOut(path=path, why=why(error)))
            else:
                collected.append(CollectedFile(path=path, file=file))
    return tuple(collected), tuple(left_out)


def match_file(file: TuningFile, built: TuningHost, host: TuningHost, *, strict: bool = False) -> Decision:
    """Whether the results of one environment may be used in another.

    Args:
        built: the environment that tuned: what the file's `unknown` means, and the compiler by content.
        host:  the target's.
        strict: FlashInfer's own rule on top: `DSL` is the builder's, so that nothing has to be written anew.
    """
    fields = {
        name: meant(file.metadata.get(name), fact) if name not in file.wildcards else known(WILDCARD)
        for name, fact in built.fields.items()
    }
    checks = check_fields(fields, host.fields, wildcards=file.wildcards)
    if DSL not in file.wildcards:
        checks += check_stack(built.stack, host.stack, strict=strict)
        if DSL in fields and (strict or fields[DSL].undetermined or not fields[DSL].same(built.fields[DSL])):
            found = host.fields.get(DSL, fields[DSL]) if strict else built.fields[DSL]
            passed = fields[DSL].same(found) and fields[DSL].same(built.fields[DSL])
            checks.append(Check(field=DSL, rule=EQUAL, wanted=fields[DSL].describe(), found=found.describe(), passed=passed))
    return Decision(checks=tuple(checks))


def relocated(file: TuningFile, host: TuningHost) -> TuningFile:
    """The file as the target's FlashInfer would have written it: its own metadata, the owner's wildcards kept.

    Only `match_file` says whether the results may be used there.

    Raises:
        ProbeError: a field of the target could not be found out.
    """
    own = dict(file.metadata) | {name: text for name, text in host.written().items() if name not in file.wildcards}
    return replace(file, metadata=own)


MERGED = "merged"
KEPT = "kept"
WRITTEN = "written"
REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """What became of one file.

    how:       `written` (there was none), `merged`, `kept` (all of it was there), `refused`.
    added:     keys that were added. theirs: keys that were there with another winner, which stays.
    set_aside: the name of what FlashInfer would not have taken, and lies beside it now; empty where there was nothing such.
    why:       one line, where it was refused or set aside.
    """

    how: str
    added: tuple[str, ...] = ()
    theirs: tuple[str, ...] = ()
    set_aside: str = ""
    why: str = ""


def merge(there: TuningFile, ours: TuningFile) -> tuple[TuningFile, Placed]:
    """A file with ours added to it; what is there stays. Pure.

    Both have to be of one environment, as FlashInfer's own merge of them would find (`_classify_metadata_mismatches`).
    """
    hard = [
        name
        for name, text in ours.metadata.items()
        if text != WILDCARD and there.metadata.get(name) not in (text, WILDCARD, *INDETERMINATE)
    ]
    if hard:
        text = f"{hard[0]} is {there.metadata[hard[0]]} there, and {ours.metadata[hard[0]]} here"
        return there, Placed(how=REFUSED, why=f"the file there is of another environment: {text}")
    added = tuple(key for key in ours.results if key not in there.results)
    theirs = tuple(
        key for key, own in ours.results.items() if key in there.results and there.results[key].value[:2] != own.value[:2]
    )
    records = {name: _united(there.records.get(name), value) for name, value in {**there.records, **ours.records}.items()}
    grown = records != dict(there.records)
    results = {**{key: ours.results[key] for key in added}, **there.results}
    merged = replace(there, results=results, records=records)
    return merged, Placed(how=MERGED if added or grown else KEPT, added=added, theirs=theirs)


def _united(there: Any, ours: Any) -> Any:
    """Records of one product: ours are added to what is there, and nothing else is changed."""
    if isinstance(there, dict) and isinstance(ours, dict):
        return {**ours, **there}
    return ours if there is None else there


def install(path: Path, file: TuningFile, *, timeout: float) -> Placed:
    """Put results where FlashInfer or an engine will load them from; a file in use is merged into.

    Args:
        path: of the file; its directory is made where it is missing.
        timeout: seconds to wait for another kcache that writes this file.

    Raises:
        TrustError: the directory or the file is a link, or someone else could change it.
        LockTimeoutError, NoSpaceError, InstallError: see `kcache.fsops`.
    """
    directory = fsops.ensure_directory(path.parent)
    fsops.require_space(directory, 2 * len(file.encode()))
    with fsops.locked(directory / f".{path.name}.kcache.lock", timeout):
        done = Placed(how=KEPT)
        for _ in range(_TRIES):
            step, finished = _step(path, file)
            done = _joined(done, step)
            if finished:
                return done
    raise InstallError(f"{path} changes all the time", why="another process writes it", remedy="Restore before servers start.")


def _step(path: Path, file: TuningFile) -> tuple[Placed, bool]:
    """One look at the file and one write, if it lacks anything; True once it lacks nothing."""
    before = Identity.of(path)
    if before is None:
        done = Placed(how=WRITTEN, added=tuple(file.results))
        return (done, False) if _write(path, file, before) else (Placed(how=KEPT), False)
    try:
        there = parse_file(fsops.read_checked(path, MAX_FILE))
        for name, text in file.metadata.items():
            if (found := there.metadata.get(name)) in INDETERMINATE and found != text:
                raise IntegrityError("FlashInfer would replace it", why=f"its {name} could not be found out when it was tuned")
    except IntegrityError as error:
        aside = move_aside(path)
        return Placed(how=KEPT, set_aside="".join(aside), why=why(error)), False
    merged, placed = merge(there, file)
    if placed.how != MERGED:
        return placed, True
    return (placed, False) if _write(path, merged, before) else (Placed(how=KEPT), False)


def _joined(done: Placed, step: Placed) -> Placed:
    """What several steps did together."""
    how = step.how if done.how == KEPT or step.how == REFUSED else done.how
    return Placed(
        how=how,
        added=tuple(dict.fromkeys((*done.added, *step.added))),
        theirs=step.theirs,
        set_aside=step.set_aside or done.set_aside,
        why=step.why or done.why,
    )


def _write(path: Path, file: TuningFile, before: Identity | None) -> bool:
    """Writes the file unless somebody else has written it since `before`; whether it did."""
    data = file.encode()
    staged = fsops.stage(path.parent, path.name, (data,), expected_size=None, expected_sha256=None, durable=False)
    if Identity.of(path) != before:
        staged.discard()
        return False
    staged.commit(durable=False)
    return True


def content_digest(path: Path) -> str:
    """Of the results in a file; empty where there is none that FlashInfer would load. Ranks of a group compare it."""
    try:
        return parse_file(fsops.read_checked(path, MAX_FILE)).content
    except KcacheError:
        return ""
