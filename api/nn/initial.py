"""Initial weights: random numbers of a key, the same on every machine."""

from __future__ import annotations

from collections.abc import Sequence

from eggpu.compiler.errors import TraceError
from eggpu.compiler.library import random
from eggpu.compiler.library.shaping import ones as _ones
from eggpu.compiler.library.shaping import zeros as _zeros
from eggpu.compiler.tracing import Array, array

Key = Array | int  # of eggpu.random.key, or a seed


def keys(key: Key, count: int) -> list[Array]:
    """`count` independent keys of a key or seed."""
    both = known(random.split(random.key(key) if isinstance(key, int) else key, count))
    return [known(both[i]) for i in range(count)]


def normal(key: Key, shape: Sequence[int], std: float) -> Array:
    """Normal numbers with mean 0."""
    key = random.key(key) if isinstance(key, int) else key
    return known(random.normal(key, shape) * std)


def uniform(key: Key, shape: Sequence[int], bound: float) -> Array:
    """Numbers in [-bound, bound)."""
    key = random.key(key) if isinstance(key, int) else key
    return known(random.uniform(key, shape, -bound, bound))


def zeros(shape: Sequence[int]) -> Array:
    """Zeros."""
    return known(_zeros(shape))


def ones(shape: Sequence[int]) -> Array:
    """Ones."""
    return known(_ones(shape))


def known(x: Array) -> Array:
    """`x` computed now, so that a model is not an expression; inside a trace `x` itself."""
    try:
        return array(x.numpy())
    except TraceError:
        return x
