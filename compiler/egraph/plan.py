"""A draft of the program: chosen e-nodes, stored classes and their kernels, changed by
transactions.

`choice[c]` is the e-node of class c, `kern[c]` the kernel that stores it or -1. A live class that
no kernel stores is computed inside every kernel that reaches it; one that is stored is read by the
others, but for kernels k with it in `own[k]`, which compute it again. Each operand of a kernel is a
leaf or stored, each output is a root or read by another kernel, and the graph of kernels is
acyclic: the cost of the draft is the sum of its kernels' prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ..errors import IRError
from .graph import LEAF, VIEW, Problem
from .price import Priced, Pricer

NEW = -1  # a kernel of its own, in Move.put


class Move(NamedTuple):
    """A change to try: other e-nodes, classes no longer stored, classes stored by a kernel, classes
    stored by a new kernel together, kernels made one, classes that a kernel computes on its own."""

    flips: tuple[tuple[int, int], ...] = ()
    drop: tuple[int, ...] = ()
    put: tuple[tuple[int, int], ...] = ()
    together: tuple[int, ...] = ()
    merge: tuple[int, int] | None = None
    own: tuple[tuple[int, int], ...] = ()


class Mark(NamedTuple):
    """A place in a draft's history to return to."""

    length: int
    cost: float
    next_kernel: int
    tick: int


