"""The saturated e-graph as plain lists: what extraction works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ir import Node, Op
from ..types import TupleType, Type


@dataclass(slots=True)
class Snapshot:
    """E-nodes and e-classes with dense numbers, in a deterministic order.

    E-node i is `ops[i]` applied to classes `kids[i]`, a member of class `cls[i]`; `rule[i]` names
    the rule that made it, "" for one of the traced program. Class c has type `types[c]`. `roots`
    are the classes of the program's outputs; `class_of` maps the traced program's nodes to classes.
    """

    ops: list[Op]
    kids: list[tuple[int, ...]]
    cls: list[int]
    rule: list[str]
    types: list[Type | TupleType]
    roots: list[int]
    class_of: Mapping[Node, int] = field(default_factory=dict)


def from_nodes(roots: list[Node]) -> Snapshot:
    """The snapshot of a program without any rewriting: one e-node a class."""
    from ..ir import topological

    order = topological(roots)
    number = {n: i for i, n in enumerate(order)}
    return Snapshot(
        ops=[n.op for n in order],
        kids=[tuple(number[o] for o in n.operands) for n in order],
        cls=list(range(len(order))),
        rule=[""] * len(order),
        types=[n.type for n in order],
        roots=[number[r] for r in roots],
        class_of=number,
    )
