"""A draft of the program: chosen e-nodes, stored classes and their kernels, changed by transactions.

`choice[c]` is the e-node of class c, `kern[c]` the kernel that stores it or -1. A live class that no kernel stores is
computed inside every kernel that reaches it. Each operand of a kernel is a leaf or stored, each output is a root or
read by another kernel, and the graph of kernels is acyclic: the cost of the draft is the sum of its kernels' prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import CompileError, IRError
from .graph import ANCHORS, BCAST, CONST, EW, GET, LEAF, MOVES, TRANS, TUP, VIEW, Problem
from .greedy import order_of
from .price import Priced, Pricer

NEW = -1  # a kernel of its own, in Move.put
MOST_DIRTY = 120  # kernels that one move may change
MOST_PRICED = 400  # kernels that one move may have priced
EPSILON = 1e-6  # ns


@dataclass(frozen=True, slots=True)
class Move:
    """A change to try: other e-nodes, classes no longer stored, classes stored by a kernel, kernels made one."""

    flips: tuple[tuple[int, int], ...] = ()
    drop: tuple[int, ...] = ()
    put: tuple[tuple[int, int], ...] = ()
    merge: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in a draft's history to return to."""

    length: int
    cost: float
    next_kernel: int
    tick: int


class Draft:
    """See the module. `touched` holds the classes around the last accepted move, `loss` what the last rejected one
    would have cost and the price of the kernels it would have changed."""

    def __init__(self, p: Problem, pricer: Pricer, choice: Sequence[int]) -> None:
        self.p, self.pricer, self.choice = p, pricer, list(choice)
        self.kern = [-1] * p.classes
        self.kernels: dict[int, Priced] = {}
        self.inside: list[set[int]] = [set() for _ in range(p.classes)]  # kernels that compute a class
        self.readers: list[set[int]] = [set() for _ in range(p.classes)]  # kernels that read it
        self.order: dict[int, tuple[int, int]] = {}  # of kernels, each after those it reads from
        self.cost, self.next_kernel, self.tick = 0.0, 0, 0
        self.must: dict[int, int] = {}  # classes that outputs of the program lie in
        self.chain: set[int] = set()  # the views between these and the outputs
        self.log: list[tuple[Any, ...]] = []
        self.touched: set[int] = set()
        self.loss: tuple[float, float] | None = None
        self.find_roots()

    # -- outputs: a view of a value lies where the value lies

    def find_roots(self) -> None:
        p, must, chain = self.p, dict[int, int](), set[int]()
        for c in p.roots:
            chain.add(c)
            while p.role[self.choice[c]] == VIEW:
                c = p.kids[self.choice[c]][0]
                chain.add(c)
            if p.role[self.choice[c]] != LEAF:
                must[c] = must.get(c, 0) + 1
        self.log.append(("roots", self.must, self.chain))
        self.must, self.chain = must, chain

    # -- primitive changes, each with its inverse in the log

    def choose(self, c: int, n: int) -> None:
        self.log.append(("choose", c, self.choice[c]))
        self.choice[c] = n

    def place(self, c: int, k: int) -> None:
        self.log.append(("place", c, self.kern[c]))
        self.kern[c] = k

    def link(self, k: int, priced: Priced) -> None:
        self.log.append(("link", k))
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
        while len(self.log) > mark.length:
            match self.log.pop():
                case ("choose", c, n):
                    self.choice[c] = n
                case ("place", c, k):
                    self.kern[c] = k
                case ("link", k):
                    self._unlink(k)
                case ("unlink", k, priced):
                    self._link(k, priced)
                case ("rank", k, None):
                    self.order.pop(k, None)
                case ("rank", k, position):
                    self.order[k] = position
                case ("roots", must, chain):
                    self.must, self.chain = must, chain
        self.cost, self.next_kernel, self.tick = mark.cost, mark.next_kernel, mark.tick

    def trial(self, move: Move, force: bool = False) -> bool:
        """Make a move if it is legal and cheaper (or legal, when forced); otherwise leave all as it was."""
        mark = self.mark()
        step = Step(self)
        self.loss = None
        if step.apply(move) and step.settle():
            gain = mark.cost - self.cost
            if not force and gain <= EPSILON:
                self.loss = -gain, sum(old.cost for old in step.old.values() if old)
            elif self.sort(step.finish()):
                self.touched = step.touched()
                return True
        self.rollback(mark)
        return False

    # -- the order of kernels (Pearce and Kelly, A dynamic topological sort algorithm for directed acyclic graphs)

    def sort(self, changed: Iterable[int]) -> bool:
        """Bring kernels with new edges into order; False when there is a cycle."""
        return all(
            self._after(a, b)
            for k in changed
            for a, b in (
                *((self.kern[o], k) for o in self.kernels[k].operands if self.kern[o] >= 0),
                *((k, q) for c in self.kernels[k].outs for q in sorted(self.readers[c])),
            )
        )

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
        """Recompute everything from scratch; the cost. Raises IRError when an invariant is broken."""

        def need(condition: object, what: str) -> None:
            if not condition:
                raise IRError(f"extraction's draft is broken: {what}")

        p, total = self.p, 0.0
        for k, priced in self.kernels.items():
            again = self.pricer.price(priced.outs, self.choice, self.kern)
            need(again == priced, f"the price of kernel {k} is stale")
            total += priced.cost
            for o in priced.operands:
                need(self.kern[o] >= 0 or p.role[self.choice[o]] == LEAF, f"operand {o} of kernel {k} is not stored")
            for o in priced.outs:
                need(self.kern[o] == k, f"output {o} of kernel {k} is not its own")
                need(self.readers[o] or o in self.must, f"nobody reads output {o} of kernel {k}")
        need(all(self.kern[c] >= 0 for c in self.must), "a result is not stored")
        need(abs(total - self.cost) < 1e-3 * max(1.0, total), f"cost {self.cost}, sum of kernels {total}")
        need(len(self.kernel_order()) == len(self.kernels), "kernels wait for each other")
        return total

    def kernel_order(self) -> list[int]:
        """Kernels, each after those it reads from; shorter than `kernels` when there is a cycle."""
        waits = {
            k: len({self.kern[o] for o in v.operands if self.kern[o] >= 0}) for k, v in self.kernels.items()
        }
        ready = sorted((k for k, n in waits.items() if n == 0), reverse=True)
        out: list[int] = []
        while ready:
            k = ready.pop()
            out.append(k)
            for q in sorted({q for c in self.kernels[k].outs for q in self.readers[c]}, reverse=True):
                waits[q] -= 1
                if waits[q] == 0:
                    ready.append(q)
        return out


