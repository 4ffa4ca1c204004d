"""Sliding windows, and convolution over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..index import Index
from ..ir import Kind, Node, Op, Source, make
from ..types import Type
from .contract import dot
from .leaf import literal
from .move import Load, Move, broadcast, flip, pad, reshape, slice_, transpose
from .reduce import reduce


@dataclass(frozen=True)
class Windows(Move):
    """x (..., *spatial) -> (..., *places, *size): element (p, k) is x[..., p * stride + k *
    dilation].

    `size`, `stride` and `dilation` have one entry a spatial axis; these are the last axes of x.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    name = "windows"

    def infer(self, x: Type) -> Type:
        d = len(self.size)
        if (
            not len(self.stride) == len(self.dilation) == d <= x.rank
            or min(self.size + self.stride + self.dilation) < 1
        ):
            raise ShapeMismatch(
                f"windows of {self.size}, stride {self.stride}, dilation {self.dilation} do not "
                f"fit {x}"
            )
        spatial = x.shape[x.rank - d :]
        places = tuple(
            (n - (k - 1) * g - 1) // s + 1
            for n, k, s, g in zip(spatial, self.size, self.stride, self.dilation, strict=True)
        )
        if min(places) < 1:
            raise ShapeMismatch(
                f"windows of {self.size} with dilation {self.dilation} are larger than {x}"
            )
        return Type((*x.shape[: x.rank - d], *places, *self.size), x.dtype)

    def evaluate(self, x: np.ndarray) -> np.ndarray:
        d = len(self.size)
        spans = tuple((k - 1) * g + 1 for k, g in zip(self.size, self.dilation, strict=True))
        view = np.lib.stride_tricks.sliding_window_view(
            x, spans, axis=tuple(range(x.ndim - d, x.ndim))
        )
        steps = (*(slice(None),) * (x.ndim - d), *(slice(None, None, s) for s in self.stride))
        return view[(*steps, *(slice(None, None, g) for g in self.dilation))]

    def vjp(self, cotangent: Node, result: Node, x: Node) -> list[Node]:
        # each offset of the window puts its part of the cotangent back where it came from
        d, rank = len(self.size), len(x.shape)
        places = result.shape[rank - d : rank]
        total: Node | None = None
        for offset in np.ndindex(*self.size):
            start = (*(0,) * rank, *offset)
            stop = (*result.shape[:rank], *(k + 1 for k in offset))
            part = reshape(slice_(cotangent, start, stop), result.shape[:rank])
            low = [k * g for k, g in zip(offset, self.dilation, strict=True)]
            high = [
                n - lo - (p - 1) * s - 1
                for n, lo, p, s in zip(x.shape[rank - d :], low, places, self.stride, strict=True)
            ]
            none = (0,) * (rank - d)
            inside = tuple(s - 1 for s in self.stride)
            part = pad(part, literal(0, x.dtype), (*none, *low), (*none, *high), (*none, *inside))
            total = part if total is None else total + part
        assert total is not None
        return [total]

    def sources(self, at: tuple[Index, ...], types: Sequence[Type], load: Load) -> list[Source]:
        rank, d = types[0].rank, len(self.size)
        outer, places, offsets = at[: rank - d], at[rank - d : rank], at[rank:]
        inner = tuple(
            p * s + k * g
            for p, k, s, g in zip(places, offsets, self.stride, self.dilation, strict=True)
        )
        return [Source(0, outer + inner)]


