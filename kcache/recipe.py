"""What to build: the TOML files of `manifests/`, one a model. Such a file is a "build manifest" in prose, a `Recipe` here.

The format is documented in manifests/README.md. A recipe is parsed once, into frozen values; every problem is reported at once,
each with its path (`model.experts: ...`). Parsing does no I/O except in `read_recipe`, and its time is bounded
whatever the bytes are. A recipe that parses is consistent in itself; whether FlashInfer's kernels allow its shapes is asked of
`kcache.recipe_shapes`. Not the manifest of an entry, which is `kcache.manifest`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from kcache.errors import UsageError
from kcache.gpu_products import GpuProduct, did_you_mean, find_product
from kcache.recipe_fields import Choice, Field, Real, Text, Whole, read_fields, told
from kcache.recipe_tuning import TUNING_FIELDS, Tuning, tuning_of_nothing

FORMAT = "kcache.recipe/1"

MAX_BYTES = 64 << 10
"""A recipe is a page of text; what is larger is something else."""

MAX_LINE = 4 << 10
"""Bytes of a line. Python's TOML reader takes time that grows with the square of a dotted key's length."""

TOLD = 100
"""Problems that a message holds; a file with more of them is no manifest with mistakes in it."""

GDN_KINDS = ("gdn-prefill", "gdn-decode", "gdn-decode-bf16", "gdn-verify")
"""Kinds of linear attention (`kcache.recipe_gdn.GDN_KINDS`)."""

B12X_KINDS = ("b12x-programs", "b12x-candidates")
"""Kinds of the package b12x (`kcache.kinds.b12x_kinds`)."""

KINDS = ("sampling", "b12x-moe", *GDN_KINDS, *B12X_KINDS, "autotune")
"""Cache kinds that a recipe may ask for."""

ACTIVATIONS = ("silu", "gelu_tanh", "swigluoai_uninterleave", "relu2")
"""Activations of FlashInfer's b12x MoE (`blackwell_sm12x/moe_activation.py`, SUPPORTED_MOE_ACTIVATIONS, 0.7.4)."""

SWIGLU = "swigluoai_uninterleave"
"""The activation that has parameters."""

MODES = ("nvfp4", "mxfp4", "w4a16")
"""Quantisation modes of FlashInfer's b12x MoE (`blackwell_sm12x/moe_dispatch.py`, _normalize_quant_mode, 0.7.4)."""

CALLS = ("wrapper", "function", "function-ascending")
"""How an engine calls FlashInfer: `B12xMoEWrapper` with buffers for the maximum, or `b12x_fused_moe`, whose cached workspace
grows with use, so that the order of its calls enters the kernels' names: from the largest token count down (as engines warm up),
or from the smallest up."""

SCALES = ("per_expert", "shared")

_MOST = 1 << 20
_ARCH = r"[0-9]{1,2}\.[0-9][af]?"
_CUDA = r"[0-9]{2}\.[0-9]{1,2}"
_VERSION = r"[0-9]+\.[0-9]+\.[0-9]+(?:\.?(?:post|rc|dev)[0-9]+)?"


REMEDY = "manifests/README.md describes the format."


class RecipeError(UsageError):
    """A build manifest cannot be used.

    Args:
        what: which file.
        problems: every problem found, each with its path, such as `model.experts: not a whole number from 1 to 4096`.
        remedy: what the reader can do next.
    """

    def __init__(self, what: str, *, problems: tuple[str, ...], remedy: str = REMEDY) -> None:
        more = [f"and {len(problems) - TOLD} more"] if len(problems) > TOLD else []
        super().__init__(what, why="; ".join([*problems[:TOLD], *more]), remedy=remedy)
        self.problems = problems


def not_a_manifest(what: str) -> str:
    """The first words of every message about a bad file."""
    return f"{what} is not a build manifest"


