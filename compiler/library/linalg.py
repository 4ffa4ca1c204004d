"""Products of arrays: matmul, dot, einsum and their relatives, all lowered to one batched
product."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import ShapeMismatch
from ..ir import Node
from ..ops import broadcast, reshape, transpose
from ..ops import dot as dot_node
from ..tracing import Array
from .convert import Value, broadcast_shapes, one_axis, promoted, wrap


def matmul(a: Value, b: Value) -> Array:
    """The matrix product over the last two axes, broadcasting the others; 1-d arrays are rows or
    columns."""
    x, y = promoted("matmul", [a, b])
    if not x.shape or not y.shape:
        raise ShapeMismatch(
            f"matmul needs arrays of at least one dimension, got {x.type} and {y.type}"
        )
    left, right = len(x.shape) == 1, len(y.shape) == 1
    x = reshape(x, (1, *x.shape)) if left else x
    y = reshape(y, (*y.shape, 1)) if right else y
    if x.shape[-1] != y.shape[-2]:
        raise ShapeMismatch(f"matmul needs (..., m, k) and (..., k, n), got {x.type} and {y.type}")
    out = _product(x, y)
    shape = [
        *out.shape[:-2],
        *([] if left else [out.shape[-2]]),
        *([] if right else [out.shape[-1]]),
    ]
    return wrap(reshape(out, shape))


def _product(x: Node, y: Node) -> Node:
    m, k, n = x.shape[-2], x.shape[-1], y.shape[-1]
    if math.prod(y.shape[:-2]) == 1:  # one matrix on the right: all rows of x together
        batch = broadcast_shapes("matmul", x.shape[:-2], y.shape[:-2])
        rows = reshape(x, (math.prod(x.shape[:-1]), k))
        return reshape(dot_node(rows, reshape(y, (k, n))), (*batch, m, n))
    batch = broadcast_shapes("matmul", x.shape[:-2], y.shape[:-2])
    return dot_node(broadcast(x, (*batch, m, k)), broadcast(y, (*batch, k, n)))


def dot(a: Value, b: Value) -> Array:
    """NumPy's dot: the last axis of a with the second last of b (the last when b is 1-d); scalars
    multiply."""
    x, y = promoted("dot", [a, b])
    if not x.shape or not y.shape:
        from .math import multiply

        return multiply(wrap(x), wrap(y))
    return tensordot(wrap(x), wrap(y), ([len(x.shape) - 1], [max(len(y.shape) - 2, 0)]))


def tensordot(a: Value, b: Value, axes: int | tuple[Sequence[int], Sequence[int]] = 2) -> Array:
    """Sum over pairs of axes: the last `axes` of a with the first of b, or the two given lists."""
    x, y = promoted("tensordot", [a, b])
    if isinstance(axes, int):
        left, right = list(range(len(x.shape) - axes, len(x.shape))), list(range(axes))
    else:
        both = [[v] if isinstance(v, int) else list(v) for v in axes]
        left = [one_axis("tensordot", k, len(x.shape)) for k in both[0]]
        right = [one_axis("tensordot", k, len(y.shape)) for k in both[1]]
    if [x.shape[k] for k in left] != [y.shape[k] for k in right]:
        raise ShapeMismatch(
            f"tensordot needs equal lengths on axes {left} of {x.type} and {right} of {y.type}"
        )
    keep = [k for k in range(len(x.shape)) if k not in left]
    rest = [k for k in range(len(y.shape)) if k not in right]
    k = math.prod(x.shape[i] for i in left)
    rows = reshape(transpose(x, (*keep, *left)), (math.prod(x.shape[i] for i in keep), k))
    columns = reshape(transpose(y, (*right, *rest)), (k, math.prod(y.shape[i] for i in rest)))
    return wrap(
        reshape(dot_node(rows, columns), [*(x.shape[i] for i in keep), *(y.shape[i] for i in rest)])
    )


def outer(a: Value, b: Value) -> Array:
    """The products of all pairs of elements of two arrays, taken flat."""
    x, y = promoted("outer", [a, b])
    m, n = x.type.size, y.type.size
    return wrap(broadcast(reshape(x, (m, 1)), (m, n)) * broadcast(reshape(y, (1, n)), (m, n)))
