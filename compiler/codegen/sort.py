"""Stable sorting of rows: keys as ordered integers, runs sorted by counting, then merged in pairs;
in each step every element finds its own new place, so there is one kernel a step and none waits for
another invocation."""

from __future__ import annotations

import math

from ..index import Index, unflatten
from ..ir import Node
from ..schedule.kernel import KernelSource, Scratch, Stored
from ..schedule.space import Analysis, illegal
from ..schedule.tile import fold
from ..types import i32, u32
from .emitter import Emitter
from .rewrite import partial_input
from .source import Job, finish
from .statements import Value

WORKGROUP = 64
_SHORT = 64  # elements of a row that is sorted by counting alone
_RUN = 16  # elements of a run that is sorted by counting, of a longer row


def lower_sort(job: Job, analysis: Analysis) -> list[KernelSource]:
    """The kernels that give the order of the elements along the last axis; it is stored as it
    is."""
    node = analysis.anchor
    assert node is not None
    if job.group.outputs != (node,):
        raise illegal(job.group, "a sort shares no kernel with what follows it")
    if node.type.size == 0:
        return []
    shape = (node.type.size // node.shape[-1], node.shape[-1])
    keys = Scratch("keys", shape, "u32")
    kernels = [_keys(job, node, keys)]
    order: Scratch | None = None
    run = shape[1] if shape[1] <= _SHORT else _RUN
    while True:
        last = run >= shape[1] if order is None else 2 * run >= shape[1]
        step = _Step(job, node, keys, order)
        new = None if last else (Scratch("keys", shape, "u32"), Scratch("order", shape, "u32"))
        kernels.append(step.counted(run, new) if order is None else step.merged(run, new))
        if new is None:
            return kernels
        run = run if order is None else 2 * run
        keys, order = new


def _keys(job: Job, node: Node, keys: Scratch) -> KernelSource:
    """Integers in the order of the elements; falling when the sort is."""
    operand = node.operands[0]
    em = Emitter([keys], dict(job.memory))
    at = em.variable("worker", node.type.size)
    value = em.value(operand, unflatten(at, operand.shape))
    key = f"eg_sort_key_{operand.dtype.kind}({em.splat(value, operand.dtype, vector=False)})"
    falling: bool = node.op.descending  # type: ignore[attr-defined]
    em.store(0, at, em.let("key", "key", f"~{key}" if falling else key, 0, vector=False), u32)
    return _finish(job, em, node)


class _Step:
    """A kernel that reads keys, and the places that they came from (none yet: their own), and moves
    both."""

    def __init__(self, job: Job, node: Node, keys: Scratch, order: Scratch | None) -> None:
        self.job, self.node, self.n = job, node, node.shape[-1]
        self.keys = partial_input(keys, 0)
        self.order = partial_input(order, 1) if order is not None else None
        self.memory: dict[Node, Stored] = {self.keys: keys}
        if self.order is not None and order is not None:
            self.memory[self.order] = order

    def _begin(self, new: tuple[Scratch, Scratch] | None) -> tuple[Emitter, Index, Index, str]:
        """The emitter, this invocation's row and place in it, and its key."""
        em = Emitter(new or [self.job.held_by(self.node)], self.memory)
        worker = em.variable("worker", self.node.type.size)
        row, place = unflatten(worker, (self.node.type.size // self.n, self.n))
        return em, row, place, em.load(self.keys, worker).text

    def counted(self, run: int, new: tuple[Scratch, Scratch] | None) -> KernelSource:
        """Runs sorted: an element's rank is how many of its run come before it."""
        em, row, place, mine = self._begin(new)
        here = em.index(place).text
        start = em.index(place // run * run).text
        em.line("var rank = 0u;")
        with em.block(f"for (var j = {start}; j < min({start} + {run}u, {self.n}u); j++)"):
            other = em.load(self.keys, row * self.n + em.variable("j", self.n)).text
            em.line(
                f"rank += select(0u, 1u, {other} < {mine} || ({other} == {mine} && j < {here}));"
            )
        return self._end(em, row, f"{start} + rank", mine, here, new)

    def merged(self, run: int, new: tuple[Scratch, Scratch] | None) -> KernelSource:
        """Pairs of runs merged: an element goes behind those of the other run that come before
        it."""
        em, row, place, mine = self._begin(new)
        assert self.order is not None
        own = em.load(self.order, row * self.n + place).text
        here = em.index(place).text
        em.line(
            f"let run = {here} / {run}u;",
            f"let first = min((run ^ 1u) * {run}u, {self.n}u);",
            "var low = first;",
            f"var high = min(first + {run}u, {self.n}u);",
        )
        with em.block("while (low < high)"):
            em.line("let middle = (low + high) >> 1u;")
            other = em.load(self.keys, row * self.n + em.variable("middle", self.n)).text
            # of equal keys those of the left run come first
            em.line(
                f"let before = {other} < {mine} || ((run & 1u) == 1u && {other} == {mine});",
                "low = select(low, middle + 1u, before);",
                "high = select(middle, high, before);",
            )
        left = f"(run >> 1u) * {2 * run}u + {here} % {run}u"
        return self._end(em, row, f"{left} + low - first", mine, own, new)

    def _end(
        self,
        em: Emitter,
        row: Index,
        to: str,
        key: str,
        own: str,
        new: tuple[Scratch, Scratch] | None,
    ) -> KernelSource:
        """Put the key and where it came from in its new place."""
        em.line(f"let to = {to};")
        place = row * self.n + em.variable("to", self.n)
        if new is not None:
            em.store(0, place, Value(key), u32)
            em.store(1, place, Value(own), u32)
        else:
            em.store(0, place, Value(f"i32({own})"), i32)
        return _finish(self.job, em, self.node)


def _finish(job: Job, em: Emitter, node: Node) -> KernelSource:
    count = node.type.size
    grid = fold(-(-count // WORKGROUP), job.target.max_groups)
    values = {"body": em.text, "count": count, "workgroup": WORKGROUP, "width": grid[0] * WORKGROUP}
    flops = count * math.ceil(math.log2(node.shape[-1] + 1))
    return finish(job, em, "sort.wgsl.j2", values, grid, (WORKGROUP, 1, 1), flops=flops)
