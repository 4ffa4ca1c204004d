"""Sums over a run of steps, taken apart: what is equal at all steps of a run is multiplied once.

Quantized weights are code * scale + low with one scale and low for a block, so that a block's part
of a product is scale * sum(code * x) + low * sum(x).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..index import Index
from ..ir import Kind, Node
from ..ops.elementwise import Elementwise
from ..ops.move import Move
from .emitter import Emitter
from .statements import Value

Place = tuple[Index, ...]
MOST_TERMS = 4


@dataclass(frozen=True, slots=True)
class Term:
    """The product of `factors`, and of `varying` at each step (None: 1)."""

    factors: tuple[Value, ...]
    varying: tuple[Value, ...] | None
    negative: bool = False


def terms(em: Emitter, node: Node, places: Sequence[Place]) -> list[Term]:
    """The values of a node at some places as a sum of terms."""
    found = _sum(em, node, places)
    if len(found) > MOST_TERMS or not any(t.factors or t.varying is None for t in found):
        return [_plain(em, node, places)]
    return found


def _plain(em: Emitter, node: Node, places: Sequence[Place]) -> Term:
    return Term((), tuple(em.value(node, at) for at in places))


def _sum(em: Emitter, node: Node, places: Sequence[Place]) -> list[Term]:
    moved = _moved(em, node, places)
    if moved is not None:
        return _sum(em, *moved)
    if node in em.memory or node in em.bound or node.kind is not Kind.ELEMENTWISE:
        return [_plain(em, node, places)]
    assert isinstance(node.op, Elementwise) or node.op.name == "cast"
    match getattr(node.op, "wgsl", ""):
        case "-{0}":
            return [_negated(t) for t in _addend(em, node.operands[0], places)]
        case "{0} + {1}":
            a, b = (_addend(em, o, places) for o in node.operands)
            return a + b
        case "{0} - {1}":
            a, b = (_addend(em, o, places) for o in node.operands)
            return a + [_negated(t) for t in b]
        case "{0} * {1}":
            return _product(em, node, places)
        case _:
            return [_plain(em, node, places)]


def _product(em: Emitter, node: Node, places: Sequence[Place]) -> list[Term]:
    for x, y in (node.operands, node.operands[::-1]):
        factor = _constant(em, y, places)
        if factor is not None:
            return [replace(t, factors=(*t.factors, factor)) for t in _addend(em, x, places)]
    return [_plain(em, node, places)]


def _addend(em: Emitter, node: Node, places: Sequence[Place]) -> list[Term]:
    factor = _constant(em, node, places)
    return _sum(em, node, places) if factor is None else [Term((factor,), None)]


def _constant(em: Emitter, node: Node, places: Sequence[Place]) -> Value | None:
    """The value of a node, where it is one at all places."""
    first = em.value(node, places[0])
    same = all(em.value(node, at).text == first.text for at in places[1:])
    return first if same else None


def _moved(em: Emitter, node: Node, places: Sequence[Place]) -> tuple[Node, list[Place]] | None:
    """A movement's operand and the places in it, where all come from it without a condition."""
    if node.kind is not Kind.MOVE or node in em.memory or node in em.bound:
        return None
    if len(node.operands) != 1 or em.place(node) is not None:
        return None
    assert isinstance(node.op, Move)
    out: list[Place] = []
    for at in places:
        source, *others = node.op.sources(at, [node.operands[0].type], _no_load)
        if others or source.condition:
            return None
        out.append(source.index)
    return node.operands[0], out


def _no_load(operand: int, where: Place, bound: int) -> Index:
    raise AssertionError("a movement of one operand reads no positions")


def _negated(term: Term) -> Term:
    return replace(term, negative=not term.negative)
