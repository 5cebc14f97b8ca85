"""Facts about an environment, and the key under which an entry is stored.

A key holds every ingredient that decides whether an artifact may be used; its fingerprint (the digest of its canonical form)
names the entry. `KEY_SCHEMA` is part of the key: raise it whenever an ingredient is added, removed or given another meaning,
so that old entries are not matched by new rules. This module computes nothing about the host: facts come from `kcache.probe`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kcache import digest
from kcache.errors import ManifestError
from kcache.values import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KEY_SCHEMA = 1

# How a key ingredient is compared is stated in kcache/docs/decisions/0003-match-rules.md.
KIND_MODULES = "modules"
"""The kind of entries for nvcc modules that were asked for by name: one entry each."""

NVCC = "nvcc"
CUTE_DSL = "cute-dsl"
B12X = "b12x"
AUTOTUNE = "autotune"

INGREDIENTS: Mapping[str, tuple[str, ...]] = {
    NVCC: (
        "platform.machine",
        "flashinfer.version",
        "flashinfer.sources",
        "cuda.release",
        "gpu.arch",
        "tvm_ffi.version",
        "build.flags",
    ),
    CUTE_DSL: (
        "platform.machine",
        "flashinfer.version",
        "flashinfer.sources",
        "cuda.release",
        "gpu.cute_arch",
        "gpu.sm_count",
        "tvm_ffi.version",
        "cutlass_dsl.wheels",
        "kernels",
    ),
    B12X: (
        "platform.machine",
        "flashinfer.version",
        "cuda.release",
        "gpu.cute_arch",
        "gpu.sm_count",
        "cutlass_dsl.wheels",
        "b12x.package",
        "programs",
    ),
    AUTOTUNE: (
        "platform.machine",
        "flashinfer.version",
        "cuda.release",
        "gpu.cute_arch",
        "gpu.sm_count",
        "tuning.environment",
        "tuning.results",
    ),
}
"""The ingredients of a key by layout: of nvcc modules, of FlashInfer's CuTe-DSL kernels, of programs of the package b12x, and of
the tuner's results. All strings, all required:

platform.machine    `uname -m`, such as `x86_64`
flashinfer.version  the version of flashinfer-python, such as `0.7.4`
flashinfer.sources  digest of {path inside the package: digest} over every FlashInfer file that the compiler read, or, of CuTe-DSL
                    kernels, that FlashInfer keys them by
