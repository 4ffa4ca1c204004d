"""Products: the operands' loads with what is computed on the way, the results' stores with what follows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ...templates import swapped
from ..index import Index, flatten, index, unflatten
from ..ir import Node
from ..schedule.kernel import KernelSource, Scratch
from ..schedule.space import Analysis, Space
from ..schedule.tile import Tile, candidates
from .emitter import LANE, Emitter, V, Value
from .rewrite import partial_input, product_as_rows, replaced, summed
from .rowwise import lower_job
from .source import Job, finish

_FOUR_LOADS = 52.0  # of single elements; a vec4 is 24 (measured on llvmpipe, a fair order elsewhere)


def lower_contract(job: Job, analysis: Analysis) -> list[KernelSource]:
    """The kernels of a group around one product: one, or with split-K one more that adds up partial sums."""
    dot = analysis.anchor
    assert dot is not None
    if dot.type.size == 0:
        return []
    a, b = dot.operands
    if a.dtype.kind != "f" or a.shape[-1] == 0:
        return lower_job(replaced(job, job.group.outputs, {dot: product_as_rows(a, b)}, job.memory))
    return _Product(job, analysis, dot).kernels()


@dataclass(frozen=True, slots=True)
class Operand:
    """A value that a template loads: coordinates are (batch, row, column) of sizes `extents`."""

    node: Node
    extents: tuple[int, ...]
    lead: tuple[int, ...]  # the axes that batch stands for

    def at(self, coords: Sequence[Index]) -> tuple[Index, ...]:
        return (*unflatten(coords[0], self.lead), *coords[1:])


class _Product:
    def __init__(self, job: Job, a: Analysis, dot: Node) -> None:
        self.job, self.a, self.dot = job, a, dot
        left, right = dot.operands
        *lead, self.m, self.k = left.shape
        self.n = right.shape[-1]
        self.batch = math.prod(lead)
        self.lead = tuple(lead)
        self.operands = {
            "a": Operand(left, (self.batch, self.m, self.k), self.lead),
            "b": Operand(right, (self.batch, self.k, self.n), self.lead),
        }

    def kernels(self) -> list[KernelSource]:
        axes = (vector_axis(self.job, self.operands["a"], "mk"), vector_axis(self.job, self.operands["b"], "kn"))
        tile = self._tile(axes)
        if tile.splits == 1:
            return [self._kernel(self.job, tile, axes, None)]
        partial = Scratch("partial", (tile.splits, self.dot.type.size), "f32")
        part = self.job.part([self.dot], stores={self.dot: partial})
        first = self._kernel(part, tile, axes, partial)
        given = partial_input(partial)
        total = summed(partial, given, "sum", 0, self.dot)
        rest = replaced(self.job, self.job.group.outputs, {self.dot: total}, self.job.memory | {given: partial})
        return [first, *lower_job(rest)]

    def _tile(self, axes: tuple[str, str]) -> Tile:
        hint = self.job.hints.get("tile")
        if isinstance(hint, Tile):
            return hint
        return candidates(self.job.target, self.batch, self.m, self.n, self.k, *axes)[0]

    def _kernel(self, job: Job, tile: Tile, axes: tuple[str, str], partial: Scratch | None) -> KernelSource:
        outputs = job.group.outputs
        emitter = Emitter([partial] if partial else [job.held_by(o) for o in outputs], dict(job.memory))
        wide = self.n % 4 == 0 and not tile.swap
        for k, access in enumerate(emitter.accesses):
            straight = partial is not None or self.a.space[outputs[k]].turned == ((), ())
            access.vector = wide and straight

        def load(name: str, result: str, coords: tuple[str, ...], vec: int = 1, axis: int | None = None) -> str:
            return load_text(emitter, self.operands[name], result, coords, axis if vec == 4 else None)

        def store(coords: tuple[str, ...], value: str, vec: int = 1) -> str:
            return self._store(emitter, job, partial, coords, value, vec)

        values: dict[str, object] = {
            "load": load, "store": store, "batch": self.batch, "M": self.m, "N": self.n, "K": self.k,
            "a_vec_axis": axes[0], "b_vec_axis": axes[1], "store_vec": 4 if wide else 1,
        }  # fmt: skip
        if tile.swap:
            values = swapped(values)
        features = ("subgroup",) if job.target.kind == "cpu" and "L" in tile.values else ()
        return finish(
            job, emitter, tile.template, {**values, **tile.values}, tile.grid, tile.workgroup, features=features
        )

    def _store(self, emitter: Emitter, job: Job, partial: Scratch | None, coords: tuple[str, ...], value: str,
               vec: int) -> str:  # fmt: skip
        em = emitter.child("to_")
        splits = partial.shape[0] if partial else 1
        extents = (self.batch * splits, self.m, self.n)
        at = coordinates(em, coords, extents, 2 if vec == 4 else None, "to_")
        flat = flatten(at, extents)
        em.bound[self.dot] = Value(value, vec == 4)
        if partial is not None:
            em.store(0, flat, em.bound[self.dot], self.dot.dtype)
            return em.text
        em.place = lambda node: tile_place(self.a.space.get(node), node, flat)
        outputs = job.group.outputs
        values = [em.value(o, unflatten(turned(self.a.space[o], flat), o.shape)) for o in outputs]
        for k, (out, one) in enumerate(zip(outputs, values, strict=True)):
            em.store(k, turned(self.a.space[out], flat), one, out.dtype)
        return em.text


def turned(space: Space, flat: Index) -> Index:
    """The row-major position, after the transpose of `space`, of what was at `flat` before it."""
    perm, shape = space.turned
    if not shape:
        return flat
    at = unflatten(flat, shape)
    return flatten([at[p] for p in perm], [shape[p] for p in perm])


def tile_place(space: Space | None, node: Node, flat: Index) -> tuple[Index, ...] | None:
    """Where the element of a tile's value at position `flat` of the anchor lies in `node`; None for a pure value."""
    if space is None or space.kind == "pure":
        return None
    return unflatten(turned(space, flat), node.shape)


