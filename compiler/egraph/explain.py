"""Why each e-node was chosen: every alternative forced, repaired by descent, and priced as a whole
program."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from itertools import zip_longest

from ..collector import no_collector
from ..ir import Graph, Kind, Node
from .anchor import Anchor
from .graph import ANCHORS, GET, MOVES, STORABLE, TUP, VIEW, Problem
from .plan import NEW, Draft, Move
from .price import TOO_LARGE
from .rules import all_rules, program_rules
from .search import Search
from .step import trial

READERS = 4  # kernels with which the one that stores what they read is tried as one
LITTLE = 1e-4  # of the program's cost: what an alternative must lose to be listed


@dataclass(frozen=True, slots=True)
class Other:
    """An e-node that was not chosen, or a place where it could be computed: what the program would
    cost more with it (None: no legal program was found), and the rule that made it, "" for the
    program's own."""

    text: str
    loss: float | None
    why: str
    is_view: bool = False
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Choice:
    """A class with alternatives that stands for `times` classes alike; `lines` are the user's, of
    those that the program as traced has."""

    cls: int
    type: str
    times: int
    chosen: str
    others: tuple[Other, ...]
    lines: tuple[str, ...] = ()


class Explainer:
    """Answers about a finished search, worked out when they are asked for and then kept."""

    def __init__(self, search: Search, sources: Mapping[Node, str]) -> None:
        self._search, self._lock = search, threading.Lock()
        self._known: dict[int, list[tuple[list[int], Choice]]] = {}
        self._stored: dict[int, list[Choice]] = {}
        class_of = search.p.snapshot.class_of
        self._line: dict[int, str] = {}
        for node, line in sources.items():
            if line and node in class_of:
                self._line.setdefault(class_of[node], line)
        search.draft.pricer.forget()

    def line(self, c: int) -> tuple[str, ...]:
        """The user's line of a class, if the program as traced has it."""
        return (self._line[c],) if c in self._line else ()

    def under_views(self, c: int) -> int:
        """The class that lies in memory where class c is a view of it."""
        d = self._search.draft
        while d.choice[c] >= 0 and d.p.role[d.choice[c]] == VIEW:
            c = d.p.kids[d.choice[c]][0]
        return c

    def choices(self, most: int) -> list[tuple[list[int], Choice]]:
        """See `choices`."""
        with self._lock, no_collector():
            if most not in self._known:
                self._known[most] = [
                    (classes, replace(choice, lines=self._lines(classes)))
                    for classes, choice in choices(self._search, most)
                ]
            return self._known[most]

    def _lines(self, classes: Iterable[int]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(line for c in classes for line in self.line(c)))

    def stored(self, outs: Iterable[int]) -> list[Choice]:
        """Why one kernel stores classes `outs` for others: what it would cost to compute them where
        they are read, or in one kernel with a reader. Results are stored in any case."""
        d, found = self._search.draft, list[Choice]()
        with self._lock, no_collector():
            for c in outs:
                if d.kern[c] < 0 or c in d.must or not d.readers[c]:
                    continue
                if c not in self._stored:
                    self._stored[c] = [
                        replace(choice, lines=self.line(c)) for choice in stored(d, c)
                    ]
                found += self._stored[c]
        return found

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
    live = (c for c in p.live if search.moves.is_live(c) or c in d.chain)
    found = [c for c in live if alternatives_of(d, c)]
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
    return other.loss > little or _heavy(p, c) or _is_added(other.rule)


def _is_added(rule: str) -> bool:
    """Is a rule one that the user added: what it made is told in any case."""
    return rule not in _own_rules()


@cache
def _own_rules() -> frozenset[str]:
    rules = (*all_rules(), *program_rules())
    return frozenset(("", "constant", *(rule.base for rule in rules)))


def _heavy(p: Problem, c: int) -> bool:
    return any(p.role[n] in ANCHORS or p.role[n] == TUP for n in p.candidates[c])


def stored(d: Draft, c: int) -> list[Choice]:
    """What it would cost not to store a class that kernels read; none if that is impossible."""
    p, k = d.p, d.kern[c]
    readers = sorted(d.readers[c])
    several = f"{len(readers)} kernels that read" if len(readers) > 1 else "kernel that reads"
    there = f"computed again in the {several} it"
    tried = [_moved(d, Move(drop=(c,)), there)]
    merged = [
        _moved(d, Move(merge=(q, k)), "in one kernel with a reader")
        for q in readers[:READERS]
        if q != k
    ]
    legal = [other for other in merged if other.loss is not None]
    if legal:
        tried.append(min(legal, key=lambda other: other.loss or 0.0))
    elif merged:
        tried.append(merged[0])
    text = f"stored {describe(d, d.choice[c])}"
    return [Choice(c, repr(p.snapshot.types[c]), 1, text, tuple(tried))]


