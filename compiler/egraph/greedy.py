"""The first choice of e-nodes: greedy over shared subgraphs, knowing nothing of kernels."""

from __future__ import annotations

import heapq
import math

from .anchor import Anchor
from .graph import ANCHORS, CONST, CONTRACT, EW, GET, LEAF, MOVES, RED, TRANS, TUP, VIEW, Problem
from .price import TOO_LARGE, Pricer

EVERY = (0, 1, 2)  # results of an op
WINDOW = 80  # levels below a class whose sharing is seen


NO_KERNEL = 1e15  # ns of what cannot run: anything else is cheaper


def node_costs(p: Problem, pricer: Pricer, fused: bool) -> list[float]:
    """ns of each e-node on its own. When `fused`, elementwise work and movement are nearly free."""
    profile = pricer.target.profile
    nbytes = [n * s for n, s in zip(p.numel, p.itemsize, strict=True)]
    out = []
    for n, role in enumerate(p.role):
        written = nbytes[p.snapshot.cls[n]]
        moved = written + sum(nbytes[k] for k in set(p.kids[n]))
        if role in (LEAF, CONST, VIEW, GET):
            cost = 0.0
        elif fused and (role == EW or role in MOVES):
            cost = 1 + 0.1 * written / profile.bandwidth
        elif role in MOVES and role != TRANS:
            cost = 0.0
        elif fused and role == RED:
            cost = 0.3 * (profile.launch + moved / profile.bandwidth)
        else:
            heavy = pricer.anchor(Anchor(n, results=EVERY)) if role in (CONTRACT, TUP) else None
            busy = heavy.busy if heavy else 0.0
            cost = profile.launch + max(moved / profile.bandwidth, busy)
            if role == TUP and heavy is None:
                cost += NO_KERNEL
            if role in ANCHORS and written > pricer.target.max_binding_bytes:
                cost += TOO_LARGE
        out.append(cost)
    return out


def greedy(p: Problem, cost: list[float]) -> list[int]:
    """An e-node a live class such that the classes that a class needs, each counted once, cost
    little.

    Sets of needed classes are bounded to a window of depth, so that memory grows linearly.
    """
    depth, parents = _depths(p)
    sets: dict[int, dict[int, float]] = {}
    total: dict[int, float] = {}
    choice = [nodes[0] if len(nodes) == 1 else -1 for nodes in p.candidates]
    heap = [(depth[c], n) for c in p.live for n in p.candidates[c] if not p.kids[n]]
    heapq.heapify(heap)
    queued = {n for _, n in heap}
    while heap:
        _, n = heapq.heappop(heap)
        queued.discard(n)
        c = p.snapshot.cls[n]
        if any(k not in sets for k in p.kids[n]):
            continue
        needs = _union([sets[k] for k in dict.fromkeys(p.kids[n])])
        if c in needs:
            continue
        if len(needs) > 4 * WINDOW:
            low = depth[c] - WINDOW
            needs = {x: v for x, v in needs.items() if depth[x] >= low}
        needs[c] = cost[n]
        price = math.fsum(needs.values())
        if c not in total or price < total[c] - 1e-9:
            sets[c], total[c], choice[c] = needs, price, n
            for user in parents.get(c, ()):
                if user not in queued:
                    queued.add(user)
                    heapq.heappush(heap, (depth[p.snapshot.cls[user]], user))
    return choice if order_of(p, choice) is not None else first_found(p)


def _union(sets: list[dict[int, float]]) -> dict[int, float]:
    if not sets:
        return {}
    sets.sort(key=len, reverse=True)
    out = dict(sets[0])
    for other in sets[1:]:
        for x, v in other.items():
            out.setdefault(x, v)
    return out


def _depths(p: Problem) -> tuple[dict[int, int], dict[int, list[int]]]:
    """The level at which a class first has a term, and the e-nodes that read a class."""
    parents: dict[int, list[int]] = {}
    missing: dict[int, int] = {}
    queue: list[int] = []
    for c in p.live:
        for n in p.candidates[c]:
            kids = set(p.kids[n])
            missing[n] = len(kids)
            for k in kids:
                parents.setdefault(k, []).append(n)
            if not kids:
                queue.append(n)
    depth: dict[int, int] = {}
    for n in queue:  # grows while it is walked
        c = p.snapshot.cls[n]
        if c in depth:
            continue
        depth[c] = 1 + max((depth[k] for k in p.kids[n]), default=0)
        for user in parents.get(c, ()):
            missing[user] -= 1
            if missing[user] == 0:
                queue.append(user)
    return depth, parents


def first_found(p: Problem) -> list[int]:
    """For each class the e-node whose operands have terms earliest: never cyclic."""
    depth, _ = _depths(p)
    choice = [nodes[0] if len(nodes) == 1 else -1 for nodes in p.candidates]
    for c in p.live:
        below = [max((depth[k] for k in p.kids[n]), default=0) for n in p.candidates[c]]
        choice[c] = p.candidates[c][below.index(min(below))]
    return choice


def order_of(p: Problem, choice: list[int]) -> list[int] | None:
    """The classes that a choice uses, operands first; None when it is cyclic."""
    out: list[int] = []
    state: dict[int, int] = {}
    for root in p.roots:
        stack = [(root, False)]
        while stack:
            c, left = stack.pop()
            if left:
                state[c] = 2
                out.append(c)
                continue
            if c in state:
                continue
            state[c] = 1
            stack.append((c, True))
            for k in reversed(p.kids[choice[c]]):
                if state.get(k) == 1:
                    return None
                if k not in state:
                    stack.append((k, False))
    return out
