"""Restore as a container's entrypoint needs it: this host's cache root, its stores, its variables, and the proof if asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from kcache.errors import InstallError, KcacheError, ProbeError, TrustError
from kcache.local_cache import InstalledEntry, LocalCache
from kcache.probe.caches import cache_root, read_only_cache
from kcache.report import ERROR, HIT, RestoreReport
from kcache.store.base import Store
from kcache.store.open import is_pinned, open_store
from kcache.store.wrappers import MetricsStore, Wrapper
from kcache.values import replace
from kcache.workflows.deadline import Deadline
from kcache.workflows.kernels import in_use
from kcache.workflows.restore import RestoreRequest, restore
from kcache.workflows.target import Target, TargetRequest, find_target
from kcache.workflows.views import present_view

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from kcache.trust.policy import Policy
    from kcache.workflows.verify import Proof


def restore_here(
    request: RestoreRequest,
    where: TargetRequest,
    *,
    stores: Sequence[str],
    environ: Mapping[str, str],
    deadline_seconds: float,
    policy: str | None = None,
) -> RestoreReport:
    """Restores for the environment that `where` names, into the cache root in force.

    Args:
        stores: addresses, tried in order.
        deadline_seconds: bounds waiting and downloading.
        policy: the file that says which publishers are trusted, instead of the one in force here.

    Raises:
        KcacheError: nothing could be restored; see `kcache.workflows.restore.restore`.
    """
    deadline = Deadline.after(deadline_seconds)
    cache, target = here(where, environ)
    opened: list[MetricsStore] = []
    request = replace(request, python_path=environ.get("PYTHONPATH", ""), policy=policy_in_force(policy, environ))

    def attempt(cache: LocalCache) -> RestoreReport:
        left = len(stores)
        makers = [partial(_open, store, opened, cache, deadline, left=left - number) for number, store in enumerate(stores)]
        return restore(request, makers, cache, target, deadline)

    report: RestoreReport | None = None
    if (writable := _writable_instead_of(cache, environ)) is not None:
        with suppress(KcacheError):  # whatever it lacks, there is another place
            report = attempt(cache)
        if report is None or report.status != HIT:
            cache, report = writable, None
            target.remember_in(cache)
    if report is None:
        report = attempt(cache)
    return replace(
        report,
        warnings=(*_passed_over(environ, cache), *report.warnings),
        bytes_downloaded=sum(store.bytes_read for store in opened),
        http_requests=sum(map(_http_requests, opened)),
        env={**report.env, **_bounded_jobs(report, environ)},
    )


def policy_in_force(given: str | None, environ: Mapping[str, str]) -> Policy | None:
    """The policy of this host (see `kcache.trust.policy`), or None where there is none.

    Raises:
        TrustError: there is one, and it cannot be used.
    """
    if not given and not environ.get("KCACHE_POLICY") and not os.path.lexists("/etc/kcache/policy.toml"):
        return None  # as `find_policy` says, without importing it: most starts have none
    from kcache.trust.policy import find_policy, read_policy

    found = find_policy(given, environ)
    return None if found is None else read_policy(found)


def _writable_instead_of(cache: LocalCache, environ: Mapping[str, str]) -> LocalCache | None:
    """The cache to restore into where `cache` cannot be written and lacks something; None where it can, or none can."""
    root = cache_root(environ, os.geteuid()).path
    return None if root is None or Path(root) == cache.root else LocalCache(Path(root))


def _passed_over(environ: Mapping[str, str], cache: LocalCache) -> list[str]:
    """Why the directory that a person chose is not the one in use."""
    chosen = environ.get("KCACHE_DIR")
    if not chosen or Path(chosen) == cache.root:
        return []
    rejected = [line for line in cache_root(environ, os.geteuid()).rejected if line.startswith("KCACHE_DIR: ")]
    return [f"{line}; {cache.root} is used instead" for line in rejected]


def with_proof(
    report: RestoreReport, where: TargetRequest, environ: Mapping[str, str], policy: str | None = None
) -> RestoreReport:
    """The report with the proof of what was restored; a restore whose proof fails is an error.

    Raises:
        ProbeError: the fresh process gave no answer.
    """
    if not report.compiles_avoided and not any(kind.entries for kind in report.kinds.values()):
        return report
    _, target = here(where, environ)
    trusted = policy_in_force(policy, environ)
    proof = prove_restored(LocalCache(Path(report.cache_root)), target, {**environ, **report.env}, trusted)
    if proof["status"] == "proven":
        return replace(report, proof=proof)
    return replace(report, proof=proof, status=ERROR, reasons=(*report.reasons, why_unproven(proof)))


def why_unproven(proof: Mapping[str, Any]) -> str:
    """One line about a proof that failed; `kcache verify` has all of it."""
    lines = [*proof.get("refused", ())]
    lines += [
        f"{one['module']}: {one['error'] or 'not the restored library'}" for one in proof.get("modules", []) if _unused(one)
    ]
    for name, each in (("kernels", "kernel"), ("programs", "program"), ("tunings", "tuning")):
        part = proof.get(name) or {}
        lines += [str(line).rstrip(".") for line in part.get("errors", [])]
        lines += [f"{one[each]}: {one['reason']}" for one in part.get(name, []) if not one["accepted"]]
    why = "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")
    runs = f"{proof['compiler_runs']} compiler runs"
    return f"restored, and not proven: {': '.join(text for text in (runs, why) if text)}. `kcache verify` says all."


def _unused(module: Mapping[str, Any]) -> bool:
    return not (module["loaded"] and module["ours"])


def here(where: TargetRequest, environ: Mapping[str, str]) -> tuple[LocalCache, Target]:
    """The cache in force and the environment that is meant. A cache that was installed for this environment and cannot be written
    comes before the first place that can.

    Raises:
        InstallError: no directory can be written. ProbeError, UsageError, ManifestError: as `find_target` says.
    """
    root = cache_root(environ, os.geteuid())
    given = read_only_cache(environ)
    if root.path is None and given is None:
        raise InstallError("no directory can be written for the cache", why=root.reason, remedy="Mount one and set KCACHE_DIR.")
    target = find_target(where, environ, root)
    cache = LocalCache(Path(given or root.path or ""))
    if given is not None and root.path is not None and present_view(cache, target) is None:
        cache = LocalCache(Path(root.path))  # what is given was not made for this environment
    target.remember_in(cache)
    return cache, target


def needed_by_server(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a server for which nothing was restored: those that its import needs, and MAX_JOBS."""
    return {**cache_root(environ, os.geteuid()).exports, **_jobs(environ)}


