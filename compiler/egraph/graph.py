"""The extraction problem: a snapshot pruned, condensed and turned into arrays of numbers.

E-nodes and e-classes keep the snapshot's numbers. Each e-node has a role (how it behaves inside a
kernel), each reduction and broadcast a flat pattern: its dimensions merged into kept and reduced
runs, unit dimensions dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import CompileError
from ..ir import Kind, Op
from ..ops.move import Broadcast, Reshape, Transpose
from ..types import TupleType, Type
from .snapshot import Snapshot

LEAF, CONST, EW, MOVE, VIEW, BCAST, TRANS, RED, CONTRACT, OPAQUE, GET, TUP = range(12)
ANCHORS = frozenset((RED, CONTRACT, OPAQUE, GET))  # values that a kernel is built around
MOVES = frozenset((MOVE, VIEW, BCAST, TRANS))
STORABLE = frozenset((EW, MOVE, TRANS, RED, CONTRACT, OPAQUE, GET))

# Kinds with a template besides elementwise, movement and reductions. Others stay only where nothing
# else is equal.
LOWERED = frozenset((Kind.CONTRACT, Kind.SCATTER, Kind.SCAN, Kind.SORT, Kind.TUPLE, Kind.GET))
MOST_KIDS = 6  # operands of a condensed elementwise e-node
MOST_ABSORBED = 24  # e-nodes in one

Runs = tuple[tuple[bool, int], ...]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Rows of a flat reduction or broadcast: `rows` kept elements, `length` reduced ones each."""

    rows: int
    length: int
    last_kept: bool  # the last dimension is kept: rows lie side by side in memory
    run: int  # elements of the last run of dimensions


@dataclass(frozen=True, slots=True)
class Window:
    """What an e-node writes: `size` elements over a part of class `before`, in its place where the
    value `dies` there, else after a copy."""

    before: int
    size: int
    dies: bool

    @property
    def written(self) -> tuple[int, bool]:
        return self.size, self.dies


@dataclass(slots=True)
class Problem:
    """What extraction chooses from.

    By e-node: `role`, `kids` (none for a constant, those of the whole chain for a condensed
    e-node), `weight` (EW, MOVE, RED: flops an element; CONTRACT, OPAQUE, TUP: flops in all), `mark`
    (RED, BCAST: the pattern; TRANS: the permutation; GET: the result's number), `size` (e-nodes it
    stands for), `label` (equal for equal ops). By e-class: `candidates`, `numel`, `itemsize`.
    `live` are the classes that extraction can reach, operands first where there is no cycle.
    """

    snapshot: Snapshot
    role: list[int]
    kids: list[tuple[int, ...]]
    weight: list[float]
    mark: list[int]
    size: list[int]
    label: list[int]
    strided: list[bool]
    candidates: list[list[int]]
    numel: list[int]
    itemsize: list[int]
    roots: list[int]
    live: list[int] = field(default_factory=list)
    patterns: list[Pattern] = field(default_factory=list)
    # a row pattern and the column pattern of the same matrix
    across: dict[int, int] = field(default_factory=dict)
    # classes that may be a GET of a tuple class
    results: dict[int, list[int]] = field(default_factory=dict)
    # e-nodes that write a window over a part of their first operand
    windows: dict[int, Window] = field(default_factory=dict)

    @property
    def classes(self) -> int:
        return len(self.candidates)

    def name(self, node: int) -> str:
        return self.snapshot.ops[node].name


def problem(
    snapshot: Snapshot, max_bindings: int, condense: bool = True, donated: Sequence[int] = ()
) -> Problem:
    """The arrays of a snapshot. E-nodes that no kernel with `max_bindings` bindings can run are
    left out. `donated` are classes of inputs that may be written over."""
    p = _classified(snapshot)
    _prune(p, max_bindings)
    if condense:
        _bypass(p)
        _condense(p)
        _find_live(p)
    for c in p.live:
        for n in p.candidates[c]:
            if p.role[n] == GET:
                p.results.setdefault(p.kids[n][0], []).append(c)
    _find_windows(p, frozenset(donated))
    return p


