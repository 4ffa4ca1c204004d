"""Checks a graph: what every pass may rely on and must keep."""

from __future__ import annotations

from collections import Counter

from .errors import EggpuError, IRError
from .ir import Graph, Kind, Node
from .types import TupleType


def verify_graph(graph: Graph) -> None:
    """Raises IRError, with the node and the user's line, unless the graph is well formed.

    Types follow from operands, every input that is used is listed, inputs are numbered in order,
    names are unique, and only `get` uses the results of a kernel with several.
    """
    where = f"graph {graph.name}"
    _check_inputs(graph, where)
    _check_names(graph, where)
    listed = set(graph.inputs)
    for node in graph.nodes():
        line = graph.sources.get(node, "")
        _check_node(node, listed, where + (f" at {line}" if line else ""))
        for body in node.op.bodies:
            verify_graph(body.replace(sources=graph.sources))
    for j, node in enumerate(graph.outputs):
        if isinstance(node.type, TupleType):
            raise IRError(f"{where}: output {j} needs one array, got {node!r}")


def _check_inputs(graph: Graph, where: str) -> None:
    for i, node in enumerate(graph.inputs):
        if node.kind is not Kind.INPUT:
            raise IRError(f"{where}: input {i} needs an input node, got {node!r}")
        position = node.op.attributes()["position"]
        if position != i:
            raise IRError(f"{where}: input {i} has position {position}")
    for i in graph.donated:
        if not 0 <= i < len(graph.inputs):
            raise IRError(f"{where}: donates input {i} of {len(graph.inputs)} inputs")
    if len(set(graph.donated)) != len(graph.donated):
        raise IRError(f"{where}: donates an input twice: {graph.donated}")


def _check_names(graph: Graph, where: str) -> None:
    pairs = (
        ("input", graph.input_names, graph.inputs),
        ("output", graph.output_names, graph.outputs),
    )
    for what, names, nodes in pairs:
        if names and len(names) != len(nodes):
            raise IRError(f"{where}: needs {len(nodes)} {what} names, got {len(names)}")
        for name, count in Counter(names).items():
            if count > 1:
                raise IRError(f"{where}: {what} name {name} stands for {count} {what}s")


def _check_node(node: Node, listed: set[Node], where: str) -> None:
    if node.kind is Kind.INPUT and node not in listed:
        raise IRError(
            f"{where}: {node!r} is no input of the graph: an array of another trace is used, "
            "such as one that a function of eg.scan or eg.compile kept; give it as a result"
        )
    for operand in node.operands:
        if isinstance(operand.type, TupleType) != (node.kind is Kind.GET):
            raise IRError(f"{where}: {node!r} cannot use {operand!r}")
    try:
        type_ = node.op.infer(*(o.type for o in node.operands))
    except EggpuError as error:
        raise IRError(f"{where}: {node!r}: {error}") from error
    if type_ != node.type:
        raise IRError(
            f"{where}: {node!r} has the type {node.type!r}, {node.op.name} gives {type_!r}"
        )
