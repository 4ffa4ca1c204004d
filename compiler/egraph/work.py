"""The work of a kernel: how often each value is computed, how much of each operand is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..types import Type
from .anchor import Anchor
from .graph import BCAST, CONTRACT, EW, GET, MOVE, OPAQUE, RED, TRANS, TUP, Pattern, Problem, Window
from .legal import FULL, TRANSPOSED, Body

TILE_SIDE = 64  # of a contraction: a tile of one side computes the elements of the other side
VECTOR = 4  # elements that an invocation computes
KEYED = (1, 2)  # operands of attention that are read as far as keys count


@dataclass(slots=True)
class Work:
    """Counts for one kernel."""

    touched: dict[int, int]  # elements of a class that are read or written
    need: dict[int, int]  # times that a value is computed
    passes: dict[int, int]  # bit i: needed in pass i over a row
    across: set[int]  # classes read or written across their last axis
    uneven: set[int]  # classes of which neighbouring results need no aligned four
    flops: float = 0.0  # elementwise
    launches: int = 0  # beyond the first: copies, and windows of other sizes
    anchors: list[Anchor] = field(default_factory=list)


def measure(p: Problem, b: Body, again: bool) -> Work:
    """The work of a kernel, from its outputs down.

    With `again` a row does not stay on chip: it is read in every pass that needs it. Pass i is
    that of reductions which depend on i others, and stores elements that depend on i reductions.
    """
    numel, choice = p.numel, b.choice
    w = Work(
        touched={c: numel[c] for c in b.outs},
        need={c: numel[c] for c in b.outs},
        passes={c: 1 << b.level[c] if again and is_whole(b.space[c]) else 1 for c in b.outs},
        across={c for c in b.outs if b.space[c] >= TRANSPOSED and p.strided[choice[c]]},
        uneven=set(),
    )
    if p.windows and b.main < 0 and b.anchor < 0:
        _write_windows(p, b, w)
    for c in reversed(b.classes):
        _descend(p, b, w, c, again)
    return w


def written_window(p: Problem, b: Body, c: int) -> Window | None:
    """The window that an output is written as: its operand is stored, and nothing else is done."""
    window = p.windows.get(b.choice[c])
    stored = window is not None and window.before not in b.space
    return window if stored and b.main < 0 and b.anchor < 0 and c in b.outs else None


def _write_windows(p: Problem, b: Body, w: Work) -> None:
    """Of outputs that are windows only these are written, after copies where they are needed."""
    sizes: set[int] = set()
    for c in b.outs:
        window = written_window(p, b, c)
        if window is None:
            sizes.add(0)
            continue
        sizes.add(window.size)
        w.touched[c] = w.need[c] = window.size
        if not window.dies:
            w.launches += 1
            w.touched[c] += p.numel[c]
            w.touched[window.before] = p.numel[c]
    w.launches += len(sizes) - 1


def is_whole(space: int) -> bool:
    """True for spaces with a value for each element of a row."""
    return space == FULL or space >= TRANSPOSED


def _descend(p: Problem, b: Body, w: Work, c: int, again: bool) -> None:
    """Add what class c does, and what it needs of its operands."""
    n = b.choice[c]
    role, kids, numel = p.role[n], p.kids[n], p.numel
    need, touched, passes = w.need, w.touched, w.passes
    m, t, when = need.get(c, 0), touched.get(c, 0), passes.get(c, 1)
    strided, uneven = c in w.across, c in w.uneven
    if role in (EW, MOVE):
        w.flops += p.weight[n] * m * when.bit_count()
    elif role == RED and b.anchor >= 0:  # of the rows of a product, in every workgroup
        m = t = numel[kids[0]] * _tiles(p, b)
        w.flops += p.weight[n] * m
    elif role == RED:
        m = t = b.full
        when = 1 << b.level[c] - 1 if again else 1
        w.flops += p.weight[n] * m
    elif role == BCAST:
        if p.mark[n] == b.main:
            m, when = b.rows, 1  # once a row
        elif numel[kids[0]] == 1 or _is_repeated(p, n):
            m = -(-m // VECTOR)  # once an invocation, whose elements are neighbors
        else:
            uneven = uneven or _is_uneven(p.patterns[p.mark[n]])
    elif role == TRANS:
        strided = strided or p.strided[n]
    elif role in (CONTRACT, OPAQUE, TUP):
        _descend_anchor(p, b, w, c)
        return
    window = written_window(p, b, c) if role == MOVE and p.windows else None
    if window is not None and m <= window.size:
        kids, t = tuple(k for k in kids if k != window.before), window.size
    for k in kids:
        passes[k] = passes.get(k, 0) | when
        if need.get(k, 0) < m:
            need[k] = m
        if role == MOVE:  # each reads a part of its own
            touched[k] = min(numel[k], touched.get(k, 0) + t)
        elif touched.get(k, 0) < t:
            touched[k] = min(numel[k], t)
        if strided:
            w.across.add(k)
        if uneven:
            w.uneven.add(k)


def _is_uneven(pattern: Pattern) -> bool:
    """Whether rows, or columns that lie together, are no fours."""
    return (pattern.run if pattern.last_kept else pattern.length) % VECTOR != 0


def _is_repeated(p: Problem, n: int) -> bool:
    """True when neighboring elements of a broadcast are one element of its operand."""
    pattern = p.patterns[p.mark[n]]
    return not pattern.last_kept and pattern.length % VECTOR == 0


def _descend_anchor(p: Problem, b: Body, w: Work, c: int) -> None:
    n = b.choice[c]
    kids = p.kids[n]
    a, z = (k in b.space and p.role[b.choice[k]] == TRANS for k in (kids[0], kids[-1]))
    results = {p.mark[b.choice[x]] for x in b.classes if p.role[b.choice[x]] == GET}
    words, joined = (1.0, 1.0), len(b.anchors) > 1 or bool(b.patterns)
    if p.role[n] == CONTRACT:
        words = _words(p, b, kids[0]), _words(p, b, kids[-1])
    w.anchors.append(Anchor(n, a, z, tuple(sorted(results)), words, joined))
    share = getattr(p.snapshot.ops[n], "read_share", 1.0)
    for place, (k, again) in enumerate(zip(kids, _rereads(p, n), strict=True)):
        part = math.ceil(p.numel[k] * share) if place in KEYED else p.numel[k]
        w.passes[k] = 1
        w.need[k] = max(w.need.get(k, 0), part * again)
        w.touched[k] = max(w.touched.get(k, 0), part)


def _words(p: Problem, b: Body, c: int) -> float:
    """Words of memory that an element of c takes, all that it is computed from."""
    if c not in b.space:
        return 1.0
    stack, seen, words = [c], {c}, 0.0
    while stack:
        for k in p.kids[b.choice[stack.pop()]]:
            if k in seen:
                continue
            seen.add(k)
            if k in b.space:
                stack.append(k)
            elif k in b.operands and p.numel[k] > 1:
                words += p.numel[k] * p.itemsize[k] / 4
    return round(words / max(1, p.numel[c]), 3)


def _tiles(p: Problem, b: Body) -> int:
    """Workgroups of products of few rows."""
    return sum(-(-p.numel[c] // TILE_SIDE) for c in b.anchors)


def _rereads(p: Problem, n: int) -> list[int]:
    """How often an anchor computes an element of each operand: once a tile of the other side."""
    if p.role[n] != CONTRACT:
        return [1] * len(p.kids[n])
    result = p.snapshot.types[p.snapshot.cls[n]]
    assert isinstance(result, Type)
    return [-(-result.shape[-1] // TILE_SIDE), -(-result.shape[-2] // TILE_SIDE)]
