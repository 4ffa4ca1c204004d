"""Windows written over a part of a stored value: a kernel over the window alone.

A copy of the value goes before it, which plan assembly leaves out where the result may take the
value's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..index import Index, flatten, unflatten
from ..ir import Node
from ..ops.elementwise import barrier
from ..ops.move import Move
from ..schedule.kernel import KernelSource
from ..schedule.selection import stored_base
from ..schedule.space import Analysis
from ..schedule.tile import fold
from .elementwise import WORKGROUP, lower_elementwise
from .emitter import Emitter
from .source import Job, finish
from .statements import V


def lower_map(job: Job, analysis: Analysis) -> list[KernelSource]:
    """The kernels of a group without reductions or products."""
    windows = [o for o in job.group.outputs if _is_window(job, o)]
    if not windows:
        return lower_elementwise(job, analysis)
    rest = [o for o in job.group.outputs if o not in windows]
    kernels = lower_elementwise(job.part(rest)) if rest else []  # read what windows may write over
    kernels += [copy for o in windows for copy in _copy(job, o)]
    for size in dict.fromkeys(o.operands[1].type.size for o in windows):
        together = [o for o in windows if o.operands[1].type.size == size]
        kernels.append(_write(job, together))
    return kernels


def _is_window(job: Job, output: Node) -> bool:
    """Whether an output is a stored value with a part written over."""
    if not (isinstance(output.op, Move) and output.op.writes_window):
        return False
    return output.operands[1].type.size > 0 and stored_base(output.operands[0]) in job.memory


def _copy(job: Job, output: Node) -> list[KernelSource]:
    """The value as it is, in the place of the result."""
    same = barrier(stored_base(output.operands[0]))
    part = job.part([same], stores={same: job.held_by(output)})
    return [replace(kernel, copies=True) for kernel in lower_elementwise(part)]


def _write(job: Job, outputs: Sequence[Node]) -> KernelSource:
    """One kernel for windows of equal size; an invocation writes an element, or four neighbours."""
    shapes = [o.operands[1].shape for o in outputs]
    size = outputs[0].operands[1].type.size
    wide = size % 4 == 0
    count = size // 4 if wide else size
    emitter = Emitter([job.held_by(o) for o in outputs], dict(job.memory))
    i = emitter.variable("i", count)
    flat = i * 4 + V if wide else i + 0
    places = [_place(emitter, o, unflatten(flat, s)) for o, s in zip(outputs, shapes, strict=True)]
    values = [
        emitter.value(o.operands[1], unflatten(flat, s))
        for o, s in zip(outputs, shapes, strict=True)
    ]
    for k, (out, at, value) in enumerate(zip(outputs, places, values, strict=True)):
        emitter.accesses[k].vector = wide and _in_fours(out)
        emitter.store(k, at, value, out.dtype)
    grid = fold(-(-count // WORKGROUP), job.target.max_groups)
    filled = {
        "body": emitter.text,
        "count": count,
        "workgroup": WORKGROUP,
        "each": 1,
        "width": grid[0] * WORKGROUP,
    }
    kernel = finish(job, emitter, "elementwise.wgsl.j2", filled, grid, (WORKGROUP, 1, 1))
    updates = tuple((k, job.memory[stored_base(o.operands[0])]) for k, o in enumerate(outputs))
    written = sum(o.operands[1].type.nbytes for o in outputs)
    return replace(kernel, updates=updates, bytes_written=written, in_place=frozenset())


def _place(emitter: Emitter, output: Node, at: tuple[Index, ...]) -> Index:
    """Where an element of the window lies in the result."""

    def load(operand: int, where: tuple[Index, ...], bound: int) -> Index:
        return emitter.position(output.operands[operand], where, bound)

    assert isinstance(output.op, Move)
    types = [o.type for o in output.operands]
    return flatten(output.op.window(at, types, load), output.shape)


def _in_fours(output: Node) -> bool:
    """Whether four neighbours of the window are an aligned vec4 of the result: rows are whole."""
    whole, window = output.shape, output.operands[1].shape
    return whole[-1] == window[-1] and whole[-1] % 4 == 0
