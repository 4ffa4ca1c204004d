"""Products: the operands' loads with what is computed on the way, the results' stores with what
follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...templates import swapped
from ..index import Index, flatten, unflatten
from ..ir import Kind, Node
from ..schedule.kernel import KernelSource, Scratch
from ..schedule.lanes import FEATURES
from ..schedule.selection import Group, body
from ..schedule.space import Analysis, Space, analyze, turned
from ..schedule.tile import Tile, candidates
from ..schedule.tile_rows import ROWS
from .emitter import Emitter, aligned
from .held import Held
from .lanes import digits
from .rewrite import partial_input, product_as_rows, replaced, summed
from .rowwise import lower_job
from .skewed import Strides, shifts, strides
from .source import Job, finish
from .statements import LANE, V, Value
from .turns import Turns, finish_text, store_text
from .wgsl import length, wgsl_type

_MOST_ACCESSES, _MOST_LINES = 2, 16  # of an epilogue that stands in the text for every result
_DEEP = 256  # steps of k, to which a loop over results hardly adds
_FOUR_LOADS = (
    52.0  # of single elements; a vec4 is 24 (measured on llvmpipe, a fair order elsewhere)
)


def lower_contract(job: Job, analysis: Analysis) -> list[KernelSource]:
    """The kernels of a group around one product: one, or with split-K one more that adds up partial
    sums."""
    dot = analysis.anchor
    assert dot is not None
    if dot.type.size == 0:
        return []
    if needs_row_group(analysis):
        from .rowgroup import row_group

        return [row_group(job, analysis)]
    a, b = dot.operands
    if a.dtype.kind != "f" or a.shape[-1] == 0:
        return lower_job(replaced(job, job.group.outputs, {dot: product_as_rows(a, b)}, job.memory))
    return _Product(job, analysis, dot).kernels()


def needs_row_group(a: Analysis) -> bool:
    """Whether a group holds several products, or reductions of a product's rows."""
    return len(a.anchors) > 1 or any(n.kind is Kind.REDUCE for n in a.body)


@dataclass(frozen=True, slots=True)
class Operand:
    """A value that a template loads: coordinates `axes`, the first for the leading axes of `node`,
    have `extents`."""

    node: Node
    axes: tuple[str, ...]
    extents: tuple[int, ...]

    def at(self, coords: Sequence[Index]) -> tuple[Index, ...]:
        return (*unflatten(coords[0], self.node.shape[:-2]), *coords[1:])


def product_tiles(job: Job, dot: Node, count: int) -> list[Tile]:
    """The best tilings for a group around one product of floats."""
    return _Product(job, analyze(job.group), dot).tiles(count)