cuda.release        the release of the toolkit that compiled, or that CuTe-DSL kernels were named for, such as `13.0`
gpu.arch            the architecture in FlashInfer's spelling without a dot, such as `90a` or `120f`
gpu.cute_arch       the architecture in CuTe-DSL's spelling, such as `sm_120a`
gpu.sm_count        streaming multiprocessors of the GPU: names and grid sizes of kernels depend on it
tvm_ffi.version     apache-tvm-ffi whose headers were compiled in, or whose ABI kernels speak, such as `0.1.15.post2`
build.flags         `default`, or the digest of compiler flags that a user added
cutlass_dsl.wheels  digest of {distribution: [version, content]} of the compiler, every nvidia-cutlass-dsl*
kernels             digest of the sorted names of the kernels in the entry
b12x.package        b12x's own fingerprint of its files, 64 hex digits
programs            digest of the sorted names of the files in the entry
tuning.environment  digest of the environment that FlashInfer wrote beside the results
tuning.results      digest of {path: digest} of the files in the entry
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One thing that is known, known to be absent, or could not be found out.

    Absent is a value (a package that is not installed); undetermined is not, and never equals anything, itself included.
    """

    value: str | None = None
    undetermined: str = ""
    """Why the value could not be found out; empty when it could."""

    @property
    def known(self) -> bool:
        """Whether there is a value to compare with: found out, and not absent."""
        return self.value is not None and not self.undetermined

    @property
    def absent(self) -> bool:
        return self.value is None and not self.undetermined

    def same(self, other: Fact) -> bool:
        """Equality that an undetermined value never passes."""
        return not self.undetermined and not other.undetermined and self.value == other.value

    def describe(self) -> str:
        """For messages: the value, `absent`, or why there is none."""
        if self.undetermined:
            return f"could not be found out ({self.undetermined})"
        return "absent" if self.value is None else self.value

    def to_json(self) -> dict[str, str | bool]:
        if self.undetermined:
            return {"undetermined": self.undetermined}
        return {"absent": True} if self.value is None else {"value": self.value}


ABSENT = Fact()


def known(value: str) -> Fact:
    """A fact that was found out."""
    return Fact(value=value)


def undetermined(why: str) -> Fact:
    """A fact that could not be found out, with the reason."""
    return Fact(undetermined=why)


_NOT_RECORDED = undetermined("not recorded in this environment")
_NOT_LOOKED_FOR = undetermined("not looked for in this environment")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What is known of one environment: this host, a described one, or one saved by `kcache env --save`.

    facts:      dotted name -> fact. Names in use are listed in kcache/docs/design.md, section "Facts".
    archs:      GPU architectures in FlashInfer's spelling without a dot (`90a`), sorted; several on a mixed host; empty where
                no GPU is visible and none was described.
    libraries:  soname -> fact; the value is the path of the file that the loader would take.
    sources:    path inside the flashinfer package, with `/` -> fact; the value is the file's digest.
    """

    facts: Mapping[str, Fact]
    archs: tuple[str, ...] = ()
    libraries: Mapping[str, Fact] = field(default_factory=dict)
    sources: Mapping[str, Fact] = field(default_factory=dict)

    def fact(self, name: str) -> Fact:
        """The fact of this name; one that was never looked at is undetermined."""
        return self.facts.get(name, _NOT_RECORDED)

    def library(self, soname: str) -> Fact:
        return self.libraries.get(soname, _NOT_LOOKED_FOR)

    def source(self, path: str) -> Fact:
        return self.sources.get(path, _NOT_RECORDED)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": ENVIRONMENT_FORMAT,
            "facts": {name: fact.to_json() for name, fact in sorted(self.facts.items())},
            "archs": list(self.archs),
            "libraries": {name: fact.to_json() for name, fact in sorted(self.libraries.items())},
            "sources": {name: fact.to_json() for name, fact in sorted(self.sources.items())},
        }


ENVIRONMENT_FORMAT = "kcache.env/1"


def parse_fact(document: Any, path: str, problems: list[str]) -> Fact:
    """A fact from its JSON form; a malformed one is added to `problems` and comes back undetermined."""
    if isinstance(document, dict) and len(document) == 1:
        if isinstance(value := document.get("value"), str):
            return known(value)
        if document.get("absent") is True:
            return ABSENT
        if isinstance(why := document.get("undetermined"), str) and why:
            return undetermined(why)
    problems.append(f'{path}: not one of {{"value": text}}, {{"absent": true}}, {{"undetermined": text}}')
    return undetermined("malformed")


def _parse_facts(document: dict[str, Any], name: str, problems: list[str]) -> dict[str, Fact]:
    part = document.get(name)
    if not isinstance(part, dict):
        problems.append(f"{name}: not an object")
        return {}
    return {str(key): parse_fact(value, f"{name}.{key}", problems) for key, value in part.items()}


def parse_environment(document: Any) -> Environment:
    """An environment from the JSON that `kcache env --save` wrote.

    Raises:
        ManifestError: all problems at once, each with its path.
    """
    if not isinstance(document, dict) or document.get("format") != ENVIRONMENT_FORMAT:
        raise ManifestError(
            "not an environment document",
            problems=(f"format: expected {ENVIRONMENT_FORMAT}",),
            remedy="Write one with `kcache env --save FILE` on the host that it describes.",
        )
    problems: list[str] = []
    archs = document.get("archs")
    if not isinstance(archs, list) or not all(isinstance(a, str) and ARCH.fullmatch(a) for a in archs):
        problems.append("archs: not a list of architectures such as 90a")
        archs = []
    environment = Environment(
        facts=_parse_facts(document, "facts", problems),
        archs=tuple(archs),
        libraries=_parse_facts(document, "libraries", problems),
        sources=_parse_facts(document, "sources", problems),
    )
    if problems:
        raise ManifestError("environment document cannot be used", problems=tuple(problems))
    return environment


