"""Products with few rows on llvmpipe: lanes hold columns, and hand the rows' elements round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from ..index import Index, index, unflatten, variable
from ..ir import Node
from ..schedule.kernel import KernelSource
from ..schedule.tile import Tile
from .emitter import Emitter, V, Value
from .factors import Term, terms
from .source import Job, finish

RUNS = (32, 16, 8)  # steps over which scales may be constant
_XYZW = "xyzw"


RowStore = Callable[[Emitter, Sequence[Index], Value], None]
"""Stores a value at (batch, split, row, column)."""


@dataclass(frozen=True, slots=True)
class Side:
    """An operand: its node, and where its element of (batch, row or column, k) lies."""

    node: Node
    turned: bool  # (batch, k, column) rather than (batch, row, k)

    def at(self, batch: tuple[Index, ...], own: Index, k: Index) -> tuple[Index, ...]:
        return (*batch, k, own) if self.turned else (*batch, own, k)


@dataclass(frozen=True, slots=True)
class Shape:
    """Extents of batch, rows (few), columns and k."""

    batch: int
    rows: int
    columns: int
    k: int


class RowProduct:
    """Builds one kernel; `write` stores what follows a result (see `_Product`)."""

    def __init__(self, job: Job, tile: Tile, shape: Shape, narrow: Side, wide: Side) -> None:
        self.job, self.tile, self.shape = job, tile, shape
        self.narrow, self.wide = narrow, wide
        values = tile.values
        self.lanes, self.each = int(values["L"]), int(values["R"])  # type: ignore[arg-type]
        self.fours = bool(values["fours"])  # columns are neighbours in fours
        self.block = 4 * self.lanes

    def build(self, em: Emitter, write: RowStore) -> KernelSource:
        """The kernel, with statements in `em`."""
        em.sharing = em.fours = True
        em.variables["lane"] = Value("lane")
        lane, s = variable("lane", self.lanes), self.shape
        span = self.lanes * self.each
        tiles = -(-s.columns // span)
        unit = em.variable("unit", tiles, f"tile % {tiles}u" if tiles > 1 else None)
        batch = em.variable("batch", s.batch, f"tile / {tiles}u % {s.batch}u")
        split = em.variable("split", self.tile.splits, f"tile / {tiles * s.batch}u")
        columns = self._columns(em, unit, lane, span)
        totals = [[self._total(em, r, c) for c in range(len(columns))] for r in range(s.rows)]
        self._loop(em, batch, split, lane, columns, totals)
        em.sharing = em.fours = False
        for r in range(s.rows):
            for c, column in enumerate(columns):
                with self._inside(em, column):
                    at = (batch, split, index(r), column)
                    write(em, at, Value(totals[r][c], self.fours))
        count = tiles * s.batch * self.tile.splits
        filled = {
            "body": em.text, "L": self.lanes, "tiles": count, "width": self.tile.grid[0],
        }  # fmt: skip
        workgroup = self.tile.workgroup
        return finish(
            self.job, em, self.tile.template, filled, self.tile.grid, workgroup,
            features=("subgroup",),
        )  # fmt: skip

    def _columns(self, em: Emitter, unit: Index, lane: Index, span: int) -> list[Index]:
        """The columns of an invocation; those beyond the last are the last again."""
        width = 4 if self.fours else 1
        extent = self.shape.columns // width
        out: list[Index] = []
        for c in range(self.each // width):
            at = unit * (span // width) + (c * self.lanes + lane)
            if at.hi >= extent:
                at = em.variable(f"column{c}", extent, f"min({em.index(at).text}, {extent - 1}u)")
            out.append(at * 4 + V if self.fours else at)
        return out

    def _inside(self, em: Emitter, column: Index):  # noqa: ANN202
        """A block for columns that are not beyond the last."""
        span = self.lanes * self.each
        if self.shape.columns % span == 0:
            return nullcontext()
        width = 4 if self.fours else 1
        c = self._number(column)
        lane = f"lane + {c * self.lanes}u" if c else "lane"
        unit = f"unit * {span // width}u + " if -(-self.shape.columns // span) > 1 else ""
        return em.block(f"if ({unit}{lane} < {self.shape.columns // width}u)")

    def _number(self, column: Index) -> int:
        """The number of a column that may be beyond the last, else of one that is not."""
        names = [v for v in column.variables if v.startswith("column")]
        if names:
            return int(names[0].removeprefix("column"))
        return (column.constant // (4 if self.fours else 1)) // self.lanes

    def _total(self, em: Emitter, row: int, column: int) -> str:
        kind = "vec4<f32>" if self.fours else "f32"
        em.line(f"var total{row}_{column} = {kind}(0.0);")
        return f"total{row}_{column}"

    def _loop(
        self, em: Emitter, batch: Index, split: Index, lane: Index,
        columns: Sequence[Index], totals: Sequence[Sequence[str]],
    ) -> None:  # fmt: skip
        blocks, splits = self.shape.k // self.block, self.tile.splits
        share = -(-blocks // splits)
        whole = _Block(self, batch, lane, columns, totals)
        if blocks:
            begin = f"{em.index(split * share).text}" if splits > 1 else "0u"
            end = f"min({begin} + {share}u, {blocks}u)" if splits > 1 else f"{blocks}u"
            with em.block(f"for (var kb = {begin}; kb < {end}; kb++)"):
                whole.emit(em, em.variable("kb", blocks) * self.block, self.block)
        rest = self.shape.k % self.block
        if rest:
            last = em.block(f"if (split == {splits - 1}u)") if splits > 1 else em.block("")
            with last:
                whole.emit(em, index(blocks * self.block), rest)


@dataclass(frozen=True, slots=True)
class _Block:
    """What is added up over a block of k."""

    product: RowProduct
    batch: Index
    lane: Index
    columns: Sequence[Index]
    totals: Sequence[Sequence[str]]

    def emit(self, em: Emitter, k0: Index, steps: int) -> None:
        """The statements for `steps` steps from k0 on."""
        p, lane = self.product, self.lane
        if steps < p.block:
            lane = em.variable("lane_in", steps // 4, f"min(lane, {steps // 4 - 1}u)")
        given = [self._handed(em, r, k0 + lane * 4 + V, steps) for r in range(p.shape.rows)]
        done = 0
        while done < steps:
            run = min(self._run(em, k0), steps - done)
            self._add(em, given, k0, done, run)
            done += run

    def _handed(self, em: Emitter, row: int, k: Index, steps: int) -> list[str]:
        """The row's element at each step, in all lanes; a lane loads those at k."""
        p = self.product
        leading = unflatten(self.batch, p.narrow.node.shape[:-2])
        at = p.narrow.at(leading, index(row), k)
        mine = em.splat(em.value(p.narrow.node, at), p.narrow.node.dtype, vector=True)
        name = em.fresh("mine")
        em.line(f"let {name} = {mine};")
        names = [em.fresh("x") for _ in range(steps)]
        for j, x in enumerate(names):
            em.line(f"let {x} = subgroupShuffle({name}.{_XYZW[j % 4]}, {j // 4}u);")
        return names

    def _places(self, k0: Index, column: Index, first: int, count: int) -> list[tuple[Index, ...]]:
        wide = self.product.wide
        leading = unflatten(self.batch, wide.node.shape[:-2])
        return [wide.at(leading, column, k0 + (first + j)) for j in range(count)]

    def _run(self, em: Emitter, k0: Index) -> int:
        """The longest run of steps with something constant over it."""
        p = self.product
        for run in RUNS:
            if run <= p.block and k0.divisible(run):
                found = terms(em, p.wide.node, self._places(k0, self.columns[0], 0, run))
                if any(t.factors or t.varying is None for t in found):
                    return run
        return RUNS[0]

    def _add(
        self, em: Emitter, given: Sequence[Sequence[str]], k0: Index, first: int, count: int
    ) -> None:
        """Add a run of steps to the totals."""
        node = self.product.wide.node
        split = [terms(em, node, self._places(k0, c, first, count)) for c in self.columns]
        for r, x in enumerate(given):
            here = x[first : first + count]
            sums: dict[int, str] = {}
            parts: dict[tuple[int, int], str] = {}
            for c, found in enumerate(split):
                for t, term in enumerate(found):
                    if term.varying is not None and term.factors:
                        parts[c, t] = em.fresh("part")
                        em.line(f"var {parts[c, t]} = {self._zero()};")
            for j in range(count):
                for c, found in enumerate(split):
                    for t, term in enumerate(found):
                        if term.varying is None:
                            continue
                        to = parts.get((c, t), self.totals[r][c])
                        sign = "-" if term.negative and (c, t) not in parts else "+"
                        em.line(f"{to} {sign}= {self._wide(em, term.varying[j])} * {here[j]};")
            for c, found in enumerate(split):
                for t, term in enumerate(found):
                    if term.varying is not None and not term.factors:
                        continue
                    if term.varying is None and r not in sums:
                        sums[r] = em.fresh("sum")
                        em.line(f"let {sums[r]} = {_tree(here)};")
                    text = self._factored(em, term, parts.get((c, t)) or sums[r])
                    em.line(f"{self.totals[r][c]} {'-' if term.negative else '+'}= {text};")

    def _zero(self) -> str:
        return "vec4<f32>(0.0)" if self.product.fours else "0.0"

    def _wide(self, em: Emitter, value: Value) -> str:
        return em.splat(value, self.product.wide.node.dtype, self.product.fours)

    def _factored(self, em: Emitter, term: Term, what: str) -> str:
        return " * ".join([*(f.text for f in term.factors), what])


def _tree(names: Sequence[str]) -> str:
    """The sum of names, in pairs."""
    if len(names) == 1:
        return names[0]
    half = len(names) // 2
    return f"({_tree(names[:half])} + {_tree(names[half:])})"