@dataclass(frozen=True, slots=True, kw_only=True)
class Swiglu:
    """Parameters of `swigluoai_uninterleave`: `gate * sigmoid(alpha * gate) * (up + beta)`, both clamped to `limit`."""

    alpha: float = 1.702
    beta: float = 1.0
    limit: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model's mixture of experts, before it is split over ranks.

    hidden_size, moe_intermediate_size: elements; the latter of one expert.
    quantization: the modes to build for, of `MODES`.
    """

    name: str
    source: str
    hidden_size: int
    moe_intermediate_size: int
    experts: int
    top_k: int
    activation: str
    quantization: tuple[str, ...]
    swiglu: Swiglu | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Ranks that share each expert's columns (tp), and ranks that share the experts (ep). Every pair is built."""

    tp: tuple[int, ...] = (1,)
    ep: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Token counts of calls: those that CUDA graphs are captured for, and the most in one call."""

    capture: tuple[int, ...]
    maximum: int
    calls: tuple[str, ...] = ("wrapper",)
    scales: str = "per_expert"

    @property
    def counts(self) -> tuple[int, ...]:
        """Every token count to build for, ascending."""
        return tuple(sorted({*self.capture, self.maximum}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """Linear attention (gated delta rule), before it is split over ranks; of models that have none everything is empty.

    heads: of q and k. value_heads: of v, a multiple of `heads`. head_dim: elements of a head of q, k and v.
    drafted: tokens that one sequence verifies in a call, its own included.
    """

    heads: int | None = None
    value_heads: int | None = None
    head_dim: int | None = None
    drafted: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the artifacts are for.

    gpus:       described GPUs; kernels depend on their SM counts.
    arches:     architectures with a dot (`9.0a`) for kinds that need no more of a GPU, beyond those of `gpus`.
    cuda:       the CUDA release, such as `13.0`.
    flashinfer: versions of flashinfer-python.
    """

    gpus: tuple[GpuProduct, ...] = ()
    arches: tuple[str, ...] = ()
    cuda: str
    flashinfer: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One build manifest."""

    kinds: tuple[str, ...]
    model: Model
    parallel: Parallel
    tokens: Tokens
    targets: Targets
    linear: Linear = Linear()
    tuning: Tuning = field(default_factory=Tuning)


class _Product:
    """The name of a described GPU, in any of its spellings; parsed, it is the product."""

    wanted = "the name of a GPU product"

    def problem(self, value: Any) -> str:
        if not isinstance(value, str) or not 0 < len(value) <= 200:
            return f"not {self.wanted}, but {told(value)}"
        if find_product(value) is None:
            return f"no GPU product named {told(value)} is known {did_you_mean(value)}".strip()
        return ""

    def parse(self, value: Any) -> GpuProduct | None:
        return find_product(value)


FIELDS = (
    Field(path="format", rule=Choice(FORMAT)),
    Field(path="kinds", rule=Choice(*KINDS), least=1),
    Field(path="model.name", rule=Text()),
    Field(path="model.source", rule=Text()),
    Field(path="model.hidden_size", rule=Whole(16, 1 << 17)),
    Field(path="model.moe_intermediate_size", rule=Whole(16, 1 << 18)),
    Field(path="model.experts", rule=Whole(1, 4096)),
    Field(path="model.top_k", rule=Whole(1, 64)),
    Field(path="model.activation", rule=Choice(*ACTIVATIONS)),
    Field(path="model.swiglu_alpha", rule=Real(), default=None),
    Field(path="model.swiglu_beta", rule=Real(), default=None),
    Field(path="model.swiglu_limit", rule=Real(positive=True), default=None),
    Field(path="model.quantization", rule=Choice(*MODES), least=1),
    Field(path="parallel.tp", rule=Whole(1, 1024), least=1),
    Field(path="parallel.ep", rule=Whole(1, 1024), least=1),
    Field(path="tokens.capture", rule=Whole(1, _MOST), least=1),
    Field(path="tokens.maximum", rule=Whole(1, _MOST)),
    Field(path="tokens.calls", rule=Choice(*CALLS), least=1, default=("wrapper",)),
    Field(path="tokens.scales", rule=Choice(*SCALES), default="per_expert"),
    Field(path="linear.heads", rule=Whole(1, 4096), default=None),
    Field(path="linear.value_heads", rule=Whole(1, 4096), default=None),
    Field(path="linear.head_dim", rule=Whole(16, 1024), default=None),
    Field(path="linear.drafted", rule=Whole(2, 64), least=0, default=()),
    *TUNING_FIELDS,
    Field(path="targets.gpus", rule=_Product(), least=0, default=()),
    Field(path="targets.arches", rule=Text(pattern=_ARCH, wanted="an architecture such as 9.0a"), least=0, default=()),
    Field(path="targets.cuda", rule=Text(pattern=_CUDA, wanted="a CUDA release such as 13.0")),
    Field(path="targets.flashinfer", rule=Text(pattern=_VERSION, wanted="a version such as 0.7.4"), least=1),
)
"""The format: every field that there is. manifests/README.md documents them, and the tests walk this list."""

Found = Mapping[str, Any]
"""Path -> value, of the fields that are good."""


def _more_of_each_token_than_there_are(found: Found) -> Iterator[str]:
    experts, top_k = found.get("model.experts"), found.get("model.top_k")
    if experts and top_k and top_k > experts:
        yield f"model.top_k: {top_k} is more than the {experts} experts that there are"


def _swiglu_of_another_activation(found: Found) -> Iterator[str]:
    activation = found.get("model.activation", SWIGLU)
    for path in ("model.swiglu_alpha", "model.swiglu_beta", "model.swiglu_limit"):
        if activation != SWIGLU and found.get(path) is not None:
            yield f"{path}: only with activation {SWIGLU}, not with {activation}"


def _ranks_that_do_not_divide(found: Found) -> Iterator[str]:
    for path, of in (("parallel.tp", "model.moe_intermediate_size"), ("parallel.ep", "model.experts")):
        size = found.get(of)
        for rank in found.get(path, ()):
            if size and size % rank:
                yield f"{path}: {rank} does not divide {of} ({size})"


def _captured_beyond_the_maximum(found: Found) -> Iterator[str]:
    maximum, largest = found.get("tokens.maximum"), max(found.get("tokens.capture", ()), default=0)
    if maximum and maximum < largest:
        yield f"tokens.maximum: {maximum} is less than the capture size {largest}"


def _no_target(found: Found) -> Iterator[str]:
    if found.get("targets.gpus") == () and found.get("targets.arches") == ():
        yield "targets.gpus: neither a GPU nor (in arches) an architecture is named"


def _targets_that_b12x_does_not_know(found: Found) -> Iterator[str]:
    """FlashInfer's b12x MoE is for compute capability 12.0 and 12.1, with CUDA 13 (`cute_dsl/b12x_moe.py`, 0.6.18 to 0.7.4)."""
    kind = next((kind for kind in ("b12x-moe", *B12X_KINDS) if kind in found.get("kinds", ())), None)
    if kind is None:
        return
    if "targets.gpus" in found and not any(gpu.capability[0] == 12 for gpu in found["targets.gpus"]):
        yield f"targets.gpus: kind {kind} needs a GPU of compute capability 12.0 or 12.1, such as rtx-pro-6000"
    cuda = found.get("targets.cuda")
    if cuda and int(cuda.partition(".")[0]) < 13:
        yield f"targets.cuda: kind {kind} needs CUDA 13 or newer, not {cuda}"


