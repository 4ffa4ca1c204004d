"""Mixed precision: activations and the operands of products are kept as f16, all else stays f32.

A value becomes `cast(cast(x, f16), f32)`: it is rounded to f16, and what reads it computes in f32,
so products accumulate in f32. Extraction stores the f16 value between the casts where that is
cheaper, which it is: it has half the bytes. Left in f32 are parameters and the optimizer's state,
reductions and what depends on a row's maximum (softmax, log-sum-exp and their gradients), the
results of products that go into these, and gradients of weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from .ir import Graph, Kind, Node, at_line, rebuild, recording
from .ops.elementwise import cast
from .ops.reduce import Reduce
from .types import f16, f32

_PRODUCTS = (Kind.CONTRACT, Kind.WINDOW)
_CUTS = (*_PRODUCTS, Kind.LOOP, Kind.TUPLE)  # what is on their two sides has nothing to do


def mixed(graph: Graph) -> Graph:
    """The program with operands and results of products rounded to f16; source lines stay."""
    order = graph.nodes()
    exact = _after_maximum(order)
    into_exact, into_product = _leads(order, exact)
    rounded: dict[Node, Node] = {}
    new: dict[Node, Node] = {}
    sources = dict(graph.sources)
    with recording(sources):
        for node in order:
            with at_line(graph.sources.get(node, "")):
                operands = [new[o] for o in node.operands]
                if node.kind in _PRODUCTS:
                    pairs = zip(operands, node.operands, strict=True)
                    operands = [o if old in exact else _round(o, rounded) for o, old in pairs]
                made = rebuild(node, operands)
                activation = node in into_product and node not in into_exact
                if node.kind in _PRODUCTS and activation:
                    made = _round(made, rounded)
                new[node] = made
    return graph.replace(outputs=tuple(new[o] for o in graph.outputs), sources=sources)


def _round(node: Node, known: dict[Node, Node]) -> Node:
    """`node` rounded to f16, as f32; below movement, so that all views of a value share it."""
    if node.dtype is not f32 or node.kind is Kind.LITERAL:
        return node
    if node not in known:
        if node.kind is Kind.MOVE and len(node.operands) == 1:
            known[node] = rebuild(node, [_round(node.operands[0], known)])
        else:
            known[node] = cast(cast(node, f16), f32)
            known[known[node]] = known[node]
    return known[node]


def _after_maximum(order: Sequence[Node]) -> set[Node]:
    """Values computed from the maximum of a row, up to the next product."""
    found: set[Node] = set()
    for node in order:
        largest = isinstance(node.op, Reduce) and node.op.combine == "max"
        if largest or (node.kind not in _CUTS and any(o in found for o in node.operands)):
            found.add(node)
    return found


def _leads(order: Sequence[Node], exact: set[Node]) -> tuple[set[Node], set[Node]]:
    """What leads to one of `exact`, and what leads to a product, both without another between."""
    into_exact: set[Node] = set()
    into_product: set[Node] = set()
    for node in reversed(order):
        for operand in node.operands:
            if node.kind in _CUTS:
                into_product.add(operand)
                continue
            if node in exact or node in into_exact:
                into_exact.add(operand)
            if node in into_product:
                into_product.add(operand)
    return into_exact, into_product
