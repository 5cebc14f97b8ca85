"""Options that several commands share, so that they are spelled and explained the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from kcache.cli.quick import separated

if TYPE_CHECKING:
    from kcache.workflows.reindex import SignIndex

F = TypeVar("F", bound=Callable[..., Any])


def _words(_context: click.Context, _parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    return separated(value)


def _option(*names: str, **attributes: Any) -> Callable[[F], F]:
    return click.option(*names, **attributes)


from_option = _option(
    "--from",
    "stores",
    multiple=True,
    required=True,
    metavar="STORE",
    help="Where entries are published; several are tried in order.",
)
kinds_option = _option(
    "--kinds", multiple=True, callback=_words, metavar="KIND,...", help="Only these cache kinds, such as sampling."
)
modules_option = _option(
    "--modules", multiple=True, callback=_words, metavar="NAME,...", help="Only these modules of FlashInfer."
)
archs_option = _option(
    "--arch",
    "archs",
    multiple=True,
    callback=_words,
    metavar="ARCH,...",
    help="GPU architectures, such as 9.0a, instead of this host's.",
)
gpus_option = _option(
    "--gpu",
    "gpus",
    multiple=True,
    metavar="NAME",
    help="A GPU product, such as rtx-pro-6000, instead of this host's GPUs. CuTe-DSL kernels depend on its SM count.",
)
models_option = _option(
    "--model",
    "models",
    multiple=True,
    metavar="NAME",
    help="Of kinds that are built for a model: only this one's, such as Qwen/Qwen3-30B-A3B. * matches anything.",
)
python_option = _option("--python", metavar="PATH", help="The Python that will import FlashInfer; this one by default.")
policy_option = _option(
    "--policy", metavar="FILE", help="Which publishers are trusted; else KCACHE_POLICY, else /etc/kcache/policy.toml."
)
env_option = _option(
    "--env", "env_file", metavar="FILE", help="An environment saved by `kcache env --save`, instead of this host."
)
flashinfer_option = _option("--flashinfer", metavar="VERSION", default="", help="Only entries for this version of FlashInfer.")


def published_options(function: F) -> F:
    """Options that choose among what a store publishes; `published` makes of them what workflows take."""
    for option in (flashinfer_option, archs_option, models_option, modules_option, kinds_option):
        function = option(function)
    return function


def published(
    *, kinds: tuple[str, ...], modules: tuple[str, ...], models: tuple[str, ...], archs: tuple[str, ...], flashinfer: str
) -> dict[str, Any]:
    """The arguments `asked`, `archs` and `flashinfer` of `kcache.workflows.bundle.choose_entries`."""
    from kcache.workflows.resolve import Wanted

    asked = Wanted(kinds=kinds, modules=modules, models=models)
    return {"asked": asked, "archs": [arch.replace(".", "") for arch in archs], "flashinfer": flashinfer}


index_key_option = _option("--sign-index", "index_key", metavar="FILE", help="Sign the indexes that are written with this key.")
expires_option = _option("--expires", default="168h", metavar="TIME", help="With --sign-index: how long that signature counts.")
unsigned_option = _option(
    "--unsigned", is_flag=True, help="Let a signed index lose its signature, where no host asks for signed indexes any more."
)


def index_key_options(function: F) -> F:
    """Options of commands that write indexes; `index_signer` makes of them what workflows take."""
    for option in (unsigned_option, expires_option, index_key_option):
        function = option(function)
    return function


def index_signer(index_key: str | None, expires: str, unsigned: bool) -> SignIndex | None:
    """What signs indexes, by `index_key_options`; None where nothing was said of it.

    Raises:
        UsageError: the options contradict each other, or the key cannot be read. TrustError: others can read the key.
    """
    from kcache.workflows.reindex import leave_unsigned

    if index_key is None:
        return leave_unsigned if unsigned else None
    if unsigned:
        raise click.UsageError("--sign-index and --unsigned exclude each other.")
    from kcache.cli.restoring import seconds_of
    from kcache.trust.keys import load
    from kcache.workflows.signing import IndexSigner

    return IndexSigner(load(index_key), seconds_of(expires, "--expires")).sign


json_option = _option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")
