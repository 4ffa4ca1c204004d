"""The judge of extraction on small graphs: every legal kernel is enumerated, then HiGHS picks the
cheapest set.

Each kernel may choose its own e-nodes, so the optimum is a lower bound on what extraction can find.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from eggpu.compiler.egraph.graph import CONTRACT, GET, LEAF, RED, STORABLE, VIEW, Problem
from eggpu.compiler.egraph.greedy import node_costs
from eggpu.compiler.egraph.orbits import colors
from eggpu.compiler.egraph.price import Pricer
from eggpu.compiler.egraph.search import Effort, Search
from eggpu.compiler.egraph.start import start

STORED = 0  # the number of "some other kernel", during enumeration


@dataclass(frozen=True)
class Option:
    """A legal kernel at the least price for its outputs and operands."""

    outs: tuple[int, ...]
    operands: frozenset[int]
    cost: float


def tree_cost(p: Problem, pricer: Pricer) -> float:
    """The cost of the usual way: e-nodes of least tree cost, which counts what is shared once for
    each reader; then kernels by fusion."""
    cost = node_costs(p, pricer, fused=False)
    total: dict[int, float] = {}
    choice = [nodes[0] if len(nodes) == 1 else -1 for nodes in p.candidates]
    changed = True
    while changed:
        changed = False
        for c in p.live:
            for n in p.candidates[c]:
                if any(k not in total for k in p.kids[n]):
                    continue
                price = cost[n] + sum(total[k] for k in set(p.kids[n]))
                if c not in total or price < total[c] - 1e-9 * abs(price):
                    total[c], choice[c], changed = price, n, True
    search = Search(start(p, pricer, choice), Effort(kicks=()), colors(p))
    for kind in ("inline", "merge", "sibling"):
        search.sweep(kind)
    return search.draft.cost


def best_cost(p: Problem, pricer: Pricer, outputs: int = 2, limit: int = 1_000_000) -> float:
    """The least total cost of kernels with at most `outputs` outputs. MemoryError beyond `limit`
    kernels tried."""
    options = _undominated(_Enumeration(p, pricer, limit).run(outputs))
    return _solve(p, options)


class _Enumeration:
    def __init__(self, p: Problem, pricer: Pricer, limit: int) -> None:
        self.p, self.pricer, self.left = p, pricer, limit
        self.choice = [-1] * p.classes
        self.kern = [-1] * p.classes
        self.best: dict[tuple[tuple[int, ...], frozenset[int]], float] = {}
        self.storable = [c for c in p.live if any(p.role[n] in STORABLE for n in p.candidates[c])]
        known = set(self.storable)
        roots = (_base(p, r) for r in p.roots)
        self.storable += [r for r in dict.fromkeys(roots) if r not in known and not _is_leaf(p, r)]

    def run(self, outputs: int) -> list[Option]:
        for count in range(1, outputs + 1):
            for outs in combinations(self.storable, count):
                self._kernels(outs)
        return [Option(outs, operands, cost) for (outs, operands), cost in self.best.items()]

    def _kernels(self, outs: tuple[int, ...]) -> None:
        for _ in self._expand(outs, outs, frozenset()):
            priced = self.pricer.price(outs, self.choice, self.kern)
            if priced is not None:
                key = outs, frozenset(priced.operands)
                self.best[key] = min(self.best.get(key, np.inf), priced.cost)

    def _expand(
        self, agenda: tuple[int, ...], outs: tuple[int, ...], anchors: frozenset[int]
    ) -> Iterator[None]:
        """Every way to store or compute what is on the agenda; `anchors` are patterns, or the one
        other anchor."""
        p = self.p
        while agenda and (self.choice[agenda[-1]] >= 0 or self.kern[agenda[-1]] == STORED):
            agenda = agenda[:-1]
        if not agenda:
            self.left -= 1
            if self.left < 0:
                raise MemoryError("too many kernels to enumerate")
            yield
            return
        c, rest = agenda[-1], agenda[:-1]
        if c not in outs and c in self.storable:
            # the walk asks for the role of a stored class too: any of its e-nodes will do
            self.kern[c], self.choice[c] = STORED, p.candidates[c][0]
            yield from self._expand(rest, outs, anchors)
            self.kern[c], self.choice[c] = -1, -1
        for n in p.candidates[c]:
            new = anchors | self._anchor(c, n)
            if len(new) > 1 and (min(new) < 0 or len(new) > 2):
                continue
            self.choice[c] = n
            yield from self._expand(rest + p.kids[n], outs, new)
            self.choice[c] = -1

    def _anchor(self, c: int, n: int) -> frozenset[int]:
        role = self.p.role[n]
        if role == RED:
            return frozenset([self.p.mark[n]])
        if role in (CONTRACT, GET):
            return frozenset([-1 - (c if role == CONTRACT else self.p.kids[n][0])])
        return frozenset()


def _undominated(options: list[Option]) -> list[Option]:
    """Without kernels that read more than another of the same outputs and cost no less."""
    by_outs: dict[tuple[int, ...], list[Option]] = {}
    for option in sorted(options, key=lambda o: (o.cost, len(o.operands), sorted(o.operands))):
        kept = by_outs.setdefault(option.outs, [])
        if not any(other.operands <= option.operands for other in kept):
            kept.append(option)
    return [o for kept in by_outs.values() for o in kept]


def _is_leaf(p: Problem, c: int) -> bool:
    return all(p.role[n] == LEAF for n in p.candidates[c])


def _base(p: Problem, c: int) -> int:
    while all(p.role[n] == VIEW for n in p.candidates[c]):
        c = p.kids[p.candidates[c][0]][0]
    return c


def _solve(p: Problem, options: list[Option]) -> float:
    """Kernels x, stored classes s: s[o] >= x for its operands o; the x that store c add up to s[c].

    Stored values that wait for each other are forbidden when they turn up in a solution.
    """
    classes = sorted({c for o in options for c in o.outs})
    place = {c: len(options) + i for i, c in enumerate(classes)}
    size = len(options) + len(classes)
    rows: list[dict[int, float]] = []
    low_high: list[tuple[float, float]] = []

    def add(row: dict[int, float], low: float, high: float) -> None:
        rows.append(row)
        low_high.append((low, high))

    for j, option in enumerate(options):
        for o in sorted(option.operands & place.keys()):
            add({place[o]: 1, j: -1}, 0, np.inf)
    for c in classes:
        add({place[c]: -1} | {j: 1 for j, o in enumerate(options) if c in o.outs}, 0, 0)
    least, cost, integer = np.zeros(size), np.zeros(size), np.zeros(size)
    cost[: len(options)], integer[: len(options)] = [o.cost for o in options], 1
    roots = (_base(p, root) for root in p.roots)
    least[[place[r] for r in roots if not _is_leaf(p, r)]] = 1
    while True:
        entries = [(v, i, j) for i, row in enumerate(rows) for j, v in row.items()]
        values, at, columns = zip(*entries, strict=True)
        matrix = coo_matrix((values, (at, columns)), shape=(len(rows), size)).tocsr()
        found = milp(
            cost,
            constraints=LinearConstraint(matrix, *zip(*low_high, strict=True)),
            bounds=Bounds(least, 1),
            integrality=integer,
            options={"mip_rel_gap": 1e-6, "time_limit": 60},
        )
        assert found.success, found.message
        cycle = _cycle([options[j] for j in range(len(options)) if found.x[j] > 0.5])
        if not cycle:
            return float(found.fun)
        row: dict[int, float] = {}
        for out, operand in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
            for j, o in enumerate(options):
                if out in o.outs and operand in o.operands:
                    row[j] = row.get(j, 0) + 1
        add(row, -np.inf, len(cycle) - 1)


def _cycle(chosen: list[Option]) -> list[int]:
    """A short cycle of stored classes, each computed from the next one; or none."""
    reads = {c: sorted(o.operands) for o in chosen for c in o.outs}
    best: list[int] = []
    for first in sorted(reads):
        before: dict[int, int] = {}
        queue = [first]
        for c in queue:  # breadth first, grows while it is walked
            for o in reads[c]:
                if o == first:
                    path = [c]
                    while path[-1] != first:
                        path.append(before[path[-1]])
                    if not best or len(path) < len(best):
                        best = path[::-1]
                elif o in reads and o not in before:
                    before[o] = c
                    queue.append(o)
    return best
