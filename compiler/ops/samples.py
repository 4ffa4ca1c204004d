"""Example calls of every op, from which its tests are made: odd sizes, 0 and 1, no axes at all,
duplicates, ties, NaN and infinities, every axis. `samples(op)` takes an op class, or an entry of
the elementwise table."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations, product

import numpy as np

from ..ir import Node, Op
from ..types import DTYPES, TupleType
from .contract import Dot
from .decode import DECODE
from .dynamic import DynamicSlice, DynamicUpdate
from .elementwise import Cast, Elementwise
from .fused import EXTRAS, Attention, AttentionBackward, AttentionBias, Get
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
from .reduce import COMBINES, Reduce
from .scan import Argsort, Scan
from .scatter import ScatterAdd, ScatterSet
from .window import Conv, Windows

Array = np.ndarray


@dataclass(frozen=True, slots=True)
class Sample:
    """An example call. `smooth`: gradients equal finite differences here (no ties, steps, NaN or
    infinities)."""

    op: Op
    operands: tuple[Array, ...]
    smooth: bool = True


def samples(op: type[Op] | Elementwise) -> list[Sample]:
    """The example calls of an op class or of an elementwise op."""
    if isinstance(op, Elementwise):
        return list(_elementwise(op))
    if op not in _OF:
        raise NotImplementedError(
            f"{op.__name__} needs samples: add them to compiler/ops/samples.py"
        )
    return list(_OF[op]())


_OF: dict[type[Op], Callable[[], Iterator[Sample]]] = {}


def _of(
    *ops: type[Op],
) -> Callable[[Callable[[], Iterator[Sample]]], Callable[[], Iterator[Sample]]]:
    def add(function: Callable[[], Iterator[Sample]]) -> Callable[[], Iterator[Sample]]:
        _OF.update(dict.fromkeys(ops, function))
        return function

    return add


# ---- values


def floats(
    *shape: int, low: float = -2.0, high: float = 2.0, seed: int = 0, dtype: str = "f32"
) -> Array:
    """Numbers in [low, high) that are the same on every run."""
    rng = np.random.default_rng([seed, *shape])
    return rng.uniform(low, high, shape).astype(DTYPES[dtype].numpy)


def integers(*shape: int, low: int = -3, high: int = 4, seed: int = 0, dtype: str = "i32") -> Array:
    """Integers in [low, high), or bools."""
    rng = np.random.default_rng([seed, *shape])
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0 if dtype == "u32" else low, high, shape).astype(DTYPES[dtype].numpy)


def some(dtype: str, *shape: int, seed: int = 0) -> Array:
    """Plain values of any dtype."""
    return (
        floats(*shape, seed=seed, dtype=dtype)
        if DTYPES[dtype].kind == "f"
        else integers(*shape, seed=seed, dtype=dtype)
    )


def hostile(*shape: int, seed: int = 0) -> Array:
    """Numbers with NaN and both infinities among them."""
    out = floats(*shape, seed=seed).ravel()
    for k, value in enumerate((math.inf, math.nan, -math.inf, -0.0)):
        out[k * 3 + 1 :: 17] = value
    return out.reshape(shape)


SPECIAL = np.array(
    [0, -0.0, 1, -1, 0.5, -2.5, 3, 1e-20, 1e20, 3e38, -3e38, np.inf, -np.inf, np.nan], np.float32
)
EXTREMES = {
    "i": np.array([0, 1, -1, 2, -7, 31, 32, 65536, 2**31 - 1, -(2**31), -(2**31) + 1], np.int32),
    "u": np.array([0, 1, 2, 7, 31, 32, 65536, 2**31, 2**32 - 1], np.uint32),
    "b": np.array([False, True]),
}


# ---- elementwise


def _elementwise(op: Elementwise) -> Iterator[Sample]:
    low, high = op.domain
    dtypes = {"f": ("f32", "f16"), "i": ("i32",), "u": ("u32",), "b": ("bool",)}
    for kind in op.takes:
        for dtype in dtypes[kind]:
            shapes = ((5,), (2, 4)) if dtype == "f16" else ((), (0, 3), (37,), (2, 3, 4))
            for shape in shapes:
                xs = [
                    floats(*shape, low=low, high=high, seed=_seed(op.label, k), dtype=dtype)
                    if kind == "f"
                    else some(dtype, *shape, seed=_seed(op.label, k))
                    for k in range(op.arity)
                ]
                yield Sample(op, _chosen(op, xs), kind == "f" and dtype != "f16")
        values = SPECIAL if kind == "f" else EXTREMES[kind]
        pairs = [
            np.array(side) for side in zip(*product(values, repeat=min(op.arity, 2)), strict=True)
        ]
        yield Sample(op, _chosen(op, [*pairs, *pairs[: op.arity - len(pairs)]]), smooth=False)


def _chosen(op: Elementwise, xs: list[Array]) -> tuple[Array, ...]:
    """The operands; the first of an op that hides values is a condition."""
    if op.masking:
        return (np.asarray(integers(*xs[0].shape, dtype="bool", seed=9)), *xs[1:])
    return tuple(np.asarray(x) for x in xs)


def _seed(label: str, k: int) -> int:
    return zlib.crc32(label.encode()) % 1000 + k


@_of(Cast)
def _cast() -> Iterator[Sample]:
    values = {
        "f32": SPECIAL,
        "f16": floats(7, dtype="f16"),
        **{d.name: EXTREMES[d.kind] for d in DTYPES.values() if d.kind != "f"},
    }
    for x, to in product(values.values(), DTYPES):
        yield Sample(Cast(to), (x,), smooth=False)
        yield Sample(Cast(to), (x[:0],), smooth=False)
    yield Sample(Cast("f32"), (floats(3, 5),))
    yield Sample(Cast("f16"), (floats(4),), smooth=False)


# ---- leaves


@_of(Literal)
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


@_of(Constant)
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


@_of(Iota)
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


@_of(Transpose)
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


@_of(Reshape)
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


@_of(Broadcast)
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


@_of(Slice)
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


@_of(Pad)
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


@_of(Concat)
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


@_of(Flip)
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


@_of(Gather)
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


@_of(DynamicSlice)
def _dynamic_slice() -> Iterator[Sample]:
    for shape, start, size in (
        ((7,), (2,), (3,)),
        ((4, 5), (1, 0), (2, 4)),
        ((4, 8), (0, 4), (4, 4)),
        ((3, 4), (3, 0), (0, 4)),
        ((2, 3, 4), (1, 2, 3), (1, 1, 1)),
    ):
        yield Sample(DynamicSlice(size), (floats(*shape), np.array(start, np.int32)))
    yield Sample(DynamicSlice((2,)), (integers(5), np.array([3], np.uint32)))


@_of(DynamicUpdate)
def _dynamic_update() -> Iterator[Sample]:
    for shape, start, size in (
        ((7,), (2,), (3,)),
        ((4, 5), (1, 0), (2, 4)),
        ((4, 8), (0, 4), (4, 4)),
        ((3, 4), (3, 0), (0, 4)),
        ((2, 3, 4), (1, 2, 3), (1, 1, 1)),
        ((3, 4), (0, 0), (3, 4)),
    ):
        yield Sample(
            DynamicUpdate(), (floats(*shape), floats(*size, seed=1), np.array(start, np.int32))
        )


@_of(Windows)
def _windows() -> Iterator[Sample]:
    for shape, size, stride, dilation in (
        ((7,), (3,), (1,), (1,)),
        ((2, 9), (3,), (2,), (2,)),
        ((2, 3, 5, 6), (2, 3), (2, 1), (1, 2)),
        ((5, 5), (5, 1), (1, 3), (1, 1)),
    ):
        yield Sample(Windows(size, stride, dilation), (floats(*shape),))


# ---- reductions, scans, order


@_of(Reduce)
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


@_of(Scan)
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


@_of(Argsort)
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


@_of(Dot)
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


@_of(ScatterAdd)
def _scatter_add() -> Iterator[Sample]:
    for shape, positions in product(((8,), (8, 3), (8, 2, 4)), _PLACES):
        yield Sample(ScatterAdd(5), (floats(*shape), positions.astype(np.int32)))
    for shape, rows in (((0, 3), 4), ((1, 1), 1), ((8, 3), 1)):
        yield Sample(ScatterAdd(rows), (floats(*shape), np.zeros(shape[0], np.uint32)))
    yield Sample(
        ScatterAdd(3), (integers(700, 4), integers(700, low=0, high=3, seed=2)), smooth=False
    )


@_of(ScatterSet)
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


@_of(Conv)
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


# ---- kernels with several results, which only rules make


def attention_cases() -> Iterator[tuple[dict[str, object], tuple[Array, ...]]]:
    """Attributes and operands of attention: q, k, v and a mask or a bias."""
    plain = {
        "scale": 0.5,
        "causal": False,
        "offset": 0,
        "window": 0,
        "softcap": 0.0,
        "extra": "none",
    }
    for change, (lead, t, s, d, e) in (
        ({}, ((), 3, 5, 4, 4)),
        ({}, ((2,), 1, 7, 3, 5)),
        ({"causal": True}, ((2, 3), 9, 9, 8, 8)),
        ({"causal": True, "offset": 3}, ((2,), 4, 7, 8, 8)),
        ({"causal": True, "window": 3}, ((1,), 11, 11, 4, 4)),
        ({"softcap": 2.0}, ((2,), 5, 6, 4, 4)),
        ({"extra": "mask"}, ((2,), 6, 5, 4, 4)),
        ({"extra": "bias"}, ((2,), 6, 5, 4, 4)),
        ({"extra": "mask", "empty": "nan"}, ((2,), 6, 5, 4, 4)),
        ({"extra": "mask", "empty": "mean", "causal": True}, ((2,), 6, 5, 4, 4)),
        ({"extra": "both", "softcap": 2.0}, ((2,), 6, 5, 4, 4)),
        ({"extra": "bias", "empty": "nan", "window": 3, "causal": True}, ((2, 2), 6, 5, 4, 4)),
    ):
        q, k, v = floats(*lead, t, d), floats(*lead, s, d, seed=1), floats(*lead, s, e, seed=2)
        extra = {"mask": integers(*lead, t, s, dtype="bool"), "bias": floats(*lead, t, s, seed=3)}
        extra["mask"][..., t // 2, :] = False  # a row that sees nothing
        names = EXTRAS[str(change.get("extra", "none"))]
        yield {**plain, **change}, (q, k, v, *(extra[name] for name in names))


@_of(Attention, Get)
def _attention() -> Iterator[Sample]:
    for attributes, operands in attention_cases():
        yield Sample(Attention(**attributes), operands, smooth=False)  # type: ignore[arg-type]


def decode_cases() -> Iterator[tuple[dict[str, object], tuple[Array, ...]]]:
    """Attributes and operands of attention of few rows: q, k, v, bounds, and a mask or a bias."""
    plain: dict[str, object] = {"scale": 0.5, "causal": False, "offset": 0, "window": 0}
    plain |= {"softcap": 0.0, "extra": "none", "group": 1, "bounded": True, "empty": "zero"}
    for change, (lead, t, s, d, e) in (
        ({}, ((2,), 1, 9, 4, 4)),
        ({"bounded": False}, ((), 2, 9, 3, 5)),
        ({"group": 3}, ((2, 2), 3, 12, 8, 8)),
        ({"group": 2, "causal": True, "offset": 5}, ((1,), 4, 9, 4, 8)),
        ({"group": 2, "extra": "mask"}, ((2,), 2, 9, 4, 4)),
        ({"extra": "bias", "softcap": 3.0}, ((1,), 2, 9, 4, 4)),
        ({"extra": "both"}, ((2,), 2, 9, 4, 4)),
        ({"empty": "nan"}, ((2,), 3, 9, 4, 4)),
        ({"empty": "mean"}, ((2,), 3, 9, 4, 4)),
    ):
        shape = (*lead, t, 1)
        first = integers(*shape, low=-2, high=4)
        end = first + integers(*shape, low=-1, high=s + 2, seed=1)  # some rows see nothing
        more = {"mask": integers(*lead, t, s, dtype="bool"), "bias": floats(*lead, t, s, seed=3)}
        qkv = floats(*lead, t, d), floats(*lead, s, d, seed=1), floats(*lead, s, e, seed=2)
        extra = [more[name] for name in EXTRAS[str(change.get("extra", "none"))]]
        bounds = [first, end] if change.get("bounded", True) else []
        yield {**plain, **change}, (*qkv, *bounds, *extra)


def _decode(op: type[Op]) -> Callable[[], Iterator[Sample]]:
    def cases() -> Iterator[Sample]:
        for attributes, operands in decode_cases():
            yield Sample(op(**attributes), operands, smooth=False)  # type: ignore[arg-type]

    return cases


for _form in DECODE:
    _of(_form)(_decode(_form))


@_of(AttentionBackward)
def _attention_backward() -> Iterator[Sample]:
    for attributes, operands in gradient_cases():
        yield Sample(AttentionBackward(**attributes), operands, smooth=False)  # type: ignore[arg-type]


@_of(AttentionBias)
def _attention_bias() -> Iterator[Sample]:
    for attributes, operands in gradient_cases():
        lead = operands[0].ndim - 2
        for axes in sorted({(), (0,)[:lead], tuple(range(lead))}):
            yield Sample(AttentionBias(**attributes, axes=axes), operands, smooth=False)  # type: ignore[arg-type]


def gradient_cases() -> Iterator[tuple[dict[str, object], tuple[Array, ...]]]:
    """Attributes and operands of the gradients of attention."""
    for attributes, (q, k, v, *extra) in attention_cases():
        out, stats = Attention(**attributes).evaluate(q, k, v, *extra)  # type: ignore[arg-type]
        ct = floats(*out.shape, seed=4)
        yield attributes, (q, k, v, stats, (ct * out).sum(-1, keepdims=True), ct, *extra)


def results(op: Op, operands: Sequence[Node]) -> list[Node]:
    """The results of an op, one node each."""
    from ..ir import make
    from .fused import get

    node = make(op, *operands)
    if isinstance(node.type, TupleType):
        return [get(node, k) for k in range(len(node.type.items))]  # type: ignore[attr-defined]
    return [node]
