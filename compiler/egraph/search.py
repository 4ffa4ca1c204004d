"""Local search over drafts: sweeps of moves, orbit by orbit, and kicks out of local minima.

A move is tried on one representative of each distinct state in an orbit; only what gains there is
tried on the other members, each with its own trial, so costs are exact. Effort is bounded by
counts, never by a clock: equal inputs give equal results.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from .graph import ANCHORS, BCAST, GET, TRANS, VIEW
from .greedy import order_of
from .moves import Key, MoveKind, Moves
from .orbits import colors
from .plan import Draft, Move
from .step import EPSILON, trial

SWEEPS: tuple[MoveKind, ...] = (
    "tuple",
    "adopt",
    "inline",
    "merge",
    "sibling",
    "flip",
    "tuple",
    "put",
    "store",
    "stage",
    "twin",
    "again",
)
CROWD = 8  # kernels that compute a value
LOCAL: tuple[MoveKind, ...] = ("merge", "sibling", "put", "inline", "adopt")


@dataclass(frozen=True, slots=True)
class Effort:
    """Bounds of the search. `kicks` force moves that lose at first, and descend around them."""

    rounds: int = 6
    kicks: tuple[MoveKind, ...] = ("tuple", "flip", "store")
    representatives: int = 4  # distinct states of an orbit
    accepted: int = 6  # moves in a row around one class
    descent: int = 40  # accepted moves after a kick
    tuples: bool = True  # kernels of several results are tried
    wide: bool = True  # values are put into kernels that read what they are computed from
    again: bool = True  # what one kernel stores is computed in another as well
    steepest: bool = False  # the best of all moves after a kick, not the best around one class
    patience: int = 60  # kicks in a row that gain nothing, after which a sweep ends
    slack: float = 0.01  # of the program's cost, what a kick may lose at first
    hope: float = math.inf  # of the price of the kernels that a kick changes, what it may lose
    near_misses: int = 24  # kicks a round on moves that lost by little
    enough: float = 1e-4  # a round that gains less ends the search


class Search:
    """Improves a draft in place."""

    def __init__(self, draft: Draft, effort: Effort, color: list[int] | None = None) -> None:
        self.draft, self.p, self.effort = draft, draft.p, effort
        self.color = color or colors(draft.p)
        self.moves = Moves(draft, self.color, effort.wide)
        order = order_of(draft.p, draft.choice)
        assert order is not None
        position = {c: i for i, c in enumerate(order)}
        self.members: dict[int, list[int]] = {}
        for c in draft.p.live:
            self.members.setdefault(self.color[c], []).append(c)
        for orbit in self.members.values():
            orbit.sort(key=lambda c: (position.get(c, len(position)), c))
        self.orbits = sorted(self.members.values(), key=lambda m: -position.get(m[len(m) // 2], -1))
        self.version = dict.fromkeys(
            self.members, 0
        )  # of an orbit: grows when something changes around it
        self.done: dict[tuple[MoveKind, bool, int], int] = {}
        self.missed: dict[tuple[MoveKind, int, Key], tuple[float, int]] = {}
        self.kicked: dict[tuple[MoveKind, int, Key], int] = {}
        wanted = (("stage", effort.wide), ("again", effort.again), ("tuple", effort.tuples))
        off = {kind for kind, on in wanted if not on}
        self.sweeps: list[MoveKind] = [kind for kind in SWEEPS if kind not in off]
        self.kicks: list[MoveKind] = [kind for kind in effort.kicks if kind not in off]
        self.failed = 0  # kicks in a row that gained nothing
        launch = draft.pricer.target.profile.launch
        self.slack = max(
            10 * launch, effort.slack * draft.cost
        )  # how much a kick may lose at first
        self.launch = launch

    def run(self) -> None:
        """Rounds of sweeps and kicks until one gains next to nothing."""
        for _ in range(self.effort.rounds):
            before = self.draft.cost
            accepted = sum(self.sweep(kind) for kind in self.sweeps)
            if self.kicks:
                accepted += (
                    sum(self.sweep(kind, kick=True) for kind in self.kicks)
                    + self.kick_near_misses()
                )
            if not accepted or before - self.draft.cost < self.effort.enough * before:
                break

    def sweep(self, kind: MoveKind, kick: bool = False) -> int:
        """Try the moves of a kind in every orbit that changed since; how many were accepted."""
        accepted, self.failed = 0, 0
        self.moves.refresh()
        for orbit in self._dearest_first() if kick else self.orbits:
            if self.failed >= self.effort.patience:
                break
            color = self.color[orbit[0]]
            if self.done.get((kind, kick, color)) == self.version[color]:
                continue
            for c in self._representatives(orbit):
                for _ in range(self.effort.accepted):
                    key = self.attempt(c, kind, None, kick)
                    if key is None:
                        break
                    accepted += 1 + sum(
                        self.attempt(x, kind, key, kick) is not None for x in orbit if x != c
                    )
            self.done[kind, kick, color] = self.version[color]
        return accepted

    def attempt(
        self, c: int, kind: MoveKind, only: Key | None = None, kick: bool = False
    ) -> Key | None:
        """Try moves around a class (of key `only`, if given) until one is accepted: its key."""
        for key, move in self.moves.around(c, kind):
            if (only is not None and key != only) or (
                kick and kind == "flip" and self._same_value(move)
            ):
                continue
            if kick and not self._worth_kick(c, kind):
                continue
            touched = self.kick(move, kind != "tuple") if kick else self._try(move)
            if touched:
                self.draft.commit()
                self._changed(touched)
                return key
            if not kick and self.draft.loss:
                worse, price = self.draft.loss
                if worse < max((3 if kind == "flip" else 1.5) * self.launch, 0.15 * price):
                    self.missed[kind, self.color[c], key] = worse, c
        return None

    def _try(self, move: Move) -> set[int]:
        return self.draft.touched if trial(self.draft, move) else set()

    def _worth_kick(self, c: int, kind: MoveKind) -> bool:
        """Kicks are dear: none for a number in many kernels, none to store every little thing."""
        inside = len(self.draft.inside[c])
        if kind == "store" and (inside < 2 and self.p.role[self.draft.choice[c]] not in ANCHORS):
            return False
        return kind == "store" or inside <= CROWD

    def _same_value(self, move: Move) -> bool:
        """True for a flip to another view of the same value, which a kick cannot help."""
        return self.p.role[move.flips[0][1]] in (VIEW, TRANS, BCAST)

    def _changed(self, touched: Iterable[int]) -> None:
        p, choice = self.p, self.draft.choice
        for c in touched:
            self.version[self.color[c]] += 1
            if p.role[choice[c]] == GET:
                self.version[self.color[p.kids[choice[c]][0]]] += 1
            for t in self.moves.tuples.get(c, ()):
                self.version[self.color[t]] += 1

    # -- kicks

    def _dearest_first(self) -> list[list[int]]:
        """The orbits by the price of the kernels around all their members: kicks end early."""
        d = self.draft

        def price(orbit: list[int]) -> float:
            c = orbit[len(orbit) // 2]
            around = d.inside[c] | {d.kern[c]} - {-1}
            return len(orbit) * math.fsum(d.kernels[k].cost for k in around)

        return sorted(self.orbits, key=price, reverse=True)

    def kick(self, move: Move, bounded: bool) -> set[int]:
        """Force a move and descend around it, unless the total rose: the classes touched.

        A `bounded` one that loses too much at first is given up.
        """
        d = self.draft
        mark = d.mark()
        if trial(d, move, force=True) and not (bounded and self._hopeless(d.cost - mark.cost)):
            touched = set(d.touched)
            if self.effort.steepest:
                if self.effort.wide:
                    # what it stored stays so at first: else to take it back is the best move
                    self.descend_steepest(touched, {*move.together, *(c for c, _ in move.put)})
                self.descend_steepest(touched)
            else:
                # what was put last: to take the kick back must not be what is tried first
                put = {c for c, _ in move.put}
                stored = sorted((c for c in touched if d.kern[c] >= 0), key=lambda c: (c in put, c))
                self.descend(stored, touched)
            if d.cost < mark.cost - EPSILON:
                self.failed = 0
                return touched
        d.rollback(mark)
        self.failed += 1
        return set()

    def _hopeless(self, worse: float) -> bool:
        """Does a kick lose more at first than a descent ever wins back."""
        return worse > min(self.slack, self.effort.hope * self.draft.before)

    def descend(self, queue: list[int], touched: set[int]) -> None:
        """Accept the best move around each of a few classes, and around what that changes."""
        d = self.draft
        waiting, accepted = set(queue), 0
        for c in queue:  # grows while it is walked
            waiting.discard(c)
            if accepted >= self.effort.descent:
                return
            move = self._best([c])
            if move and trial(d, move):
                accepted += 1
                touched |= d.touched
                new = [x for x in sorted(d.touched) if d.kern[x] >= 0 and x not in waiting]
                waiting.update(new)
                queue.extend(new)

    def descend_steepest(self, touched: set[int], kept: Collection[int] = ()) -> None:
        """Accept the best of all moves around a few classes again and again. Kernels of `kept`
        classes stay, and store them."""
        d = self.draft
        for _ in range(self.effort.descent):
            move = self._best(sorted(c for c in touched if d.kern[c] >= 0), kept)
            if move is None or not trial(d, move):
                return
            touched |= d.touched

    def _best(self, classes: Iterable[int], kept: Collection[int] = ()) -> Move | None:
        """The move around some classes that gains most and takes no `kept` class from its
        kernel."""
        d = self.draft
        mark, best, gain = d.mark(), None, EPSILON
        if self.effort.steepest:
            self.moves.refresh()
        for c in classes:
            if not self.moves.is_live(c):
                continue
            for kind in (*LOCAL, "twin") if self.effort.steepest else LOCAL:
                for _, move in self.moves.around(c, kind):
                    if kept and self._takes(move, kept):
                        continue
                    if trial(d, move, least=gain):
                        best, gain = move, mark.cost - d.cost
                        d.rollback(mark)
        return best

    def _takes(self, move: Move, kept: Collection[int]) -> bool:
        """Does a move end the kernel of a kept class, or its being stored."""
        kern = self.draft.kern
        ends = move.merge or ()
        return any(c in move.drop or kern[c] in ends for c in kept) or any(
            c in kept for c, _ in move.put
        )

    def kick_near_misses(self) -> int:
        """Kick with the moves that lost by little, least loss first; how many were accepted."""
        accepted = tries = 0
        missed: list[tuple[float, int, MoveKind, Key]] = []
        for (kind, _, key), (worse, c) in self.missed.items():
            missed.append((worse, c, kind, key))
        self.missed = {}
        for _, c, kind, key in sorted(missed):
            entry = kind, self.color[c], key
            if self.kicked.get(entry) == self.version[self.color[c]]:
                continue
            tries += 1
            if tries > self.effort.near_misses:
                break
            if self.attempt(c, kind, key, kick=True) is not None:
                rest = (x for x in self.members[self.color[c]] if x != c)
                accepted += 1 + sum(self.attempt(x, kind, key, kick=True) is not None for x in rest)
            self.kicked[entry] = self.version[self.color[c]]
        return accepted

    # -- orbits

    def _representatives(self, orbit: list[int]) -> list[int]:
        """One class of each state found in an orbit, the middle of the model first."""
        if len(orbit) <= 2:
            return orbit
        found: dict[object, int] = {}
        middle = len(orbit) // 2
        for c in orbit[middle:] + orbit[:middle]:
            found.setdefault(self._state(c), c)
            if len(found) >= self.effort.representatives:
                break
        return list(found.values())

    def _state(self, c: int) -> object:
        """What a class looks like in the draft."""
        d, p = self.draft, self.p
        if c in p.results:
            return tuple(
                (
                    d.kern[x] >= 0,
                    len(d.inside[x]),
                    self._role(x),
                    tuple(self._role(y) for y, _ in self.moves.views.get(x, ())),
                )
                for x in p.results[c]
            )
        n = d.choice[c]
        if n < 0:
            return None
        color, kernels = self.color, d.kernels
        outs = [color[o] for q in d.inside[c] for o in kernels[q].outs]
        outs.sort()
        kids = tuple([color[k] for k in p.kids[n]])
        return d.kern[c] >= 0, p.label[n], kids, len(d.readers[c]), tuple(outs)

    def _role(self, c: int) -> int:
        return self.p.role[self.draft.choice[c]] if self.draft.choice[c] >= 0 else -1
