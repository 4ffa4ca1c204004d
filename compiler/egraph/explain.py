"""Why each e-node was chosen: every alternative forced, repaired by descent, and priced as a whole
program."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set
from dataclasses import dataclass

from ..collector import no_collector
from ..ir import Graph, Kind
from .anchor import Anchor
from .graph import ANCHORS, GET, MOVES, TUP, Problem
from .plan import Draft, Move
from .price import TOO_LARGE
from .search import Search
from .step import trial

LITTLE = 1e-4  # of the program's cost: what an alternative must lose to be listed


@dataclass(frozen=True, slots=True)
class Other:
    """An e-node that was not chosen: what the program would cost more with it (None: no legal
    program was found)."""

    text: str
    loss: float | None
    why: str
    is_view: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A class with alternatives that stands for `times` classes alike."""

    cls: int
    type: str
    times: int
    chosen: str
    others: tuple[Other, ...]


class Explainer:
    """Answers about a finished search, worked out when they are asked for and then kept."""

    def __init__(self, search: Search) -> None:
        self._search, self._lock = search, threading.Lock()
        self._known: dict[int, list[tuple[list[int], Choice]]] = {}
        search.draft.pricer.forget()

    def choices(self, most: int) -> list[tuple[list[int], Choice]]:
        """See `choices`."""
        with self._lock, no_collector():
            if most not in self._known:
                self._known[most] = choices(self._search, most)
            return self._known[most]

    def lines(self, graph: Graph, outs: Iterable[int], stored: Set[int]) -> set[str]:
        """The user's lines of what the traced program computes for classes `outs`, down to the
        classes that are stored."""
        class_of = self._search.p.snapshot.class_of
        found: set[str] = set()
        wanted = set(outs)
        stack = [n for n in graph.sources if class_of.get(n) in wanted]
        seen = set(stack)
        while stack:
            node = stack.pop()
            if node.kind is not Kind.INPUT:
                found.add(graph.sources.get(node, ""))
            new = [o for o in node.operands if o not in seen and class_of.get(o, -1) not in stored]
            seen.update(new)
            stack += new
        return found - {""}


