"""Running combinations, sorting and picking, named as in NumPy and PyTorch."""

from __future__ import annotations

from ..errors import ShapeMismatch
from ..ir import Node
from ..ops import argsort as argsort_node
from ..ops import cast, reshape, scan, slice_, transpose
from ..tracing import Array
from ..types import bool_, i32
from .convert import Value, node, one_axis, wrap
from .indexing import take_along_axis


def _scan(combine: str, x: Value, axis: int | None, reverse: bool) -> Array:
    n = node(x)
    n = cast(n, i32) if n.dtype is bool_ else n
    if axis is None:
        n, axis = reshape(n, (n.type.size,)), 0
    return wrap(scan(combine, n, one_axis(f"cum{combine}", axis, len(n.shape)), reverse))


def cumsum(x: Value, axis: int | None = None, reverse: bool = False) -> Array:
    """Running sums along an axis (of the flat array when None), from the end when `reverse`."""
    return _scan("sum", x, axis, reverse)


def cumprod(x: Value, axis: int | None = None, reverse: bool = False) -> Array:
    """Running products along an axis; gradients are right through zeros."""
    return _scan("prod", x, axis, reverse)


def cummax(x: Value, axis: int | None = None, reverse: bool = False) -> Array:
    """Running maxima along an axis; NaN stays. A tie's gradient goes to the latest element."""
    return _scan("max", x, axis, reverse)


def cummin(x: Value, axis: int | None = None, reverse: bool = False) -> Array:
    """Running minima along an axis; NaN stays. A tie's gradient goes to the latest element."""
    return _scan("min", x, axis, reverse)


def argsort(x: Value, axis: int | None = -1, descending: bool = False) -> Array:
    """The places of the elements in order along an axis, i32; equal elements keep their order, NaN
    is the largest."""
    n, axis = _flat(x, axis)
    perm = _last(len(n.shape), one_axis("argsort", axis, len(n.shape)))
    return wrap(transpose(argsort_node(transpose(n, perm), descending), _undo(perm)))


def sort(x: Value, axis: int | None = -1, descending: bool = False) -> Array:
    """The elements in order along an axis; NaN is the largest."""
    n, axis = _flat(x, axis)
    return take_along_axis(wrap(n), argsort(wrap(n), axis, descending), axis)


def topk(x: Value, k: int, axis: int = -1, largest: bool = True) -> tuple[Array, Array]:
    """The k largest (or smallest) elements along an axis in order, and their places."""
    n = node(x)
    a = one_axis("topk", axis, len(n.shape))
    if not 0 <= k <= n.shape[a]:
        raise ShapeMismatch(
            f"topk needs 0 <= k <= {n.shape[a]} along axis {axis} of {n.type}, got {k}"
        )
    order = node(argsort(wrap(n), a, descending=largest))
    stop = list(n.shape)
    stop[a] = k
    places = wrap(slice_(order, (0,) * len(n.shape), stop))
    return take_along_axis(wrap(n), places, a), places


def _flat(x: Value, axis: int | None) -> tuple[Node, int]:
    n = node(x)
    return (reshape(n, (n.type.size,)), 0) if axis is None else (n, axis)


def _last(rank: int, axis: int) -> tuple[int, ...]:
    return (*(k for k in range(rank) if k != axis), axis)


def _undo(perm: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(perm)), key=perm.__getitem__))
