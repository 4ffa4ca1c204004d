"""Results of products that lanes of llvmpipe store one after the other: see `lanes`.

These stores stand outside of all loops. So where what follows a result is in a loop over rows, a
function `finish` gives the first result's values back, and only these are stored so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..index import Index, flatten, index, unflatten
from ..ir import Node
from ..schedule.lanes import can_store
from ..schedule.space import Analysis, turned
from ..schedule.target import Target
from ..types import f32
from .emitter import Emitter, aligned
from .lanes import Lanes
from .statements import LANE, Value

AXES = ("batch", "m", "n")


@dataclass(frozen=True, slots=True)
class Turns:
    """A product's kernel: `extents` of its results (batch and splits, m, n), lanes of a subgroup,
    and the outputs, none where partial sums are stored."""

    target: Target
    a: Analysis
    dot: Node
    outputs: tuple[Node, ...]
    extents: tuple[int, int, int]
    lanes: int

    def possible(self, emitter: Emitter, folded: bool) -> bool:
        """Whether the lanes can store the first result so, and that is worth the text: of several
        in a loop over rows the others stay there."""
        first = emitter.accesses[0]
        if folded and (len(self.outputs) != 1 or self.outputs[0].dtype is not f32):
            return False
        em = Emitter((), {})
        return can_store(self.target, [(first.dtype, first.size)]) and self._paired(em, 0)

    def functions(self, emitter: Emitter, folded: bool) -> None:
        """Adds `store_turn`, and with `folded` also `finish`."""
        from .contract import function_text, write_tile

        em = emitter.child()
        first = list(enumerate(self.outputs))[: 1 if folded else None]
        for k in range(len(first) or 1):
            access = emitter.accesses[k]
            able = can_store(self.target, [(access.dtype, access.size)])
            access.paired = able and self._paired(Emitter((), {}), k)
        at, em.lanes = self._places(em)
        value = Value("value", vector=True)
        if not self.outputs:
            em.store(0, at, value, self.dot.dtype)
        elif folded:
            em.store(0, turned(self.a.space[self.outputs[0]], at), value, f32)
        else:
            em.bound[self.dot], em.held = value, emitter.held
            write_tile(em, self.a, first, at)
        given = ", ".join(f"{name}: u32" for name in (*AXES, *(f"same_{x}" for x in AXES)))
        emitter.functions["store_turn"] = function_text(
            f"store_turn({given}, value: vec4<f32>)", em
        )
        if folded:
            self._finish(emitter)

    def _finish(self, emitter: Emitter) -> None:
        from .contract import coordinates, function_text, write_tile

        em = emitter.child()
        at = flatten(coordinates(em, AXES, self.extents, 2), self.extents)
        em.bound[self.dot], em.held = Value("value", vector=True), emitter.held
        write_tile(em, self.a, list(enumerate(self.outputs))[1:], at)
        out = self.outputs[0]
        where = unflatten(turned(self.a.space[out], at), out.shape)
        em.line(f"return {em.splat(em.value(out, where), f32, True)};")
        given = ", ".join(f"{name}: u32" for name in AXES)
        signature = f"finish({given}, value: vec4<f32>) -> vec4<f32>"
        emitter.functions["finish"] = function_text(signature, em)

    def _paired(self, em: Emitter, k: int) -> bool:
        """Whether pairs of lanes have neighbours of output k."""
        at, lanes = self._places(em)
        if self.outputs:
            out = self.outputs[k]
            at = turned(self.a.space[out], at)
            if not aligned(at, out.type.size):
                return False
        return lanes.places(at, LANE) is not None

    def _places(self, em: Emitter) -> tuple[Index, Lanes]:
        """The position in the product that a lane has, and what it is for each of them."""
        from .contract import coordinates

        at = flatten(coordinates(em, AXES, self.extents, 2), self.extents)
        batch, rows, columns = self.extents
        same = {
            "batch": em.variable("same_batch", batch),
            "m": em.variable("same_m", rows),
        }
        wide = 4 * self.lanes
        first = em.variable("same_quad", columns // wide, f"same_n / {wide}u")
        each = [same | {"quad": first * self.lanes + index(k)} for k in range(self.lanes)]
        return at, Lanes(tuple(each))


def store_text(coords: Sequence[str], same: Sequence[str], value: str) -> str:
    """The call of `store_turn` for a lane's vec4 at `coords`, in a tile at `same`."""
    return f"store_turn({', '.join((*coords, *same, value))});"


def finish_text(coords: Sequence[str], value: str) -> str:
    """The call of `finish`."""
    return f"finish({', '.join((*coords, value))})"
