"""`kcache manifest`: build manifests, made from a model's config and checked."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kcache.cli import exit_codes, messages
from kcache.cli.options import json_option

if TYPE_CHECKING:
    from kcache.workflows.manifests import ManifestReport


@click.group(
    epilog="""\b
Examples:
  kcache manifest from-config config.json -o my-model.toml
  kcache manifest check my-model.toml"""
)
def command() -> None:
    """Build manifests: TOML files that say what to build for a model.

    \b
    manifests/README.md describes the format, and manifests/ has those of published models.
    """


@command.command(
    "from-config",
    epilog="""\b
Examples:
  kcache manifest from-config config.json --name Qwen/Qwen3-30B-A3B -o qwen3-30b-a3b.toml
  kcache manifest from-config config.json --json
Then: fill in what it could not know, and run `kcache manifest check` on the file.""",
)
@click.argument("config", metavar="CONFIG.json")
@click.option("-o", "--output", metavar="FILE", help="Where to write it; on stdout by default. A file that is there is kept.")
@click.option("--name", default="", metavar="NAME", help="The model's name, such as Qwen/Qwen3-30B-A3B.")
@click.option("--source", default="", metavar="TEXT", help="Where the config was published; NAME, config.json by default.")
@json_option
def from_config(config: str, output: str | None, name: str, source: str, as_json: bool) -> None:
    """Make a manifest from a model's config.json, the file that the Hub has beside its weights.

    \b
    A config says what the model is, not how it is served: layouts, token counts and targets are filled with values to be
    edited. What was guessed or not found is said on stderr, and in comments of the file. The config of a model that is no
    mixture of experts is refused.
    """
    from kcache.workflows.manifests import manifest_from_config, refusals, write_manifest

    made = manifest_from_config(config, name=name, source=source or (f"{name}, config.json" if name else ""))
    if output is not None:
        write_manifest(made.text, Path(output))
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(made.to_json(output))
    elif output is None:
        click.echo(made.text, nl=False)
    for note in made.made.notes:
        messages.say(note)
    for refusal in refusals(made.shapes):
        messages.say(f"not allowed: {refusal}")
    if output is not None:
        messages.say(f"{output} is written")


@command.command(
    epilog="""\b
Examples:
  kcache manifest check manifests/*.toml
  kcache manifest check my-model.toml --json
Exit codes: 0 every file is a manifest, 2 one is not. A shape that is not allowed is no fault of the file.""",
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@json_option
def check(files: tuple[str, ...], as_json: bool) -> None:
    """Validate manifests, and say which shapes each mode allows.

    \b
    All problems of a file are told at once, each with its path in the file. The build makes the shapes that are allowed and
    reports the others.
    """
    from kcache.workflows.manifests import BAD, GOOD, check_manifest

    reports = [check_manifest(path) for path in files]
    bad = any(report.status == BAD for report in reports)
    if as_json:
        from kcache.cli.main import echo_json

        echo_json({"status": BAD if bad else GOOD, "manifests": [report.to_json() for report in reports]})
    for report in reports:
        _tell(report, quiet=as_json)
    sys.exit(exit_codes.USAGE if bad else exit_codes.DONE)


def _tell(report: ManifestReport, *, quiet: bool) -> None:
    from kcache.recipe import RecipeError, not_a_manifest
    from kcache.workflows.manifests import refusals

    if report.recipe is None:
        messages.fail(str(RecipeError(not_a_manifest(report.path), problems=report.problems)))
    elif not quiet:
        model = report.recipe.model
        sizes = f"hidden {model.hidden_size}, intermediate {model.moe_intermediate_size}"
        routing = f"{model.experts} experts, {model.top_k} a token, {model.activation}"
        click.echo(f"{report.path}: good\n  {model.name}: {sizes}, {routing}; kinds {', '.join(report.recipe.kinds)}")
        for one in report.shapes:
            if not one.reasons:
                name = f"{one.shape.mode} with tp {one.shape.tp}, ep {one.shape.ep} (FlashInfer {one.flashinfer})"
                click.echo(f"  allowed      {name}" + (f"; left to warmup: {one.left}" if one.left else ""))
        for refusal in refusals(report.shapes):
            click.echo(f"  not allowed  {refusal}")
