"""Proof for CuTe-DSL kernels: a fresh process makes the calls that ask for them, and FlashInfer's own loader takes every one.

The calls are those that the entry was built for, through FlashInfer's public API, on tensors without bytes and with the entry's
GPU described, so that it works on the GPU's host and on any other. FlashInfer loads each object from where it lies; its compiler
(`cute.compile`) and every compiler on PATH are trapped, and each use is counted. Nothing is launched.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kcache.archs import arch_list_entry
from kcache.errors import ProbeError
from kcache.gpu_products import from_description
from kcache.kinds.cute_kinds import CUTE_KINDS, operation_of
from kcache.local_cache import InstalledEntry
from kcache.manifest import Manifest
from kcache.values import dataclass
from kcache.workflows.cute_build import OPERATIONS, DryRun, DryRunAnswer, check_kernels
from kcache.workflows.target import Target
from kcache.workflows.verify import trap_compilers, trapped_starts


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelProof:
    """One kernel in the fresh process. `reason`: why FlashInfer did not take it; empty if it did."""

    kernel: str
    accepted: bool
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "accepted": self.accepted, "reason": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsProof:
    """What the fresh processes showed.

    calls:         how many calls of the public API asked for them: a case and a token count each.
    compiler_runs: uses of `cute.compile` for a kernel that FlashInfer keeps on disk, and starts of other compilers.
    left_out:      kernels that the calls compile anyway, since FlashInfer keeps them nowhere.
    errors:        calls that FlashInfer refused.
    """

    kernels: tuple[KernelProof, ...]
    calls: int
    compiler_runs: int
    left_out: tuple[str, ...]
    errors: tuple[str, ...]
    seconds: float

    @property
    def proven(self) -> bool:
        return bool(self.kernels) and not self.compiler_runs and not self.errors and all(k.accepted for k in self.kernels)

    def to_json(self) -> dict[str, Any]:
        return {
            "status": "proven" if self.proven else "failed",
            "compiler_runs": self.compiler_runs,
            "calls": self.calls,
            "kernels": [kernel.to_json() for kernel in self.kernels],
            "left_out": list(self.left_out),
            "errors": list(self.errors),
            "seconds": round(self.seconds, 3),
        }


def prove_kernels(target: Target, environ: Mapping[str, str], entries: Sequence[InstalledEntry]) -> KernelsProof:
    """The proof for the kernels of these entries, in one process for each operation and described GPU.

    Args:
        environ: the server's variables.

    Raises:
        ProbeError, CollectError: a process gave no answer, or this FlashInfer is not as expected.
    """
    groups: dict[str, list[InstalledEntry]] = {}
    for entry in entries:
        kernels = entry.manifest.kernels
        assert kernels is not None
        release = entry.manifest.key.ingredients["cuda.release"]
        if not re.fullmatch(r"[0-9]+\.[0-9]+", release):
            raise ProbeError(f"{entry.manifest.key.title} cannot be proven", why=f"{release!r} is no CUDA release such as 13.0")
        group = json.dumps([_operation(entry.manifest), release, dict(kernels.gpu)], sort_keys=True)
        groups.setdefault(group, []).append(entry)
    proofs = [_prove(target, environ, group) for group in groups.values()]
    return KernelsProof(
        kernels=tuple(kernel for proof in proofs for kernel in proof.kernels),
        calls=sum(proof.calls for proof in proofs),
        compiler_runs=sum(proof.compiler_runs for proof in proofs),
        left_out=tuple(dict.fromkeys(line for proof in proofs for line in proof.left_out)),
        errors=tuple(line for proof in proofs for line in proof.errors),
        seconds=sum(proof.seconds for proof in proofs),
    )


def _operation(manifest: Manifest) -> str:
    """Whose calls ask for an entry's kernels: its kind's, or, of kernels that were recorded, their names themselves."""
    named = {str(case["operation"]) for case in (manifest.kernels.cases if manifest.kernels else ()) if "operation" in case}
    kinds_own = {operation_of(manifest.key.kind)} if manifest.key.kind in CUTE_KINDS else set()
    operations = sorted(named or kinds_own)
    if len(operations) != 1 or operations[0] not in OPERATIONS:
        raise ProbeError(
            f"{manifest.key.title} cannot be proven",
            why=f"this kcache does not know what asks for kernels of {', '.join(operations) or manifest.key.kind}",
            remedy="Use the kcache version that built it, or a newer one.",
        )
    return operations[0]


def _prove(target: Target, environ: Mapping[str, str], entries: Sequence[InstalledEntry]) -> KernelsProof:
    manifests = [entry.manifest for entry in entries]
    first = manifests[0].kernels
    if first is None or target.base is None:
        raise ProbeError("it is not known where FlashInfer's cache lies", remedy="Verify on the host that will use it.")
    cases = [
        {**case, "id": f"{manifest.key.title} {case['id']}"}
        for manifest in manifests
        for case in (manifest.kernels.cases if manifest.kernels else ())
    ]
    with tempfile.TemporaryDirectory(prefix="kcache-verify-") as name:
        log = Path(name) / "compilers"
        run = DryRun(
            python=target.python,
            workspace=target.base,
            gpu=from_description(first.gpu),
            cuda=manifests[0].key.ingredients["cuda.release"],
            cases=cases,
            environ={**environ, **trap_compilers(Path(name), log)},
            operation=_operation(manifests[0]),
            arch_list=" ".join(map(arch_list_entry, target.environment.archs)),
        )
        answer = check_kernels(run)
        trapped = len(trapped_starts(log))
    return proof_of(answer, manifests, sum(len(case["tokens"]) for case in cases), trapped)


def proof_of(answer: DryRunAnswer, manifests: Sequence[Manifest], calls: int, trapped: int) -> KernelsProof:
    """What an answer proves of entries: every kernel of theirs has to be asked for, and every one asked for to be taken."""
    asked = [
        KernelProof(kernel=kernel.name, accepted=kernel.status == "accepted", reason=kernel.reason) for kernel in answer.kernels
    ]
    files = {artifact.path.rpartition("/")[2].removesuffix(".o") for one in manifests for artifact in one.artifacts}
    unasked = sorted(files - {kernel.kernel for kernel in answer.kernels})
    return KernelsProof(
        kernels=(
            *asked,
            *(KernelProof(kernel=name, accepted=False, reason="no call of its entry asks for it") for name in unasked),
        ),
        calls=calls,
        compiler_runs=answer.compiles + trapped,
        left_out=tuple(f"{one.kernel} ({one.where})" for one in answer.left_out),
        errors=tuple(f"{error.case} at {error.tokens} tokens: {error.error}" for error in answer.errors),
        seconds=sum(answer.seconds.values()),
    )
