"""One move under way: what it makes dirty is priced first, linked when all of it is legal."""

from __future__ import annotations

import math

from .graph import ANCHORS, BCAST, CONST, GET, LEAF, VIEW
from .plan import NEW, Draft, Move
from .price import Priced

MOST_DIRTY = 120  # kernels that one move may change
MOST_PRICED = 400  # kernels that one move may have priced
EPSILON = 1e-6  # ns


def trial(draft: Draft, move: Move, force: bool = False, least: float = EPSILON) -> bool:
    """Make a move if it is legal and gains more than `least`, or is forced; else change nothing."""
    mark = draft.mark()
    limit = math.inf if force else mark.cost - least
    step = Step(draft, limit)
    draft.loss, draft.refused = None, []
    if step.apply(move) and step.settle():
        if draft.cost >= limit:
            step.lose(draft.cost - mark.cost)
        elif draft.sort(step.finish()):
            draft.touched, draft.before = step.touched(), step.price()
            return True
    draft.rollback(mark)
    return False


class Step:
    """One move under way: kernels it made dirty are priced before any is linked, since most moves
    fail there."""

    def __init__(self, draft: Draft, limit: float = math.inf) -> None:
        self.draft, self.limit = draft, limit  # the total must fall below the limit
        self.before = draft.cost
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

    def touch_all(self, kernels: set[int]) -> None:
        outs = self.outs
        for k in kernels:
            if k not in outs:
                priced = self.old[k] = self.draft.kernels.get(k)
                outs[k] = list(priced.outs) if priced else []
        self.dirty |= kernels

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
        self.touch_all(d.inside[c])
        self.touch_all(d.readers[c])

    def apply(self, move: Move) -> bool:
        d, role = self.draft, self.draft.p.role
        self.flipped = {c for c, _ in move.flips}
        for c, n in move.flips:
            d.choose(c, n)
        for c, n in move.flips:
            self.touch_all(d.inside[c])
            if not self._anchor(c) or not all(self.revive(k) for k in d.p.kids[n]):
                return False
        if self.flipped & d.chain and not self._move_roots():
            return False
        for c, n in move.flips:
            if d.kern[c] >= 0 and (
                role[n] in (VIEW, LEAF) or (role[n] in (BCAST, CONST) and c not in d.must)
            ):
                self.store(c, -1)
        for c in move.drop:
            self.store(c, -1)
        for c, k in move.own:
            d.owns(k, (c,))
            self.touch(k)
        for c, k in move.put:
            self.store(c, d.new_kernel() if k == NEW else k)
        if move.together:
            new = d.new_kernel()
            for c in move.together:
                self.store(c, new)
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
        """Make a class that was not part of the program one: anchors stored, the rest computed
        where used."""
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

    def _move_roots(self) -> bool:
        d = self.draft
        before = d.must
        if not d.find_roots():
            return False
        for c in d.must:
            if d.kern[c] < 0:
                self.store(c, d.new_kernel())
        for c in before:
            if c not in d.must and d.kern[c] >= 0 and not d.readers[c]:
                self.store(c, -1)
        return True

    def _merge(self, into: int, other: int) -> None:
        d, both = self.draft, {into, other}
        if other in d.own:
            d.owns(into, d.own[other])
        for k in (into, other):
            for c in list(d.kernels[k].outs):
                if d.readers[c] and c not in d.must and d.readers[c] <= both:
                    self.store(c, -1)  # read inside only
                elif k != into:
                    self.store(c, into)

    def settle(self) -> bool:
        """Price and link dirty kernels and drop what nobody reads, until nothing changes.

        False when a kernel is illegal, or as soon as the total cannot fall below the limit.
        """
        d = self.draft
        orphans: set[int] = set()
        priced_kernels = 0
        while self.dirty:
            batch = sorted(self.dirty, reverse=True)
            self.dirty.clear()
            priced_kernels += len(batch)
            new = self._priced(batch) if priced_kernels <= MOST_PRICED else None
            if new is None:
                return False
            total = d.cost + sum(v.cost for v in new.values() if v)
            total -= sum(d.kernels[k].cost for k in batch if k in d.kernels)
            if total >= self.limit and not orphans and not self._frees(new):
                self.lose(total - self.before)
                return False
            for k, priced in new.items():
                if k in d.kernels and d.kernels[k] is not priced:
                    orphans.update(d.unlink(k).operands)
                if priced is None:
                    self.changed.discard(k)
                    continue
                if k not in d.kernels:
                    d.link(k, priced)
                self.changed.add(k)
                orphans.update(priced.outs)
            if not self.dirty:
                for c in sorted(orphans):
                    if d.kern[c] >= 0 and not d.readers[c] and c not in d.must:
                        self.store(c, -1)
                orphans = set()
        return True

    def _priced(self, batch: list[int]) -> dict[int, Priced | None] | None:
        """The kernels of a batch as they would be, None for one without outputs."""
        d = self.draft
        new: dict[int, Priced | None] = {}
        for k in batch:
            own = d.own.get(k, ())
            new[k] = d.pricer.price(self.outs[k], d.choice, d.kern, own) if self.outs[k] else None
            if new[k] is None and self.outs[k]:
                d.refused = [d.choice[c] for c in self.outs[k]]
                return None
        return new

    def _frees(self, new: dict[int, Priced | None]) -> bool:
        """Would values be left that nobody reads, so that the total may fall further."""
        d = self.draft
        read = {o for v in new.values() if v for o in v.operands}
        gone = [o for k in new if k in d.kernels for o in d.kernels[k].operands]
        made = [c for v in new.values() if v for c in v.outs]
        return any(
            d.kern[c] >= 0 and c not in read and c not in d.must and d.readers[c] <= new.keys()
            for c in gone + made
        )

    def lose(self, worse: float) -> None:
        """Note by how much the move would have raised the total."""
        self.draft.loss = worse, self.price()

    def price(self) -> float:
        """What the kernels that the move changes cost before it."""
        return sum(old.cost for old in self.old.values() if old)

    def finish(self) -> list[int]:
        """Give new kernels a place in the order; the changed kernels."""
        d = self.draft
        changed = sorted(self.changed)
        for k in changed:
            if self.old[k] is None:
                before = (
                    d.order[d.kern[o]][0] for o in d.kernels[k].operands if d.kern[o] in d.order
                )
                d.tick += 1
                d.rank(k, (max(before, default=0), d.tick))
        for k in self.old:
            if k not in d.kernels and k in d.order:
                d.rank(k, None)
        return changed

    def touched(self) -> set[int]:
        now = (self.draft.kernels.get(k) for k in self.old)
        return {c for v in (*self.old.values(), *now) if v for c in v.body + v.operands}
