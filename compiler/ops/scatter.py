"""Adding updates into places that data gives, without lost updates and in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Kind, Node, Op, make
from ..types import Type
from .move import gather, wrapped


@dataclass(frozen=True)
class ScatterAdd(Op):
    """result[r, ...] = the sum of updates[i, ...] over the i with positions[i] == r, for r in [0, rows).

    Positions wrap and clip as in Gather. Updates are added in the order of i.
    """

    rows: int
    name = "scatter_add"
    kind = Kind.SCATTER

    def infer(self, updates: Type, positions: Type) -> Type:
        if positions.dtype.kind not in "iu" or updates.dtype.kind == "b":
            raise TypeMismatch(f"scatter_add needs numbers and integer positions, got {updates} and {positions}")
        if updates.rank < 1 or positions.shape != updates.shape[:1]:
            raise ShapeMismatch(f"scatter_add needs one position a row of updates, got {updates} and {positions}")
        return Type((self.rows, *updates.shape[1:]), updates.dtype)

    def evaluate(self, updates: np.ndarray, positions: np.ndarray) -> np.ndarray:
        out = np.zeros((self.rows, *updates.shape[1:]), updates.dtype)
        np.add.at(out, wrapped(positions, self.rows), updates)
        return out

    def vjp(self, cotangent: Node, result: Node, updates: Node, positions: Node) -> list[Node | None]:
        return [gather(cotangent, positions, 0), None]

    def flops(self, result: Type, updates: Type, positions: Type) -> int:
        return updates.size


def scatter_add(updates: Node, positions: Node, rows: int) -> Node:
    """Sum rows of updates into `rows` places."""
    return make(ScatterAdd(rows), updates, positions)
