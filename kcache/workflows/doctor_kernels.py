"""Checks of `kcache doctor` for CuTe-DSL kernels: reasons why FlashInfer would pass over those that were restored."""

from __future__ import annotations

from collections.abc import Iterator

from kcache.archs import cute_dsl_arch
from kcache.errors import ProbeError
from kcache.kernel_facts import COMPILER
from kcache.match import sm_count_fact
from kcache.probe.host import compiler_of
from kcache.workflows.findings import WARNING, Finding, Patient

_SWITCHES = {
    "FLASHINFER_CUTE_DSL_DISABLE_CACHE": "no kernel on disk is looked at",
    "FLASHINFER_CUTE_DSL_STRICT_CACHE_KEY": "kernels are keyed by sources that only FlashInfer can list",
}
"""jit/cute_dsl_core.py, cute_dsl_cache_disabled and cute_dsl_strict_cache_key (0.7.4); each counts only as `1`."""


def check_kernel_switches(patient: Patient) -> Iterator[Finding]:
    """Variables under which FlashInfer looks elsewhere for its CuTe-DSL kernels, or not at all."""
    for name, effect in _SWITCHES.items():
        if patient.environ.get(name) == "1":
            yield Finding(
                code="cute-dsl-switch",
                severity=WARNING,
                what=f"{name}=1 is set: {effect}, so CuTe-DSL kernels are compiled in every process",
                remedy=f"Unset {name} where the server runs.",
            )
    named, archs = patient.environ.get("CUTE_DSL_ARCH"), [cute_dsl_arch(arch) for arch in patient.environment.archs]
    if named and archs and named.replace("_", "") not in [arch.replace("_", "") for arch in archs]:
        yield Finding(
            code="cute-dsl-arch",
            severity=WARNING,
            what=f"CUTE_DSL_ARCH is {named}, the GPUs are {', '.join(archs)}: kernels are looked for and compiled for the former",
            remedy="Unset CUTE_DSL_ARCH where the server runs.",
        )


def check_compiler(patient: Patient) -> Iterator[Finding]:
    """What has to be known to match CuTe-DSL kernels: FlashInfer's rule, the compiler by content, the GPU's SM count."""
    from kcache.kinds.cute_dsl import meta_rule

    if (package := patient.host.paths.flashinfer) is None or not patient.fact("flashinfer.version").known:
        return
    facts = compiler_of(patient.host)
    unknown = [name for name, fact in facts.items() if fact.undetermined and not name.endswith(".portable")]
    if all(fact.absent for fact in facts.values()):
        return  # no CuTe-DSL, no kernels
    if unknown:
        yield Finding(
            code="cute-dsl-unknown",
            severity=WARNING,
            what=f"the content of {unknown[0].removeprefix('cutlass_dsl.')} could not be found out: no CuTe-DSL kernel is taken",
            remedy=f"Install {COMPILER} from a wheel, not editable.",
        )
    try:
        meta_rule(package)
    except ProbeError as error:
        yield Finding(code="cute-dsl-rule", severity=WARNING, what=f"{error.what}: {error.why}", remedy=error.remedy)
    for arch in patient.environment.archs:
        fact = patient.fact(sm_count_fact(arch))
        if not fact.known and patient.fact("gpu.source").value == "gpu":
            yield Finding(
                code="sm-count",
                severity=WARNING,
                what=f"the SM count of the {arch} GPU {fact.describe()}: no CuTe-DSL kernel is chosen",
                remedy="Name the GPU with --gpu.",
            )
