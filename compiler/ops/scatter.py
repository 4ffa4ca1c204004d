"""Adding and writing updates into places that data gives, without lost updates and in a fixed
order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Kind, Node, Op, make
from ..types import DType, Type, i32
from .elementwise import eq, select
from .leaf import iota, literal
from .move import broadcast, gather, reshape, wrapped


@dataclass(frozen=True)
class ScatterAdd(Op):
    """result[r, ...] = the sum of updates[i, ...] over the i with positions[i] == r, for r in [0,
    rows).

    Positions wrap and clip as in Gather. Updates are added in the order of i.
    """

    rows: int
    name = "scatter_add"
    kind = Kind.SCATTER
    replaces = False

    def infer(self, updates: Type, positions: Type) -> Type:
        if positions.dtype.kind not in "iu" or updates.dtype.kind == "b":
            raise TypeMismatch(
                f"scatter_add needs numbers and integer positions, got {updates} and {positions}"
            )
        if updates.rank < 1 or positions.shape != updates.shape[:1]:
            raise ShapeMismatch(
                f"scatter_add needs one position a row of updates, got {updates} and {positions}"
            )
        return Type((self.rows, *updates.shape[1:]), updates.dtype)

    def evaluate(self, updates: np.ndarray, positions: np.ndarray) -> np.ndarray:
        out = np.zeros((self.rows, *updates.shape[1:]), updates.dtype)
        np.add.at(out, wrapped(positions, self.rows), updates)
        return out

    def vjp(
        self, cotangent: Node, result: Node, updates: Node, positions: Node
    ) -> list[Node | None]:
        return [gather(cotangent, positions, 0), None]

    def flops(self, result: Type, updates: Type, positions: Type) -> int:
        return updates.size


@dataclass(frozen=True)
class ScatterSet(Op):
    """x with row positions[i] replaced by updates[i]; of several updates of a row the last one
    counts.

    Positions wrap and clip as in Gather.
    """

    name = "scatter_set"
    kind = Kind.SCATTER
    replaces = True

    def infer(self, x: Type, updates: Type, positions: Type) -> Type:
        if positions.dtype.kind not in "iu" or updates.dtype != x.dtype:
            raise TypeMismatch(
                f"scatter_set needs updates of {x.dtype} and integer positions, got {updates} "
                f"and {positions}"
            )
        if x.rank < 1 or positions.rank != 1 or updates.shape != (*positions.shape, *x.shape[1:]):
            raise ShapeMismatch(
                f"scatter_set needs one position a row of updates for {x}, got {updates} and "
                f"{positions}"
            )
        return x

    def evaluate(self, x: np.ndarray, updates: np.ndarray, positions: np.ndarray) -> np.ndarray:
        out = x.copy()
        for row, update in zip(
            wrapped(positions, x.shape[0]) if x.shape[0] else (), updates, strict=False
        ):
            out[row] = update
        return out

    def vjp(
        self, cotangent: Node, result: Node, x: Node, updates: Node, positions: Node
    ) -> list[Node | None]:
        # a row that was written gives nothing to x, and gives its cotangent to the update that
        # stayed
        rows, count = x.shape[0], positions.shape[0]
        none = full(0, updates.shape, x.dtype)
        if rows == 0 or count == 0:
            return [cotangent, none, None]
        number = iota((count,), 0, i32)
        last = scatter_set(full(-1, (rows,), i32), number, positions)
        stayed = reshape(
            eq(gather(last, positions, 0), number), (count, *(1,) * (len(x.shape) - 1))
        )
        taken = select(broadcast(stayed, updates.shape), gather(cotangent, positions, 0), none)
        return [scatter_set(cotangent, none, positions), taken, None]

    def flops(self, result: Type, x: Type, updates: Type, positions: Type) -> int:
        return updates.size


def full(value: float, shape: tuple[int, ...], dtype: DType) -> Node:
    """A number repeated to a shape."""
    return broadcast(literal(value, dtype), shape)


def scatter_set(x: Node, updates: Node, positions: Node) -> Node:
    """Replace rows of x."""
    return make(ScatterSet(), x, updates, positions)


def scatter_add(updates: Node, positions: Node, rows: int) -> Node:
    """Sum rows of updates into `rows` places."""
    return make(ScatterAdd(rows), updates, positions)
