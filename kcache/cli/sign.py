"""`kcache sign`: signatures for what is published already, without uploading it again."""

from __future__ import annotations

import os

import click

from kcache.cli import messages
from kcache.cli.options import json_option, kinds_option, models_option, modules_option, policy_option


@click.command(
    epilog="""\b
Examples:
  kcache sign hf://owner/repo --key new.key --policy policy.toml     # what the policy lets in, with one more key
  kcache sign /mnt/kcache --key farm.key --any                       # whatever the store holds
  kcache sign /mnt/kcache --key index.key --index --expires 168h"""
)
@click.argument("store", metavar="STORE")
@click.option("--key", "key_file", required=True, metavar="FILE", help="A private key that `kcache keygen` made.")
@click.option("--index", "indexes", is_flag=True, help="Sign the indexes, not the entries.")
@click.option("--expires", default="168h", metavar="TIME", help="With --index: how long the signature counts.")
@click.option("--any", "anything", is_flag=True, help="Sign whatever the store holds: you trust all who can write there.")
@policy_option
@kinds_option
@modules_option
@models_option
@json_option
def command(
    store: str,
    key_file: str,
    indexes: bool,
    expires: str,
    anything: bool,
    policy: str | None,
    kinds: tuple[str, ...],
    modules: tuple[str, ...],
    models: tuple[str, ...],
    as_json: bool,
) -> None:
    """Sign what STORE publishes.

    \b
    Entries are signed only if the policy lets them in, by another key that is, or with --any. To sign what was
    built here, use `kcache publish --sign`.
    """
    from kcache.cli.restoring import seconds_of
    from kcache.store.open import open_store
    from kcache.trust.keys import load
    from kcache.workflows.entrypoint import policy_in_force
    from kcache.workflows.resolve import Wanted
    from kcache.workflows.signing import IndexSigner, SignReport, sign_store

    key = load(key_file)
    trusted = None if anything or indexes else policy_in_force(policy, os.environ)
    if trusted is None and not anything and not indexes:
        raise click.UsageError("There is no policy that says which entries to sign. Give --policy, or --any.")
    opened = open_store(store, writing=True)
    if indexes:
        done = IndexSigner(key, seconds_of(expires, "--expires")).sign_all(opened)
        report = SignReport(key=key.public.id, entries=0, present=0, indexes=done, left_out=())
    else:
        report = sign_store(opened, key, asked=Wanted(kinds=kinds, modules=modules, models=models), policy=trusted)
    for line in report.left_out:
        messages.say(line)
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(report.to_json())
    counts = f"{len(report.indexes)} indexes" if indexes else f"{report.entries} entries ({report.present} were already)"
    click.echo(f"kcache: signed {counts} of {opened.describe()} with key {report.key[:16]}", err=True)
