"""Kernels without reductions: each invocation computes one element, or four neighbours, of every
result; on llvmpipe several fours of large arrays, which lanes store one after the other."""

from __future__ import annotations

from dataclasses import dataclass

from ..index import Index, index, unflatten
from ..schedule.kernel import KernelSource
from ..schedule.lanes import FEATURES, can_store, in_turn
from ..schedule.space import Analysis, analyze, turned
from ..schedule.tile import fold
from .emitter import Emitter, aligned, stored_type
from .lanes import Lanes, digits
from .source import Job, finish
from .statements import V

WORKGROUP = 64
# on a GPU with many elements an invocation has some, so that it waits for one while it computes
# another, unless the text is long; with fewer but still many its workgroups are larger
LARGE_WORKGROUP, MANY = 256, 1 << 17
SEVERAL, WORKGROUP_OF_SEVERAL, SHORT = 4, 128, 48
# of lanes that store one after the other: vec4s of a lane, vec4s that it stores, lines of text for
# them without these stores, and subgroups of a workgroup
_FOURS, _WRITTEN, _LINES, _ABREAST = 8, 16, 320, 4
_BETTER_FOURS = (8, 4, 7, 6, 5, 3, 2, 1)  # the first that there can be is taken
_BETTER_ABREAST = (_ABREAST, *range(32, 0, -1))
_LEAST_GROUPS = 64  # with fewer a text is not worth being longer
_REPEATED = 4  # times that elements of an operand are read that is worth a copy in an image


def lower_elementwise(job: Job, analysis: Analysis | None = None) -> list[KernelSource]:
    """One kernel for all results, which have equally many elements; `analysis` is the group's, if
    it is known."""
    if job.group.outputs[0].type.size == 0:
        return []
    kernel = _Kernel(job, analysis or analyze(job.group))
    turns = kernel.turns()
    if turns is None:
        return [kernel.plain()]
    outputs = job.group.outputs
    better = in_turn(job.target, outputs[0].type.size, len(outputs))
    chosen = job.ranked([turns, None] if better else [None, turns])
    return [kernel.in_turn(*chosen) if chosen else kernel.plain()]


@dataclass(frozen=True, slots=True)
class _Kernel:
    job: Job
    a: Analysis

    @property
    def size(self) -> int:
        return self.job.group.outputs[0].type.size

    @property
    def wide(self) -> bool:
        return self.size % 4 == 0

    @property
    def count(self) -> int:
        """Elements, or vec4s, of a result."""
        return self.size // 4 if self.wide else self.size

    def plain(self) -> KernelSource:
        """An invocation computes one element, or four neighbours, or a few of these."""
        job, emitter = self.job, self._emitter()
        i = emitter.variable("i", self.count)
        self._element(emitter, i * 4 + V if self.wide else i + index(0))
        workgroup, each = _workgroup(job, self.count, emitter.text)
        grid = fold(-(-self.count // (workgroup * each)), job.target.max_groups)
        filled = {
            "body": emitter.text,
            "count": self.count,
            "workgroup": workgroup,
            "each": each,
            "width": grid[0] * workgroup * each,
        }
        return finish(job, emitter, "elementwise.wgsl.j2", filled, grid, (workgroup, 1, 1))

    def turns(self) -> tuple[int, int] | None:
        """(Vec4s of a lane, subgroups of a workgroup) if lanes can store one after the other."""
        job, outputs = self.job, self.job.group.outputs
        lanes = job.target.subgroup
        if not can_store(job.target, [stored_type(job.held_by(o)) for o in outputs]):
            return None
        if not self.wide or self.count % lanes or lanes % 2:
            return None
        emitter = self._emitter()
        flat = emitter.variable("i", self.count) * 4 + V
        self._element(emitter, flat)
        if not any(at == flat for at in self._places(flat)):
            return None
        lines = emitter.text.count("\n") + 1
        tiles = self.count // lanes
        busy = max(1, tiles // _LEAST_GROUPS // _ABREAST)
        most = min(_FOURS, _WRITTEN // len(outputs), _LINES // lines, busy)
        fours = next((n for n in _BETTER_FOURS if n <= most and tiles % n == 0), 0)
        if not fours:
            return None
        abreast = next(n for n in _BETTER_ABREAST if tiles // fours % n == 0)
        width, height, _ = fold(tiles // fours // abreast, job.target.max_groups)
        return (fours, abreast) if width * height * abreast * fours == tiles else None

    def in_turn(self, fours: int, abreast: int) -> KernelSource:
        """A lane computes some vec4s, which lanes store one after the other."""
        job, emitter, lanes = self.job, self._emitter(), self.job.target.subgroup
        tiles = self.count // (lanes * fours)
        tile = emitter.variable("tile", tiles)
        lane = emitter.variable("lane", lanes)
        same = emitter.variable("same", tiles, "shared_number(tile)")
        each = [{"tile": same, "lane": index(k)} for k in range(lanes)]
        emitter.lanes = Lanes(tuple(each))
        emitter.reusing = job.target.images
        for k in range(fours):
            self._element(emitter, ((tile * fours + k) * lanes + lane) * 4 + V, paired=True)
        for access in emitter.accesses:
            access.reused &= access.size * _REPEATED <= self.size
        grid = fold(tiles // abreast, job.target.max_groups)
        filled = {
            "body": emitter.text,
            "tiles": tiles,
            "width": grid[0],
            "L": lanes,
            "G": abreast,
            "digits": digits(tiles),
        }
        size, template = (lanes * abreast, 1, 1), "elementwise_cpu.wgsl.j2"
        return finish(job, emitter, template, filled, grid, size, features=FEATURES)

    def _emitter(self) -> Emitter:
        job = self.job
        return Emitter([job.held_by(o) for o in job.group.outputs], dict(job.memory))

    def _places(self, flat: Index) -> list[Index]:
        """Where element `flat` of the space that outputs share is in each of them."""
        return [turned(self.a.space[o], flat) for o in self.job.group.outputs]

    def _element(self, emitter: Emitter, flat: Index, paired: bool = False) -> None:
        """Statements that compute and store element `flat` of all outputs."""
        outputs, places = self.job.group.outputs, self._places(flat)
        values = [emitter.value(o, unflatten(at, o.shape)) for o, at in zip(outputs, places)]
        for k, (out, at, value) in enumerate(zip(outputs, places, values, strict=True)):
            access = emitter.accesses[k]
            access.vector = self.wide and at == flat
            access.paired = paired and access.vector and aligned(at, access.size)
            emitter.store(k, at, value, out.dtype)


def _workgroup(job: Job, count: int, text: str) -> tuple[int, int]:
    """(Invocations of a workgroup, elements of an invocation)."""
    most = job.target.max_invocations
    if job.target.kind == "cpu" or count < MANY:
        return WORKGROUP, 1
    if count >= SEVERAL * MANY and text.count("\n") < SHORT:
        return min(WORKGROUP_OF_SEVERAL, most), SEVERAL
    return min(LARGE_WORKGROUP, most), 1
