"""Movement to and from a part of an array that begins where data says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..index import Index, index
from ..ir import Node, Source, make
from ..types import Type
from .move import Load, Move


@dataclass(frozen=True)
class DynamicSlice(Move):
    """The part of x of shape `size` that begins at `start`, an i32 vector with an entry an axis, in
    range.

    With starts i32[rows, axes - 1] each row, an index of the first axis, has a part of its own.
    """

    size: tuple[int, ...]
    name = "dynamic_slice"

    def infer(self, x: Type, start: Type) -> Type:
        if not _starts_fit(x, self.size, start):
            raise TypeMismatch(f"dynamic_slice needs one integer start an axis of {x}, got {start}")
        if len(self.size) != x.rank or any(
            not 0 <= a <= b for a, b in zip(self.size, x.shape, strict=True)
        ):
            raise ShapeMismatch(f"dynamic_slice of shape {list(self.size)} does not fit {x}")
        return Type(self.size, x.dtype)

    def evaluate(self, x: np.ndarray, start: np.ndarray) -> np.ndarray:
        if start.ndim == 1:
            return x[_window(start, self.size, x.shape)]
        part, shape = self.size[1:], x.shape[1:]
        parts = [row[_window(s, part, shape)] for row, s in zip(x, start, strict=True)]
        return np.stack(parts) if parts else np.empty(self.size, x.dtype)

    def vjp(self, cotangent: Node, result: Node, x: Node, start: Node) -> list[Node | None]:
        from . import full

        return [make(DynamicUpdate(), full(0, x.shape, x.dtype), cotangent, start), None]

    def sources(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> list[Source]:
        starts = _starts(load, 1, at, self.size, types)
        return [Source(0, tuple(i + s for i, s in zip(at, starts, strict=True)))]


@dataclass(frozen=True)
class DynamicUpdate(Move):
    """x with `update` written over the part that begins at `start`, an i32 vector with an entry an
    axis, in range.

    With starts i32[rows, axes - 1] each row of the update is written into that row of x.
    """

    name = "dynamic_update"
    writes_window = True

    def infer(self, x: Type, update: Type, start: Type) -> Type:
        if not _starts_fit(x, update.shape, start) or update.dtype != x.dtype:
            raise TypeMismatch(
                f"dynamic_update needs an update of {x.dtype} and one integer start an axis of "
                f"{x}, got {update}, {start}"
            )
        if update.rank != x.rank or any(a > b for a, b in zip(update.shape, x.shape, strict=True)):
            raise ShapeMismatch(f"dynamic_update with {update} does not fit {x}")
        return x

    def evaluate(self, x: np.ndarray, update: np.ndarray, start: np.ndarray) -> np.ndarray:
        out = x.copy()
        if start.ndim == 1:
            out[_window(start, update.shape, x.shape)] = update
            return out
        for row, part, s in zip(out, update, start, strict=True):
            row[_window(s, part.shape, row.shape)] = part
        return out

    def vjp(
        self, cotangent: Node, result: Node, x: Node, update: Node, start: Node
    ) -> list[Node | None]:
        from . import full

        dx = make(DynamicUpdate(), cotangent, full(0, update.shape, x.dtype), start)
        return [dx, make(DynamicSlice(update.shape), cotangent, start), None]

    def sources(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> list[Source]:
        if types[1].size == 0:
            return [Source(0, at)]
        starts = _starts(load, 2, at, types[1].shape, types)
        inside = tuple(i - s for i, s in zip(at, starts, strict=True))
        window = tuple((i, 0, n) for i, n in zip(inside, types[1].shape, strict=True))
        return [Source(1, inside, window), Source(0, at)]

    def window(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> tuple[Index, ...]:
        starts = _starts(load, 2, at, types[1].shape, types)
        return tuple(i + s for i, s in zip(at, starts, strict=True))


def _starts_fit(x: Type, size: Sequence[int], start: Type) -> bool:
    """Whether `start` is a vector with an entry an axis, or one for each row without its first."""
    rows = (x.shape[0], x.rank - 1) if x.rank and len(size) and size[0] == x.shape[0] else None
    return start.dtype.kind in "iu" and start.shape in ((x.rank,), rows)


def _starts(
    load: Load, operand: int, at: Sequence[Index], size: Sequence[int], types: Sequence[Type]
) -> list[Index]:
    """Where the part of an element begins on each axis; operand 0 holds the part."""
    shape = types[0].shape
    bounds = [n - m + 1 for m, n in zip(size, shape, strict=True)]
    if types[operand].rank == 1:
        return [load(operand, (index(k),), n) for k, n in enumerate(bounds)]
    return [index(0), *(load(operand, (at[0], index(k)), n) for k, n in enumerate(bounds[1:]))]


def _window(start: np.ndarray, size: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    first = [min(max(int(s), 0), n - m) for s, m, n in zip(start, size, shape, strict=True)]
    return tuple(slice(s, s + m) for s, m in zip(first, size, strict=True))


def dynamic_slice(x: Node, start: Node, size: Sequence[int]) -> Node:
    """A part of x at a place given by data."""
    return make(DynamicSlice(tuple(size)), x, start)


def dynamic_update(x: Node, update: Node, start: Node) -> Node:
    """x with a part written over at a place given by data."""
    return make(DynamicUpdate(), x, update, start)
