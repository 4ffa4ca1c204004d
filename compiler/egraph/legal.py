"""What may share one kernel.

Every class in a kernel's body lives in a space: PURE values can be computed at any index; the
others come from the kernel's anchors (its reductions, or its one contraction, scatter or op with
several results) and exist at the anchor's own indices only.

    FULL         every element of the matrix that the kernel reduces
    row of p     one value a row of pattern p
    TILE         the output of the contraction or scatter
    result i     of an op with several results
    columns n    the output of a product of few rows with n columns
    transposed   one of these, about to be stored in another order of axes
    SEALED       the result of any other op: stored, never used inside

An elementwise op needs its operands in one space or pure. A row value may be broadcast back over
the row it came from and nothing else. All reductions of a kernel share one flat pattern, or a row
pattern and its transpose. Products of the same few rows may share a kernel, which
then also computes reductions of these rows that the products need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ir import Kind
from ..schedule.target import Target
from ..schedule.tile_rows import MOST_ROWS, shares_rows
from ..types import Type
from .graph import BCAST, CONST, CONTRACT, EW, GET, LEAF, MOVE, OPAQUE, RED, TRANS, TUP, Problem

PURE, FULL, TILE, SEALED = 0, 1, 2, 3
ROW = 8  # the space of a row value of pattern p is ROW + p
COLUMNS = -(1 << 30)  # the results of products of few rows with n columns are in COLUMNS - n
RESULT = -1  # the space of result i is RESULT - i
TRANSPOSED = 1 << 40  # spaces from here on

MOST_OUTPUTS = 4
MOST_BODY = 64  # classes in a kernel
# Bindings of a contraction on a CPU: its epilogue is written out for each of up to 64 rows of a
# tile, and the driver takes more than a second to compile what one more access adds.
MOST_BINDINGS_CPU = 7
MOST_NODES = 256  # e-nodes in a kernel, those that condensing hid among them


@dataclass(slots=True)
class Body:
    """A legal kernel: what it computes, from what, and where each value lives.

    `full` and `rows` are its iteration space, `main` the pattern of its rows and `column` that of
    the column results beside them (-1: none), `anchor` the class of its contraction or other op.
    """

    outs: tuple[int, ...]
    classes: tuple[int, ...]  # computed, operands first
    operands: tuple[int, ...]
    choice: Sequence[int]
    space: dict[int, int] = field(default_factory=dict)
    level: dict[int, int] = field(default_factory=dict)  # dependent reductions below a class
    patterns: list[int] = field(default_factory=list)
    spread: set[int] = field(default_factory=set)  # patterns whose rows are broadcast back
    main: int = -1
    column: int = -1
    anchor: int = -1
    anchors: list[int] = field(default_factory=list)  # products of the same rows
    full: int = 0
    rows: int = 0


class Legality:
    """The rules for one problem on one target."""

    def __init__(self, p: Problem, target: Target) -> None:
        self.p, self.target, self.max_bindings = p, target, target.max_bindings
        self.most_anchored = MOST_BINDINGS_CPU if target.kind == "cpu" else target.max_bindings
        self._transposed: dict[tuple[int, int], int] = {}

    def walk(
        self,
        outs: Sequence[int],
        choice: Sequence[int],
        kern: Sequence[int],
        own: Sequence[int] = (),
    ) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """(classes computed, operands) of the kernel that stores `outs`, operands first.

        `kern[c] >= 0` says that c is stored: an operand, unless it is one of outs or of those that
        the kernel computes on its `own`. None when the kernel would be cyclic or too large.
        """
        p, room = self.p, self.max_bindings - len(outs)
        role, kids, size = p.role, p.kids, p.size
        body: list[int] = []
        operands: list[int] = []
        done: dict[int, bool] = {}  # False: being computed
        count = 0
        stack = list(reversed(outs))
        while stack:
            c = stack[-1]
            now = done.get(c)
            if now is None:
                n = choice[c]
                r = role[n]
                if r == LEAF or (kern[c] >= 0 and r != CONST and c not in outs and c not in own):
                    operands.append(c)
                    done[c] = True
                    stack.pop()
                    if len(operands) > room:
                        return None
                    continue
                done[c] = False
                count += size[n]
                if count > MOST_NODES:
                    return None
                for k in kids[n]:
                    seen = done.get(k)
                    if seen is None:
                        stack.append(k)
                    elif not seen:
                        return None
            else:
                stack.pop()
                if not now:
                    done[c] = True
                    if role[choice[c]] != CONST or c in outs:
                        body.append(c)
                        if len(body) > MOST_BODY:
                            return None
        return tuple(body), tuple(operands)

    def judge(self, b: Body) -> bool:
        """Fill in the spaces and the iteration space of a body; False when it is illegal."""
        for c in b.classes:
            here = self._common(b, c)
            space = None if here is None else self._space(b, c, here)
            if space is None:
                return False
            b.space[c] = space
        self._iterate(b)
        contraction = b.anchor >= 0 and self.p.role[b.choice[b.anchor]] == CONTRACT
        if contraction and not self._has_few_rows(b.choice[b.anchor]):
            bound = len(b.outs) + len(b.operands)
            return bound <= self.most_anchored and self._storable(b)
        return self._storable(b)

    def _has_few_rows(self, n: int) -> bool:
        """True for a product with few rows or columns, whose epilogue is written out few times."""
        result = self.p.snapshot.types[self.p.snapshot.cls[n]]
        return isinstance(result, Type) and min(result.shape[-2:]) <= MOST_ROWS

    def _common(self, b: Body, c: int) -> int | None:
        """The space that the operands of a class share, PURE aside; None when they share none."""
        here = deep = 0
        space = b.space
        for k in self.p.kids[b.choice[c]]:
            s = space.get(k, PURE)
            if s:
                if here and s != here:
                    return None
                here = s
                deep = max(deep, b.level[k])
        b.level[c] = deep
        return here

    def _space(self, b: Body, c: int, here: int) -> int | None:
        """Where a class lives whose operands live in `here`."""
        p, n = self.p, b.choice[c]
        r, mark = p.role[n], p.mark[n]
        if here == SEALED:
            return None
        if r == RED:
            if here not in (PURE, FULL) or b.anchor >= 0 or not self._joins(b.patterns, mark):
                return None
            b.level[c] += 1
            return ROW + mark
        if r == CONTRACT and (here or b.patterns or b.anchors) and self.shares_rows(n):
            return self._joined(b, n, c)
        if r in (CONTRACT, OPAQUE, TUP):
            return None if here or b.patterns else self._anchored(b, c)
        if r == GET:
            tuple_op = p.snapshot.ops[b.choice[p.kids[n][0]]]
            return RESULT - mark if tuple_op.kind is Kind.TUPLE else SEALED
        if here == PURE or r not in (BCAST, TRANS, MOVE):
            return here
        if r == BCAST and here == ROW + mark:
            b.spread.add(mark)
            return FULL
        if r == TRANS and here < TRANSPOSED:
            fresh = TRANSPOSED + len(self._transposed)
            return self._transposed.setdefault((here, mark), fresh)
        return None

    def _joins(self, patterns: list[int], new: int) -> bool:
        if new not in patterns:
            if len(patterns) > 1 or (patterns and self.p.across.get(patterns[0]) != new):
                return False
            patterns.append(new)
        return True

    def shares_rows(self, n: int) -> bool:
        """Whether a product may stand beside others of the same few rows, and after their
        statistics."""
        rows, result = (self.p.snapshot.types[c] for c in (
            self.p.snapshot.kids[n][0], self.p.snapshot.cls[n]))  # fmt: skip
        assert isinstance(rows, Type)
        assert isinstance(result, Type)
        return shares_rows(self.target, rows.shape, result.shape)

    def _joined(self, b: Body, n: int, c: int) -> int | None:
        """The space of a product with few rows: after reductions of these rows, beside products of
        the same."""
        p, (rows, *_, matrix) = self.p, self.p.kids[n]
        together = matrix in b.space and p.role[b.choice[matrix]] == TRANS
        if self.target.kind == "gpu" and not together:
            return None  # neighbours along k do not lie together
        if b.space.get(matrix, PURE) != PURE or b.space.get(rows, PURE) not in (PURE, FULL):
            return None
        if any(p.kids[b.choice[x]][0] != rows for x in b.anchors):
            return None
        rows_type = p.snapshot.types[p.snapshot.kids[n][0]]
        assert isinstance(rows_type, Type)
        *_, m, k = rows_type.shape
        found = [p.patterns[x] for x in b.patterns]
        if any((x.rows, x.length) != (m, k) or x.last_kept for x in found) or len(found) > 1:
            return None
        b.anchor = c if b.anchor < 0 else b.anchor
        b.anchors.append(c)
        b.level[c] = 1
        return self._columns(n)

    def _columns(self, n: int) -> int:
        """The space of the results of a product, or of products of the same rows, by their
        columns."""
        result = self.p.snapshot.types[self.p.snapshot.cls[n]]
        assert isinstance(result, Type)
        return COLUMNS - result.shape[-1] if self.shares_rows(n) else TILE

    def _anchored(self, b: Body, c: int) -> int | None:
        if b.anchor >= 0:
            return None
        b.anchor, b.level[c] = c, 1
        b.anchors.append(c)
        op = self.p.snapshot.ops[b.choice[c]]
        match op.kind:
            case Kind.CONTRACT:
                return self._columns(b.choice[c])
            case Kind.SCATTER:
                return TILE
            case Kind.TUPLE:
                free = getattr(op, "computes_operands", False)
                return RESULT if free or self._plain(b, c) else None
            case _:
                return SEALED

    def _plain(self, b: Body, anchor: int) -> bool:
        """True when what an op with several results reads is moved only, never computed: elements
        may be read often. A mask or bias is read once, so it may be computed."""
        p, n = self.p, b.choice[anchor]
        once = len(getattr(p.snapshot.ops[n], "extras", ()))
        often = p.kids[n][: len(p.kids[n]) - once]
        stack = [k for k in dict.fromkeys(often) if k in b.space]
        seen = set(stack)
        while stack:
            n = b.choice[stack.pop()]
            if p.role[n] == EW:
                return False
            new = [k for k in p.kids[n] if k in b.space and k not in seen]
            seen.update(new)
            stack.extend(new)
        return True

    def _iterate(self, b: Body) -> None:
        p = self.p
        if b.patterns and b.anchor < 0:
            b.main = b.patterns[0]
            if len(b.patterns) == 2:
                b.main, b.column = b.patterns
                free = b.main not in b.spread and p.patterns[b.main].last_kept
                if b.column in b.spread or free:
                    b.main, b.column = b.column, b.main
            b.rows = p.patterns[b.main].rows
            b.full = b.rows * p.patterns[b.main].length
        elif b.anchor >= 0:
            anchors = (GET, CONTRACT, OPAQUE)
            b.full = max(p.numel[c] for c in b.classes if p.role[b.choice[c]] in anchors)
            b.rows = b.full
        else:
            b.full = b.rows = p.numel[b.outs[0]]

    def _storable(self, b: Body) -> bool:
        """True when the kernel visits every element of its outputs."""
        p = self.p
        if b.column in b.spread:
            return False
        for c in b.outs:
            where = b.space[c]
            if b.anchor >= 0 and (b.patterns or len(b.anchors) > 1) and where > COLUMNS + 1:
                return False  # every workgroup has the rows, and none stores them
            if where == SEALED and p.role[b.choice[c]] == OPAQUE and len(b.outs) > 1:
                return False
            if where != PURE:
                continue
            lone = p.role[b.choice[c]] == CONST
            anchored = b.anchor >= 0 and p.role[b.choice[b.anchor]] != CONTRACT
            if anchored or (lone and len(b.outs) > 1) or p.numel[c] not in (b.full, b.rows):
                return False
            if b.column >= 0 and p.numel[c] == 1:
                return False
        return True
