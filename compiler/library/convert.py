"""Promotion and broadcasting: how arguments of different types meet.

* Arrays promote along bool < u32 < i32 < f16 < f32; NumPy's 64-bit types count as their 32-bit
ones.
* Python scalars never promote: a number takes the dtype of the arrays beside it. A fraction beside
integers, or a
  number beside bools, is an error that says to cast.
* Without any array, a Python bool is bool, an int i32 and a float f32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Node
from ..ops import broadcast, cast, literal
from ..tracing import Array, array
from ..types import DType, bool_, f32, i32

Value = Any  # Array, NumPy array, nested list or Python number


def is_scalar(value: object) -> bool:
    """True for Python numbers, which take the dtype of what is beside them."""
    return isinstance(value, (bool, int, float)) and not isinstance(value, np.generic)


def node(value: Value, dtype: DType | None = None) -> Node:
    """A value as a node; a Python number gets `dtype` or its own default."""
    if is_scalar(value):
        return literal(value, dtype or scalar_dtype(value))
    out = array(value).node
    return cast(out, dtype) if dtype else out


def scalar_dtype(value: bool | int | float) -> DType:
    """The dtype of a Python number that stands alone."""
    return bool_ if isinstance(value, bool) else i32 if isinstance(value, int) else f32


def promoted(name: str, values: Sequence[Value]) -> list[Node]:
    """Values as nodes of one dtype, not yet of one shape."""
    arrays = [None if is_scalar(v) else array(v) for v in values]
    dtypes = [a.dtype for a in arrays if a is not None]
    if not dtypes:
        dtypes = [scalar_dtype(v) for v in values]
    to = max(dtypes, key=lambda d: d.rank)
    out = []
    for value, a in zip(values, arrays, strict=True):
        if a is None:
            check_scalar(name, value, to)
            out.append(literal(value, to))
        else:
            out.append(cast(a.node, to))
    return out


def check_scalar(name: str, value: Any, to: DType) -> None:
    """Raise unless a Python number can be a `to`."""
    exact = (
        to.kind == "f" or isinstance(value, bool) or (to.kind in "iu" and isinstance(value, int))
    )
    whole = (
        isinstance(value, float) and to.kind in "iu" and math.isfinite(value) and value.is_integer()
    )
    if not (exact or whole):
        raise TypeMismatch(
            f"{name} of {to} and {value!r}: a Python number takes the array's dtype; cast the "
            "array first, as in x.astype('f32')"
        )


def broadcast_shapes(name: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """NumPy's broadcast of shapes."""
    rank = max(map(len, shapes))
    out = []
    for k in range(rank):
        sizes = {s[len(s) - rank + k] for s in shapes if len(s) - rank + k >= 0} - {1}
        if len(sizes) > 1:
            raise ShapeMismatch(
                f"{name} needs shapes that broadcast, got "
                f"{' and '.join(str(list(s)) for s in shapes)}"
            )
        out.append(sizes.pop() if sizes else 1)
    return tuple(out)


def together(name: str, *values: Value) -> list[Node]:
    """Values as nodes of one dtype and one shape."""
    nodes = promoted(name, values)
    shape = broadcast_shapes(name, *(n.shape for n in nodes))
    return [broadcast(n, shape) for n in nodes]


def floating(name: str, value: Value) -> Node:
    """A value as a float node; integers and bools become f32."""
    n = node(value)
    return n if n.dtype.kind == "f" else cast(n, f32)


def axes_of(name: str, axis: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Axes as sorted non-negative numbers; None is all of them."""
    if axis is None:
        return tuple(range(rank))
    given = [int(a) for a in ([axis] if isinstance(axis, (int, np.integer)) else axis)]
    if any(not -rank <= a < rank for a in given):
        raise ShapeMismatch(f"{name}: axis {axis} is out of range for {rank} dimensions")
    out = tuple(sorted(a % rank for a in given))
    if len(set(out)) != len(out):
        raise ShapeMismatch(f"{name}: axis {axis} names an axis twice")
    return out


def one_axis(name: str, axis: int, rank: int) -> int:
    """One axis as a non-negative number."""
    return axes_of(name, axis, rank)[0]


def wrap(n: Node) -> Array:
    """A node as an Array."""
    return Array(n)
