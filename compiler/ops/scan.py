"""Running combinations along an axis, and the order of elements."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Kind, Node, Op, make
from ..types import Type, i32
from .move import broadcast, reshape, transpose
from .reduce import COMBINES, reduce

_ACCUMULATE = {"sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Scan(Op):
    """Element i combines x[0] to x[i] along `axis` (x[i] to the last when `reverse`)."""

    combine: str
    axis: int
    reverse: bool
    kind = Kind.SCAN

    @property
    def name(self) -> str:
        return f"cum{self.combine}"

    def infer(self, x: Type) -> Type:
        if (
            self.combine not in _ACCUMULATE
            or x.dtype.kind not in COMBINES[self.combine].identity
            or x.dtype.kind == "b"
        ):
            raise TypeMismatch(f"{self.name} cannot take {x}")
        if not 0 <= self.axis < x.rank:
            raise ShapeMismatch(f"{self.name} along axis {self.axis} does not fit {x}")
        return x

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        run = _ACCUMULATE[self.combine].accumulate
        if self.reverse:
            return np.flip(run(np.flip(x, self.axis), self.axis, dtype=x.dtype), self.axis)
        return run(x, self.axis, dtype=x.dtype)

    def vjp(self, cotangent: Node, result: Node, x: Node) -> list[Node]:
        match self.combine:
            case "sum":
                return [scan("sum", cotangent, self.axis, not self.reverse)]
            case "prod":
                return [self._prod_vjp(cotangent, result, x)]
            case _:
                return [self._extreme_vjp(cotangent, result, x)]

    def _prod_vjp(self, ct: Node, y: Node, x: Node) -> Node:
        # dx_i = sum_{j >= i} ct_j y_j / x_i; at the first zero the product without it; behind it
        # nothing
        from . import full
        from .elementwise import and_, cast, eq, select

        zero, one = full(0, x.shape, x.dtype), full(1, x.shape, x.dtype)
        zeros = eq(x, zero)
        first = and_(
            zeros, eq(scan("sum", cast(zeros, i32), self.axis, self.reverse), full(1, x.shape, i32))
        )
        without = scan("prod", select(first, one, x), self.axis, self.reverse)
        at_zero = scan("sum", ct * without, self.axis, not self.reverse)
        elsewhere = scan("sum", ct * y, self.axis, not self.reverse) / select(zeros, one, x)
        return select(first, at_zero, select(zeros, zero, elsewhere))

    def _extreme_vjp(self, ct: Node, y: Node, x: Node) -> Node:
        # each cotangent goes to the latest element that set the extreme it saw
        from . import full, iota
        from .elementwise import eq, select

        n, rank = x.shape[self.axis], len(x.shape)
        place = iota(x.shape, self.axis, i32)
        if self.reverse:
            owner = scan("min", select(eq(x, y), place, full(n, x.shape, i32)), self.axis, True)
        else:
            owner = scan("max", select(eq(x, y), place, full(-1, x.shape, i32)), self.axis, False)
        last = (*(k for k in range(rank) if k != self.axis), self.axis)
        rows = transpose(x, last).shape[:-1]
        wide = (*rows, n, n)
        owners = broadcast(reshape(transpose(owner, last), (*rows, 1, n)), wide)
        given = broadcast(reshape(transpose(ct, last), (*rows, 1, n)), wide)
        mine = select(eq(owners, iota(wide, len(wide) - 2, i32)), given, full(0, wide, x.dtype))
        total = reshape(reduce("sum", mine, (len(wide) - 1,)), (*rows, n))
        back = [0] * rank
        for k, axis in enumerate(last):
            back[axis] = k
        return transpose(total, back)

    def flops(self, result: Type, x: Type) -> int:
        return x.size


@dataclass(frozen=True)
class Argsort(Op):
    """The places of the elements in rising (or falling) order along the last axis, i32; equal ones
    keep their order.

    NaN counts as the largest.
    """

    descending: bool
    name = "argsort"
    kind = Kind.SORT

    def infer(self, x: Type) -> Type:
        if x.rank < 1:
            raise ShapeMismatch(f"argsort needs an axis, got {x}")
        return Type(x.shape, i32)

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        if not self.descending:
            return np.argsort(x, -1, kind="stable").astype(np.int32)
        back = np.argsort(np.flip(x, -1), -1, kind="stable")
        return (x.shape[-1] - 1 - np.flip(back, -1)).astype(np.int32)

    def vjp(self, cotangent: Node, result: Node, x: Node) -> list[Node | None]:
        return [None]

    def flops(self, result: Type, x: Type) -> int:
        return x.size * max(x.shape[-1], 1).bit_length()


def scan(combine: str, x: Node, axis: int, reverse: bool = False) -> Node:
    """A running combination along an axis."""
    return make(Scan(combine, axis, reverse), x)


def argsort(x: Node, descending: bool = False) -> Node:
    """The order of the elements along the last axis."""
    return make(Argsort(descending), x)
