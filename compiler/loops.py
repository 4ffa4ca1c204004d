"""Making loops and keeping them lean: what a body reads from around it, loops over the same
operands, unused results.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .ir import Graph, Kind, Node, at_line, known_lines, make, rebuild, substitute, topological
from .ops import input_node
from .ops.fused import get
from .ops.loop import Loop, loop
from .types import Type

_marks = itertools.count()


def marks(types: Sequence[Type]) -> list[Node]:
    """Inputs that are equal to no other node, to trace a body with."""
    return [input_node(k, f"mark{next(_marks)}", t) for k, t in enumerate(types)]


@dataclass(frozen=True, slots=True)
class Body:
    """A body being made: outputs over marks of carries and rows, and over nodes from around it."""

    name: str
    carries: Sequence[Node]
    rows: Sequence[Node]
    outputs: Sequence[Node]  # the next carries, then rows of results


def enclose(
    body: Body, init: Sequence[Node], stacks: Sequence[Node], count: int, reverse: bool
) -> list[Node]:
    """The results of a loop. What its body reads from around it, once computed there, becomes
    operands.

    Movement and numbers are computed inside, where they cost nothing. Bodies of equal programs are
    equal.
    """
    outside = _outside(body)
    inputs: dict[Node, Node] = {}
    for prefix, nodes in (("c", outside), ("h", body.carries), ("x", body.rows)):
        for k, node in enumerate(nodes):
            inputs[node] = input_node(len(inputs), f"{prefix}{k}", node.type)
    outputs = tuple(substitute(body.outputs, inputs))
    graph = Graph(body.name, tuple(inputs.values()), outputs)
    op = Loop(graph, count, len(init), len(stacks), reverse)
    return loop(op, [*outside, *init, *stacks])


def _outside(body: Body) -> list[Node]:
    """The values from around a body that it reads."""
    given = {*body.carries, *body.rows}
    inside, numbers = set[Node](), set[Node]()
    order = topological(body.outputs)
    for node in order:
        if node in given or any(o in inside for o in node.operands):
            inside.add(node)
        elif node.kind not in (Kind.INPUT, Kind.CONSTANT) and all(
            o in numbers for o in node.operands
        ):
            numbers.add(node)
    wanted = set(body.outputs)
    found: dict[Node, None] = {}
    for node in reversed(order):
        if node not in wanted or node in given or node in numbers:
            continue
        if node in inside or (node.kind is Kind.MOVE and len(node.operands) == 1):
            wanted.update(node.operands)
        else:
            found[node] = None
    return list(reversed(found))


def tidy(outputs: Sequence[Node]) -> tuple[Node, ...]:
    """`outputs` with loops over the same operands made one, without what nobody uses of loops."""
    outputs = tuple(outputs)
    if not any(n.kind is Kind.LOOP for n in topological(outputs)):
        return outputs
    return _pruned(_joined(outputs))


def _tidy_body(graph: Graph) -> Graph:
    return graph.replace(outputs=tidy(graph.outputs))


def rebuilt(
    outputs: Sequence[Node], change: Callable[[Node, list[Node]], dict[int, Node]]
) -> tuple[Node, ...]:
    """`outputs` with each loop replaced: `change(loop, new operands)` gives the results that are
    used.
    """
    new: dict[Node, Node] = {}
    results: dict[Node, dict[int, Node]] = {}
    sources = known_lines()
    for node in topological(outputs):
        if node.kind is Kind.LOOP:  # an operand that nobody needs may be gone
            with at_line(sources.get(node, "")):
                results[node] = change(node, [new.get(o, o) for o in node.operands])
        elif node.kind is Kind.GET and node.operands[0] in results:
            found = results[node.operands[0]]
            if node.op.index in found:  # type: ignore[attr-defined]
                new[node] = found[node.op.index]  # type: ignore[attr-defined]
        elif all(o in new for o in node.operands):
            with at_line(sources.get(node, "")):
                new[node] = rebuild(node, [new[o] for o in node.operands])
    return tuple(new[o] for o in outputs)


# loops over the same operands


def _joined(outputs: tuple[Node, ...]) -> tuple[Node, ...]:
    """Loops that differ only in which rows they keep become one: a loop and the same for its
    gradient.
    """
    groups: dict[object, list[Node]] = {}
    for node in topological(outputs):
        if isinstance(node.op, Loop):
            op, body = node.op, node.op.body
            same = (node.operands, op.count, op.reverse, body.inputs, body.outputs[: op.carries])
            groups.setdefault((same, op.carries, op.stacked), []).append(node)
    joint: dict[Node, tuple[Loop, dict[Node, int]]] = {}
    for nodes in groups.values():
        op = nodes[0].op
        assert isinstance(op, Loop)
        rows = [o for n in nodes for o in n.op.bodies[0].outputs[op.carries :]]
        kept = list(dict.fromkeys(rows))
        body = op.body.replace(outputs=(*op.body.outputs[: op.carries], *kept))
        place = {row: op.carries + k for k, row in enumerate(kept)}
        joint |= dict.fromkeys(nodes, (op.with_bodies([body]), place))

    def change(node: Node, operands: list[Node]) -> dict[int, Node]:
        op, place = joint[node]
        one = make(op, *operands)
        rows = node.op.bodies[0].outputs[op.carries :]
        carries = {k: get(one, k) for k in range(op.carries)}
        return carries | {op.carries + k: get(one, place[row]) for k, row in enumerate(rows)}

    return rebuilt(outputs, change)


# what nobody uses


@dataclass(frozen=True, slots=True)
class _Kept:
    """Of a loop's body: carries that change, carries that stay as they are, rows read and rows of
    results, by number.
    """

    carries: list[int]
    fixed: list[int]
    rows: list[int]
    results: list[int]


def _pruned(outputs: tuple[Node, ...]) -> tuple[Node, ...]:
    kept = _needed(outputs)

    def change(node: Node, operands: list[Node]) -> dict[int, Node]:
        return _lean(node, kept[node], operands) if node in kept else {}

    return rebuilt(outputs, change)


def _needed(outputs: Sequence[Node]) -> dict[Node, _Kept]:
    """What is needed of each loop that is; users come first, so that an unused part of one frees
    its operands.
    """
    needed, used = set(outputs), dict[Node, set[int]]()
    kept: dict[Node, _Kept] = {}
    for node in reversed(topological(outputs)):
        if node not in needed:
            continue
        needed.update(node.operands)
        if node.kind is Kind.GET:
            used.setdefault(node.operands[0], set()).add(node.op.index)  # type: ignore[attr-defined]
        elif isinstance(node.op, Loop):
            kept[node] = _keep(node.op, used[node])
    return kept


def _keep(op: Loop, used: set[int]) -> _Kept:
    outputs = op.body.outputs
    _, carried, rows = op.parts(op.body.inputs)
    results = sorted(k for k in used if k >= op.carries)
    live = {k for k in used if k < op.carries}
    while True:
        seen = set(topological([outputs[k] for k in (*results, *sorted(live))]))
        more = {k for k, node in enumerate(carried) if node in seen} | live
        if more == live:
            break
        live = more
    fixed = [k for k in sorted(live) if outputs[k] is carried[k]]
    return _Kept(
        [k for k in sorted(live) if k not in fixed],
        fixed,
        [k for k, node in enumerate(rows) if node in seen],
        results,
    )


def _lean(node: Node, kept: _Kept, operands: list[Node]) -> dict[int, Node]:
    """The results of a loop without what is not kept."""
    op = node.op
    assert isinstance(op, Loop)
    body = _tidy_body(op.body.replace(outputs=_outputs(op, kept)))
    seen, init, stacks = op.parts(operands)
    seen_in, carried_in, rows_in = op.parts(body.inputs)
    carries = marks([carried_in[k].type for k in kept.carries])
    rows = marks([rows_in[k].type for k in kept.rows])
    new: Mapping[Node, Node] = {
        **dict(zip(seen_in, seen, strict=True)),
        **{carried_in[k]: init[k] for k in kept.fixed},
        **{carried_in[k]: m for k, m in zip(kept.carries, carries, strict=True)},
        **{rows_in[k]: m for k, m in zip(kept.rows, rows, strict=True)},
    }
    outputs = substitute(body.outputs, new)
    found = {k: init[k] for k in kept.fixed}
    if outputs:
        results = enclose(
            Body(body.name, carries, rows, outputs),
            [init[k] for k in kept.carries],
            [stacks[k] for k in kept.rows],
            op.count,
            op.reverse,
        )
        found |= dict(zip([*kept.carries, *kept.results], results, strict=True))
    return found


def _outputs(op: Loop, kept: _Kept) -> tuple[Node, ...]:
    return tuple(op.body.outputs[k] for k in (*kept.carries, *kept.results))
