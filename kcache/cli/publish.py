"""`kcache publish`: built entries into a store. Run on the farm, after `kcache build`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kcache.cli import messages
from kcache.cli.options import index_key_options, index_signer, json_option

if TYPE_CHECKING:
    from kcache.workflows.publish import PublishReport


_Function = TypeVar("_Function", bound=Callable[..., None])

OPTIONS = (
    click.option("--to", "store", required=True, metavar="STORE", help="Where to publish: a directory, or hf://owner/repo."),
    click.option("--replace", is_flag=True, help="Replace entries of the same key whose files are different."),
    click.option("--create", is_flag=True, help="Make the repository, or the branch, if it is not there."),
    click.option("--private", is_flag=True, help="With --create: for its owner's members only."),
    click.option("--revision", metavar="BRANCH", help="Publish to this branch of the repository."),
    click.option("--dry-run", is_flag=True, help="Only say what would be uploaded."),
    index_key_options,
    json_option,
)


def store_options(function: _Function) -> _Function:
    """The options of a command that publishes; see `publish_into`."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


@click.command(
    epilog="""\b
Examples:
  kcache publish out --to /mnt/kcache
  kcache publish out --to hf://owner/repo --create --private
  kcache publish out --to hf://owner/repo --sign farm.key
  kcache publish out --to hf://owner/repo --dry-run""",
)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--sign", "key_file", metavar="FILE", help="Sign the entries with this key, those that are there already too.")
@store_options
def command(directory: Path, key_file: str | None, **options: Any) -> None:
    """Upload the entries in DIR, then make them visible.

    \b
    DIR is what `kcache build -o DIR` wrote; every entry is verified first. Entries that the store has are not uploaded again.
    Readers see an entry when it is whole. If this is interrupted, run it again.
    """
    from kcache.workflows.publish import publish

    key = None
    if key_file:
        from kcache.trust.keys import load

        key = load(key_file)
    publish_into(partial(publish, directory, key=key), **options)


def publish_into(
    act: Callable[..., PublishReport],
    *,
    store: str,
    replace: bool,
    create: bool,
    private: bool,
    revision: str | None,
    dry_run: bool,
    index_key: str | None,
    expires: str,
    unsigned: bool,
    as_json: bool,
) -> None:
    """Opens the store, lets `act` publish into it, and says what came of it. The arguments are `OPTIONS`.

    Raises:
        UsageError: they contradict each other. KcacheError: what `act` raises.
    """
    from kcache.store.open import at_revision, open_store

    on_hub = store.startswith("hf://")
    if not on_hub and (create or private or revision):
        raise click.UsageError("--create, --private and --revision are for repositories on the Hub.")
    sign_index = index_signer(index_key, expires, unsigned)
    opened = open_store(at_revision(store, revision), create=create or not on_hub, writing=True, private=private)
    report = act(opened, replace=replace, dry_run=dry_run, page=on_hub, sign_index=sign_index, progress=_progress)
    for line in report.warnings:
        messages.say(line)
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(report.to_json())
    click.echo(f"kcache: {_describe(report)}", err=True)


def _describe(report: PublishReport) -> str:
    """What was published, in one line."""
    counts = {status: sum(entry.status == status for entry in report.entries) for status in ("uploaded", "replaced", "present")}
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    size = f"{report.bytes_uploaded / 1e6:.1f} MB"
    done = f"would upload {size}" if report.dry_run else f"{size} uploaded"
    return f"{', '.join(parts)} in {report.store}; {done}"


def _progress(line: str) -> None:
    messages.say(line, at=messages.VERBOSE)
