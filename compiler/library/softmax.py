"""Softmax and its logarithm, in primitives."""

from __future__ import annotations

from ..ir import Node
from ..ops import broadcast, reduce
from ..ops import elementwise as E
from ..tracing import Array
from .convert import Value, floating, one_axis, wrap


def softmax(x: Value, axis: int = -1) -> Array:
    """exp(x) / sum(exp(x)) along an axis; the maximum is subtracted first, which changes nothing
    but overflow."""
    n = floating("softmax", x)
    k = one_axis("softmax", axis, len(n.shape))
    if not n.shape[k]:
        return wrap(n)
    e, total = _exponentials(n, k)
    return wrap(e / broadcast(total, n.shape))


def _exponentials(x: Node, axis: int) -> tuple[Node, Node]:
    e = E.exp(_shifted(x, axis))
    return e, reduce("sum", e, (axis,))


def _shifted(x: Node, axis: int) -> Node:
    return x - broadcast(E.stop_gradient(reduce("max", x, (axis,))), x.shape)


def log_softmax(x: Value, axis: int = -1) -> Array:
    """log(softmax(x)) along an axis, without overflow or loss of small probabilities."""
    n = floating("log_softmax", x)
    return wrap(log_softmax_node(n, one_axis("log_softmax", axis, len(n.shape))))


def log_softmax_node(x: Node, axis: int) -> Node:
    """log(softmax(x)) of a node."""
    if not x.shape[axis]:
        return x
    shifted = _shifted(x, axis)
    return shifted - broadcast(E.log(reduce("sum", E.exp(shifted), (axis,))), x.shape)
