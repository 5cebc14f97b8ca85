"""`kcache build`: compile entries on a host that needs no GPU."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from kcache.cli import exit_codes
from kcache.cli.options import (
    archs_option,
    env_option,
    gpus_option,
    json_option,
    kinds_option,
    modules_option,
    python_option,
)

if TYPE_CHECKING:
    from rich.progress import TaskID

    from kcache.workflows.build import BuildReport, BuildRequest, Watch
    from kcache.workflows.build_kernels import KernelWatch


@click.command(
    epilog="""\b
Examples:
  kcache build --kinds sampling --arch 9.0a,12.0f -o entries
  kcache build --manifest manifests/qwen3-30b-a3b.toml -o entries
  kcache build --manifest manifests/qwen3-30b-a3b.toml --kinds b12x-moe --gpu rtx-pro-6000 -o entries
  kcache build --modules cascade,page --arch 9.0a -o entries --jobs 4
  kcache build --manifest MODEL.toml --kinds autotune -o entries    (on the GPU that it is for)
  kcache build --collect ~/.cache/flashinfer/autotune -o entries
  RAY_ADDRESS=head:6379 kcache build --engine ray --kinds sampling --arch 9.0a,12.0f -o entries
  kcache build --record -o entries -- vllm bench throughput --model MODEL