def _find_windows(p: Problem, donated: frozenset[int]) -> None:
    """Note what writes windows, and where what they write over has no other use."""
    found = [
        n for c in p.live for n in p.candidates[c]
        if p.role[n] == MOVE and getattr(p.snapshot.ops[n], "writes_window", False)
    ]  # fmt: skip
    readers: dict[int, set[int]] = {p.kids[n][0]: set() for n in found}
    if not found:
        return
    for c in p.live:
        for n in p.candidates[c]:
            for k in p.kids[n]:
                if k in readers:
                    readers[k].add(c)
    for n in found:
        before, (_, update, *_) = p.kids[n][0], p.snapshot.kids[n]
        leaf = any(p.role[x] == LEAF for x in p.candidates[before])
        free = before in donated if leaf else before not in p.roots
        alone = readers[before] == {p.snapshot.cls[n]}
        p.windows[n] = Window(before, p.snapshot.types[update].size, free and alone)  # type: ignore[union-attr]


def runs(shape: Sequence[int], kept: Sequence[bool]) -> Runs:
    """The flat pattern: f32[4, 8, 1, 16] reduced over its last two axes is kept 32, reduced 16."""
    out: list[tuple[bool, int]] = []
    for n, k in zip(shape, kept, strict=True):
        if n == 1:
            continue
        if out and out[-1][0] == k:
            out[-1] = (k, out[-1][1] * n)
        else:
            out.append((k, n))
    return tuple(out)


def is_view(op: Op, result: Type, operands: Sequence[Type]) -> bool:
    """True when an op only renames its operand: the elements stay where they are in row-major
    order."""
    match op:
        case Reshape():
            return True
        case Transpose(perm=perm):
            moved = [p for p in perm if operands[0].shape[p] != 1]
            return moved == sorted(moved)
        case Broadcast():
            return result.shape == operands[0].shape
        case _:
            return op.kind is Kind.REDUCE and result.size == operands[0].size


def _role(op: Op, result: Type | TupleType, operands: Sequence[Type]) -> int:
    if isinstance(result, TupleType):
        return TUP
    if op.kind in (Kind.MOVE, Kind.REDUCE) and is_view(op, result, operands):
        return VIEW
    match op.kind:
        case Kind.INPUT | Kind.CONSTANT:
            return LEAF
        case Kind.LITERAL | Kind.IOTA:
            return CONST
        case Kind.ELEMENTWISE:
            return EW
        case Kind.MOVE:
            return (
                BCAST if isinstance(op, Broadcast) else TRANS if isinstance(op, Transpose) else MOVE
            )
        case Kind.REDUCE:
            return RED
        case Kind.CONTRACT:
            return CONTRACT
        case Kind.SCATTER | Kind.SCAN | Kind.SORT | Kind.WINDOW:
            return OPAQUE
        case Kind.GET:
            return GET
        case _:
            raise CompileError(
                f"extraction does not know ops of kind {op.kind.value}, got {op.name}"
            )


def _classified(snapshot: Snapshot) -> Problem:
    types = snapshot.types
    number: dict[object, int] = {}
    table: dict[Runs, int] = {}
    p = Problem(
        snapshot, [], list(snapshot.kids), [], [], [1] * len(snapshot.ops), [], [],
        [[] for _ in types],
        [0 if isinstance(t, TupleType) else t.size for t in types],
        [4 if isinstance(t, TupleType) else t.dtype.size for t in types],
        list(dict.fromkeys(snapshot.roots)),
    )  # fmt: skip
    for i, op in enumerate(snapshot.ops):
        result, operands = types[snapshot.cls[i]], [types[k] for k in snapshot.kids[i]]
        role = _role(op, result, operands)  # type: ignore[arg-type]
        leaf = op.kind in (Kind.INPUT, Kind.CONSTANT)
        p.role.append(role)
        p.label.append(number.setdefault(result if leaf else op, len(number)))
        p.weight.append(_weight(op, role, result, operands))
        p.mark.append(_mark(p, table, number, op, role, result, operands))
        p.strided.append(_moves_last(op, operands))
        p.candidates[snapshot.cls[i]].append(i)
    return p


