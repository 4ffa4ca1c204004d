"""Running combinations: an invocation goes along a row, or on a GPU a workgroup does. Few long rows
are cut into segments: their totals, the running combination of the totals, and the segments again
with what comes before each."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..index import Index, flatten, index, unflatten
from ..ir import Node
from ..ops.reduce import COMBINES
from ..ops.scan import scan
from ..schedule.kernel import KernelSource, Scratch
from ..schedule.space import Analysis, analyze, illegal
from ..schedule.target import Target
from ..schedule.tile import fold
from ..types import DTYPES
from .emitter import Emitter
from .rewrite import partial_input
from .source import Job, finish
from .statements import V, Value
from .wgsl import literal, suffix, wgsl_type

_LONGEST = 32768  # steps of one invocation where loops are bounded
_GROUP = 256  # threads of a workgroup that goes along a row
_SHORT = 64  # steps of a row that one invocation of a GPU does alone


@dataclass(frozen=True, slots=True)
class _Layout:
    """An array (outer, length, inner) as outer * inner rows.

    A step is one element, or one vec4: of a row when `inner` is 1, else of four neighbouring rows.
    `group` says that the threads of a workgroup share a segment, which else is one invocation's.
    """

    outer: int
    length: int
    inner: int
    reverse: bool
    wide: bool
    group: bool
    segments: int = 1

    @property
    def along(self) -> bool:
        return self.inner == 1

    @property
    def rows(self) -> int:
        return self.outer * self.inner

    @property
    def units(self) -> int:
        """Rows, or fours of neighbouring rows."""
        return self.rows // 4 if self.wide and not self.along else self.rows

    @property
    def steps(self) -> int:
        return self.length // 4 if self.wide and self.along else self.length

    @property
    def share(self) -> int:
        return -(-self.steps // self.segments)

    def place(self, unit: Index, step: Index) -> tuple[Index, Index, Index]:
        """Where the step-th element (or vec4) in the order of combination lies in (outer, length,
        inner)."""
        at = index(self.steps - 1) - step if self.reverse else step
        if self.along:
            return unit, (at * 4 + V if self.wide else at), Index()
        across = self.inner // 4 if self.wide else self.inner
        outer, inner = unflatten(unit, (self.outer, across))
        return outer, at, (inner * 4 + V if self.wide else inner)


def lower_scan(job: Job, analysis: Analysis) -> list[KernelSource]:
    """The kernels of one running combination and the values that it reads; it is stored as it
    is."""
    node = analysis.anchor
    assert node is not None
    if job.group.outputs != (node,):
        raise illegal(job.group, "a running combination shares no kernel with what follows it")
    if node.type.size == 0:
        return []
    whole = _layout(node, job.target)
    if whole.segments == 1:
        return [_Kernel(job, node, whole, None, None).build()]
    shape = (whole.rows, whole.segments) if whole.along else (whole.segments, whole.rows)
    dtype = "f32" if node.dtype.kind == "f" else node.dtype.name
    totals, before = Scratch("totals", shape, dtype), Scratch("before", shape, dtype)
    given = partial_input(totals, 0)
    running = scan(_combine_name(node), given, 1 if whole.along else 0)
    middle = job.part([running], memory={given: totals}, stores={running: before})
    return [
        _Kernel(job, node, whole, totals, None).build(),
        *lower_scan(middle, analyze(middle.group)),
        _Kernel(job, node, whole, None, before).build(),
    ]


def _combine_name(node: Node) -> str:
    return node.op.combine  # type: ignore[attr-defined]


def _layout(node: Node, target: Target) -> _Layout:
    axis, shape = node.op.axis, node.shape  # type: ignore[attr-defined]
    outer, length, inner = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    wide = (length if inner == 1 else inner) % 4 == 0
    reverse: bool = node.op.reverse  # type: ignore[attr-defined]
    alone = _Layout(outer, length, inner, reverse, wide, False)
    group = target.kind == "gpu" and alone.along and alone.steps > _SHORT
    found = _Layout(outer, length, inner, reverse, wide, group, _segments(alone, group, target))
    # no empty segments
    return _Layout(outer, length, inner, reverse, wide, group, -(-found.steps // found.share))


def _segments(whole: _Layout, group: bool, target: Target) -> int:
    """Segments of a row that keep the device busy and loops short."""
    if group:
        wanted, least = 256, 4 * _GROUP  # workgroups, steps of each
    elif target.kind == "gpu":
        wanted, least = 1 << 14, 32
    else:
        wanted, least = 64, 512
    enough = 16 if target.kind == "cpu" else wanted // 2
    few = whole.units < enough and whole.steps >= 8 * least
    segments = min(-(-wanted // whole.units), whole.steps // least) if few else 1
    return max(segments, -(-whole.steps // _LONGEST)) if target.loop_limit else segments


class _Kernel:
    """One pass over all segments: with `totals` it stores what each combines to, else every running
    combination, which begins with `before` where there is one."""

    def __init__(
        self, job: Job, node: Node, g: _Layout, totals: Scratch | None, before: Scratch | None
    ) -> None:
        self.job, self.node, self.g, self.totals, self.before = job, node, g, totals, before
        self.combine = COMBINES[_combine_name(node)]
        self.vector = g.wide and not g.along  # of the running value
        memory = dict(job.memory)
        if before is not None:
            self.given = partial_input(before, 1)
            memory[self.given] = before
        self.em = Emitter([totals if totals is not None else job.held_by(node)], memory)
        self.em.accesses[0].vector = g.wide if totals is None else self.vector
        self.unit = self.segment = Index()

    def build(self) -> KernelSource:
        g, em = self.g, self.em
        self._variables("tile" if g.group else "worker")
        start, stop = "0u", f"{g.steps}u"
        if g.segments > 1:
            start = em.index(self.segment * g.share).text
            stop = em.let("stop", "stop", f"min({start} + {g.share}u, {g.steps}u)", 0, False).text
        em.line(f"var total = {self._start()};")
        if g.group:
            self._together(start, stop)
        else:
            with em.block(f"for (var j = {start}; j < {stop}; j++)"):
                self._visit(em.variable("j", g.steps))
        if self.totals is not None:
            if g.group:
                with em.block("if (local == 0u)"):
                    self._store_total()
            else:
                self._store_total()
        return self._finish()

    def _variables(self, worker: str) -> None:
        g, em = self.g, self.em
        if g.segments == 1:
            self.unit = em.variable(worker, g.units)
        elif g.along:
            self.unit = em.variable("row", g.units, f"{worker} / {g.segments}u")
            self.segment = em.variable("segment", g.segments, f"{worker} % {g.segments}u")
        else:
            self.unit = em.variable("row", g.units, f"{worker} % {g.units}u")
            self.segment = em.variable("segment", g.segments, f"{worker} / {g.units}u")

    def _scratch_place(self, segment: Index) -> Index:
        row = self.unit * 4 + V if self.vector else self.unit
        return row * self.g.segments + segment if self.g.along else segment * self.g.rows + row

    def _start(self) -> str:
        """What the combination begins with: that of all segments before this one."""
        identity = self._identity(self.vector)
        if self.before is None:
            return identity
        value = self.em.load(self.given, self._scratch_place(self.segment - 1))
        first = self.em.index(self.segment).text
        given = self.em.splat(value, self.node.dtype, self.vector)
        return f"select({given}, {identity}, {first} == 0u)"

    def _value(self, step: Index) -> tuple[Index, str]:
        """The row-major position of a step, and the element, or the four, of the operand there."""
        g, operand, axis = self.g, self.node.operands[0], self.node.op.axis  # type: ignore[attr-defined]
        outer, at, inner = g.place(self.unit, step)
        coordinates = (
            *unflatten(outer, operand.shape[:axis]),
            at,
            *unflatten(inner, operand.shape[axis + 1 :]),
        )
        value = self.em.splat(self.em.value(operand, coordinates), operand.dtype, g.wide)
        return flatten(coordinates, operand.shape), value

    # ---- one invocation a segment

    def _visit(self, step: Index) -> None:
        g, em = self.g, self.em
        place, value = self._value(step)
        if not (g.wide and g.along):
            em.line(f"total = {self._combined('total', value, self.vector)};")
            result = "total"
        else:
            result, last = self._prefixes(value, "total")
            em.line(f"total = {last};")
        if self.totals is None:
            em.store(0, place, Value(result, g.wide, em.depth), self.node.dtype)

    def _prefixes(self, value: str, first: str) -> tuple[str, str]:
        """(a vec4 of the running combinations of four elements of a row after `first`, the last of
        them)."""
        em, at = self.em, first
        order = "wzyx" if self.g.reverse else "xyzw"
        made: dict[str, str] = {}
        for lane in order:
            text = f"{value}.{lane}" if at == "" else self._combined(at, f"{value}.{lane}", False)
            at = made[lane] = em.let(("prefix", value, lane), "prefix", text, em.depth, False).text
        kind = wgsl_type(self.node.dtype, True)
        return f"{kind}({', '.join(made[lane] for lane in 'xyzw')})", at

    # ---- one workgroup a segment

    def _together(self, start: str, stop: str) -> None:
        g, em = self.g, self.em
        with em.block(f"for (var base = {start}; base < {stop}; base += {_GROUP}u)"):
            em.line(
                "let step = base + local;",
                f"let present = step < {stop};",
                f"let near = min(step, {stop} - 1u);",
            )
            place, value = self._value(em.variable("near", g.steps))
            result, last = self._prefixes(value, "") if g.wide else (value, value)
            em.line(f"let mine = select({self._identity(False)}, {last}, present);")
            em.line(
                "let earlier = before(mine, local);",
                f"let first = {self._combined('total', 'earlier', False)};",
            )
            if self.totals is None:
                spread = f"{wgsl_type(self.node.dtype, g.wide)}(first)"
                em.line(f"let result = {self._combined(spread, result, g.wide)};")
                with em.block("if (present)"):
                    em.store(0, place, Value("result", g.wide, em.depth), self.node.dtype)
            em.line(
                f"total = {self._combined('total', f'shared_totals[{_GROUP - 1}u]', False)};",
                "workgroupBarrier();",
            )

    # ---- pieces

    def _store_total(self) -> None:
        value = Value("total", self.vector, self.em.depth)
        assert self.totals is not None
        self.em.store(0, self._scratch_place(self.segment), value, DTYPES[self.totals.dtype])

    def _identity(self, wide: bool) -> str:
        dtype = self.node.dtype
        return f"{wgsl_type(dtype, wide)}({literal(self.combine.identity[dtype.kind], dtype)})"

    def _combined(self, a: str, b: str, wide: bool) -> str:
        dtype = self.node.dtype
        return self.combine.wgsl.format(
            a, b, T=wgsl_type(dtype, wide), v="4" if wide else "", s=suffix(dtype, wide)
        )

    def _finish(self) -> KernelSource:
        g, limit = self.g, self.job.target.max_groups
        count = g.units * g.segments
        if g.group:
            grid = fold(count, limit)
            kind = wgsl_type(self.node.dtype)
            values = {
                "tiles": count,
                "width": grid[0],
                "threads": _GROUP,
                "type": kind,
                "identity": self._identity(False),
                "combine": self._combined("b", "a", False),
                "body": self.em.text,
            }
            return finish(self.job, self.em, "scan_gpu.wgsl.j2", values, grid, (_GROUP, 1, 1))
        size = 8 if self.job.target.kind == "cpu" and count < 2048 else 64
        grid = fold(-(-count // size), limit)
        values = {"count": count, "workgroup": size, "width": grid[0] * size, "body": self.em.text}
        return finish(self.job, self.em, "scan.wgsl.j2", values, grid, (size, 1, 1))
