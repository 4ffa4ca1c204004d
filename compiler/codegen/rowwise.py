"""Kernels with reductions over rows: one kernel that passes over a row as often as its reductions
depend on one another, or, for few long rows, two kernels a reduction (segments, then their
combination)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..ir import Kind, Node
from ..ops.reduce import Reduce
from ..schedule.kernel import KernelSource, Scratch, Stored
from ..schedule.lanes import can_store
from ..schedule.selection import Group
from ..schedule.space import Analysis, analyze
from .elementwise import lower_elementwise
from .emitter import stored_type
from .geometry import Geometry, fits, geometry, in_turn, other_geometry, split, worthwhile
from .rewrite import partial_input, replaced, summed
from .rowkernel import row_kernel
from .source import Job


def lower_rows(job: Job, analysis: Analysis) -> list[KernelSource]:
    """The kernels of a group with reductions."""
    live = [o for o in job.group.outputs if o.type.size]
    if not live:
        return []
    if len(live) < len(job.group.outputs):
        return lower_job(job.part(live))
    if analysis.columns:
        return _rows_then_columns(job, analysis)
    passes = _passes(analysis)
    ways = _ways(job, analysis, passes)
    if "staged" in job.hints:
        staged = bool(job.hints["staged"])
        ways = [g for g in ways if (g is None) == staged] or [None]
    whole = job.ranked(ways)
    return [row_kernel(job, analysis, whole)] if whole else _staged(job, analysis)


def _ways(job: Job, a: Analysis, passes: int) -> list[Geometry | None]:
    """How one kernel may run over the rows, or None for two a reduction, the best first."""
    target = job.target
    whole = geometry(a.pattern, target, passes=passes)
    both = [whole, other_geometry(a.pattern, target, passes)]
    found: list[Geometry | None] = [g for g in both if g and fits(g, passes, target)]
    full = [job.held_by(o) for o in a.group.outputs if _is_full(o, a)]
    if full and can_store(target, [stored_type(o) for o in full]):
        columns = any(n.shape and n.shape[-1] > 1 and n.type.size < a.size for n in job.memory)
        turns = [in_turn(g, len(full), columns) for g in found if g]
        found = [g for g in turns if g] + found
    staged = not worthwhile(whole, passes, target) or not fits(whole, passes, target)
    return [None, *found] if staged else [*found[:1], None, *found[1:]]


def lower_job(job: Job) -> list[KernelSource]:
    """The kernels of a part of a group: again a legal group, with or without reductions."""
    analysis = analyze(job.group)
    lower = lower_rows if analysis.kind == "rows" else lower_elementwise
    return lower(job, analysis)


def _passes(a: Analysis) -> int:
    full = [a.level[o] for o in a.group.outputs if a.space[o].kind == "full"]
    return max([a.level[n] for n in reductions(a)] + [level + 1 for level in full])


def reductions(a: Analysis) -> list[Node]:
    return [n for n in a.body if n.kind is Kind.REDUCE]


def _rows_then_columns(job: Job, a: Analysis) -> list[KernelSource]:
    """Row results first, with the rows' reductions that columns need kept; then columns over the
    same matrix."""
    columns = [o for o in job.group.outputs if a.space[o].pattern == a.columns]
    sizes = (a.size, *(o.type.size for o in reductions(a) if a.space[o].pattern == a.pattern))
    columns += [
        o for o in job.group.outputs if a.space[o].kind == "pure" and o.type.size not in sizes
    ]
    rest = [o for o in job.group.outputs if o not in columns]
    below = _under(columns, job.memory)
    needed = [n for n in reductions(a) if n in below and a.space[n].pattern == a.pattern]
    stores = dict(job.stores) | {n: _kept(n) for n in needed if n not in rest}
    first = [*rest, *(n for n in needed if n not in rest)]
    kernels = lower_job(job.part(first, stores=stores)) if first else []
    memory = dict(job.memory) | {n: stores.get(n, n) for n in needed}
    return kernels + lower_job(job.part(columns, memory=memory))


def _kept(node: Node) -> Scratch:
    return Scratch(node.op.name, node.shape, node.dtype.name)


def _under(roots: Sequence[Node], stop: Mapping[Node, Stored]) -> set[Node]:
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen and node not in stop:
            seen.add(node)
            stack.extend(node.operands)
    return seen


def _staged(job: Job, a: Analysis) -> list[KernelSource]:
    """Level by level: segments of rows, their combination, and at last what is left at the
    matrix."""
    kernels: list[KernelSource] = []
    memory: dict[Node, Stored] = dict(job.memory)
    left = list(job.group.outputs)
    shape = split(a.pattern, job.target)
    for level in range(1, max(a.level[n] for n in reductions(a)) + 1):
        part = job.part(left, memory=memory)
        now = [n for n in reductions(a) if a.level[n] == level]
        full = [o for o in left if _is_full(o, a) and a.level[o] < level]
        segments = {n: _segments(n, shape, k) for k, n in enumerate(now)}
        partial = job.part([*full, *now], memory=memory)
        kernels.append(row_kernel(partial, _restricted(a, partial.group), shape, segments))
        left = [o for o in left if o not in full]
        rows = [o for o in left if not _is_full(o, a) and a.level[o] <= level and o not in now]
        kept = [
            n for n in now if n in left or n in _under([o for o in left if o not in rows], memory)
        ]
        held = {n: part.held_by(n) if n in left else _kept(n) for n in kept}
        kernels += _combine(part, shape, segments, [*kept, *rows], held)
        memory |= held
        left = [o for o in left if o not in rows and o not in kept]
    return kernels + (lower_elementwise(job.part(left, memory=memory)) if left else [])


def _is_full(node: Node, a: Analysis) -> bool:
    space = a.space[node]
    return space.kind == "full" or (space.kind == "pure" and node.type.size == a.size)


def _restricted(a: Analysis, group: Group) -> Analysis:
    return Analysis(group, a.body, a.kind, a.anchor, a.pattern, (), a.space, a.level)


def _segments(node: Node, g: Geometry, k: int) -> Scratch:
    shape = (g.rows, g.segments) if g.along else (g.segments, g.rows)
    return Scratch(f"{node.op.name}_segments", shape, node.dtype.name)


def _combine(
    job: Job,
    g: Geometry,
    segments: Mapping[Node, Scratch],
    outputs: Sequence[Node],
    held: Mapping[Node, Stored],
) -> list[KernelSource]:
    """The kernel that combines segments and computes what follows for each row."""
    memory, new = dict(job.memory), dict[Node, Node]()
    for k, (node, scratch) in enumerate(segments.items()):
        given = partial_input(scratch, k)
        memory[given] = scratch
        assert isinstance(node.op, Reduce)
        new[node] = summed(scratch, given, node.op.combine, 1 if g.along else 0, node)
    part = replaced(job, outputs, new, memory, held)
    analysis = analyze(part.group)
    if analysis.kind == "map":
        return lower_elementwise(part)
    return [row_kernel(part, analysis, geometry(analysis.pattern, job.target))]
