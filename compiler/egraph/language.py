"""The e-graph's language, generated from the op declarations: a constructor for each op, attributes
by their Python types.

An op class (or an entry of the elementwise and reduction tables) is a `Family`; with a number of
operands it is a `Form`, which is one constructor: `(Add T T)`, `(Transpose T Ints)`, `(Concat3 T T
T i64)`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, get_type_hints

from ..errors import IRError
from ..ir import Kind, Op
from ..ops.elementwise import ELEMENTWISE, Elementwise
from ..ops.leaf import literal
from ..ops.loop import Loop
from ..ops.reduce import COMBINES, Reduce
from ..types import DTYPES
from .engine import Engine

SORTS = ("(sort T)", "(sort Tup)", "(sort Ints (Vec i64))")
# 0.0 and -0.0 are one number to the engine; the least double stands for -0.0, which no f32 or f16
# is near
_MINUS_ZERO = -5e-324


def integer_text(value: int) -> str:
    return str(int(value))


def float_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(_MINUS_ZERO if value == 0 and math.copysign(1, value) < 0 else float(value))


def string_text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def integers_text(values: Sequence[int]) -> str:
    return f"(vec-of {' '.join(map(str, values))})" if values else "(vec-empty)"


def _float(engine: Engine, value: Any) -> float:
    number = engine.number(value)
    return -0.0 if number == _MINUS_ZERO else number


@dataclass(frozen=True, slots=True)
class Sort:
    """How attributes of one Python type are written to and read from the engine."""

    name: str
    text: Callable[[Any], str]
    read: Callable[[Engine, Any], Any]


SORT_OF = {
    int: Sort("i64", integer_text, Engine.integer),
    bool: Sort("i64", integer_text, lambda engine, value: bool(engine.integer(value))),
    float: Sort("f64", float_text, _float),
    str: Sort("String", string_text, Engine.string),
    tuple[int, ...]: Sort("Ints", integers_text, Engine.integers),
}


@dataclass(frozen=True, slots=True)
class Family:
    """An op class or table entry, known by its name. `entry` makes the op of attribute values;
    `least` is its least number of operands.
    """

    name: str
    kind: Kind = field(compare=False)
    least: int = field(compare=False)
    variadic: bool = field(compare=False)
    fields: tuple[tuple[str, Sort], ...] = field(compare=False)
    entry: Callable[..., Op] = field(compare=False)
    cls: type[Op] = field(compare=False)
    template: Elementwise | None = field(default=None, compare=False)  # of an elementwise entry

    def form(self, arity: int) -> Form:
        if arity < self.least or (arity > self.least and not self.variadic):
            raise IRError(f"{self.name} takes {self.least} operands, got {arity}")
        return Form(self, arity)


@dataclass(frozen=True, slots=True)
class Form:
    """A family with a number of operands: one constructor of the e-graph."""

    family: Family
    arity: int

    @property
    def name(self) -> str:
        return f"{self.family.name}{self.arity}" if self.family.variadic else self.family.name

    @property
    def inputs(self) -> list[str]:
        operand = "Tup" if self.family.kind is Kind.GET else "T"
        return [operand] * self.arity + [sort.name for _, sort in self.family.fields]

    @property
    def output(self) -> str:
        return "Tup" if self.family.kind is Kind.TUPLE else "T"

    def declarations(self) -> list[str]:
        """The constructor, and the function that says which rule made an e-node of it."""
        inputs = " ".join(self.inputs)
        return [
            f"(constructor {self.name} ({inputs}) {self.output})",
            f"(function {made_by(self.name)} ({inputs}) String :merge old)",
        ]

    def attribute_texts(self, op: Op) -> list[str]:
        return [sort.text(getattr(op, name)) for name, sort in self.family.fields]

    def read(self, engine: Engine, values: Sequence[Any]) -> dict[str, Any]:
        """Attribute values of a row's inputs after its operands."""
        pairs = zip(self.family.fields, values, strict=True)
        return {name: sort.read(engine, value) for (name, sort), value in pairs}


def made_by(constructor: str) -> str:
    """The function from an e-node to the name of the rule that made it."""
    return f"made-by-{constructor}"


@cache
def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.rstrip("_").split("_"))


@cache
def families() -> dict[str, Family]:
    """All op families by constructor name; loops stand between the programs that are saturated."""
    found = [_elementwise(entry) for entry in ELEMENTWISE.values()]
    found += [_reduction(combine) for combine in COMBINES]
    found += [_plain(cls) for cls in _concrete(Op) if cls not in (Elementwise, Reduce, Loop)]
    out = {f.name: f for f in sorted(found, key=lambda f: f.name)}
    if len(out) != len(found):
        raise IRError("two ops have one name: every op needs a name of its own")
    return out


def form_of(op: Op, arity: int) -> Form:
    """The constructor of an op applied to `arity` operands."""
    return _form(
        camel(op.name) if isinstance(op, (Elementwise, Reduce)) else type(op).__name__, arity
    )


@cache
def _form(name: str, arity: int) -> Form:
    return families()[name].form(arity)


def _concrete(cls: type) -> list[type]:
    below = [c for s in cls.__subclasses__() for c in _concrete(s)]
    return below or [cls]


def _elementwise(entry: Elementwise) -> Family:
    return Family(
        camel(entry.label),
        Kind.ELEMENTWISE,
        entry.arity,
        False,
        (),
        lambda: entry,
        Elementwise,
        entry,
    )


def _reduction(combine: str) -> Family:
    rest = tuple(f for f in _fields(Reduce) if f[0] != "combine")
    return Family(
        camel(combine), Kind.REDUCE, 1, False, rest, lambda **kw: Reduce(combine, **kw), Reduce
    )


def _plain(cls: type) -> Family:
    kind = object.__new__(cls).kind  # depends on no attribute
    parameters = list(inspect.signature(cls.infer).parameters.values())[1:]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    entry = _rounded if kind is Kind.LITERAL else cls
    return Family(
        cls.__name__, kind, len(parameters) - variadic, variadic, _fields(cls), entry, cls
    )


def _rounded(value: float, dtype: str) -> Op:
    """A literal; the numbers that rules compute are doubles."""
    return literal(value, DTYPES[dtype]).op


def _fields(cls: type) -> tuple[tuple[str, Sort], ...]:
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls) if f.compare]
    for name in names:
        if hints[name] not in SORT_OF:
            known = ", ".join(map(str, SORT_OF))
            raise IRError(f"{cls.__name__}.{name} needs a type that the e-graph knows: {known}")
    return tuple((name, SORT_OF[hints[name]]) for name in names)
