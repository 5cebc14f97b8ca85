"""Which nvcc modules FlashInfer's sampling API reaches on a described GPU; part of the child `flashinfer_specs.py`.

The real public functions run, on tensors that have shapes and no memory, with every module replaced by a stand-in at the point
where FlashInfer would build and load it. So the set is FlashInfer's own choice, in whatever version is installed. A static walk
over the sources is held against it: a generator that can be reached by name but that no call reached is a warning, since it
would be a build left to a server's first request. Standard library, torch and FlashInfer only.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor

BATCH, DRAFTS = 4, 3

VOCABULARIES = (128, 4096, 32000, 151936, 262144)
"""Sizes on both sides of the thresholds that are known: 2048 and 8192 entries for top-k, 262144 for softmax."""

SWEPT = ("vocabulary", "dtype", "top_k", "top_k_max", "filter_apply_order")
"""Parameters that are known to choose a module: all their combinations are tried. Others are varied one at a time."""


ALONE = (32000, torch.float32)
"""The vocabulary and type at which other parameters are varied; all combinations of everything would take minutes."""


class StandIn:
    """A loaded module that does nothing: every function takes anything and returns a number that is also a truth."""

    def __init__(self, value: int) -> None:
        self._value = value

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments, **options: self._value


def reach(recorder: Any) -> dict[str, Any]:
    """The modules of the sampling API.

    Args:
        recorder: the parent script's Recorder.

    Returns:
        modules: names of nvcc modules, sorted; where a function could not be driven, also all that the sources mention.
        others: names of specs that nvcc does not build. calls: how many calls of each function came to an end.
        problems: the last failure of a call, by function. warnings: what a person should look at.
        not_for_this_gpu: generators in the sources that refuse this GPU, and how.
    """
    sampling = importlib.import_module("flashinfer.sampling")
    reached: dict[str, Any] = {}
    calls: dict[str, int] = {}
    problems: dict[str, str] = {}
    for value in (0, 1):  # what a module's own capability queries answer decides branches: try both
        _intercept(recorder.core, reached, StandIn(value))
        _forget()
        for name, function in public_functions(sampling).items():
            _drive(name, function, calls, problems)
    modules = {name for name, spec in reached.items() if recorder.is_nvcc(spec)}
    static, refused = _static_names(recorder)
    undriven = sorted(name for name in calls if not calls[name])
    warnings = [f"{name} can be reached by name, but no call reached it" for name in sorted(static - modules)]
    warnings += [f"{name} was reached by a call, but is not found in the sources" for name in sorted(modules - static)]
    warnings += [f"{name}: none of its calls came to an end: {problems[name]}" for name in undriven]
    return {
        "modules": sorted(modules | static if undriven else modules),
        "others": sorted(set(reached) - modules),
        "calls": calls,
        "problems": problems,
        "warnings": warnings,
        "not_for_this_gpu": refused,
    }


def _intercept(core: Any, reached: dict[str, Any], module: StandIn) -> None:
    """Puts the stand-in where FlashInfer builds and loads; every class that defines it is patched."""

    def build_and_load(spec: Any, *arguments: Any, **options: Any) -> StandIn:
        reached[spec.name] = spec
        return module

    for item in vars(core).values():
        if inspect.isclass(item) and "build_and_load" in vars(item):
            setattr(item, "build_and_load", build_and_load)  # noqa: B010  mypy knows no such attribute


def _forget() -> None:
    """Empties the caches that keep a loaded module, in every module of flashinfer that was imported."""
    for name, module in list(sys.modules.items()):
        if name.startswith("flashinfer."):
            for item in list(vars(module).values()):
                if hasattr(item, "cache_clear") and getattr(item, "__module__", "").startswith("flashinfer."):
                    item.cache_clear()


def public_functions(sampling: Any) -> dict[str, Callable[..., Any]]:
    """The functions that `flashinfer.sampling` defines for callers: no leading underscore, no `get_...` of a module."""
    found: dict[str, Callable[..., Any]] = {}
    for name, item in vars(sampling).items():
        public = callable(item) and not inspect.isclass(item) and not name.startswith(("_", "get_"))
        if public and item.__module__ == sampling.__name__ and item not in found.values():  # an alias counts once
            found[name] = item
    return found


def _drive(name: str, function: Callable[..., Any], calls: dict[str, int], problems: dict[str, str]) -> None:
    """Calls a function with every variant of its arguments; counts the calls that came to an end."""
    for helper in ("init_gpu_context", "init_cuda_context"):  # would make a real tensor on the described GPU
        if hasattr(fake_tensor, helper):
            setattr(fake_tensor, helper, lambda *arguments: None)
    calls.setdefault(name, 0)
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        for arguments in variants(inspect.signature(function).parameters):
            try:
                function(**{key: value() for key, value in arguments.items()})
                calls[name] += 1
            except Exception as error:  # noqa: BLE001  an argument that this version refuses; the other variants still count
                problems[name] = f"{type(error).__name__}: {str(error)[:200]}"


def variants(parameters: Any) -> Iterator[dict[str, Callable[[], Any]]]:
    """Arguments for a call, as functions that make them: combinations of `SWEPT`, then each other parameter on its own."""
    sweeps = {
        "vocabulary": VOCABULARIES,
        "dtype": (torch.float32, torch.bfloat16),
        "top_k": (1, 40, 2000, 3000, "tensor"),
        "top_k_max": (None, 40, 3000),
        "filter_apply_order": ("top_k_first", "joint"),
    }
    always = ("vocabulary", "dtype")
    swept = [name for name in SWEPT if name in always or name in parameters]
    for values in itertools.product(*(sweeps[name] for name in swept)):
        chosen = dict(zip(swept, values, strict=True))
        base = {name: maker for name in parameters if (maker := _argument(name, chosen)) is not None}
        yield base
        if values[:2] != ALONE:
            continue
        for name in parameters:
            for other in _others(name):
                yield {**base, name: other}
        if "seed" in parameters:
            yield {**base, "seed": lambda: 7, "offset": lambda: 0}
            yield {**base, "seed": _per_row(torch.int64), "offset": _per_row(torch.int64)}


def _argument(name: str, chosen: dict[str, Any]) -> Callable[[], Any] | None:
    """How to make one argument of a base call; None leaves the parameter to its default."""
    vocabulary, dtype = chosen["vocabulary"], chosen["dtype"]
    shapes = {
        "logits": (BATCH, vocabulary),
        "probs": (BATCH, vocabulary),
        "draft_probs": (BATCH, DRAFTS, vocabulary),
        "target_probs": (BATCH, DRAFTS + 1, vocabulary),
    }
    if name in shapes:
        return lambda: torch.empty(shapes[name], dtype=dtype, device="cuda:0")
    if name == "draft_token_ids":
        return lambda: torch.empty((BATCH, DRAFTS), dtype=torch.int32, device="cuda:0")
    if chosen.get(name) == "tensor":
        return lambda: torch.empty(BATCH, dtype=torch.int32, device="cuda:0")
    if name in chosen:
        return lambda: chosen[name]
    if name in ("top_p", "min_p"):
        return lambda: 0.9
    return None


def _per_row(dtype: Any) -> Callable[[], Any]:
    return lambda: torch.empty(BATCH, dtype=dtype, device="cuda:0")


def _others(name: str) -> tuple[Callable[[], Any], ...]:
    """Other values of one parameter."""
    flag = (lambda: True, lambda: False)
    table: dict[str, tuple[Callable[[], Any], ...]] = {
        "top_p": (_per_row(torch.float32),),
        "min_p": (_per_row(torch.float32),),
        "temperature": (_per_row(torch.float32), lambda: 0.7),
        "indices": (_per_row(torch.int32), _per_row(torch.int64)),
        "deterministic": flag,
        "is_deterministic": flag,
        "return_valid": flag,
        "enable_pdl": flag,
        "generator": (lambda: torch.cuda.default_generators[0],),
        "maybe_output_accepted_token_num": (_per_row(torch.int32),),
        "maybe_output_emitted_draft_token_num": (_per_row(torch.int32),),
    }
    return table.get(name, ())


def _static_names(recorder: Any) -> tuple[set[str], dict[str, str]]:
    """Names of the nvcc modules whose generators the sources of the sampling API mention, and those refused for this GPU."""
    names, refused = set(), {}
    for generator, path in static_generators(recorder.package, "sampling.py"):
        module = importlib.import_module("flashinfer." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."))
        try:
            spec = getattr(module, generator)()
        except Exception as error:  # noqa: BLE001  a generator for other GPUs says so by raising
            refused[generator] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        if recorder.is_nvcc(spec):
            names.add(spec.name)
    return names, refused


def static_generators(package: Path, start: str) -> set[tuple[str, str]]:
    """Every `gen_*_module` that the public functions of a file can reach by name: (function, path inside the package).

    Follows names through functions, nested functions, and imports inside the package, also those inside a function. Names in
    decorators are not followed: they are for tracing.
    """
    files: dict[str, _File] = {}

    def file(path: str) -> _File:
        if path not in files:
            files[path] = _File(package, path)
        return files[path]

    open_items = [(start, name) for name in file(start).definitions if not name.startswith("_")]
    seen, found = set(open_items), set()
    while open_items:
        path, name = open_items.pop()
        source = file(path)
        if name in source.definitions and name.startswith("gen_"):
            found.add((name, path))
            continue
        for target in source.mentioned(name):
            if target not in seen:
                seen.add(target)
                open_items.append(target)
    return found


class _File:
    """Top-level definitions and relative imports of one source file of the package."""

    def __init__(self, package: Path, path: str) -> None:
        self.package, self.path = package, path
        tree = ast.parse((package / path).read_text(encoding="utf-8"))
        kinds = (ast.FunctionDef, ast.ClassDef)
        self.definitions: dict[str, ast.AST] = {node.name: node for node in ast.walk(tree) if isinstance(node, kinds)}
        self.imports = dict(self._imports(tree))

    def _imports(self, tree: ast.AST) -> Iterator[tuple[str, tuple[str, str]]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                folder = Path(self.path).parents[node.level - 1]
                base = folder.joinpath(*(node.module or "").split(".")) if node.module else folder
                for alias in node.names:
                    if (path := self._file(base)) is not None:
                        yield alias.asname or alias.name, (path, alias.name)

    def _file(self, base: Path) -> str | None:
        for candidate in (base.with_name(base.name + ".py") if base.name else base, base / "__init__.py"):
            if (self.package / candidate).is_file():
                return candidate.as_posix()
        return None

    def mentioned(self, name: str) -> Iterator[tuple[str, str]]:
        """Where the names lie that a definition mentions; a name that is imported leads to its file."""
        if name not in self.definitions:
            if name in self.imports:
                yield self.imports[name]
            return
        body = getattr(self.definitions[name], "body", [])
        for node in itertools.chain.from_iterable(ast.walk(statement) for statement in body):
            if isinstance(node, ast.Name):
                if node.id in self.definitions:
                    yield self.path, node.id
                elif node.id in self.imports:
                    yield self.imports[node.id]
