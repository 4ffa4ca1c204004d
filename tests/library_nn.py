"""The rows of `library_table` for neural networks and random numbers."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
from library_table import A, b, f, i, named, row
from scipy import special

import eggpu as eg
from eggpu import nn

SHAPES = ((), (0,), (7,), (3, 5), (2, 0, 3))


def np_softplus(x: A) -> A:
    return np.logaddexp(0, x)


ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0), "silu": lambda x: x * special.expit(x), "softplus": np_softplus,
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x), "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "gelu": lambda x: x * special.ndtr(x), "mish": lambda x: x * np.tanh(np_softplus(x)),
    "hardswish": lambda x: x * np.clip(x + 3, 0, 6) / 6, "tanh": np.tanh,
}  # fmt: skip
for name, oracle in ACTIVATIONS.items():
    row(name, named(name), [(f(*s),) for s in SHAPES] + [(f(3, 5, low=-30, high=30),)], oracle, nn)
row("gelu", named("gelu", "tanh"), [(f(3, 5),)],
    lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))), nn)  # fmt: skip


def softmax(x: A, axis: int = -1) -> A:
    e = np.exp(x - x.max(axis, keepdims=True)) if x.size else x
    return e / e.sum(axis, keepdims=True)


for axis in (0, 1, -1):
    row(
        "softmax",
        named("softmax", axis),
        [(f(3, 5),), (f(2, 3, 5),)],
        lambda x, a=axis: softmax(x, a),
        nn,
    )
    row(
        "log_softmax",
        named("log_softmax", axis),
        [(f(3, 5),)],
        lambda x, a=axis: np.log(softmax(x, a)),
        nn,
    )
row("softmax", named("softmax"), [(f(0, 5),), (f(3, 0),), (f(1),)], softmax, nn)
row("log_softmax", named("log_softmax"), [(f(0, 5),), (f(3, 0),)], softmax, nn)


def normed(x: A, axes: Any, eps: float = 1e-5) -> A:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + eps)


row(
    "layer_norm",
    named("layer_norm"),
    [(f(3, 7),), (f(0, 7),), (f(5),)],
    lambda x: normed(x, -1),
    nn,
)
row(
    "layer_norm",
    named("layer_norm"),
    [(f(2, 3, 7), f(7), f(7, seed=1))],
    lambda x, w, c: normed(x, -1) * w + c,
    nn,
)
row("rms_norm", named("rms_norm"), [(f(3, 7), f(7)), (f(0, 7), f(7))],
    lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w, nn)  # fmt: skip
row("group_norm", lambda m, x, w, c: m.group_norm(x, 3, w, c), [(f(2, 6, 5), f(6), f(6, seed=1)), (f(0, 6, 5), f(6), f(6))],
    lambda x, w, c: (normed(x.reshape(-1, 3, 2 * 5), -1).reshape(x.shape) * w[:, None] + c[:, None]), nn)  # fmt: skip


def batch_normed(x: A, mean: A, var: A, training: bool) -> tuple[A, A, A]:
    col = (1, -1, *(1,) * (x.ndim - 2))
    axes = (0, *range(2, x.ndim))
    if not training:
        return (x - mean.reshape(col)) / np.sqrt(var.reshape(col) + 1e-5), mean, var
    new = 0.9 * mean + 0.1 * x.mean(axes), 0.9 * var + 0.1 * x.var(axes, ddof=1)
    return normed(x, axes), *new


for training in (False, True):
    row("batch_norm", lambda m, x, mu, v, t=training: m.batch_norm(x, mu, v, training=t),
        [(f(4, 3, 5), f(3), f(3, low=0.5)), (f(7, 3), f(3), f(3, low=0.5))], lambda x, mu, v, t=training: batch_normed(x, mu, v, t), nn)  # fmt: skip
row("linear", named("linear"), [(f(3, 5), f(5, 2), f(2)), (f(2, 3, 5), f(5, 2), f(2)), (f(0, 5), f(5, 2), f(2))],
    lambda x, w, c: x @ w + c, nn)  # fmt: skip
row(
    "embedding",
    named("embedding"),
    [(i(2, 3, low=0), f(5, 4)), (i(0), f(5, 4)), (i(low=0), f(5, 4))],
    lambda ids, t: t[ids],
    nn,
)
row("dropout", lambda m, x: [m.dropout(x, 0.0, eg.random.key(0)), m.dropout(x, 0.5, eg.random.key(0), training=False), m.dropout(x, 1.0, eg.random.key(0)) + x],
    [(f(3, 5),), (f(0),), (f(),)], lambda x: [x, x, x], nn)  # fmt: skip


def turned(x: A, p: A, interleaved: bool) -> A:
    d = x.shape[-1]
    angle = p[..., None] * 10000.0 ** (-2 * np.arange(d // 2) / d)
    c, s = np.cos(angle), np.sin(angle)
    one, two = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., : d // 2], x[..., d // 2 :])
    pair = one * c - two * s, two * c + one * s
    return np.stack(pair, -1).reshape(x.shape) if interleaved else np.concatenate(pair, -1)


for inter in (False, True):
    row("rope", lambda m, x, p, t=inter: m.rope(x, p, interleaved=t), [(f(2, 3, 5, 6), np.arange(5)), (f(3, 4), np.array([9, 0, 2])), (f(0, 4), np.zeros(0, int))],
        lambda x, p, t=inter: turned(x.astype(np.float64), p, t), nn)  # fmt: skip

# ---- losses
logp = lambda z: np.log(softmax(z.astype(np.float64)))  # noqa: E731


def ce(z: A, t: A, weight: A | None = None, ignore: int | None = None, smooth: float = 0.0) -> A:
    p = logp(z)
    w = np.ones(z.shape[-1]) if weight is None else weight
    keep = np.ones(t.shape, bool) if ignore is None else t != ignore
    at = np.where(keep, t, 0)
    rows = -np.take_along_axis(p, at[..., None], -1)[..., 0] * w[at] * (1 - smooth)
    rows -= smooth / z.shape[-1] * (p * w).sum(-1)
    return (rows * keep).sum() / (w[at] * keep).sum()


Z, T, W = f(6, 5), i(6, low=0), f(5, seed=2, low=0.3)
row("cross_entropy", named("cross_entropy"), [(Z, T), (f(2, 3, 5), i(2, 3, low=0))], ce, nn)
row("cross_entropy", lambda m, z, t, w: m.cross_entropy(z, t, weight=w), [(Z, T, W)], ce, nn)
row("cross_entropy", lambda m, z, t, w: m.cross_entropy(z, t, weight=w, label_smoothing=0.2, ignore_index=3), [(Z, T, W)],
    lambda z, t, w: ce(z, t, w, 3, 0.2), nn)  # fmt: skip
row("cross_entropy", lambda m, z, t: m.cross_entropy(z, t, label_smoothing=0.1), [(Z, softmax(f(6, 5, seed=3)))],
    lambda z, t: -(logp(z) * (t * 0.9 + 0.02)).sum(-1).mean(), nn)  # fmt: skip
row(
    "cross_entropy",
    lambda m, z, t: m.cross_entropy(z, t, reduction="sum"),
    [(f(0, 5), i(0))],
    lambda z, t: 0.0,
    nn,
)
row("nll_loss", named("nll_loss"), [(f(6, 5), T)], lambda z, t: -z[np.arange(6), t].mean(), nn)
for red, g in (("mean", np.mean), ("sum", np.sum), ("none", np.asarray)):
    both = [(f(3, 5), f(3, 5, seed=1)), (f(7), f(7, seed=1))]
    row("mse_loss", named("mse_loss", red), both, lambda x, t, g=g: g((x - t) ** 2), nn)
    row("l1_loss", named("l1_loss", red), both, lambda x, t, g=g: g(abs(x - t)), nn)
    row(
        "huber_loss",
        named("huber_loss", 0.7, red),
        both,
        lambda x, t, g=g: g(special.huber(0.7, x - t)),
        nn,
    )
    row("bce_with_logits", named("bce_with_logits", reduction=red), [(f(3, 5) * 9, f(3, 5, low=0, high=1))],
        lambda x, t, g=g: g(np_softplus(x) - x * t), nn)  # fmt: skip
    row("kl_div", named("kl_div", reduction=red), [(logp(f(3, 5)).astype(np.float32), softmax(f(3, 5, seed=1)))],
        lambda x, t, g=g: g(t * (np.log(t) - x)), nn)  # fmt: skip
row(
    "kl_div",
    named("kl_div", reduction="batchmean"),
    [(f(3, 5), np.eye(3, 5, dtype=np.float32))],
    lambda x, t: -(x * t).sum() / 3,
    nn,
)
row("bce_with_logits", lambda m, x, t: m.bce_with_logits(x, t, pos_weight=3.0), [(f(7), f(7, low=0, high=1))],
    lambda x, t: (3 * t * np_softplus(-x) + (1 - t) * np_softplus(x)).mean(), nn)  # fmt: skip
row(
    "mse_loss",
    named("mse_loss", "sum"),
    [(f(0), f(0)), (f(), f(seed=1))],
    lambda x, t: ((x - t) ** 2).sum(),
    nn,
)


# ---- attention
def attention(
    q: A,
    k: A,
    v: A,
    mask: Any = None,
    visible: Any = None,
    scale: float | None = None,
    cap: float = 0.0,
) -> A:
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    if q.ndim > 2 and q.shape[-3] != k.shape[-3]:
        k, v = (np.repeat(x, q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    s = q @ np.swapaxes(k, -1, -2) * (scale or 1 / math.sqrt(max(q.shape[-1], 1)))
    s = cap * np.tanh(s / cap) if cap else s
    if mask is not None:
        s = np.where(mask, s, -np.inf) if mask.dtype == bool else s + mask
    if visible is not None:
        s = np.where(visible, s, -np.inf)
    top = s.max(-1, keepdims=True, initial=-1e30)
    e = np.exp(s - np.where(np.isfinite(top), top, 0))
    total = e.sum(-1, keepdims=True)
    return np.where(total > 0, e / np.where(total > 0, total, 1), 0) @ v


Q, K, V = f(2, 4, 5, 3), f(2, 4, 7, 3, seed=1), f(2, 4, 7, 6, seed=2)
KEY, QUERY = np.arange(7)[None], np.arange(5)[:, None]
sdpa = "scaled_dot_product_attention"
row(sdpa, named(sdpa), [(Q, K, V), (Q[0], K[0], V[0]), (Q[0, 0], K[0, 0], V[0, 0]), (Q, K[:, :2], V[:, :2]), (Q, K[:, :1], V[:, :1]),
                        (Q[:0], K[:0], V[:0]), (Q[..., :0, :], K, V), (Q, K[..., :0, :], V[..., :0, :]), (Q[..., :0], K[..., :0], V)], attention, nn)  # fmt: skip
row(
    sdpa,
    named(sdpa),
    [
        (Q, K, V, b(5, 7)),
        (Q, K, V, b(2, 1, 5, 7)),
        (Q, K, V, f(5, 7, seed=4)),
        (Q, K, V, np.zeros((5, 7), bool)),
    ],
    attention,
    nn,
)
for kind, seen in (("top-left", KEY <= QUERY), ("bottom-right", KEY <= QUERY + 2)):
    row(
        sdpa,
        named(sdpa, causal=kind),
        [(Q, K, V)],
        lambda q, k, v, s=seen: attention(q, k, v, visible=s),
        nn,
    )
    close = seen & (np.flip(seen.cumsum(1) * 0 + 1) > 0)
    row(sdpa, named(sdpa, causal=kind, window=3), [(Q, K, V)],
        lambda q, k, v, s=seen, o=0 if kind == "top-left" else 2: attention(q, k, v, visible=s & (KEY > QUERY + o - 3)), nn)  # fmt: skip
row(
    sdpa,
    named(sdpa, scale=0.3, softcap=1.5),
    [(Q, K, V)],
    lambda q, k, v: attention(q, k, v, scale=0.3, cap=1.5),
    nn,
)


# ---- convolution, pooling, resizing
def conv(
    x: A,
    w: A,
    c: A | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    groups: int = 1,
) -> A:
    d = x.ndim - 2
    x = np.pad(x.astype(np.float64), ((0, 0), (0, 0), *((padding, padding),) * d))
    places = [
        (n - (k - 1) * dilation - 1) // stride + 1
        for n, k in zip(x.shape[2:], w.shape[2:], strict=True)
    ]
    out = np.zeros((x.shape[0], w.shape[0], *places))
    per, rows = w.shape[1], w.shape[0] // groups
    for o, offset in product(range(w.shape[0]), np.ndindex(*w.shape[2:])):
        part = x[(slice(None), slice(o // rows * per, (o // rows + 1) * per),
                  *(slice(k * dilation, k * dilation + (p - 1) * stride + 1, stride) for k, p in zip(offset, places, strict=True)))]  # fmt: skip
        out[:, o] += np.tensordot(part, w[(o, slice(None), *offset)], (1, 0))
    return out if c is None else out + c.reshape(1, -1, *(1,) * d)


def conv_transpose(
    x: A,
    w: A,
    c: A | None = None,
    stride: int = 1,
    padding: int = 0,
    output_padding: int = 0,
    groups: int = 1,
    dilation: int = 1,
) -> A:
    d = x.ndim - 2
    size = [
        (n - 1) * stride + dilation * (k - 1) + output_padding + 1
        for n, k in zip(x.shape[2:], w.shape[2:], strict=True)
    ]
    out = np.zeros((x.shape[0], w.shape[1] * groups, *size))
    per = x.shape[1] // groups
    for g, offset in product(range(groups), np.ndindex(*w.shape[2:])):
        part = np.tensordot(
            x[:, g * per : (g + 1) * per].astype(np.float64),
            w[(slice(g * per, (g + 1) * per), slice(None), *offset)],
            (1, 0),
        )
        at = tuple(
            slice(k * dilation, k * dilation + (n - 1) * stride + 1, stride)
            for k, n in zip(offset, x.shape[2:], strict=True)
        )
        out[(slice(None), slice(g * w.shape[1], (g + 1) * w.shape[1]), *at)] += np.moveaxis(
            part, -1, 1
        )
    cut = tuple(slice(padding, n - padding) for n in size)
    out = out[(slice(None), slice(None), *cut)]
    return out if c is None else out + c.reshape(1, -1, *(1,) * d)


SPATIAL = {1: (9,), 2: (5, 7), 3: (3, 5, 4)}
for d, options in product(
    (1, 2, 3),
    ({}, {"stride": 2, "padding": 1}, {"dilation": 2, "padding": 2}, {"groups": 2, "stride": 2}),
):
    groups = options.get("groups", 1)
    x, w = f(2, 4, *SPATIAL[d]), f(6, 4 // groups, *(2, 3, 2)[:d], seed=1)
    row(
        f"conv{d}d",
        named(f"conv{d}d", **options),
        [(x, w), (x, w, f(6, seed=2))],
        lambda *a, o=options: conv(*a, **o),
        nn,
    )
    t = f(4, 3, *(2, 3, 2)[:d], seed=1)
    row(f"conv_transpose{d}d", named(f"conv_transpose{d}d", **options), [(x, t), (x, t, f(3 * groups, seed=2))],
        lambda *a, o=options: conv_transpose(*a, **o), nn)  # fmt: skip
row("conv_transpose2d", named("conv_transpose2d", stride=3, padding=1, output_padding=2), [(f(1, 4, 3, 4), f(4, 3, 2, 3))],
    lambda x, w: conv_transpose(x, w, stride=3, padding=1, output_padding=2), nn)  # fmt: skip
row(
    "conv1d",
    named("conv1d", padding="same"),
    [(f(1, 2, 7), f(3, 2, 3))],
    lambda x, w: conv(x, w, padding=1),
    nn,
)
row(
    "conv2d",
    named("conv2d"),
    [(f(0, 3, 5, 5), f(2, 3, 3, 3))],
    lambda x, w: np.zeros((0, 2, 3, 3)),
    nn,
)


def pool(x: A, size: int, stride: int, padding: int, kind: str) -> A:
    d = x.ndim - 2
    fill = -np.inf if kind == "max" else 0.0
    x = np.pad(x, ((0, 0), (0, 0), *((padding, padding),) * d), constant_values=fill)
    view = np.lib.stride_tricks.sliding_window_view(x, (size,) * d, tuple(range(2, 2 + d)))
    view = view[(slice(None), slice(None), *(slice(None, None, stride),) * d)]
    return (np.max if kind == "max" else np.mean)(view, axis=tuple(range(2 + d, 2 + 2 * d)))


for kind, d in product(("max", "avg"), (1, 2, 3)):
    for size, stride, padding in ((2, None, 0), (3, 2, 1)):
        row(f"{kind}_pool{d}d", named(f"{kind}_pool{d}d", size, stride, padding), [(f(2, 3, *SPATIAL[d]),)],
            lambda x, a=(size, stride or size, padding, kind): pool(x, *a), nn)  # fmt: skip


def cells(x: A, size: int) -> A:
    for axis in range(2, x.ndim):
        n = x.shape[axis]
        parts = [
            x.take(range(k * n // size, -(-(k + 1) * n // size)), axis).mean(axis, keepdims=True)
            for k in range(size)
        ]
        x = np.concatenate(parts, axis)
    return x


for d in (1, 2, 3):
    row(
        f"adaptive_avg_pool{d}d",
        named(f"adaptive_avg_pool{d}d", 3),
        [(f(2, 3, *SPATIAL[d]),)],
        lambda x: cells(x, 3),
        nn,
    )


def bilinear(x: A, scale: int) -> A:
    for axis in (2, 3):
        n = x.shape[axis]
        at = np.maximum((np.arange(n * scale) + 0.5) / scale - 0.5, 0)
        low = np.minimum(at.astype(int), n - 1)
        w = (at - low).reshape([-1 if k == axis else 1 for k in range(4)])
        x = x.take(low, axis) * (1 - w) + x.take(np.minimum(low + 1, n - 1), axis) * w
    return x


row(
    "upsample",
    named("upsample", 3),
    [(f(1, 2, 3, 5),), (f(1, 2, 5),)],
    lambda x: np.repeat(np.repeat(x, 3, 2), 3, 3) if x.ndim == 4 else np.repeat(x, 3, 2),
    nn,
)
row(
    "upsample",
    named("upsample", 2, "bilinear"),
    [(f(1, 2, 3, 5),), (f(1, 1, 1, 1),)],
    lambda x: bilinear(x, 2),
    nn,
)
