"""A loop in a plan: the kernels of its body's plan, over the memory of the plan around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..ir import Node
from .images import TEXELS
from .kernel import Scratch, Stored
from .plan import Access, Buffer, Carry, Constant, Kernel, Plan, Repeat, Row
from .rounds import Loops
from .selection import LoopGroup


class LoopSource:
    """A loop as one step of a program, with what plan assembly asks of a kernel.

    It writes its results, a second place for each carry that a round may not write over, and the
    scratch of its body.
    """

    copies = False
    updates: tuple[tuple[int, Stored], ...] = ()

    def __init__(self, group: LoopGroup, base: Callable[[Stored], Stored]) -> None:
        self.group, self.op, self.plan = group, group.op, group.plan
        self.name, self.features = group.op.body.name, group.plan.features
        types = [n.type for n in self.op.body.outputs]
        self.results: list[Stored] = []
        for k, (node, t) in enumerate(zip(group.outputs, types, strict=True)):
            shape = t.shape if k < self.op.carries else (self.op.count, *t.shape)
            self.results.append(node or Scratch(f"unused{k}", shape, t.dtype.name))
        self.twins: dict[int, Scratch] = {
            k: Scratch(f"twin{k}", types[k].shape, types[k].dtype.name)
            for k in range(self.op.carries)
            if self.op.count > 1 and k not in self.in_its_place
        }
        self.blocks = [Scratch("body", (size // 4,), "u32") for size in self.plan.arena]
        self.writes = (*self.results, *self.twins.values(), *self.blocks)
        self.operands = [base(o) for o in group.operands]
        self.seeds: dict[int, Node] = {}  # what is copied to where a carry's result will be
        for k in sorted(self.in_its_place & changed(self.plan)):
            init = self.operands[self.first_carry + k]
            assert isinstance(init, Node)
            self.seeds[k] = init
            self.operands[self.first_carry + k] = self.results[k]
        self.reads = tuple(o for o in dict.fromkeys(self.operands) if o not in self.writes)
        self.bytes_read = sum(k.bytes_read for k in self.plan.kernels) * self.op.count
        self.bytes_written = sum(k.bytes_written for k in self.plan.kernels) * self.op.count
        self.in_place = frozenset(self._handed_on())

    @cached_property
    def first_carry(self) -> int:
        """The place of the first carry among the operands."""
        return len(self.group.operands) - self.op.stacked - self.op.carries

    @cached_property
    def in_its_place(self) -> frozenset[int]:
        """The carries that a round of the body writes over."""
        return frozenset(k for k in range(self.op.carries) if stays(self.plan, self.first_carry, k))

    def _handed_on(self) -> list[tuple[int, int]]:
        """(result, operand) pairs that may share memory: the carry may be written over from the
        first round on.
        """
        found: list[tuple[int, int]] = []
        for k in self.in_its_place:
            operand = self.operands[self.first_carry + k]
            if self.operands.count(operand) == 1 and operand in self.reads:
                found.append((k, self.reads.index(operand)))
        return found


def changed(body: Plan) -> set[int]:
    """The outputs of which a body writes a part: the rest must be there before."""
    parts = {kernel.bindings[k].buffer for kernel in body.kernels for k, _ in kernel.updates}
    return {j for j, number in enumerate(body.outputs) if number in parts}


def stays(body: Plan, first: int, k: int) -> bool:
    """Whether a body writes carry k over its old value; `first` is the place of the first carry."""
    after = body.buffers[body.outputs[k]]
    return after.role != "input" and after.place == ("input", first + k)


def unfit(body: Plan, first: int, carries: int) -> tuple[set[int], set[int]]:
    """(outputs that need a buffer of their own, carries that may not be written over) before a plan
    can be a body.
    """
    taken: set[int] = set()
    shared: set[int] = set()
    kept: set[int] = set()
    for j, number in enumerate(body.outputs):
        buffer = body.buffers[number]
        if number in taken or buffer.role in ("input", "constant"):
            shared.add(j)
        taken.add(number)
        if buffer.role != "input" and buffer.place[0] == "input":
            k = buffer.place[1] - first
            if k != j:
                kept.add(k)
    return shared, {k for k in kept if 0 <= k < carries}


@dataclass
class Embedding:
    """A body's plan being put into the plan around it.

    `operands` and `results` are buffers of that plan, `twins` those of carries by number, `blocks`
    the places of the body's scratch. `add` gives a buffer a number, by which it is in `buffers`.
    """

    source: LoopSource
    operands: Sequence[int]
    results: Sequence[int]
    twins: dict[int, int]
    blocks: Sequence[tuple[int, int]]
    add: Callable[[Buffer], int]
    buffers: Sequence[Buffer]
    constants: list[Constant]
    kernels: list[Kernel]
    loops: list[Repeat]

    def embed(self) -> None:
        """Add the kernels and loops of the body, and the loop around them."""
        body, op = self.source.plan, self.source.op
        number, start = len(self.loops), len(self.kernels)
        new = [self._number(b, number) for b in range(len(body.buffers))]
        names = {b.name: self.buffers[n].name for b, n in zip(body.buffers, new, strict=True)}
        for kernel in body.kernels:
            computes = _renamed(kernel.computes, names)
            bindings = tuple(replace(b, buffer=new[b.buffer], image=-1) for b in kernel.bindings)
            updates = tuple((k, new[b]) for k, b in kernel.updates)
            self.kernels.append(
                replace(kernel, bindings=bindings, updates=updates, computes=computes)
            )
        stop = len(self.kernels)
        rows, carries = self._rows(new), self._carries(new)
        self.loops.append(Repeat(start, stop, op.count, rows, carries))
        for loop in body.loops:
            self.loops.append(_moved(loop, start, new))

    def _number(self, b: int, loop: int) -> int:
        """The buffer that stands for buffer b of the body."""
        body, op = self.source.plan, self.source.op
        buffer = body.buffers[b]
        match buffer.place:
            case ("input", i) if b == body.inputs[i] and i < self.source.first_carry:
                return self.operands[i]
            case ("input" | "output", _):
                return self.add(replace(buffer, role="view", place=("loop", loop)))
            case ("arena", block, offset):
                block, base = self.blocks[block]
                return self.add(replace(buffer, place=("arena", block, base + offset)))
            case ("constant", c):
                self.constants.append(body.constants[c])
                place = ("constant", len(self.constants) - 1)
                return self.add(replace(buffer, place=place))
            case ("loop", r):
                return self.add(replace(buffer, place=("loop", loop + 1 + r)))
            case _:
                raise AssertionError(f"unknown place {buffer.place} of {op.name}")

    def _rows(self, new: Sequence[int]) -> tuple[Row, ...]:
        source, body, op = self.source, self.source.plan, self.source.op
        first = source.first_carry + op.carries
        pairs = [(body.inputs[i], self.operands[i]) for i in range(first, len(body.inputs))]
        pairs += [(body.outputs[j], self.results[j]) for j in range(op.carries, len(body.outputs))]
        rows: list[Row] = []
        for b, stack in pairs:
            step = body.buffers[b].nbytes
            last = (op.count - 1) * step
            rows.append(Row(new[b], stack, *((last, -step) if op.reverse else (0, step))))
        return tuple(rows)

    def _carries(self, new: Sequence[int]) -> tuple[Carry, ...]:
        source, body, op = self.source, self.source.plan, self.source.op
        carries: list[Carry] = []
        for k in range(op.carries):
            value = new[body.inputs[source.first_carry + k]]
            after, first = new[body.outputs[k]], self.operands[source.first_carry + k]
            one, other = self.results[k], self.twins.get(k, self.results[k])
            even, odd = (
                (one, other) if op.count % 2 else (other, one)
            )  # the last round gives the result
            carries.append(Carry(value, after, first, even, odd))
        return tuple(carries)


def _renamed(computes: str, names: Mapping[str, str]) -> str:
    """What a kernel computes, with other names of buffers."""
    return re.sub(r"%([\w.']+)", lambda m: f"%{names.get(m[1], m[1])}", computes)


def _moved(loop: Repeat, start: int, new: Sequence[int]) -> Repeat:
    rows = tuple(Row(new[r.buffer], new[r.stack], r.start, r.step) for r in loop.rows)
    carries = tuple(
        Carry(new[c.value], new[c.after], new[c.first], new[c.even], new[c.odd])
        for c in loop.carries
    )
    return Repeat(loop.start + start, loop.stop + start, loop.count, rows, carries)


def opened(plan: Plan) -> Plan:
    """The plan in which kernels of loops bind as read_write all that may lie in memory which they
    write in some round.

    (Of one device buffer in a dispatch, either all bindings are `read` or all `read_write`.)
    """
    if not plan.loops:
        return plan
    loops = Loops(plan)
    kernels = list(plan.kernels)
    for k in {k for loop in plan.loops for k in range(loop.start, loop.stop)}:
        kernels[k] = _opened(kernels[k], plan, loops)
    return replace(plan, kernels=tuple(kernels))


def _opened(kernel: Kernel, plan: Plan, loops: Loops) -> Kernel:
    memory = [
        {plan.buffers[n].place[:2] for n in loops.bases(b.buffer)}
        if b.access not in TEXELS
        else set[tuple[str | int, ...]]()
        for b in kernel.bindings
    ]
    access: list[Access] = [b.access for b in kernel.bindings]
    written = {
        m for found, a in zip(memory, access, strict=True) if a == "read_write" for m in found
    }
    while True:
        more = [k for k, a in enumerate(access) if a == "read" and memory[k] & written]
        if not more:
            break
        for k in more:
            access[k] = "read_write"
            written |= memory[k]
    wgsl = kernel.wgsl
    for k, a in enumerate(access):
        if a == "read_write":
            wgsl = re.sub(rf"(@binding\({k}\) var<storage), read>", r"\1, read_write>", wgsl)
    bindings = tuple(replace(b, access=a) for b, a in zip(kernel.bindings, access, strict=True))
    return replace(kernel, bindings=bindings, wgsl=wgsl)