class _Product:
    def __init__(self, job: Job, a: Analysis, dot: Node) -> None:
        self.job, self.a, self.dot = job, a, dot
        left, right = dot.operands
        *lead, self.m, self.k = left.shape
        self.n = right.shape[-1]
        self.batch = math.prod(lead)
        self.operands = {
            "a": Operand(left, ("batch", "m", "k"), (self.batch, self.m, self.k)),
            "b": Operand(right, ("batch", "k", "n"), (self.batch, self.k, self.n)),
        }
        self.strides = {
            name: strides(job, o.node, o.extents, places)
            for (name, o), places in zip(self.operands.items(), ("brk", "bkr"), strict=True)
        }

    def kernels(self) -> list[KernelSource]:
        axes = self.axes
        tile = self._tile()
        if tile.splits == 1:
            return [self._kernel(self.job, tile, axes, None)]
        partial = Scratch("partial", (tile.splits, self.dot.type.size), "f32")
        part = self.job.part([self.dot], stores={self.dot: partial})
        first = self._kernel(part, tile, axes, partial)
        given = partial_input(partial)
        total = summed(partial, given, "sum", 0, self.dot)
        rest = replaced(
            self.job, self.job.group.outputs, {self.dot: total}, {**self.job.memory, given: partial}
        )
        return [first, *lower_job(rest)]

    def _tile(self) -> Tile:
        hint = self.job.hints.get("tile")
        return hint if isinstance(hint, Tile) else self.job.ranked(self.tiles(self.job.count))

    @property
    def axes(self) -> tuple[str, str]:
        """Those along which four elements of the operands are loaded."""
        a, b = self.operands["a"], self.operands["b"]
        return vector_axis(self.job, a, "mk"), vector_axis(self.job, b, "kn")

    def tiles(self, count: int) -> list[Tile]:
        """The best tilings."""
        a, b = (words_each(self.job, self.operands[name].node) for name in "ab")
        shape, (a_axis, b_axis) = (self.batch, self.m, self.n, self.k), self.axes
        skews = shifts(self.strides["a"], a_axis), shifts(self.strides["b"], b_axis)
        target = self.job.target
        return candidates(target, *shape, a_axis, b_axis, count, words=(a, b), skews=skews)

    def _kernel(
        self, job: Job, tile: Tile, axes: tuple[str, str], partial: Scratch | None
    ) -> KernelSource:
        outputs = job.group.outputs
        if tile.template == ROWS:
            from .rowgroup import row_product

            x, matrix = self.dot.operands
            return row_product(job, self.a, tile, x, matrix, partial)
        emitter = Emitter(
            [partial] if partial else [job.held_by(o) for o in outputs], dict(job.memory)
        )
        wide = self.n % 4 == 0 and not tile.swap
        for k, access in enumerate(emitter.accesses):
            out, extents = outputs[k], (self.batch, self.m, self.n)
            straight = partial is not None or stores_fours(
                self.a.space[out], out, ("batch", "m", "n"), extents
            )
            access.vector = wide and straight

        def load(
            name: str, result: str, coords: tuple[str, ...], vec: int = 1, axis: int | None = None
        ) -> str:
            function = load_function(
                emitter,
                f"load_{name}",
                self.operands[name],
                axis if vec == 4 else None,
                name in tile.images,
            )
            return f"let {result} = {function}({', '.join(coords)});"

        def store(coords: tuple[str, ...], value: str, vec: int = 1) -> str:
            return self._store(emitter, job, partial, coords, value, vec)

        values: dict[str, object] = {
            "load": load, "store": store,
            "batch": self.batch, "M": self.m, "N": self.n, "K": self.k,
            "a_vec_axis": axes[0], "b_vec_axis": axes[1], "store_vec": 4 if wide else 1,
        }  # fmt: skip
        if tile.swap:
            values = swapped(values)
        if tile.template == "contract_cpu.wgsl.j2":
            vec = 4 if wide and tile.values["CW"] == 4 else 1
            if vec == 4 and tile.values["CV"] == 1:
                emitter.held = Held()
            values["folded"] = self._is_long(emitter, store, vec)
            stored = outputs if partial is None else ()
            values |= self._in_turn(emitter, tile, stored, bool(values["folded"]))
            values["skews"] = self._texels(emitter, tile)
            if emitter.held and emitter.held.loads:
                emitter.held.function(emitter, (self.batch * tile.splits, self.m, self.n))
                values["holds"] = True
        features = ("subgroup",) if job.target.kind == "cpu" and "L" in tile.values else ()
        features = FEATURES if values.get("digits") else features
        return finish(
            job,
            emitter,
            tile.template,
            {**values, **tile.values},
            tile.grid,
            tile.workgroup,
            features=features,
        )

    def _in_turn(
        self, emitter: Emitter, tile: Tile, outputs: Sequence[Node], folded: bool
    ) -> dict[str, object]:
        """The values that a template has more where lanes store one after the other."""
        if not tile.values.get("turns"):
            return {}
        extents, lanes = (self.batch * tile.splits, self.m, self.n), tile.values["L"]
        assert isinstance(lanes, int)
        turns = Turns(self.job.target, self.a, self.dot, tuple(outputs), extents, lanes)
        if not turns.possible(emitter, folded):
            return {}
        del emitter.functions["store_c4"]
        turns.functions(emitter, folded)
        tiles = tile.grid[0] * tile.grid[1]
        return {"digits": digits(tiles), "store_turn": store_text, "finish": finish_text}

    def _texels(self, emitter: Emitter, tile: Tile) -> dict[str, Strides]:
        """The strides of the operands that the template loads as skewed vec4s, by its names."""
        found: dict[str, Strides] = {}
        for role, name in zip("ab", "ba" if tile.swap else "ab", strict=True):
            if role not in str(tile.values.get("skew", "")):
                continue
            at = self.strides[name]
            assert at is not None
            em = emitter.child()
            em.phase = emitter.phase + 1
            text = em.texel(at.node, "at")
            emitter.functions[f"texel_{role}"] = (
                f"fn texel_{role}(at: u32) -> vec4<f32> {{\n  return {text};\n}}"
            )
            found[role] = at
        return found

    def _is_long(self, emitter: Emitter, store: Callable[..., str], vec: int) -> bool:
        """Whether what follows a result is so long that it should be in the text once."""
        store(("batch", "m", "n"), "value", vec)
        texts = emitter.functions.values()
        if len(emitter.accesses) > _MOST_ACCESSES or "".join(texts).count("\n") > _MOST_LINES:
            return True
        return self.k >= _DEEP and sum(map(length, texts)) > _MOST_LINES

    def _store(
        self,
        emitter: Emitter,
        job: Job,
        partial: Scratch | None,
        coords: tuple[str, ...],
        value: str,
        vec: int,
    ) -> str:
        splits = partial.shape[0] if partial else 1
        extents = (self.batch * splits, self.m, self.n)
        outputs = [] if partial else list(enumerate(job.group.outputs))

        def write(em: Emitter, flat: Index, value: Value) -> None:
            em.bound[self.dot], em.held = value, emitter.held
            if partial is not None:
                em.store(0, flat, value, self.dot.dtype)
            write_tile(em, self.a, outputs, flat)

        name = store_function(emitter, "store_c", ("batch", "m", "n"), extents, vec == 4, write)
        return f"{name}({', '.join((*coords, value))});"


