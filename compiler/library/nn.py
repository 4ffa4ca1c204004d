"""What neural networks are made of, written in primitives; rewrite rules find the fast kernels.

Names and meanings are PyTorch's `torch.nn.functional`.
"""

from __future__ import annotations

import numpy as np

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Node
from ..ops import broadcast, cast, constant, full, reshape
from ..ops import elementwise as E
from ..tracing import Array
from .attention import scaled_dot_product_attention as scaled_dot_product_attention
from .convert import Value, floating, node, wrap
from .indexing import take
from .linalg import matmul
from .losses import bce_with_logits as bce_with_logits
from .losses import cross_entropy as cross_entropy
from .losses import huber_loss as huber_loss
from .losses import kl_div as kl_div
from .losses import l1_loss as l1_loss
from .losses import mse_loss as mse_loss
from .losses import nll_loss as nll_loss
from .math import elu as elu
from .math import gelu as gelu
from .math import hardswish as hardswish
from .math import leaky_relu as leaky_relu
from .math import mish as mish
from .math import relu as relu
from .math import sigmoid as sigmoid
from .math import silu as silu
from .math import softplus as softplus
from .math import tanh as tanh
from .reductions import centered, mean_node
from .softmax import log_softmax as log_softmax
from .softmax import softmax as softmax


def layer_norm(
    x: Value, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5
) -> Array:
    """(x - mean) / sqrt(var + eps) over the last axis, times weight plus bias (Ba et al., 2016)."""
    n = floating("layer_norm", x)
    axes = (len(n.shape) - 1,)
    rest = centered(n, axes)
    rstd = E.rsqrt(mean_node(rest * rest, axes) + eps)
    return wrap(_affine(rest * broadcast(rstd, n.shape), weight, bias, "layer_norm"))


