"""Writing into arrays as values: `.at[...]`, slices at places given by data, gather and scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Node
from ..ops import broadcast, cast, concat, iota, reshape, scatter_set
from ..ops import dynamic_slice as dynamic_slice_node
from ..ops import dynamic_update as dynamic_update_node
from ..ops import elementwise as E
from ..ops import full as full_node
from ..ops import scatter_add as scatter_add_node
from ..tracing import Array, array
from ..types import i32
from .convert import Value, broadcast_shapes, node, one_axis, promoted, wrap
from .indexing import getitem


@dataclass(frozen=True)
class At:
    """`x.at[key]`: new arrays with the elements of `x[key]` changed. Of equal places the last `set` counts; `add` adds all."""

    x: Array
    key: Any = None

    def __getitem__(self, key: Any) -> At:
        return At(self.x, key)

    def set(self, values: Value) -> Array:
        """x with x[key] replaced by values, which broadcast."""
        positions, updates = self._flat(values)
        flat = reshape(self.x.node, (self.x.size,))
        return wrap(reshape(scatter_set(flat, updates, positions), self.x.shape))

    def add(self, values: Value) -> Array:
        """x with values added to x[key]; repeated places add up."""
        positions, updates = self._flat(values)
        total = scatter_add_node(updates, positions, self.x.size)
        return wrap(self.x.node + reshape(total, self.x.shape))

    def _flat(self, values: Value) -> tuple[Node, Node]:
        places = wrap(reshape(iota((self.x.size,), 0, i32), self.x.shape))
        chosen = getitem(places, self.key).node
        _, given = promoted("at", [self.x, values])
        if broadcast_shapes("at", given.shape, chosen.shape) != chosen.shape:
            raise ShapeMismatch(f"x.at[key] has shape {list(chosen.shape)}, got values {given.type}")
        given = broadcast(cast(given, self.x.dtype), chosen.shape)
        count = chosen.type.size
        return reshape(chosen, (count,)), reshape(given, (count,))


def _start(name: str, n: Node, start: Sequence[Value] | Value, size: Sequence[int]) -> Node:
    parts = [reshape(cast(node(s), i32), (1,)) for s in start] if isinstance(start, (list, tuple)) else None
    at = concat(parts, 0) if parts else cast(node(start), i32)
    if at.shape != (len(n.shape),) or len(size) != len(n.shape):
        raise ShapeMismatch(f"{name} needs a start and a size for each axis of {n.type}, got {at.type} and {list(size)}")
    room = array(np.asarray([a - b for a, b in zip(n.shape, size, strict=True)], np.int32)).node
    return E.minimum(E.maximum(at, full_node(0, at.shape, i32)), room)


def dynamic_slice(x: Value, start: Sequence[Value] | Value, size: Sequence[int]) -> Array:
    """x[start : start + size] with a start given by data, moved into range where it does not fit."""
    n = node(x)
    return wrap(dynamic_slice_node(n, _start("dynamic_slice", n, start, size), size))


def dynamic_update_slice(x: Value, update: Value, start: Sequence[Value] | Value) -> Array:
    """x with `update` written at a start given by data, moved into range where it does not fit."""
    n, u = node(x), node(update)
    return wrap(dynamic_update_node(n, cast(u, n.dtype), _start("dynamic_update_slice", n, start, u.shape)))


def gather(x: Value, axis: int, positions: Value) -> Array:
    """PyTorch's gather: result[..., j, ...] = x[..., positions[..., j, ...], ...] with other axes equal."""
    from .indexing import take_along_axis

    return take_along_axis(x, positions, axis)


def scatter_add(x: Value, axis: int, positions: Value, updates: Value) -> Array:
    """x plus updates summed into rows `positions` (1-d) of `axis`; updates has x's shape with len(positions) there."""
    n, p = node(x), node(positions)
    k = one_axis("scatter_add", axis, len(n.shape))
    u = cast(node(updates), n.dtype)
    want = (*n.shape[:k], *p.shape, *n.shape[k + 1 :])
    if len(p.shape) != 1 or p.dtype.kind not in "iu":
        raise TypeMismatch(f"scatter_add needs 1-d integer positions, got {p.type}")
    if u.shape != want:
        raise ShapeMismatch(f"scatter_add needs updates of shape {list(want)}, got {u.type}")
    from ..ops import transpose

    front = (k, *(i for i in range(len(n.shape)) if i != k))
    total = scatter_add_node(transpose(u, front), p, n.shape[k])
    back = tuple(sorted(range(len(front)), key=front.__getitem__))
    return wrap(n + transpose(total, back))


