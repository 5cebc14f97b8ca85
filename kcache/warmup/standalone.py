"""`kcache warmup`: builds what is missing here as entries, and installs them, so that the next start accepts them without ninja.

In a process of its own, on a host with or without a GPU: what is installed is looked at (a restore without a store), `kcache
build` makes an entry of each module that is missing, and a restore from a store of one entry installs it. Each module is
installed as soon as it is done, so a deadline or a kill costs only what is not finished; what was compiled of that is kept for
the next run. A module that another process builds is waited for, and then found in place.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcache import digest, fsops
from kcache.archs import arch_list_entry
from kcache.errors import KcacheError, WarmupError
from kcache.report import HIT
from kcache.warmup.keeping import keep_entries
from kcache.warmup.locks import building
from kcache.warmup.report import BUILT, FAILED, LATE, PRESENT, Beat, ModuleReport, WarmupReport
from kcache.warmup.stopping import LateError, Stop, run_guarded
from kcache.workflows.deadline import Deadline
from kcache.workflows.entrypoint import here, policy_in_force, restore_here
from kcache.workflows.resolve import Wanted
from kcache.workflows.restore import RestoreRequest

if TYPE_CHECKING:
    from kcache.local_cache import LocalCache
    from kcache.report import RestoreReport
    from kcache.workflows.target import Target, TargetRequest

ROOM = "warm"
"""Below the cache root: work directories and locks of modules, and which modules sampling reaches here."""

OFFERED = "offered"
"""For `StandaloneRequest.keep`: a directory of this name in the room, whose entries are going to be published."""

_GRACE = 15.0
"""Seconds in which `kcache build` ends its compilers and writes down what is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneRequest:
    """What to warm up.

    kinds:     `sampling`, and with manifests the kinds that those name.
    modules:   single nvcc modules.
    manifests: paths of build manifests.
    jobs:      compilers at once; None to decide by cores and memory.
    keep:      directory in which what is built is kept as entries; `OFFERED` for one in the cache, None for nowhere.
    """

    kinds: tuple[str, ...] = ("sampling",)
    modules: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()
    jobs: int | None = None
    keep: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneReport:
    """What was done, and the variables with which a server uses it.

    kept:     directory with what was built, as entries; empty if nothing was.
    warnings: what went wrong beside the warm-up itself, one line each.
    """

    warmup: WarmupReport
    env: Mapping[str, str] = field(default_factory=dict)
    cache_root: str = ""
    kept: str = ""
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        own = {"env": dict(self.env), "cache_root": self.cache_root, "kept": self.kept, "warnings": list(self.warnings)}
        return {**self.warmup.to_json(), **own}


def warm_here(
    request: StandaloneRequest,
    where: TargetRequest,
    environ: Mapping[str, str],
    *,
    deadline_seconds: float,
    heartbeat: Callable[[Beat], object] = lambda beat: None,
    policy: str | None = None,
) -> StandaloneReport:
    """Builds and installs what is missing in this environment.

    Args:
        deadline_seconds: bounds everything; what is finished by then is installed.
        heartbeat: called about once a second while anything is built.
        policy: the file that says which publishers are trusted, instead of the one in force here.

    Raises:
        WarmupError: there is such a policy: what is compiled here is signed by nobody, so no restore would let it in.
        KcacheError: this environment cannot be found out, or nothing can be written.
    """
    if policy_in_force(policy, environ) is not None:
        raise WarmupError(
            "a policy is in force, and what is compiled here would not be signed",
            remedy="Let the farm build and sign it, or let the engine call kcache.warmup, which installs no entries.",
        )
    started = time.monotonic()
    run = _Run(request, where, environ, Stop(deadline_seconds), heartbeat)
    run.all()
    report = WarmupReport(
        modules=tuple(run.done[name] for name in run.wanted if name in run.done),
        reasons=tuple(run.reasons),
        agreed=tuple(sorted(name for name, module in run.done.items() if module.ready)),
        seconds=time.monotonic() - started,
    )
    return StandaloneReport(
        warmup=report, env=run.env, cache_root=str(run.cache.root), kept=run.kept, warnings=tuple(run.warnings)
    )


