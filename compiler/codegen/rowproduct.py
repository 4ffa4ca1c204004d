"""Products with few rows, by subgroups.

On llvmpipe lanes hold columns, and the rows' elements besides, which they hand round. On GPUs they
go along k, so that neighbours read neighbours, and add up at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Protocol

from ...templates import rolled
from ..index import Index, index, unflatten, variable
from ..ir import Kind, Node
from ..schedule.kernel import KernelSource
from ..schedule.tile import fold
from ..schedule.tile_rows import ROWS
from .emitter import Access, Emitter
from .expression import quad_access
from .factors import Term, terms
from .source import Job, finish
from .statements import V, Value
from .wgsl import length

RUNS = (32, 16, 8)  # steps over which scales may be constant
_XYZW = "xyzw"
_LINE = 16  # words of a line of a CPU's cache
_LEAST = 16  # steps of a block: with more of them the driver takes long for their loads
_MOST_LINES = 100  # of all that follows sums and is written out, before it stands in a loop


class Statistics(Protocol):
    """What rows combine to, and which each workgroup computes."""

    def emit(self, em: Emitter) -> None:
        """Compute it for all groups of rows."""
        ...

    def bind(self, em: Emitter, group: int) -> None:
        """Make values of rows those of a group's rows."""
        ...


RowStore = Callable[[Emitter, "Section", Sequence[Index], Sequence[Value]], None]
"""Stores the values of a section's products at (batch, split, row, column)."""


Totals = Sequence[Sequence[Sequence[str]]]
"""Names of sums by product, row and column."""


@dataclass(frozen=True, slots=True)
class Side:
    """An operand: its node, and where its element of (batch, row or column, k) lies."""

    node: Node
    turned: bool  # (batch, k, column) rather than (batch, row, k)

    def at(self, batch: Index, own: Index, k: Index) -> tuple[Index, ...]:
        """The place of an element."""
        leading = unflatten(batch, self.node.shape[:-2])
        return (*leading, k, own) if self.turned else (*leading, own, k)


@dataclass(frozen=True, slots=True)
class Section:
    """Products with equally many columns, of which a lane has `each` in every one."""

    dots: tuple[Node, ...]
    wide: tuple[Side, ...]
    columns: int
    each: int
    fours: bool  # columns are neighbours in fours

    @property
    def width(self) -> int:
        return 4 if self.fours else 1


