"""Build manifests for people: one made from a model's config, and what a file of them is good for.

Reading is done by the functions that `kcache build` reads with (`kcache.recipe.read_recipe`), so that what is good here is good
there. Nothing is compiled and FlashInfer is not asked: its rules for shapes are `kcache.recipe_shapes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcache.errors import UsageError
from kcache.recipe import Recipe, RecipeError, read_recipe
from kcache.recipe_config import MAX_BYTES, REMARKS, REMEDY, FromConfig, parse_config, recipe_from_config
from kcache.recipe_shapes import Shape, check_shapes, in_memory_only, shapes
from kcache.recipe_text import render_recipe

GOOD, BAD = "good", "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeReport:
    """One mode on one layout with one FlashInfer version: allowed if `reasons` is empty. `left` is what is left to warmup."""

    flashinfer: str
    shape: Shape
    hidden: int
    reasons: tuple[str, ...]
    left: str

    def to_json(self) -> dict[str, Any]:
        shape = self.shape
        document = {"flashinfer": self.flashinfer, "mode": shape.mode, "tp": shape.tp, "ep": shape.ep, "hidden_size": self.hidden}
        document |= {"intermediate_size": shape.inter, "local_experts": shape.local_experts}
        return {**document, "allowed": not self.reasons, "reasons": list(self.reasons), "left_to_warmup": self.left}


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestReport:
    """One file: a recipe and its shapes, or the problems that make it none. Shapes are of kind b12x-moe."""

    path: str
    recipe: Recipe | None = None
    problems: tuple[str, ...] = ()
    shapes: tuple[ShapeReport, ...] = ()

    @property
    def status(self) -> str:
        return BAD if self.recipe is None else GOOD

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {"path": self.path, "status": self.status, "problems": list(self.problems)}
        if self.recipe is not None:
            document |= {"model": self.recipe.model.name, "kinds": list(self.recipe.kinds)}
        return {**document, "shapes": [shape.to_json() for shape in self.shapes]}


def check_manifest(path: str) -> ManifestReport:
    """What one file is good for. Never raises for what the file holds."""
    try:
        recipe = read_recipe(path)
    except RecipeError as error:
        return ManifestReport(path=path, problems=error.problems)
    return ManifestReport(path=path, recipe=recipe, shapes=shape_reports(recipe))


def shape_reports(recipe: Recipe) -> tuple[ShapeReport, ...]:
    """Every shape of a recipe with every FlashInfer version that it names; none where it does not ask for b12x-moe."""
    if "b12x-moe" not in recipe.kinds:
        return ()
    found = []
    for flashinfer in recipe.targets.flashinfer:
        problems = check_shapes(recipe, flashinfer)
        for shape in shapes(recipe):
            reasons = tuple(problem.why for problem in problems if problem.shape == shape)
            left = "" if reasons else in_memory_only(shape)
            found.append(
                ShapeReport(flashinfer=flashinfer, shape=shape, hidden=recipe.model.hidden_size, reasons=reasons, left=left)
            )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A manifest made from a config: its text, and how it came about."""

    text: str
    made: FromConfig

    @property
    def shapes(self) -> tuple[ShapeReport, ...]:
        return shape_reports(self.made.recipe)

    def to_json(self, output: str | None) -> dict[str, Any]:
        document: dict[str, Any] = {"model": self.made.recipe.model.name, "output": output, "notes": list(self.made.notes)}
        return {**document, "manifest": self.text, "shapes": [shape.to_json() for shape in self.shapes]}


def manifest_from_config(path: str, *, name: str = "", source: str = "") -> Made:
    """A manifest from the config.json at this path.

    Raises:
        RecipeError: it cannot be read, or is not the config of a mixture of experts.
    """
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise RecipeError(f"{path} is not a model's config.json", problems=(problem,), remedy=REMEDY) from error
    made = recipe_from_config(parse_config(data, path), name=name, source=source, what=path)
    refused = [f"Not allowed: {text}" for text in refusals(shape_reports(made.recipe))]
    unsaid = [f"To look at: {note}" for note in made.notes if note.partition(":")[0] not in REMARKS]
    head = [
        f"Values: {made.recipe.model.name}, from {made.recipe.model.source}, by `kcache manifest from-config`.",
        *unsaid,
        *refused,
    ]
    return Made(text=render_recipe(made.recipe, note="\n".join(head), remarks=REMARKS), made=made)


def refusals(reports: tuple[ShapeReport, ...]) -> list[str]:
    """The shapes that are not allowed, each once with its reasons and the FlashInfer versions that say so."""
    versions: dict[str, list[str]] = {}
    for report in reports:
        if report.reasons:
            shape = report.shape
            text = f"{shape.mode} with tp {shape.tp}, ep {shape.ep}: {'; '.join(report.reasons)}"
            versions.setdefault(text, []).append(report.flashinfer)
    return [f"{text} (FlashInfer {', '.join(found)})" for text, found in versions.items()]


def write_manifest(text: str, path: Path) -> None:
    """Writes a manifest where there is no file yet: what is there may hold a person's work.

    Raises:
        UsageError: a file is there, or none can be written.
    """
    try:
        with path.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} is there already", remedy="Name another file with -o, or remove it first.") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be written", why=error.strerror or "") from error
