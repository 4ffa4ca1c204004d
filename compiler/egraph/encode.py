"""From a graph to the e-graph: a short command a node, `(set (node 3) (Add (node 1) (node 2)))`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir import Node
from ..types import TupleType
from .engine import Engine
from .language import form_of, integers_text, string_text

# A node at each multiple of this depth states its type, so that all are known after few rounds.
STATED = 24


def encode(engine: Engine, nodes: Sequence[Node], derived: frozenset[str]) -> dict[Node, int]:
    """Insert nodes (operands first); the number of each. `derived` are the constructors whose types
    rules derive.
    """
    number: dict[Node, int] = {}
    depth: dict[Node, int] = {}
    for node in nodes:
        i = number[node] = len(number)
        depth[node] = 1 + max((depth[o] for o in node.operands), default=0)
        text = f"(set (node {i}) {term(node, number)})"
        name = form_of(node.op, len(node.operands)).name
        if not isinstance(node.type, TupleType) and (
            depth[node] % STATED == 0 or name not in derived
        ):
            text += (f"(set (shape (node {i})) {integers_text(node.shape)})"
                     f"(set (dtype (node {i})) {string_text(node.dtype.name)})")  # fmt: skip
        engine.run(text)
    return number


def term(node: Node, number: Mapping[Node, int]) -> str:
    """The op applied to numbered operands."""
    form = form_of(node.op, len(node.operands))
    operands = [f"(node {number[o]})" for o in node.operands]
    return f"({' '.join([form.name, *operands, *form.attribute_texts(node.op)])})"
