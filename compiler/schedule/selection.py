"""What extraction decided: a program of chosen e-nodes, and which values each kernel computes and stores."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import Graph, Node, Kind


@dataclass(frozen=True, slots=True)
class Group:
    """One kernel: it stores `outputs` and reads `operands`; all between is inlined (computed inside).

    Operands are INPUT or CONSTANT nodes or outputs of other groups. The body is what `body(group)` walks. An output may be used inside
    as well. Reshapes are never stored: a stored value is known by its row-major order.
    """

    outputs: tuple[Node, ...]
    operands: tuple[Node, ...]
    predicted_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen program and its kernels in an order in which each reads only what is there.

    Outputs of `graph` are stored values, inputs, constants, or reshapes of these.
    """

    graph: Graph
    groups: tuple[Group, ...]


def body(group: Group) -> list[Node]:
    """The nodes that a kernel computes, operands first: everything under its outputs down to its operands."""
    stop, seen, out = set(group.operands) - set(group.outputs), set(), []
    for root in group.outputs:
        stack = [(root, False)]
        while stack:
            node, ready = stack.pop()
            if ready:
                out.append(node)
            elif node not in seen and node not in stop:
                seen.add(node)
                stack.append((node, True))
                stack.extend((o, False) for o in reversed(node.operands))
    return out


def stored_base(node: Node) -> Node:
    """`node` without the reshapes around it: the value whose memory holds it."""
    while node.op.name == "reshape":
        node = node.operands[0]
    return node


def separate(graph: Graph) -> Selection:
    """Every op its own kernel, cheap leaves and movement inlined: the unoptimized program, for tests and debugging."""
    groups: list[Group] = []
    stored: set[Node] = set()
    roots = {stored_base(o) for o in graph.outputs}
    inlined = (Kind.LITERAL, Kind.IOTA, Kind.MOVE, Kind.TUPLE)
    by_tuple: dict[Node, list[Node]] = {}
    order = graph.nodes()
    for node in order:
        if node.kind is Kind.GET:
            by_tuple.setdefault(node.operands[0], []).append(node)
    for node in order:
        leaf = node.kind in (Kind.INPUT, Kind.CONSTANT)
        if leaf or node in stored or (node.kind in inlined and node not in roots):
            stored |= {node} if leaf else set()
            continue
        outputs = tuple(by_tuple[node.operands[0]]) if node.kind is Kind.GET else (node,)
        stored.update(outputs)
        groups.append(Group(outputs, _operands(outputs, stored)))
    return Selection(graph, tuple(groups))


def _operands(outputs: tuple[Node, ...], stored: set[Node]) -> tuple[Node, ...]:
    found: dict[Node, None] = {}
    stack = [o for out in outputs for o in out.operands]
    while stack:
        node = stack.pop()
        if node in stored and node not in outputs:
            found[node] = None
        else:
            stack.extend(node.operands)
    return tuple(found)