def _open(address: str, opened: list[MetricsStore], cache: LocalCache, deadline: Deadline, *, left: int) -> MetricsStore:
    """A store that may take its share of the time: `left` stores, this one among them, have not been asked."""
    inner = open_store(address, deadline=deadline.at, stall=deadline.left() / left)
    if address.startswith(("hf://", "https://", "http://")):
        from kcache.workflows.one_stream import OneStream

        inner = OneStream(inner, address, cache, deadline)
    if is_pinned(address):
        from kcache.workflows.pinned import PinnedReads

        inner = PinnedReads(inner, cache)
    store = MetricsStore(inner)
    opened.append(store)
    return store


def _http_requests(store: Store) -> int:
    """How many requests a store has sent; none where it does not speak HTTP."""
    while isinstance(store, Wrapper):
        store = store.inner
    found: int = getattr(store, "http_requests", 0)
    return found


def _bounded_jobs(report: RestoreReport, environ: Mapping[str, str]) -> dict[str, str]:
    """MAX_JOBS for a server that will have to compile after all. FlashInfer otherwise lets ninja start a compiler on every core,
    which a memory limit does not survive (case B03). A value that was given is kept."""
    return {} if report.status == HIT else _jobs(environ)


def _jobs(environ: Mapping[str, str]) -> dict[str, str]:
    if "MAX_JOBS" in environ:
        return {}
    from kcache.probe.limits import build_jobs

    return {"MAX_JOBS": str(build_jobs(environ).jobs)}


def prove_restored(cache: LocalCache, target: Target, environ: Mapping[str, str], policy: Policy | None = None) -> dict[str, Any]:
    """Runs `kcache.workflows.verify.verify` on this environment's view and keeps the result as its receipt.

    Args:
        policy: what it does not let in is not proven; nothing is loaded then.

    Raises:
        ProbeError: there is nothing to prove, or the fresh process gave no answer.
    """
    present = present_view(cache, target) or {}
    modules, kernels = [str(module) for module in present.get("modules", [])], in_use(cache, target)
    programs = _programs_in_use(cache, target)
    tunings = _tunings_in_use(cache, target)
    if not modules and not kernels and not programs and not tunings:
        raise ProbeError("nothing is restored for this environment", remedy="Run `kcache restore` first.")
    document: dict[str, Any] = {"view": present.get("view"), "status": "proven", "compiler_runs": 0}
    if policy is not None:
        from kcache.workflows.trusted import refused_entries

        rooms = [present, *(cache.read(room, target.id) for room in ("kernels", "programs", "tunings"))]
        if refused := refused_entries(cache, rooms, policy):
            return document | {"status": "failed", "refused": refused}
    if modules:
        document |= run_proof(cache, target, environ, modules).to_json()
    if kernels:
        from kcache.workflows.verify_kernels import prove_kernels

        proof = prove_kernels(target, environ, kernels)
        document["kernels"] = proof.to_json()
        document["compiler_runs"] += proof.compiler_runs
        document["status"] = document["status"] if proof.proven else "failed"
    if programs:
        from kcache.workflows.verify_programs import prove_programs

        proven = prove_programs(target, environ, programs)
        document["programs"] = proven.to_json()
        document["compiler_runs"] += proven.compiler_runs
        document["status"] = document["status"] if proven.proven else "failed"
    if tunings:
        from kcache.workflows.verify_tunings import prove_tunings

        found = prove_tunings(target, environ, tunings)
        document["tunings"] = found.to_json()
        document["status"] = document["status"] if found.proven else "failed"
    try:
        cache.write("proofs", target.id, document)
    except (InstallError, TrustError):
        document["receipt"] = "not kept: the cache cannot be written"
    return document


def _programs_in_use(cache: LocalCache, target: Target) -> list[InstalledEntry]:
    if cache.read("programs", target.id) is None:
        return []
    from kcache.workflows.programs import programs_in_use

    return programs_in_use(cache, target)


def _tunings_in_use(cache: LocalCache, target: Target) -> list[InstalledEntry]:
    if cache.read("tunings", target.id) is None:
        return []
    from kcache.workflows.tunings import tunings_in_use

    return tunings_in_use(cache, target)


def run_proof(cache: LocalCache, target: Target, environ: Mapping[str, str], modules: Sequence[str]) -> Proof:
    """The proof for some modules of the present view."""
    from kcache.workflows.verify import verify

    described = target.environment.fact("gpu.source").value != "gpu"
    present = present_view(cache, target) or {}
    restored = [cache.base, *([target.aot_directory()] if present.get("into_package") else [])]
    return verify(
        modules,
        python=target.python,
        environ=environ,
        described=target.environment.archs if described else (),
        cuda_release=target.environment.fact("cuda.runtime").value or "",
        preload=target.preload() if target.environment.fact("torch.cuda").absent else [],
        restored=restored,
    )
