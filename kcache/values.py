"""`dataclass`, `field` and `replace` as the standard library has them, without what those cost a process that ends soon.

The standard decorator writes source code for every class and compiles it while the class is made: 50 classes are 45 ms, and
importing it (with `inspect`) is 15 ms more, of which a server's start would pay each. Here the methods are closures, and a class
costs 50 microseconds; only where many instances are made, `__init__` is compiled after all. Type checkers see the standard ones,
and so does everybody who asks: instances work with `dataclasses.replace`, `fields` and `asdict`, whose description of the fields
is made when it is first asked for.

Only what kcache uses: `frozen`, `slots`, `kw_only`; no inheritance between such classes, no `__post_init__`, no order. Tests
hold each class equal to the standard library's of the same definition.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import dataclass as dataclass  # noqa: PLC0414
    from dataclasses import field as field  # noqa: PLC0414
    from dataclasses import replace as replace  # noqa: PLC0414
    from typing import Any
else:

    def dataclass(*, frozen=False, slots=False, kw_only=False):
        """`dataclasses.dataclass` for a class that inherits from `object` alone."""
        return lambda cls: _made(cls, frozen, slots, kw_only)

    def field(*, default_factory=None, repr=True):
        """`dataclasses.field`."""
        return _Field(default_factory, repr)

    def replace(instance, /, **changes):
        """`dataclasses.replace`."""
        cls = type(instance)
        for name in cls.__value_names__:
            if name not in changes:
                changes[name] = getattr(instance, name)
        return cls(**changes)


class _Field:
    __slots__ = ("factory", "shown")

    def __init__(self, factory: Callable[[], Any] | None, shown: bool) -> None:
        self.factory, self.shown = factory, shown


class _Description:
    """`__dataclass_fields__`: what the standard library calls a dataclass has it, and says with it what the fields are."""

    def __init__(self, names: tuple[str, ...], annotations: dict[str, Any], stated: dict[str, Any], kw_only: bool) -> None:
        self._names, self._annotations, self._stated, self._kw_only = names, annotations, stated, kw_only
        self._made: dict[str, Any] | None = None

    def __get__(self, instance: object, owner: type) -> dict[str, Any]:
        if self._made is None:
            import dataclasses

            lines = []
            for name in self._names:
                stated = self._stated.get(name, _Field(None, True))
                if not isinstance(stated, _Field):
                    lines.append((name, self._annotations[name], dataclasses.field(default=stated)))
                elif stated.factory is not None:
                    made = dataclasses.field(default_factory=stated.factory, repr=stated.shown)
                    lines.append((name, self._annotations[name], made))
                else:
                    lines.append((name, self._annotations[name], dataclasses.field(repr=stated.shown)))
            twin: Any = dataclasses.make_dataclass(owner.__name__, lines, kw_only=self._kw_only)
            self._made = dict(twin.__dataclass_fields__)
        return self._made


def _made(cls: type, frozen: bool, slots: bool, kw_only: bool) -> type:
    body = dict(cls.__dict__)
    annotations = dict(body.get("__annotations__", {}))
    names = tuple(annotations)
    if cls.__bases__ != (object,) or "__post_init__" in body or any(str(a).startswith(_NO_FIELDS) for a in annotations.values()):
        raise TypeError(f"{cls.__name__} needs the standard library's dataclass")
    stated = {name: body[name] for name in names if name in body}
    for name, value in stated.items():
        if slots or isinstance(value, _Field):
            del body[name]
    for name in ("__dict__", "__weakref__"):
        body.pop(name, None)
    if slots:
        body["__slots__"] = names
    body["__value_names__"] = names
    body["__dataclass_fields__"] = _Description(names, annotations, stated, kw_only)
    body["__match_args__"] = () if kw_only else names
    for method in (_init(names, stated, kw_only), _repr(names, stated), _eq(names), *(_frozen(names) if frozen else ())):
        body.setdefault(method.__name__, method)
    if frozen and slots:
        body.update(__getstate__=_getstate, __setstate__=_setstate)
    made = type(cls)(cls.__name__, cls.__bases__, body)
    made.__qualname__ = cls.__qualname__
    return made


_NO_FIELDS = ("ClassVar", "InitVar", "typing.ClassVar", "KW_ONLY")


_MANY = 32
"""Instances after which compiling (100 microseconds) pays: it saves two for each."""


def _init(names: tuple[str, ...], stated: dict[str, Any], kw_only: bool) -> Callable[..., None]:
    defaults = {name: value for name, value in stated.items() if not isinstance(value, _Field)}
    factories = {name: value.factory for name, value in stated.items() if isinstance(value, _Field) and value.factory}
    count = len(names)
    put = object.__setattr__
    left = _MANY

    def __init__(self: object, /, *given: object, **values: object) -> None:
        nonlocal left
        left -= 1
        if not left and not factories:
            type(self).__init__ = _compiled(names, defaults, kw_only)  # type: ignore[method-assign]
        if given:
            if kw_only or len(given) > count or not values.keys().isdisjoint(names[: len(given)]):
                raise TypeError(f"{type(self).__name__} takes {0 if kw_only else count} arguments by place, each once")
            values.update(zip(names, given, strict=False))
        if len(values) != count:
            values = {**defaults, **{n: make() for n, make in factories.items() if n not in values}, **values}
        try:
            for name in names:
                put(self, name, values[name])
        except KeyError as error:
            raise TypeError(f"{type(self).__name__} lacks the argument {error}") from None
        if len(values) != count:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values.keys() - set(names))}")

    return __init__


def _compiled(names: tuple[str, ...], defaults: dict[str, Any], kw_only: bool) -> Callable[..., None]:
    """The same, as the standard library writes it."""
    arguments = ", ".join(f"{name}=_default[{name!r}]" if name in defaults else name for name in names)
    lines = "".join(f" _put(self, {name!r}, {name})\n" for name in names)
    space: dict[str, Any] = {"_put": object.__setattr__, "_default": defaults}
    exec(f"def __init__(self{', *' if kw_only else ''}, {arguments}):\n{lines}", space)  # noqa: S102 (names of fields)
    made: Callable[..., None] = space["__init__"]
    return made


def _repr(names: tuple[str, ...], stated: dict[str, Any]) -> Callable[[Any], str]:
    shown = [name for name in names if not (isinstance(value := stated.get(name), _Field) and not value.shown)]

    def __repr__(self: Any) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    return __repr__


def _eq(names: tuple[str, ...]) -> Callable[[Any, object], bool]:
    def __eq__(self: Any, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in names)

    return __eq__


def _frozen(names: tuple[str, ...]) -> tuple[Callable[..., Any], ...]:
    def __hash__(self: Any) -> int:
        return hash(tuple([getattr(self, name) for name in names]))

    def __setattr__(self: Any, name: str, value: object) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self: Any, name: str) -> None:
        from dataclasses import FrozenInstanceError

        raise FrozenInstanceError(f"cannot delete field {name!r}")

    return __hash__, __setattr__, __delattr__


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, name) for name in self.__value_names__]


def _setstate(self: Any, state: list[Any]) -> None:
    for name, value in zip(self.__value_names__, state, strict=True):
        object.__setattr__(self, name, value)
