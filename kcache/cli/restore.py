"""`kcache restore` as click understands it: its options and its help. What it does is `kcache.cli.restoring`."""

from __future__ import annotations

from typing import Any

import click

from kcache.cli.options import (
    archs_option,
    env_option,
    from_option,
    gpus_option,
    json_option,
    kinds_option,
    models_option,
    modules_option,
    policy_option,
    python_option,
)


@click.command(
    context_settings={"ignore_unknown_options": False},
    epilog="""\b
Examples:
  kcache restore --from /mnt/kcache -- vllm serve MODEL
  eval "$(kcache restore --from /mnt/kcache --shell)"
  kcache restore --from /mnt/kcache --fallback warmup --deadline 20m -- vllm serve MODEL
  kcache restore --from /mnt/kcache --prove --arch 9.0a     # in an image build, no GPU needed""",
)
@from_option
@kinds_option
@modules_option
@models_option
@archs_option
@gpus_option
@python_option
@env_option
@policy_option
@click.option("--prove", is_flag=True, help="Then run `kcache verify`: a fresh process, no compiler.")
@click.option("--deadline", default="30s", metavar="TIME", help="At most this long before the command starts (30s, 2m).")
@click.option("--lock-timeout", default="60s", metavar="TIME", help="Wait this long for another restore of the same cache.")
@click.option(
    "--fallback", default="none", metavar="none|warmup", help="What is missing: compile it before CMD starts, within --deadline."
)
@click.option("--keep", metavar="DIR", help="With --fallback warmup: keep what it builds, as entries for `kcache publish`.")
@click.option("--publish-missing", is_flag=True, help="With --fallback warmup: publish what it builds, in the background.")
@click.option("--strict", is_flag=True, help="Do not start the command unless everything was restored.")
@click.option("--strict-match", is_flag=True, help="Accept only entries whose every ingredient is equal.")
@click.option("--into-package", is_flag=True, help="Copy into flashinfer/data/aot instead of PYTHONPATH.")
@click.option("--shell", is_flag=True, help="Print `export` lines for eval.")
@json_option
@click.argument("server", nargs=-1, type=click.UNPROCESSED, metavar="[-- CMD...]")
def command(**options: Any) -> None:
    """Put matching entries in place and check that FlashInfer will use them; then start CMD.

    \b
    Variables that the server needs are set for CMD, or printed with --shell. A miss is no error: CMD starts and
    FlashInfer compiles as it would without kcache. Without CMD the exit code says what happened.
    """
    from kcache.cli.restoring import restore

    restore(**options)
