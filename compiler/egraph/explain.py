"""Why each e-node was chosen: every alternative forced, repaired by descent, and priced as a whole program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .graph import ANCHORS, GET, MOVES, TUP, Problem
from .plan import Draft, Move
from .search import Search


@dataclass(frozen=True, slots=True)
class Other:
    """An e-node that was not chosen: what the program would cost more with it (None: no legal program was found)."""

    text: str
    loss: float | None
    why: str


@dataclass(frozen=True, slots=True)
class Choice:
    """A class with alternatives that stands for `times` classes alike."""

    cls: int
    type: str
    times: int
    chosen: str
    others: tuple[Other, ...]


def choices(search: Search, most: int) -> list[Choice]:
    """The choices of a finished search, those about contractions and reductions first; at most `most` alternatives."""
    d, p = search.draft, search.p
    found: list[tuple[bool, Choice]] = []
    for orbit in sorted(_decided(search), key=lambda o: not _heavy(p, o[0])):
        if most <= 0:
            break
        c = orbit[len(orbit) // 2]
        others: list[Other] = []
        for n in p.candidates[c]:
            if n == d.choice[c] or (p.role[n] in MOVES and p.role[d.choice[c]] in MOVES):
                continue
            others.append(_forced(search, c, n))
            most -= 1
        if others:
            chosen = describe(p, d.choice, d.choice[c])
            entry = Choice(c, repr(p.snapshot.types[c]), len(orbit), chosen, tuple(others))
            found.append((_heavy(p, c), entry))
    return [entry for _, entry in found]


def _decided(search: Search) -> Iterator[list[int]]:
    """Orbits of classes with alternatives that are part of the program, outputs of the program last."""
    p = search.p
    for orbit in reversed(search.orbits):
        alive = [c for c in orbit if len(p.candidates[c]) > 1 and search.moves.is_live(c)]
        same: dict[int, list[int]] = {}
        for c in alive:
            same.setdefault(p.label[search.draft.choice[c]], []).append(c)
        yield from same.values()


def _heavy(p: Problem, c: int) -> bool:
    return any(p.role[n] in ANCHORS or p.role[n] == TUP for n in p.candidates[c])


def describe(p: Problem, choice: list[int], n: int) -> str:
    """`dot(add, input)`: an e-node and what its operands are now."""
    names = [p.name(choice[k]) if choice[k] >= 0 else "?" for k in p.snapshot.kids[n]]
    return f"{p.name(n)}({', '.join(names)})" if names else p.name(n)


def _forced(search: Search, c: int, n: int) -> Other:
    d, p = search.draft, search.p
    text = describe(p, d.choice, n)
    if any(d.choice[k] < 0 for k in p.kids[n]):
        return Other(text, None, "its operands have no term")
    mark = d.mark()
    before = _sums(d)
    legal = d.trial(_all_results(d, c, n), force=True)
    loss, why = None, "no legal kernels"
    if legal:
        touched = set(d.touched)
        search.descend(sorted(x for x in touched if d.kern[x] >= 0), touched)
        loss, why = d.cost - mark.cost, _difference(before, _sums(d))
    d.rollback(mark)
    return Other(text, loss, why)


def _all_results(d: Draft, c: int, n: int) -> Move:
    """Flip a class; results of one op go together, both to it and away from it."""
    p = d.p
    flips = {c: n}
    if p.role[n] == GET:
        for x in p.results[p.kids[n][0]]:
            flips[x] = next(m for m in p.candidates[x] if p.role[m] == GET and p.kids[m] == p.kids[n])
    elif p.role[d.choice[c]] == GET:
        left = p.kids[d.choice[c]]
        for x in p.results[left[0]]:
            rest = [m for m in p.candidates[x] if p.role[m] != GET and all(d.choice[k] >= 0 for k in p.kids[m])]
            if x != c and rest and p.kids[d.choice[x]] == left:
                flips[x] = rest[0]
    return Move(flips=tuple((x, m) for x, m in flips.items() if d.choice[x] != m))


def _sums(d: Draft) -> tuple[int, float, float]:
    kernels = d.kernels.values()
    return sum(k.launches for k in kernels), sum(k.nbytes for k in kernels), sum(k.flops for k in kernels)


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
