"""What a kernel costs on a target: launches, bytes and arithmetic, at the rates of its profile."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ..schedule.lanes import SHARE, can_store, in_turn, lanes_of_row
from ..schedule.target import Target
from ..types import Type
from .anchor import Anchor, AnchorCost, anchor_cost
from .graph import BCAST, CONTRACT, GET, LEAF, OPAQUE, RED, TUP, Problem
from .legal import MOST_OUTPUTS, Body, Legality
from .rows import FEWEST, RowPlan, row_plan
from .work import Work, is_whole, measure

HIDDEN = 0.7  # share of the shorter of memory and arithmetic time that hides behind the longer
REMEMBERED = 8  # bodies for the same outputs
HEAVY = frozenset((CONTRACT, OPAQUE, TUP, GET))  # whose price depends on the op itself
TOO_LARGE = 1e9  # ns for a value that no binding can hold
# of a CPU: bytes of memory that take as long as one that is read again, of a bias or of a value a
# row, and as one of these of which no aligned four is read; and what a row that is read or written
# in single elements takes of the time of one in fours
AGAIN, UNEVEN, SINGLE = 0.27, 3.0, 1.5


class Priced(NamedTuple):
    """A legal kernel. `pattern` and `anchor` are -1 when it has none."""

    outs: tuple[int, ...]
    body: tuple[int, ...]  # classes computed, operands first
    operands: tuple[int, ...]
    cost: float  # ns
    pattern: int  # of its rows
    anchor: int  # class of its contraction, scatter or op with several results
    full: int  # elements of its iteration space
    rows: int
    launches: int
    nbytes: float
    flops: float


class _Walk(NamedTuple):
    """A body that was walked, and what tells that walking again would find the same."""

    priced: Priced | None
    choice: itemgetter[Any]  # of its classes, the first once more, so that it is a tuple
    chosen: tuple[int, ...]
    inside: itemgetter[Any] | None  # where the classes that it may not store are stored
    stored: itemgetter[Any] | None  # where its operands are


def _walk(
    chosen: Sequence[int],
    classes: Sequence[int],
    inside: Sequence[int],
    stored: Sequence[int],
    priced: Priced | None,
) -> _Walk:
    return _Walk(
        priced,
        itemgetter(*classes, classes[0]),
        (*chosen, chosen[0]),
        itemgetter(*inside, inside[0]) if inside else None,
        itemgetter(*stored, stored[0]) if stored else None,
    )


class _Alike:
    """What tells one body from another, as far as its legality and its price go: the same place in
    every layer of a model has one price."""

    def __init__(self, p: Problem) -> None:
        self.p = p
        number: dict[object, int] = {}
        types = p.snapshot.types
        sizes = list(zip(p.numel, p.itemsize, strict=True))
        self._size = [number.setdefault(size, len(number)) for size in sizes]
        self._kind = []
        for n, role in enumerate(p.role):
            heavy = role in HEAVY
            kids = p.snapshot.kids[n]
            key = (
                role, len(p.kids[n]), p.mark[n], p.weight[n], p.strided[n],
                self._size[p.snapshot.cls[n]],
                p.label[n] if heavy else -1,
                tuple([types[k] for k in kids]) if heavy else None,
                p.numel[p.kids[n][0]] if role == BCAST and p.kids[n] else -1,
                p.windows[n].written if n in p.windows else None,
            )  # fmt: skip
            self._kind.append(number.setdefault(key, len(number)))

    def shape(
        self,
        outs: tuple[int, ...],
        classes: tuple[int, ...],
        operands: tuple[int, ...],
        choice: Sequence[int],
    ) -> tuple[tuple[int, ...], ...]:
        """Equal for bodies of equal e-nodes, wired alike, over operands of equal sizes."""
        kids, kind, size = self.p.kids, self._kind, self._size
        chosen = [choice[c] for c in classes]
        place = {c: i for i, c in enumerate(classes + operands)}
        find = place.get
        return (
            tuple([place[c] for c in outs]),
            tuple([kind[n] for n in chosen]),
            tuple([find(k, -1) for n in chosen for k in kids[n]]),
            tuple([size[c] for c in operands]),
        )


class Pricer:
    """Legality and price of the kernels of one problem on one target. Prices are remembered.

    With `staged` rows are reduced by two kernels (True) or one (False) wherever that is possible.
    """

    def __init__(self, p: Problem, target: Target, staged: bool | None = None) -> None:
        self.p, self.target, self.calls, self.staged = p, target, 0, staged
        self.legality = Legality(p, target)
        self._known: dict[tuple[tuple[int, ...], ...], Priced | None] = {}
        self._alike = _Alike(p)
        self._seen: dict[tuple[Any, ...], list[_Walk]] = {}
        self._anchors: dict[Anchor, AnchorCost | None] = {}

    def forget(self) -> None:
        """Drop what makes further prices faster, most of the memory that a pricer takes."""
        self._seen.clear()

    def price(
        self,
        outs: Sequence[int],
        choice: Sequence[int],
        kern: Sequence[int],
        own: tuple[int, ...] = (),
    ) -> Priced | None:
        """The kernel that stores classes `outs` and computes those of its `own` that others store;
        None when no template can do it."""
        self.calls += 1
        if len(outs) > MOST_OUTPUTS:
            return None
        outs = tuple(outs)
        seen = self._seen.setdefault((outs, own) if own else outs, [])
        for priced, chosen_of, chosen, inside_of, stored_of in seen:
            if (
                (stored_of is None or min(stored_of(kern)) >= 0)
                and (inside_of is None or max(inside_of(kern)) < 0)
                and chosen_of(choice) == chosen
            ):
                return priced
        walked = self.legality.walk(outs, choice, kern, own)
        if walked is None:
            return None
        classes, operands = walked
        inside = [c for c in classes if c not in outs and c not in own]
        stored = [c for c in operands if self.p.role[choice[c]] != LEAF]
        priced = self._shaped(outs, classes, operands, choice)
        seen.insert(0, _walk([choice[c] for c in classes], classes, inside, stored, priced))
        del seen[REMEMBERED:]
        return priced

    def _shaped(
        self,
        outs: tuple[int, ...],
        classes: tuple[int, ...],
        operands: tuple[int, ...],
        choice: Sequence[int],
    ) -> Priced | None:
        """The price of a body, worked out once for all bodies that are built alike."""
        shape = self._alike.shape(outs, classes, operands, choice)
        if shape not in self._known:
            body = Body(outs, classes, operands, choice)
            self._known[shape] = self._priced(body) if self.legality.judge(body) else None
        known = self._known[shape]
        if known is None or known.body is classes:
            return known
        anchor = -1 if known.anchor < 0 else classes[known.body.index(known.anchor)]
        _, _, _, cost, pattern, _, full, rows, launches, nbytes, flops = known
        return Priced(
            outs, classes, operands, cost, pattern, anchor, full, rows, launches, nbytes, flops
        )

    def anchor(self, a: Anchor) -> AnchorCost | None:
        """What a heavy op costs; None when there is no kernel for its shape."""
        if a not in self._anchors:
            self._anchors[a] = anchor_cost(self.p, self.target, a)
        return self._anchors[a]

    def _priced(self, b: Body) -> Priced | None:
        levels, stores = self._levels(b)
        plan = RowPlan(1, 1.0, False)
        if b.main >= 0:
            pattern, turns = self.p.patterns[b.main], self._rows_in_turn(b)
            plan = row_plan(pattern, levels, stores, self.target, self.staged, turns)
        work = measure(self.p, b, again=b.main >= 0 and self._rereads(b, plan))
        anchors = [self.anchor(a) for a in work.anchors]
        if any(a is None for a in anchors):
            return None
        heavy = [a for a in anchors if a is not None]
        nbytes, penalty = self._memory(b, work, plan)
        nbytes += sum(a.nbytes for a in heavy)
        launches = plan.launches + work.launches + sum(a.launches for a in heavy)
        profile = self.target.profile
        memory, arithmetic = nbytes / profile.bandwidth, work.flops / profile.elementwise
        busy = arithmetic / plan.spread + sum(a.busy for a in heavy)
        time = _overlap(memory / plan.used, busy)
        if b.column >= 0:
            columns = row_plan(self.p.patterns[b.column], 1, False, self.target, self.staged)
            launches += columns.launches
            time += _overlap(memory / columns.used, arithmetic / columns.spread)
            nbytes *= 2
        cost = launches * profile.launch + time + penalty if b.full or nbytes else 0.0
        flops = work.flops + sum(a.flops for a in heavy)
        iteration = (b.main, b.anchor, b.full, b.rows)
        return Priced(b.outs, b.classes, b.operands, cost, *iteration, launches, nbytes, flops)

    def _levels(self, b: Body) -> tuple[int, bool]:
        """(dependent reductions, are elements stored after the last of them)."""
        if b.main < 0:
            return 0, False
        levels = max(b.level[c] for c in b.classes if self.p.role[b.choice[c]] == RED)
        return levels, any(b.level[c] == levels and is_whole(b.space[c]) for c in b.outs)

    def _rereads(self, b: Body, plan: RowPlan) -> bool:
        """Is each pass over a row a read of memory: where it does not stay on chip."""
        long = self.p.patterns[b.main].length > self.target.profile.onchip
        return plan.staged or long or (self.target.kind == "cpu" and not plan.held)

    def _memory(self, b: Body, work: Work, plan: RowPlan) -> tuple[float, float]:
        """(bytes read and written, ns to add for values that are too large for a binding)."""
        p, total, penalty, turns = self.p, 0.0, 0.0, self._in_turn(b, work)
        cpu = self.target.kind == "cpu"
        single = cpu and b.anchor < 0 and not plan.fours
        for c in b.operands + b.outs:
            is_read = c not in b.space
            part = float(work.touched.get(c, 0) * p.itemsize[c])
            if c in work.across and not (is_read and work.anchors):
                part *= self.target.profile.strided
            if is_read and work.touched.get(c, 0) >= b.full:
                part *= work.passes.get(c, 1).bit_count()
            part *= SINGLE if single and work.touched.get(c, 0) >= b.full else 1.0
            total += part * SHARE if turns and not is_read and c not in work.across else part
            total += self._again(b, work, c) if cpu and is_read and b.anchor < 0 else 0.0
            if p.numel[c] * p.itemsize[c] > self.target.max_binding_bytes:
                penalty += TOO_LARGE
        return total, penalty

    def _again(self, b: Body, work: Work, c: int) -> float:
        """Bytes for loads of a CPU that find in its caches what was loaded before."""
        if self.p.numel[c] <= 1:
            return 0.0
        more = max(0, work.need.get(c, 0) - work.touched.get(c, 0)) * self.p.itemsize[c]
        return more * AGAIN * (UNEVEN if c in work.uneven else 1.0)

    def _in_turn(self, b: Body, work: Work) -> bool:
        """Whether lanes of a CPU store results one after the other."""
        if self.target.kind != "cpu" or b.anchor >= 0:
            return False
        if b.main >= 0:
            return self._rows_in_turn(b)
        types = [self.p.snapshot.types[c] for c in b.outs]
        arrays = [(t.dtype.name, t.size) for t in types if isinstance(t, Type)]
        whole = len(arrays) == len(types) and all(work.touched[c] == b.full for c in b.outs)
        large = whole and in_turn(self.target, b.full, len(arrays))
        return large and can_store(self.target, arrays)

    def _rows_in_turn(self, b: Body) -> bool:
        """The same where lanes share rows."""
        pattern, subgroup = self.p.patterns[b.main], self.target.subgroup
        whole = [self.p.snapshot.types[c] for c in b.outs if is_whole(b.space[c])]
        arrays = [(t.dtype.name, t.size) for t in whole if isinstance(t, Type)]
        able = b.anchor < 0 and pattern.length >= 4 * FEWEST and not pattern.last_kept
        if not (able and can_store(self.target, arrays)):
            return False
        return lanes_of_row(subgroup, pattern.rows, pattern.length, len(whole)) > 0


def _overlap(a: float, b: float) -> float:
    return max(a, b) + (1 - HIDDEN) * min(a, b)