class Draft:
    """See the module. `touched` holds the classes around the last accepted move and `before` what
    the kernels that it changed cost before it, `loss` what the last rejected one would have cost
    and the price of the kernels it would have changed."""

    def __init__(self, p: Problem, pricer: Pricer, choice: Sequence[int]) -> None:
        self.p, self.pricer, self.choice = p, pricer, list(choice)
        self.kern = [-1] * p.classes
        self.kernels: dict[int, Priced] = {}
        self.own: dict[int, tuple[int, ...]] = {}  # of kernels, what they compute though stored
        # the kernels that compute a class, and those that read it
        self.inside: list[set[int]] = [set() for _ in range(p.classes)]
        self.readers: list[set[int]] = [set() for _ in range(p.classes)]
        # of kernels, each after those it reads from
        self.order: dict[int, tuple[int, int]] = {}
        self.cost, self.next_kernel, self.tick = 0.0, 0, 0
        self.must: dict[int, int] = {}  # classes that outputs of the program lie in
        self.chain: set[int] = set()  # the views between these and the outputs
        self.log: list[tuple[str, Any, Any]] = []
        self.touched: set[int] = set()
        self.before = 0.0
        self.loss: tuple[float, float] | None = None
        # the e-nodes that the kernel stores which made the last move illegal, if one did
        self.refused: list[int] = []
        self.find_roots()

    def priced_by(self, pricer: Pricer) -> None:
        """Price all kernels anew, by a pricer of the same problem with other rates."""
        self.pricer, self.cost = pricer, 0.0
        for k, old in self.kernels.items():
            priced = pricer.price(old.outs, self.choice, self.kern, self.own.get(k, ()))
            if priced is None:
                raise IRError("other rates make a kernel illegal")
            self.kernels[k] = priced
            self.cost += priced.cost

    # -- outputs: a view of a value lies where the value lies

    def find_roots(self) -> bool:
        """Follow views from the outputs to the values below them; False when they go in circles."""
        p, must, chain = self.p, dict[int, int](), set[int]()
        for c in p.roots:
            path = {c}
            while p.role[self.choice[c]] == VIEW:
                c = p.kids[self.choice[c]][0]
                if c in path:
                    return False
                path.add(c)
            chain |= path
            if p.role[self.choice[c]] != LEAF:
                must[c] = must.get(c, 0) + 1
        self.log.append(("roots", self.must, self.chain))
        self.must, self.chain = must, chain
        return True

    # -- primitive changes, each with its inverse in the log

    def choose(self, c: int, n: int) -> None:
        self.log.append(("choose", c, self.choice[c]))
        self.choice[c] = n

    def place(self, c: int, k: int) -> None:
        self.log.append(("place", c, self.kern[c]))
        self.kern[c] = k

    def owns(self, k: int, classes: Iterable[int]) -> None:
        """Let kernel k compute classes that other kernels store."""
        self.log.append(("own", k, self.own.get(k, ())))
        self.own[k] = tuple(sorted({*self.own.get(k, ()), *classes}))

    def link(self, k: int, priced: Priced) -> None:
        self.log.append(("link", k, None))
        self._link(k, priced)

    def unlink(self, k: int) -> Priced:
        priced = self._unlink(k)
        self.log.append(("unlink", k, priced))
        return priced

    def rank(self, k: int, position: tuple[int, int] | None) -> None:
        self.log.append(("rank", k, self.order.get(k)))
        if position is None:
            self.order.pop(k, None)
        else:
            self.order[k] = position

    def _link(self, k: int, priced: Priced) -> None:
        self.kernels[k] = priced
        self.cost += priced.cost
        for c in priced.body:
            self.inside[c].add(k)
        for c in priced.operands:
            self.readers[c].add(k)

    def _unlink(self, k: int) -> Priced:
        priced = self.kernels.pop(k)
        self.cost -= priced.cost
        for c in priced.body:
            self.inside[c].discard(k)
        for c in priced.operands:
            self.readers[c].discard(k)
        return priced

    def new_kernel(self) -> int:
        self.next_kernel += 1
        return self.next_kernel - 1

    # -- transactions

    def mark(self) -> Mark:
        return Mark(len(self.log), self.cost, self.next_kernel, self.tick)

    def commit(self) -> None:
        self.log.clear()

    def rollback(self, mark: Mark) -> None:
        """Undo everything since `mark`, exactly."""
        log = self.log
        while len(log) > mark.length:
            what, a, b = log.pop()
            if what == "place":
                self.kern[a] = b
            elif what == "link":
                self._unlink(a)
            elif what == "unlink":
                self._link(a, b)
            elif what == "choose":
                self.choice[a] = b
            elif what == "own":
                self.own[a] = b
            elif what == "roots":
                self.must, self.chain = a, b
            elif b is None:
                self.order.pop(a, None)
            else:
                self.order[a] = b
        self.cost, self.next_kernel, self.tick = mark.cost, mark.next_kernel, mark.tick

    # -- the order of kernels
    # (Pearce and Kelly, A dynamic topological sort algorithm for directed acyclic graphs)

    def sort(self, changed: Iterable[int]) -> bool:
        """Bring kernels with new edges into order; False when there is a cycle."""
        kern, order = self.kern, self.order
        for k in changed:
            for o in self.kernels[k].operands:
                a = kern[o]
                if a >= 0 and (a == k or order[a] >= order[k]) and not self._after(a, k):
                    return False
            for c in self.kernels[k].outs:
                for q in sorted(self.readers[c]):
                    if (q == k or order[k] >= order[q]) and not self._after(k, q):
                        return False
        return True

    def _after(self, a: int, b: int) -> bool:
        """Move b and what follows it behind a; False when a follows b."""
        order = self.order
        if a == b:
            return False
        if order[a] < order[b]:
            return True
        low, high = order[b], order[a]
        forward, stack = {b}, [b]
        while stack:
            for c in self.kernels[stack.pop()].outs:
                for q in self.readers[c]:
                    if q == a:
                        return False
                    if q not in forward and low <= order[q] <= high:
                        forward.add(q)
                        stack.append(q)
        backward, stack = {a}, [a]
        while stack:
            for o in self.kernels[stack.pop()].operands:
                q = self.kern[o]
                if q >= 0 and q not in backward and low <= order[q] <= high:
                    backward.add(q)
                    stack.append(q)
        moved = sorted(backward, key=order.__getitem__) + sorted(forward, key=order.__getitem__)
        for k, position in zip(moved, sorted(order[k] for k in moved), strict=True):
            self.rank(k, position)
        return True

    def check(self) -> float:
        """The cost, all recomputed from scratch. Raises IRError when an invariant is broken."""

        def need(condition: object, what: str) -> None:
            if not condition:
                raise IRError(f"extraction's draft is broken: {what}")

        p, total = self.p, 0.0
        for k, priced in self.kernels.items():
            again = self.pricer.price(priced.outs, self.choice, self.kern, self.own.get(k, ()))
            need(again == priced, f"the price of kernel {k} is stale")
            total += priced.cost
            for o in priced.operands:
                need(
                    self.kern[o] >= 0 or p.role[self.choice[o]] == LEAF,
                    f"operand {o} of kernel {k} is not stored",
                )
            for o in priced.outs:
                need(self.kern[o] == k, f"output {o} of kernel {k} is not its own")
                need(self.readers[o] or o in self.must, f"nobody reads output {o} of kernel {k}")
        need(all(self.kern[c] >= 0 for c in self.must), "a result is not stored")
        need(
            abs(total - self.cost) < 1e-3 * max(1.0, total),
            f"cost {self.cost}, sum of kernels {total}",
        )
        need(len(self.kernel_order()) == len(self.kernels), "kernels wait for each other")
        return total

    def kernel_order(self) -> list[int]:
        """Kernels, each after those it reads from; shorter than `kernels` when there is a cycle."""
        waits = {
            k: len({self.kern[o] for o in v.operands if self.kern[o] >= 0})
            for k, v in self.kernels.items()
        }
        ready = sorted((k for k, n in waits.items() if n == 0), reverse=True)
        out: list[int] = []
        while ready:
            k = ready.pop()
            out.append(k)
            for q in sorted(
                {q for c in self.kernels[k].outs for q in self.readers[c]}, reverse=True
            ):
                waits[q] -= 1
                if waits[q] == 0:
                    ready.append(q)
        return out
