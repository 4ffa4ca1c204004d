"""Results of a call that the next call of the same plan takes over as they lie: no buffer is made
for each of them unless somebody asks for one.

A training step takes and returns hundreds of values in the same memory. Between two kernels' work
the processor's caches hold none of the objects that stand for them, so that each costs a step as
much as dozens of instructions.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ..compiler.schedule.plan import Buffer, Plan
from .buffers import DeviceBuffer, Slab, Storage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .executor import Executable


class Handed:
    """The first results of a call of a plan, which lie where the plan wants its first arguments."""

    __slots__ = ("_buffers", "_call", "_owns", "executable", "packs", "spots")

    def __init__(
        self, executable: Executable, spots: dict[int, tuple[Storage, int]], packs: list[Slab]
    ) -> None:
        """`spots` by buffer of the plan are of arguments in memory of their own."""
        self.executable = executable
        self.spots, self.packs = spots, packs
        self._buffers: list[DeviceBuffer] | None = None  # once somebody has asked for them
        self._call = ""  # that took the values over
        self._owns = True

    @property
    def whole(self) -> bool:
        """Whether a call can take the values over. Needs the device's lock."""
        return self._owns

    def taken(self, call: str) -> Handed:
        """The memory for the results of the call that wrote over the values. Needs the lock."""
        after = Handed(self.executable, self.spots, self.packs)
        self._call = call
        self._let_go()
        return after

    def buffers(self) -> list[DeviceBuffer]:
        """One for each value; uses of those of values that were taken over raise DonatedError."""
        with self.executable.device.lock:
            if self._buffers is None:
                plan = self.executable.plan
                inputs = enumerate(plan.inputs[: self.executable.cycle])
                self._buffers = [self._made(i, plan.buffers[b], b) for i, b in inputs]
                self._let_go()
            return self._buffers

    def _let_go(self) -> None:
        self._owns, self.spots, self.packs = False, {}, []

    def _made(self, i: int, value: Buffer, number: int) -> DeviceBuffer:
        """A buffer for result i, which is the plan's buffer of that number as an argument."""
        device = self.executable.device
        match value.place:
            case _ if self._call:
                return DeviceBuffer.gone_to(device, value.nbytes, self._call, i)
            case ("pack", p, offset):
                slab = self.packs[int(p)]
                return DeviceBuffer(device, slab.storage, value.nbytes, int(offset), slab)
            case _:
                storage, offset = self.spots[number]
                return DeviceBuffer(device, storage, value.nbytes, offset)

    def __del__(self) -> None:
        # only an append, as of buffers
        with suppress(AttributeError):
            if self._owns:
                returned = self.executable.device.pool.returned
                returned.extend([storage for storage, _ in self.spots.values()])


def hand(executable: Executable, results: Sequence[DeviceBuffer]) -> Handed | None:
    """The first results of a call, taken from buffers that nobody has seen; None where they do not
    lie as arguments of the next call would."""
    plan = executable.plan
    first = results[: executable.cycle]
    spots: dict[int, tuple[Storage, int]] = {}
    packs: dict[int, Slab] = {}
    for b, buffer in zip(plan.inputs, first):
        match plan.buffers[b].place:
            case ("pack", p, _):
                assert buffer.slab is not None
                packs[int(p)] = buffer.slab
            case _ if buffer.slab is not None:
                return None
            case _:
                spots[b] = buffer.storage, buffer.offset
    for i, buffer in enumerate(first):
        buffer.disown(plan.name, i)
    return Handed(executable, spots, [packs[p] for p in range(len(plan.packs))])


def cycle(plan: Plan, written: set[int]) -> int:
    """How many of the first results lie where the arguments of their numbers lay, if nothing else
    stands in the way of handing them on: all that the call writes over is among them, and no other
    result lies there."""
    count = 0
    for i, (a, b) in enumerate(zip(plan.inputs, plan.outputs)):
        old, new = plan.buffers[a], plan.buffers[b]
        if i not in written or (old.place, old.nbytes) != (new.place, new.nbytes):
            break
        count += 1
    places = [plan.buffers[b].place for b in plan.outputs[count:]]
    among = any(p[0] == "pack" or (p[0] == "input" and p[1] < count) for p in places)
    apart = len(set(plan.outputs[:count])) == count
    return count if apart and not among and written <= set(range(count)) else 0
