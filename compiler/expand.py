"""Ops that have no kernel of their own become programs of simpler ops."""

from __future__ import annotations

from .ir import Graph, Node, at_line, rebuild, recording, topological


def expand(graph: Graph) -> Graph:
    """`graph` with every op that declares expansions replaced by the first of them; source lines
    stay."""
    if not any(_expansions(n) for n in graph.nodes()):
        return graph
    new: dict[Node, Node] = {}
    sources = dict(graph.sources)
    with recording(sources):
        for node in topological(graph.outputs):
            with at_line(graph.sources.get(node, "")):
                built = rebuild(node, [new[o] for o in node.operands])
                choices = _expansions(built)
                new[node] = choices[0] if choices else built
    return graph.replace(outputs=tuple(new[o] for o in graph.outputs), sources=sources)


def _expansions(node: Node) -> list[Node]:
    return list(node.op.expansions(*node.operands)) if node.operands else []
