"""Reading parts of arrays: NumPy's basic slicing, integer-array indexing and take."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Node
from ..ops import broadcast, cast, flip, gather, reshape, slice_, transpose
from ..ops import elementwise as E
from ..ops import full as full_node
from ..tracing import Array, array
from ..types import bool_, i32
from .convert import Value, broadcast_shapes, node, one_axis, wrap


def getitem(x: Array, key: Any) -> Array:
    """x[key] with slices (any step), integers, None, `...` and integer arrays; bool masks have no
    fixed shape."""
    n, arrays = sliced(x, key)
    if not arrays:
        return wrap(n)
    view, positions, axis = joined(n, arrays)
    return wrap(gather(view, positions, axis))


def sliced(x: Array, key: Any) -> tuple[Node, list[tuple[int, Node]]]:
    """x[key] but for its integer arrays, which are given by the axes of the result that they
    index."""
    keys = _expanded(key if isinstance(key, tuple) else (key,), x.ndim)
    n = x.node
    start, stop, step, flips = [], [], [], []
    shape: list[int] = []  # after slicing, with None axes and without integer axes
    arrays: list[tuple[int, Node]] = []  # (axis in `shape`, positions)
    k = 0
    for item in keys:
        if item is None:
            shape.append(1)
            continue
        size = n.shape[k]
        if isinstance(item, slice):
            a, b, s = item.indices(size)
            count = len(range(a, b, s))
            if s < 0:  # the same elements in rising order, then reversed
                a, b, s = (a + (count - 1) * s, a + 1, -s) if count else (0, 0, 1)
                flips.append(k)
            start.append(a)
            stop.append(max(a, b))
            step.append(s)
            shape.append(count)
        elif isinstance(item, (bool, np.bool_)):
            raise TypeMismatch(f"True and False index no axis of {x.type}; use None for a new axis")
        elif isinstance(item, (int, np.integer)):
            if not -size <= item < size:
                raise IndexError(f"index {item} is out of range for axis {k} of {x.type}")
            at = int(item) % size
            start.append(at)
            stop.append(at + 1)
            step.append(1)
        else:
            positions = _positions(item, x)
            arrays.append((len(shape), positions))
            start.append(0)
            stop.append(size)
            step.append(1)
            shape.append(size)
        k += 1
    return reshape(flip(slice_(n, start, stop, step), flips), shape), arrays


def _expanded(keys: tuple[Any, ...], rank: int) -> list[Any]:
    used = sum(k is not None and k is not Ellipsis for k in keys)
    if used > rank:
        raise IndexError(f"{used} indices for {rank} dimensions")
    rest = [slice(None)] * (rank - used)
    places = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(places) > 1:
        raise IndexError("an index may have one ellipsis")
    if places:
        return [*keys[: places[0]], *rest, *keys[places[0] + 1 :]]
    return [*keys, *rest]


def _positions(item: Any, x: Array) -> Node:
    positions = array(item).node
    if positions.dtype is bool_:
        raise TypeMismatch(
            f"x[mask] has no fixed shape for {x.type}; use eggpu.where(mask, x, other)"
        )
    if positions.dtype.kind not in "iu":
        raise TypeMismatch(f"an index must be an integer array or a slice, got {positions.type}")
    return positions


def joined(n: Node, arrays: list[tuple[int, Node]]) -> tuple[Node, Node, int]:
    """(a view of n, positions, axis): the elements that several index arrays pick together, as
    those that one picks.

    The result's axes stand where the first indexed axis was, or in front when the indexed axes are
    not neighbors.
    """
    axes = [axis for axis, _ in arrays]
    if len(arrays) == 1:
        return n, arrays[0][1], axes[0]
    shape = broadcast_shapes("indexing", *(p.shape for _, p in arrays))
    sizes = [n.shape[a] for a in axes]
    flat: Node | None = None
    for (_, p), size in zip(arrays, sizes, strict=True):
        p = broadcast(cast(p, i32), shape)
        p = E.select(E.lt(p, full_node(0, shape, i32)), p + size, p)
        flat = p if flat is None else flat * size + p
    assert flat is not None
    together = axes == list(range(axes[0], axes[0] + len(axes)))
    first = axes[0] if together else 0
    rest = [k for k in range(len(n.shape)) if k not in axes]
    order = [*rest[:first], *axes, *rest[first:]]
    moved = transpose(n, order)
    view = reshape(
        moved, (*moved.shape[:first], math.prod(sizes), *moved.shape[first + len(axes) :])
    )
    return view, flat, first


def take(x: Value, positions: Value, axis: int | None = None) -> Array:
    """Elements of x along an axis at integer positions; the flat array when axis is None."""
    n = node(x)
    if axis is None:
        n, axis = reshape(n, (n.type.size,)), 0
    return wrap(gather(n, _positions(positions, wrap(n)), one_axis("take", axis, len(n.shape))))


def one_hot(positions: Value, classes: int, dtype: Any = "f32") -> Array:
    """1 at each position along a new last axis of length `classes`, else 0; out of range is all
    0."""
    from ..ops import iota
    from ..types import dtype as as_dtype

    p = _positions(positions, array(positions))
    shape = (*p.shape, classes)
    spread = broadcast(reshape(cast(p, i32), (*p.shape, 1)), shape)
    return wrap(cast(E.eq(spread, iota(shape, len(shape) - 1, i32)), as_dtype(dtype)))


def take_along_axis(x: Value, positions: Value, axis: int) -> Array:
    """x[..., positions[..., j, ...], ...]: positions has x's shape but for `axis`."""
    n, p = node(x), _positions(positions, array(x))
    k = one_axis("take_along_axis", axis, len(n.shape))
    if len(p.shape) != len(n.shape) or any(
        a != b for i, (a, b) in enumerate(zip(p.shape, n.shape, strict=True)) if i != k
    ):
        raise ShapeMismatch(
            f"take_along_axis needs positions like {n.type} but for axis {axis}, got {p.type}"
        )
    from ..ops import iota

    size = n.shape[k]
    p = cast(p, i32)
    flat = E.select(E.lt(p, full_node(0, p.shape, i32)), p + size, p)
    stride, total = 1, full_node(0, p.shape, i32)
    for i in reversed(range(len(n.shape))):
        part = flat if i == k else iota(p.shape, i, i32)
        total = total + part * stride
        stride *= n.shape[i]
    return wrap(gather(reshape(n, (n.type.size,)), total, 0))
