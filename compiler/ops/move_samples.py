"""Example calls of leaves and of ops that move elements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations

import numpy as np

from ..types import DTYPES
from .dynamic import DynamicSlice, DynamicUpdate
from .leaf import Constant, Iota, Literal, constant, iota, literal
from .move import (
    Broadcast,
    Concat,
    Flip,
    Gather,
    Pad,
    Reshape,
    Slice,
    Transpose,
)
from .samples import Array, Sample, floats, hostile, integers, samples_of
from .window import Windows

# ---- leaves


@samples_of(Literal)
def _literal() -> Iterator[Sample]:
    for value in (0.0, -0.0, 1.5, 1e-45, 3.4e38, math.inf, -math.inf, math.nan):
        yield Sample(literal(value, DTYPES["f32"]).op, ())
    for value, dtype in (
        (-1, "i32"),
        (-(2**31), "i32"),
        (2**32 - 1, "u32"),
        (0xFFFFFFFF, "i32"),
        (True, "bool"),
        (0.1, "f16"),
    ):
        yield Sample(literal(value, DTYPES[dtype]).op, ())


@samples_of(Constant)
def _constant() -> Iterator[Sample]:
    for value in (
        hostile(3, 5),
        floats(0, 3),
        floats(1),
        integers(7),
        integers(4, dtype="u32"),
        integers(5, dtype="bool"),
        floats(3, dtype="f16"),
    ):
        yield Sample(constant(value, DTYPES[_name(value)]).op, ())


@samples_of(Iota)
def _iota() -> Iterator[Sample]:
    for shape, axis, dtype in (
        ((7,), 0, "i32"),
        ((3, 5), 0, "f32"),
        ((3, 4), 1, "u32"),
        ((2, 3, 4), 1, "i32"),
        ((0, 3), 0, "i32"),
        ((1,), 0, "f16"),
    ):
        yield Sample(iota(shape, axis, DTYPES[dtype]).op, ())


def _name(value: Array) -> str:
    return {"float32": "f32", "float16": "f16", "int32": "i32", "uint32": "u32", "bool": "bool"}[
        value.dtype.name
    ]


# ---- movement


@samples_of(Transpose)
def _transpose() -> Iterator[Sample]:
    for perm in permutations(range(3)):
        yield Sample(Transpose(perm), (floats(2, 3, 5),))
    for shape, perm in (
        ((), ()),
        ((7,), (0,)),
        ((0, 3), (1, 0)),
        ((4, 8), (1, 0)),
        ((2, 1, 3, 4), (3, 1, 0, 2)),
        ((13, 11), (1, 0)),
    ):
        yield Sample(Transpose(perm), (floats(*shape),))
    yield Sample(Transpose((1, 0)), (integers(3, 4, dtype="bool"),))


@samples_of(Reshape)
def _reshape() -> Iterator[Sample]:
    for old, new in (
        ((6,), (2, 3)),
        ((2, 3, 4), (4, 6)),
        ((), (1, 1)),
        ((1,), ()),
        ((0, 3), (5, 0)),
        ((7, 1), (1, 7)),
    ):
        yield Sample(Reshape(new), (floats(*old),))


@samples_of(Broadcast)
def _broadcast() -> Iterator[Sample]:
    for old, new in (
        ((1, 3), (2, 3)),
        ((2, 1, 3), (2, 4, 3)),
        ((1, 1), (5, 7)),
        ((1, 3), (0, 3)),
        ((3, 1), (3, 8)),
        ((1,), (1,)),
        ((), ()),
    ):
        yield Sample(Broadcast(new), (floats(*old),))
    yield Sample(Broadcast((3, 2)), (integers(1, 2, dtype="u32"),))


@samples_of(Slice)
def _slice() -> Iterator[Sample]:
    cases = (
        ((7,), (1,), (6,), (1,)),
        ((7,), (0,), (7,), (3,)),
        ((8,), (4,), (8,), (1,)),
        ((5, 7), (1, 2), (4, 7), (2, 3)),
        ((3, 4), (2, 1), (2, 3), (1, 1)),
        ((2, 3, 8), (0, 1, 4), (2, 3, 8), (1, 1, 2)),
        ((), (), (), ()),
        ((1,), (0,), (1,), (5,)),
    )
    for shape, start, stop, step in cases:
        yield Sample(Slice(start, stop, step), (floats(*shape),))


@samples_of(Pad)
def _pad() -> Iterator[Sample]:
    cases = (
        ((5,), (2,), (3,), (0,)),
        ((4,), (4,), (0,), (0,)),
        ((3, 4), (1, 0), (0, 2), (0, 1)),
        ((3,), (0,), (0,), (2,)),
        ((0,), (2,), (1,), (1,)),
        ((2, 3), (0, 5), (3, 0), (2, 0)),
        ((), (), (), ()),
        ((1, 1), (1, 1), (1, 1), (3, 3)),
    )
    for shape, low, high, interior in cases:
        yield Sample(
            Pad(low, high, interior),
            (floats(*shape), np.full((), 0.75, np.float32)),
        )
    yield Sample(Pad((1,), (2,), (1,)), (floats(3), np.array(-np.inf, np.float32)), smooth=False)
    yield Sample(Pad((1,), (2,), (0,)), (integers(3), np.array(-1, np.int32)))


@samples_of(Concat)
def _concat() -> Iterator[Sample]:
    for shapes, axis in (
        (((3,), (4,)), 0),
        (((2, 3), (2, 1), (2, 4)), 1),
        (((0, 2), (3, 2)), 0),
        (((2, 4), (2, 0), (2, 4)), 1),
        (((5,),), 0),
        (((1,),) * 17, 0),
        (((2, 3, 2), (2, 5, 2)), 1),
    ):
        yield Sample(Concat(axis), tuple(floats(*s, seed=k) for k, s in enumerate(shapes)))


@samples_of(Flip)
def _flip() -> Iterator[Sample]:
    for shape, axes in (
        ((7,), (0,)),
        ((3, 4), (1,)),
        ((3, 4), (0, 1)),
        ((2, 3, 5), (0, 2)),
        ((0, 3), (1,)),
        ((2, 8), (0,)),
    ):
        yield Sample(Flip(axes), (floats(*shape),))


@samples_of(Gather)
def _gather() -> Iterator[Sample]:
    for shape, axis in (((5,), 0), ((5, 4), 0), ((3, 5), 1), ((2, 5, 3), 1), ((1, 5), 1)):
        for positions in (
            np.array([0, 3, 3, -1, -5, 4]),
            np.array([[1, 2], [2, 0]]),
            np.array(2),
            np.zeros(0),
            np.array([7, -9]),
        ):
            yield Sample(Gather(axis), (floats(*shape), positions.astype(np.int32)))
    yield Sample(Gather(1), (floats(3, 0, 2), np.zeros(0, np.int32)))
    yield Sample(Gather(0), (integers(4, 3, dtype="bool"), np.array([3, 9, 0], np.uint32)))


_WINDOWS = (  # of an array: its shape, where the window begins, and its shape
    ((7,), (2,), (3,)),
    ((4, 5), (1, 0), (2, 4)),
    ((4, 8), (0, 4), (4, 4)),
    ((3, 4), (3, 0), (0, 4)),
    ((2, 3, 4), (1, 2, 3), (1, 1, 1)),
)


@samples_of(DynamicSlice)
def _dynamic_slice() -> Iterator[Sample]:
    for shape, start, size in _WINDOWS:
        yield Sample(DynamicSlice(size), (floats(*shape), np.array(start, np.int32)))
    yield Sample(DynamicSlice((2,)), (integers(5), np.array([3], np.uint32)))


@samples_of(DynamicUpdate)
def _dynamic_update() -> Iterator[Sample]:
    for shape, start, size in (*_WINDOWS, ((3, 4), (0, 0), (3, 4))):
        yield Sample(
            DynamicUpdate(), (floats(*shape), floats(*size, seed=1), np.array(start, np.int32))
        )


@samples_of(Windows)
def _windows() -> Iterator[Sample]:
    for shape, size, stride, dilation in (
        ((7,), (3,), (1,), (1,)),
        ((2, 9), (3,), (2,), (2,)),
        ((2, 3, 5, 6), (2, 3), (2, 1), (1, 2)),
        ((5, 5), (5, 1), (1, 3), (1, 1)),
    ):
        yield Sample(Windows(size, stride, dilation), (floats(*shape),))
