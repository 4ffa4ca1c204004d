"""Whole programs that extraction did not choose: alternative e-nodes forced, and one step away from
the chosen kernels. Timing them shows whether the cost model is right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..collector import no_collector
from ..ir import Graph
from ..schedule.selection import Group, Selection
from ..schedule.target import Target
from .anchor import Anchor, AnchorCost
from .explain import alternatives_of, describe, force
from .extract import decode, donated_classes, improve, separated, two_step
from .graph import Problem, problem
from .moves import MoveKind
from .orbits import colors
from .plan import Draft
from .price import Pricer
from .search import Search
from .snapshot import Snapshot
from .step import trial

STEPS: tuple[MoveKind, ...] = ("inline", "merge", "sibling", "put", "store", "split")


@dataclass(frozen=True, slots=True)
class Alternative:
    """A program by another name than the chosen one, and its ns by the cost model."""

    name: str
    selection: Selection
    predicted_ns: float


@dataclass(slots=True)
class Forced:
    """A program's search, finished. `chosen` is what extraction takes."""

    graph: Graph
    target: Target
    search: Search
    chosen: Alternative

    def others(self, most: float = 4.0) -> Iterator[Alternative]:
        """Every other program found, those left out that are predicted to take `most` times as
        long; some may be equal to others."""
        yield from self._without_search()
        limit = most * self.chosen.predicted_ns
        for name, found in (*self._flips(), *self._steps()):
            if found.predicted_ns <= limit:
                yield Alternative(name, found.selection, found.predicted_ns)

    def predicted(
        self, group: Group, busy: float = 1.0, launches: int = 0, staged: bool | None = None
    ) -> float:
        """ns of the chosen program with a group's heavy op at `busy` times its time and so many
        dispatches more, or with its rows reduced by two kernels or one."""
        d = self.search.draft
        k = d.kern[self.chosen.selection.classes[group.outputs[0]]]
        pricer = _Rated(d.p, self.target, busy, launches, staged)
        priced = pricer.price(d.kernels[k].outs, d.choice, d.kern, d.own.get(k, ()))
        assert priced is not None
        return self.chosen.predicted_ns + priced.cost - d.kernels[k].cost

    def _without_search(self) -> Iterator[Alternative]:
        p, pricer = self.search.p, self.search.draft.pricer
        yield _program("greedy, then fused", two_step(p, pricer, colors(p)), self.graph)
        yield _program("a kernel for each op", separated(p, pricer), self.graph)

    def _flips(self) -> Iterator[tuple[str, Alternative]]:
        """Another e-node for a class, with the best kernels around it."""
        d, p = self.search.draft, self.search.p
        for c in p.live:
            if not self.search.moves.is_live(c):
                continue
            for n in alternatives_of(d, c):
                if any(d.choice[k] < 0 for k in p.kids[n]):
                    continue
                name = describe(d, n)
                mark = d.mark()
                if force(d, c, n):
                    touched = set(d.touched)
                    self.search.descend(sorted(x for x in touched if d.kern[x] >= 0), touched)
                    if d.choice[c] == n:
                        yield name, _program(name, d, self.graph)
                d.rollback(mark)

    def _steps(self) -> Iterator[tuple[str, Alternative]]:
        """One move away from the chosen kernels."""
        d, p = self.search.draft, self.search.p
        self.search.moves.refresh()
        for kind in STEPS:
            for c in p.live:
                if not self.search.moves.is_live(c):
                    continue
                name = f"{kind} {describe(d, d.choice[c])}"
                for _, move in list(self.search.moves.around(c, kind)):
                    mark = d.mark()
                    if trial(d, move, force=True):
                        yield name, _program(name, d, self.graph)
                    d.rollback(mark)


class _Rated(Pricer):
    """Prices a heavy op at another rate and number of dispatches."""

    def __init__(
        self, p: Problem, target: Target, busy: float, launches: int, staged: bool | None
    ) -> None:
        super().__init__(p, target, staged)
        self._busy, self._launches = busy, launches

    def anchor(self, a: Anchor) -> AnchorCost | None:
        cost = super().anchor(a)
        if cost is None:
            return None
        return cost._replace(busy=cost.busy * self._busy, launches=cost.launches + self._launches)


def forced(snapshot: Snapshot, target: Target, graph: Graph, effort: int = 6) -> Forced:
    """The search for `graph`'s program on a target, ready to be led elsewhere."""
    with no_collector():
        p = problem(snapshot, target.max_bindings, donated=donated_classes(snapshot, graph))
        search, _ = improve(p, Pricer(p, target), effort)
    return Forced(graph, target, search, _program("chosen", search.draft, graph))


def _program(name: str, draft: Draft, graph: Graph) -> Alternative:
    return Alternative(name, decode(draft, graph), draft.cost)
