"""What to build: the TOML files of `manifests/`, one a model. Such a file is a "build manifest" in prose, a `Recipe` here.

The format is documented in manifests/README.md. A recipe is parsed once, into frozen values; every problem is reported at once,
each with its path (`model.experts: ...`). Parsing does no I/O except in `read_recipe`. A recipe that parses is consistent in
itself; whether FlashInfer's kernels allow its shapes is asked of `kcache.recipe_shapes`. Not the manifest of an entry, which is
`kcache.manifest`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kcache.errors import UsageError
from kcache.gpu_products import GpuProduct, did_you_mean, find_product

FORMAT = "kcache.recipe/1"

MAX_BYTES = 256 << 10
"""A recipe is a page of text; what is larger is something else."""

KINDS = ("sampling", "b12x-moe", "autotune")
"""Cache kinds that a recipe may ask for."""

ACTIVATIONS = ("silu", "gelu_tanh", "swigluoai_uninterleave", "relu2")
"""Activations of FlashInfer's b12x MoE (`blackwell_sm12x/moe_activation.py`, SUPPORTED_MOE_ACTIVATIONS, 0.7.4)."""

MODES = ("nvfp4", "mxfp4", "w4a16")
"""Quantisation modes of FlashInfer's b12x MoE (`blackwell_sm12x/moe_dispatch.py`, _normalize_quant_mode, 0.7.4)."""

CALLS = ("wrapper", "function", "function-ascending")
"""How an engine calls FlashInfer: `B12xMoEWrapper` with buffers for the maximum, or `b12x_fused_moe`, whose cached workspace
grows with use, so that the order of its calls enters the kernels' names: from the largest token count down (as engines warm up),
or from the smallest up."""

SCALES = ("per_expert", "shared")

_MOST = 1 << 20
_ARCH = re.compile(r"[0-9]{1,2}\.[0-9][af]?")
_CUDA = re.compile(r"[0-9]{2}\.[0-9]{1,2}")
_VERSION = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+(?:\.?(?:post|rc|dev)[0-9]+)?")


class RecipeError(UsageError):
    """A build manifest cannot be used.

    Args:
        what: which file.
        problems: every problem found, each with its path, such as `model.experts: not a whole number from 1 to 4096`.
    """

    def __init__(self, what: str, *, problems: tuple[str, ...]) -> None:
        super().__init__(what, why="; ".join(problems), remedy="manifests/README.md describes the format.")
        self.problems = problems


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


