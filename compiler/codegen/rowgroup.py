"""One kernel for products of the same few rows, with the statistics of the rows that they need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...templates import rolled
from ..index import Index, flatten, index, unflatten, variable
from ..ir import Kind, Node
from ..ops.reduce import COMBINES, Reduce
from ..schedule.kernel import KernelSource, Scratch
from ..schedule.space import Analysis
from ..schedule.tile import Tile, candidates
from ..schedule.tile_rows import PACKED, ROWS
from .contract import Operand, stores_fours, vector_axis, words_each, write_tile
from .emitter import Emitter
from .rowproduct import RUNS, RowProduct, Section, Side
from .source import Job
from .statements import V, Value
from .wgsl import literal, wgsl_type


def row_group(job: Job, a: Analysis) -> KernelSource:
    """The kernel of a group of products of the same rows."""
    rows = a.anchors[0].operands[0]
    sections = [
        _section(job, [n for n in a.anchors if n.shape[-1] == columns])
        for columns in dict.fromkeys(n.shape[-1] for n in a.anchors)
    ]
    narrow, (*_, m, k) = Side(rows, turned=False), rows.shape
    lanes, along = job.target.subgroup, job.target.kind == "gpu"
    run = _run(job, (dot.operands[1] for dot in a.anchors))
    product = RowProduct(job, lanes, 1, m, k, narrow, tuple(sections), along=along, run=run)
    return _build(job, a, product, None)


def row_product(
    job: Job, a: Analysis, tile: Tile, a_side: Node, b_side: Node, partial: Scratch | None
) -> KernelSource:
    """The kernel of one product with few rows or, with `swap`, few columns."""
    *lead, m, k = a_side.shape
    n, batch = b_side.shape[-1], 1
    for extent in lead:
        batch *= extent
    narrow, wide = Side(a_side, turned=False), Side(b_side, turned=True)
    few, many = m, n
    if tile.swap:
        narrow, wide, few, many = Side(b_side, turned=True), Side(a_side, turned=False), n, m
    assert a.anchor is not None
    each, fours = int(tile.values["R"]), bool(tile.values["fours"])  # type: ignore[arg-type]
    section = Section((a.anchor,), (wide,), many, each, fours)
    lanes, along, sections = job.target.subgroup, job.target.kind == "gpu", (section,)
    run = _run(job, (wide.node,))
    product = RowProduct(job, lanes, batch, few, k, narrow, sections, tile.splits, along, run)
    return _build(job, a, product, partial, tile.swap)


def _run(job: Job, wide: Iterable[Node]) -> int:
    """Steps over which scales of packed operands may be constant; 0 without such operands."""
    return RUNS[0] if any(words_each(job, node) < PACKED for node in wide) else 0


def _section(job: Job, dots: Sequence[Node]) -> Section:
    """Products with equally many columns; a lane has fewer of each the more they are."""
    first = dots[0]
    *_, m, k = first.operands[0].shape
    n = first.shape[-1]
    found = [_axis(job, dot) for dot in dots]
    axis = found[0] if len(set(found)) == 1 else "none"
    words = (1.0, max(words_each(job, dot.operands[1]) for dot in dots))
    tiles = candidates(job.target, 1, m, n, k, "k", axis, 200, words)
    fits = [t for t in tiles if t.template == ROWS and t.splits == 1 and not t.swap]
    each, fours = int(fits[0].values["R"]), bool(fits[0].values["fours"])  # type: ignore[arg-type]
    least = 4 if fours else 1
    wide = tuple(Side(dot.operands[1], turned=True) for dot in dots)
    return Section(tuple(dots), wide, n, max(least, each // len(dots)), fours)


def _axis(job: Job, dot: Node) -> str:
    b = dot.operands[1]
    return vector_axis(job, Operand(b, ("batch", "k", "n"), (1, *b.shape[-2:])), "kn")


def _build(
    job: Job, a: Analysis, p: RowProduct, partial: Scratch | None, swap: bool = False
) -> KernelSource:
    outputs = job.group.outputs
    em = Emitter([partial] if partial else [job.held_by(o) for o in outputs], dict(job.memory))
    homes = [_home(p, a, o) for o in outputs]
    for access, out, section in zip(em.accesses, outputs, homes, strict=False):
        extents = (p.batch, p.rows, section.columns)
        straight = partial is not None or stores_fours(a.space[out], out, ("b", "m", "n"), extents)
        access.vector = section.fours and not swap and straight

    def write(em: Emitter, s: Section, at: Sequence[Index], values: Sequence[Value]) -> None:
        batch, split, row, column = at
        m, n, last = (column, row, p.rows) if swap else (row, column, s.columns)
        rows = s.columns if swap else p.rows
        flat = flatten((split, batch, m, n), (p.splits, p.batch, rows, last))
        em.bound |= dict(zip(s.dots, values, strict=True))
        if partial is not None:
            em.store(0, flat, values[0], s.dots[0].dtype)
            return
        mine = [(k, o) for k, o in enumerate(outputs) if homes[k] is s]
        write_tile(em, a, mine, flat)
        em.place = lambda node: None

    statistics = _Statistics(p, a)
    return p.build(em, write, statistics)


def _home(p: RowProduct, a: Analysis, output: Node) -> Section:
    """The section that stores an output."""
    space = a.space[output]
    fits = [s for s in p.sections if space.kind == "tile" and s.dots[0].shape[-1] == space.item]
    return fits[0] if fits else p.sections[0]


class _Statistics:
    """Reductions of rows, which every workgroup computes: lanes have neighbouring elements."""

    def __init__(self, p: RowProduct, a: Analysis) -> None:
        self.p, self.a = p, a
        self.reductions = [n for n in a.body if n.kind is Kind.REDUCE]
        self.known: list[dict[Node, Value]] = []  # by group of rows

    def emit(self, em: Emitter) -> None:
        """Compute what each row's elements combine to, level by level."""
        for group in range(self.p.groups):
            self.known.append({})
            self.bind(em, group)
            for node in sorted(self.reductions, key=self.a.level.__getitem__):
                em.bound[node] = self.known[group][node] = self._combined(em, node, group)

    def bind(self, em: Emitter, group: int) -> None:
        """Make values of rows those of a group's rows."""
        if self.reductions:
            em.bound.update(self.known[group])

    def _combined(self, em: Emitter, node: Node, group: int) -> Value:
        assert isinstance(node.op, Reduce)
        combine, dtype, p = COMBINES[node.op.combine], node.dtype, self.p
        number = literal(combine.identity[dtype.kind], dtype)
        total, quads = em.fresh("total"), p.k // 4

        def joined(x: str, y: str, wide: bool) -> str:
            four = "4" if wide else ""
            kind = wgsl_type(dtype, wide)
            return combine.wgsl.format(x, y, T=kind, v=four, s=f"{dtype.kind}{four}")

        em.line(f"var {total} = {wgsl_type(dtype, True)}({number});")
        first = em.index(variable("lane", p.lanes) // p.abreast).text
        step = p.lanes // p.abreast
        with em.block(f"for (var quad = {first}; quad < {rolled(quads)}; quad += {step}u)"):
            k = em.variable("quad", quads) * 4 + V
            row = index(group) if p.along else p.row(group)
            at = unflatten(flatten((row, k), (p.rows, p.k)), node.operands[0].shape)
            value = em.splat(em.value(node.operands[0], at), dtype, True)
            em.line(f"{total} = {joined(total, value, True)};")
        pairs = [joined(f"{total}.{x}", f"{total}.{y}", False) for x, y in ("xy", "zw")]
        names = [em.let(text, "pair", text, em.depth, False).text for text in pairs]
        text = joined(names[0], names[1], False)
        name = em.let(text, "pair", text, em.depth, False).text
        distance = p.lanes // 2
        while distance >= p.abreast:
            other = f"subgroupShuffleXor({name}, {distance}u)"
            other = em.let(other, "other", other, em.depth, False).text
            text = joined(name, other, False)
            name = em.let(text, "all", text, em.depth, False).text
            distance //= 2
        return Value(name, depth=em.depth)
