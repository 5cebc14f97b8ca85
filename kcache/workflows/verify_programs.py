"""Proof for programs of the package b12x: in a fresh process b12x's own session, which may use its caches only, prepares every
plan that the entries were built for, and no compiler is asked.

It works under a described GPU, on the GPU's host and on any other; each program is loaded from where it lies. Compilers on PATH
are trapped; CUDA_HOME and its like are left as they are, since b12x has them in its keys. Nothing is launched. Entries of a
recording name no plans; of their programs is shown that b12x would load them, and no more.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kcache.errors import ProbeError
from kcache.gpu_products import from_description
from kcache.kinds.b12x_compile import accepted, for_target
from kcache.local_cache import InstalledEntry
from kcache.values import dataclass
from kcache.workflows.b12x_build import ProgramAnswer, ProgramRun, check_programs
from kcache.workflows.b12x_host import built_triton
from kcache.workflows.programs import programs_of
from kcache.workflows.target import Target
from kcache.workflows.verify import trap_compilers, trapped_starts


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramProof:
    """One program in the fresh process. `reason`: why b12x did not find it; empty if it did."""

    program: str
    accepted: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"program": self.program, "accepted": self.accepted, "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramsProof:
    """What the fresh processes showed.

    prepared:       whether b12x prepared every configuration to its end.
    configurations: how many there were.
    compiler_runs:  how often a compiler was asked, b12x's, Triton's or one on PATH.
    left_out:       Triton's programs that this host's Triton asks for under other names, and that no restore could place.
    by_rule:        how many of the programs were recorded: no plan is known that asks for them, only that b12x would load them.
    """

    programs: tuple[ProgramProof, ...]
    prepared: bool
    configurations: int
    compiler_runs: int
    left_out: tuple[str, ...]
    errors: tuple[str, ...]
    seconds: float
    by_rule: int = 0

    @property
    def proven(self) -> bool:
        whole = self.prepared or bool(self.left_out)
        return bool(self.programs) and whole and not self.compiler_runs and all(one.accepted for one in self.programs)

    def to_json(self) -> dict[str, Any]:
        return {
            "status": "proven" if self.proven else "failed",
            "compiler_runs": self.compiler_runs,
            "configurations": self.configurations,
            "prepared": self.prepared,
            "by_rule": self.by_rule,
            "programs": [program.to_json() for program in self.programs],
            "left_out": list(self.left_out),
            "errors": list(self.errors),
            "seconds": round(self.seconds, 3),
        }


def prove_programs(target: Target, environ: Mapping[str, str], entries: Sequence[InstalledEntry]) -> ProgramsProof:
    """The proof for the programs of these entries, in one process for each; of recorded ones by b12x's loading rule alone.

    Args:
        environ: the server's variables.

    Raises:
        ProbeError, CollectError: a process gave no answer, or this b12x is not as expected.
        IntegrityError: a recorded program is not what it should be.
    """
    proofs = [_prove(target, environ, entry) for entry in entries]
    return ProgramsProof(
        programs=tuple(program for proof in proofs for program in proof.programs),
        prepared=all(proof.prepared for proof in proofs),
        configurations=sum(proof.configurations for proof in proofs),
        compiler_runs=sum(proof.compiler_runs for proof in proofs),
        left_out=tuple(dict.fromkeys(line for proof in proofs for line in proof.left_out)),
        errors=tuple(line for proof in proofs for line in proof.errors),
        seconds=sum(proof.seconds for proof in proofs),
        by_rule=sum(proof.by_rule for proof in proofs),
    )


def _prove(target: Target, environ: Mapping[str, str], entry: InstalledEntry) -> ProgramsProof:
    facts = entry.manifest.programs
    assert facts is not None
    if not facts.cases:
        return _prove_recorded(target, entry)
    with tempfile.TemporaryDirectory(prefix="kcache-verify-") as name:
        log = Path(name) / "compilers"
        run = ProgramRun(
            python=target.python,
            gpu=from_description(facts.gpu),
            cases=facts.cases,
            environ={**environ, "PATH": trap_compilers(Path(name), log)["PATH"]},
            configurations=facts.configurations,
        )
        answer = check_programs(run)
        trapped = len(trapped_starts(log))
    host = target.b12x()
    from kcache.kinds.triton_groups import match_group

    ours = host is not None and match_group(built_triton(entry.manifest, facts), host.triton(entry.manifest.key)).accepted
    return _proof(answer, trapped, triton_is_ours=ours)


def _prove_recorded(target: Target, entry: InstalledEntry) -> ProgramsProof:
    """Programs of a recording, which name no plans: whether b12x's loading rule takes each under the name that it asks for here.

    Raises:
        ProbeError: there is no b12x. IntegrityError: a program of the entry is not what it should be.
    """
    started = time.monotonic()
    host = target.b12x()
    if host is None:
        raise ProbeError("there is no b12x to prove programs for", remedy="Ask on the host that will use them.")
    proofs = []
    for program in programs_of(entry):
        named = for_target(program, host.target(entry.manifest.key))
        why = accepted(host.compile_cache, named.key)
        proofs.append(ProgramProof(program=f"{named.kernel} {named.key[:12]}", accepted=not why, reason=why))
    return ProgramsProof(
        programs=tuple(proofs),
        prepared=True,
        configurations=0,
        compiler_runs=0,
        left_out=(),
        errors=(),
        seconds=time.monotonic() - started,
        by_rule=len(proofs),
    )


def _proof(answer: ProgramAnswer, trapped: int, *, triton_is_ours: bool) -> ProgramsProof:
    lost = [program for program in answer.programs if program.dialect == "triton" and program.status != "found"]
    left_out = [] if triton_is_ours else lost
    return ProgramsProof(
        programs=tuple(
            ProgramProof(
                program=f"{program.name} {program.key[:12]}",
                accepted=program.status == "found",
                reason="" if program.status == "found" else program.reason or "b12x does not find it",
            )
            for program in answer.programs
            if program not in left_out
        ),
        prepared=answer.proven,
        configurations=sum(case.configurations for case in answer.cases),
        compiler_runs=len(answer.compiles) + trapped,
        left_out=tuple(f"{program.name} (Triton)" for program in left_out),
        errors=tuple(f"{case.case} at {tokens} tokens: {why}" for case in answer.cases for tokens, why in case.refused),
        seconds=sum(answer.seconds.values()),
    )
