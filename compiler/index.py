"""Symbolic u32 index arithmetic with ranges: what movement ops say of where an element comes from.

An Index is `constant + sum(coefficient * atom)`; an atom is a variable with a known size, or the
quotient or remainder of an Index by a constant. Construction simplifies, so that a reshape of a
reshape costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Key = tuple[object, ...]


@dataclass(frozen=True)
class Var:
    """A variable in [0, size)."""

    name: str
    size: int

    @property
    def lo(self) -> int:
        return 0

    @property
    def hi(self) -> int:
        return self.size - 1

    @cached_property
    def key(self) -> Key:
        return (0, self.name, self.size)


@dataclass(frozen=True)
class Div:
    """floor(base / by), by > 1."""

    base: Index
    by: int

    @property
    def lo(self) -> int:
        return self.base.lo // self.by

    @property
    def hi(self) -> int:
        return self.base.hi // self.by

    @cached_property
    def key(self) -> Key:
        return (1, self.by, self.base.key)


@dataclass(frozen=True)
class Mod:
    """base mod by, by > 1."""

    base: Index
    by: int

    @property
    def lo(self) -> int:
        return 0

    @property
    def hi(self) -> int:
        return self.by - 1

    @cached_property
    def key(self) -> Key:
        return (2, self.by, self.base.key)


Atom = Var | Div | Mod


@dataclass(frozen=True)
class Index:
    """constant + sum of coefficient * atom, terms sorted by atom."""

    terms: tuple[tuple[Atom, int], ...] = ()
    constant: int = 0

    @cached_property
    def key(self) -> Key:
        return (self.constant, tuple((a.key, c) for a, c in self.terms))

    @cached_property
    def lo(self) -> int:
        return self.constant + sum(c * (a.lo if c > 0 else a.hi) for a, c in self.terms)

    @cached_property
    def hi(self) -> int:
        return self.constant + sum(c * (a.hi if c > 0 else a.lo) for a, c in self.terms)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.key)

    def __add__(self, other: Index | int) -> Index:
        other = index(other)
        return _sum([*self.terms, *other.terms], self.constant + other.constant)

    __radd__ = __add__

    def __sub__(self, other: Index | int) -> Index:
        return self + index(other) * -1

    def __mul__(self, by: int) -> Index:
        if by == 0:
            return Index()
        return Index(tuple((a, c * by) for a, c in self.terms), self.constant * by)

    __rmul__ = __mul__

    def __floordiv__(self, by: int) -> Index:
        assert by > 0
        if by == 1:
            return self
        whole, rest = self.parts(by)
        if 0 <= rest.lo and rest.hi < by:
            return whole
        common = math.gcd(by, rest.constant, *(c for _, c in rest.terms))
        if common > 1:
            rest, by = (
                Index(tuple((a, c // common) for a, c in rest.terms), rest.constant // common),
                by // common,
            )
            return whole + rest // by
        # (a*c + small) // by = (a*(c/g)) // (by/g) where g = gcd(c, by) and 0 <= small < g
        for g in sorted({math.gcd(c, by) for _, c in rest.terms} - {1}, reverse=True):
            big, small = rest.parts(g)
            if big.terms and 0 <= small.lo and small.hi < g:
                return whole + big // (by // g)
        if (
            len(rest.terms) == 1
            and rest.constant == 0
            and rest.terms[0][1] == 1
            and isinstance(rest.terms[0][0], Div)
        ):
            inner = rest.terms[0][0]
            return whole + inner.base // (inner.by * by)
        return _sum([*whole.terms, (Div(rest, by), 1)], whole.constant)

    def __mod__(self, by: int) -> Index:
        assert by > 0
        if by == 1:
            return Index()
        _, rest = self.parts(by)
        if 0 <= rest.lo and rest.hi < by:
            return rest
        if len(rest.terms) == 1 and rest.constant == 0 and rest.terms[0][1] == 1:
            atom = rest.terms[0][0]
            if isinstance(atom, Mod) and atom.by % by == 0:
                return atom.base % by
        common = math.gcd(by, rest.constant, *(c for _, c in rest.terms))
        if common > 1:
            rest = Index(tuple((a, c // common) for a, c in rest.terms), rest.constant // common)
            return (rest % (by // common)) * common
        # (a*c + small) % by = ((a*(c/g)) % (by/g)) * g + small where g = gcd(c, by) and 0 <= small
        # < g
        for g in sorted({math.gcd(c, by) for _, c in rest.terms} - {1}, reverse=True):
            big, small = rest.parts(g)
            if big.terms and 0 <= small.lo and small.hi < g:
                return (big % (by // g)) * g + small
        return _sum([(Mod(rest, by), 1)], 0)

    def parts(self, g: int) -> tuple[Index, Index]:
        """self = g * first + second, where second holds what is not divisible by g term by term."""
        big = Index(tuple((a, c // g) for a, c in self.terms if c % g == 0), self.constant // g)
        return big, Index(tuple(t for t in self.terms if t[1] % g), self.constant % g)

    def coefficient(self, name: str) -> int | None:
        """The factor of variable `name` when self is linear in it, None when it stands inside / or
        %."""
        found = 0
        for atom, c in self.terms:
            if isinstance(atom, Var):
                if atom.name == name:
                    found = c
            elif name in atom.base.variables:
                return None
        return found

    @cached_property
    def variables(self) -> frozenset[str]:
        out: set[str] = set()
        for atom, _ in self.terms:
            out |= {atom.name} if isinstance(atom, Var) else atom.base.variables
        return frozenset(out)

    def divisible(self, by: int) -> bool:
        """True when self is certainly a multiple of `by`."""
        return self.constant % by == 0 and all(c % by == 0 for _, c in self.terms)

    def substitute(self, values: Mapping[str, Index]) -> Index:
        """self with variables replaced."""
        if not (self.variables & values.keys()):
            return self
        out = Index((), self.constant)
        for atom, c in self.terms:
            match atom:
                case Var():
                    part = values.get(atom.name, Index(((atom, 1),)))
                case Div():
                    part = atom.base.substitute(values) // atom.by
                case Mod():
                    part = atom.base.substitute(values) % atom.by
            out = out + part * c
        return out

    def evaluate(self, values: Mapping[str, int]) -> int:
        """The number that self is for given values of the variables."""
        total = self.constant
        for atom, c in self.terms:
            match atom:
                case Var():
                    total += c * values[atom.name]
                case Div():
                    total += c * (atom.base.evaluate(values) // atom.by)
                case Mod():
                    total += c * (atom.base.evaluate(values) % atom.by)
        return total

    def __repr__(self) -> str:
        parts = []
        for atom, c in self.terms:
            match atom:
                case Var():
                    text = atom.name
                case Div():
                    text = f"({atom.base!r} / {atom.by})"
                case Mod():
                    text = f"({atom.base!r} % {atom.by})"
            parts.append(text if c == 1 else f"{c}*{text}")
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts)


def index(value: Index | int) -> Index:
    """`value` as an Index."""
    return value if isinstance(value, Index) else Index((), value)


def variable(name: str, size: int) -> Index:
    """A variable in [0, size); 0 when there is only one value."""
    return Index(((Var(name, size), 1),)) if size > 1 else Index()


def _sum(terms: Sequence[tuple[Atom, int]], constant: int) -> Index:
    total: dict[Key, tuple[Atom, int]] = {}
    for atom, c in terms:
        old = total.get(atom.key)
        total[atom.key] = (atom, c + (old[1] if old else 0))
    # c*(x % n) + c*n*(x / n) = c*x
    for key, (atom, c) in list(total.items()):
        if not isinstance(atom, Mod) or c == 0 or total.get(key, (atom, 0))[1] != c:
            continue
        quotient = atom.base // atom.by
        if len(quotient.terms) != 1 or quotient.constant or quotient.terms[0][1] != 1:
            continue
        other = quotient.terms[0][0]
        if total.get(other.key, (other, 0))[1] == c * atom.by:
            rest = [t for k, t in total.items() if k not in (key, other.key) and t[1]]
            return Index(tuple(sorted(rest, key=lambda t: t[0].key)), constant) + atom.base * c
    out = sorted(((a, c) for a, c in total.values() if c), key=lambda t: t[0].key)
    return Index(tuple(out), constant)


def flatten(indices: Sequence[Index], shape: Sequence[int]) -> Index:
    """The row-major position of `indices` in an array of `shape`."""
    out = Index()
    for i, n in zip(indices, shape, strict=True):
        out = out * n + i
    return out


def unflatten(flat: Index, shape: Sequence[int]) -> tuple[Index, ...]:
    """The coordinates of row-major position `flat` in an array of `shape`."""
    out: list[Index] = []
    below = math.prod(shape)
    for n in shape:
        below = below // n if n else 0
        out.append((flat // below) % n if n > 1 and below else Index())
    return tuple(out)
