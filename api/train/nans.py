"""Finds the op that made the first NaN or infinity of a program, with the reference interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eggpu.compiler import pytree
from eggpu.compiler.ir import Graph, Kind, Node
from eggpu.compiler.ops.loop import Loop
from eggpu.compiler.reference import evaluate
from eggpu.compiler.tracing import trace_call
from eggpu.compiler.types import TupleType

Values = dict[Node, np.ndarray]


@dataclass(frozen=True, slots=True)
class Finding:
    """The op, what it gave and from what, in words."""

    op: str
    type: str
    source: str  # file:line of the user's code, "" when not known
    made: str  # "NaN" or "infinity"
    operands: tuple[str, ...]

    def __str__(self) -> str:
        where = f" at {self.source}" if self.source else ""
        given = f" of {', '.join(self.operands)}" if self.operands else ""
        return f"{self.op}{where} made the first {self.made}: {self.type}{given}"


def find_not_finite(function: Callable[..., Any], *args: Any) -> Finding | None:
    """The op of `function(*args)` that made the first NaN or infinity of a result, or None."""
    traced = trace_call(function, args)
    return first_not_finite(traced.graph, pytree.flatten(args)[0])


def first_not_finite(graph: Graph, inputs: Sequence[Any]) -> Finding | None:
    """The op that made what an output's NaN or infinity comes from, or None if all are finite.

    It goes back from the output: through NaN operands to an op that has none, and from there
    through infinite ones, except those that are meant, such as the -inf of a mask.
    """
    nodes = [n for n in graph.nodes() if not isinstance(n.type, TupleType)]
    arrays = [np.asarray(v) for v in inputs]
    results = evaluate(Graph(graph.name, graph.inputs, tuple(nodes), graph.input_names), arrays)
    values: Values = dict(zip(nodes, results, strict=True))
    broken = [o for o in graph.outputs if o in values and not np.isfinite(values[o]).all()]
    if not broken:
        return None
    with_nan = [o for o in broken if np.isnan(values[o]).any()]
    node = _origin((with_nan or broken)[0], values, np.isnan) if with_nan else broken[0]
    if _has(node, values, np.isinf) or _infinite(node, values):
        start = node if not np.isnan(values[node]).any() else None
        source = start or next((o for o in _operands(node) if _made_infinite(o, values)), None)
        node = node if source is None else _origin(source, values, np.isinf)
    return _finding(node, values, graph)


def _origin(node: Node, values: Values, test: Callable[[np.ndarray], np.ndarray]) -> Node:
    """The op under `node` whose operands all fail the test."""
    while True:
        worse = [o for o in _operands(node) if _has(o, values, test) and o.kind != Kind.CONSTANT]
        worse = [o for o in worse if test is np.isnan or _made_infinite(o, values)]
        if not worse:
            return node
        node = worse[0]


def _made_infinite(node: Node, values: Values) -> bool:
    """Whether `node` holds infinities that do not come from constants alone."""
    if not _has(node, values, np.isinf) or node.kind == Kind.CONSTANT:
        return False
    under = _operands(node)
    infinite = [o for o in under if _has(o, values, np.isinf)]
    return not infinite or any(_made_infinite(o, values) for o in infinite)


def _infinite(node: Node, values: Values) -> bool:
    return any(_has(o, values, np.isinf) for o in _operands(node))


def _has(node: Node, values: Values, test: Callable[[np.ndarray], np.ndarray]) -> bool:
    return node in values and bool(test(values[node]).any())


def _operands(node: Node) -> list[Node]:
    """The operands; of a part of a tuple those of the op that made the tuple."""
    out: list[Node] = []
    for operand in node.operands:
        out += _operands(operand) if isinstance(operand.type, TupleType) else [operand]
    return out


def _finding(node: Node, values: Values, graph: Graph) -> Finding:
    inside = _in_loop(node, values, graph)
    if inside is not None:
        return inside
    made = "NaN" if np.isnan(values[node]).any() else "infinity"
    names = dict(zip(graph.inputs, graph.input_names, strict=False))
    op = f"input {names[node]}" if node in names else node.op.name
    operands = tuple(_operand(o, values, names) for o in _operands(node))
    return Finding(op, repr(node.type), graph.sources.get(node, ""), made, operands)


def _in_loop(node: Node, values: Values, graph: Graph) -> Finding | None:
    """What made it inside the loop that gave `node`, and in which of its runs."""
    loop = node.operands[0] if node.kind is Kind.GET else node
    if not isinstance(loop.op, Loop):
        return None
    for row, inputs, outputs in loop.op.runs([values[o] for o in loop.operands]):
        if not all(np.isfinite(x).all() for x in outputs if x.dtype.kind == "f"):
            body = loop.op.body.replace(sources=graph.sources)
            found = first_not_finite(body, inputs)
            return None if found is None else replace(found, op=f"{found.op} of row {row}")
    return None


def _operand(node: Node, values: Values, names: dict[Node, str]) -> str:
    name, value = names.get(node, node.op.name), values.get(node)
    if value is None or not value.size:
        return f"{name} {node.type!r}"
    return f"{name} {node.type!r} from {value.min():.4g} to {value.max():.4g}"
