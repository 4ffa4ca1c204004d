"""Parts of a group in other words: nodes replaced by equal ones that the templates know."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..ir import Kind, Node, make, rebuild
from ..ops import full
from ..ops.elementwise import mul
from ..ops.leaf import Input
from ..ops.move import broadcast, reshape, transpose
from ..ops.reduce import Reduce, reduce
from ..schedule.kernel import Scratch, Stored
from ..schedule.selection import Group, body
from .source import Job


def replaced(
    job: Job,
    outputs: Sequence[Node],
    new: Mapping[Node, Node],
    memory: Mapping[Node, Stored],
    held: Mapping[Node, Stored] | None = None,
) -> Job:
    """The job of `outputs` with nodes replaced; results go where those of `outputs` were to go."""
    now = dict(new)
    for node in body(Group(tuple(outputs), tuple(memory))):
        if node not in now:
            now[node] = rebuild(node, [now.get(o, o) for o in node.operands])
    stores = {now[o]: (held or {}).get(o) or job.held_by(o) for o in outputs}
    return job.part([now[o] for o in outputs], memory=memory, stores=stores)


def partial_input(scratch: Scratch, k: int = 0) -> Node:
    """A node for scratch that a later kernel reads."""
    return make(Input(-1 - k, scratch.label, scratch.shape, scratch.dtype))


def summed(scratch: Scratch, given: Node, combine: str, axis: int, like: Node) -> Node:
    """Scratch combined along an axis, in the shape of `like`."""
    total = given if scratch.shape[axis] == 1 else make(Reduce(combine, (axis,)), given)
    return reshape(total, like.shape)


def without_windows(job: Job) -> Job:
    """The group with convolutions as products with windows."""
    nodes = [n for n in body(job.group) if n.kind is Kind.WINDOW]
    if not nodes:
        return job
    new: dict[Node, Node] = {}
    for node in nodes:
        # over all images at once where one has few places
        forms = node.op.expansions(*node.operands)
        new[node] = forms[0 if math.prod(node.shape[2:]) >= 64 or len(forms) == 1 else 1]
    return replaced(job, job.group.outputs, new, job.memory)


def product_as_rows(a: Node, b: Node) -> Node:
    """a b as a sum over a broadcast product: for numbers that the templates of contractions do not
    take."""
    *lead, m, k = a.shape
    n = b.shape[-1]
    if k == 0:
        return full(0, (*lead, m, n), a.dtype)
    r = len(lead)
    left = broadcast(reshape(a, (*lead, m, 1, k)), (*lead, m, n, k))
    turned = transpose(b, (*range(r), r + 1, r))
    right = broadcast(reshape(turned, (*lead, 1, n, k)), (*lead, m, n, k))
    return reshape(reduce("sum", mul(left, right), (r + 2,)), (*lead, m, n))
