"""The moves around one class, by kind, each with a key that all classes of its orbit share.

tuple       an op with several results for all of them, views of results among them
adopt       everything that can use a product, reduction or result of an op uses it
inline      no longer stored: its readers compute it, from a narrower value that is stored instead
merge       its kernel and a reader's become one
sibling     two kernels with a common operand become one
twin        two kernels with as many elements become one
flip        another e-node; of a product or reduction perhaps in a kernel of its own
put         a kernel nearby stores it: one that computes or reads it, or makes or reads its operands
store       a kernel of its own stores it
stage       a reduction and what is reduced, or is an operand of that, where it is used again, get a
            kernel of their own
again       a kernel that reads it computes it instead, though it stays stored; perhaps it stores it
            too, and the kernel that did goes on computing it
split       its kernel falls apart: every output and anchor gets a kernel of its own
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from .graph import ANCHORS, BCAST, CONTRACT, EW, GET, MOVE, RED, TRANS, VIEW
from .legal import MOST_OUTPUTS
from .plan import NEW, Draft, Move

MoveKind = Literal[
    "tuple",
    "adopt",
    "inline",
    "merge",
    "sibling",
    "twin",
    "flip",
    "put",
    "store",
    "stage",
    "again",
    "split",
]
Key = tuple[object, ...]
COMPUTED = frozenset((EW, RED, CONTRACT))
APART = frozenset((RED, CONTRACT))  # may not fit a kernel that stores other values as well
TWINS = 8  # kernels alike that are tried with one
CROWD = 16  # readers of one operand beyond which they are not tried as siblings


class Moves:
    """Generates moves for a draft; `color` names orbits. When `wide`, kernels that read an operand
    of a class are nearby as well."""

    def __init__(self, draft: Draft, color: list[int], wide: bool = False) -> None:
        self.wide = wide
        self.draft, self.p, self.color = draft, draft.p, color
        self.views: dict[int, list[tuple[int, int]]] = {}  # of a class: (class, e-node)
        self.refresh()
        # tuple classes that a class, or what it is a view of, may come from
        self.tuples: dict[int, list[int]] = {}
        self.users: dict[int, list[tuple[int, int]]] = {}
        for c in self.p.live:
            for n in self.p.candidates[c]:
                for k in dict.fromkeys(self.p.kids[n]):
                    self.users.setdefault(k, []).append((c, n))
                if self.p.role[n] in (TRANS, VIEW):
                    self.views.setdefault(self.p.kids[n][0], []).append((c, n))
        for t, results in self.p.results.items():
            for x in results:
                for y in (x, *(y for y, _ in self.views.get(x, ()))):
                    self.tuples.setdefault(y, []).append(t)

    def refresh(self) -> None:
        """Look again which kernels have as many elements."""
        self.alike: dict[int, list[int]] = {}
        for k in sorted(self.draft.kernels, key=self.draft.order.__getitem__):
            self.alike.setdefault(self.draft.kernels[k].full, []).append(k)

    def around(self, c: int, kind: MoveKind) -> Iterator[tuple[Key, Move]]:
        """The moves of one kind; generated from the draft as it is when asked for the first."""
        match kind:
            case "tuple":
                return iter(self._tuple(c))
            case "adopt":
                return iter(self._adopt(c))
            case "inline":
                return iter(self._inline(c))
            case "merge":
                return iter(self._merge(c))
            case "sibling":
                return iter(self._sibling(c))
            case "twin":
                return iter(self._twin(c))
            case "flip":
                return iter(self._flip(c))
            case "put":
                return iter(self._put(c))
            case "store":
                return iter(self._store(c))
            case "stage":
                return iter(self._stage(c))
            case "split":
                return iter(self._split(c))
            case "again":
                return iter(self._again(c))

    def is_live(self, c: int) -> bool:
        return self.draft.kern[c] >= 0 or bool(self.draft.inside[c])

    def kernel_key(self, k: int) -> Key:
        return tuple(sorted(self.color[o] for o in self.draft.kernels[k].outs))

    def _inline(self, c: int) -> list[tuple[Key, Move]]:
        d = self.draft
        if d.kern[c] < 0 or c in d.must or not d.readers[c]:
            return []
        moves: list[tuple[Key, Move]] = [((), Move(drop=(c,)))]
        kids = self.p.kids[d.choice[c]]
        lone = self.p.role[d.choice[c]] == EW and len(kids) == 1 and d.kern[kids[0]] < 0
        if lone and self.p.itemsize[kids[0]] < self.p.itemsize[c]:
            moves.append((("narrow",), Move(drop=(c,), put=((kids[0], d.kern[c]),))))
        return moves

    def _merge(self, c: int) -> list[tuple[Key, Move]]:
        d, k = self.draft, self.draft.kern[c]
        if k < 0:
            return []
        mine = len(d.kernels[k].outs)
        return [
            (self.kernel_key(q), Move(merge=(q, k)))
            for q in sorted(d.readers[c])
            if q != k and len(d.kernels[q].outs) + mine <= MOST_OUTPUTS + 2 and self._fit(q, k)
        ]

    def _sibling(self, c: int) -> list[tuple[Key, Move]]:
        d, k = self.draft, self.draft.kern[c]
        if k < 0 or len(d.kernels[k].outs) >= MOST_OUTPUTS:
            return []
        near: set[int] = set()
        for o in d.kernels[k].operands:
            if len(d.readers[o]) <= CROWD:
                near |= d.readers[o]
        return self._merged(k, sorted(near - {k}))

    def _twin(self, c: int) -> list[tuple[Key, Move]]:
        d, k = self.draft, self.draft.kern[c]
        if k < 0 or len(d.kernels[k].outs) >= MOST_OUTPUTS:
            return []
        near = [q for q in self.alike.get(d.kernels[k].full, ()) if q in d.kernels and q != k]
        if len(near) > TWINS:  # those that run soonest before and after
            place = d.order[k]
            at = sum(d.order[q] < place for q in near)
            near = near[max(0, at - TWINS // 2) :][:TWINS]
        return self._merged(k, near)[:TWINS]

    def _merged(self, k: int, others: list[int]) -> list[tuple[Key, Move]]:
        """Kernel k and one of others as one kernel, as far as outputs and bindings allow."""
        d = self.draft
        mine = d.kernels[k]
        out: list[tuple[Key, Move]] = []
        for q in others:
            other = d.kernels[q]
            bindings = len(mine.outs) + len(other.outs) + len({*mine.operands, *other.operands})
            few = len(mine.outs) + len(other.outs) <= MOST_OUTPUTS
            if few and bindings <= d.pricer.target.max_bindings and self._fit(k, q):
                out.append((self.kernel_key(q), Move(merge=(k, q))))
        return out

    def _flip(self, c: int) -> list[tuple[Key, Move]]:
        d, p = self.draft, self.p
        if len(p.candidates[c]) < 2 or not self.is_live(c):
            return []
        k = d.kern[c]
        shared = k >= 0 and len(d.kernels[k].outs) > 1
        moves: list[tuple[Key, Move]] = []
        for n in p.candidates[c]:
            if n != d.choice[c] and all(d.choice[x] >= 0 for x in p.kids[n]):
                key = (p.label[n], *[self.color[x] for x in p.kids[n]])
                moves.append((key, Move(flips=((c, n),))))
                if shared and p.role[n] in APART:
                    apart = Move(flips=((c, n),), put=((c, NEW),))
                    moves.append((("apart", *key), apart))
        return moves

    def _store(self, c: int) -> list[tuple[Key, Move]]:
        d, k = self.draft, self.draft.kern[c]
        if len(d.kernels[k].outs) < 2 if k >= 0 else not d.inside[c]:
            return []
        role = self.p.role[d.choice[c]]
        return [((), Move(put=((c, NEW),)))] if role in ANCHORS or role in (EW, MOVE) else []

    def _stage(self, c: int) -> list[tuple[Key, Move]]:
        d, p = self.draft, self.p
        n = d.choice[c]
        if n < 0 or p.role[n] != RED or not self.is_live(c):
            return []
        k = d.kern[c]
        if len(d.inside[c]) == 1 and k >= 0 and len(d.kernels[k].outs) == 1:
            return []
        (x,) = p.kids[n] or (-1,)
        if x < 0 or d.kern[x] >= 0 or p.role[d.choice[x]] not in (EW, MOVE):
            return []
        below = [y for y in p.kids[d.choice[x]] if d.kern[y] < 0 and p.role[d.choice[y]] == EW]
        return [
            ((i,), Move(together=(c, y)))
            for i, y in enumerate((x, *dict.fromkeys(below)))
            if self._is_used_again(y, c if y == x else x)
        ]

    def _is_used_again(self, x: int, by: int) -> bool:
        d = self.draft
        return any(u != by and self.is_live(u) and d.choice[u] == m for u, m in self.users[x])

    def _again(self, c: int) -> list[tuple[Key, Move]]:
        d, p, k = self.draft, self.p, self.draft.kern[c]
        if k < 0 or p.role[d.choice[c]] not in (EW, RED, MOVE):
            return []
        readers = sorted(d.readers[c])
        moves: list[tuple[Key, Move]] = [
            ((0, *self.kernel_key(q)), Move(own=((c, q),))) for q in readers
        ]
        kernel = d.kernels[k]
        if len(kernel.outs) < 2:
            return moves
        near = {q for o in kernel.outs for q in d.readers[o]}
        for o in kernel.operands:
            if len(d.readers[o]) <= CROWD:
                near |= d.readers[o]
        below = self._reductions_below(c, k)
        room = len(kernel.outs) + len(below) <= MOST_OUTPUTS + 1
        for q in sorted(near - {k}):
            if len(d.kernels[q].outs) < MOST_OUTPUTS and self._can_store(c, q):
                key, put = self.kernel_key(q), ((c, q),)
                moves.append(((1, *key), Move(put=put, own=((c, k),))))
                if below and room:
                    more = tuple((x, k) for x in below)
                    moves.append(((2, *key), Move(put=put + more, own=((c, k),))))
        return moves

    def _reductions_below(self, c: int, k: int) -> list[int]:
        """The nearest reductions that kernel k computes a class from and does not store."""
        d, p = self.draft, self.p
        found, stack, seen = list[int](), [c], {c}
        while stack:
            for x in p.kids[d.choice[stack.pop()]]:
                if x in seen or d.kern[x] >= 0 or k not in d.inside[x]:
                    continue
                seen.add(x)
                if p.role[d.choice[x]] == RED:
                    found.append(x)
                else:
                    stack.append(x)
        return found

    def _split(self, c: int) -> list[tuple[Key, Move]]:
        d, k = self.draft, self.draft.kern[c]
        if k < 0 or d.kernels[k].outs[0] != c:
            return []
        kernel = d.kernels[k]
        anchors = [x for x in kernel.body if d.kern[x] < 0 and self.p.role[d.choice[x]] in ANCHORS]
        parts = (*kernel.outs[1:], *anchors)
        return [((), Move(put=tuple((x, NEW) for x in parts)))] if len(parts) > 1 else []

    def _put(self, c: int) -> list[tuple[Key, Move]]:
        d, p = self.draft, self.p
        if not self.is_live(c):
            return []
        n = d.choice[c]
        role = p.role[n]
        if role not in ANCHORS and role not in (EW, TRANS, MOVE):
            return []
        near = self._makers(n) | d.inside[c] | d.readers[c]
        for k in p.kids[n] if self.wide else ():
            if len(d.readers[k]) <= CROWD:
                near |= d.readers[k]
        if role == RED:
            near |= self._same_rows(near, n)
        return [
            (self.kernel_key(q), Move(put=((c, q),)))
            for q in sorted(near)
            if q != d.kern[c] and len(d.kernels[q].outs) < MOST_OUTPUTS and self._can_store(c, q)
        ]

    def _makers(self, n: int) -> set[int]:
        """Kernels that store what e-node n is computed from."""
        d, p = self.draft, self.p
        near: set[int] = set()
        stack, seen = list(p.kids[n]), set(p.kids[n])
        while stack:
            k = stack.pop()
            if d.kern[k] >= 0:
                near.add(d.kern[k])
            elif d.choice[k] >= 0 and p.role[d.choice[k]] in (VIEW, BCAST, TRANS):
                new = [x for x in p.kids[d.choice[k]] if x not in seen]
                seen.update(new)
                stack.extend(new)
        return near

    def _same_rows(self, near: set[int], n: int) -> set[int]:
        """Kernels that reduce the rows of reduction n, among those that read what kernels nearby
        read."""
        d, p = self.draft, self.p
        patterns = (p.mark[n], p.across.get(p.mark[n], -1))
        return {
            z
            for q in near
            for o in d.kernels[q].operands
            if len(d.readers[o]) <= CROWD
            for z in d.readers[o]
            if d.kernels[z].pattern in patterns
        }

    def _tuple(self, t: int) -> list[tuple[Key, Move]]:
        d, p = self.draft, self.p
        variants: list[dict[int, int]] = [{}, {}, {}]
        for x in p.results.get(t, ()):
            own = self._result_of(x, t)
            for far, flips in enumerate(variants):
                flips[x] = own
                flips |= self._through(x, 0 if self.is_live(x) else far)
        new: list[dict[int, int]] = []
        for flips in variants:
            if flips not in new and any(self._is_new(c, n) for c, n in flips.items()):
                new.append(flips)
        legal = [n for n in p.candidates[t] if all(d.choice[k] >= 0 for k in p.kids[n])]
        moves: list[tuple[Key, Move]] = [
            ((p.label[n], i), self._flipped(flips | {t: n}))
            for i, flips in enumerate(new)
            for n in legal
        ]
        with_sources = ((n, self._sources(n)) for n in legal)
        return moves + [
            ((p.label[n], i, "sources"), self._flipped(flips | {t: n} | more))
            for n, more in with_sources
            if more
            for i, flips in enumerate(new)
        ]

    def _result_of(self, x: int, t: int) -> int:
        """The node of class x that is a result of kernel t."""
        p = self.p
        return next(n for n in p.candidates[x] if p.role[n] == GET and p.kids[n][0] == t)

    def _sources(self, n: int) -> dict[int, int]:
        """The flips that take the other results of kernels that run only for an operand of a node:
        attention itself where its gradients read what it kept."""
        d, p = self.draft, self.p
        flips: dict[int, int] = {}
        for k in p.kids[n]:
            if p.role[d.choice[k]] != GET or self.is_live(k):
                continue
            source = p.kids[d.choice[k]][0]
            for x in p.results.get(source, ()):
                own = self._result_of(x, source)
                if self._is_new(x, own):
                    flips |= {x: own, **self._through(x, 0)}
        return flips

    def _adopt(self, c: int) -> list[tuple[Key, Move]]:
        d, p = self.draft, self.p
        if d.choice[c] < 0 or p.role[d.choice[c]] not in (RED, CONTRACT, GET):
            return []
        near, far = self._through(c, 1), self._through(c, 2)
        return [
            ((i,), self._flipped(flips))
            for i, flips in enumerate((near, far) if len(far) > len(near) else (near,))
            if any(self.is_live(x) for x in flips)
        ]

    def _is_new(self, c: int, n: int) -> bool:
        return self.is_live(c) and self.draft.choice[c] != n

    def _through(self, x: int, far: int) -> dict[int, int]:
        """The flips that make the views of a class views of it (far 0), its readers read it (1),
        and theirs read these (2)."""
        d, p = self.draft, self.p
        flips: dict[int, int] = {}
        stack, seen = [x], {x}
        while stack:
            for c, n in self.users.get(stack.pop(), ()):
                if c in seen or any(d.choice[k] < 0 for k in (c, *p.kids[n])):
                    continue
                view, live = p.role[n] in (VIEW, TRANS), self.is_live(c)
                if d.choice[c] == n:
                    seen.add(c)
                    if view:
                        stack.append(c)
                elif view and (not live or p.role[d.choice[c]] in COMPUTED):
                    seen.add(c)
                    flips[c] = n
                    stack.append(c)
                elif not view and live and far:
                    seen.add(c)
                    flips[c] = n
                    if far > 1:
                        stack.append(c)
        return flips

    def _flipped(self, flips: dict[int, int]) -> Move:
        """Classes that become views are stored no longer."""
        d, p = self.draft, self.p
        new = {c: n for c, n in flips.items() if d.choice[c] != n}
        moved = (c for c, n in new.items() if p.role[n] in (VIEW, TRANS))
        drop = tuple(c for c in moved if d.kern[c] >= 0 and c not in d.must)
        return Move(flips=tuple(new.items()), drop=drop)

    # -- cheap necessary conditions

    def _fit(self, a: int, b: int) -> bool:
        """Can two kernels become one: the same rows or iteration space, at most one anchor."""
        x, y = self.draft.kernels[a], self.draft.kernels[b]
        if x.pattern < 0 and y.pattern >= 0:
            x, y = y, x
        if x.pattern >= 0:
            if x.anchor >= 0 or y.anchor >= 0:
                return False
            if y.pattern >= 0:
                return x.pattern == y.pattern or self.p.across.get(x.pattern) == y.pattern
            return y.full in (x.full, x.rows)
        if x.anchor >= 0 and y.anchor >= 0:
            return x.anchor == y.anchor or self._same_rows_read(x.anchor, y.anchor)
        return x.full == y.full

    def _same_rows_read(self, a: int, b: int) -> bool:
        """Are two classes products of the same few rows."""
        p, choice, legality = self.p, self.draft.choice, self.draft.pricer.legality
        both = [choice[a], choice[b]]
        return (
            all(p.role[n] == CONTRACT for n in both)
            and p.kids[both[0]][0] == p.kids[both[1]][0]
            and all(legality.shares_rows(n) for n in both)
        )

    def _can_store(self, c: int, k: int) -> bool:
        """Can kernel k compute class c at its own indices."""
        p, kernel, n = self.p, self.draft.kernels[k], self.draft.choice[c]
        size = p.numel[c]
        if p.role[n] == RED:
            if kernel.anchor >= 0:
                return False
            mine = p.mark[n]
            if kernel.pattern >= 0:
                return mine in (kernel.pattern, p.across.get(kernel.pattern)) or c in kernel.body
            shape = p.patterns[mine]
            return kernel.full in (shape.rows, shape.rows * shape.length)
        if p.role[n] == CONTRACT:
            return kernel.pattern < 0 and (
                c == kernel.anchor or (kernel.anchor < 0 and size == kernel.full)
            )
        return size in (kernel.full, kernel.rows)
