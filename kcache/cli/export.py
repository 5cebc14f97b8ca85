"""`kcache export`: entries of a store as one file, for hosts without a network."""

from __future__ import annotations

from pathlib import Path

import click

from kcache.cli import messages
from kcache.cli.options import archs_option, json_option, kinds_option, models_option, modules_option


@click.command(
    epilog="""\b
Examples:
  kcache export --from hf://owner/repo -o kernels.tar
  kcache export --from hf://owner/repo --flashinfer 0.7.4 --arch 9.0a -o kernels.tar
  kcache restore --from kernels.tar -- vllm serve MODEL""",
)
@click.option("--from", "store", required=True, metavar="STORE", help="Where entries are published.")
@click.option("-o", "--output", required=True, metavar="FILE", type=click.Path(path_type=Path), help="The file to write.")
@kinds_option
@modules_option
@models_option
@archs_option
@click.option("--flashinfer", metavar="VERSION", default="", help="Only entries for this version of FlashInfer.")
@json_option
def command(
    store: str,
    output: Path,
    kinds: tuple[str, ...],
    modules: tuple[str, ...],
    models: tuple[str, ...],
    archs: tuple[str, ...],
    flashinfer: str,
    as_json: bool,
) -> None:
    """Copy published entries into one file, verified on the way.

    \b
    The file is a store itself: `kcache restore --from FILE` reads it, and `kcache import` publishes what it holds.
    Without options everything that is published goes into it.
    """
    from kcache.store.open import open_store
    from kcache.workflows.bundle import export
    from kcache.workflows.resolve import Wanted

    report = export(
        open_store(store),
        Path.cwd() / output,
        asked=Wanted(kinds=kinds, modules=modules, models=models),
        archs=[arch.replace(".", "") for arch in archs],
        flashinfer=flashinfer,
        progress=lambda line: messages.say(line, at=messages.VERBOSE),
    )
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(report.to_json())
    messages.say(f"{report.entries} entries of {store} in {output}: {report.size / 1e6:.1f} MB, {report.sha256}")
