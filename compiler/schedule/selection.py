"""What extraction decided: a program of chosen e-nodes, and which values each kernel computes and
stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ir import Graph, Kind, Node
from ..ops.loop import Loop
from ..ops.move import MOST_OPERANDS
from .plan import Plan


@dataclass(frozen=True, slots=True)
class Group:
    """One kernel: it stores `outputs` and reads `operands`; all between is inlined (computed
    inside).

    Operands are INPUT or CONSTANT nodes or outputs of other groups. The body is what `body(group)`
    walks. An output may be used inside as well. Reshapes are never stored: a stored value is known
    by its row-major order.
    """

    outputs: tuple[Node, ...]
    operands: tuple[Node, ...]
    predicted_ns: float = 0.0


@dataclass(frozen=True, slots=True)
class LoopGroup:
    """A loop whose body is compiled: `outputs` stand for its results, None for one that nobody
    reads."""

    op: Loop
    operands: tuple[Node, ...]
    outputs: tuple[Node | None, ...]
    plan: Plan  # of the body, with carries donated where they may be written over


@dataclass(frozen=True, slots=True)
class Selection:
    """The chosen program and its kernels in an order in which each reads only what is there.

    Outputs of `graph` are stored values, inputs, constants, or reshapes of these. `classes` has the
    e-class of each node that was chosen in an e-graph, `made_by` the rule behind it ("" for the
    traced program's own). Around loops, parts of
    the program were chosen apart: `aliases` has the stored value behind each input that stands for
    another part's result.
    """

    graph: Graph
    groups: tuple[Group | LoopGroup, ...]
    classes: Mapping[Node, int] = field(default_factory=dict, compare=False, repr=False)
    made_by: Mapping[Node, str] = field(default_factory=dict, compare=False, repr=False)
    aliases: Mapping[Node, Node] = field(default_factory=dict, compare=False, repr=False)

    def base(self, node: Node) -> Node:
        """The value whose memory holds `node`."""
        node = stored_base(node)
        while node in self.aliases:
            node = stored_base(self.aliases[node])
        return node


def body(group: Group) -> list[Node]:
    """The nodes that a kernel computes, operands first: everything under its outputs down to its
    operands."""
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


def reads(outputs: tuple[Node, ...], operands: tuple[Node, ...]) -> tuple[Node, ...]:
    """Those of `operands` that a kernel with these outputs reads."""
    inside = body(Group(outputs, operands))
    used = {o for node in inside for o in node.operands}
    return tuple(o for o in operands if o in used and o not in outputs)


def stored_base(node: Node) -> Node:
    """`node` without the reshapes around it: the value whose memory holds it."""
    while node.op.name == "reshape":
        node = node.operands[0]
    return node


def separate(graph: Graph) -> Selection:
    """Every op its own kernel, cheap leaves and movement inlined: the unoptimized program, for
    tests and debugging.

    Movement of so many values that no kernel could bind them is stored on the way.
    """
    roots = {stored_base(o) for o in graph.outputs}
    inlined = (Kind.LITERAL, Kind.IOTA, Kind.MOVE, Kind.TUPLE)
    made = _Separate()
    order = graph.nodes()
    by_tuple: dict[Node, list[Node]] = {}
    for node in order:
        if node.kind is Kind.GET:
            by_tuple.setdefault(node.operands[0], []).append(node)
    for node in order:
        if node.kind in (Kind.INPUT, Kind.CONSTANT):
            made.reads[node] = {node: None}
        elif node not in made.reads:
            made.visit(node)
            if node.kind not in inlined or node in roots:
                made.store(tuple(by_tuple[node.operands[0]]) if node.kind is Kind.GET else (node,))
    return Selection(graph, tuple(made.groups))


class _Separate:
    """`reads`: the stored values that a node is computed from; a stored one from itself."""

    def __init__(self) -> None:
        self.groups: list[Group] = []
        self.reads: dict[Node, dict[Node, None]] = {}

    def visit(self, node: Node) -> None:
        self.reads[node] = self._below(node)
        if len(self.reads[node]) > MOST_OPERANDS:
            for operand in node.operands:
                if operand.kind is Kind.MOVE and len(self.reads[operand]) > 1:
                    self.store((operand,))
            self.reads[node] = self._below(node)

    def store(self, outputs: tuple[Node, ...]) -> None:
        below = dict.fromkeys(r for out in outputs for r in self._below(out))
        self.groups.append(Group(outputs, tuple(below)))
        self.reads |= {out: {out: None} for out in outputs}

    def _below(self, node: Node) -> dict[Node, None]:
        return dict.fromkeys(r for operand in node.operands for r in self.reads[operand])