def _linear_attention_that_is_not_there(found: Found) -> Iterator[str]:
    """What the kinds of linear attention need, and GPUs that FlashInfer has been shown to keep their kernels for."""
    asked = [kind for kind in found.get("kinds", ()) if kind in GDN_KINDS]
    heads = {name: found.get(f"linear.{name}") for name in ("heads", "value_heads", "head_dim")}
    for name, value in heads.items():
        if asked and value is None and f"linear.{name}" in found:
            yield f"linear.{name}: missing; kind {asked[0]} needs it"
    if heads["heads"] and heads["value_heads"] and heads["value_heads"] % heads["heads"]:
        yield f"linear.value_heads: {heads['value_heads']} is no multiple of the {heads['heads']} heads"
    if "gdn-verify" in asked and found.get("linear.drafted") == ():
        yield "linear.drafted: missing; kind gdn-verify needs it"
    if asked and "targets.gpus" in found and not any(gpu.capability == (9, 0) for gpu in found["targets.gpus"]):
        yield f"targets.gpus: kind {asked[0]} needs a GPU of compute capability 9.0, such as h200"


CONTRADICTIONS = (
    _more_of_each_token_than_there_are,
    _swiglu_of_another_activation,
    _ranks_that_do_not_divide,
    _captured_beyond_the_maximum,
    _no_target,
    _targets_that_b12x_does_not_know,
    _linear_attention_that_is_not_there,
    tuning_of_nothing,
)
"""What good fields may not say together. Each looks at the good fields only, so that one mistake is told once."""


