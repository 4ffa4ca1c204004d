"""Stores of a subgroup on llvmpipe, a lane after the other, at addresses that all lanes share.

llvmpipe stores what each lane has at an address of its own in a loop over the lanes. Where it knows
that an address is one for all of them it writes a value at once, which takes half the time: outside
of all control flow, where the address is made of constants and immediates. So an address is found
from the number of the subgroup's tile, whose digits are looked up in immediates that hold the
numbers 0 to 31. (Vulkan demands what llvmpipe trusts in: that all lanes look up the same place.)
Each store is of two lanes' vec4, as four u64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..index import Index, index
from ..schedule.lanes import PAIR

if TYPE_CHECKING:
    from .emitter import Emitter
    from .statements import Value

ELEMENT = "vec4<u64>"
_NUMBERS = 32  # in the immediates


@dataclass(frozen=True, slots=True)
class Lanes:
    """What the variables of an index are for each lane of a subgroup: numbers, or variables that
    are made of immediates and constants only."""

    each: tuple[Mapping[str, Index], ...]

    def places(self, flat: Index, lane: str) -> list[Index] | None:
        """Where pairs of lanes store vec4s along the variable `lane` that are at `flat`, in eights
        of elements; None if they are not neighbours in memory."""
        at = [flat.substitute({**values, lane: index(0)}) for values in self.each]
        pairs = list(zip(at[::2], at[1::2], strict=True))
        if any(b != a + 4 or not a.divisible(PAIR) for a, b in pairs):
            return None
        return [
            Index(tuple((x, c // PAIR) for x, c in a.terms), a.constant // PAIR) for a, _ in pairs
        ]


def digits(count: int) -> int:
    """How many numbers of the immediates make up a number below `count`."""
    found = 1
    while _NUMBERS**found < count:
        found += 1
    return found


def store(em: Emitter, k: int, places: Sequence[Index], value: Value) -> None:
    """Store the vec4 of each lane to output k, for two lanes at each of the places."""
    bits, pair = em.fresh("bits"), em.fresh("pair")
    em.line(f"let {bits} = bitcast<vec4<u32>>({value.text});")
    halves = (f"u64({bits}.{low}) | (u64({bits}.{high}) << 32u)" for low, high in ("xy", "zw"))
    em.line(f"let {pair} = vec2<u64>({', '.join(halves)});")
    for number, place in enumerate(places):
        parts = (
            f"subgroupShuffle({pair}.{half}, {lane}u)"
            for lane in (2 * number, 2 * number + 1)
            for half in "xy"
        )
        em.line(f"${k}[{em.index(place).text}] = {ELEMENT}({', '.join(parts)});")