def _moves_last(op: Op, operands: Sequence[Type | TupleType]) -> bool:
    """True for a transpose after which neighbors in memory are no longer neighbors."""
    if not isinstance(op, Transpose) or not isinstance(operands[0], Type):
        return False
    moved = [k for k in op.perm if operands[0].shape[k] != 1]
    return bool(moved) and moved[-1] != max(moved)


def _weight(
    op: Op, role: int, result: Type | TupleType, operands: Sequence[Type | TupleType]
) -> float:
    if role in (EW, CONTRACT, OPAQUE, TUP):
        total = op.flops(result, *operands)  # type: ignore[arg-type]
        return (
            total / max(1, result.size) if role == EW and isinstance(result, Type) else float(total)
        )
    if role == MOVE:
        return 2.0 * len(operands)  # a condition or a loaded place each
    return 1.0 if role == RED else 0.0


def _mark(
    p: Problem, table: dict[Runs, int], number: dict[object, int], op: Op, role: int,
    result: Type | TupleType, operands: Sequence[Type | TupleType],
) -> int:  # fmt: skip
    if role == GET:
        return op.index  # type: ignore[attr-defined]
    if role not in (RED, BCAST, TRANS):
        return -1
    assert isinstance(result, Type)
    before = operands[0]
    assert isinstance(before, Type)
    if role == TRANS:
        return number.setdefault((op, before.shape), len(number))
    whole = before.shape if role == RED else result.shape
    flat = runs(whole, [a == b for a, b in zip(before.shape, result.shape, strict=True)])
    if flat not in table:
        new = table[flat] = len(table)
        rows = math.prod(n for k, n in flat if k)
        length = math.prod(n for k, n in flat if not k)
        p.patterns.append(Pattern(rows, length, *flat[-1]))
        other = table.get(tuple((not k, n) for k, n in flat)) if len(flat) == 2 else None
        if other is not None:
            p.across[new], p.across[other] = other, new
    return table[flat]


def _prune(p: Problem, max_bindings: int) -> None:
    """Leave e-nodes that have a finite term, once each; leaves and constants stand alone in their
    class."""
    snapshot, role = p.snapshot, p.role
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    for c, nodes in enumerate(p.candidates):
        kept = []
        for n in nodes:
            # equal ops of the same operands, in any order, are the same work
            key = (p.label[n], c, tuple(sorted(p.kids[n])) if role[n] == EW else p.kids[n] or (n,))
            wide = len(set(p.kids[n])) >= max_bindings
            if c not in p.kids[n] and not wide and key not in seen:
                seen.add(key)
                kept.append(n)
        p.candidates[c] = kept
    ready, alone = _well_founded(p)
    for c, nodes in enumerate(p.candidates):
        found = [alone[c]] if c in alone else [n for n in nodes if n in ready]
        lowered = [n for n in found if role[n] != OPAQUE or snapshot.ops[n].kind in LOWERED]
        p.candidates[c] = lowered or found
    _find_live(p)
    for c in p.live:
        if not p.candidates[c]:
            names = ", ".join(
                sorted(
                    {op.name for op, k in zip(snapshot.ops, snapshot.cls, strict=True) if k == c}
                )
            )
            raise CompileError(
                f"no kernel with {max_bindings} bindings computes {snapshot.types[c]} by {names}:"
                " too many operands"
            )


