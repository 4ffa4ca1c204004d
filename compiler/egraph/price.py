"""What may share one kernel, and what the kernel costs.

Every class in a kernel's body lives in a space: PURE values can be computed at any index; the others come from the
kernel's anchors (its reductions, or its one contraction or opaque op) and exist at the anchor's own indices only.

    FULL         every element of the matrix that the kernel reduces
    row of p     one value a row of pattern p
    TILE         the output of the contraction or scatter
    result i     of an op with several results
    transposed   one of these, about to be stored in another order of axes
    SEALED       the result of an opaque op: stored, never used inside

An elementwise op needs its operands in one space or pure. A row value may be broadcast back over the row it came
from and nothing else. All reductions of a kernel share one flat pattern, or a row pattern and its transpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from ..ir import Kind
from ..schedule.target import Target
from ..schedule.tile import candidates
from ..types import Type
from .graph import BCAST, CONST, CONTRACT, EW, GET, LEAF, MOVE, OPAQUE, RED, TRANS, TUP, Problem

PURE, FULL, TILE, SEALED = 0, 1, 2, 3
ROW = 8  # space of a row value of pattern p: ROW + p
TRANSPOSED = 1 << 40
MOST_OUTPUTS = 4
MOST_BODY = 64  # classes in a kernel
MOST_NODES = 256  # e-nodes in a kernel, those that condensing hid among them
TILE_SIDE = 64  # of a contraction: how often its operands' elements are computed
HIDDEN = 0.7  # share of the shorter of memory and arithmetic time that hides behind the longer
COLUMN_WORKERS = {"cpu": 4, "gpu": 16}  # columns for each row that keeps the device busy
TOO_LARGE = 1e9  # ns for a value that no binding can hold


class Priced(NamedTuple):
    """A legal kernel. `full` and `rows` are its iteration space; `pattern` and `anchor` are -1 when it has none."""

    outs: tuple[int, ...]
    body: tuple[int, ...]  # classes computed, operands first
    operands: tuple[int, ...]
    cost: float  # ns
    pattern: int
    anchor: int  # class of its contraction, opaque op or tuple
    full: int
    rows: int
    launches: int
    nbytes: float
    flops: float


class _Spaces(NamedTuple):
    space: dict[int, int]
    level: dict[int, int]  # dependent reductions below a class
    patterns: list[int]
    anchor: int
    spread: set[int]  # patterns whose rows are broadcast back


class _Work(NamedTuple):
    touched: dict[int, int]  # elements of an operand that are read
    passes: dict[int, int]  # bit i: needed in pass i over a row
    strided: set[int]  # classes read or written across their last axis
    flops: float  # elementwise
    busy: float  # ns of contraction
    heavy: float  # flops of contraction


class Pricer:
    """Legality and price of kernels of one problem on one target."""

    def __init__(self, p: Problem, target: Target) -> None:
        self.p, self.target, self.calls = p, target, 0
        self._known: dict[tuple[tuple[int, ...], ...], Priced | None] = {}
        self._transposed: dict[tuple[int, int], int] = {}
        self._busy: dict[tuple[int, bool, bool], float] = {}

    def price(self, outs: Sequence[int], choice: Sequence[int], kern: Sequence[int]) -> Priced | None:
        """The kernel that stores classes `outs`; None when no template can do it.

        `kern[c] >= 0` says that c is stored: an operand, unless it is one of `outs`.
        """
        self.calls += 1
        if len(outs) > MOST_OUTPUTS:
            return None
        walked = self._walk(outs, choice, kern)
        if walked is None:
            return None
        key = (tuple(outs), tuple([choice[c] for c in walked[0]]), walked[1])
        if key not in self._known:
            self._known[key] = self._judge(key[0], *walked, choice)
        return self._known[key]

    def _judge(
        self, outs: tuple[int, ...], body: tuple[int, ...], operands: tuple[int, ...], choice: Sequence[int]
    ) -> Priced | None:
        spaces = self._spaces(body, choice)
        if spaces is None:
            return None
        full, rows, column = self._iteration(outs, body, choice, spaces)
        if not self._storable(outs, choice, spaces, full, rows, column):
            return None
        resident, deepest = self._residence(outs, body, choice, spaces)
        work = self._work(outs, body, choice, spaces, full, rows, deepest)
        return self._priced(outs, body, operands, choice, spaces, work, (full, rows, column), resident)

    def _walk(
        self, outs: Sequence[int], choice: Sequence[int], kern: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(body, operands): the closure of outs, operands first; None when it is cyclic or too large."""
        p, room = self.p, self.target.max_bindings - len(outs)
        role, kids, size = p.role, p.kids, p.size
        body: list[int] = []
        operands: list[int] = []
        state: dict[int, int] = {}  # 1: being computed, 2: done
        count = 0
        stack = list(reversed(outs))
        while stack:
            c = stack[-1]
            now = state.get(c)
            if now is None:
                n = choice[c]
                r = role[n]
                if r == LEAF or (kern[c] >= 0 and r != CONST and c not in outs):
                    operands.append(c)
                    state[c] = 2
                    stack.pop()
                    if len(operands) > room:
                        return None
                    continue
                state[c] = 1
                count += size[n]
                if count > MOST_NODES:
                    return None
                for k in kids[n]:
                    seen = state.get(k)
                    if seen is None:
                        stack.append(k)
                    elif seen == 1:
                        return None
            else:
                stack.pop()
                if now == 1:
                    state[c] = 2
                    if role[choice[c]] != CONST or c in outs:
                        body.append(c)
                        if len(body) > MOST_BODY:
                            return None
        return tuple(body), tuple(operands)

    def _spaces(self, body: Sequence[int], choice: Sequence[int]) -> _Spaces | None:
        """Where each class of the body lives; None when an op would mix spaces."""
        p = self.p
        role, kids, mark = p.role, p.kids, p.mark
        space: dict[int, int] = {}
        level: dict[int, int] = {}
        patterns: list[int] = []
        spread: set[int] = set()
        anchor = -1
        for c in body:
            n = choice[c]
            r = role[n]
            here = deep = 0
            for k in kids[n]:
                s = space.get(k, PURE)
                if s:
                    if here and s != here:
                        return None
                    here = s
                    deep = max(deep, level[k])
            if here == SEALED:
                return None
            if r == BCAST:
                if here:
                    if here != ROW + mark[n]:
                        return None
                    here = FULL
                    spread.add(mark[n])
            elif r == TRANS:
                if here:
                    if here >= TRANSPOSED:
                        return None
                    key = (here, mark[n])
                    here = self._transposed.setdefault(key, TRANSPOSED + len(self._transposed))
            elif r == RED:
                if here not in (PURE, FULL) or anchor >= 0 or not self._joins(patterns, mark[n]):
                    return None
                here = ROW + mark[n]
                deep += 1
            elif r == GET:
                here = -1 - mark[n] if p.snapshot.ops[choice[kids[n][0]]].kind is Kind.TUPLE else SEALED
            elif r in (CONTRACT, TUP, OPAQUE):
                if here or patterns or anchor >= 0:
                    return None
                if r == TUP and not self._plain(kids[n], choice, space, c):
                    return None
                anchor, deep = c, 1
                scatter = p.snapshot.ops[n].kind is Kind.SCATTER
                here = TILE if r == CONTRACT or scatter else SEALED if r == OPAQUE else -1
            elif here and r == MOVE:
                return None
            space[c] = here
            level[c] = deep
        return _Spaces(space, level, patterns, anchor, spread)

    def _joins(self, patterns: list[int], new: int) -> bool:
        if new not in patterns:
            if len(patterns) > 1 or (patterns and self.p.across.get(patterns[0]) != new):
                return False
            patterns.append(new)
        return True

    def _plain(self, kids: Sequence[int], choice: Sequence[int], space: dict[int, int], anchor: int) -> bool:
        """True when the operands of an op with several results are moved only, never computed."""
        p = self.p
        if p.snapshot.ops[choice[anchor]].kind is not Kind.TUPLE:
            return True
        stack, seen = list(kids), set(kids)
        while stack:
            k = stack.pop()
            if k not in space:
                continue
            if p.role[choice[k]] == EW:
                return False
            new = [x for x in p.kids[choice[k]] if x not in seen]
            seen.update(new)
            stack.extend(new)
        return True

    def _iteration(
        self, outs: Sequence[int], body: Sequence[int], choice: Sequence[int], spaces: _Spaces
    ) -> tuple[int, int, int]:
        """(elements of the iteration space, rows, pattern of the column reductions or -1)."""
        p, patterns = self.p, spaces.patterns
        if patterns:
            main, column = patterns[0], -1
            if len(patterns) == 2:
                main, column = patterns
                if column in spaces.spread or (main not in spaces.spread and p.patterns[main].last_kept):
                    main, column = column, main
                spaces.patterns[:] = [main, column]
            shape = p.patterns[main]
            return shape.rows * shape.length, shape.rows, column
        if spaces.anchor >= 0:
            full = max(p.numel[c] for c in body if p.role[choice[c]] in (GET, CONTRACT, OPAQUE))
            return full, full, -1
        return p.numel[outs[0]], p.numel[outs[0]], -1

    def _storable(
        self, outs: Sequence[int], choice: Sequence[int], spaces: _Spaces, full: int, rows: int, column: int
    ) -> bool:
        """True when the kernel visits every element of its outputs."""
        p = self.p
        if column in spaces.spread:
            return False
        anchored = p.role[choice[spaces.anchor]] if spaces.anchor >= 0 else -1
        for c in outs:
            where = spaces.space[c]
            if where == PURE:
                if p.numel[c] not in (full, rows) or (column >= 0 and p.numel[c] == 1):
                    return False
                if anchored in (TUP, OPAQUE) or (len(outs) > 1 and p.role[choice[c]] == CONST):
                    return False
            elif where == SEALED and anchored == OPAQUE and len(outs) > 1:
                return False
        return True

    def _work(
        self, outs: Sequence[int], body: Sequence[int], choice: Sequence[int], spaces: _Spaces, full: int, rows: int,
        deepest: int,
    ) -> _Work:  # fmt: skip
        """Top down: how often each value is computed, how much of each operand is read, in which order, and in which
        passes over a row when it does not stay on chip (`deepest` dependent reductions, else 0)."""
        p = self.p
        role, kids, numel, mark, weight = p.role, p.kids, p.numel, p.mark, p.weight
        main = spaces.patterns[0] if spaces.patterns else -1
        need = {c: numel[c] for c in outs}
        touched = dict(need)
        across = {c for c in outs if spaces.space[c] >= TRANSPOSED and p.strided[choice[c]]}
        passes = {c: 1 << deepest if deepest and _whole(spaces.space[c]) else 1 for c in outs}
        flops = busy = heavy = 0.0
        for c in reversed(body):
            n = choice[c]
            r = role[n]
            m, t, when = need.get(c, 0), touched.get(c, 0), passes.get(c, 1)
            strided = c in across
            if r == EW:
                flops += weight[n] * m * when.bit_count()
            elif r == RED:
                m = t = full
                when = 1 << spaces.level[c] - 1 if deepest else 1
                flops += weight[n] * full
            elif r == BCAST:
                if mark[n] == main:
                    m, when = rows, 1  # once a row
            elif r == TRANS:
                strided = strided or p.strided[n]
            elif r == MOVE:
                flops += weight[n] * m * when.bit_count()
                for k in kids[n]:
                    passes[k] = passes.get(k, 0) | when
                    need[k] = max(need.get(k, 0), m)
                    touched[k] = min(numel[k], touched.get(k, 0) + t)
                    if strided:
                        across.add(k)
                continue
            elif r in (CONTRACT, TUP, OPAQUE):
                moved = [role[choice[k]] == TRANS and k in spaces.space for k in kids[n]] + [False, False]
                busy += self.busy(n, moved[0], moved[1])
                heavy += weight[n]
                for k, again in zip(kids[n], self._rereads(n), strict=True):
                    need[k] = max(need.get(k, 0), numel[k] * again)
                    touched[k] = numel[k]
                continue
            for k in kids[n]:
                passes[k] = passes.get(k, 0) | when
                if need.get(k, 0) < m:
                    need[k] = m
                if touched.get(k, 0) < t:
                    touched[k] = t if t < numel[k] else numel[k]
                if strided:
                    across.add(k)
        return _Work(touched, passes, across, flops, busy, heavy)

    def _rereads(self, n: int) -> list[int]:
        """How often an element of each operand of an anchor is computed: once a tile of the other side."""
        p = self.p
        if p.role[n] != CONTRACT:
            return [1] * len(p.kids[n])
        result = p.snapshot.types[p.snapshot.cls[n]]
        assert isinstance(result, Type)
        return [-(-result.shape[-1] // TILE_SIDE), -(-result.shape[-2] // TILE_SIDE)]

    def busy(self, n: int, a_moved: bool, b_moved: bool) -> float:
        """ns of arithmetic of an anchor; operands of a contraction may be read transposed."""
        key = (n, a_moved, b_moved)
        if key not in self._busy:
            self._busy[key] = self._arithmetic(n, a_moved, b_moved)
        return self._busy[key]

    def _arithmetic(self, n: int, a_moved: bool, b_moved: bool) -> float:
        p, profile, flops = self.p, self.target.profile, self.p.weight[n]
        op, types = p.snapshot.ops[n], [p.snapshot.types[k] for k in p.snapshot.kids[n]]
        match op.kind:
            case Kind.CONTRACT:
                a, b = types
                assert isinstance(a, Type) and isinstance(b, Type)
                if flops == 0:
                    return 0.0
                shape = (math.prod(a.shape[:-2]), a.shape[-2], b.shape[-1], a.shape[-1])
                return flops / profile.contract / _efficiency(self.target, *shape, a_moved, b_moved)
            case Kind.TUPLE:
                return flops / profile.attention
            case Kind.WINDOW if len(types) > 1:
                return flops / (0.5 * profile.contract)
            case Kind.SCATTER:
                # every row looks at every position
                positions, rows = types[-1], p.snapshot.types[p.snapshot.cls[n]]
                assert isinstance(positions, Type) and isinstance(rows, Type)
                return (flops + positions.size * rows.shape[0]) / profile.elementwise
            case _:
                return flops / profile.elementwise

    def _priced(
        self, outs: tuple[int, ...], body: tuple[int, ...], operands: tuple[int, ...], choice: Sequence[int],
        spaces: _Spaces, work: _Work, iteration: tuple[int, int, int], resident: bool,
    ) -> Priced:  # fmt: skip
        p, profile = self.p, self.target.profile
        full, rows, column = iteration
        main = spaces.patterns[0] if spaces.patterns else -1
        nbytes = penalty = 0.0
        for c in operands + outs:
            reading = c not in spaces.space
            part = work.touched.get(c, 0) * p.itemsize[c]
            if c in work.strided and (work.busy == 0 or not reading):
                part *= profile.strided
            if reading and work.touched.get(c, 0) >= full:
                part *= work.passes.get(c, 1).bit_count()
            nbytes += part
            if p.numel[c] * p.itemsize[c] > self.target.max_binding_bytes:
                penalty += TOO_LARGE
        launches = 1
        arithmetic = work.flops / profile.elementwise
        memory = nbytes / profile.bandwidth
        if main >= 0:
            used = self._used(main, rows)
            if resident:
                memory, arithmetic = memory / used, arithmetic / used
            elif _overlap(memory, arithmetic) * (1 / used - 1) > profile.launch:
                launches += 1  # parts of rows, then the rest
            else:
                memory, arithmetic = memory / used, arithmetic / used
            if column >= 0:
                columns = sum(p.role[choice[c]] == RED and p.mark[choice[c]] == column for c in body)
                partial = 8.0 * max(1, rows // 64) * (full // max(1, rows)) * columns
                launches += 1
                nbytes += partial
                memory += partial / profile.bandwidth
        time = _overlap(memory, arithmetic + work.busy) if full or nbytes else 0.0
        cost = launches * profile.launch + time + penalty if full or nbytes else 0.0
        flops = work.flops + work.heavy
        return Priced(outs, body, operands, cost, main, spaces.anchor, full, rows, launches, nbytes, flops)

    def _residence(
        self, outs: Sequence[int], body: Sequence[int], choice: Sequence[int], spaces: _Spaces
    ) -> tuple[bool, int]:
        """(a row is used again after it was reduced, dependent reductions when it has to be read again then, else 0)."""
        if not spaces.patterns:
            return False, 0
        p = self.p
        deepest = max(spaces.level[c] for c in body if p.role[choice[c]] == RED)
        resident = deepest > 1 or any(spaces.level[c] and _whole(spaces.space[c]) for c in outs)
        onchip = self.target.profile.onchip if self.target.kind == "gpu" else 0
        stays = p.patterns[spaces.patterns[0]].length <= onchip
        return resident, deepest if resident and not stays else 0

    def _used(self, main: int, rows: int) -> float:
        """The share of the device that rows of a reduction keep busy."""
        many = self.target.profile.rows
        if self.p.patterns[main].last_kept:
            many *= COLUMN_WORKERS[self.target.kind]
        return min(1.0, max(1, rows) / many)


def _whole(space: int) -> bool:
    return space == FULL or space >= TRANSPOSED


def _overlap(a: float, b: float) -> float:
    return max(a, b) + (1 - HIDDEN) * min(a, b)


@lru_cache(maxsize=4096)
def _efficiency(target: Target, batch: int, m: int, n: int, k: int, a_moved: bool, b_moved: bool) -> float:
    best = candidates(target, batch, m, n, k, "m" if a_moved else "k", "k" if b_moved else "n", 1)[0]
    return max(1e-3, best.efficiency)
