"""`kcache verify`: the proof, on its own."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from kcache.cli import exit_codes
from kcache.cli.options import archs_option, gpus_option, json_option, policy_option, python_option


@click.command(
    epilog="""\b
Examples:
  kcache verify                  # in the container, after kcache restore
  kcache verify --arch 9.0a      # on a host without a GPU"""
)
@archs_option
@gpus_option
@python_option
@policy_option
@json_option
def command(archs: tuple[str, ...], gpus: tuple[str, ...], python: str | None, policy: str | None, as_json: bool) -> None:
    """Prove in a fresh process that what is restored is used and that no compiler runs.

    \b
    The process runs the server's Python with JIT disabled and a trap in place of every compiler. It takes as long as importing
    FlashInfer does (2 to 13 s). The result is kept as a receipt in the cache. Where the policy in force does not let in what is
    in place, that is said and nothing is loaded.
    """
    from kcache.kinds.provider import python_path
    from kcache.workflows.entrypoint import here, policy_in_force, prove_restored
    from kcache.workflows.target import TargetRequest
    from kcache.workflows.views import present_view

    cache, target = here(TargetRequest(python=python, archs=archs, gpus=gpus), os.environ)
    environ = {**os.environ, **target.exports}
    view = (present_view(cache, target) or {}).get("view")
    if view:
        environ["PYTHONPATH"] = python_path(environ.get("PYTHONPATH", ""), str(cache.site), str(view))
    proof = prove_restored(cache, target, environ, policy_in_force(policy, environ))
    if as_json:
        from kcache.cli.main import echo_json

        echo_json(proof)
    else:
        _table(proof)
    unproven = exit_codes.CORRUPT_OR_UNTRUSTED if proof.get("refused") else exit_codes.FAILED
    sys.exit(exit_codes.DONE if proof["status"] == "proven" else unproven)


def _table(proof: dict[str, Any]) -> None:
    if refused := proof.get("refused"):
        click.echo("\n".join(refused))
        return
    for module in proof.get("modules", []):
        if module["loaded"] and module["ours"]:
            click.echo(f"{module['module']}: loaded in {module['seconds'] * 1000:.2f} ms by {module['via']}")
        elif module["loaded"]:
            click.echo(f"{module['module']}: loaded, but from {', '.join(module['paths'])}, which was not restored")
        else:
            click.echo(f"{module['module']}: not loaded: {module['error']}")
    if "flashinfer" in proof:
        click.echo(f"FlashInfer {proof['flashinfer']}, imported in {proof['import_seconds']:.1f} s")
    if (kernels := proof.get("kernels")) is not None:
        _kernels(kernels)
    if (programs := proof.get("programs")) is not None:
        _programs(programs)
    if (tunings := proof.get("tunings")) is not None:
        _tunings(tunings)
    click.echo(f"compiler runs: {proof['compiler_runs']}")
    for command_line in proof.get("compiler_commands", []):
        click.echo(f"  {command_line}")


def _kernels(proof: dict[str, Any]) -> None:
    accepted = sum(kernel["accepted"] for kernel in proof["kernels"])
    click.echo(f"CuTe-DSL: {accepted} of {len(proof['kernels'])} kernels loaded, asked for by {proof['calls']} calls")
    for kernel in proof["kernels"]:
        if not kernel["accepted"]:
            click.echo(f"  {kernel['kernel']}: {kernel['reason']}")
    for line in proof["errors"]:
        click.echo(f"  {line}")
    for line in proof["left_out"]:
        click.echo(f"  left to warmup, since FlashInfer keeps it nowhere: {line}")


def _programs(proof: dict[str, Any]) -> None:
    found = sum(program["accepted"] for program in proof["programs"])
    click.echo(f"b12x: {found} of {len(proof['programs'])} programs found, asked for by {proof['configurations']} configurations")
    if proof["by_rule"]:
        click.echo(f"  {proof['by_rule']} of them were recorded: b12x would load them, no configuration asked for them")
    for program in proof["programs"]:
        if not program["accepted"]:
            click.echo(f"  {program['program']}: {program['reason']}")
    for line in proof["errors"]:
        click.echo(f"  {line}")
    for line in proof["left_out"]:
        click.echo(f"  left to warmup: {line}")


def _tunings(proof: dict[str, Any]) -> None:
    found, results = (sum(tuning[name] for tuning in proof["tunings"]) for name in ("found", "results"))
    click.echo(f"autotune: {found} of {results} results found; {proof['calls']} calls measured {proof['profiled']} candidates")
    for tuning in proof["tunings"]:
        if not tuning["accepted"]:
            click.echo(f"  {tuning['tuning']}: {tuning['reason']}")
    for line in proof["errors"]:
        click.echo(f"  {line}")
    for line in proof["left_out"]:
        click.echo(f"  for an engine that is not here: {line}")