def _well_founded(p: Problem) -> tuple[set[int], dict[int, int]]:
    """E-nodes all of whose kids have a finite term, and the one e-node of each class that is a leaf
    or constant.

    Movement of constants becomes a constant on the way.
    """
    users: dict[int, list[int]] = {}
    missing: dict[int, int] = {}
    queue: list[int] = []
    for nodes in p.candidates:
        for n in nodes:
            kids = set(p.kids[n])
            missing[n] = len(kids)
            for k in kids:
                users.setdefault(k, []).append(n)
            if not kids:
                queue.append(n)
    done: set[int] = set()
    alone: dict[int, int] = {}
    constant: set[int] = set()
    for n in queue:  # grows while it is walked
        c = p.snapshot.cls[n]
        if p.role[n] in MOVES and all(k in constant for k in p.kids[n]):
            p.role[n], p.kids[n], p.weight[n] = CONST, (), 0.0
        if p.role[n] in (LEAF, CONST) and c not in alone:
            alone[c] = n
            if p.role[n] == CONST:
                constant.add(c)
        if c not in done:
            done.add(c)
            for user in users.get(c, ()):
                missing[user] -= 1
                if missing[user] == 0:
                    queue.append(user)
    return {n for n, k in missing.items() if k == 0}, alone


def _find_live(p: Problem) -> None:
    state: dict[int, bool] = {}
    p.live = []
    for root in p.roots:
        stack = [(root, False)]
        while stack:
            c, left = stack.pop()
            if left:
                p.live.append(c)
            elif c not in state:
                state[c] = True
                stack.append((c, True))
                stack.extend(
                    (k, False) for n in p.candidates[c] for k in p.kids[n] if k not in state
                )


def _bypass(p: Problem) -> None:
    """Let readers see through views, which change nothing inside a kernel, and forget operands that
    are constant."""
    single = [nodes[0] if len(nodes) == 1 else -1 for nodes in p.candidates]
    base = list(range(p.classes))
    for c in p.live:  # operands first, or a cycle of views, which has other e-nodes
        n = single[c]
        if n >= 0 and p.role[n] == VIEW:
            base[c] = base[p.kids[n][0]]
    for c in p.live:
        for n in p.candidates[c]:
            kids = tuple(base[k] for k in p.kids[n])
            if p.role[n] in (EW, MOVE, RED):
                kids = tuple(k for k in kids if single[k] < 0 or p.role[single[k]] != CONST)
            p.kids[n] = tuple(dict.fromkeys(kids)) if p.role[n] == EW else kids


def _condense(p: Problem) -> None:
    """Make an elementwise value with one e-node and one reader part of that reader: storing it
    never pays, unless it is narrower or stands for several values that an anchor's results meet."""
    role, kids, snapshot = p.role, p.kids, p.snapshot
    single = [nodes[0] if len(nodes) == 1 else -1 for nodes in p.candidates]
    readers: dict[int, set[int]] = {}
    _find_live(p)
    for c in p.live:
        for n in p.candidates[c]:
            for k in kids[n]:
                readers.setdefault(k, set()).add(n)
    work = [n for c in p.live for n in p.candidates[c] if role[n] == EW]
    gone: set[int] = set()
    roots = set(p.roots)
    while work:
        n = work.pop()
        if snapshot.cls[n] in gone:
            continue
        for x in kids[n]:
            inner = single[x]
            if inner < 0 or role[inner] != EW or len(readers[x]) > 1 or x in roots:
                continue
            if p.itemsize[x] < p.itemsize[snapshot.cls[n]] or _meets_anchor(p, x, n):
                continue
            merged = tuple(
                dict.fromkeys(z for k in kids[n] for z in (kids[inner] if k == x else (k,)))
            )
            if len(merged) > MOST_KIDS or p.size[n] + p.size[inner] > MOST_ABSORBED:
                continue
            kids[n] = merged
            p.weight[n] += p.weight[inner]
            p.size[n] += p.size[inner]
            gone.add(x)
            for z in kids[inner]:
                readers[z].discard(inner)
                readers[z].add(n)
            work.append(n)
            break


def _meets_anchor(p: Problem, x: int, n: int) -> bool:
    """Whether e-node n multiplies class x, which is computed from several values, with what an
    anchor gives: a kernel before it may store x instead of these."""
    several = any(len(p.kids[m]) > 1 for m in p.candidates[x])
    if not several or getattr(p.snapshot.ops[n], "linear", False):
        return False
    return any(p.role[m] in ANCHORS for k in p.kids[n] if k != x for m in p.candidates[k])
