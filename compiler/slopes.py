"""Functions of one value in a graph, such as activations: what autodiff takes a slope of at once.

The gradient of y = f(x) is then g f'(x), with f'(x) a value of its own that does not depend on g.
Backpropagation op by op gives g a(x) + g b(x) + ..., for which several values must be kept.
"""

from __future__ import annotations

from collections.abc import Mapping

from .ir import Kind, Node

_LEAST, _MOST = 3, 64  # ops of a function


def function_of(
    node: Node, users: Mapping[Node, set[Node]], position: Mapping[Node, int]
) -> tuple[Node, list[Node]] | None:
    """The nearest value x that `node` is a function of, and the ops of this function from `node`
    down: elementwise ones that nothing else uses.

    None where there is none, or the way to it is one path, which gives a product anyway. `position`
    says where the nodes that gradients flow through stand in a topological order.
    """
    if not _joins(node):
        return None
    inside, edge = {node}, {o for o in node.operands if o in position}
    while edge and len(inside) <= _MOST:
        last = max(edge, key=position.__getitem__)
        if len(edge) == 1 and len(inside) >= _LEAST and len(users[last] & inside) > 1:
            ops = sorted(inside, key=position.__getitem__, reverse=True)
            return (last, ops) if last.type == node.type else None
        if not _joins(last) or last.type != node.type or not users[last] <= inside:
            return None
        inside.add(last)
        edge.remove(last)
        edge |= {o for o in last.operands if o in position}
    return None


def _joins(node: Node) -> bool:
    """Whether an op may be one of a function: nothing about it is for autodiff alone."""
    elementwise = node.kind is Kind.ELEMENTWISE and node.dtype.kind == "f"
    return elementwise and node.op.masking is None and not getattr(node.op, "mark", False)