class Step:
    """One move under way: kernels it made dirty are priced before any is linked, since most moves fail there."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.outs: dict[int, list[int]] = {}  # outputs of kernels touched so far
        self.old: dict[int, Priced | None] = {}
        self.dirty: set[int] = set()
        self.changed: set[int] = set()
        self.flipped: set[int] = set()
        self.revived: set[int] = set()
        self.tuples: dict[int, int] = {}

    def touch(self, k: int) -> None:
        if k not in self.outs:
            priced = self.old[k] = self.draft.kernels.get(k)
            self.outs[k] = list(priced.outs) if priced else []
        self.dirty.add(k)

    def store(self, c: int, k: int) -> None:
        """Let kernel k store class c; -1: nobody."""
        d = self.draft
        before = d.kern[c]
        if before >= 0:
            self.touch(before)
            self.outs[before].remove(c)
        if k >= 0:
            self.touch(k)
            self.outs[k].append(c)
        d.place(c, k)
        for q in d.inside[c]:
            self.touch(q)
        for q in d.readers[c]:
            self.touch(q)

    def apply(self, move: Move) -> bool:
        d, role = self.draft, self.draft.p.role
        self.flipped = {c for c, _ in move.flips}
        for c, n in move.flips:
            d.choose(c, n)
        for c, n in move.flips:
            for q in d.inside[c]:
                self.touch(q)
            if not self._anchor(c) or not all(self.revive(k) for k in d.p.kids[n]):
                return False
        if self.flipped & d.chain:
            self._move_roots()
        for c, n in move.flips:
            if d.kern[c] >= 0 and (role[n] in (VIEW, LEAF) or (role[n] in (BCAST, CONST) and c not in d.must)):
                self.store(c, -1)
        for c in move.drop:
            self.store(c, -1)
        for c, k in move.put:
            self.store(c, d.new_kernel() if k == NEW else k)
        if move.merge:
            self._merge(*move.merge)
        return len(self.dirty) <= MOST_DIRTY

    def _anchor(self, c: int) -> bool:
        """A class that just became an anchor is stored, the results of one op together."""
        d = self.draft
        n = d.choice[c]
        if d.p.role[n] == GET:
            k = self._kernel_of(d.p.kids[n][0])
            if d.kern[c] != k:
                self.store(c, k)
        elif d.p.role[n] in ANCHORS and d.kern[c] < 0:
            self.store(c, d.new_kernel())
        return True

    def _kernel_of(self, t: int) -> int:
        """A kernel that stores results of tuple t and has room for one more."""
        d, p = self.draft, self.draft.p
        k = self.tuples.get(t, -1)
        if k < 0:
            stored = (
                d.kern[x] for x in p.results.get(t, ())
                if d.kern[x] >= 0 and x not in self.flipped and p.role[d.choice[x]] == GET
                and p.kids[d.choice[x]][0] == t
            )  # fmt: skip
            k = next(stored, -1)
        if k >= 0:
            now = self.outs[k] if k in self.outs else d.kernels[k].outs
            if len(now) + len(set(p.kids[d.choice[t]])) >= d.pricer.target.max_bindings:
                k = -1
        if k < 0:
            k = d.new_kernel()
        self.tuples[t] = k
        return k

    def revive(self, c: int) -> bool:
        """Make a class that was not part of the program one: anchors stored, the rest computed where used."""
        d, p = self.draft, self.draft.p
        stack = [c]
        while stack:
            c = stack.pop()
            if d.kern[c] >= 0 or d.inside[c] or c in self.revived:
                continue
            self.revived.add(c)
            if d.choice[c] < 0:
                return False
            if not self._anchor(c):
                return False
            stack.extend(p.kids[d.choice[c]])
        return True

    def _move_roots(self) -> None:
        d = self.draft
        before = d.must
        d.find_roots()
        for c in d.must:
            if d.kern[c] < 0:
                self.store(c, d.new_kernel())
        for c in before:
            if c not in d.must and d.kern[c] >= 0 and not d.readers[c]:
                self.store(c, -1)

    def _merge(self, into: int, other: int) -> None:
        d, both = self.draft, {into, other}
        for k in (into, other):
            for c in list(d.kernels[k].outs):
                if d.readers[c] and c not in d.must and d.readers[c] <= both:
                    self.store(c, -1)  # read inside only
                elif k != into:
                    self.store(c, into)

    def settle(self) -> bool:
        """Price and link dirty kernels and drop what nobody reads, until nothing changes; False when illegal."""
        d = self.draft
        orphans: set[int] = set()
        priced_kernels = 0
        while self.dirty:
            batch = sorted(self.dirty, reverse=True)
            self.dirty.clear()
            priced_kernels += len(batch)
            if priced_kernels > MOST_PRICED:
                return False
            new: list[Priced | None] = []
            for k in batch:
                priced = d.pricer.price(self.outs[k], d.choice, d.kern) if self.outs[k] else None
                if priced is None and self.outs[k]:
                    return False
                new.append(priced)
            for k, priced in zip(batch, new, strict=True):
                if k in d.kernels:
                    orphans.update(d.unlink(k).operands)
                if priced is None:
                    self.changed.discard(k)
                else:
                    d.link(k, priced)
                    self.changed.add(k)
                    orphans.update(self.outs[k])
            if not self.dirty:
                for c in sorted(orphans):
                    if d.kern[c] >= 0 and not d.readers[c] and c not in d.must:
                        self.store(c, -1)
                orphans = set()
        return True

    def finish(self) -> list[int]:
        """Give new kernels a place in the order; the changed kernels."""
        d = self.draft
        changed = sorted(self.changed)
        for k in changed:
            if self.old[k] is None:
                before = (d.order[d.kern[o]][0] for o in d.kernels[k].operands if d.kern[o] in d.order)
                d.tick += 1
                d.rank(k, (max(before, default=0), d.tick))
        for k in self.old:
            if k not in d.kernels and k in d.order:
                d.rank(k, None)
        return changed

    def touched(self) -> set[int]:
        now = (self.draft.kernels.get(k) for k in self.old)
        return {c for v in (*self.old.values(), *now) if v for c in v.body + v.operands}


def start(p: Problem, pricer: Pricer, choice: Sequence[int], everything: bool = False) -> Draft:
    """A legal draft: results, anchors and shared elementwise values stored (with `everything`, all elementwise
    values), the rest computed where used; a kernel that is illegal is cut below its results."""
    draft = Draft(p, pricer, choice)
    order = order_of(p, choice)
    assert order is not None
    outs: dict[int, list[int]] = {}
    tuples: dict[int, int] = {}
    for c in _first_stored(draft, order, everything):
        n = choice[c]
        k = tuples.get(p.kids[n][0], -1) if p.role[n] == GET else -1
        if k < 0 or len(outs[k]) + len(set(p.kids[choice[p.kids[n][0]]])) >= pricer.target.max_bindings:
            k = draft.new_kernel()
            outs[k] = []
            if p.role[n] == GET:
                tuples[p.kids[n][0]] = k
        outs[k].append(c)
        draft.place(c, k)
    _cut_until_legal(draft, outs)
    position = {c: i for i, c in enumerate(order)}
    for k, v in draft.kernels.items():
        draft.order[k] = (max(position[c] for c in v.outs), k)
    draft.tick = draft.next_kernel
    legal = draft.sort(list(draft.kernels))
    assert legal, "results of one op may not depend on each other"
    unread = [c for c in order if draft.kern[c] >= 0 and not draft.readers[c] and c not in draft.must]
    if unread:
        draft.trial(Move(drop=tuple(unread)), force=True)
    draft.commit()
    return draft


def _first_stored(draft: Draft, order: Sequence[int], everything: bool) -> list[int]:
    p, choice = draft.p, draft.choice
    users = [0] * p.classes
    for c in order:
        if p.role[choice[c]] not in MOVES:
            for k in dict.fromkeys(p.kids[choice[c]]):
                while p.role[choice[k]] in (VIEW, BCAST, TRANS):
                    k = p.kids[choice[k]][0]
                users[k] += 1
    stored = []
    for c in order:
        role = p.role[choice[c]]
        if role in (LEAF, TUP, VIEW):
            continue
        shared = role == EW and (everything or users[c] > 1)
        if c in draft.must or role in ANCHORS or shared:
            stored.append(c)
    return stored


def _cut_until_legal(draft: Draft, outs: dict[int, list[int]]) -> None:
    """Price and link every kernel, storing more classes where a kernel is illegal."""
    p, choice = draft.p, draft.choice
    work = sorted(outs)
    waiting = set(work)
    while work:
        k = work.pop()
        waiting.discard(k)
        priced = draft.pricer.price(outs[k], choice, draft.kern)
        if priced is not None:
            draft.link(k, priced)
            continue
        again = {k}
        cut = _operands_to_store(draft, outs[k])
        if not cut and len(outs[k]) == 1:
            names = p.name(choice[outs[k][0]])
            raise CompileError(f"no kernel of {draft.pricer.target.name} can compute {names}")
        if not cut:
            cut, outs[k] = outs[k][1:], outs[k][:1]
        for c in cut:
            new = draft.new_kernel()
            outs[new] = [c]
            draft.place(c, new)
            again |= draft.inside[c] | {new}
        for q in sorted(again):
            if q in draft.kernels:
                draft.unlink(q)
            if q not in waiting:
                waiting.add(q)
                work.append(q)


def _operands_to_store(draft: Draft, outs: Sequence[int]) -> list[int]:
    """The classes computed nearest below outs, seen through views."""
    p, choice = draft.p, draft.choice
    stack, seen, cut = list(outs), set(outs), []
    while stack:
        for k in p.kids[choice[stack.pop()]]:
            if k in seen or draft.kern[k] >= 0:
                continue
            seen.add(k)
            role = p.role[choice[k]]
            if role in (VIEW, BCAST, TRANS, TUP):
                stack.append(k)
            elif role not in (LEAF, CONST):
                cut.append(k)
    return sorted(cut)
