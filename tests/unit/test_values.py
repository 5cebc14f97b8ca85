"""kcache's cheap dataclasses are the standard library's in all that a caller can see."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kcache
from kcache import values
from kcache.key import ABSENT, Environment, Fact, known
from kcache.probe.packages import Packages

ROOT = Path(__file__).parents[2]
SOURCE = """
@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    '''A text.'''
    one: int
    two: tuple[str, ...] = ()
    more: dict[str, int] = field(default_factory=dict, repr=False)
    @property
    def three(self): return self.one + 2

@dataclass(slots=True)
class Open:
    one: int
    many: list[int] = field(default_factory=list)

@dataclass(frozen=True, slots=True)
class ByPlace:
    one: int
    hidden: int = field(repr=False)

@dataclass(frozen=True, kw_only=True)
class WithDict:
    one: int = 5
"""


def defined(module: Any) -> dict[str, Any]:
    """The same classes, made by the decorator of `module`."""
    names: dict[str, Any] = {"dataclass": module.dataclass, "field": module.field, "__name__": __name__}
    exec(compile("from __future__ import annotations\n" + SOURCE, "classes", "exec"), names)  # noqa: S102
    return names


OURS, THEIRS = defined(values), defined(dataclasses)
CALLS: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("Frozen", (), {"one": 1}),
    ("Frozen", (), {"one": 1, "two": ("a",), "more": {"b": 2}}),
    ("Frozen", (), {}),
    ("Frozen", (), {"one": 1, "other": 2}),
    ("Frozen", (), {"other": 2, "two": (), "more": {}}),
    ("Frozen", (1,), {}),
    ("Open", (1,), {}),
    ("Open", (1, [2]), {}),
    ("Open", (), {"one": 1}),
    ("Open", (1,), {"one": 1}),
    ("Open", (1, [], 3), {}),
    ("Open", (), {}),
    ("ByPlace", (1, 2), {}),
    ("ByPlace", (1,), {"hidden": 2}),
    ("ByPlace", (1,), {}),
    ("WithDict", (), {}),
    ("WithDict", (), {"one": 6}),
    ("WithDict", (6,), {}),
]


def seen(classes: dict[str, Any], name: str, given: tuple[Any, ...], more: dict[str, Any]) -> Any:
    """What can be seen of one instance, or that there is none."""
    cls = classes[name]
    try:
        made = cls(*given, **more)
    except TypeError:
        return "TypeError"
    other = dataclasses.replace(made, one=99)
    fields = [(f.name, f.type, f.repr, f.kw_only, f.init, f.default is dataclasses.MISSING) for f in dataclasses.fields(made)]
    facts = [repr(made), repr(other), made == other, made == cls(*given, **more), made != other, made == 1, fields]
    facts += [
        dataclasses.asdict(made),
        dataclasses.is_dataclass(cls),
        cls.__doc__ if name == "Frozen" else "",
        cls.__match_args__,
    ]
    facts += [copy.copy(made) == made, copy.deepcopy(made) == made, hasattr(made, "__dict__"), cls.__hash__ is None]
    for act in (lambda: setattr(made, "one", 3), lambda: delattr(made, "one"), lambda: hash(made)):
        try:
            act()
            facts.append("done")
        except Exception as error:  # noqa: BLE001 (the kind of error is what is compared)
            facts.append(type(error).__name__)
    return facts


@pytest.mark.parametrize("made_before", [0, values._MANY])
@pytest.mark.parametrize(("name", "given", "more"), CALLS)
def test_a_class_behaves_as_the_standard_librarys(
    name: str, given: tuple[Any, ...], more: dict[str, Any], made_before: int
) -> None:
    ours = defined(values)
    for _ in range(made_before):
        ours[name](*((1, 2) if name == "ByPlace" else ()), **({} if name == "ByPlace" else {"one": 1}))
    assert seen(ours, name, given, more) == seen(THEIRS, name, given, more)


def test_init_is_compiled_where_many_instances_are_made() -> None:
    ours = defined(values)["Frozen"]
    closure = ours.__init__
    made = [Fact(value=str(n)) for n in range(2 * values._MANY)]
    assert [fact.value for fact in made] == [str(n) for n in range(2 * values._MANY)]
    assert Fact.__init__.__code__.co_filename == "<string>"
    assert ours.__init__ is closure


@pytest.mark.parametrize("name", ["Frozen", "ByPlace", "WithDict"])
def test_a_frozen_instance_takes_no_new_attribute(name: str) -> None:
    """With slots, Python 3.11's own says so with a TypeError from the wrong place."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        values.replace(OURS[name](*(1, 2) if name == "ByPlace" else (), **{} if name == "ByPlace" else {"one": 1})).new = 1


def test_defaults_are_made_for_each_instance() -> None:
    assert OURS["Open"](1).many is not OURS["Open"](1).many
    assert OURS["Frozen"](one=1).three == 3


def test_replace_changes_what_is_named_and_nothing_else() -> None:
    environment = Environment(facts={"a": known("b")}, archs=("90a",))
    changed = values.replace(environment, archs=("120f",))
    assert (changed.facts, changed.archs, environment.archs) == (environment.facts, ("120f",), ("90a",))
    with pytest.raises(TypeError):
        values.replace(environment, other=1)  # type: ignore[call-arg]


def test_values_can_be_pickled_and_hashed() -> None:
    assert pickle.loads(pickle.dumps(known("x"))) == known("x")  # noqa: S301
    assert len({Fact(), ABSENT, known("x"), known("x")}) == 2
    assert "_metadata" not in repr(Packages((), {"a": "b"}, ()))


@pytest.mark.parametrize("body", ["x: ClassVar[int] = 1", "x: int\n    def __post_init__(self): pass"])
def test_what_only_the_standard_library_does_is_refused(body: str) -> None:
    names: dict[str, Any] = {"dataclass": values.dataclass}
    text = f"from __future__ import annotations\n@dataclass(frozen=True)\nclass A:\n    {body}\n"
    with pytest.raises(TypeError, match="standard library"):
        exec(text, names)  # noqa: S102
    with pytest.raises(TypeError, match="standard library"):
        exec("@dataclass(frozen=True)\nclass B(dict):\n    x: int\n", names)  # noqa: S102


def test_every_class_of_kcache_has_the_fields_that_its_definition_names() -> None:
    for module in pkgutil.walk_packages(kcache.__path__, "kcache."):
        if ".children" in module.name or module.name.endswith("__main__") or "shim" in module.name:
            continue
        for cls in vars(importlib.import_module(module.name)).values():
            if isinstance(cls, type) and "__value_names__" in vars(cls):
                assert [f.name for f in dataclasses.fields(cls)] == list(cls.__annotations__), cls


def test_the_start_of_a_server_does_not_import_the_standard_ones() -> None:
    code = "import sys, kcache.workflows.entrypoint; print({'dataclasses', 'inspect', 'click'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
