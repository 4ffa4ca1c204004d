"""What a kernel costs on a target: launches, bytes and arithmetic, at the rates of its profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..ir import Kind
from ..schedule.target import Target
from ..schedule.tile import candidates
from ..types import Type
from .graph import RED, Problem
from .legal import MOST_OUTPUTS, Body, Legality
from .work import Work, is_whole, measure

HIDDEN = 0.7  # share of the shorter of memory and arithmetic time that hides behind the longer
COLUMN_WORKERS = {"cpu": 4, "gpu": 16}  # columns for each row that keeps the device busy
CONVOLUTION = 0.5  # rate of a convolution, of that of a contraction
TOO_LARGE = 1e9  # ns for a value that no binding can hold


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


class Pricer:
    """Legality and price of the kernels of one problem on one target. Prices are remembered."""

    def __init__(self, p: Problem, target: Target) -> None:
        self.p, self.target, self.calls = p, target, 0
        self.legality = Legality(p, target.max_bindings)
        self._known: dict[tuple[tuple[int, ...], ...], Priced | None] = {}
        self._busy: dict[tuple[int, bool, bool], float] = {}

    def price(
        self, outs: Sequence[int], choice: Sequence[int], kern: Sequence[int]
    ) -> Priced | None:
        """The kernel that stores classes `outs`; None when no template can do it."""
        self.calls += 1
        if len(outs) > MOST_OUTPUTS:
            return None
        walked = self.legality.walk(outs, choice, kern)
        if walked is None:
            return None
        classes, operands = walked
        key = (tuple(outs), tuple([choice[c] for c in classes]), operands)
        if key not in self._known:
            body = Body(key[0], classes, operands, choice)
            self._known[key] = self._priced(body) if self.legality.judge(body) else None
        return self._known[key]

    def busy(self, n: int, a_moved: bool = False, b_moved: bool = False) -> float:
        """ns of arithmetic of an anchor; operands of a contraction may be read transposed."""
        key = (n, a_moved, b_moved)
        if key not in self._busy:
            self._busy[key] = self._arithmetic(n, a_moved, b_moved)
        return self._busy[key]

    def _arithmetic(self, n: int, a_moved: bool, b_moved: bool) -> float:
        p, profile, flops = self.p, self.target.profile, self.p.weight[n]
        op = p.snapshot.ops[n]
        shapes = [t.shape for k in p.snapshot.kids[n] if isinstance(t := p.snapshot.types[k], Type)]
        match op.kind:
            case Kind.CONTRACT if flops:
                (*batch, m, k), (*_, columns) = shapes
                shape = (math.prod(batch), m, columns, k)
                return flops / profile.contract / _efficiency(self.target, *shape, a_moved, b_moved)
            case Kind.TUPLE:
                return flops / profile.attention
            case Kind.WINDOW if len(shapes) > 1:
                return flops / (CONVOLUTION * profile.contract)
            case Kind.SCATTER:
                rows = p.snapshot.types[p.snapshot.cls[n]]
                assert isinstance(rows, Type)
                # every row looks at every position
                return (flops + math.prod(shapes[-1]) * rows.shape[0]) / profile.elementwise
            case _:
                return flops / profile.elementwise

    def _priced(self, b: Body) -> Priced:
        profile = self.target.profile
        resident, deepest = self._residence(b)
        work = measure(self.p, b, deepest)
        nbytes, penalty = self._memory(b, work)
        busy = sum(self.busy(*anchor) for anchor in work.anchors)
        memory, arithmetic = nbytes / profile.bandwidth, work.flops / profile.elementwise
        launches = 1
        if b.main >= 0:
            used = self._used(b)
            if not resident and _overlap(memory, arithmetic) * (1 / used - 1) > profile.launch:
                launches += 1  # parts of rows, then the rest
            else:
                memory, arithmetic = memory / used, arithmetic / used
        if b.column >= 0:
            partial = self._partial_columns(b)
            launches += 1
            nbytes += partial
            memory += partial / profile.bandwidth
        cost = 0.0
        if b.full or nbytes:
            cost = launches * profile.launch + _overlap(memory, arithmetic + busy) + penalty
        flops = work.flops + sum(self.p.weight[n] for n, *_ in work.anchors)
        iteration = (b.main, b.anchor, b.full, b.rows)
        return Priced(b.outs, b.classes, b.operands, cost, *iteration, launches, nbytes, flops)

    def _memory(self, b: Body, work: Work) -> tuple[float, float]:
        """(bytes read and written, ns to add for values that are too large for a binding)."""
        p, total, penalty = self.p, 0.0, 0.0
        for c in b.operands + b.outs:
            is_read = c not in b.space
            part = float(work.touched.get(c, 0) * p.itemsize[c])
            if c in work.across and not (is_read and work.anchors):
                part *= self.target.profile.strided
            if is_read and work.touched.get(c, 0) >= b.full:
                part *= work.passes.get(c, 1).bit_count()
            total += part
            if p.numel[c] * p.itemsize[c] > self.target.max_binding_bytes:
                penalty += TOO_LARGE
        return total, penalty

    def _partial_columns(self, b: Body) -> float:
        """Bytes of partial column results, written and read again."""
        p = self.p
        columns = sum(
            p.role[b.choice[c]] == RED and p.mark[b.choice[c]] == b.column for c in b.classes
        )
        return 8.0 * max(1, b.rows // 64) * (b.full // max(1, b.rows)) * columns

    def _residence(self, b: Body) -> tuple[bool, int]:
        """(is a row used again after it was reduced, dependent reductions if it is read again)."""
        if b.main < 0:
            return False, 0
        deepest = max(b.level[c] for c in b.classes if self.p.role[b.choice[c]] == RED)
        resident = deepest > 1 or any(b.level[c] and is_whole(b.space[c]) for c in b.outs)
        onchip = self.target.profile.onchip if self.target.kind == "gpu" else 0
        stays = self.p.patterns[b.main].length <= onchip
        return resident, deepest if resident and not stays else 0

    def _used(self, b: Body) -> float:
        """The share of the device that rows of a reduction keep busy."""
        many = self.target.profile.rows
        if self.p.patterns[b.main].last_kept:
            many *= COLUMN_WORKERS[self.target.kind]
        return min(1.0, max(1, b.rows) / many)


def _overlap(a: float, b: float) -> float:
    return max(a, b) + (1 - HIDDEN) * min(a, b)


@lru_cache(maxsize=4096)
def _efficiency(
    target: Target, batch: int, m: int, n: int, k: int, a_moved: bool, b_moved: bool
) -> float:
    axes = "m" if a_moved else "k", "k" if b_moved else "n"
    return max(1e-3, candidates(target, batch, m, n, k, *axes, 1)[0].efficiency)
