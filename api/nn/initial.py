"""Initial weights: random numbers of a key, the same on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from eggpu.compiler.errors import ShapeMismatch, TraceError
from eggpu.compiler.library import math as M
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


def truncated_normal(key: Key, shape: Sequence[int], std: float, limit: float = 2.0) -> Array:
    """Normal numbers of deviation `std` (before the cut) within `limit` times `std`.

    Each is the first of several draws that lies inside; enough are made for one miss in 1e9.
    """
    if not limit > 0:
        raise ValueError(f"truncated_normal needs a limit above 0, got {limit}")
    outside = math.erfc(limit / math.sqrt(2))
    draws = max(1, math.ceil(-9 / math.log10(outside))) if outside > 0 else 1
    parts = keys(key, draws)
    out = M.clip(random.normal(parts[0], shape), -limit, limit)
    for part in parts[1:]:
        drawn = random.normal(part, shape)
        out = M.where(M.abs(out) < limit, out, M.clip(drawn, -limit, limit))
    return known(out * std)


def fans(shape: Sequence[int], layout: str = "in_out") -> tuple[int, int]:
    """Inputs and outputs of a weight: "in_out" (inputs, outputs), or "conv" (out, in, *size)."""
    if len(shape) < 2 or layout not in ("in_out", "conv"):
        raise ShapeMismatch(f"fans need two axes and 'in_out' or 'conv', got {shape}, {layout!r}")
    if layout == "in_out":
        return math.prod(shape[:-1]), shape[-1]
    size = math.prod(shape[2:])
    return shape[1] * size, shape[0] * size


def xavier_uniform(
    key: Key, shape: Sequence[int], gain: float = 1.0, layout: str = "in_out"
) -> Array:
    """Uniform with variance gain^2 * 2 / (inputs + outputs) (Glorot and Bengio, 2010)."""
    return uniform(key, shape, gain * math.sqrt(6 / sum(fans(shape, layout))))


def xavier_normal(
    key: Key, shape: Sequence[int], gain: float = 1.0, layout: str = "in_out"
) -> Array:
    """Normal with variance gain^2 * 2 / (inputs + outputs) (Glorot and Bengio, 2010)."""
    return normal(key, shape, gain * math.sqrt(2 / sum(fans(shape, layout))))


def he_uniform(
    key: Key, shape: Sequence[int], gain: float = math.sqrt(2), layout: str = "in_out"
) -> Array:
    """Uniform with variance gain^2 / inputs (He et al., 2015); the gain is ReLU's."""
    return uniform(key, shape, gain * math.sqrt(3 / fans(shape, layout)[0]))


def he_normal(
    key: Key, shape: Sequence[int], gain: float = math.sqrt(2), layout: str = "in_out"
) -> Array:
    """Normal with variance gain^2 / inputs (He et al., 2015); the gain is ReLU's."""
    return normal(key, shape, gain * math.sqrt(1 / fans(shape, layout)[0]))


def orthogonal(key: Key, shape: Sequence[int], gain: float = 1.0) -> Array:
    """A matrix with orthonormal rows or columns, whichever are fewer (Saxe et al., 2014).

    More axes count as columns: (rows, *rest). Computed with NumPy, so not inside a trace.
    """
    if len(shape) < 2:
        raise ShapeMismatch(f"orthogonal needs at least two axes, got {list(shape)}")
    rows, columns = shape[0], math.prod(shape[1:])
    drawn = normal(key, (max(rows, columns), min(rows, columns)), 1.0).numpy().astype(np.float64)
    q, r = np.linalg.qr(drawn)
    q = q * np.sign(np.diag(r))  # makes the distribution uniform
    return array((gain * (q if rows >= columns else q.T)).reshape(tuple(shape)).astype(np.float32))


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
