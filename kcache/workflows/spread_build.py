"""How one `kcache build` is cut into parts that any machine of a cluster can build by itself, and put together again.

A part is a command line of its own, for one kind or module and one architecture or GPU, and what it needs of a machine. Parts
share nothing, so one that was lost is built again elsewhere. What they built comes back as files; whoever cut the build writes
them into one directory, and one `kcache publish` publishes that. No Ray here: `kcache.workflows.ray_build`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kcache import fsops
from kcache.archs import capability
from kcache.errors import UsageError
from kcache.gpu_products import product
from kcache.plan import Job
from kcache.probe.limits import BYTES_PER_JOB, Jobs
from kcache.workflows.build import BuildReport, BuildRequest
from kcache.workflows.build_entries import FAILED, EntryReport, ModuleReport
from kcache.workflows.plan import make_plan

_MANIFEST, _ENVIRONMENT = "manifest.toml", "environment.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part of a build.

    words: of `kcache build`, without -o and --jobs; files that they name lie beside each other in the directory it runs in.
    cores: processors, and compilers at once. memory: bytes. files: what words name -> text.
    gpu:   the product that the machine must have, for a part that tunes; empty for all others.
    """

    name: str
    words: tuple[str, ...]
    cores: int
    memory: int
    files: Mapping[str, str] = field(default_factory=dict)
    gpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """What a part left: the document of its --json, or why there is none, and its entries' files by name."""

    document: Mapping[str, Any] = field(default_factory=dict)
    failed: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)


def cut(request: BuildRequest, manifests: Sequence[str], env_file: str | None, machine: str) -> list[Part]:
    """The parts of a request, by name.

    Args:
        manifests: the files of its recipes. env_file: of its environment. machine: of the cluster, as `uname -m` says it.

    Raises:
        UsageError: nothing is left, or the request says only what this host can find out by itself.
    """
    if request.collect or request.retune:
        raise UsageError("what this machine tuned is not at hand elsewhere", remedy="--collect and --retune go without --engine.")
    found = _of_recipes(request, manifests, machine) if request.recipes else _of_names(request)
    if not found:
        raise UsageError("nothing is left to build", remedy="`kcache plan` says what manifests ask for.")
    common: list[str] = ["--python", request.python] if request.python else []
    files: dict[str, str] = {}
    if env_file is not None:
        files = {_ENVIRONMENT: Path(env_file).read_text(encoding="utf-8")}
        common += ["--env", _ENVIRONMENT]
    return [
        replace(part, words=(*part.words, *common), files={**part.files, **files})
        for part in sorted(found, key=lambda part: part.name)
    ]


def _of_names(request: BuildRequest) -> list[Part]:
    if not request.archs:
        raise UsageError("which architectures are the entries for?", remedy="Name them with --arch: a cluster has no GPU to ask.")
    named = [("--kinds", kind) for kind in request.kinds] + [("--modules", module) for module in request.modules]
    return [_part(request, f"{name}-{arch}", (option, name, "--arch", arch)) for option, name in named for arch in request.archs]


def _of_recipes(request: BuildRequest, manifests: Sequence[str], machine: str) -> list[Part]:
    plan = make_plan(list(zip(manifests, request.recipes, strict=True)), None, machine=machine, kinds=request.kinds)
    capabilities = {capability(arch) for arch in request.archs}
    gpus = {product(gpu).slug for gpu in request.gpus}

    def is_asked(job: Job) -> bool:
        return (not capabilities or capability(job.arch) in capabilities) and (not gpus or not job.gpu or job.gpu in gpus)

    parts = []
    for job in filter(is_asked, plan.jobs):
        words = list(job.command[2:-2])  # after `kcache build`, before `-o DIR`
        files = {}
        if "--manifest" in words:
            place = words.index("--manifest") + 1
            files = {_MANIFEST: Path(words[place]).read_text(encoding="utf-8")}
            words[place] = _MANIFEST
        parts.append(replace(_part(request, job.name, tuple(words)), files=files, gpu=job.needs))
    return parts


def _part(request: BuildRequest, name: str, words: tuple[str, ...]) -> Part:
    cores = request.jobs or 1
    return Part(name=name, words=words, cores=cores, memory=cores * BYTES_PER_JOB)


def put_together(
    output: Path, done: Mapping[str, Done], *, cores: int, seconds: float, warnings: Sequence[str] = ()
) -> BuildReport:
    """Writes down what the parts built, each archive before its manifest, and says it as one report."""
    output.mkdir(parents=True, exist_ok=True)
    entries: list[EntryReport] = []
    modules: list[ModuleReport] = []
    told = list(warnings)
    facts: dict[str, Any] = {}
    for name, part in sorted(done.items()):
        for file in sorted(part.files, key=lambda one: (one.endswith(".json"), one)):
            fsops.write_bytes(output / file, part.files[file])
        if part.failed:
            entries.append(EntryReport(kind=name, arch="", modules=(), status=FAILED, reason=part.failed))
            continue
        entries += [_entry(one, output) for one in part.document["entries"]]
        modules += [ModuleReport(**{**one, "log": ""}) for one in part.document["modules"]]
        told += part.document["warnings"]
        facts = {"flashinfer": part.document["flashinfer"]} if part.document["flashinfer"] else facts
    return BuildReport(
        entries=tuple(entries),
        modules=tuple(modules),
        warnings=tuple(dict.fromkeys(told)),
        output=output,
        jobs=Jobs(jobs=cores, reason="for each part of a build that is spread over a cluster"),
        seconds=seconds,
        toolkit=None,
        facts=facts,
    )


def _entry(document: Mapping[str, Any], output: Path) -> EntryReport:
    places = {name: str(output / Path(document[name]).name) if document[name] else "" for name in ("manifest", "archive")}
    return EntryReport(**{**document, **places, "modules": tuple(document["modules"])})


def read_done(directory: Path, code: int, said: str, why: str) -> Done:
    """What a part left behind. `said`: its stdout; `why`: its stderr."""
    try:
        document = json.loads(said)
        entries = document["entries"]
    except (ValueError, KeyError, TypeError):
        return Done(failed=f"exit code {code}: {' / '.join(why.strip().splitlines()[-3:]) or 'it said nothing'}")
    names = [Path(one[name]).name for one in entries if one["status"] != FAILED for name in ("archive", "manifest")]
    return Done(document=document, files={name: (directory / name).read_bytes() for name in names})