def coordinates(
    em: Emitter, coords: Sequence[str], extents: Sequence[int], lanes: int | None, prefix: str
) -> list[Index]:
    """WGSL coordinates as indexes; along axis `lanes` four neighbours from a multiple of 4 on."""
    out: list[Index] = []
    for k, (text, extent) in enumerate(zip(coords, extents, strict=True)):
        number = re.fullmatch(r"(\d+)u", text)
        if k == lanes:
            quad = em.variable(f"{prefix}quad", extent // 4, f"({text}) / 4u")
            out.append((index(int(number[1])) if number else quad * 4) + V)
        elif number:
            out.append(index(int(number[1])))
        elif re.fullmatch(r"\w+", text):
            out.append(em.variable(text, extent))
        else:
            out.append(em.variable(f"{prefix}at{k}", extent, text))
    return out


def load_text(emitter: Emitter, operand: Operand, result: str, coords: Sequence[str], lanes: int | None) -> str:
    """Statements that define `let {result}`: the operand's element, or four of them along an axis."""
    em = emitter.child(f"{result}_")
    at = coordinates(em, coords, operand.extents, lanes, f"{result}_")
    value = em.value(operand.node, operand.at(at))
    em.line(f"let {result} = {em.splat(value, operand.node.dtype, lanes is not None)};")
    return em.text


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
            if LANE not in flat.variables:
                cost += 13.0
            elif flat.coefficient(LANE) == 1 and (flat - V).divisible(4) and access.size % 4 == 0:
                cost += 24.0
            else:
                cost += _FOUR_LOADS
    # more than one access: compare with as many single ones
    loads = sum(len(access.at) for access in em.accesses)
    return cost / max(loads, 1)


