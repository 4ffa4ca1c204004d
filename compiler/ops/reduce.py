"""Reductions: combine elements over axes, which stay in the shape with length 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Kind, Node, Op, make
from ..types import Type
from .move import broadcast


@dataclass(frozen=True)
class Combine:
    """An associative, commutative combination: its WGSL in {0} and {1}, its identity a dtype, NumPy
    meaning, gradient.

    `identity` maps a dtype kind ("f", "i", "u", "b") to the neutral number.
    """

    name: str
    wgsl: str
    identity: dict[str, float]
    numpy: Callable[..., np.ndarray]
    vjp: Callable[[Node, Node, Node, tuple[int, ...]], Node | None]


def _spread(ct: Node, x: Node) -> Node:
    return broadcast(ct, x.shape)


def _extreme_vjp(ct: Node, y: Node, x: Node, axes: tuple[int, ...]) -> Node:
    # elements equal to the extreme share the cotangent evenly
    from .elementwise import cast, eq

    hit = cast(eq(x, _spread(y, x)), x.dtype)
    return hit * _spread(ct / reduce("sum", hit, axes), x)


def _prod_vjp(ct: Node, y: Node, x: Node, axes: tuple[int, ...]) -> Node:
    # the product of the others: y / x, with zeros counted apart so that one zero still has its
    # gradient
    from . import full
    from .elementwise import cast, eq, select

    zero = eq(x, full(0, x.shape, x.dtype))
    zeros = reduce("sum", cast(zero, x.dtype), axes)
    rest = reduce("prod", select(zero, full(1, x.shape, x.dtype), x), axes)
    none = eq(zeros, full(0, zeros.shape, x.dtype))
    one = eq(zeros, full(1, zeros.shape, x.dtype))
    off = full(0, x.shape, x.dtype)
    others = _spread(select(none, rest, full(0, rest.shape, x.dtype)), x) / select(
        zero, full(1, x.shape, x.dtype), x
    )
    lone = _spread(select(one, rest, full(0, rest.shape, x.dtype)), x)
    return _spread(ct, x) * select(zero, lone, select(_spread(none, x), others, off))


def _sum(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return x.sum(axes, keepdims=True, dtype=x.dtype)


_LOW = {"f": -math.inf, "i": -(2**31), "u": 0, "b": 0}
_HIGH = {"f": math.inf, "i": 2**31 - 1, "u": 2**32 - 1, "b": 1}
COMBINES = {
    c.name: c
    for c in (
        Combine(
            "sum",
            "{0} + {1}",
            {"f": 0, "i": 0, "u": 0},
            _sum,
            lambda ct, y, x, axes: _spread(ct, x),
        ),
        Combine(
            "prod",
            "{0} * {1}",
            {"f": 1, "i": 1, "u": 1},
            lambda x, axes: x.prod(axes, keepdims=True, dtype=x.dtype),
            _prod_vjp,
        ),
        Combine(
            "max",
            "eg_max{s}({0}, {1})",
            _LOW,
            lambda x, axes: x.max(axes, keepdims=True),
            _extreme_vjp,
        ),
        Combine(
            "min",
            "eg_min{s}({0}, {1})",
            _HIGH,
            lambda x, axes: x.min(axes, keepdims=True),
            _extreme_vjp,
        ),
        Combine(
            "any",
            "{0} | {1}",
            {"b": 0},
            lambda x, axes: x.any(axes, keepdims=True),
            lambda *_: None,
        ),
        Combine(
            "all",
            "{0} & {1}",
            {"b": 1},
            lambda x, axes: x.all(axes, keepdims=True),
            lambda *_: None,
        ),
    )
}


@dataclass(frozen=True)
class Reduce(Op):
    """Combine over `axes` (sorted), which become 1. `combine` names an entry of COMBINES."""

    combine: str
    axes: tuple[int, ...]
    kind = Kind.REDUCE

    @property
    def name(self) -> str:
        return self.combine

    def infer(self, x: Type) -> Type:
        rule = COMBINES[self.combine]
        if x.dtype.kind not in rule.identity:
            raise TypeMismatch(f"{self.combine} cannot take {x}")
        if (
            any(not 0 <= a < x.rank for a in self.axes)
            or tuple(sorted(set(self.axes))) != self.axes
        ):
            raise ShapeMismatch(f"{self.combine} over axes {self.axes} does not fit {x}")
        if self.combine in ("max", "min") and math.prod(x.shape[a] for a in self.axes) == 0:
            raise ShapeMismatch(
                f"{self.combine} over no elements has no value: axes {self.axes} of {x}"
            )
        return Type(tuple(1 if k in self.axes else n for k, n in enumerate(x.shape)), x.dtype)

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        return COMBINES[self.combine].numpy(x, self.axes)

    def vjp(self, cotangent: Node, result: Node, x: Node) -> list[Node | None]:
        return [COMBINES[self.combine].vjp(cotangent, result, x, self.axes)]

    def guarded(self, cotangent: Node, parts: Sequence[Node | None]) -> list[Node | None]:
        from .elementwise import guard

        return [guard(cotangent, part) for part in parts]

    def flops(self, result: Type, x: Type) -> int:
        return x.size


def reduce(combine: str, x: Node, axes: Sequence[int]) -> Node:
    """Combine x over axes, keeping them with length 1. Axes of length 1 are left alone."""
    kept = tuple(sorted(a for a in set(axes) if x.shape[a] != 1))
    op = Reduce(combine, kept)
    if not kept:
        op.infer(x.type)
        return x
    return make(op, x)
