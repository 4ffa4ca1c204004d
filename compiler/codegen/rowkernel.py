"""One kernel over rows: passes that accumulate reductions and store matrix elements, then values of
rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext

from ..index import Index, index, unflatten
from ..ir import Kind, Node
from ..ops.reduce import COMBINES, Combine, Reduce
from ..schedule.kernel import KernelSource, Scratch
from ..schedule.lanes import FEATURES
from ..schedule.space import Analysis, Space, turned
from ..schedule.tile import fold
from .emitter import Emitter, aligned
from .geometry import Geometry
from .lanes import Lanes, digits
from .rowsteps import Step, Steps
from .source import Job, finish
from .statements import LANE, V, Value
from .wgsl import literal, suffix, wgsl_type

_WORTH_A_COPY = 1 << 16  # elements read, from where on an image saves more than its copy costs


def row_kernel(
    job: Job, a: Analysis, g: Geometry, segments: Mapping[Node, Scratch] | None = None
) -> KernelSource:
    """The kernel of a group over rows. With `segments` it stores what each segment of a row
    combines to instead."""
    return _RowKernel(job, a, g, segments or {}).build()


class _RowKernel:
    def __init__(
        self, job: Job, a: Analysis, g: Geometry, segments: Mapping[Node, Scratch]
    ) -> None:
        self.job, self.a, self.g, self.segments = job, a, g, segments
        self.full = [o for o in job.group.outputs if self._is_full(o)]
        self.rows = [o for o in job.group.outputs if o not in self.full and o not in segments]
        writes = [job.held_by(o) for o in (*self.full, *self.rows)] + list(segments.values())
        self.em = Emitter(writes, dict(job.memory))
        self.em.place = self._place
        self.em.reusing = job.target.images
        self.number = {o: k for k, o in enumerate((*self.full, *self.rows, *segments))}
        self.trees: dict[str, tuple[str, str, str, int]] = {}
        self.position = Index()
        self.flat: Index | None = None  # of the step, see there
        self.places: dict[object, tuple[Index, ...]] = {}
        self.row = self.segment = self.thread = Index()
        self.copies: list[tuple[Index, dict[Node, Value]]] = []
        self.row_present: Value | None = None
        for k, access in enumerate(self.em.accesses):
            along = k < len(self.full) or not g.along
            access.vector = g.wide and along and access.size % 4 == 0 and (g.within or not g.tail)

    def build(self) -> KernelSource:
        if self.g.shared:
            self._shared_rows()
            return self._finish()
        if self.job.target.kind == "cpu":
            self._cpu_variables()
        else:
            self._gpu_variables()
        self._passes()
        return self._finish()

    def _passes(self) -> None:
        """All that is done for the current rows."""
        reductions = [n for n in self.a.body if n.kind is Kind.REDUCE]
        levels = [self.a.level[n] - 1 for n in reductions] + [self.a.level[o] for o in self.full]
        for level in sorted(set(levels)):
            now = [n for n in reductions if self.a.level[n] == level + 1]
            now = [n for n in now if not self.segments or n in self.segments]
            full = [o for o in self.full if self.a.level[o] == level]
            if now or full:
                self._pass(level, now, full)
        self._store_rows()

    # ---- where things are

    def _is_full(self, node: Node) -> bool:
        space = self.a.space[node]
        return space.kind == "full" or (
            space.kind == "pure" and node.type.size == self.g.rows * self.g.length
        )

    def _place(self, node: Node) -> tuple[Index, ...] | None:
        space = self.a.space.get(node)
        if space is None or space.kind == "pure":
            return None
        key = (self.row, self.position, self.flat, space, node.shape)
        if key not in self.places:
            self.places[key] = unflatten(self._flat(space), node.shape)
        return self.places[key]

    def _flat(self, space: Space) -> Index:
        """The row-major position, in the array it is in, of the value at the current row and
        position."""
        return turned(space, self.row if space.kind == "row" else self._at())

    def _at(self) -> Index:
        """Where the current row's element at the current position is."""
        return self.g.flat(self.row, self.position) if self.flat is None else self.flat

    def _cpu_variables(self) -> None:
        g, em = self.g, self.em
        units = g.units // g.copies
        if g.segments == 1:
            unit = em.variable("worker", units)
        elif g.along:
            unit = em.variable("row", units, f"worker / {g.segments}u")
            self.segment = em.variable("segment", g.segments, f"worker % {g.segments}u")
        else:
            unit = em.variable("row", units, f"worker % {units}u")
            self.segment = em.variable("segment", g.segments, f"worker / {units}u")
        if g.copies > 1:
            at = em.index(unit).text
            lane = em.variable("lane", g.lanes, f"{at} % {g.lanes}u")
            group = em.variable("group", units // g.lanes, f"{at} / {g.lanes}u")
            unit = group * (g.copies * g.lanes) + lane
        self._set_rows([unit + c * g.lanes for c in range(g.copies)])

    def _set_rows(self, units: Sequence[Index]) -> None:
        across = self.g.wide and not self.g.along
        self.copies = [(unit * 4 + V if across else unit, {}) for unit in units]
        self.row, self.em.bound = self.copies[0]

    def _each_copy(self) -> Iterator[int]:
        """The rows of this invocation, one after the other."""
        for c, copy in enumerate(self.copies):
            self.row, self.em.bound = copy
            yield c

    def _shared_rows(self) -> None:
        """Lanes of a CPU that have rows together, one after the other."""
        g, em = self.g, self.em
        if g.abreast:
            self._rows_in_turn()
            return
        tile = em.variable("tile", g.workgroups)
        self.thread = em.variable("thread", g.T, f"lane % {g.T}u")
        member = em.variable("member", g.members, f"lane / {g.T}u")
        loop = em.block(f"for (var turn = 0u; turn < {g.R}u; turn++)") if g.R > 1 else nullcontext()
        with loop:
            turn = em.variable("turn", g.R)
            unit = (tile * g.R + turn) * g.members + member
            self._set_rows([self._inside(unit, g.units % (g.R * g.members) != 0)])
            if g.within:
                self._steps().begin_within(self.row)
            self._passes()

    def _rows_in_turn(self) -> None:
        """The same, written out, with lanes that store one after the other."""
        g, em = self.g, self.em
        tile = em.variable("tile", g.workgroups)
        self.thread = em.variable("thread", g.T, f"lane % {g.T}u")
        member = em.variable("member", g.members, f"lane / {g.T}u")
        same = em.variable("same", g.workgroups, "shared_number(tile)")
        each = [
            {"tile": same, "thread": index(lane % g.T), "member": index(lane // g.T)}
            for lane in range(g.lanes)
        ]
        em.lanes = Lanes(tuple(each))
        self._set_rows([(tile * g.R + c) * g.members + member for c in range(g.R)])
        self.position = self.thread * 4 + V
        for access, output in zip(em.accesses, self.full, strict=False):
            flat = self._flat(self._space(output))
            access.paired = aligned(flat, access.size) and em.lanes.places(flat, LANE) is not None
        self._passes()

    def _inside(self, unit: Index, guarded: bool) -> Index:
        """A row that there is; with `guarded`, one may be asked for that there is not."""
        if not guarded:
            return unit
        em, count = self.em, self.g.units
        at = em.index(unit)
        self.row_present = em.let(
            "row present", "present", f"{at.text} < {count}u", at.depth, False
        )
        return em.variable("row", count, f"min({at.text}, {count - 1}u)")

    def _gpu_variables(self) -> None:
        g, em = self.g, self.em
        fast, slow = ("thread", "member") if g.along else ("member", "thread")
        width = g.T if g.along else g.R
        names = {fast: f"local % {width}u", slow: f"local / {width}u"}
        self.thread = em.variable("thread", g.T, names["thread"])
        if g.T == 1:
            em.line("let thread = 0u;")
        member = em.variable("member", g.R, names["member"])
        tiles = -(-g.units // g.R)
        if g.segments > 1:
            tile = em.variable("rows", tiles, f"tile / {g.segments}u")
            self.segment = em.variable("segment", g.segments, f"tile % {g.segments}u")
        else:
            tile = em.variable("tile", tiles)
        unit = tile * g.R + member
        self._set_rows([self._inside(unit, g.units % g.R != 0)])

    # ---- passes

    def _pass(self, level: int, reductions: Sequence[Node], full: Sequence[Node]) -> None:
        em, g = self.em, self.g
        em.phase = level
        keys = [(n, c) for n in reductions for c in range(g.copies)]
        sums = {key: self._accumulator(key[0], g.wide) for key in keys}
        rests = {key: self._accumulator(key[0], wide=False) for key in keys} if g.tail else {}
        blocked = not g.inline and g.trips > 2 * g.block
        inner = {key: em.fresh("block") for key in keys if blocked and self._rounds(key[0])}

        def visit(steps: Sequence[Step]) -> None:
            work = [
                (c, step, *self._values(step, reductions, full))
                for c in self._each_copy()
                for step in steps
            ]
            for c, step, values, _ in work:
                for node, value in values:
                    to = rests[node, c] if step.tail else inner.get((node, c), sums[node, c])
                    self._accumulate(node, to, value, step, g.wide and not step.tail)
            for _, step, _, elements in work:
                self._store_full(elements, step)

        self._walk(visit, {name: (key[0], sums[key]) for key, name in inner.items()})
        for c in self._each_copy():
            for node in reductions:
                total = self._total(node, sums[node, c], rests.get((node, c)))
                if node in self.segments:
                    self._store_segment(node, total)
                else:
                    em.bound[node] = total

    def _values(
        self, step: Step, reductions: Sequence[Node], full: Sequence[Node]
    ) -> tuple[list[tuple[Node, Value]], list[tuple[Node, Index, Value]]]:
        """What is reduced and what is stored (where) at a step of the current row."""
        self.position, self.flat, em = step.position, step.flat, self.em
        values = [(n, em.value(n.operands[0], self._operand_place(n))) for n in reductions]
        places = [self._flat(self._space(o)) for o in full]
        return values, [
            (o, at, em.value(o, unflatten(at, o.shape))) for o, at in zip(full, places, strict=True)
        ]

    def _walk(
        self, visit: Callable[[Sequence[Step]], None], inner: Mapping[str, tuple[Node, str]]
    ) -> None:
        """Visit every step of this invocation's share of a row, with the partial sums `inner`
        emptied now and then."""
        em, g = self.em, self.g
        steps = self._steps()
        if g.inline:
            for step in steps.written_out():
                visit([step])
            return
        start, stop = steps.bounds()
        stride = g.T * g.unroll
        advance = "j++" if stride == 1 else f"j += {stride}u"
        if not inner:
            with em.block(f"for (var j = {start}; j < {stop}; {advance})"):
                visit(steps.of_round())
        else:
            with em.block(f"for (var b = {start}; b < {stop}; b += {g.block * g.T}u)"):
                for name, (node, _) in inner.items():
                    em.line(f"var {name} = {self._identity(node, g.wide)};")
                with em.block(f"for (var j = b; j < min(b + {g.block * g.T}u, {stop}); {advance})"):
                    visit(steps.of_round())
                for name, (node, total) in inner.items():
                    em.line(f"{total} = {self._combined(node, total, name, g.wide)};")
        for step in steps.ends():
            visit([step])

    def _steps(self) -> Steps:
        return Steps(self.em, self.g, self.thread, self.segment)

    # ---- accumulation

    def _operand_place(self, reduction: Node) -> tuple[Index, ...]:
        return unflatten(self._at(), reduction.operands[0].shape)

    def _space(self, output: Node) -> Space:
        space = self.a.space[output]
        if space.kind != "pure":
            return space
        return Space("full" if output in self.full else "row", turned=space.turned)

    def _combine(self, node: Node) -> Combine:
        assert isinstance(node.op, Reduce)
        return COMBINES[node.op.combine]

    def _rounds(self, node: Node) -> bool:
        """Whether the order of combination changes the result."""
        return node.dtype.kind == "f" and "eg_" not in self._combine(node).wgsl

    def _identity(self, node: Node, wide: bool) -> str:
        number = literal(self._combine(node).identity[node.dtype.kind], node.dtype)
        return f"{wgsl_type(node.dtype, wide)}({number})"

    def _combined(self, node: Node, a: str, b: str, wide: bool) -> str:
        dtype = node.dtype
        return self._combine(node).wgsl.format(
            a, b, T=wgsl_type(dtype, wide), v="4" if wide else "", s=suffix(dtype, wide)
        )

    def _accumulator(self, node: Node, wide: bool) -> str:
        name = self.em.fresh(f"total_{node.op.name}")
        self.em.line(f"var {name} = {self._identity(node, wide)};")
        return name

    def _accumulate(self, node: Node, to: str, value: Value, step: Step, wide: bool) -> None:
        text = self.em.splat(value, node.dtype, wide)
        if step.present is not None:
            text = f"select({self._identity(node, wide)}, {text}, {step.present.text})"
        self.em.line(f"{to} = {self._combined(node, to, text, wide)};")

    def _total(self, node: Node, total: str, rest: str | None) -> Value:
        """What all steps of all threads of a row combine to."""
        g, name, wide = self.g, total, self.g.wide
        if g.wide and g.along:
            pairs = [
                self._combined(node, f"{total}.{a}", f"{total}.{b}", False) for a, b in ("xy", "zw")
            ]
            low, high = (self._named("pair", text) for text in pairs)
            name, wide = self._named(node.op.name, self._combined(node, low, high, False)), False
        if rest is not None:
            name = self._named(node.op.name, self._combined(node, name, rest, False))
        if g.T > 1:
            tree = self._tree(node, wide)
            where = "" if g.shared else ", local, thread"
            name = self._named(node.op.name, f"{tree}({name}{where})")
        return Value(name, wide, self.em.depth)

    def _named(self, prefix: str, text: str) -> str:
        name = self.em.fresh(prefix)
        self.em.line(f"let {name} = {text};")
        return name

    def _tree(self, node: Node, wide: bool) -> str:
        """The name of a function that combines over the threads of a row."""
        kind = wgsl_type(node.dtype, wide)
        name = f"row_{node.op.name}_{suffix(node.dtype, wide)}"
        target = self.job.target
        lanes = (
            target.subgroup
            if self.g.along and node.dtype.kind != "b" and "subgroup" in target.features
            else 0
        )
        self.trees[name] = (name, kind, self._combined(node, "a", "b", wide), lanes)
        return name

    # ---- stores

    def _store_full(self, elements: Sequence[tuple[Node, Index, Value]], step: Step) -> None:
        if not elements:
            return
        with self._guarded([step.present, self.row_present]):
            for node, at, value in elements:
                self.em.store(self.number[node], at, value, node.dtype)

    def _store_rows(self) -> None:
        if not self.rows:
            return
        values: list[tuple[Node, Index, Value]] = []
        for _ in self._each_copy():
            places = [self._flat(self._space(o)) for o in self.rows]
            values += [
                (o, at, self.em.value(o, unflatten(at, o.shape)))
                for o, at in zip(self.rows, places, strict=True)
            ]
        with self._guarded([self._first_thread(), self.row_present]):
            for node, at, value in values:
                self.em.store(self.number[node], at, value, node.dtype)

    def _store_segment(self, node: Node, value: Value) -> None:
        g = self.g
        flat = self.row * g.segments + self.segment if g.along else self.segment * g.rows + self.row
        with self._guarded([self._first_thread(), self.row_present]):
            self.em.store(self.number[node], flat, value, node.dtype)

    def _first_thread(self) -> Value | None:
        return Value("thread == 0u") if self.g.T > 1 else None

    def _guarded(self, conditions: Sequence[Value | None]):  # noqa: ANN202
        needed = [c.text for c in conditions if c is not None]
        return self.em.block(f"if ({' && '.join(needed)})") if needed else nullcontext()

    def _finish(self) -> KernelSource:
        g, target = self.g, self.job.target
        for access in self.em.accesses:
            passes = len({phase for _, phase in access.at})
            # of columns, each of the tiles that lanes have reads all, or each of the rows
            again = g.workgroups if g.abreast else g.rows if g.within else 1
            shared = access.size < g.rows * g.length and not any(
                {"tile", "row"} & at.variables for at, _ in access.at
            )
            read = access.size * passes * (again if shared else 1)
            access.reused &= read >= _WORTH_A_COPY
        if g.shared:
            return self._finish_shared()
        if target.kind == "cpu":
            count = g.workers
            size = g.lanes if count < 2048 or not g.inline else max(64, g.lanes)
            grid = fold(-(-count // size), target.max_groups)
            values = {
                "count": count,
                "workgroup": size,
                "width": grid[0] * size,
                "body": self.em.text,
            }
            return finish(self.job, self.em, "rowwise_cpu.wgsl.j2", values, grid, (size, 1, 1))
        tiles = -(-g.units // g.R) * g.segments
        grid = fold(tiles, target.max_groups)
        trees = list(self.trees.values())
        values = {
            "tiles": tiles,
            "width": grid[0],
            "R": g.R,
            "T": g.T,
            "along": g.along,
            "trees": trees,
            "body": self.em.text,
        }
        subgroups = any(lanes > 1 for *_, lanes in trees)
        features = ("subgroup",) if subgroups else ()
        return finish(
            self.job,
            self.em,
            "rowwise_gpu.wgsl.j2",
            values,
            grid,
            (g.R * g.T, 1, 1),
            features=features,
        )

    def _finish_shared(self) -> KernelSource:
        g, job = self.g, self.job
        abreast = g.abreast or 1
        grid = fold(g.workgroups // abreast, job.target.max_groups)
        trees = [tree[:3] for tree in self.trees.values()]
        values = {"tiles": g.workgroups, "width": grid[0], "L": g.lanes, "T": g.T, "trees": trees}
        values |= {"G": abreast, "digits": digits(g.workgroups) if g.abreast else 0}
        values |= {"body": self.em.text, "surplus": grid[0] * grid[1] * abreast > g.workgroups}
        features = FEATURES if g.abreast else ("subgroup",) if g.T > 1 else ()
        template, size = "rows_cpu.wgsl.j2", (g.lanes * abreast, 1, 1)
        return finish(job, self.em, template, values, grid, size, features=features)
