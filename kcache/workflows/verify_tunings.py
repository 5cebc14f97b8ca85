"""Proof for the tuner's results: in a fresh process the real FlashInfer finds all of them where it looks, and measures nothing.

On a host with the GPU the calls that tuned are made again, as far as an entry knows them: none may measure a candidate. On any
other host FlashInfer works for a described GPU, and its own classes read the store and the files. Nothing is built here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from kcache.errors import ProbeError
from kcache.gpu_products import find_product
from kcache.kinds.autotune_v2 import TuningStore
from kcache.local_cache import InstalledEntry
from kcache.tuning_facts import FLASHINFER
from kcache.values import dataclass
from kcache.workflows import child
from kcache.workflows.target import PRODUCT, Target
from kcache.workflows.tunings import files_of, place_root, store_of

SECONDS = 600.0
"""For one process without calls: FlashInfer's import takes 2 to 13 s."""

SECONDS_PER_CALL = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningProof:
    """One store or file in the fresh process. `found` of `results` were found; `reason` says why not all, empty if all were."""

    tuning: str
    results: int
    found: int
    reason: str

    @property
    def accepted(self) -> bool:
        return self.found == self.results and not self.reason

    def to_json(self) -> dict[str, Any]:
        return {
            "tuning": self.tuning,
            "accepted": self.accepted,
            "results": self.results,
            "found": self.found,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningsProof:
    """What the fresh processes showed.

    profiled: candidates that were measured although results were restored.
    calls:    that were made. errors: of calls that failed.
    left_out: results for engines that are not on this host.
    """

    tunings: tuple[TuningProof, ...]
    profiled: int
    calls: int
    errors: tuple[str, ...]
    left_out: tuple[str, ...]
    seconds: float

    @property
    def proven(self) -> bool:
        return not self.profiled and not self.errors and all(one.accepted for one in self.tunings)

    def to_json(self) -> dict[str, Any]:
        return {
            "status": "proven" if self.proven else "failed",
            "profiled": self.profiled,
            "calls": self.calls,
            "tunings": [tuning.to_json() for tuning in self.tunings],
            "errors": list(self.errors),
            "left_out": list(self.left_out),
            "seconds": round(self.seconds, 3),
        }


def prove_tunings(target: Target, environ: Mapping[str, str], entries: Sequence[InstalledEntry]) -> TuningsProof:
    """The proof for the results of these entries: one process for those without calls, and one for each with calls.

    Args:
        environ: the server's variables.

    Raises:
        ProbeError: a process gave no answer, or it is not known which GPU to describe.
        IntegrityError: an entry's file is not what it should be.
    """
    started = time.monotonic()
    here: list[InstalledEntry] = []
    left_out: list[InstalledEntry] = []
    for entry in entries:
        facts = entry.manifest.tunings
        assert facts is not None
        (here if place_root(target, facts.place) is not None else left_out).append(entry)
    gpu = _gpu(target)
    called = [entry for entry in here if entry.manifest.tunings and entry.manifest.tunings.calls and gpu is None]
    plain = [entry for entry in here if entry not in called]
    proofs = [_prove(target, environ, group, gpu) for group in ([plain] if plain else []) + [[entry] for entry in called]]
    return TuningsProof(
        tunings=tuple(one for proof in proofs for one in proof.tunings),
        profiled=sum(proof.profiled for proof in proofs),
        calls=sum(proof.calls for proof in proofs),
        errors=tuple(line for proof in proofs for line in proof.errors),
        left_out=tuple(entry.manifest.key.title for entry in left_out),
        seconds=time.monotonic() - started,
    )


def _gpu(target: Target) -> Mapping[str, Any] | None:
    """The GPU to describe; None where the process can ask its own.

    Raises:
        ProbeError: it is not known which.
    """
    if target.environment.fact("gpu.source").value == "gpu":
        return None
    name = target.environment.fact(PRODUCT)
    found = find_product(name.value or "") if name.known else None
    if found is None:
        raise ProbeError(
            "it is not known for which GPU tuning results were restored", remedy="Name it with --gpu, as for the restore."
        )
    return found.describe()


def _prove(
    target: Target, environ: Mapping[str, str], entries: Sequence[InstalledEntry], gpu: Mapping[str, Any] | None
) -> TuningsProof:
    stores: list[tuple[str, TuningStore]] = []
    files: list[tuple[str, int]] = []
    calls: list[Mapping[str, Any]] = []
    for entry in entries:
        facts = entry.manifest.tunings
        assert facts is not None
        root = place_root(target, facts.place)
        if facts.place == FLASHINFER:
            stores.append((entry.manifest.key.title, store_of(entry)))
            calls += facts.calls if gpu is None else ()
        else:
            found = files_of(entry).items()
            files += [(f"{root}/{path}", sum(not one.passed_over for one in file.results.values())) for path, file in found]
    request = {
        "stores": [{"root": None, "policy": store.policy, "keys": [one.key for one in store.entries]} for _, store in stores],
        "files": [path for path, _ in files],
        "calls": calls,
        "describe": None if gpu is None else {"gpu": gpu, "cuda_release": None},
    }
    answer, how = child.run(
        target.python,
        "autotune_replay.py",
        lambda path: {**request, "answer": path},
        environ=dict(environ),
        jobs=1,
        seconds_before=SECONDS,
        seconds_per_job=SECONDS_PER_CALL,
        limit=SECONDS + SECONDS_PER_CALL * len(calls),
        progress=None,
    )
    if answer is None:
        raise ProbeError("the fresh process did not say which tuning results FlashInfer finds", why=how)
    return TuningsProof(
        tunings=(
            *(_store_proof(title, one) for (title, _), one in zip(stores, answer["stores"], strict=True)),
            *(_file_proof(*expected, one) for expected, one in zip(files, answer["files"], strict=True)),
        ),
        profiled=int(answer["counted"]["profiled"]),
        calls=len(answer["calls"]),
        errors=tuple(f"{call['call'].get('operation', '')}: {call['error']}" for call in answer["calls"] if "error" in call),
        left_out=(),
        seconds=0.0,
    )


def _store_proof(title: str, found: Mapping[str, Any]) -> TuningProof:
    missed = [str(key) for key in found["missed"]]
    reason = f"not found in {found['directory']}: {missed[0][:120]}" if missed else ""
    return TuningProof(tuning=title, results=int(found["hits"]) + len(missed), found=int(found["hits"]), reason=reason)


def _file_proof(path: str, expected: int, found: Mapping[str, Any]) -> TuningProof:
    """More results than were restored may be in a file that is in use."""
    count = min(int(found["results"]), expected)
    reason = "" if found["loaded"] and count == expected else found["error"] or "FlashInfer does not take the file"
    return TuningProof(tuning=path, results=expected, found=count, reason=str(reason))
