"""Example calls of every op, from which its tests are made: odd sizes, 0 and 1, no axes at all,
duplicates, ties, NaN and infinities, every axis. `samples(op)` takes an op class, or an entry of
the elementwise table. Those of elementwise ops are here, others in `*_samples` by kind."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ..ir import Node, Op
from ..types import DTYPES, TupleType
from .elementwise import Cast, Elementwise

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
    from . import fused_samples, move_samples, reduce_samples

    _ = fused_samples, move_samples, reduce_samples  # they register theirs
    if op not in _OF:
        raise NotImplementedError(
            f"{op.__name__} needs samples: add them to compiler/ops/*_samples.py"
        )
    return list(_OF[op]())


_OF: dict[type[Op], Callable[[], Iterator[Sample]]] = {}


def samples_of(
    *ops: type[Op],
) -> Callable[[Callable[[], Iterator[Sample]]], Callable[[], Iterator[Sample]]]:
    """A decorator of what gives the example calls of these op classes."""

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


@samples_of(Cast)
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


def results(op: Op, operands: Sequence[Node]) -> list[Node]:
    """The results of an op, one node each."""
    from ..ir import make
    from .fused import get

    node = make(op, *operands)
    if isinstance(node.type, TupleType):
        return [get(node, k) for k in range(len(node.type.items))]  # type: ignore[attr-defined]
    return [node]
