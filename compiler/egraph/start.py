"""The first draft of a choice of e-nodes: legal, with what is plainly worth storing stored."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import CompileError
from .graph import ANCHORS, BCAST, CONST, EW, GET, LEAF, MOVES, TRANS, TUP, VIEW, Problem
from .greedy import order_of
from .plan import Draft, Move
from .price import Pricer
from .step import trial


def start(p: Problem, pricer: Pricer, choice: list[int], everything: bool = False) -> Draft:
    """A legal draft: results, anchors and shared elementwise values stored (with `everything`, all
    elementwise values), the rest computed where used; a kernel that is illegal is cut below its
    results."""
    draft = Draft(p, pricer, choice)
    order = order_of(p, choice)
    assert order is not None
    outs: dict[int, list[int]] = {}
    tuples: dict[int, int] = {}
    for c in _first_stored(draft, order, everything):
        n = choice[c]
        k = tuples.get(p.kids[n][0], -1) if p.role[n] == GET else -1
        if (
            k < 0
            or len(outs[k]) + len(set(p.kids[choice[p.kids[n][0]]])) >= pricer.target.max_bindings
        ):
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
    unread = [
        c for c in order if draft.kern[c] >= 0 and not draft.readers[c] and c not in draft.must
    ]
    if unread:
        trial(draft, Move(drop=tuple(unread)), force=True)
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
