"""The steps of a row: the places at which an invocation has something to do, in a loop, written
out, and at the ends of a row that are no whole vec4s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..index import Index, index, variable
from .emitter import Emitter
from .geometry import Geometry
from .statements import V, Value


@dataclass(frozen=True, slots=True)
class Step:
    """A place in a row where a pass has something to do: `present` is a WGSL bool, None when always
    so. `flat` is where it is in memory, if that is not told by the row and the position."""

    position: Index
    present: Value | None = None
    tail: bool = False
    flat: Index | None = None


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of an invocation that is number `thread` of those that have a row, or a segment of
    it, together."""

    em: Emitter
    g: Geometry
    thread: Index
    segment: Index

    def bounds(self) -> tuple[str, str]:
        """The first step of a loop, and the one after the last."""
        em, g = self.em, self.g
        start, stop = "0u", "fours" if g.within else f"{g.steps}u"
        if g.segments > 1:
            start = em.index(self.segment * g.share).text
            stop = em.let("stop", "stop", f"min({start} + {g.share}u, {g.steps}u)", 0, False).text
        if g.T == 1:
            return start, stop
        if start == "0u":
            return "thread", stop
        return em.let("start", "start", f"{start} + thread", 0, False).text, stop

    def of_round(self) -> list[Step]:
        """The steps of one round of a loop."""
        g = self.g
        if g.within:
            quad = self.em.variable("quad", g.rows * g.length // 4, "first + j") * 4 + V
            return [Step(quad, flat=quad)]
        if g.unroll == 1 or g.T > 1:
            j = self.em.variable("j", g.steps - (g.unroll - 1) * g.T)
            places = [j + u * g.T for u in range(g.unroll)]
        else:
            quad = self.em.variable("quad", g.steps // g.unroll, f"j / {g.unroll}u")
            places = [quad * g.unroll + u for u in range(g.unroll)]
        return [Step(j * 4 + V if g.wide and g.along else j) for j in places]

    def written_out(self) -> Iterator[Step]:
        """All steps, for a row that needs no loop."""
        g, em = self.g, self.em
        for u in range(g.trips):
            j, present = self.thread + u * g.T, None
            if (u + 1) * g.T > g.steps:
                at = em.index(j)
                present = em.known(("present", u)) or em.let(
                    ("present", u), "present", f"{at.text} < {g.steps}u", 0, False
                )
                near = em.known(("near", u)) or em.let(
                    ("near", u), "near", f"min({at.text}, {g.steps - 1}u)", 0, False
                )
                em.variables[near.text] = near
                j = variable(near.text, g.steps)
            yield Step(j * 4 + V if g.wide and g.along else j, present)
        yield from self.ends()

    # ---- single elements

    def begin_within(self, row: Index) -> None:
        """Variables for a row that begins within a vec4: elements before the first whole one, the
        number of the first, how many there are, elements at both ends, and this lane's one."""
        em, size = self.em, self.g.length
        em.parts = True
        begin, head = em.index(row * size), em.index(row * (size * 3) % 4)
        em.line(f"let first = ({begin.text} + {head.text}) / 4u;")
        em.line(f"let fours = ({size}u - {head.text}) / 4u;")
        em.line(f"let ends = {size}u - fours * 4u;")
        far = f"min({size}u + thread - ends, {size - 1}u)"
        em.variable("end", size, f"select({far}, thread, thread < {head.text})")

    def ends(self) -> Iterator[Step]:
        """The elements before the first and after the last vec4 of a row; of a row in segments, the
        last segment has them."""
        g, em = self.g, self.em
        if not g.tail:
            return
        if g.within:
            yield Step(variable("end", g.length), Value("thread < ends"), tail=True)
            return
        last = []
        if g.segments > 1:
            last = [f"{em.index(self.segment).text} == {g.segments - 1}u"]
        if g.T == 1:
            present = self._present(last)
            for k in range(g.tail):
                yield Step(index(4 * g.steps + k), present, tail=True)
            return
        present = self._present([*last, f"thread < {g.tail}u"])
        near = em.known("tail") or em.let("tail", "near", f"min(thread, {g.tail - 1}u)", 0, False)
        em.variables[near.text] = near
        yield Step(variable(near.text, g.tail) + 4 * g.steps, present, tail=True)

    def _present(self, conditions: Sequence[str]) -> Value | None:
        if not conditions:
            return None
        text = " && ".join(conditions)
        return self.em.known(text) or self.em.let(text, "present", text, 0, False)
