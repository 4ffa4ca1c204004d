"""Scattering: an invocation a result, which goes through all positions or, when there are many,
through a list of its own. The lists' links are found by a search for the next equal position, so
sums have a fixed order, and of several values for one place the last one stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..index import Index, unflatten
from ..ir import Node
from ..ops import full
from ..ops.elementwise import barrier
from ..ops.move import slice_
from ..ops.scatter import scatter_add, scatter_set
from ..schedule.kernel import KernelSource, Scratch, Stored
from ..schedule.space import Analysis, analyze, turned
from ..schedule.tile import fold
from ..types import u32
from .contract import tile_place
from .elementwise import lower_elementwise
from .emitter import Emitter
from .rewrite import partial_input, replaced
from .rowwise import lower_job
from .source import Job, finish
from .statements import V, Value
from .wgsl import literal, wgsl_type

WORKGROUP = 64
_DIRECT = 1 << 18  # comparisons that cost less than two kernels more
_CHUNK = 32768  # positions of one list, where loops are bounded


def lower_scatter(job: Job, analysis: Analysis) -> list[KernelSource]:
    """The kernels of a group around one scatter."""
    node = analysis.anchor
    assert node is not None
    count = node.operands[-1].type.size
    if node.type.size == 0:
        return []
    if count == 0:
        before = barrier(node.operands[0]) if _replaces(node) else full(0, node.shape, node.dtype)
        return lower_job(replaced(job, job.group.outputs, {node: before}, job.memory))
    if job.target.loop_limit and count > _CHUNK:
        return _chunks(job, node)
    if count * node.type.size <= _DIRECT:
        return [_results(job, analysis, node, None)]
    return _lists(job, analysis, node)


def _replaces(node: Node) -> bool:
    """Whether updates take the place of what is there; else they are added to zeros."""
    return node.op.replaces  # type: ignore[attr-defined]


def _chunks(job: Job, node: Node) -> list[KernelSource]:
    """Positions in chunks, one after the other, each on top of what the earlier ones gave."""
    count = node.operands[-1].type.size
    kernels: list[KernelSource] = []
    memory: dict[Node, Stored] = dict(job.memory)
    given: Node | None = None
    for c, first in enumerate(range(0, count, _CHUNK)):
        last = min(count, first + _CHUNK)
        part = _chunk(node, first, last, given)
        if last == count:
            done = replaced(job, job.group.outputs, {node: part}, memory)
        else:
            held = Scratch(f"chunk{c}", node.shape, node.dtype.name)
            done = job.part([part], memory=memory, stores={part: held})
            given = partial_input(held, c)
            memory = {**job.memory, given: held}
        kernels += lower_scatter(done, analyze(done.group))
    return kernels


def _chunk(node: Node, first: int, last: int, given: Node | None) -> Node:
    """The scatter of positions first to last onto what is given, or onto what it begins with."""
    updates, positions = node.operands[-2:]
    zeros = (0,) * (len(updates.shape) - 1)
    some = slice_(updates, (first, *zeros), (last, *updates.shape[1:]))
    places = slice_(positions, (first,), (last,))
    if _replaces(node):
        return scatter_set(node.operands[0] if given is None else given, some, places)
    added = scatter_add(some, places, node.shape[0])
    return added if given is None else given + added


def _lists(job: Job, analysis: Analysis, node: Node) -> list[KernelSource]:
    """Three kernels: empty lists, their links, the results along them."""
    positions = node.operands[-1]
    count, rows = positions.type.size, node.shape[0]
    heads, links = Scratch("heads", (rows,), "u32"), Scratch("links", (count,), "u32")
    empty = full(count, (rows,), u32)
    first = lower_elementwise(job.part([empty], stores={empty: heads}))
    second = _link(job, positions, rows, heads, links)
    lists = {partial_input(heads, 0): heads, partial_input(links, 1): links}
    return [*first, second, _results(job, analysis, node, lists)]


def _link(job: Job, positions: Node, rows: int, heads: Scratch, links: Scratch) -> KernelSource:
    """links[i] is the next place after i with the same position, heads[r] the first with position
    r."""
    count = positions.type.size
    em = Emitter([heads, links], dict(job.memory))
    em.accesses[0].atomic = True
    i = em.variable("worker", count) if count > 1 else Index()
    own = em.index(em.position(positions, (i,), rows)).text
    here = em.index(i).text
    em.line(f"var next = {count}u;")
    wide = count % 4 == 0
    steps = count // 4 if wide else count
    start = f"{here} / 4u" if wide else f"{here} + 1u"
    with em.block(f"for (var j = {start}; j < {steps}u; j++)"):
        j = em.variable("j", steps)
        other = j * 4 + V if wide else j
        place = em.index(other)
        position = em.index(em.position(positions, (other,), rows))
        if wide:
            near = em.splat(position, u32, vector=True)
            em.line(f"let later = vec4<u32>({here}) < {place.text};")
            em.line(f"let same = later & (vec4<u32>({own}) == {near});")
            em.line(f"let hits = select(vec4<u32>({count}u), {place.text}, same);")
            em.line("next = min(min(hits.x, hits.y), min(hits.z, hits.w));")
        else:
            em.line(f"next = select({count}u, {place.text}, {position.text} == {own});")
        with em.block(f"if (next < {count}u)"):
            em.line("break;")
    em.store(1, i, Value("next"), u32)
    em.line(f"atomicMin(&$0[{own}], {here});")
    kernel = _finish(job, em, count, flops=count * count // 2)
    return replace(kernel, computes="$0 = first update of each row; $1 = next of the same row")


def _results(
    job: Job, analysis: Analysis, node: Node, lists: Mapping[Node, Stored] | None
) -> KernelSource:
    """What each place gets of the updates, and what follows it."""
    outputs = job.group.outputs
    rows, size = node.shape[0], node.type.size
    wide = size // rows % 4 == 0
    em = Emitter([job.held_by(o) for o in outputs], {**job.memory, **(lists or {})})
    workers = size // 4 if wide else size
    worker = em.variable("worker", workers)
    flat = worker * 4 + V if wide else worker
    at = unflatten(flat, node.shape)
    if _replaces(node):
        _replace(em, node, at, lists, wide)
    else:
        _add(em, node, at, lists, wide)
    em.bound[node] = Value("total", wide)
    em.place = lambda n: tile_place(analysis.space.get(n), n, flat)
    values = [em.value(o, unflatten(turned(analysis.space[o], flat), o.shape)) for o in outputs]
    for k, (out, value) in enumerate(zip(outputs, values, strict=True)):
        to = turned(analysis.space[out], flat)
        em.accesses[k].vector = wide and analysis.space[out].turned == ((), ())
        em.store(k, to, value, out.dtype)
    return _finish(job, em, workers)


def _add(
    em: Emitter, node: Node, at: tuple[Index, ...], lists: Mapping[Node, Stored] | None, wide: bool
) -> None:
    """`total`, the sum of the updates of a place."""
    em.line(f"var total = {wgsl_type(node.dtype, wide)}({literal(0, node.dtype)});")

    def add(i: Index) -> None:
        value = em.value(node.operands[0], (i, *at[1:]))
        em.line(f"total = total + {em.splat(value, node.dtype, wide)};")

    _visit(em, node, at[0], lists, add)


def _replace(
    em: Emitter, node: Node, at: tuple[Index, ...], lists: Mapping[Node, Stored] | None, wide: bool
) -> None:
    """`total`, the last update of a place, or what was there."""
    before, updates, positions = node.operands
    count = positions.type.size
    em.line(f"var last = {count}u;")
    _visit(em, node, at[0], lists, lambda i: em.line(f"last = {em.index(i).text};"))
    em.line(f"let near = min(last, {count - 1}u);")
    new = em.splat(em.value(updates, (em.variable("near", count), *at[1:])), node.dtype, wide)
    old = em.splat(em.value(before, at), node.dtype, wide)
    em.line(f"let total = select({old}, {new}, last < {count}u);")


def _visit(
    em: Emitter,
    node: Node,
    row: Index,
    lists: Mapping[Node, Stored] | None,
    each: Callable[[Index], None],
) -> None:
    """`each` for the updates of a row, in their order."""
    positions, count = node.operands[-1], node.operands[-1].type.size
    row_text = em.index(row).text
    if lists is None:
        with em.block(f"for (var i = 0u; i < {count}u; i++)"):
            i = em.variable("i", count)
            position = em.index(em.position(positions, (i,), node.shape[0])).text
            with em.block(f"if ({position} == {row_text})"):
                each(i)
        return
    heads, links = lists
    em.line(f"var i = {em.load(heads, row).text};")
    with em.block(f"while (i < {count}u)"):
        i = em.variable("at", count, "i")
        each(i)
        em.line(f"i = {em.load(links, i).text};")


def _finish(job: Job, em: Emitter, workers: int, flops: int | None = None) -> KernelSource:
    grid = fold(-(-workers // WORKGROUP), job.target.max_groups)
    values = {
        "body": em.text,
        "count": workers,
        "workgroup": WORKGROUP,
        "width": grid[0] * WORKGROUP,
    }
    return finish(job, em, "scatter.wgsl.j2", values, grid, (WORKGROUP, 1, 1), flops=flops)
