"""Kernels without reductions: each invocation computes one element, or four neighbours, of every
result."""

from __future__ import annotations

from ..index import index, unflatten
from ..schedule.kernel import KernelSource
from ..schedule.space import Analysis, analyze, turned
from ..schedule.tile import fold
from .emitter import Emitter, V
from .source import Job, finish

WORKGROUP = 64
# on a GPU with many elements an invocation has some, so that it waits for one while it computes
# another, unless the text is long; with fewer but still many its workgroups are larger
LARGE_WORKGROUP, MANY = 256, 1 << 17
SEVERAL, WORKGROUP_OF_SEVERAL, SHORT = 4, 128, 48


def lower_elementwise(job: Job, analysis: Analysis | None = None) -> list[KernelSource]:
    """One kernel for all results, which have equally many elements; `analysis` is the group's, if
    it is known."""
    outputs = job.group.outputs
    size = outputs[0].type.size
    if size == 0:
        return []
    wide = size % 4 == 0
    count = size // 4 if wide else size
    emitter = Emitter([job.held_by(o) for o in outputs], dict(job.memory))
    i = emitter.variable("i", count)
    flat = i * 4 + V if wide else i + index(0)
    space = (analysis or analyze(job.group)).space
    places = [turned(space[o], flat) for o in outputs]
    values = [emitter.value(o, unflatten(at, o.shape)) for o, at in zip(outputs, places)]
    for k, (out, at, value) in enumerate(zip(outputs, places, values, strict=True)):
        emitter.accesses[k].vector = wide and at == flat
        emitter.store(k, at, value, out.dtype)
    workgroup, each = _workgroup(job, count, emitter.text)
    grid = fold(-(-count // (workgroup * each)), job.target.max_groups)
    filled = {
        "body": emitter.text,
        "count": count,
        "workgroup": workgroup,
        "each": each,
        "width": grid[0] * workgroup * each,
    }
    return [finish(job, emitter, "elementwise.wgsl.j2", filled, grid, (workgroup, 1, 1))]


def _workgroup(job: Job, count: int, text: str) -> tuple[int, int]:
    """(Invocations of a workgroup, elements of an invocation)."""
    most = job.target.max_invocations
    if job.target.kind == "cpu" or count < MANY:
        return WORKGROUP, 1
    if count >= SEVERAL * MANY and text.count("\n") < SHORT:
        return min(WORKGROUP_OF_SEVERAL, most), SEVERAL
    return min(LARGE_WORKGROUP, most), 1