@dataclass(frozen=True)
class Conv(Op):
    """x (n, c, *spatial) with w (o, c / groups, *size) -> (n, o, *places), no padding; correlation,
    as in PyTorch."""

    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    name = "conv"
    kind = Kind.WINDOW

    def infer(self, x: Type, w: Type) -> Type:
        d = len(self.stride)
        if x.dtype != w.dtype or x.dtype.kind != "f":
            raise TypeMismatch(f"conv needs two float arrays of one dtype, got {x} and {w}")
        fits = (
            x.rank == w.rank == d + 2
            and x.shape[1] == w.shape[1] * self.groups
            and w.shape[0] % self.groups == 0
        )
        if not fits:
            raise ShapeMismatch(
                f"conv needs x (n, c, *spatial) and w (o, c / {self.groups}, *size), got {x} and "
                f"{w}"
            )
        windows = Windows(w.shape[2:], self.stride, self.dilation).infer(x)
        return Type((x.shape[0], w.shape[0], *windows.shape[2 : 2 + d]), x.dtype)

    def evaluate(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        d, g = len(self.stride), self.groups
        windows = Windows(w.shape[2:], self.stride, self.dilation).evaluate(x)
        n, o, places = x.shape[0], w.shape[0], windows.shape[2 : 2 + d]
        k, size = math.prod(w.shape[1:]), math.prod(places)
        columns = windows.reshape(n, g, x.shape[1] // g, size, math.prod(w.shape[2:]))
        columns = np.moveaxis(columns, 3, -1).reshape(n, g, k, size)
        return np.matmul(w.reshape(1, g, o // g, k), columns).reshape(n, o, *places)

    def expansions(self, x: Node, w: Node) -> list[Node]:
        """The convolution as an implicit product, weights times windows, image by image or over all
        images; and directly, each result as a sum over its window, for groups of few channels."""
        n, o, places, g = x.shape[0], w.shape[0], self._places(x, w), self.groups
        k = math.prod(w.shape[1:])
        columns = self._columns(x, w)  # (n, g, c/g * size, places)
        rows = reshape(w, (1, g, o // g, k))
        each = reshape(dot(broadcast(rows, (n, g, o // g, k)), columns), (n, o, *places))
        wide = reshape(transpose(columns, (1, 2, 0, 3)), (g, k, n * math.prod(places)))
        both = reshape(dot(reshape(w, (g, o // g, k)), wide), (g, o // g, n, math.prod(places)))
        terms = (n, g, o // g, k, math.prod(places))
        left = broadcast(reshape(w, (1, g, o // g, k, 1)), terms)
        right = broadcast(reshape(columns, (n, g, 1, k, math.prod(places))), terms)
        direct = reshape(reduce("sum", left * right, (3,)), (n, o, *places))
        return [each, reshape(transpose(both, (2, 0, 1, 3)), (n, o, *places)), direct]

    def _places(self, x: Node, w: Node) -> tuple[int, ...]:
        return self.infer(x.type, w.type).shape[2:]

    def _columns(self, x: Node, w: Node) -> Node:
        d, g = len(self.stride), self.groups
        windows = make(Windows(w.shape[2:], self.stride, self.dilation), x)
        moved = transpose(windows, (0, 1, *range(2 + d, 2 + 2 * d), *range(2, 2 + d)))
        return reshape(
            moved, (x.shape[0], g, math.prod(w.shape[1:]), math.prod(windows.shape[2 : 2 + d]))
        )

    def vjp(self, cotangent: Node, result: Node, x: Node, w: Node) -> list[Node]:
        d, g, (n, o) = len(self.stride), self.groups, result.shape[:2]
        spans = [(k - 1) * e for k, e in zip(w.shape[2:], self.dilation, strict=True)]
        # dx: the cotangent spread by the stride, convolved with the mirrored weights
        left = [(m - r - 1) % s for m, r, s in zip(x.shape[2:], spans, self.stride, strict=True)]
        spread = pad(
            cotangent,
            literal(0, x.dtype),
            (0, 0, *spans),
            (0, 0, *(r + e for r, e in zip(spans, left, strict=True))),
            (0, 0, *(s - 1 for s in self.stride)),
        )
        mirrored = reshape(flip(w, range(2, 2 + d)), (g, o // g, *w.shape[1:]))
        mirrored = reshape(
            transpose(mirrored, (0, 2, 1, *range(3, 3 + d))), (x.shape[1], o // g, *w.shape[2:])
        )
        dx = make(Conv((1,) * d, self.dilation, g), spread, mirrored)
        # dw: the cotangent times the windows, summed over images and places
        places, k = math.prod(result.shape[2:]), math.prod(w.shape[1:])
        rows = reshape(
            transpose(reshape(cotangent, (n, g, o // g, places)), (1, 2, 0, 3)),
            (g, o // g, n * places),
        )
        columns = reshape(transpose(self._columns(x, w), (1, 0, 3, 2)), (g, n * places, k))
        return [dx, reshape(dot(rows, columns), w.shape)]

    def flops(self, result: Type, x: Type, w: Type) -> int:
        return 2 * result.size * math.prod(w.shape[1:])


def windows(x: Node, size: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Node:
    """The sliding windows over the last axes of x."""
    return make(Windows(tuple(size), tuple(stride), tuple(dilation)), x)


def conv(x: Node, w: Node, stride: Sequence[int], dilation: Sequence[int], groups: int) -> Node:
    """A convolution without padding."""
    return make(Conv(tuple(stride), tuple(dilation), groups), x, w)
