"""`kcache compact`: what a fleet needs as one file in the store, fetched with one request."""

from __future__ import annotations

from typing import Any

import click

from kcache.cli import messages
from kcache.cli.options import index_key_options, index_signer, json_option, published, published_options


@click.command(
    epilog="""\b
Examples:
  kcache compact --to hf://owner/repo --arch 9.0a --kinds sampling --model Qwen3-30B-A3B
  kcache compact --to /mnt/kcache --flashinfer 0.7.4""",
)
@click.option("--to", "store", required=True, metavar="STORE", help="The store: a directory, or hf://owner/repo.")
@published_options
@index_key_options
@json_option
def command(store: str, index_key: str | None, expires: str, unsigned: bool, as_json: bool, **chosen: Any) -> None:
    """Put published entries that one container needs together into one file beside them.

    \b
    A restore takes it where that saves requests, and single entries otherwise; nothing changes for anybody else. Name what a
    fleet's containers restore: one GPU architecture, its kinds, its models. Run it again when entries were added.
    """
    from kcache.store.open import open_store
    from kcache.workflows.compact import compact

    found = compact(
        open_store(store, writing=True),
        **published(**chosen),
        sign_index=index_signer(index_key, expires, unsigned),
        progress=lambda line: messages.say(line, at=messages.VERBOSE),
    )
    if as_json:
        from kcache.cli.main import echo_json

        echo_json({"store": store, "bundles": [one.to_json() for one in found]})
    for one in found:
        done = "there already" if one.present else "uploaded"
        messages.say(f"{one.entries} entries of {one.index} in one file: {one.size / 1e6:.1f} MB, {done}")
