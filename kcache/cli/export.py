"""`kcache export`: entries of a store as one file, for hosts without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kcache.cli import messages
from kcache.cli.options import expires_option, index_key_option, index_signer, json_option, published, published_options


@click.command(
    epilog="""\b
Examples:
  kcache export --from hf://owner/repo -o kernels.tar
  kcache export --from hf://owner/repo --flashinfer 0.7.4 --arch 9.0a -o kernels.tar
  kcache restore --from kernels.tar -- vllm serve MODEL""",
)
@click.option("--from", "store", required=True, metavar="STORE", help="Where entries are published.")
@click.option("-o", "--output", required=True, metavar="FILE", type=click.Path(path_type=Path), help="The file to write.")
@published_options
@index_key_option
@expires_option
@json_option
def command(
    store: str,
    output: Path,
    index_key: str | None,
    expires: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Copy published entries into one file, verified on the way.

    \b
    The file is a store itself: `kcache restore --from FILE` reads it, and `kcache import` publishes what it holds.
    Without options everything that is published goes into it.
    """
    from kcache.store.open import open_store
    from kcache.workflows.bundle import export

    report = export(
        open_store(store),
        Path.cwd() / output,
        **published(**chosen),
        sign_index=index_signer(index_key, expires, unsigned=False),
        progress=lambda line: messages.say(line, at=messages.VERBOSE),
    )
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(report.to_json())
    messages.say(f"{report.entries} entries of {store} in {output}: {report.size / 1e6:.1f} MB, {report.sha256}")
