"""Runs the dry run in a child process: names, compiles or checks an operation's CuTe-DSL kernels for a described GPU.

The child imports FlashInfer once and compiles in processes that it forks, so that a kernel that fails, crashes or hangs loses
only itself, and a second core is worth a second core. This module starts it, passes its progress on, bounds its time, and takes
its answer apart. It decides nothing about what to build (`kcache.recipe_shapes`) and installs nothing (`kcache.kinds.cute_dsl`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kcache import archs
from kcache.errors import CollectError, ProbeError
from kcache.gpu_products import GpuProduct
from kcache.kinds.cute_dsl import relative_key_files
from kcache.workflows import child
from kcache.workflows.child import Progress

SECONDS_PER_KERNEL = 600.0
"""The slowest kernel seen took 12 s on a busy core; ten minutes is no compilation any more."""

SECONDS_BEFORE_KERNELS = 900.0
"""For importing FlashInfer and walking every case; a minute was the longest seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel that FlashInfer's dispatch asks its disk cache for.

    name:     as FlashInfer prints it: module directory and kernel.
    module:   the directory below `cached_ops`.
    path:     where its object lies (or would lie).
    cases:    case -> token counts that ask for it.
    fallback: asked for only where a direct micro kernel, compiled on the GPU, turns out not to be launchable.
    status:   `asked` (mode names); `built`, `present` (was there already), `failed`, `crashed`, `timeout`, `skipped` (mode
              build); `accepted`, `refused` (mode check).
    reason:   why it failed or is refused; empty otherwise.
    """

    name: str
    kernel: str
    module: str
    path: str
    cases: Mapping[str, tuple[int, ...]]
    fallback: bool
    status: str
    reason: str = ""
    seconds: float = 0.0
    size: int = 0
    sha256: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A kernel that this FlashInfer compiles in every process, and where; or (kind `triton`) one that Triton compiles."""

    kind: str
    kernel: str
    where: str
    cases: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseError:
    """What FlashInfer said of one case: at which token count (0: while it was set up), and what."""

    case: str
    tokens: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunAnswer:
    """What a dry run found.

    package:   the flashinfer package's directory, spelt as FlashInfer spells it.
    cache_tag: `sys.implementation.cache_tag` of the child's Python; `soabi` its `SOABI`.
    stack:     what the kernels' key is made of in the child's Python: normalised name -> version of torch, apache-tvm-ffi, triton
               and every nvidia-cutlass-dsl* distribution.
    jit_dir:   FlashInfer's `cached_ops` directory of the run.
    meta:      module directory -> the `meta.json` that FlashInfer expects in it, in the child's own environment.
    sources:   module directory -> the files that FlashInfer hashes for it, relative to `package`, as often as it lists them.
    key_files: the same files of all modules, absolute.
    compiles:  how often its compiler was asked in mode check.
    seconds:   `import`, `walk`, `build`.
    """

    flashinfer: str
    package: str
    cache_tag: str
    soabi: str
    stack: Mapping[str, str]
    jit_dir: str
    meta: Mapping[str, Mapping[str, Any]]
    sources: Mapping[str, tuple[str, ...]]
    key_files: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    left_out: tuple[LeftOut, ...]
    errors: tuple[CaseError, ...]
    compiles: int
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> tuple[Kernel, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.status in ("failed", "crashed", "timeout", "refused"))


OPERATIONS = {"b12x": "b12x MoE", "gdn": "gated delta rule", "recorded": "recorded kernels"}
"""Operations that have a file of calls beside the child's script, and what people call them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """One run of the child.

    python:    the interpreter that has FlashInfer.
    workspace: FLASHINFER_WORKSPACE_BASE; objects are written below it.
    cuda:      the CUDA release of the target, such as `13.0`.
    cases:     see `kcache.recipe_shapes.dry_run_cases` (b12x).
    only:      names of the kernels to build; all where None. The way to split one build over hosts.
    operation: whose kernels; one of `OPERATIONS`.
    arch_list: FLASHINFER_CUDA_ARCH_LIST of a host with several kinds of GPU, which names FlashInfer's directory; None for `gpu`
               alone.
    """

    python: str
    workspace: str
    gpu: GpuProduct
    cuda: str
    cases: Sequence[Mapping[str, Any]]
    environ: Mapping[str, str]
    only: Sequence[str] | None = None
    operation: str = "b12x"
    arch_list: str | None = None

    def request(self, mode: str, answer: str, jobs: int, seconds_per_kernel: float) -> dict[str, Any]:
        """The child's request (`REQUEST` in its script)."""
        major, minor = (int(part) for part in self.cuda.split(".")[:2])
        arch = archs.flashinfer_arch(self.gpu.arch, (major, minor))
        return {
            "mode": mode,
            "operation": self.operation,
            "answer": answer,
            "workspace": self.workspace,
            "gpu": self.gpu.describe(),
            "cuda": self.cuda,
            "cute_dsl_arch": archs.cute_dsl_arch(arch),
            "arch_list": self.arch_list or archs.arch_list_entry(arch),
            "jobs": jobs,
            "seconds_per_kernel": seconds_per_kernel,
            "only": None if self.only is None else list(self.only),
            "cases": [dict(case) for case in self.cases],
        }


