"""Operands of products that lie straight in memory, with rows that begin anywhere among vec4s.

Their texts load whole vec4s from an image and take what they need of two neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..index import Index, Var, unflatten
from ..ir import Kind, Node
from ..schedule.images import LARGEST
from ..types import f32
from .emitter import Emitter
from .source import Job


@dataclass(frozen=True, slots=True)
class Strides:
    """Where an operand's element lies in a stored node: at `first`, and so many elements further
    for each step of the batch, of the row (column, of the second operand) and of k."""

    node: Node
    first: int
    batch: int
    row: int
    k: int

    @property
    def axis(self) -> str:
        """The axis along which neighbours are neighbours in memory: "k", "row", or "" where four
        of them would not be told by the place in a tile."""
        if self.batch % 4:
            return ""
        return "k" if self.k == 1 else "row" if self.row == 1 else ""


def strides(job: Job, node: Node, extents: Sequence[int], places: str) -> Strides | None:
    """How an operand with the coordinates `places` ("brk": batch, row, k) lies in memory; None if
    it is computed, or lies otherwise. Its leading axes are one."""
    stored = _stored(job, node)
    if stored is None or stored.dtype is not f32 or stored.type.size > LARGEST:
        return None
    em = Emitter((), dict(job.memory))
    at = [em.variable(name, n) for name, n in zip(places, extents, strict=True)]
    em.value(node, (*unflatten(at[0], node.shape[:-2]), *at[1:]))
    reads = [flat for access in em.accesses for flat, _ in access.at]
    if len(reads) != 1 or "select" in em.text:  # padded
        return None
    return _linear(stored, reads[0])


def _stored(job: Job, node: Node) -> Node | None:
    """What an operand is a view of, if that is stored."""
    while node not in job.memory:
        if node.kind is not Kind.MOVE or len(node.operands) != 1:
            return None
        node = node.operands[0]
    return node


def _linear(stored: Node, flat: Index) -> Strides | None:
    found = {atom.name: by for atom, by in flat.terms if isinstance(atom, Var)}
    if len(found) != len(flat.terms) or not set(found) <= set("brk") or flat.constant < 0:
        return None
    if min(found.values(), default=0) < 0:
        return None
    return Strides(stored, flat.constant, *(found.get(name, 0) for name in "brk"))


def shifts(at: Strides | None, axis: str) -> str:
    """The axis along which an operand is better read as skewed vec4s, "k" or "row"; "" if it can be
    loaded by four along the axis `axis`, or not so."""
    return "" if at is None or axis != "none" else at.axis