@dataclass(frozen=True, slots=True)
class RowProduct:
    """Builds one kernel for products of the same rows, section after section."""

    job: Job
    lanes: int
    batch: int
    rows: int
    k: int
    narrow: Side
    sections: tuple[Section, ...]
    splits: int = 1
    along: bool = False  # lanes go along k, and add up what each has of every column
    run: int = 0  # steps that a block should have, as scales are constant over so many

    @property
    def abreast(self) -> int:
        """Rows of a group, whose elements of the same steps different lanes hold: a power of 2."""
        if self.along:
            return 1
        least = max(1, 4 * self.lanes // (2 * self.run or _LEAST))
        return min(self.lanes, max(least, 1 << (self.rows - 1).bit_length()))

    @property
    def groups(self) -> int:
        """Groups of rows."""
        return -(-self.rows // self.abreast)

    @property
    def reach(self) -> int:
        """Steps of k of which the lanes hold a group's elements at a time."""
        return 4 * self.lanes // self.abreast

    @property
    def block(self) -> int:
        """Steps of k whose sums stand in the text, or that a lane takes at a time."""
        if self.along:
            return 8 if self.k % 8 == 0 else 4
        return max(self.reach, self.run)

    def row(self, group: int) -> Index:
        """The row of a group whose elements a lane has."""
        first, lane = group * self.abreast, variable("lane", self.lanes)
        if self.rows == 1:
            return index(0)
        if first + self.abreast <= self.rows:
            return first + lane % self.abreast
        return variable(f"row{group}", self.rows)

    def span(self, s: Section) -> int:
        """Columns of a workgroup."""
        return s.each if self.along else s.each * self.lanes

    def tiles(self, s: Section) -> int:
        """Workgroups for all columns."""
        return -(-s.columns // self.span(s))

    def build(self, em: Emitter, write: RowStore, statistics: Statistics) -> KernelSource:
        """The kernel, with statements in `em`."""
        em.sharing = em.fours = True
        em.variables["lane"] = Value("lane")
        last = self.groups - 1
        if not self.along and self.rows > 1 and self.rows % self.abreast:
            first = last * self.abreast
            text = f"min({first}u + lane % {self.abreast}u, {self.rows - 1}u)"
            em.variable(f"row{last}", self.rows, text)
        statistics.emit(em)
        first = 0
        for section in self.sections:
            count = self.tiles(section) * self.batch * self.splits
            inside = f"tile >= {first}u && tile < {first + count}u"
            whole = len(self.sections) == 1
            with nullcontext() if whole else em.block(f"if ({inside})"):
                self._section(em, section, first, write, statistics)
            first += count
        for access in em.accesses[em.outputs :]:
            node = access.stored  # words of packed numbers: weights, which calls share
            packed = access.dtype == "u32" and self.run > 0 and not self.along
            access.kept = packed and isinstance(node, Node) and node.kind is Kind.INPUT
        grid = fold(first, self.job.target.max_groups)
        filled = {"body": em.text, "L": self.lanes, "tiles": first, "width": grid[0]}
        workgroup, features = (self.lanes, 1, 1), ("subgroup",)
        return finish(self.job, em, ROWS, filled, grid, workgroup, features=features)

    def _section(
        self, em: Emitter, s: Section, first: int, write: RowStore, statistics: Statistics
    ) -> None:
        tiles = self.tiles(s)
        own = f"(tile - {first}u)" if first else "tile"
        unit = em.variable("unit", tiles, f"{own} % {tiles}u")
        batch = em.variable("batch", self.batch, f"{own} / {tiles}u % {self.batch}u")
        split = em.variable("split", self.splits, f"{own} / {tiles * self.batch}u")
        columns = self._columns(em, s, unit)
        totals = [
            [[self._total(em, s, (d, r, c)) for c in range(len(columns))] for r in range(self.rows)]
            for d in range(len(s.dots))
        ]
        ahead = _Ahead.begun(em, self, tiles) if self._reads_ahead(s) else None
        self._loop(em, _Block(self, s, statistics, batch, columns, totals, ahead), split)
        em.fours = False
        if self.along:
            self._write_added(em, s, (batch, split, unit), totals, write)
        else:
            self._write_each(em, s, (batch, split), columns, totals, write)
        em.fours = True

    def _reads_ahead(self, s: Section) -> bool:
        """Whether a workgroup touches what the next one reads: packed rows lie so far apart that a
        CPU does not see which lines come next, and lanes wait for one after the other."""
        whole = self.splits == 1 and self.batch == 1 and self.k >= self.block
        return whole and not self.along and self.run > 0 and self.tiles(s) > 1

    def _write_each(
        self, em: Emitter, s: Section, at: tuple[Index, Index], columns: Sequence[Index],
        totals: Totals, write: RowStore,
    ) -> None:  # fmt: skip
        """Store what each lane has; in a loop where what follows a sum is long."""
        count = self.rows * len(columns)
        trial, names = em.trial(), [of[0][0] for of in totals]
        write(trial, s, (*at, index(0), columns[0]), [Value(n, s.fours) for n in names])
        lines = sum(length("\n".join(block.lines)) for block in trial.blocks)
        if count > 1 and count * lines > _MOST_LINES:
            self._write_in_loop(em, s, at, totals, write)
            return
        for r in range(self.rows):
            for c, column in enumerate(columns):
                with self._inside(em, s, f"{c * self.lanes}u"):
                    values = [Value(of[r][c], s.fours, em.depth) for of in totals]
                    write(em, s, (*at, index(r), column), values)

    def _write_in_loop(
        self, em: Emitter, s: Section, at: tuple[Index, Index], totals: Totals, write: RowStore
    ) -> None:
        """Store what each lane has, with all that follows a sum once in the text: in a loop in
        which sums move up."""
        each = s.each // s.width
        every = [[total for row in of for total in row] for of in totals]
        with em.block(f"for (var one = 0u; one < {rolled(self.rows * each)}; one++)"):
            one = em.variable("one", self.rows * each)
            row, c = one // each, one % each
            shift = em.index(c * self.lanes).text
            with self._inside(em, s, shift):
                tiles = f"unit * {self.span(s) // s.width}u + " if self.tiles(s) > 1 else ""
                own = em.variable("column", s.columns // s.width, f"{tiles}{shift} + lane")
                values = [Value(of[0], s.fours, em.depth) for of in every]
                write(em, s, (*at, row, own * 4 + V if s.fours else own), values)
            for of in every:
                em.line(*(f"{to} = {after};" for to, after in pairwise(of)))

    def _write_added(
        self, em: Emitter, s: Section, at: tuple[Index, Index, Index], totals: Totals,
        write: RowStore,
    ) -> None:  # fmt: skip
        """Add up over the lanes; then lane c stores column c."""
        batch, split, unit = at
        names: list[list[str]] = []
        for d, of in enumerate(totals):
            names.append([])
            for r, row in enumerate(of):
                em.line(f"var all{d}_{r} = subgroupAdd({row[0]});")
                names[d].append(f"all{d}_{r}")
                for c, total in enumerate(row[1:], 1):
                    em.line(f"let sum{d}_{r}_{c} = subgroupAdd({total});")
                    em.line(f"all{d}_{r} = select(all{d}_{r}, sum{d}_{r}_{c}, lane == {c}u);")
        member = em.variable("member", s.each, f"min(lane, {s.each - 1}u)")
        column = unit * s.each + member
        inside = f"lane < {s.each}u"
        if column.hi >= s.columns:
            inside += f" && {em.index(column).text} < {s.columns}u"
            text = f"min({em.index(column).text}, {s.columns - 1}u)"
            column = em.variable("own_column", s.columns, text)
        with em.block(f"if ({inside})"):
            for r in range(self.rows):
                values = [Value(of[r], False, em.depth) for of in names]
                write(em, s, (batch, split, index(r), column), values)

    def _columns(self, em: Emitter, s: Section, unit: Index) -> list[Index]:
        """The columns of an invocation; those beyond the last are the last again."""
        extent, each = s.columns // s.width, s.each // s.width
        lane = variable("lane", self.lanes)
        out: list[Index] = []
        for c in range(each):
            at = unit * (self.lanes * each) + (c * self.lanes + lane)
            if self.along:
                at = unit * each + c
            if at.hi >= extent:
                at = em.variable(f"column{c}", extent, f"min({em.index(at).text}, {extent - 1}u)")
            out.append(at * 4 + V if s.fours else at)
        return out

    def _inside(self, em: Emitter, s: Section, c: str):  # noqa: ANN202
        """A block for the column of an invocation that is `c` after its first one, unless it can
        only be in range."""
        span = self.span(s)
        if s.columns % span == 0:
            return nullcontext()
        unit = f"unit * {span // s.width}u + " if self.tiles(s) > 1 else ""
        return em.block(f"if ({unit}lane + {c} < {s.columns // s.width}u)")

    def _total(self, em: Emitter, s: Section, numbers: tuple[int, ...]) -> str:
        kind, name = "vec4<f32>" if s.fours else "f32", "_".join(map(str, numbers))
        em.line(f"var total{name} = {kind}(0.0);")
        return f"total{name}"

    def _loop(self, em: Emitter, whole: _Block, split: Index) -> None:
        blocks, splits = self.k // self.block, self.splits
        if self.along:
            with em.block(f"for (var kb = lane; kb < {blocks}u; kb += {self.lanes}u)"):
                whole.emit(em, em.variable("kb", blocks) * self.block, self.block)
            return
        share = -(-blocks // splits)
        if blocks:
            begin = f"{em.index(split * share).text}" if splits > 1 else "0u"
            end = f"min({begin} + {share}u, {blocks}u)" if splits > 1 else rolled(blocks)
            with em.block(f"for (var kb = {begin}; kb < {end}; kb++)"):
                kb = em.variable("kb", blocks)
                whole.emit(em, kb * self.block, self.block)
                if whole.ahead is not None:
                    whole.ahead.emit(em, kb, blocks)
            if whole.ahead is not None:  # which the driver cannot leave out
                em.line(f"{whole.totals[0][0][0]} += f32(touched & ({rolled(0)}));")
        rest = self.k % self.block
        if rest:
            with em.block(f"if (split == {splits - 1}u)" if splits > 1 else ""):
                whole.emit(em, index(blocks * self.block), rest)


@dataclass(frozen=True, slots=True)
class _Ahead:
    """Touches the memory of the next workgroup's columns, in the order in which it lies."""

    product: RowProduct
    tiles: int
    following: Index
    seen: tuple[int, ...]  # loads of each array before

    @classmethod
    def begun(cls, em: Emitter, product: RowProduct, tiles: int) -> _Ahead:
        """With what stands before the loop over k."""
        em.line("var touched = 0u;")
        following = em.variable("following", tiles, f"min(unit + 1u, {tiles - 1}u)")
        return cls(product, tiles, following, tuple(len(a.at) for a in em.accesses))

    def emit(self, em: Emitter, kb: Index, blocks: int) -> None:
        """The statements of one block of k, after those that load what this workgroup needs."""
        lanes = self.product.lanes
        lane = variable("lane", lanes)
        for k, access in enumerate(em.accesses):
            words = self._words(access, self.seen[k] if k < len(self.seen) else 0)
            if words % 4 or access.size % 4:
                continue
            lines = -(-words // _LINE)
            each = -(-lines // blocks)
            for i in range(0, each, lanes):
                at = self.following * words + (kb * each + i + lane) * _LINE
                quad = f"min({em.index(at // 4).text}, {access.size // 4 - 1}u)"
                em.line(f"touched |= {quad_access(k, 0, quad)}.x;")

    def _words(self, access: Access, seen: int) -> int:
        """Words of one workgroup's columns, where they lie together in a packed array; else 0."""
        loads = [flat for flat, _ in access.at[seen:]]
        found = {flat.coefficient("unit") for flat in loads}
        words = found.pop() if len(found) == 1 else None
        if access.dtype != "u32" or not access.vector or not words:
            return 0
        inner = [flat - variable("unit", self.tiles) * words for flat in loads]
        return words if all(0 <= i.lo and i.hi < words for i in inner) else 0


@dataclass(frozen=True, slots=True)
class _Block:
    """What is added up over a block of k."""

    product: RowProduct
    section: Section
    statistics: Statistics
    batch: Index
    columns: Sequence[Index]
    totals: Totals
    ahead: _Ahead | None

    def emit(self, em: Emitter, k0: Index, steps: int) -> None:
        """The statements for `steps` steps from k0 on."""
        p = self.product
        if p.along:
            given = [self._own(em, r, k0, steps) for r in range(p.rows)]
        else:
            given = self._handed(em, k0, steps)
        for d in range(len(self.section.dots)):
            longest, done = self._run(em, d, k0), 0
            while done < steps:
                run = min(longest, steps - done)
                self._add(em, d, given, k0, done, run)
                done += run

    def _own(self, em: Emitter, row: int, k0: Index, steps: int) -> list[str]:
        """The row's element at each step of the lane."""
        p, node = self.product, self.product.narrow.node
        self.statistics.bind(em, row)
        values = [em.value(node, p.narrow.at(self.batch, index(row), k0 + j)) for j in range(steps)]
        return [em.splat(v, node.dtype, vector=False) for v in values]

    def _handed(self, em: Emitter, k0: Index, steps: int) -> list[list[str]]:
        """Each row's element at each step, in all lanes; a lane loads four of its own row."""
        p, dtype = self.product, self.product.narrow.node.dtype
        mine: dict[tuple[int, int], str] = {}
        for group, first in product(range(p.groups), range(0, steps, p.reach)):
            self.statistics.bind(em, group)
            quads = min(steps - first, p.reach) // 4
            lane = variable("lane", p.lanes) // p.abreast
            if quads < p.lanes // p.abreast:
                last = f"min({em.index(lane).text}, {quads - 1}u)"
                lane = em.variable("lane_in", quads, last)
            at = p.narrow.at(self.batch, p.row(group), k0 + first + lane * 4 + V)
            text = em.splat(em.value(p.narrow.node, at), dtype, vector=True)
            name = mine[group, first] = em.fresh("mine")
            em.line(f"let {name} = {text};")
        names: list[list[str]] = []
        for r in range(p.rows):
            names.append([em.fresh("x") for _ in range(steps)])
            for j, x in enumerate(names[r]):
                first = j - j % p.reach
                lane = (j - first) // 4 * p.abreast + r % p.abreast
                own = f"{mine[r // p.abreast, first]}.{_XYZW[j % 4]}"
                em.line(f"let {x} = subgroupShuffle({own}, {lane}u);")
        return names

    def _terms(self, em: Emitter, d: int, k0: Index, column: Index, steps: range) -> list[Term]:
        """What product d multiplies with at some steps."""
        wide = self.section.wide[d]
        return terms(em, wide.node, [wide.at(self.batch, column, k0 + j) for j in steps])

    def _run(self, em: Emitter, d: int, k0: Index) -> int:
        """The longest run of steps with something constant over it."""
        for run in RUNS:
            if run <= self.product.block and k0.divisible(run):
                found = self._terms(em, d, k0, self.columns[0], range(run))
                if any(t.factors or t.varying is None for t in found):
                    return run
        return RUNS[0]

    def _add(
        self, em: Emitter, d: int, given: Sequence[Sequence[str]], k0: Index, first: int, count: int
    ) -> None:
        """Add a run of steps to the totals of product d."""
        steps = range(first, first + count)
        found = [
            (c, t, term)
            for c, column in enumerate(self.columns)
            for t, term in enumerate(self._terms(em, d, k0, column, steps))
        ]
        for x, totals in zip(given, self.totals[d], strict=True):
            here = x[first : first + count]
            parts: dict[tuple[int, int], str] = {}
            for c, t, term in found:
                if term.varying is not None and term.factors:
                    parts[c, t] = em.fresh("part")
                    em.line(f"var {parts[c, t]} = {self._zero()};")
            for j in range(count):
                for c, t, term in found:
                    if term.varying is not None:
                        to, value = parts.get((c, t), totals[c]), term.varying[j]
                        sign = "-" if term.negative and (c, t) not in parts else "+"
                        em.line(f"{to} {sign}= {self._wide(em, d, value)} * {here[j]};")
            total = ""
            if any(term.varying is None for *_, term in found):
                total = em.let(("sum", *here), "sum", _tree(here), em.depth, False).text
            for c, t, term in found:
                if term.factors or term.varying is None:
                    what = parts.get((c, t), total)
                    text = " * ".join([*(f.text for f in term.factors), what])
                    em.line(f"{totals[c]} {'-' if term.negative else '+'}= {text};")

    def _zero(self) -> str:
        return "vec4<f32>(0.0)" if self.section.fours else "0.0"

    def _wide(self, em: Emitter, d: int, value: Value) -> str:
        return em.splat(value, self.section.wide[d].node.dtype, self.section.fours)


def _tree(names: Sequence[str]) -> str:
    """The sum of names, in pairs."""
    if len(names) == 1:
        return names[0]
    half = len(names) // 2
    return f"({_tree(names[:half])} + {_tree(names[half:])})"
