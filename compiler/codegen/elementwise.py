"""Kernels without reductions: each invocation computes one element, or four neighbours, of every
result."""

from __future__ import annotations

from ..index import index, unflatten
from ..schedule.kernel import KernelSource
from ..schedule.tile import fold
from .emitter import Emitter, V
from .source import Job, finish

WORKGROUP = 64
LARGE_WORKGROUP, MANY = 256, 1 << 17  # of a GPU, for at least so many invocations


def lower_elementwise(job: Job) -> list[KernelSource]:
    """One kernel for all results, which have equally many elements."""
    outputs = job.group.outputs
    size = outputs[0].type.size
    if size == 0:
        return []
    wide = size % 4 == 0
    count = size // 4 if wide else size
    emitter = Emitter([job.held_by(o) for o in outputs], dict(job.memory))
    i = emitter.variable("i", count)
    flat = i * 4 + V if wide else i + index(0)
    values = [emitter.value(o, unflatten(flat, o.shape)) for o in outputs]
    for k, (out, value) in enumerate(zip(outputs, values, strict=True)):
        emitter.accesses[k].vector = wide
        emitter.store(k, flat, value, out.dtype)
    large = job.target.kind == "gpu" and count >= MANY
    workgroup = min(LARGE_WORKGROUP, job.target.max_invocations) if large else WORKGROUP
    grid = fold(-(-count // workgroup), job.target.max_groups)
    filled = {
        "body": emitter.text,
        "count": count,
        "workgroup": workgroup,
        "width": grid[0] * workgroup,
    }
    return [finish(job, emitter, "elementwise.wgsl.j2", filled, grid, (workgroup, 1, 1))]