def write_tile(em: Emitter, a: Analysis, outputs: Sequence[tuple[int, Node]], flat: Index) -> None:
    """Store outputs (with their bindings' numbers) for the anchor's element at row-major position
    `flat`."""
    known: dict[object, tuple[Index, ...] | None] = {}

    def place(node: Node) -> tuple[Index, ...] | None:
        space = a.space.get(node)
        if (space, node.shape) not in known:
            known[space, node.shape] = tile_place(space, node, flat)
        return known[space, node.shape]

    em.place = place
    places = [turned(a.space[o], flat) for _, o in outputs]
    values = [
        em.value(o, unflatten(at, o.shape)) for (_, o), at in zip(outputs, places, strict=True)
    ]
    for (k, out), at, value in zip(outputs, places, values, strict=True):
        em.store(k, at, value, out.dtype)


def tile_place(space: Space | None, node: Node, flat: Index) -> tuple[Index, ...] | None:
    """Where the element of a tile's value at position `flat` of the anchor lies in `node`; None for
    a pure value."""
    if space is None or space.kind == "pure":
        return None
    return unflatten(turned(space, flat), node.shape)


def coordinates(
    em: Emitter, axes: Sequence[str], extents: Sequence[int], lanes: int | None
) -> list[Index]:
    """A function's parameters as indexes; along axis `lanes` four neighbors from a multiple of 4
    on."""
    out: list[Index] = []
    for k, (name, extent) in enumerate(zip(axes, extents, strict=True)):
        quad = em.variable("quad", extent // 4, f"{name} / 4u") * 4 + V if k == lanes else None
        out.append(em.variable(name, extent) if quad is None else quad)
    return out


def stores_fours(space: Space, output: Node, axes: Sequence[str], extents: tuple[int, ...]) -> bool:
    """Whether four neighbours along the last axis of a tile are four neighbours of an output."""
    if extents[-1] % 4:
        return False
    at = flatten(coordinates(Emitter((), {}), axes, extents, len(axes) - 1), extents)
    return aligned(turned(space, at), output.type.size)


def load_function(
    emitter: Emitter, name: str, operand: Operand, lanes: int | None, reused: bool = False
) -> str:
    """The name of a function that gives the operand's element at coordinates, or four along axis
    `lanes`. Of a `reused` operand every element is loaded several times."""
    name = name if lanes is None else f"{name}4_{operand.axes[lanes]}"
    if name not in emitter.functions:
        em, dtype = emitter.child(), operand.node.dtype
        em.reusing = reused
        em.phase = (
            emitter.phase + 1
        )  # other invocations read it as well: no result may take its memory
        value = em.value(
            operand.node, operand.at(coordinates(em, operand.axes, operand.extents, lanes))
        )
        em.line(f"return {em.splat(value, dtype, lanes is not None)};")
        parameters = ", ".join(f"{axis}: u32" for axis in operand.axes)
        emitter.functions[name] = function_text(
            f"{name}({parameters}) -> {wgsl_type(dtype, lanes is not None)}", em
        )
    return name


def store_function(
    emitter: Emitter,
    name: str,
    axes: tuple[str, ...],
    extents: Sequence[int],
    wide: bool,
    write: Callable[[Emitter, Index, Value], None],
) -> str:
    """The name of a function that writes a value, or four along the last axis, with all that
    follows it."""
    name = f"{name}4" if wide else name
    if name not in emitter.functions:
        em = emitter.child()
        at = coordinates(em, axes, extents, len(axes) - 1 if wide else None)
        write(em, flatten(at, extents), Value("value", wide))
        parameters = ", ".join(f"{axis}: u32" for axis in axes)
        kind = "vec4<f32>" if wide else "f32"
        emitter.functions[name] = function_text(f"{name}({parameters}, value: {kind})", em)
    return name


def function_text(signature: str, em: Emitter) -> str:
    """A WGSL function of an emitter's statements."""
    lines = em.text.splitlines()
    return "\n".join([f"fn {signature} {{", *(f"  {line}" for line in lines), "}"])


def vector_axis(job: Job, operand: Operand, names: str) -> str:
    """The axis ("m", "n", "k" or "none") along which four elements cost least to load together."""
    best, found = _FOUR_LOADS, "none"
    for axis in (2, 1):
        if operand.extents[axis] % 4:
            continue
        cost = load_cost(job, operand, axis)
        if cost < best:
            best, found = cost, names[axis - 1]
    return found


def words_each(job: Job, node: Node) -> float:
    """Words of memory that an element of an operand takes, all that it is computed from."""
    below = set(body(Group((node,), tuple(job.memory)))) if node not in job.memory else {node}
    read = [n for n in job.memory if any(n in x.operands for x in below) or n is node]
    return sum(n.type.nbytes for n in read if n.type.size > 1) / 4 / max(1, node.type.size)


def load_cost(job: Job, operand: Operand, lanes: int) -> float:
    """Relative cost of the memory accesses for four elements along an axis."""
    em = Emitter((), dict(job.memory))
    extents = operand.extents
    at = [em.variable(f"c{k}", n) for k, n in enumerate(extents)]
    at[lanes] = em.variable("quad", extents[lanes] // 4) * 4 + V
    em.value(operand.node, operand.at(at))
    cost = 0.0
    for access in em.accesses:
        for flat, _ in access.at:
            if not em.is_vector(flat):
                cost += 13.0
            elif flat.coefficient(LANE) == 1 and (flat - V).divisible(4) and access.size % 4 == 0:
                cost += 24.0
            else:
                cost += _FOUR_LOADS
    # more than one access: compare with as many single ones
    loads = sum(len(access.at) for access in em.accesses)
    return cost / max(loads, 1)
