"""Counter-based random numbers: a key is an argument, and the same key gives the same numbers on
every device.

>>> k = key(0)
>>> a, b = split(k)
>>> normal(a, (2, 3))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Node
from ..ops import broadcast, cast, full, iota, literal, reshape, slice_
from ..ops import elementwise as E
from ..ops.random import random_bits, unit_float
from ..tracing import Array, array
from ..types import Type, u32
from ..types import dtype as as_dtype
from .convert import Value, node, wrap
from .shaping import stack


def key(seed: int | Value) -> Array:
    """The key of a seed: u32[2]."""
    if isinstance(seed, int):
        import numpy as np

        return array(np.array([seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF], np.uint32))
    return stack([wrap(cast(node(seed), u32)), wrap(literal(0, u32))])


def _bits(k: Value, count: int, salt: int = 0) -> Node:
    words = array(k).node
    if words.type != Type((2,), u32):
        raise TypeMismatch(
            f"a random key is a u32[2] made by random.key or random.split, got {words.type}"
        )
    first, second = (broadcast(slice_(words, (i,), (i + 1,)), (count,)) for i in range(2))
    counter = iota((count,), 0, u32)
    return random_bits(first, second, counter + salt if salt else counter)


def split(k: Value, num: int = 2) -> Array:
    """`num` new keys, u32[num, 2]; iterate over the result or index it."""
    return wrap(reshape(_bits(k, 2 * num, 0x80000000), (num, 2)))


def _row_words(k: Value, count: int) -> tuple[Node, Node]:
    """Both words of a key a row, u32[rows, 2], each along `count` columns."""
    words = array(k).node
    if len(words.shape) != 2 or words.type != Type((words.shape[0], 2), u32):
        raise TypeMismatch(f"random keys of rows are u32[rows, 2], got {words.type}")
    rows = words.shape[0]
    parts = [slice_(words, (0, i), (rows, i + 1)) for i in range(2)]
    return broadcast(parts[0], (rows, count)), broadcast(parts[1], (rows, count))


def fold_in(k: Value, data: int | Value) -> Array:
    """A new key of a key and a number, such as a step; of keys u32[rows, 2] and a number each, or
    one for all, new keys."""
    words, n = array(k).node, cast(node(data), u32)
    if len(words.shape) == 2:
        shape = (words.shape[0], 2)
        first, second = _row_words(k, 2)
        n = broadcast(reshape(n, (n.type.size, 1)), shape)
        return wrap(random_bits(first, second, (n + n) + (iota(shape, 1, u32) + 0x40000000)))
    n = broadcast(reshape(n, (1,)), (2,))
    first, second = (broadcast(slice_(words, (i,), (i + 1,)), (2,)) for i in range(2))
    return wrap(random_bits(first, second, (n + n) + (iota((2,), 0, u32) + 0x40000000)))


def uniform(
    k: Value, shape: Sequence[int] = (), low: float = 0.0, high: float = 1.0, dtype: Any = "f32"
) -> Array:
    """Numbers in [low, high), with 24 random bits."""
    out = unit_float(_bits(k, math.prod(shape)))
    out = out * (high - low) + low if (low, high) != (0.0, 1.0) else out
    return wrap(cast(reshape(out, tuple(shape)), as_dtype(dtype)))


def normal(k: Value, shape: Sequence[int] = (), dtype: Any = "f32") -> Array:
    """Standard normal numbers (Box and Muller, 1958)."""
    count = math.prod(shape)
    half = -(-count // 2)
    radius = E.sqrt(E.log(1.0 - unit_float(_bits(k, half))) * -2.0)
    angle = unit_float(_bits(k, half, 0x20000000)) * (2 * math.pi)
    from ..ops import concat

    both = concat([radius * E.cos(angle), radius * E.sin(angle)], 0)
    return wrap(cast(reshape(slice_(both, (0,), (count,)), tuple(shape)), as_dtype(dtype)))


def bernoulli(k: Value, p: float, shape: Sequence[int] = ()) -> Array:
    """True with probability p."""
    u = unit_float(_bits(k, math.prod(shape)))
    return wrap(reshape(E.lt(u, full(p, u.shape, u.dtype)), tuple(shape)))


def randint(k: Value, shape: Sequence[int], low: int, high: int) -> Array:
    """Integers in [low, high), i32; the range is at most 2^24."""
    if not 0 < high - low <= 1 << 24:
        raise TypeMismatch(f"randint needs 0 < high - low <= 2^24, got {low} and {high}")
    u = unit_float(_bits(k, math.prod(shape))) * float(high - low)
    return wrap(reshape(cast(E.floor(u), as_dtype("i32")) + low, tuple(shape)))


def categorical(k: Value, logits: Value, axis: int = -1) -> Array:
    """A class drawn with probabilities softmax(logits) along an axis, i32 (the Gumbel-max trick).

    With keys u32[rows, 2] each row of logits (rows, classes) is drawn with its own key, and gets
    what it gets alone.
    """
    from .reductions import argmax

    n, words = node(logits), array(k).node
    if len(words.shape) == 2:
        if len(n.shape) != 2 or n.shape[0] != words.shape[0] or axis not in (1, -1):
            raise ShapeMismatch(f"categorical needs a key a row of {n.type}, got {words.type}")
        bits = random_bits(*_row_words(k, n.shape[1]), iota(n.shape, 1, u32))
    else:
        bits = _bits(k, n.type.size)
    u = unit_float(bits) * (1 - 2**-23) + 2**-25
    gumbel = -E.log(-E.log(u))
    return argmax(wrap(n + reshape(gumbel, n.shape)), axis)


def permutation(k: Value, x: int | Value, axis: int = 0) -> Array:
    """The numbers below x in random order, or x shuffled along an axis."""
    from .indexing import take
    from .ordering import argsort
    from .shaping import arange

    count = x if isinstance(x, int) else array(x).shape[axis]
    order = argsort(wrap(_bits(k, count)))
    return take(arange(count), order, 0) if isinstance(x, int) else take(x, order, axis)