def choices(search: Search, most: int) -> list[tuple[list[int], Choice]]:
    """The choices of a finished search that matter, each with the classes that it stands for; at
    most `most` alternatives are tried.

    Those about contractions, reductions and ops with several results come first, then large values
    first. Classes that look alike in a line of text are one choice.
    """
    d, p = search.draft, search.p
    alike: dict[tuple[str, ...], list[int]] = {}
    for c in _decided(search):
        alike.setdefault((repr(p.snapshot.types[c]), *_texts(d, c)), []).append(c)
    found: list[tuple[list[int], Choice]] = []
    for (type_, chosen, *_), classes in alike.items():
        if most <= 0:
            break
        c = classes[len(classes) // 2]
        tried = [_forced(search, c, n) for n in alternatives_of(d, c)]
        most -= len(tried)
        others = [o for o in tried if _counts(p, o, c, LITTLE * d.cost)]
        if others:
            found.append((classes, Choice(c, type_, len(classes), chosen, tuple(others))))
    return found


def _decided(search: Search) -> list[int]:
    """Classes of the program that have alternatives, in the order in which they are explained."""
    p, d = search.p, search.draft
    place = {c: i for i, orbit in enumerate(search.orbits) for c in orbit}
    found = [c for c in p.live if search.moves.is_live(c) and alternatives_of(d, c)]
    return sorted(found, key=lambda c: (not _heavy(p, c), -p.numel[c], -place[c], c))


def alternatives_of(d: Draft, c: int) -> list[int]:
    """E-nodes that a class could have been, other views of the same value left out."""
    p, chosen = d.p, d.choice[c]
    moved = p.role[chosen] in MOVES
    return [n for n in p.candidates[c] if n != chosen and not (moved and p.role[n] in MOVES)]


def _texts(d: Draft, c: int) -> list[str]:
    chosen = d.choice[c]
    return [describe(d, n) for n in (chosen, *alternatives_of(d, c))]


def _counts(p: Problem, other: Other, c: int, little: float) -> bool:
    """Is an alternative worth a line: not a view that leads back here, not a trifle."""
    if other.loss is None:
        return not other.is_view
    return other.loss > little or _heavy(p, c)


def _heavy(p: Problem, c: int) -> bool:
    return any(p.role[n] in ANCHORS or p.role[n] == TUP for n in p.candidates[c])


def describe(d: Draft, n: int) -> str:
    """`dot(add, input)`, `attention(dot, dot, dot)[0]`: an e-node and what its operands are now."""
    p = d.p
    suffix = ""
    if p.role[n] == GET and d.choice[p.kids[n][0]] >= 0:
        suffix, n = f"[{p.mark[n]}]", d.choice[p.kids[n][0]]
    names = [p.name(d.choice[k]) if d.choice[k] >= 0 else "?" for k in p.snapshot.kids[n]]
    return f"{p.name(n)}({', '.join(names)}){suffix}" if names else p.name(n) + suffix


def _forced(search: Search, c: int, n: int) -> Other:
    d, p = search.draft, search.p
    text, is_view = describe(d, n), p.role[n] in MOVES
    if any(d.choice[k] < 0 for k in p.kids[n]):
        return Other(text, None, "its operands have no term", is_view)
    mark = d.mark()
    before = _sums(d)
    legal = trial(d, all_results(d, c, n), force=True)
    loss, why = None, ""
    if not legal:
        why = _unfit(search, n) if p.role[n] == GET else _illegal(d)
    if legal:
        touched = set(d.touched)
        search.descend(sorted(x for x in touched if d.kern[x] >= 0), touched)
        loss, why = d.cost - mark.cost, _difference(before, _sums(d))
        if loss >= TOO_LARGE:
            why = f"values too large for a binding, {why}"
    d.rollback(mark)
    return Other(text, loss, why, is_view)


def _illegal(d: Draft) -> str:
    """Why the move that was just tried gave no program."""
    p = d.p
    made = (p.candidates[p.kids[n][0]][0] if p.role[n] == GET else n for n in d.refused)
    names = list(dict.fromkeys(p.name(n) for n in made))
    if not names:
        return "its kernels would wait for each other, or too many would change"
    together = " at once" if len(names) > 1 else " with what it would be computed from"
    return f"no kernel of {d.pricer.target.name} can compute {' and '.join(names)}{together}"


def _unfit(search: Search, n: int) -> str:
    """Why a result of an op with several has no kernel."""
    d, p = search.draft, search.p
    target, made = d.pricer.target, p.kids[n][0]
    ops = [m for m in p.candidates[made] if all(d.choice[k] >= 0 for k in p.kids[m])]
    results = tuple(sorted({p.mark[n]}))
    if ops and all(d.pricer.anchor(Anchor(m, results=results)) is None for m in ops):
        return f"no kernel of {target.name} fits its shape"
    return "it reads stored values only, and some of its operands are not worth storing"


def all_results(d: Draft, c: int, n: int) -> Move:
    """Flip a class; results of one op go together, both to it and away from it."""
    p = d.p
    flips = {c: n}
    if p.role[n] == GET:
        for x in p.results[p.kids[n][0]]:
            flips[x] = next(
                m for m in p.candidates[x] if p.role[m] == GET and p.kids[m] == p.kids[n]
            )
    elif p.role[d.choice[c]] == GET:
        left = p.kids[d.choice[c]]
        for x in p.results[left[0]]:
            rest = [
                m
                for m in p.candidates[x]
                if p.role[m] != GET and all(d.choice[k] >= 0 for k in p.kids[m])
            ]
            if x != c and rest and p.kids[d.choice[x]] == left:
                flips[x] = rest[0]
    return Move(flips=tuple((x, m) for x, m in flips.items() if d.choice[x] != m))


def _sums(d: Draft) -> tuple[int, float, float]:
    kernels = d.kernels.values()
    return (
        sum(k.launches for k in kernels),
        sum(k.nbytes for k in kernels),
        sum(k.flops for k in kernels),
    )


def _difference(before: tuple[int, float, float], after: tuple[int, float, float]) -> str:
    """What the alternative costs more and less, in words."""
    launches, nbytes, flops = (b - a for a, b in zip(before, after, strict=True))
    parts = []
    if launches:
        parts.append(f"{launches:+d} dispatch{'es' if abs(launches) > 1 else ''}")
    if abs(nbytes) >= 0.5:
        parts.append(f"{nbytes / 1e6:+.3g} MB")
    if abs(flops) >= 0.5:
        parts.append(f"{flops / 1e6:+.3g} MFLOP")
    return ", ".join(parts) or "equal work"