def rms_norm(x: Value, weight: Value | None = None, eps: float = 1e-6) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, times weight (Zhang and Sennrich, 2019)."""
    n = floating("rms_norm", x)
    rstd = E.rsqrt(mean_node(n * n, (len(n.shape) - 1,)) + eps)
    return wrap(_affine(n * broadcast(rstd, n.shape), weight, None, "rms_norm"))


def _affine(x: Node, weight: Value | None, bias: Value | None, name: str) -> Node:
    for label, value in (("weight", weight), ("bias", bias)):
        if value is not None and node(value).shape != x.shape[-1:]:
            raise ShapeMismatch(
                f"{name} needs a {label} of shape {list(x.shape[-1:])}, got {node(value).type}"
            )
    if weight is not None:
        x = x * broadcast(cast(node(weight), x.dtype), x.shape)
    return x if bias is None else x + broadcast(cast(node(bias), x.dtype), x.shape)


def linear(x: Value, weight: Value, bias: Value | None = None) -> Array:
    """x @ weight + bias, with weight (in, out)."""
    out = matmul(x, weight)
    if bias is None:
        return out
    b = node(bias)
    if b.shape != out.shape[-1:]:
        raise ShapeMismatch(f"linear needs a bias of shape {list(out.shape[-1:])}, got {b.type}")
    return wrap(out.node + broadcast(cast(b, out.dtype), out.shape))


def embedding(ids: Value, table: Value) -> Array:
    """Rows of a table at integer ids; repeated ids add their gradients."""
    return take(table, ids, 0)


def group_norm(
    x: Value, groups: int, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5
) -> Array:
    """Normalizes each group of channels of (n, c, *spatial) over its channels and places (Wu and
    He, 2018)."""
    n = floating("group_norm", x)
    if len(n.shape) < 2 or n.shape[1] % groups:
        raise ShapeMismatch(
            f"group_norm needs (n, c, ...) with a multiple of {groups} channels, got {n.type}"
        )
    rows = reshape(n, (n.shape[0] * groups, n.type.size // max(n.shape[0] * groups, 1)))
    out = reshape(node(layer_norm(wrap(rows), eps=eps)), n.shape)
    return wrap(_channels(out, weight, bias, "group_norm"))


def _channels(x: Node, weight: Value | None, bias: Value | None, name: str) -> Node:
    column = (1, x.shape[1], *(1,) * (len(x.shape) - 2))
    for label, value in (("weight", weight), ("bias", bias)):
        if value is not None and node(value).shape != (x.shape[1],):
            raise ShapeMismatch(
                f"{name} needs a {label} of shape [{x.shape[1]}], got {node(value).type}"
            )
    if weight is not None:
        x = x * broadcast(reshape(cast(node(weight), x.dtype), column), x.shape)
    return x if bias is None else x + broadcast(reshape(cast(node(bias), x.dtype), column), x.shape)


def batch_norm(
    x: Value,
    mean: Value,
    var: Value,
    weight: Value | None = None,
    bias: Value | None = None,
    *,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> tuple[Array, Array, Array]:
    """Normalizes each channel of (n, c, *spatial) (Ioffe and Szegedy, 2015): `(result, new mean,
    new var)`.

    In training over the batch, and the running statistics move by `momentum` (the variance
    unbiased, as in PyTorch); else with the running statistics, which stay.
    """
    n = floating("batch_norm", x)
    column = (1, n.shape[1], *(1,) * (len(n.shape) - 2))
    if not training:
        center, spread = (reshape(cast(node(v), n.dtype), column) for v in (mean, var))
        out = (n - broadcast(center, n.shape)) * broadcast(E.rsqrt(spread + eps), n.shape)
        return wrap(_channels(out, weight, bias, "batch_norm")), wrap(node(mean)), wrap(node(var))
    axes = (0, *range(2, len(n.shape)))
    count = n.type.size // max(n.shape[1], 1)
    center = mean_node(n, axes)
    rest = centered(n, axes)
    spread = mean_node(rest * rest, axes)
    out = rest * broadcast(E.rsqrt(spread + eps), n.shape)
    flat = (n.shape[1],)
    unbiased = reshape(spread, flat) * (count / max(count - 1, 1))
    moved = [E.stop_gradient(node(old) * (1 - momentum) + new * momentum)
             for old, new in ((mean, reshape(center, flat)), (var, unbiased))]  # fmt: skip
    return wrap(_channels(out, weight, bias, "batch_norm")), wrap(moved[0]), wrap(moved[1])


def dropout(x: Value, p: float, key: Value, training: bool = True) -> Array:
    """x with each element zeroed with probability p and the others divided by 1 - p; x itself
    outside training."""
    from .random import bernoulli

    n = floating("dropout", x)
    if not 0 <= p <= 1:
        raise TypeMismatch(f"dropout needs 0 <= p <= 1, got {p}")
    if not training or p == 0:
        return wrap(n)
    keep = node(bernoulli(key, 1 - p, n.shape))
    scaled = n * (1 / (1 - p) if p < 1 else 0.0)
    return wrap(E.select(keep, E.tame(scaled), full(0, n.shape, n.dtype)))


def rope(x: Value, positions: Value, base: float = 10000.0, interleaved: bool = False) -> Array:
    """Rotary position embedding of x (..., t, d) at integer positions (t,) or (..., t) (Su et al.,
    2021).

    Pair i of a row turns by position * base^(-2 i / d). Pairs are (i, i + d / 2), or (2 i, 2 i + 1)
    when interleaved.
    """
    from ..ops import concat, slice_

    n, p = floating("rope", x), node(positions)
    d = n.shape[-1]
    if d % 2:
        raise ShapeMismatch(f"rope needs an even last axis, got {n.type}")
    half = (*n.shape[:-1], d // 2)
    rates = constant(np.asarray([base ** (-2 * i / d) for i in range(d // 2)], np.float32), n.dtype)
    angle = broadcast(reshape(cast(p, n.dtype), (*p.shape, 1)), half) * broadcast(rates, half)
    c, s = E.cos(angle), E.sin(angle)
    pairs = reshape(n, (*n.shape[:-1], d // 2, 2) if interleaved else (*n.shape[:-1], 2, d // 2))
    axis = len(pairs.shape) - (1 if interleaved else 2)
    start, stop = [0] * len(pairs.shape), list(pairs.shape)
    first = reshape(slice_(pairs, start, [*stop[:axis], 1, *stop[axis + 1 :]]), half)
    second = reshape(slice_(pairs, [*start[:axis], 1, *start[axis + 1 :]], stop), half)
    one = [*half[:-1], d // 2, 1] if interleaved else [*half[:-1], 1, d // 2]
    turned = [reshape(first * c - second * s, one), reshape(second * c + first * s, one)]
    return wrap(reshape(concat(turned, axis), n.shape))
