"""Example calls of reductions, scans, orders, products and sums into places."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np

from ..types import DTYPES
from .contract import Dot
from .reduce import COMBINES, Reduce
from .samples import EXTREMES, Array, Sample, floats, hostile, integers, samples_of, some
from .scan import Argsort, Scan
from .scatter import ScatterAdd, ScatterSet
from .window import Conv

# ---- reductions, scans, order


@samples_of(Reduce)
def _reduce() -> Iterator[Sample]:
    for name, combine in COMBINES.items():
        kinds = {"f32": "f", "i32": "i", "u32": "u", "bool": "b"}
        for dtype in (d for d, kind in kinds.items() if kind in combine.identity):
            yield from _reduced(name, dtype)


def _reduced(combine: str, dtype: str) -> Iterator[Sample]:
    def values(*shape: int) -> Array:
        return some(dtype, *shape, seed=3)

    smooth = dtype == "f32"
    if dtype == "f32":
        for count in (1, 2, 3):
            for axes in combinations(range(3), count):
                yield Sample(Reduce(combine, axes), (values(3, 4, 5),))
        for shape in ((2, 8), (1, 37), (5, 1030)):
            yield Sample(Reduce(combine, (len(shape) - 1,)), (hostile(*shape),), smooth=False)
        yield Sample(
            Reduce(combine, (0,)),
            (values(1030, 4) if combine != "prod" else values(9, 4),),
            smooth=False,
        )
        yield Sample(
            Reduce(combine, (0,)), (np.array([1, 2, 2, 0, 0, 1], np.float32),), smooth=False
        )
    else:
        yield Sample(Reduce(combine, (0,)), (EXTREMES[DTYPES[dtype].kind],), smooth=False)
        yield Sample(Reduce(combine, (0, 2)), (values(3, 5, 7),), smooth=False)
    yield Sample(Reduce(combine, (1,)), (values(0, 3),), smooth)
    if combine not in ("max", "min"):
        yield Sample(Reduce(combine, (0,)), (values(0, 3),), smooth)


@samples_of(Scan)
def _scan() -> Iterator[Sample]:
    for combine, reverse in product(("sum", "prod", "max", "min"), (False, True)):
        for shape, axis in (
            ((7,), 0),
            ((8,), 0),
            ((2, 3, 5), 1),
            ((3, 4, 4), 1),
            ((0, 3), 1),
            ((1, 5), 0),
        ):
            yield Sample(Scan(combine, axis, reverse), (floats(*shape, seed=5),))
        yield Sample(
            Scan(combine, 0, reverse),
            (np.array([2, 0, 1, 2, 0, 3], np.float32),),
            smooth=combine in ("sum", "prod"),
        )
        yield Sample(Scan(combine, 0, reverse), (hostile(19),), smooth=False)
        yield Sample(Scan(combine, 0, reverse), (EXTREMES["i"],), smooth=False)
        yield Sample(Scan(combine, 1, reverse), (integers(3, 5, dtype="u32"),), smooth=False)
    yield Sample(Scan("sum", 1, False), (floats(2, 5003),), smooth=False)


@samples_of(Argsort)
def _argsort() -> Iterator[Sample]:
    for descending in (False, True):
        for x in (
            floats(7),
            hostile(3, 19),
            integers(2, 3, 5),
            integers(9, dtype="u32"),
            integers(4, 6, dtype="bool"),
            EXTREMES["i"],
            floats(1),
            floats(3, 0),
            integers(2, 300).astype(np.float32),
        ):
            yield Sample(Argsort(descending), (x,), smooth=False)


# ---- products and scattering


@samples_of(Dot)
def _dot() -> Iterator[Sample]:
    for lead, m, k, n in (
        ((), 3, 4, 5),
        ((), 1, 7, 1),
        ((2,), 3, 5, 4),
        ((2, 3), 1, 2, 3),
        ((), 8, 16, 8),
        ((), 3, 0, 2),
        ((0,), 2, 3, 4),
        ((), 0, 3, 2),
    ):
        yield Sample(Dot(), (floats(*lead, m, k), floats(*lead, k, n, seed=1)))
    yield Sample(Dot(), (floats(37, 129), floats(129, 33, seed=1)), smooth=False)
    yield Sample(
        Dot(), (floats(4, 8, dtype="f16"), floats(8, 5, seed=1, dtype="f16")), smooth=False
    )
    big = np.full((3, 4), 2**30, np.int32)
    yield Sample(Dot(), (integers(2, 3), big), smooth=False)
    yield Sample(
        Dot(), (integers(2, 3, dtype="u32"), integers(3, 2, seed=1, dtype="u32")), smooth=False
    )


_PLACES = (np.array([0, 2, 2, -1, 4, 0, 9, -8]), np.arange(8), np.array([[3] * 8])[0])


@samples_of(ScatterAdd)
def _scatter_add() -> Iterator[Sample]:
    for shape, positions in product(((8,), (8, 3), (8, 2, 4)), _PLACES):
        yield Sample(ScatterAdd(5), (floats(*shape), positions.astype(np.int32)))
    for shape, rows in (((0, 3), 4), ((1, 1), 1), ((8, 3), 1)):
        yield Sample(ScatterAdd(rows), (floats(*shape), np.zeros(shape[0], np.uint32)))
    yield Sample(
        ScatterAdd(3), (integers(700, 4), integers(700, low=0, high=3, seed=2)), smooth=False
    )


@samples_of(ScatterSet)
def _scatter_set() -> Iterator[Sample]:
    for shape, positions in product(((), (3,), (2, 4)), _PLACES):
        yield Sample(
            ScatterSet(), (floats(5, *shape), floats(8, *shape, seed=1), positions.astype(np.int32))
        )
    yield Sample(ScatterSet(), (floats(4, 3), floats(0, 3), np.zeros(0, np.int32)))
    yield Sample(
        ScatterSet(),
        (integers(700, 4), integers(900, 4, seed=1), integers(900, low=0, high=700, seed=2)),
        smooth=False,
    )
    yield Sample(
        ScatterSet(),
        (integers(5, dtype="bool"), integers(2, dtype="bool", seed=4), np.array([4, 1], np.int32)),
        smooth=False,
    )


@samples_of(Conv)
def _conv() -> Iterator[Sample]:
    cases = (
        ((1, 1, 5), (1, 1, 3), (1,), (1,), 1),
        ((2, 4, 9), (6, 2, 3), (2,), (2,), 2),
        ((2, 3, 5, 6), (4, 3, 3, 2), (1, 2), (2, 1), 1),
        ((1, 4, 6, 5), (4, 1, 3, 3), (1, 1), (1, 1), 4),
        ((1, 2, 4, 4, 4), (3, 2, 2, 2, 2), (2, 1, 1), (1, 1, 2), 1),
        ((0, 3, 5), (2, 3, 2), (1,), (1,), 1),
    )
    for x, w, stride, dilation, groups in cases:
        yield Sample(Conv(stride, dilation, groups), (floats(*x), floats(*w, seed=1)))
