"""Writing into arrays as values: `.at[...]`, slices at places given by data, gather and scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..autodiff import vjp_nodes
from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Node
from ..ops import broadcast, cast, concat, reshape, scatter_set, transpose
from ..ops import dynamic_slice as dynamic_slice_node
from ..ops import dynamic_update as dynamic_update_node
from ..ops import elementwise as E
from ..ops import full as full_node
from ..ops import scatter_add as scatter_add_node
from ..tracing import Array, array
from ..types import bool_, i32
from .convert import Value, broadcast_shapes, node, one_axis, promoted, wrap
from .indexing import getitem, joined, sliced


@dataclass(frozen=True)
class At:
    """`x.at[key]`: new arrays with the elements of `x[key]` changed. Of equal places the last `set`
    counts; `add` adds all."""

    x: Array
    key: Any = None

    def __getitem__(self, key: Any) -> At:
        return At(self.x, key)

    def set(self, values: Value) -> Array:
        """x with x[key] replaced by values, which broadcast."""
        n = self.x.node
        leaf = E.identity(n)
        part, arrays = sliced(wrap(leaf), self.key)
        given = self._given(values)
        if arrays:
            given = _written(part, arrays, given)
        whole = full_node(True, n.shape, bool_)
        mark = E.identity(whole)
        chosen, _ = sliced(wrap(mark), self.key)
        here = _back(mark, chosen, full_node(True, chosen.shape, bool_))
        everywhere = here is chosen or chosen.type.size == n.type.size
        out = _back(leaf, part, given)
        return wrap(out if everywhere else E.select(here, out, n))

    def add(self, values: Value) -> Array:
        """x with values added to x[key]; repeated places add up."""
        leaf = E.identity(self.x.node)
        chosen = getitem(wrap(leaf), self.key).node
        return wrap(self.x.node + _back(leaf, chosen, self._given(values)))

    def _given(self, values: Value) -> Node:
        """The values in the dtype of x and the shape of x[key]."""
        shape = getitem(self.x, self.key).shape
        _, given = promoted("at", [self.x, values])
        if broadcast_shapes("at", given.shape, shape) != shape:
            raise ShapeMismatch(f"x.at[key] has shape {list(shape)}, got values {given.type}")
        return broadcast(cast(given, self.x.dtype), shape)


def _back(leaf: Node, part: Node, value: Node) -> Node:
    """`value`, in the shape of `part`, put where the elements of `part` lie in `leaf`; zeros
    (False) elsewhere."""
    return vjp_nodes([part], [value], [leaf])[0]


def _written(part: Node, arrays: list[tuple[int, Node]], given: Node) -> Node:
    """`part` with the elements that index arrays pick replaced."""
    leaf = E.identity(part)
    view, positions, axis = joined(leaf, arrays)
    count = len(positions.shape)
    picked = tuple(range(axis, axis + count))
    rest = tuple(k for k in range(len(given.shape)) if k not in picked)
    front = (axis, *(k for k in range(len(view.shape)) if k != axis))
    moved = transpose(given, (*picked, *rest))
    rows = reshape(moved, (positions.type.size, *moved.shape[count:]))
    written = scatter_set(transpose(view, front), rows, reshape(positions, (positions.type.size,)))
    order = tuple(sorted(range(len(front)), key=front.__getitem__))
    return _back(leaf, view, transpose(written, order))


def _start(name: str, n: Node, start: Sequence[Value] | Value, size: Sequence[int]) -> Node:
    parts = (
        [reshape(cast(node(s), i32), (1,)) for s in start]
        if isinstance(start, (list, tuple))
        else None
    )
    at = concat(parts, 0) if parts else cast(node(start), i32)
    rows = (n.shape[0], len(n.shape) - 1) if n.shape and size and size[0] == n.shape[0] else None
    if at.shape not in ((len(n.shape),), rows) or len(size) != len(n.shape):
        raise ShapeMismatch(
            f"{name} needs a start and a size for each axis of {n.type}, got {at.type} and "
            f"{list(size)}"
        )
    each = [a - b for a, b in zip(n.shape, size, strict=True)]
    room = array(np.asarray(each if len(at.shape) == 1 else [each[1:]], np.int32)).node
    room = broadcast(room, at.shape)
    return E.minimum(E.maximum(at, full_node(0, at.shape, i32)), room)


def dynamic_slice(x: Value, start: Sequence[Value] | Value, size: Sequence[int]) -> Array:
    """x[start : start + size] with a start given by data, moved into range where it does not fit;
    starts (rows, axes - 1) give each row a part of its own."""
    n = node(x)
    return wrap(dynamic_slice_node(n, _start("dynamic_slice", n, start, size), size))


def dynamic_update_slice(x: Value, update: Value, start: Sequence[Value] | Value) -> Array:
    """x with `update` written at a start given by data, moved into range where it does not fit;
    starts (rows, axes - 1) give each row a place of its own."""
    n, u = node(x), node(update)
    return wrap(
        dynamic_update_node(n, cast(u, n.dtype), _start("dynamic_update_slice", n, start, u.shape))
    )


def gather(x: Value, axis: int, positions: Value) -> Array:
    """PyTorch's gather: result[..., j, ...] = x[..., positions[..., j, ...], ...] with other axes
    equal."""
    from .indexing import take_along_axis

    return take_along_axis(x, positions, axis)


def scatter_add(x: Value, axis: int, positions: Value, updates: Value) -> Array:
    """x plus updates summed into rows `positions` (1-d) of `axis`; updates has x's shape with
    len(positions) there."""
    n, p = node(x), node(positions)
    k = one_axis("scatter_add", axis, len(n.shape))
    u = cast(node(updates), n.dtype)
    want = (*n.shape[:k], *p.shape, *n.shape[k + 1 :])
    if len(p.shape) != 1 or p.dtype.kind not in "iu":
        raise TypeMismatch(f"scatter_add needs 1-d integer positions, got {p.type}")
    if u.shape != want:
        raise ShapeMismatch(f"scatter_add needs updates of shape {list(want)}, got {u.type}")
    front = (k, *(i for i in range(len(n.shape)) if i != k))
    total = scatter_add_node(transpose(u, front), p, n.shape[k])
    back = tuple(sorted(range(len(front)), key=front.__getitem__))
    return wrap(n + transpose(total, back))
