"""What stores publish, by architecture, CUDA, FlashInfer, model and kind: the table that people ask for.

Made from index lines alone, so it costs one read for each environment, however many entries there are. A cell says how much was
published, not that it fits a host: that is `kcache.match`. Pure; rendering for people is in `kcache.matrix_text` and above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from kcache.index import IndexEntry
from kcache.key import KIND_MODULES, EntryKey
from kcache.values import dataclass

FORMAT = "kcache.matrix/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a cell is in the matrix. `what` is the module's name for single modules; `model` is empty for kinds that suit all."""

    kind: str
    what: str
    model: str
    flashinfer: str
    cuda: str
    machine: str
    arch: str

    @property
    def row(self) -> tuple[str, str, str]:
        """What is served: model, kind, module."""
        return (self.model, self.kind, self.what)

    @property
    def environment(self) -> tuple[str, str, str]:
        """What it runs in: FlashInfer, CUDA, machine."""
        return (self.flashinfer, self.cuda, self.machine)

    @property
    def title(self) -> str:
        """For people: `b12x-moe of Qwen/Qwen3-30B-A3B`, `cascade (modules)`, `sampling`."""
        name = f"{self.what} ({self.kind})" if self.what else self.kind
        return f"{name} of {self.model}" if self.model else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Every entry of one place.

    size, unpacked: bytes of archives, and of what is in them. build_seconds: compile time that they save.
    first, last:    when the oldest and the newest was built; empty where no line says.
    signers:        as the indexes say; lines that name none are counted in `signer_not_stated`, which does not mean that no
                    signature is there: signatures lie beside the entries, and only indexes are read.
    """

    place: Place
    entries: int
    size: int
    unpacked: int
    build_seconds: float
    first: str
    last: str
    signers: tuple[str, ...]
    signer_not_stated: int
    variants: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        place = self.place
        return {
            "kind": place.kind,
            "module": place.what,
            "model": place.model,
            "flashinfer": place.flashinfer,
            "cuda": place.cuda,
            "machine": place.machine,
            "arch": place.arch,
            "entries": self.entries,
            "bytes": self.size,
            "unpacked_bytes": self.unpacked,
            "build_seconds": round(self.build_seconds, 1),
            "first_built": self.first,
            "last_built": self.last,
            "signers": list(self.signers),
            "signer_not_stated": self.signer_not_stated,
            "variants": list(self.variants),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """All cells, in the order of their places. `problems` says which indexes could not be read."""

    stores: tuple[str, ...]
    cells: tuple[Cell, ...]
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        cells = self.cells
        totals = {
            "cells": len(cells),
            "entries": sum(cell.entries for cell in cells),
            "bytes": sum(cell.size for cell in cells),
            "build_seconds": round(sum(cell.build_seconds for cell in cells), 1),
        }
        return {
            "format": FORMAT,
            "stores": list(self.stores),
            "totals": totals,
            "cells": [cell.to_json() for cell in cells],
            "problems": list(self.problems),
        }


def place_of(key: EntryKey) -> Place:
    """The cell that an entry of this key is counted in."""
    ingredients = key.ingredients
    return Place(
        kind=key.kind,
        what="+".join(key.modules) if key.kind == KIND_MODULES else "",
        model=key.model,
        flashinfer=ingredients["flashinfer.version"],
        cuda=ingredients["cuda.release"],
        machine=ingredients["platform.machine"],
        arch=key.arch,
    )


def make_matrix(
    stores: Sequence[str], entries: Iterable[IndexEntry], *, problems: Sequence[str] = (), archs: Sequence[str] = ()
) -> Matrix:
    """The matrix of index lines; one that several stores have is counted once.

    Args:
        archs: without dots (`90a`); only these where any are given.
    """
    wanted = {arch.replace(".", "") for arch in archs}
    found: dict[tuple[str, ...], tuple[Place, dict[str, IndexEntry]]] = {}
    for entry in entries:
        place = place_of(entry.key)
        if wanted and place.arch not in wanted:
            continue
        # A manifest's name holds its entry's fingerprint, which would have to be worked out.
        name = entry.manifest.path.rpartition("/")[2].partition(".")[0]
        found.setdefault((*place.row, *place.environment, place.arch), (place, {}))[1][name] = entry
    cells = sorted((_cell(place, list(lines.values())) for place, lines in found.values()), key=_order)
    return Matrix(stores=tuple(stores), cells=tuple(cells), problems=tuple(problems))


def _order(cell: Cell) -> tuple[object, ...]:
    place = cell.place
    return (place.row, natural(place.flashinfer), natural(place.cuda), place.machine, natural(place.arch))


@lru_cache(maxsize=4096)
def natural(text: str) -> tuple[tuple[int, str], ...]:
    """Orders versions and architectures as people do: 0.6.18 after 0.6.9, 90a before 120f."""
    parts: list[tuple[int, str]] = []
    number = ""
    for letter in f"{text}\0":
        if letter.isdecimal():
            number += letter
            continue
        parts.append((int(number or -1), letter))
        number = ""
    return tuple(parts)


def _cell(place: Place, lines: Sequence[IndexEntry]) -> Cell:
    dates = sorted(line.built for line in lines if line.built)
    return Cell(
        place=place,
        entries=len(lines),
        size=sum({line.archive.sha256: line.archive.size for line in lines}.values()),
        unpacked=sum({line.archive.sha256: line.unpacked_size for line in lines}.values()),
        build_seconds=sum(line.build_seconds for line in lines),
        first=dates[0] if dates else "",
        last=dates[-1] if dates else "",
        signers=tuple(sorted({line.signer for line in lines if line.signer})),
        signer_not_stated=sum(1 for line in lines if not line.signer),
        variants=tuple(sorted({line.key.variant for line in lines if line.key.variant})),
    )


def by_environment(cells: Iterable[Cell]) -> Mapping[tuple[str, str, str], list[Cell]]:
    """Cells by FlashInfer, CUDA and machine, the newest FlashInfer first."""
    found: dict[tuple[str, str, str], list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.place.environment, []).append(cell)
    ordered = sorted(found, key=lambda one: (natural(one[0]), natural(one[1]), one[2]), reverse=True)
    return {environment: found[environment] for environment in ordered}


def architectures(cells: Iterable[Cell]) -> list[str]:
    """The architectures of these cells, each once, in order."""
    return sorted({cell.place.arch for cell in cells}, key=natural)
