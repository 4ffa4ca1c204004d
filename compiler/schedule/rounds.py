"""The rounds of a plan's loops: which kernels run when, and where a buffer lies in each round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

from .plan import Carry, Plan, Row

Rounds = Mapping[int, int]
"""The round of each loop that is under way, by the loop's number."""


class Loops:
    """The loops of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._views: dict[int, tuple[int, Row | Carry]] = {}
        for number, loop in enumerate(plan.loops):
            for row in loop.rows:
                self._views[row.buffer] = number, row
            for carry in loop.carries:
                self._views |= dict.fromkeys((carry.value, carry.after), (number, carry))

    def locate(self, buffer: int, rounds: Rounds) -> tuple[int, int]:
        """(the buffer that has a place of its own, the byte in it) at which a buffer begins."""
        start = 0
        while buffer in self._views:
            buffer, offset = self._under(buffer, rounds)
            start += offset
        return buffer, start

    def _under(self, buffer: int, rounds: Rounds) -> tuple[int, int]:
        """The buffer in which a view lies, and at which byte."""
        number, view = self._views[buffer]
        t = rounds[number]
        match view:
            case Row():
                return view.stack, view.start + t * view.step
            case Carry(value=value):
                t -= buffer == value
                return view.first if t < 0 else view.odd if t % 2 else view.even, 0

    def stack(self, buffer: int, rounds: Rounds) -> int | None:
        """The buffer of which a buffer is a row, in the last round of its loop."""
        while buffer in self._views:
            number, view = self._views[buffer]
            if isinstance(view, Row):
                last = rounds[number] == self.plan.loops[number].count - 1
                return view.stack if last else None
            buffer, _ = self._under(buffer, rounds)
        return None

    def bases(self, buffer: int) -> set[int]:
        """The buffers with a place of their own in which a buffer lies in some round."""
        if buffer not in self._views:
            return {buffer}
        match self._views[buffer][1]:
            case Row(stack=stack):
                return self.bases(stack)
            case Carry(value=value, first=first, even=even, odd=odd):
                places = (first, even, odd) if buffer == value else (even, odd)
                return {base for place in places for base in self.bases(place)}

    def around(self, kernel: int) -> list[int]:
        """The loops that a kernel is in, the outermost first."""
        return [r for r, loop in enumerate(self.plan.loops) if loop.start <= kernel < loop.stop]

    @cached_property
    def nested(self) -> dict[int, list[int]]:
        """The loops right inside each loop, and inside none (-1)."""
        found: dict[int, list[int]] = {r: [] for r in range(-1, len(self.plan.loops))}
        for r, loop in enumerate(self.plan.loops):
            outer = [
                q for q in range(r)
                if self.plan.loops[q].start <= loop.start and loop.stop <= self.plan.loops[q].stop
            ]  # fmt: skip
            found[outer[-1] if outer else -1].append(r)
        return found

    def schedule(self, most: int | None = None) -> Iterator[tuple[int, Rounds]]:
        """Every run of a kernel in order: its number and the rounds it is in.

        With `most`, of a longer loop only its first rounds and its last one.
        """
        yield from self._run(-1, 0, len(self.plan.kernels), {}, most)

    def _run(
        self, inside: int, start: int, stop: int, rounds: Rounds, most: int | None
    ) -> Iterator[tuple[int, Rounds]]:
        at = start
        for r in self.nested[inside]:
            loop = self.plan.loops[r]
            for k in range(at, loop.start):
                yield k, rounds
            for t in _rounds(loop.count, most):
                yield from self._run(r, loop.start, loop.stop, {**rounds, r: t}, most)
            at = loop.stop
        for k in range(at, stop):
            yield k, rounds

    def runs(self) -> list[int]:
        """How often each kernel runs in a call."""
        times = [1] * len(self.plan.kernels)
        for loop in self.plan.loops:
            for k in range(loop.start, loop.stop):
                times[k] *= loop.count
        return times


def _rounds(count: int, most: int | None) -> Iterator[int]:
    if most is None or count <= most:
        yield from range(count)
    else:
        yield from range(most - 1)
        yield count - 1