def _moved(d: Draft, move: Move, text: str) -> Other:
    """What a move would cost."""
    mark, before = d.mark(), _sums(d)
    if not trial(d, move, force=True):
        return Other(text, None, _illegal(d))
    loss, why = d.cost - mark.cost, _difference(before, _sums(d))
    d.rollback(mark)
    return Other(text, loss, why)


def describe(d: Draft, n: int) -> str:
    """`dot(add, input)`, `attention(dot, dot, dot)[0]`: an e-node and what its operands are now."""
    p = d.p
    suffix = ""
    if p.role[n] == GET and d.choice[p.kids[n][0]] >= 0:
        suffix, n = f"[{p.mark[n]}]", d.choice[p.kids[n][0]]
    names = [p.name(d.choice[k]) if d.choice[k] >= 0 else "?" for k in p.snapshot.kids[n]]
    called = getattr(p.snapshot.ops[n], "operand_names", ())
    names = [f"{c}={x}" if c else x for c, x in zip_longest(called, names, fillvalue="") if x]
    return f"{p.name(n)}({', '.join(names)}){suffix}" if names else p.name(n) + suffix


def _forced(search: Search, c: int, n: int) -> Other:
    d, p = search.draft, search.p
    text, is_view, rule = describe(d, n), p.role[n] in MOVES, rule_of(d, n)
    if any(d.choice[k] < 0 for k in p.kids[n]):
        return Other(text, None, "its operands have no term", is_view, rule)
    mark = d.mark()
    before = _sums(d)
    legal = force(d, c, n)
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
    return Other(text, loss, why, is_view, rule)


def rule_of(d: Draft, n: int) -> str:
    """The rule that made an e-node, of a result that of the op which gives it."""
    rules = d.p.snapshot.rule
    if d.p.role[n] == GET and d.choice[d.p.kids[n][0]] >= 0:
        return rules[n] or rules[d.choice[d.p.kids[n][0]]]
    return rules[n]


def force(d: Draft, c: int, n: int) -> bool:
    """Make e-node n that of class c in the draft; where the kernels around it cannot stay as they
    are, with what it makes in a kernel of its own, or that and what it reads. False, with the
    draft as it was, if there is no program."""
    return any(trial(d, move, force=True) for move in _ways(d, c, n))


def _ways(d: Draft, c: int, n: int) -> Iterator[Move]:
    p, move = d.p, all_results(d, c, n)
    yield move
    apart = {x: NEW for x, m in move.flips if d.kern[x] >= 0 and p.role[m] in STORABLE - {GET}}
    if apart:
        yield move._replace(put=tuple(apart.items()))
    apart |= {x: NEW for x, m in move.flips if p.role[m] in STORABLE - {GET}}
    reads = [d.choice[p.kids[n][0]]] if p.role[n] == GET else [m for _, m in move.flips]
    for m in reads:
        for k in p.kids[m] if m >= 0 else ():
            while d.choice[k] >= 0 and p.role[d.choice[k]] == VIEW:
                k = p.kids[d.choice[k]][0]
            if d.choice[k] >= 0 and d.kern[k] < 0 and p.role[d.choice[k]] in STORABLE:
                apart[k] = NEW
    if apart:
        yield move._replace(put=tuple(apart.items()))


def _illegal(d: Draft) -> str:
    """Why the move that was just tried gave no program."""
    p = d.p
    made = (p.candidates[p.kids[n][0]][0] if p.role[n] == GET else n for n in d.refused)
    names = list(dict.fromkeys(p.name(n) for n in made))
    if not names:
        return "its kernels would wait for each other, or too many would change"
    together = " at once" if len(names) > 1 else " with what it would be computed from"
    return f"no kernel of {_device(d)} can compute {' and '.join(names)}{together}"


def _device(d: Draft) -> str:
    """The target's name without what stands in brackets after it."""
    return d.pricer.target.name.partition(" (")[0]


def _unfit(search: Search, n: int) -> str:
    """Why a result of an op with several has no kernel."""
    d, p = search.draft, search.p
    made = p.kids[n][0]
    ops = [m for m in p.candidates[made] if all(d.choice[k] >= 0 for k in p.kids[m])]
    results = tuple(sorted({p.mark[n]}))
    if ops and all(d.pricer.anchor(Anchor(m, results=results)) is None for m in ops):
        return f"no kernel of {_device(d)} fits its shape"
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
                # a transpose of what is a transpose of it now would be read by itself
                flips[x] = min(rest, key=lambda m: p.role[m] in MOVES)
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
