"""`kcache report`: what was built since the server was started, and what the restore before it had spared."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kcache.cli import exit_codes
from kcache.cli.options import json_option, python_option

if TYPE_CHECKING:
    from kcache.workflows.boot_report import BootReport


@click.command(
    epilog="""\b
Examples:
  kcache report                                        # in the container, beside the server
  kcache report --textfile /var/lib/node_exporter/kcache.prom
  kcache build --modules "$(kcache report --missing)" --arch 9.0a -o entries"""
)
@click.option("--missing", is_flag=True, help="Print only the modules that the farm should build next, for --modules.")
@click.option("--textfile", type=click.Path(path_type=Path), metavar="FILE", help="Write metrics for Prometheus, all at once.")
@click.option(
    "--boot", type=click.Path(path_type=Path), metavar="FILE", help="The record of a start; else $KCACHE_BOOT, or the newest."
)
@python_option
@json_option
def command(missing: bool, textfile: Path | None, boot: Path | None, python: str | None, as_json: bool) -> None:
    """Say whether anything was compiled since `kcache restore -- CMD` started the server, and which modules.

    \b
    The serving processes' own FlashInfer says it (FLASHINFER_JIT_BUILD_LOG, 0.7.4), and the libraries in its cache that are
    newer than the start. Exit code 0: nothing was, or only by a warm-up. 3: something was while serving.
    """
    from kcache.probe.caches import cache_root
    from kcache.workflows.boot_report import find_boot, read_boot

    if missing and as_json:
        raise click.UsageError("--missing and --json both want standard output: --json has what is missing too.")
    root = cache_root(os.environ, os.geteuid()).path
    record = boot or find_boot(Path(root) if root else None, os.environ)
    report = read_boot(record, logged=_logged(python))
    if textfile is not None:
        from kcache.workflows.boot_metrics import textfile as metrics

        part = textfile.with_name(f".{textfile.name}.{os.getpid()}.part")
        part.write_text(metrics(report), encoding="utf-8")
        part.replace(textfile)
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(report.to_json())
    elif missing:
        click.echo(",".join(report.missing["modules"]))
    else:
        _say(report)
    sys.exit(exit_codes.PARTIAL if report.status == "built" else exit_codes.DONE)


def _logged(python: str | None) -> bool:
    from kcache.probe.packages import interpreter_at, scan, this_interpreter
    from kcache.workflows.boot_report import knows_log

    interpreter = this_interpreter() if python is None else interpreter_at(python, os.environ)
    package = scan(interpreter.search_path).package("flashinfer")
    return package is not None and knows_log(Path(package))


def _say(report: BootReport) -> None:
    restore = report.restore
    click.echo(
        f"restore: {restore['status']}, {restore['compiles_avoided']} compiler runs avoided, "
        f"{restore['seconds_saved']:.0f} s of building saved, {restore['seconds'] * 1000:.0f} ms"
    )
    for build in report.builds:
        took = f" in {build.seconds:.1f} s" if build.seconds else ""
        click.echo(f"built {'by a warm-up' if build.warmup else 'since the start'}: {build.name}{took}")
    if not report.builds:
        click.echo("nothing was built since the start")
    if not report.logged:
        click.echo("this FlashInfer keeps no log of builds: nvcc modules are known by their libraries, CuTe-DSL kernels are not")
    if kernels := report.missing["kernels"]:
        click.echo(f"kernels for a model's manifest: {', '.join(kernels)}")