class _Run:
    """One warm-up."""

    def __init__(
        self,
        request: StandaloneRequest,
        where: TargetRequest,
        environ: Mapping[str, str],
        stop: Stop,
        heartbeat: Callable[[Beat], object],
    ) -> None:
        self.request, self.where, self.environ, self.stop, self.heartbeat = request, where, environ, stop, heartbeat
        self.cache: LocalCache
        self.target: Target
        self.cache, self.target = here(where, environ)
        self.wanted: list[str] = []
        self.done: dict[str, ModuleReport] = {}
        self.reasons: list[str] = []
        self.env: Mapping[str, str] = {}
        self.kept = ""
        self.warnings: list[str] = []
        self._models: tuple[str, ...] = ()
        self._installing = threading.Lock()
        self._doing: set[str] = set()

    def all(self) -> None:
        from kcache.recipe import read_recipe

        started = time.monotonic()
        recipes = {path: read_recipe(path) for path in self.request.manifests}
        self._models = tuple(recipe.model.name for recipe in recipes.values())
        before = self._installed()
        self.env = before.env
        names = list(dict.fromkeys([*self._sampling(before), *self.request.modules]))
        kernels = {f"{recipe.model.name} ({path})": path for path, recipe in recipes.items()}
        self.wanted = [*names, *kernels]
        have = _modules_of(before)
        for name in names:
            if name in have:
                self.done[name] = ModuleReport(name=name, status=PRESENT)
        for name, path in kernels.items():
            made = self._made_before(path)
            if made and made <= {entry.fingerprint for kind in before.kinds.values() for entry in kind.entries}:
                self.done[name] = ModuleReport(name=name, status=PRESENT)
        missing = [name for name in self.wanted if name not in self.done]
        if not missing:
            return
        fsops.ensure_directory(self.cache.base / ROOM, root=self.cache.root)
        self._build(missing, kernels, started)
        after = self._installed()
        self.env = after.env
        for name in names:  # installed is not accepted: FlashInfer's own rules have the last word
            if self.done[name].ready and name not in _modules_of(after):
                reasons = "; ".join(reason for kind in after.kinds.values() for reason in kind.reasons)
                self.done[name] = replace(self.done[name], status=FAILED, reason=reasons or "FlashInfer would not use it")

    def _restored(self, stores: Sequence[str]) -> RestoreReport:
        request = RestoreRequest(asked=Wanted(models=self._models), lock_timeout=max(1.0, self.stop.left()))
        return restore_here(
            request, self.where, stores=stores, environ=self.environ, deadline_seconds=max(10.0, min(120.0, self.stop.left()))
        )

    def _installed(self) -> RestoreReport:
        """What is in place, as FlashInfer will see it."""
        return self._restored(())

    def _sampling(self, before: RestoreReport) -> list[str]:
        """The modules that sampling reaches: as an installed entry says, as was found out earlier, or by asking FlashInfer."""
        if "sampling" not in self.request.kinds:
            return []
        kind = before.kinds.get("sampling")
        if kind is not None and kind.status == HIT:
            return sorted({module for entry in kind.entries for module in entry.modules})
        known = (self.cache.read(ROOM, self.target.id) or {}).get("sampling")
        if isinstance(known, list) and known:
            return [str(name) for name in known]
        found = sorted({name for arch in self._archs() for name in self._ask(arch)})
        fsops.ensure_directory(self.cache.base / ROOM, root=self.cache.root)
        self.cache.write(ROOM, self.target.id, {"sampling": found})
        return found

    def _archs(self) -> tuple[str, ...]:
        if archs := self.target.environment.archs:
            return archs
        raise WarmupError(
            "there is no GPU to build for",
            why=self.target.environment.fact("gpu.source").undetermined,
            remedy="On a host without one, name the architecture of the servers: --arch 9.0a.",
        )

    def _ask(self, arch: str) -> list[str]:
        from kcache.probe.specs import Question, ask

        release = self.target.environment.fact("cuda.runtime").value or "13.0"
        with tempfile.TemporaryDirectory(prefix="kcache-warmup-") as folder:
            own = {"FLASHINFER_WORKSPACE_BASE": folder, "FLASHINFER_CUDA_ARCH_LIST": arch_list_entry(arch)}
            question = Question(arch=arch, cuda_release=release, kinds=("sampling",), offline=True)
            answer = ask(self.target.python, question, {**self.environ, **own}, Path(folder))
        return [str(name) for name in answer["kinds"]["sampling"]["modules"]]

    def _build(self, missing: Sequence[str], kernels: Mapping[str, str], started: float) -> None:
        """Each thing in a thread of its own, as many as compilers may run; the heart beats in this one."""
        from kcache.probe.limits import build_jobs

        jobs = self.request.jobs or build_jobs(self.environ).jobs
        width = max(1, min(len(missing), jobs))
        waiting, lock = list(missing), threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    name = waiting.pop(0)
                    self._doing.add(name)
                self.done[name] = self._one(name, kernels.get(name), max(1, jobs // width))
                self._doing.discard(name)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(width)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(1.0)
                    self.heartbeat(
                        Beat(
                            elapsed=time.monotonic() - started,
                            doing=tuple(sorted(self._doing)),
                            done=len(self.done),
                            total=len(self.wanted),
                        )
                    )
        except BaseException:
            self.stop.call()  # the compilers end, and then the threads
            for thread in threads:
                thread.join(30.0)
            raise

    def _one(self, name: str, manifest: str | None, jobs: int) -> ModuleReport:
        started = time.monotonic()
        try:
            status, reason = self._make(name, manifest, jobs), ""
        except LateError as error:
            status, reason = LATE, str(error)
        except KcacheError as error:
            status, reason = FAILED, str(error)
        except Exception as error:  # one module's failure must not cost the others  # noqa: BLE001
            status, reason = FAILED, f"{type(error).__name__}: {error}"
        return ModuleReport(name=name, status=status, seconds=time.monotonic() - started, reason=reason)

    def _make(self, name: str, manifest: str | None, jobs: int) -> str:
        self.stop.check()
        room = self.cache.base / ROOM
        safe = name if manifest is None else "kernels"
        with building(room / f"{safe}.lock", self.stop) as honest:
            if manifest is None and name in _modules_of(self._installed_now()):
                return PRESENT
            work = room / "work" / (safe if honest else f"{safe}-{os.getpid()}-{threading.get_ident()}")
            work.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix="made-", dir=room) as made:
                self._kcache_build(name, manifest, Path(made) / "entries", work, jobs)
                self._install(Path(made))
                self._keep(Path(made) / "entries")
                if manifest is not None:
                    self._remember(manifest, Path(made) / "entries")
            shutil.rmtree(work, ignore_errors=True)  # what it was for is installed
        return BUILT

    def _question(self, manifest: str) -> str:
        """Names a build manifest's bytes and the GPUs that it is asked for here."""
        asked = [self.target.id, *self._archs(), *self.where.gpus]
        return digest.of_bytes("\n".join(asked).encode() + b"\n\n" + Path(manifest).read_bytes()).removeprefix("sha256:")[:32]

    def _made_before(self, manifest: str) -> set[str]:
        """The entries that an earlier warm-up made of this manifest; empty if none did."""
        return set((self.cache.read(ROOM, self._question(manifest)) or {}).get("entries", []))

    def _remember(self, manifest: str, entries: Path) -> None:
        from kcache.workflows.build_output import read_build_output

        made = sorted(entry.manifest.fingerprint for entry in read_build_output(entries))
        self.cache.write(ROOM, self._question(manifest), {"entries": made})

    def _keep(self, entries: Path) -> None:
        """What was built is kept where that was asked for. It is installed already, so a full disk there costs nothing else."""
        if (named := self.request.keep) is None:
            return
        keep = self.cache.base / ROOM / OFFERED if named == OFFERED else Path(named).absolute()
        try:
            with self._installing:
                keep_entries(entries, keep)
            self.kept = str(keep)
        except OSError as error:
            self.warnings.append(f"what was built could not be kept in {keep}: {error}")

    def _installed_now(self) -> RestoreReport:
        with self._installing:
            return self._installed()

    def _kcache_build(self, name: str, manifest: str | None, output: Path, work: Path, jobs: int) -> None:
        """`kcache build` of one thing, in a process that ends with this one.

        Raises:
            WarmupError: it failed, with the reason that it gave. LateError: the end came first.
        """
        words = ["-m", "kcache", "build", "-o", str(output), "--work-dir", str(work), "--jobs", str(jobs), "--json"]
        words += ["--modules", name] if manifest is None else ["--manifest", manifest]
        words += ["--arch", ",".join(map(arch_list_entry, self._archs()))]
        words += [word for gpu in self.where.gpus for word in ("--gpu", gpu)] if manifest is not None else []
        words += ["--python", self.where.python] if self.where.python else []
        code, told = run_guarded([sys.executable, *words], work, self.stop, self.environ, _GRACE)
        if code not in (0, 3):
            raise WarmupError(f"{name} could not be built", why=_why(told), remedy=f"What was compiled is kept in {work}.")

    def _install(self, made: Path) -> None:
        from kcache.store.open import open_store
        from kcache.workflows.publish import publish

        store = made / "store"
        publish(made / "entries", open_store(str(store), create=True, writing=True, deadline=Deadline.after(600.0).at))
        with self._installing:
            self._restored((str(store),))


def _modules_of(report: RestoreReport) -> set[str]:
    """The nvcc modules that FlashInfer will load as they were installed."""
    return {module for kind in report.kinds.values() for entry in kind.entries for module in entry.modules}


def _why(told: str) -> str:
    """The reason in what `kcache build --json` printed: its failed modules, else its last line."""
    begin = told.find("{")
    try:
        document = json.JSONDecoder().raw_decode(told[begin:])[0] if begin >= 0 else {}
        reasons = [module["reason"] for module in document["modules"] if module.get("reason")]
        if reasons:
            return "; ".join(reasons)[:600]
    except (ValueError, KeyError, TypeError):
        pass
    lines = [line for line in told.strip().splitlines() if line.strip()]
    return lines[-1][:600] if lines else "it said nothing"
