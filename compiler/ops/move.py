"""Movement: ops whose every element comes from one place of an operand.

`sources(result_index, types, load)` says from where, symbolically: a list whose first entry with a
true condition holds. `load(operand, index, bound)` gives a variable in [0, bound) for a place that
an integer operand names (gather and the like). NumPy meaning, gradient and lowering need nothing
else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..index import Index, flatten, index, unflatten
from ..ir import Kind, Node, Op, Source, make
from ..types import Type

MOST_OPERANDS = 7  # of one op: every device binds eight arrays to a kernel
Load = Callable[[int, tuple[Index, ...], int], Index]


@dataclass(frozen=True)
class Move(Op):
    """The base of movement ops."""

    kind = Kind.MOVE
    writes_window = False  # operand 0 with operand 1 written over a part of it

    def window(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> tuple[Index, ...]:
        """Where the element at `at` of operand 1 lies in the result of an op that writes a
        window."""
        raise NotImplementedError

    def sources(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> list[Source]:
        """Where the element at `at` comes from."""
        raise NotImplementedError


@dataclass(frozen=True)
class Transpose(Move):
    """Axis k of the result is axis perm[k] of x."""

    perm: tuple[int, ...]
    name = "transpose"

    def infer(self, x: Type) -> Type:
        if sorted(self.perm) != list(range(x.rank)):
            raise ShapeMismatch(
                f"transpose needs a permutation of the {x.rank} axes of {x}, got {self.perm}"
            )
        return Type(tuple(x.shape[p] for p in self.perm), x.dtype)

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        return x.transpose(self.perm)

    def vjp(self, cotangent: Node, result: Node, x: Node) -> list[Node]:
        return [transpose(cotangent, inverse(self.perm))]

    def sources(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> list[Source]:
        return [Source(0, tuple(at[p] for p in inverse(self.perm)))]


@dataclass(frozen=True)
class Reshape(Move):
    """The same elements in row-major order."""

    shape: tuple[int, ...]
    name = "reshape"

    def infer(self, x: Type) -> Type:
        if math.prod(self.shape) != x.size:
            raise ShapeMismatch(
                f"reshape needs {x.size} elements for {x}, got shape {list(self.shape)}"
            )
        return Type(self.shape, x.dtype)

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.shape)

    def vjp(self, cotangent: Node, result: Node, x: Node) -> list[Node]:
        return [reshape(cotangent, x.shape)]

    def sources(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> list[Source]:
        return [Source(0, unflatten(flatten(at, self.shape), types[0].shape))]


@dataclass(frozen=True)
class Broadcast(Move):
    """Axes of length 1 repeated to `shape`, which has the same rank."""

    shape: tuple[int, ...]
    name = "broadcast"

    def infer(self, x: Type) -> Type:
        fits = len(self.shape) == x.rank and all(
            a in (1, b) for a, b in zip(x.shape, self.shape, strict=True)
        )
        if not fits:
            raise ShapeMismatch(
                f"broadcast needs axes of length 1 or equal, got {x} to {list(self.shape)}"
            )
        return Type(self.shape, x.dtype)

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        return np.broadcast_to(x, self.shape)

    def vjp(self, cotangent: Node, result: Node, x: Node) -> list[Node]:
        from .reduce import reduce

        axes = tuple(k for k, (a, b) in enumerate(zip(x.shape, self.shape, strict=True)) if a != b)
        return [reduce("sum", cotangent, axes)]

    def sources(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> list[Source]:
        return [
            Source(
                0, tuple(i if n != 1 else Index() for i, n in zip(at, types[0].shape, strict=True))
            )
        ]


@dataclass(frozen=True)
class Slice(Move):
    """x[start : stop : step] on every axis, steps positive."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    step: tuple[int, ...]
    name = "slice"

    def infer(self, x: Type) -> Type:
        ranges = list(zip(self.start, self.stop, self.step, x.shape, strict=False))
        if len(ranges) != x.rank or any(not 0 <= a <= b <= n or s < 1 for a, b, s, n in ranges):
            raise ShapeMismatch(f"slice {self.start}:{self.stop}:{self.step} does not fit {x}")
        return Type(tuple(-(-(b - a) // s) for a, b, s, _ in ranges), x.dtype)

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        return x[tuple(map(slice, self.start, self.stop, self.step))]

    def vjp(self, cotangent: Node, result: Node, x: Node) -> list[Node]:
        from .leaf import literal

        high = [
            n - a - (m - 1) * s - 1 if m else n - a
            for n, a, s, m in zip(x.shape, self.start, self.step, result.shape, strict=True)
        ]
        interior = tuple(s - 1 for s in self.step)
        return [pad(cotangent, literal(0, x.dtype), self.start, tuple(high), interior)]

    def sources(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> list[Source]:
        return [
            Source(0, tuple(i * s + a for i, a, s in zip(at, self.start, self.step, strict=True)))
        ]


@dataclass(frozen=True)
class Pad(Move):
    """x with `low` and `high` copies of a scalar around it and `interior` ones between its
    elements.

    The scalar is the second operand; amounts are at least 0.
    """

    low: tuple[int, ...]
    high: tuple[int, ...]
    interior: tuple[int, ...]
    name = "pad"

    def infer(self, x: Type, value: Type) -> Type:
        if value != Type((), x.dtype):
            raise TypeMismatch(f"pad needs a scalar {x.dtype} to pad with, got {value}")
        amounts = (self.low, self.high, self.interior)
        if any(len(a) != x.rank for a in amounts) or min(min(a, default=0) for a in amounts) < 0:
            raise ShapeMismatch(
                f"pad needs {x.rank} amounts of at least 0 for {x}, got {self.low}, {self.high}"
            )
        return Type(
            tuple(
                lo + hi + n + max(n - 1, 0) * i
                for n, lo, hi, i in zip(x.shape, self.low, self.high, self.interior, strict=True)
            ),
            x.dtype,
        )

    def evaluate(self, x: np.ndarray, value: np.ndarray) -> np.ndarray:
        out = np.full(self.infer(*_types(x, value)).shape, value, dtype=x.dtype)
        at = (slice(lo, lo + (n - 1) * (i + 1) + 1 if n else lo, i + 1)
              for n, lo, i in zip(x.shape, self.low, self.interior, strict=True))  # fmt: skip
        out[tuple(at)] = x
        return out

    def vjp(self, cotangent: Node, result: Node, x: Node, value: Node) -> list[Node | None]:
        from .reduce import reduce

        stop = tuple(
            lo + max((n - 1) * (i + 1) + 1, 0) if n else lo
            for n, lo, i in zip(x.shape, self.low, self.interior, strict=True)
        )
        dx = slice_(cotangent, self.low, stop, tuple(i + 1 for i in self.interior))
        every = tuple(range(len(x.shape)))
        total = reduce("sum", cotangent, every)
        return [dx, reshape(total - reduce("sum", dx, every), ())]

    def sources(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> list[Source]:
        conditions, places = [], []
        for i, n, lo, gap in zip(at, types[0].shape, self.low, self.interior, strict=True):
            inside = i - lo
            if gap:
                # positions below `lo` must not reach / and %, which are unsigned: shift by a
                # multiple of the step
                shift = -(-lo // (gap + 1)) * (gap + 1)
                shifted = inside + shift
                conditions.append((shifted % (gap + 1), 0, 1))
                inside = shifted // (gap + 1) - shift // (gap + 1)
            conditions.append((inside, 0, n))
            places.append(inside)
        return [Source(0, tuple(places), tuple(conditions)), Source(1, ())]


@dataclass(frozen=True)
class Concat(Move):
    """Operands one after the other along `axis`."""

    axis: int
    name = "concat"

    def infer(self, *xs: Type) -> Type:
        def rest(t: Type) -> tuple[object, ...]:
            return (t.dtype, t.shape[: self.axis], t.shape[self.axis + 1 :])

        if not xs or any(rest(t) != rest(xs[0]) or t.rank <= self.axis for t in xs):
            raise ShapeMismatch(
                f"concat needs arrays that differ only along axis {self.axis}, got {_list(xs)}"
            )
        shape = list(xs[0].shape)
        shape[self.axis] = sum(t.shape[self.axis] for t in xs)
        return Type(tuple(shape), xs[0].dtype)

    def evaluate(self, *xs: np.ndarray) -> np.ndarray:
        return np.concatenate(xs, self.axis)

    def expansions(self, *xs: Node) -> list[Node]:
        """Many operands in groups that a kernel can bind."""
        if len(xs) <= MOST_OPERANDS:
            return []
        groups = [xs[k : k + MOST_OPERANDS] for k in range(0, len(xs), MOST_OPERANDS)]
        parts = [concat(group, self.axis) for group in groups]
        return [make(self, *parts) if len(parts) <= MOST_OPERANDS else self.expansions(*parts)[0]]

    def vjp(self, cotangent: Node, result: Node, *xs: Node) -> list[Node]:
        out, at = [], 0
        for x in xs:
            start, stop = [0] * len(x.shape), list(result.shape)
            start[self.axis], stop[self.axis] = at, at + x.shape[self.axis]
            at = stop[self.axis]
            out.append(slice_(cotangent, tuple(start), tuple(stop)))
        return out

    def sources(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> list[Source]:
        out, begin, position = [], 0, at[self.axis]
        for k, t in enumerate(types):
            end = begin + t.shape[self.axis]
            place = at[: self.axis] + (position - begin,) + at[self.axis + 1 :]
            if end > begin:
                out.append(Source(k, place, ((position, 0, end),)))
            begin = end
        last = out[-1]
        return [*out[:-1], Source(last.operand, last.index)]


@dataclass(frozen=True)
class Flip(Move):
    """Axes in reverse order."""

    axes: tuple[int, ...]
    name = "flip"

    def infer(self, x: Type) -> Type:
        return x

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        return np.flip(x, self.axes)

    def vjp(self, cotangent: Node, result: Node, x: Node) -> list[Node]:
        return [make(self, cotangent)]

    def sources(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> list[Source]:
        shape = types[0].shape
        return [
            Source(
                0, tuple(index(shape[k] - 1) - i if k in self.axes else i for k, i in enumerate(at))
            )
        ]


@dataclass(frozen=True)
class Gather(Move):
    """Rows of x along `axis` at integer positions: the result has the axes of `positions` in place
    of `axis`.

    A position below 0 counts from the end; one out of range reads the nearest end.
    """

    axis: int
    name = "gather"

    def infer(self, x: Type, positions: Type) -> Type:
        if positions.dtype.kind not in "iu":
            raise TypeMismatch(f"gather needs integer positions, got {positions}")
        if not 0 <= self.axis < x.rank or (x.shape[self.axis] == 0 and positions.size):
            raise ShapeMismatch(
                f"gather needs a non-empty axis {self.axis}, got {x} and positions {positions}"
            )
        return Type(x.shape[: self.axis] + positions.shape + x.shape[self.axis + 1 :], x.dtype)

    def evaluate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return np.take(x, wrapped(positions, x.shape[self.axis]), self.axis)

    def vjp(self, cotangent: Node, result: Node, x: Node, positions: Node) -> list[Node | None]:
        from .scatter import scatter_add

        count = len(positions.shape)
        rest = [k for k in range(len(result.shape)) if not self.axis <= k < self.axis + count]
        moved = transpose(cotangent, (*range(self.axis, self.axis + count), *rest))
        rows = reshape(moved, (positions.type.size, *(cotangent.shape[k] for k in rest)))
        n = x.shape[self.axis]
        total = scatter_add(rows, reshape(positions, (positions.type.size,)), n)
        order = [0] * len(x.shape)
        for place, k in enumerate((self.axis, *(k for k in range(len(x.shape)) if k != self.axis))):
            order[k] = place
        return [transpose(total, tuple(order)), None]

    def sources(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> list[Source]:
        end = self.axis + types[1].rank
        row = load(1, at[self.axis : end], types[0].shape[self.axis])
        return [Source(0, at[: self.axis] + (row,) + at[end:])]


def wrapped(positions: np.ndarray, n: int) -> np.ndarray:
    """Positions in [0, n): negative ones count from the end, the rest are clipped."""
    places = positions.astype(np.int64)
    return np.clip(np.where(places < 0, places + n, places), 0, n - 1)


def inverse(perm: Sequence[int]) -> tuple[int, ...]:
    """The permutation that undoes `perm`."""
    return tuple(sorted(range(len(perm)), key=perm.__getitem__))


def _types(*arrays: np.ndarray) -> list[Type]:
    from ..types import dtype

    return [Type(a.shape, dtype(a.dtype)) for a in arrays]


def _list(types: Sequence[Type]) -> str:
    shown = ", ".join(map(repr, types[:4]))
    return shown + (f", ... ({len(types)} in all)" if len(types) > 4 else "")


def keeps_order(perm: Sequence[int], shape: Sequence[int]) -> bool:
    """True when a permutation of axes leaves the row-major order of the elements as it is."""
    moved = [p for p in perm if shape[p] != 1]
    return moved == sorted(moved)


def transpose(x: Node, perm: Sequence[int]) -> Node:
    """Permute axes."""
    perm = tuple(perm)
    if isinstance(x.op, Transpose):
        perm, x = tuple(x.op.perm[p] for p in perm), x.operands[0]
    op = Transpose(perm)
    result = op.infer(x.type)
    if keeps_order(
        perm, x.shape
    ):  # only axes of length 1 move: the same elements in the same order
        return reshape(x, result.shape)
    return make(op, x)


def reshape(x: Node, shape: Sequence[int]) -> Node:
    """Change the shape, keeping row-major order."""
    shape = tuple(shape)
    if isinstance(x.op, Reshape):
        x = x.operands[0]
    return x if shape == x.shape else make(Reshape(shape), x)


def broadcast(x: Node, shape: Sequence[int]) -> Node:
    """Repeat axes of length 1; NumPy's rule for missing leading axes."""
    shape = tuple(shape)
    if len(shape) > len(x.shape):
        x = reshape(x, (1,) * (len(shape) - len(x.shape)) + x.shape)
    if isinstance(x.op, Broadcast) and shape != x.shape:
        x = x.operands[0]
    return x if shape == x.shape else make(Broadcast(shape), x)


def slice_(
    x: Node, start: Sequence[int], stop: Sequence[int], step: Sequence[int] | None = None
) -> Node:
    """A rectangular part of x."""
    op = Slice(tuple(start), tuple(stop), tuple(step) if step else (1,) * len(x.shape))
    whole = op == Slice((0,) * len(x.shape), x.shape, (1,) * len(x.shape))
    return x if whole else make(op, x)


def pad(
    x: Node,
    value: Node,
    low: Sequence[int],
    high: Sequence[int],
    interior: Sequence[int] | None = None,
) -> Node:
    """x surrounded and interleaved with a scalar."""
    op = Pad(tuple(low), tuple(high), tuple(interior) if interior else (0,) * len(x.shape))
    return make(op, x, value) if any(op.low + op.high + op.interior) else x


def concat(xs: Sequence[Node], axis: int) -> Node:
    """Join arrays along an axis."""
    return xs[0] if len(xs) == 1 else make(Concat(axis), *xs)


def flip(x: Node, axes: Sequence[int]) -> Node:
    """Reverse axes."""
    axes = tuple(sorted(a for a in axes if x.shape[a] > 1))
    return make(Flip(axes), x) if axes else x


def gather(x: Node, positions: Node, axis: int) -> Node:
    """Rows of x along an axis."""
    return make(Gather(axis), x, positions)
