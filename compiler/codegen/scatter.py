"""Scatter-add: an invocation a result, which goes through all positions or, when there are many,
through a list of its own. The lists' links are found by a search for the next equal position, so
sums have a fixed order."""

from __future__ import annotations

from collections.abc import Mapping

from ..index import Index, unflatten
from ..ir import Node
from ..ops import full
from ..ops.move import slice_
from ..ops.scatter import scatter_add
from ..schedule.kernel import KernelSource, Scratch, Stored
from ..schedule.space import Analysis, analyze
from ..schedule.tile import fold
from ..types import u32
from .contract import tile_place, turned
from .elementwise import lower_elementwise
from .emitter import Emitter, V, Value
from .rewrite import partial_input, replaced
from .rowwise import lower_job
from .source import Job, finish
from .wgsl import literal, wgsl_type

WORKGROUP = 64
_DIRECT = 1 << 18  # comparisons that cost less than two kernels more
_CHUNK = 32768  # positions of one list, where loops are bounded


def lower_scatter(job: Job, analysis: Analysis) -> list[KernelSource]:
    """The kernels of a group around one scatter-add."""
    node = analysis.anchor
    assert node is not None
    count = node.operands[1].type.size
    if node.type.size == 0:
        return []
    if count == 0:
        zeros = full(0, node.shape, node.dtype)
        return lower_job(replaced(job, job.group.outputs, {node: zeros}, job.memory))
    if job.target.loop_limit and count > _CHUNK:
        return _chunks(job, node)
    if count * node.type.size <= _DIRECT:
        return [_sums(job, analysis, node, None)]
    return _lists(job, analysis, node)


def _chunks(job: Job, node: Node) -> list[KernelSource]:
    """Positions in chunks, each into a result of its own, and their sum."""
    updates, positions = node.operands
    count = positions.type.size
    chunks = -(-count // _CHUNK)
    kernels: list[KernelSource] = []
    parts: list[Node] = []
    memory: dict[Node, Stored] = dict(job.memory)
    for c in range(chunks):
        first, last = c * _CHUNK, min(count, (c + 1) * _CHUNK)
        zeros = (0,) * (len(updates.shape) - 1)
        some = slice_(updates, (first, *zeros), (last, *updates.shape[1:]))
        part = scatter_add(some, slice_(positions, (first,), (last,)), node.shape[0])
        held = Scratch(f"chunk{c}", node.shape, node.dtype.name)
        piece = job.part([part], stores={part: held})
        kernels += lower_scatter(piece, analyze(piece.group))
        parts.append(partial_input(held, c))
        memory[parts[-1]] = held
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return kernels + lower_job(replaced(job, job.group.outputs, {node: total}, memory))


def _lists(job: Job, analysis: Analysis, node: Node) -> list[KernelSource]:
    """Three kernels: empty lists, their links, the sums along them."""
    positions = node.operands[1]
    count, rows = positions.type.size, node.shape[0]
    heads, links = Scratch("heads", (rows,), "u32"), Scratch("links", (count,), "u32")
    empty = full(count, (rows,), u32)
    first = lower_elementwise(job.part([empty], stores={empty: heads}))
    second = _link(job, positions, rows, heads, links)
    lists = {partial_input(heads, 0): heads, partial_input(links, 1): links}
    return [*first, second, _sums(job, analysis, node, lists)]


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
    return _finish(job, em, count, flops=count * count // 2)


def _sums(
    job: Job, analysis: Analysis, node: Node, lists: Mapping[Node, Stored] | None
) -> KernelSource:
    """The sum of each result's updates and what follows it."""
    updates, positions = node.operands
    outputs = job.group.outputs
    count, rows = positions.type.size, node.shape[0]
    size = node.type.size
    wide = size // rows % 4 == 0
    em = Emitter([job.held_by(o) for o in outputs], {**job.memory, **(lists or {})})
    workers = size // 4 if wide else size
    worker = em.variable("worker", workers)
    flat = worker * 4 + V if wide else worker
    row, *rest = unflatten(flat, node.shape)
    row_text = em.index(row).text
    kind = wgsl_type(node.dtype, wide)
    em.line(f"var total = {kind}({literal(0, node.dtype)});")

    def add(place: Index) -> None:
        value = em.value(updates, (place, *rest))
        em.line(f"total = total + {em.splat(value, node.dtype, wide)};")

    if lists is None:
        with em.block(f"for (var i = 0u; i < {count}u; i++)"):
            i = em.variable("i", count)
            position = em.index(em.position(positions, (i,), rows)).text
            with em.block(f"if ({position} == {row_text})"):
                add(i)
    else:
        heads, links = lists
        em.line(f"var i = {em.load(heads, row).text};")
        with em.block(f"while (i < {count}u)"):
            i = em.variable("at", count, "i")
            add(i)
            em.line(f"i = {em.load(links, i).text};")
    em.bound[node] = Value("total", wide)
    em.place = lambda n: tile_place(analysis.space.get(n), n, flat)
    values = [em.value(o, unflatten(turned(analysis.space[o], flat), o.shape)) for o in outputs]
    for k, (out, value) in enumerate(zip(outputs, values, strict=True)):
        to = turned(analysis.space[out], flat)
        em.accesses[k].vector = wide and analysis.space[out].turned == ((), ())
        em.store(k, to, value, out.dtype)
    return _finish(job, em, workers)


def _finish(job: Job, em: Emitter, workers: int, flops: int | None = None) -> KernelSource:
    grid = fold(-(-workers // WORKGROUP), job.target.max_groups)
    values = {
        "body": em.text,
        "count": workers,
        "workgroup": WORKGROUP,
        "width": grid[0] * WORKGROUP,
    }
    return finish(job, em, "scatter.wgsl.j2", values, grid, (WORKGROUP, 1, 1), flops=flops)