def recipe_from_document(document: dict[str, Any], what: str) -> Recipe:
    """A recipe from the tables of a TOML document.

    Args:
        what: how messages name the document, such as its path.

    Raises:
        RecipeError: all problems at once.
    """
    values = read_fields(document, FIELDS)
    problems = [*values.problems, *(line for rule in CONTRADICTIONS for line in rule(values.found))]
    if problems:
        raise RecipeError(not_a_manifest(what), problems=tuple(problems))
    found = values.found

    def table(name: str) -> dict[str, Any]:
        return {one.name: found[one.path] for one in FIELDS if one.table == name}

    model = table("model")
    swiglu = {name: model.pop(f"swiglu_{name}") for name in ("alpha", "beta", "limit")}
    given = Swiglu(**{name: value for name, value in swiglu.items() if value is not None})
    return Recipe(
        kinds=found["kinds"],
        model=Model(**model, swiglu=given if model["activation"] == SWIGLU else None),
        parallel=Parallel(**table("parallel")),
        tokens=Tokens(**table("tokens")),
        targets=Targets(**table("targets")),
        linear=Linear(**table("linear")),
        tuning=Tuning(**table("tuning")),
    )


def _toml_reader() -> Any:
    """tomllib, or on Python 3.10 the package that it was made from."""
    import importlib
    import sys

    return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")


def parse_recipe(data: bytes, what: str) -> Recipe:
    """A recipe from the bytes of a TOML file.

    Args:
        what: how messages name the file, such as its path.

    Raises:
        RecipeError: too large, not UTF-8, not TOML, or with problems; all of them at once.
    """
    tomllib = _toml_reader()
    if problem := _refused_unread(data):
        raise RecipeError(not_a_manifest(what), problems=(problem,))
    try:
        document = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise RecipeError(not_a_manifest(what), problems=(f"not UTF-8: byte {error.start}",)) from error
    except RecursionError as error:
        raise RecipeError(not_a_manifest(what), problems=("not TOML: nested too deep",)) from error
    except (tomllib.TOMLDecodeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise RecipeError(not_a_manifest(what), problems=(f"not TOML: {why}",)) from error
    return recipe_from_document(document, what)


def _refused_unread(data: bytes) -> str:
    """Why no TOML reader is given these bytes; empty where one is."""
    if len(data) > MAX_BYTES:
        return f"larger than {MAX_BYTES >> 10} KiB"
    long = next((number for number, line in enumerate(data.split(b"\n"), 1) if len(line) > MAX_LINE), 0)
    return f"line {long} is longer than {MAX_LINE} bytes" if long else ""


def read_recipe(path: str) -> Recipe:
    """The recipe in a file.

    Raises:
        RecipeError: see `parse_recipe`; also if the file cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(not_a_manifest(path), problems=(f"cannot be read: {error.strerror}",)) from error
    return parse_recipe(data, path)