def name_kernels(run: DryRun) -> DryRunAnswer:
    """Which kernels would be asked for; compiles nothing. Raises as `compile_kernels`."""
    return _run(run, "names", limit=SECONDS_BEFORE_KERNELS)


def check_kernels(run: DryRun) -> DryRunAnswer:
    """Whether FlashInfer's own loader takes each kernel from where it lies; compiles nothing. Raises as `compile_kernels`."""
    return _run(run, "check", limit=SECONDS_BEFORE_KERNELS)


def compile_kernels(
    run: DryRun,
    *,
    jobs: int,
    seconds_per_kernel: float = SECONDS_PER_KERNEL,
    limit: float | None = None,
    progress: Progress | None = None,
) -> DryRunAnswer:
    """Compile and export every kernel that FlashInfer asks for, at most `jobs` at a time.

    A kernel that fails, crashes or takes longer than `seconds_per_kernel` has that status in the answer; the others are built.

    Args:
        limit: seconds for the whole run; where None, enough for every kernel to take as long as it may.

    Raises:
        ProbeError: this FlashInfer is not as the dry run expects, or cannot be imported.
        CollectError: the child ended without an answer, or took longer than `limit`.
    """
    return _run(run, "build", jobs=jobs, seconds_per_kernel=seconds_per_kernel, limit=limit, progress=progress)


def _run(
    run: DryRun,
    mode: str,
    *,
    jobs: int = 1,
    seconds_per_kernel: float = SECONDS_PER_KERNEL,
    limit: float | None,
    progress: Progress | None = None,
) -> DryRunAnswer:
    document, ended = child.run(
        run.python,
        "cute_dry_run.py",
        lambda answer: run.request(mode, answer, jobs, seconds_per_kernel),
        environ=run.environ,
        jobs=jobs,
        seconds_before=SECONDS_BEFORE_KERNELS,
        seconds_per_job=seconds_per_kernel,
        limit=limit,
        progress=progress,
    )
    return _answer(document, run.operation, mode, ended)


def _answer(document: dict[str, Any] | None, operation: str, mode: str, ended: str) -> DryRunAnswer:
    if document is None:
        raise CollectError(
            "the process that compiles CuTe-DSL kernels gave no answer",
            why=ended,
            remedy="Objects that were finished lie in the workspace and are taken over by the next run.",
        )
    if error := document.get("error"):
        asked = "; ".join(f"{item['case']} at {item['tokens']} tokens" for item in error["asked"][:3])
        expected = error["kind"] == "assumption"
        label = OPERATIONS[operation]
        raise ProbeError(
            f"this FlashInfer's {label} is not as kcache expects" if expected else f"the {label} dry run failed",
            why=f"{error['what']}; asked for were {asked or 'no cases'}",
            remedy="Leave its kind out for this FlashInfer, and report it with this message.",
        )
    return parse_answer(document, mode)


def parse_answer(document: Mapping[str, Any], mode: str) -> DryRunAnswer:
    """The child's answer as values. The child is ours: a malformed answer is a defect, and raises KeyError.

    Raises:
        ProbeError: FlashInfer hashes a file that is none of its own.
    """
    left_out = [
        LeftOut(kind="cute-dsl", kernel=item["kernel"], where=item["where"], cases=tuple(item["cases"]))
        for item in document["not_persisted"]
    ]
    left_out += [
        LeftOut(kind="triton", kernel=item["kernel"], where="triton", cases=tuple(item["cases"]))
        for item in document["triton_kernels"]
    ]
    modules: Mapping[str, Mapping[str, Any]] = document["modules"]
    return DryRunAnswer(
        flashinfer=document["flashinfer"],
        package=document["package"],
        cache_tag=document["python"]["cache_tag"],
        soabi=document["python"]["soabi"],
        stack=document["stack"],
        jit_dir=document["jit_dir"],
        meta={name: module["meta"] for name, module in modules.items()},
        sources={name: relative_key_files(document["package"], module["key_files"]) for name, module in modules.items()},
        key_files=tuple(path for module in modules.values() for path in module["key_files"]),
        kernels=tuple(_kernel(item, mode) for item in document["kernels"]),
        left_out=tuple(left_out),
        errors=tuple(
            CaseError(case=case["id"], tokens=error["tokens"], error=error["error"])
            for case in document["cases"]
            for error in case["errors"]
        ),
        compiles=document["compiles"],
        seconds=document["seconds"],
    )


def _kernel(item: Mapping[str, Any], mode: str) -> Kernel:
    status = item.get("status", "asked")
    if mode == "check":
        status = "accepted" if item["accepted"] else "refused"
    return Kernel(
        name=item["name"],
        kernel=item["kernel"],
        module=item["module"],
        path=item["object"],
        cases={case: tuple(tokens) for case, tokens in item["cases"].items()},
        fallback=item["fallback"],
        status=status,
        reason=item.get("error") or item.get("reason") or "",
        seconds=item.get("seconds", 0.0),
        size=item.get("size", 0),
        sha256=item.get("sha256", ""),
    )