@dataclass(slots=True)
class _Table:
    """One table of the document: takes fields out of it, and collects problems with their paths."""

    path: str
    values: dict[str, Any]
    problems: list[str]
    seen: set[str] = field(default_factory=set)

    def _take(self, name: str, *, required: bool) -> Any:
        self.seen.add(name)
        if self.values.get(name) is None and required:
            self.problem(name, "missing")
        return self.values.get(name)

    def problem(self, name: str, text: str) -> None:
        self.problems.append(f"{self.path}{name}: {text}")

    def table(self, name: str) -> _Table:
        value = self._take(name, required=True)
        if value is not None and not isinstance(value, dict):
            self.problem(name, f"not a table, but {_told(value)}")
        return _Table(f"{self.path}{name}.", value if isinstance(value, dict) else {}, self.problems)

    def _one(self, name: str, ok: Callable[[Any], bool], wanted: str, fallback: Any, *, required: bool = True) -> Any:
        value = self._take(name, required=required)
        if value is None:
            return fallback
        if not ok(value):
            self.problem(name, f"not {wanted}, but {_told(value)}")
            return fallback
        return value

    def text(self, name: str, *, required: bool = True) -> str:
        ok = lambda value: isinstance(value, str) and 0 < len(value) <= 200  # noqa: E731
        return str(self._one(name, ok, "a text of 1 to 200 characters", "", required=required))

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        wanted = f"one of {', '.join(choices)}"
        ok = lambda value: isinstance(value, str) and value in choices  # noqa: E731
        return str(self._one(name, ok, wanted, default or choices[0], required=not default))

    def number(self, name: str, least: int, most: int) -> int:
        return int(self._one(name, lambda value: _whole(value, least, most), f"a whole number from {least} to {most}", 0))

    def real(self, name: str, default: float | None, *, above: float) -> float | None:
        wanted = "a finite number" + (f" above {above:g}" if above > -math.inf else "")
        value = self._one(name, lambda value: _finite(value) and value > above, wanted, default, required=False)
        return None if value is None else float(value)

    def matching(self, name: str, pattern: re.Pattern[str], wanted: str) -> str:
        return str(self._one(name, lambda value: isinstance(value, str) and bool(pattern.fullmatch(value)), wanted, ""))

    def list_of(
        self, name: str, ok: Callable[[Any], bool], wanted: str, default: tuple[Any, ...] | None = None
    ) -> tuple[Any, ...]:
        """A list without doubles of which every item is `ok`; not empty unless a default is given."""
        value = self._take(name, required=default is None)
        if value is None:
            return default or ()
        if not isinstance(value, list) or (default is None and not value) or len(value) > 4096:
            self.problem(name, f"not a list of {wanted}")
            return default or ()
        kept = []
        for index, item in enumerate(value):
            if not ok(item):
                self.problem(f"{name}[{index}]", f"not {wanted}, but {_told(item)}")
            elif item in kept:
                self.problem(f"{name}[{index}]", f"{_told(item)} is there twice")
            else:
                kept.append(item)
        return tuple(kept)

    def choices(self, name: str, choices: tuple[str, ...], default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        return self.list_of(name, lambda item: isinstance(item, str) and item in choices, f"one of {', '.join(choices)}", default)

    def finish(self) -> None:
        for name in self.values:
            if name not in self.seen:
                self.problem(name, f"unknown; known are {', '.join(sorted(self.seen))}")


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _told(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _model(table: _Table) -> Model:
    activation = table.choice("activation", ACTIVATIONS, "")
    model = Model(
        name=table.text("name"),
        source=table.text("source"),
        hidden_size=table.number("hidden_size", 16, 1 << 17),
        moe_intermediate_size=table.number("moe_intermediate_size", 16, 1 << 18),
        experts=table.number("experts", 1, 4096),
        top_k=table.number("top_k", 1, 64),
        activation=activation,
        quantization=table.choices("quantization", MODES),
        swiglu=_swiglu(table, activation),
    )
    if 0 < model.experts < model.top_k:
        table.problem("top_k", f"{model.top_k} is more than the {model.experts} experts that there are")
    table.finish()
    return model


def _swiglu(table: _Table, activation: str) -> Swiglu | None:
    given = [name for name in ("swiglu_alpha", "swiglu_beta", "swiglu_limit") if name in table.values]
    alpha = table.real("swiglu_alpha", 1.702, above=-math.inf)
    beta = table.real("swiglu_beta", 1.0, above=-math.inf)
    limit = table.real("swiglu_limit", None, above=0.0)
    if activation != "swigluoai_uninterleave":
        for name in given:
            table.problem(name, f"only with activation swigluoai_uninterleave, not with {activation}")
        return None
    assert alpha is not None and beta is not None
    return Swiglu(alpha=alpha, beta=beta, limit=limit)


def _parallel(table: _Table, model: Model) -> Parallel:
    wanted = "a whole number from 1 to 1024"
    parallel = Parallel(
        tp=table.list_of("tp", lambda item: _whole(item, 1, 1024), wanted),
        ep=table.list_of("ep", lambda item: _whole(item, 1, 1024), wanted),
    )
    for name, ranks, size, what in (
        ("tp", parallel.tp, model.moe_intermediate_size, "model.moe_intermediate_size"),
        ("ep", parallel.ep, model.experts, "model.experts"),
    ):
        for rank in ranks:
            if size and size % rank:
                table.problem(name, f"{rank} does not divide {what} ({size})")
    table.finish()
    return parallel


def _tokens(table: _Table) -> Tokens:
    wanted = f"a whole number from 1 to {_MOST}"
    tokens = Tokens(
        capture=table.list_of("capture", lambda item: _whole(item, 1, _MOST), wanted),
        maximum=table.number("maximum", 1, _MOST),
        calls=table.choices("calls", CALLS, ("wrapper",)) or ("wrapper",),
        scales=table.choice("scales", SCALES, "per_expert"),
    )
    largest = max(tokens.capture, default=0)
    if 0 < tokens.maximum < largest:
        table.problem("maximum", f"{tokens.maximum} is less than the capture size {largest}")
    table.finish()
    return tokens


def _targets(table: _Table, kinds: tuple[str, ...]) -> Targets:
    before = len(table.problems)
    names = table.list_of("gpus", lambda item: isinstance(item, str), "the name of a GPU product", ())
    gpus: list[GpuProduct] = []
    for index, name in enumerate(names):
        found = find_product(name)
        if found is None:
            table.problem(f"gpus[{index}]", " ".join(f"no GPU product named {name!r} is known {did_you_mean(name)}".split()))
        elif found in gpus:
            table.problem(f"gpus[{index}]", f"{name!r} is {found.slug}, which is there already")
        else:
            gpus.append(found)
    targets = Targets(
        gpus=tuple(gpus),
        arches=table.list_of("arches", lambda item: _matches(item, _ARCH), "an architecture such as 9.0a", ()),
        cuda=table.matching("cuda", _CUDA, "a CUDA release such as 13.0"),
        flashinfer=table.list_of("flashinfer", lambda item: _matches(item, _VERSION), "a version such as 0.7.4"),
    )
    if len(table.problems) == before:
        _check_targets(table, targets, kinds)
    table.finish()
    return targets


def _check_targets(table: _Table, targets: Targets, kinds: tuple[str, ...]) -> None:
    """FlashInfer's b12x MoE is for compute capability 12.0 and 12.1, with CUDA 13 (`cute_dsl/b12x_moe.py`, 0.6.18 to 0.7.4)."""
    if not targets.gpus and not targets.arches:
        table.problem("gpus", "neither a GPU nor (in arches) an architecture is named")
    if "b12x-moe" not in kinds:
        return
    if not any(gpu.capability[0] == 12 for gpu in targets.gpus):
        table.problem("gpus", "kind b12x-moe needs a GPU of compute capability 12.0 or 12.1, such as rtx-pro-6000")
    if int(targets.cuda.partition(".")[0]) < 13:
        table.problem("cuda", f"kind b12x-moe needs CUDA 13 or newer, not {targets.cuda}")


def _matches(value: Any, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def recipe_from_document(document: dict[str, Any], what: str) -> Recipe:
    """A recipe from the tables of a TOML document.

    Args:
        what: how messages name the document, such as its path.

    Raises:
        RecipeError: all problems at once.
    """
    problems: list[str] = []
    top = _Table("", document, problems)
    if document.get("format") != FORMAT:
        top.problem("format", f"not {FORMAT!r}, but {_told(document.get('format'))}" if "format" in document else "missing")
    top.seen.add("format")
    kinds = top.choices("kinds", KINDS)
    model = _model(top.table("model"))
    recipe = Recipe(
        kinds=kinds,
        model=model,
        parallel=_parallel(top.table("parallel"), model),
        tokens=_tokens(top.table("tokens")),
        targets=_targets(top.table("targets"), kinds),
    )
    top.finish()
    if problems:
        raise RecipeError(f"{what} is not a build manifest", problems=tuple(problems))
    return recipe


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
    if len(data) > MAX_BYTES:
        raise RecipeError(f"{what} is not a build manifest", problems=(f"larger than {MAX_BYTES >> 10} KiB",))
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{what} is not a build manifest", problems=(f"not UTF-8: byte {error.start}",)) from error
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise RecipeError(f"{what} is not a build manifest", problems=(f"not TOML: {str(error)[:200]}",)) from error
    return recipe_from_document(document, what)


def read_recipe(path: str) -> Recipe:
    """The recipe in a file.

    Raises:
        RecipeError: see `parse_recipe`; also if the file cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError(f"{path} is not a build manifest", problems=(f"cannot be read: {error.strerror}",)) from error
    return parse_recipe(data, path)
