"""`kcache plan`: the builds that manifests ask for and a store lacks, for schedulers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from kcache.cli.options import json_option, kinds_option

if TYPE_CHECKING:
    from kcache.plan import Plan


@click.command(
    epilog="""\b
Examples:
  kcache plan --manifest manifests/qwen3-30b-a3b.toml
  kcache plan --manifest manifests/qwen3-30b-a3b.toml --missing-from hf://owner/repo --json
  kcache plan --manifest manifests/qwen3-30b-a3b.toml --format slurm --shards 4 > build.sbatch"""
)
@click.option("--manifest", "manifests", multiple=True, required=True, metavar="FILE", help="What to build for a model.")
@click.option("--missing-from", "store", metavar="STORE", help="Leave out what this store has, and take costs from it.")
@kinds_option
@click.option("--flashinfer", default="", metavar="VERSION", help="Only for this FlashInfer: the one that the farm has.")
@click.option("--machine", default=os.uname().machine, metavar="NAME", help="Machine of the servers, as `uname -m` says it.")
@click.option("--shards", type=click.IntRange(min=1), help="Into how many parts, balanced by cost; one for each job by default.")
@click.option("--needs", default="", metavar="cpu|PRODUCT", help="Only jobs that need no GPU, or that need this one.")
@click.option("--image", default="kcache-build:latest", metavar="NAME", help="The container image of --format k8s.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json", "github", "slurm", "k8s"]),
    default="table",
    help="What to print; a table by default.",
)
@json_option
def command(
    manifests: tuple[str, ...],
    store: str | None,
    kinds: tuple[str, ...],
    flashinfer: str,
    machine: str,
    shards: int | None,
    needs: str,
    image: str,
    form: str,
    as_json: bool,
) -> None:
    """The builds that manifests ask for, each a command line with its cost, for one machine or a scheduler.

    Costs are what farms recorded in --missing-from. Kernels need no GPU: they are compiled for described ones. Autotune results
    are measured on that GPU, after its kernels are there.
    """
    from kcache.errors import UsageError
    from kcache.plan_forms import github, kubernetes, slurm
    from kcache.recipe import read_recipe
    from kcache.store.open import open_store
    from kcache.workflows.plan import make_plan

    recipes = [(path, read_recipe(path)) for path in manifests]
    opened = open_store(store) if store is not None else None
    plan = make_plan(recipes, opened, machine=machine, kinds=kinds, flashinfer=flashinfer, shards=shards, needs=needs)
    if as_json or form == "json":
        from kcache.cli.main import echo_json

        echo_json(plan.to_json())
    elif form == "table":
        _tell(plan)
    elif len(versions := sorted({job.flashinfer for job in plan.jobs})) > 1:
        raise UsageError(f"the jobs are for FlashInfer {', '.join(versions)}", remedy="Name the farm's with --flashinfer.")
    elif len(sorts := sorted({job.needs or "cpu" for job in plan.jobs})) > 1:
        raise UsageError(
            f"the jobs are for machines of several sorts: {', '.join(sorts)}",
            remedy="Print one form for each, --needs cpu first, and start the others when that has ended.",
        )
    elif not plan.jobs:
        raise UsageError("nothing is left to build", remedy="`kcache plan --json` says what is there and what is left out.")
    else:
        click.echo(github(plan) if form == "github" else slurm(plan) if form == "slurm" else kubernetes(plan, image), nl=False)


def _tell(plan: Plan) -> None:
    import shlex

    from kcache.matrix_text import duration_text

    for job in plan.jobs:
        about = plan.costs[job.name]
        click.echo(f"{job.name}: {duration_text(about.seconds)} ({about.source})\n  {shlex.join(job.command)}")
    total = duration_text(sum(one.seconds for one in plan.costs.values()))
    longest = duration_text(max(map(plan.shard_seconds, plan.shards), default=0.0))
    click.echo(f"{len(plan.jobs)} jobs, {total} in all, {longest} in {len(plan.shards)} shards; {plan.present} are published.")
    for line in plan.left_out:
        click.echo(f"left out: {line}")
