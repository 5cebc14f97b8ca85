"""Reads a document's fields by a list of them: what is missing, of a wrong type, out of range or unknown is told, all at once.

The list of fields is the format: `kcache.recipe.FIELDS` is read here, documented in manifests/README.md and walked by the tests,
so that a new field cannot be forgotten in any of them. Nothing that a document holds makes this raise, recurse or print much:
values are never walked deeper than a list in a table. Contradictions between fields are not found here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

MAX_ITEMS = 1024
"""Items of a list; an engine that captures every batch size has a few hundred."""

REQUIRED: Final = object()
"""The default of a field that has none."""


class Rule(Protocol):
    """What a value has to be. `wanted` describes it; `problem` is empty for a good value; `parse` takes good values only."""

    @property
    def wanted(self) -> str: ...

    def problem(self, value: Any) -> str: ...

    def parse(self, value: Any) -> Any: ...


class _Plain:
    """A rule whose values are taken as they are."""

    wanted: str

    def ok(self, value: Any) -> bool:
        raise NotImplementedError

    def problem(self, value: Any) -> str:
        return "" if self.ok(value) else f"not {self.wanted}, but {told(value)}"

    def parse(self, value: Any) -> Any:
        return value


class Whole(_Plain):
    """A whole number from `least` to `most`."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.wanted = f"a whole number from {least} to {most}"

    def ok(self, value: Any) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.least <= value <= self.most


class Real(_Plain):
    """A number of at most a million either way; more than 0 if `positive`. Whole numbers are taken too."""

    MOST = 1e6

    def __init__(self, *, positive: bool = False) -> None:
        self.positive = positive
        self.wanted = f"a finite number {'above 0, up to' if positive else 'from -1000000 to'} 1000000"

    def ok(self, value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and -self.MOST <= value <= self.MOST and (value > 0 or not self.positive)

    def parse(self, value: Any) -> float:
        return float(value)


class Text(_Plain):
    """A text of 1 to `most` characters that can be printed in one line; `pattern` is its whole form where one is given."""

    def __init__(self, most: int = 200, pattern: str = "", wanted: str = "") -> None:
        self.most, self.pattern = most, re.compile(pattern) if pattern else None
        self.wanted = wanted or f"a text of 1 to {most} printable characters"

    def ok(self, value: Any) -> bool:
        if not isinstance(value, str) or not 0 < len(value) <= self.most or not value.isprintable():
            return False
        return self.pattern is None or self.pattern.fullmatch(value) is not None


class Choice(_Plain):
    """One of a few texts."""

    def __init__(self, *choices: str) -> None:
        self.choices = choices
        self.wanted = f"one of {', '.join(choices)}" if len(choices) > 1 else repr(choices[0])

    def ok(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field.

    path:    the table and its name, such as `model.experts`; a name alone at the top.
    rule:    what its value, or each item of it, has to be.
    least:   None for a single value; for a list, the fewest items.
    default: what it is where it is left out.
    """

    path: str
    rule: Rule
    least: int | None = None
    default: Any = REQUIRED

    @property
    def table(self) -> str:
        return self.path.rpartition(".")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """What was read: path -> parsed value or default, without the fields that have a problem; and all problems."""

    found: Mapping[str, Any]
    problems: tuple[str, ...]


def read_fields(document: Mapping[str, Any], fields: Sequence[Field]) -> Values:
    """Reads every field of a document, whatever it holds."""
    found: dict[str, Any] = {}
    problems: list[str] = []
    for table in tables(fields):
        own = [field for field in fields if field.table == table]
        if table not in document and all(field.default is not REQUIRED for field in own):
            found |= {field.path: field.default for field in own}
            continue
        values = _table(table, document, [field.name for field in own], [name for name in tables(fields) if name], problems)
        if values is None:
            continue
        for field in own:
            before = len(problems)
            parsed = _read(field, values.get(field.name), problems)
            if len(problems) == before:
                found[field.path] = parsed
    return Values(found=found, problems=tuple(problems))


def _table(
    table: str, document: Mapping[str, Any], names: list[str], others: list[str], problems: list[str]
) -> Mapping[str, Any] | None:
    """The values of one table, or None where it is none; what else is in it is told."""
    values = document.get(table) if table else document
    if not isinstance(values, Mapping):
        wanted = f"a table with {', '.join(names)}"
        problems.append(f"{table}: {f'missing; it is {wanted}' if values is None else f'not {wanted}, but {told(values)}'}")
        return None
    known = names if table else [*names, *others]
    prefix = f"{table}." if table else ""
    problems += [f"{prefix}{_key(name)}: unknown; known are {', '.join(sorted(known))}" for name in values if name not in known]
    return values


def tables(fields: Sequence[Field]) -> tuple[str, ...]:
    """The names of all tables, the top (an empty name) first."""
    return tuple(dict.fromkeys(["", *(field.table for field in fields)]))


def _read(field: Field, value: Any, problems: list[str]) -> Any:
    if value is None:
        if field.default is REQUIRED:
            problems.append(f"{field.path}: missing; it is {_wanted(field)}")
        return field.default
    if field.least is not None:
        return _read_list(field, value, problems)
    if problem := field.rule.problem(value):
        problems.append(f"{field.path}: {problem}")
        return None
    return field.rule.parse(value)


def _read_list(field: Field, value: Any, problems: list[str]) -> tuple[Any, ...]:
    assert field.least is not None
    if not isinstance(value, list) or not field.least <= len(value) <= MAX_ITEMS:
        found = f"a list of {len(value)}" if isinstance(value, list) else told(value)
        problems.append(f"{field.path}: not {_wanted(field)}, but {found}")
        return ()
    kept: list[Any] = []
    for index, item in enumerate(value):
        if problem := field.rule.problem(item):
            problems.append(f"{field.path}[{index}]: {problem}")
        elif (parsed := field.rule.parse(item)) in kept:
            problems.append(f"{field.path}[{index}]: {told(item)} is there twice")
        else:
            kept.append(parsed)
    return tuple(kept)


def _wanted(field: Field) -> str:
    if field.least is None:
        return field.rule.wanted
    return f"a list of {field.least} to {MAX_ITEMS} items, each {field.rule.wanted}"


def told(value: Any) -> str:
    """A value in a message: one short line, whatever it is."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 128 else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str):
        text = ascii(value[:60]) if not value[:60].isprintable() else repr(value[:60])
        return text if len(value) <= 60 else f"{text[:58]}...{text[-1]}"
    if isinstance(value, dict):
        return "a table"
    return "a list" if isinstance(value, list) else "a date or a time"


def _key(name: str) -> str:
    """A name as TOML would spell it, cut short."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name) else json.dumps(name[:60])
