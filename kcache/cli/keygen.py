"""`kcache keygen`: a key to sign entries with."""

from __future__ import annotations

import click

from kcache.cli.options import json_option


@click.command(
    epilog="""\b
Examples:
  kcache keygen farm.key
  kcache publish out --to hf://owner/repo --sign farm.key"""
)
@click.argument("path", metavar="FILE")
@json_option
def command(path: str, as_json: bool) -> None:
    """Make an Ed25519 key: the private one in FILE (mode 0600), the public one printed as a policy names it."""
    from kcache.trust.keys import generate

    public = generate(path)
    if as_json:
        from kcache.cli.main import echo_json

        echo_json({"file": path, "public": public.text, "id": public.id})
        return
    click.echo(f'[[key]]\nname = "{public.id[:16]}"\npublic = "{public.text}"')
    click.echo(f"kcache: {path} signs; keep it secret. Put the lines above into the policy of whoever restores.", err=True)