Then: kcache publish entries --to STORE"""
)
@click.option(
    "--manifest",
    "manifests",
    multiple=True,
    metavar="FILE",
    help="What to build for a model (`kcache manifest --help`); --kinds, --arch and --gpu then narrow it.",
)
@click.option(
    "--collect",
    multiple=True,
    metavar="DIR",
    help="Make entries of the tuning results below DIR: FlashInfer's own store, or files of vLLM or SGLang.",
)
@click.option("--retune", is_flag=True, help="Tune again what was tuned, replay and measure both, and keep the better one.")
@kinds_option
@modules_option
@archs_option
@gpus_option
@click.option("-o", "--output", required=True, metavar="DIR", help="Where entries are written; made if needed.")
@click.option("--jobs", type=click.IntRange(min=1), help="Compilers at once; by default as many as cores and memory allow.")
@python_option
@click.option("--work-dir", metavar="DIR", help="Where compilers work, kept for the next build; DIR/.build by default.")
@env_option
@click.option(
    "--engine",
    type=click.Choice(["local", "ray"]),
    default="local",
    help="Where to compile: here, or in parts on the machines of the Ray cluster that RAY_ADDRESS names.",
)
@click.option("--record", is_flag=True, help="Run CMD with empty caches, and make entries of what it compiles.")
@click.option("--in-place", is_flag=True, help="With --record: leave CMD's caches where they are, and take what is new in them.")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]")
@json_option
def command(
    manifests: tuple[str, ...],
    collect: tuple[str, ...],
    retune: bool,
    kinds: tuple[str, ...],
    modules: tuple[str, ...],
    archs: tuple[str, ...],
    gpus: tuple[str, ...],
    output: str,
    jobs: int | None,
    python: str | None,
    work_dir: str | None,
    env_file: str | None,
    engine: str,
    record: bool,
    in_place: bool,
    program: tuple[str, ...],
    as_json: bool,
) -> None:
    """Compile every module that a kind needs, for each architecture, and write one entry per kind and key.

    A module that fails costs only its own entry: the rest is built, and the exit code is 3. A second run goes on where the
    first one stopped.

    \b
    With --record, CMD runs to its end, and the exit code is its own unless that is 0. What it compiled half, or with flags of its
    own, is left out with the reason.
    """
    if record or in_place or program:
        _check_recording(
            record,
            program,
            bool(manifests or collect or kinds or modules or gpus[1:] or env_file or jobs) or engine != "local",
        )
        from kcache.cli.record import record as run

        run(program, output=output, work_dir=work_dir, in_place=in_place, archs=archs, gpus=gpus, python=python, as_json=as_json)
    from kcache.recipe import read_recipe
    from kcache.workflows.build import PARTIAL, BuildRequest
    from kcache.workflows.build_entries import FAILED
    from kcache.workflows.build_manifests import run_build
    from kcache.workflows.target import read_environment

    request = BuildRequest(
        kinds=kinds,
        modules=modules,
        recipes=tuple(read_recipe(manifest) for manifest in manifests),
        retune=retune,
        collect=tuple(Path(directory) for directory in collect),
        archs=archs,
        gpus=gpus,
        environment=None if env_file is None else read_environment(env_file),
        output=Path(output),
        jobs=jobs,
        python=python,
        work_dir=None if work_dir is None else Path(work_dir),
    )
    try:
        with _stopped_by_sigterm(), _progress() as (watch, kernel_watch):
            if engine == "ray":
                report = _on_ray(request, manifests, env_file, kernel_watch)
            else:
                report = run_build(request, os.environ, watch, kernel_watch)
    except KeyboardInterrupt as error:
        raise click.Abort from error
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(report.to_json())
    _tell(report, quiet=as_json)
    sys.exit({FAILED: exit_codes.FAILED, PARTIAL: exit_codes.PARTIAL}.get(report.status, exit_codes.DONE))


def _on_ray(request: BuildRequest, manifests: tuple[str, ...], env_file: str | None, watch: KernelWatch) -> BuildReport:
    from kcache.workflows.ray_build import build_on_ray
    from kcache.workflows.spread_build import cut

    if request.work_dir is not None:
        raise click.UsageError("--work-dir is a directory of this machine: it goes without --engine ray.")
    parts = cut(request, manifests, env_file, machine=os.uname().machine)
    return build_on_ray(parts, request.output, lambda done, total, name: watch("the build, in parts", done, total))


def _check_recording(record: bool, program: tuple[str, ...], others: bool) -> None:
    if not record:
        raise click.UsageError("CMD and --in-place are for --record.")
    if not program:
        raise click.UsageError("--record needs a program: kcache build --record -o DIR -- CMD.")
    if others:
        raise click.UsageError("--record takes what CMD compiles: it goes with --arch, one --gpu, --python and --work-dir only.")


def _tell(report: BuildReport, *, quiet: bool) -> None:
    """Warnings and failures on stderr; on stdout what was built, unless JSON is there."""
    from kcache.workflows.build_entries import FAILED

    for warning in report.warnings:
        click.echo(f"kcache: {warning}", err=True)
    for module in report.modules:
        if module.status == FAILED:
            click.echo(f"kcache: {module.module} for {module.arch} failed: {module.reason}", err=True)
            if module.log:
                click.echo(f"        the compiler's whole output: {module.log}", err=True)
        elif not quiet:
            click.echo(f"{module.status:>10}  {module.arch:>5}  {module.seconds:8.1f} s  {module.module}")
    for entry in report.entries:
        if entry.status == FAILED and not any(module.status == FAILED for module in report.modules if module.kind == entry.kind):
            what = " ".join(text for text in (entry.kind, entry.model, entry.variant) if text)
            click.echo(f"kcache: entry {what} for {entry.arch or 'its GPUs'} failed: {entry.reason}", err=True)
        elif entry.status != FAILED and not quiet:
            click.echo(f"{entry.status}: {entry.archive}")


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Within: SIGTERM stops the compilers and ends the command as ^C does, instead of leaving compilers behind."""

    def stop(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _progress() -> Iterator[tuple[Watch, KernelWatch]]:
    """A bar for each architecture, and for each model's kernels, on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda arch, modules: lambda done, total, module: None, lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def watch(arch: str, modules: tuple[str, ...]) -> Callable[[int, int, str], None]:
            task = bars.add_task(f"{arch}: {', '.join(modules)}"[:60], total=None)

            def progress(done: int, total: int, module: str) -> None:
                bars.update(task, completed=done, total=total, description=f"{arch}: {module}"[:60])

            return progress

        def kernel_watch(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(f"kernels of {what}"[:60], total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield watch, kernel_watch
