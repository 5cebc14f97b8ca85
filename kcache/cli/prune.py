"""`kcache prune`: takes old entries out of this host's cache, or out of a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kcache.cli import messages
from kcache.cli.options import index_key_options, index_signer, json_option

if TYPE_CHECKING:
    from kcache.workflows.prune_rules import Rules, Verdict
    from kcache.workflows.reindex import SignIndex


@click.command(
    epilog="""\b
Examples:
  kcache prune                                  what killed or replaced restores left
  kcache prune --unused-for 30d --max-size 20G --dry-run
  kcache prune --in /mnt/kcache --version '0.6.*'
  kcache prune --in hf://owner/repo --older-than 180d""",
)
@click.option("--in", "store", metavar="STORE", help="Prune this store, instead of this host's cache.")
@click.option("--older-than", metavar="TIME", help="Entries that were installed (in a store: first seen by a prune) so long ago.")
@click.option("--unused-for", metavar="TIME", help="Entries that no restore has given to a server for so long.")
@click.option("--max-size", metavar="SIZE", help="The least recently used, until all together are no larger.")
@click.option("--version", "versions", multiple=True, metavar="VERSION", help="Entries for this FlashInfer; * matches anything.")
@click.option("--grace", metavar="TIME", help="What was restored (in a store: published) less long ago stays: 1h; in a store 7d.")
@click.option("--dry-run", is_flag=True, help="Only say what would go, and why.")
@index_key_options
@json_option
def command(
    store: str | None,
    older_than: str | None,
    unused_for: str | None,
    max_size: str | None,
    versions: tuple[str, ...],
    grace: str | None,
    dry_run: bool,
    index_key: str | None,
    expires: str,
    unsigned: bool,
    as_json: bool,
) -> None:
    """Remove entries that any of the rules names, and what is left of killed restores and publishes.

    \b
    TIME is such as 12h or 30d, SIZE such as 500M or 20G. What a process of this host uses stays, whatever the rules say. In a
    store the index loses its lines at once, and files go when no index has named them for the grace time.
    """
    from kcache.workflows.prune_rules import Rules, parse_duration, parse_size

    rules = Rules(
        older_than=parse_duration(older_than) if older_than is not None else None,
        unused_for=parse_duration(unused_for) if unused_for is not None else None,
        max_bytes=parse_size(max_size) if max_size is not None else None,
        versions=versions,
    )
    seconds = parse_duration(grace) if grace is not None else None
    if store is None:
        document = _local(rules, seconds, dry_run, as_json)
    else:
        document = _store(store, rules, seconds, dry_run, as_json, index_signer(index_key, expires, unsigned))
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(document)


def _local(rules: Rules, grace: float | None, dry_run: bool, as_json: bool) -> dict[str, object]:
    from kcache.errors import InstallError
    from kcache.local_cache import LocalCache
    from kcache.probe.caches import cache_root
    from kcache.workflows.prune import GRACE, prune

    found = cache_root(os.environ, os.geteuid())
    if found.path is None:
        raise InstallError(f"there is no cache here: {found.reason}", remedy="Set KCACHE_DIR.")
    done = prune(LocalCache(Path(found.path)), rules, grace=GRACE if grace is None else grace, dry_run=dry_run)
    if not as_json:
        _print(done.verdicts, dry_run)
        for path, why in done.leftovers.items():
            click.echo(f"{_verb(dry_run)} {path}: {why}")
    messages.say(f"{done.freed / 1e6:.1f} MB {'would be freed' if dry_run else 'freed'} in {done.root}")
    return done.to_json()


def _store(
    url: str, rules: Rules, grace: float | None, dry_run: bool, as_json: bool, sign_index: SignIndex | None
) -> dict[str, object]:
    from kcache.store.open import open_store
    from kcache.workflows.prune_store import GRACE, prune_store

    done = prune_store(
        open_store(url, writing=True),
        rules,
        grace=GRACE if grace is None else grace,
        dry_run=dry_run,
        page=url.startswith("hf://"),
        sign_index=sign_index,
        progress=lambda line: messages.say(line, at=messages.VERBOSE),
    )
    for line in done.warnings:
        messages.say(line)
    if not as_json:
        _print(done.verdicts, dry_run)
        for name in done.deleted:
            click.echo(f"{_verb(dry_run)} {name}: no index names it")
        for name in done.waiting:
            click.echo(f"keeps {name}: no index names it, its grace time is not over")
    messages.say(f"{len(done.deleted)} files {'would go' if dry_run else 'deleted'} in {done.store}, {len(done.waiting)} wait")
    return done.to_json()


def _print(verdicts: Sequence[Verdict], dry_run: bool) -> None:
    for verdict in verdicts:
        one = verdict.candidate
        word = _verb(dry_run) if verdict.remove else "keeps"
        click.echo(f"{word} {one.title} ({one.size / 1e6:.1f} MB): {verdict.why}")


def _verb(dry_run: bool) -> str:
    return "would remove" if dry_run else "removes"
