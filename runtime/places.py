"""Where the arguments and results of a call lie: in buffers of their own, or side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from ..compiler.schedule.plan import Plan
from .buffers import DeviceBuffer, Slab, Storage
from .errors import DeviceError

if TYPE_CHECKING:
    from .device import Device

Move = tuple[Storage, int, Storage, int, int]  # from, offset, to, offset, bytes
Spot = tuple[Storage, int]  # memory and offset
_NBYTES, _DEVICE, _SLAB = attrgetter("nbytes"), attrgetter("device"), attrgetter("slab")
_STORAGE, _OFFSET = attrgetter("_storage"), attrgetter("offset")


@dataclass(slots=True)
class Places:
    """The memory of one call: `spots` by buffer of the plan (arguments and results outside of
    packs), a slab for each pack, buffers made for results, and copies to make before the kernels.
    """

    spots: dict[int, Spot] = field(default_factory=dict[int, Spot])
    packs: list[Slab] = field(default_factory=list[Slab])
    made: dict[int, DeviceBuffer] = field(default_factory=dict[int, DeviceBuffer])
    moves: list[Move] = field(default_factory=list[Move])


class Arguments:
    """Finds the memory of the calls of one plan; `written` are arguments that it writes over."""

    def __init__(self, plan: Plan, device: Device, written: set[int]) -> None:
        self.plan, self.device, self.written = plan, device, written
        self.sizes = [plan.buffers[b].nbytes for b in plan.inputs]
        self.members: list[list[tuple[int, int]]] = [[] for _ in plan.packs]  # argument, offset
        self.alone: list[tuple[int, int]] = []  # argument, buffer
        for i, b in enumerate(plan.inputs):
            match plan.buffers[b].place:
                case ("pack", p, offset):
                    self.members[p].append((i, offset))
                case _:
                    self.alone.append((i, b))
        self._alone = [i for i, _ in self.alone]
        self._alone_at = [b for _, b in self.alone]

    def place(self, buffers: Sequence[DeviceBuffer]) -> Places:
        """The memory of a call. Raises DonatedError, DeviceError or ValueError for a misfit."""
        spots = self._checked(buffers)
        found = Places(dict(zip(self._alone_at, map(spots.__getitem__, self._alone))))
        if not (self.members or self.written):
            return found
        others = set(map(_SLAB, map(buffers.__getitem__, self._alone))) - {None}
        for p, members in enumerate(self.members):
            slab = self._together(buffers, members, self.plan.packs[p])
            if slab is None or slab in others:
                slab = self._gather(buffers, members, self.plan.packs[p], found)
            found.packs.append(slab)
        if others and self.written:
            self._separate(buffers, found)
        return found

    def again(
        self,
        spots: dict[int, Spot],
        packs: Sequence[Slab],
        others: Sequence[DeviceBuffer],
    ) -> Places:
        """The memory of a call whose first arguments lie as its last one left them, and the others,
        which it does not write over, in these buffers. Raises as `place` does."""
        self.device.check()
        first = len(self.sizes) - len(others)
        found = Places(dict(spots), list(packs))
        for i, buffer in enumerate(others, first):
            if buffer.donated or buffer.device is not self.device or buffer.nbytes != self.sizes[i]:
                self._refuse(i, buffer)
            found.spots[self.plan.inputs[i]] = buffer.storage, buffer.offset
        return found

    def _checked(self, buffers: Sequence[DeviceBuffer]) -> list[Spot]:
        """The spots of all arguments, hundreds of a model's, so without a loop in Python."""
        if len(buffers) != len(self.sizes):
            name, needed = self.plan.name, len(self.sizes)
            raise ValueError(f"{name} needs {needed} buffers, got {len(buffers)}")
        sizes, storages = list(map(_NBYTES, buffers)), list(map(_STORAGE, buffers))
        spots = list(zip(storages, map(_OFFSET, buffers)))
        fits = sizes == self.sizes and set(map(_DEVICE, buffers)) <= {self.device}
        if not fits or None in storages:
            for i, buffer in enumerate(buffers):
                if (
                    buffer.nbytes != self.sizes[i]
                    or buffer.device is not self.device
                    or buffer.donated
                ):
                    self._refuse(i, buffer)
        if self.written and len(set(storages)) < len(storages) and len(set(spots)) < len(spots):
            self._refuse_shared(buffers)
        return spots  # type: ignore[return-value]

    def _refuse(self, i: int, buffer: DeviceBuffer) -> None:
        """Raises the error of an argument that does not fit."""
        needed = self.plan.buffers[self.plan.inputs[i]]
        _ = buffer.storage  # raises when it was donated
        if buffer.device is not self.device:
            raise DeviceError(
                f"argument {i} ({needed.name}) of {self.plan.name} needs a buffer of "
                f"{self.device}, got one of {buffer.device}"
            )
        raise ValueError(
            f"argument {i} ({needed.name}) of {self.plan.name} needs {needed.nbytes} bytes "
            f"for {needed.dtype}{list(needed.shape)}, got {buffer.nbytes}"
        )

    def _refuse_shared(self, buffers: Sequence[DeviceBuffer]) -> None:
        spots = [(b.storage, b.offset) for b in buffers]
        for i in sorted(self.written):
            for j, spot in enumerate(spots):
                if j != i and spot == spots[i]:
                    raise ValueError(
                        f"argument {i} of {self.plan.name} is written over, "
                        f"so its buffer cannot also be argument {j}"
                    )

    def _together(
        self, buffers: Sequence[DeviceBuffer], members: Sequence[tuple[int, int]], nbytes: int
    ) -> Slab | None:
        """The slab in which the members of a pack lie as the plan wants them, if they do."""
        slab = buffers[members[0][0]].slab
        if slab is None or slab.storage.capacity < nbytes:
            return None
        for i, offset in members:
            if buffers[i].slab is not slab or buffers[i].offset != offset:
                return None
        return slab

    def _gather(
        self,
        buffers: Sequence[DeviceBuffer],
        members: Sequence[tuple[int, int]],
        nbytes: int,
        found: Places,
    ) -> Slab:
        """A new slab for a pack, and the copies that fill it."""
        slab = Slab(self.device, self.device.pool.acquire(nbytes))
        for i, offset in members:
            old = buffers[i]
            found.moves.append((old.storage, old.offset, slab.storage, offset, old.nbytes))
        return slab

    def _separate(self, buffers: Sequence[DeviceBuffer], found: Places) -> None:
        """Moves arguments that are written over out of slabs: a kernel may not read one part of a
        buffer and write another."""
        for i, b in self.alone:
            old = buffers[i]
            if i in self.written and old.slab is not None:
                new = self.device.alloc(old.nbytes)
                found.made[b] = new
                found.spots[b] = new.storage, 0
                found.moves.append((old.storage, old.offset, new.storage, 0, old.nbytes))


def move(encoder: Any, moves: Sequence[Move]) -> None:
    """Records copies between buffers."""
    for source, start, target, offset, nbytes in moves:
        encoder.copy_buffer_to_buffer(source.gpu, start, target.gpu, offset, nbytes)