ARCH = re.compile(r"[0-9]{2,3}[af]?")
"""An architecture in FlashInfer's spelling without a dot: digits of major and minor, then a suffix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryKey:
    """The key of an entry: its kind, its modules and the ingredients of `INGREDIENTS`.

    kind:     the cache kind as users name it, such as `sampling`; `modules` for modules asked for by name.
    modules:  the names of FlashInfer's modules in the entry, sorted.
    layout:   what lies in the archive and how it is accepted: `nvcc`, `cute-dsl`, `b12x` or `autotune`.
    model:    the model that the entry was built for, as its build manifest names it; empty for kinds that suit every model.
    variant:  which of the model's entries this is, such as `nvfp4-tp1-ep1`; empty where there is one.
    """

    kind: str
    modules: tuple[str, ...]
    ingredients: Mapping[str, str]
    layout: str = NVCC
    model: str = ""
    variant: str = ""

    def to_json(self) -> dict[str, Any]:
        """The canonical form. The layout of nvcc modules, a model and a variant that are not there, are left out."""
        document: dict[str, Any] = {
            "schema": KEY_SCHEMA,
            "kind": self.kind,
            "modules": list(self.modules),
            "ingredients": dict(sorted(self.ingredients.items())),
        }
        if self.layout != NVCC:
            document["layout"] = self.layout
        return document | {name: text for name, text in (("model", self.model), ("variant", self.variant)) if text}

    @property
    def arch(self) -> str:
        """The architecture without dot and prefix: FlashInfer's `120f` of an nvcc module, CuTe-DSL's `120a` of a kernel."""
        return self.ingredients["gpu.arch"] if self.layout == NVCC else self.ingredients["gpu.cute_arch"].removeprefix("sm_")

    @property
    def title(self) -> str:
        """For messages: `sampling+topk`, or `b12x_moe of Qwen/Qwen3-30B-A3B nvfp4-tp1-ep1`."""
        of = " ".join(text for text in (self.model, self.variant) if text)
        return "+".join(self.modules) + (f" of {of}" if of else "")

    @property
    def fingerprint(self) -> str:
        """The digest of the key; the name of the entry."""
        return digest.of_document(self.to_json())


NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,254}")
"""A module or kind name: one path segment that cannot climb, hide or start an option."""

MODEL = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(/[A-Za-z0-9_][A-Za-z0-9_.+-]*)?")
"""The name of a model, such as `Qwen/Qwen3-30B-A3B`."""


def parse_key(document: Any, path: str, problems: list[str]) -> EntryKey | None:
    """A key from its JSON form, or None with every problem added to `problems`."""
    before = len(problems)
    if not isinstance(document, dict):
        problems.append(f"{path}: not an object")
        return None
    if document.get("schema") != KEY_SCHEMA:
        problems.append(f"{path}.schema: {document.get('schema')!r}, this kcache reads {KEY_SCHEMA}")
    kind = document.get("kind")
    if not isinstance(kind, str) or not NAME.fullmatch(kind):
        problems.append(f"{path}.kind: not a name")
    modules = document.get("modules")
    if not isinstance(modules, list) or not modules or not all(isinstance(m, str) and NAME.fullmatch(m) for m in modules):
        problems.append(f"{path}.modules: not a list of module names")
    elif sorted(set(modules)) != modules:
        problems.append(f"{path}.modules: not sorted, or a name twice")
    layout = document.get("layout", NVCC)
    if layout not in INGREDIENTS or (layout == NVCC and "layout" in document):
        problems.append(f"{path}.layout: {layout!r}, this kcache reads {', '.join(INGREDIENTS)}")
    else:
        _check_ingredients(document.get("ingredients"), INGREDIENTS[layout], f"{path}.ingredients", problems)
    for name, pattern in (("model", MODEL), ("variant", NAME)):
        if name in document and not (isinstance(text := document[name], str) and pattern.fullmatch(text) and len(text) < 255):
            problems.append(f"{path}.{name}: not a name")
    if len(problems) > before:
        return None
    return EntryKey(
        kind=document["kind"],
        modules=tuple(document["modules"]),
        ingredients=document["ingredients"],
        layout=layout,
        model=document.get("model", ""),
        variant=document.get("variant", ""),
    )


def _check_ingredients(ingredients: Any, names: tuple[str, ...], path: str, problems: list[str]) -> None:
    if not isinstance(ingredients, dict):
        problems.append(f"{path}: not an object")
        return
    problems += [f"{path}.{n}: missing" for n in names if not isinstance(ingredients.get(n), str) or not ingredients[n]]
    problems += [f"{path}.{name}: unknown" for name in ingredients if name not in names]
