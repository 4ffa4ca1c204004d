"""Attention in primitives; rewrite rules find its fused kernels."""

from __future__ import annotations

import math

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Node
from ..ops import broadcast, cast, full, iota, reduce, reshape, swap
from ..ops import dot as dot_node
from ..ops import elementwise as E
from ..tracing import Array
from ..types import bool_, i32
from .convert import Value, broadcast_shapes, node, promoted, wrap


def scaled_dot_product_attention(
    q: Value,
    k: Value,
    v: Value,
    mask: Value | None = None,
    *,
    causal: str | bool = False,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
    dropout: float = 0.0,
    key: Value | None = None,
) -> Array:
    """softmax(scale * q k^T) v: q (..., t, d), k (..., s, d), v (..., s, e) -> (..., t, e).

    `mask` is bool (True: visible) or a float bias, broadcast to (..., t, s). `causal` is "top-left"
    (True: key j is visible to query i when j <= i) or "bottom-right" (j <= i + s - t, for queries
    that end where the keys end). `scale` is 1 / sqrt(d) by default. k and v may have fewer heads
    (axis -3) when they divide q's: grouped heads, each serving consecutive query heads. A row
    without visible keys is 0 with zero gradients. `window` > 0 (with `causal`) leaves only the last
    `window` keys before and at the query's place. `softcap` > 0 bounds scores by softcap *
    tanh(scores / softcap) before mask and bias. `dropout` zeroes probabilities at random (needs
    `key`).
    """
    qn, kn, vn = promoted("attention", [q, k, v])
    kn, vn = _grouped(qn, kn), _grouped(qn, vn)
    if (
        min(len(n.shape) for n in (qn, kn, vn)) < 2
        or qn.shape[-1] != kn.shape[-1]
        or kn.shape[-2] != vn.shape[-2]
    ):
        raise ShapeMismatch(
            f"attention needs q (..., t, d), k (..., s, d), v (..., s, e), got {qn.type}, "
            f"{kn.type}, {vn.type}"
        )
    batch = broadcast_shapes("attention", qn.shape[:-2], kn.shape[:-2], vn.shape[:-2])
    qn, kn, vn = (broadcast(n, (*batch, *n.shape[-2:])) for n in (qn, kn, vn))
    if not kn.shape[-2]:  # no keys at all: every row is one without visible keys
        return wrap(full(0, (*qn.shape[:-1], vn.shape[-1]), vn.dtype))
    scores = dot_node(qn, swap(kn)) * (
        1 / math.sqrt(max(qn.shape[-1], 1)) if scale is None else scale
    )
    if softcap:
        scores = E.tanh(scores * (1 / softcap)) * softcap
    if window and not causal:
        raise TypeMismatch("attention with a window needs causal='top-left' or 'bottom-right'")
    visible = None
    if mask is not None:
        m = node(mask)
        if m.dtype is bool_:
            visible = broadcast(m, scores.shape)
        else:
            scores = scores + broadcast(cast(m, scores.dtype), scores.shape)
    if causal:
        seen = _causal_mask(scores.shape, causal, window)
        visible = seen if visible is None else E.and_(visible, seen)
    p = _masked_softmax(scores, visible)
    if dropout:
        from .nn import dropout as drop

        if key is None:
            raise TypeMismatch("attention with dropout needs key=")
        p = node(drop(wrap(p), dropout, key))
    return wrap(dot_node(p, vn))


def _causal_mask(shape: tuple[int, ...], causal: str | bool, window: int) -> Node:
    if causal not in (True, "top-left", "bottom-right"):
        raise TypeMismatch(f"causal is 'top-left', 'bottom-right', True or False, got {causal!r}")
    t, s = shape[-2:]
    row, column = iota((t, s), 0, i32), iota((t, s), 1, i32)
    if causal == "bottom-right" and s != t:
        row = row + (s - t)
    seen = E.ge(row, column)
    if window:
        seen = E.and_(seen, E.gt(column, row - window))
    return broadcast(seen, shape)


def _masked_softmax(scores: Node, visible: Node | None) -> Node:
    axes = (len(scores.shape) - 1,)
    if visible is not None:
        scores = E.select(visible, E.tame(scores), full(-math.inf, scores.shape, scores.dtype))
    top = E.stop_gradient(reduce("max", scores, axes))
    if visible is not None:  # rows without visible keys: exp(-inf - 0) = 0, and 0 / 1 = 0
        top = E.select(
            E.eq(top, full(-math.inf, top.shape, top.dtype)), full(0, top.shape, top.dtype), top
        )
    e = E.exp(scores - broadcast(top, scores.shape))
    total = reduce("sum", e, axes)
    if visible is not None:
        total = E.select(
            E.eq(total, full(0, total.shape, total.dtype)),
            full(1, total.shape, total.dtype),
            E.tame(total),
        )
    return e / broadcast(total, scores.shape)


def _grouped(q: Node, x: Node) -> Node:
    """Key or value heads repeated so that each serves q.heads / x.heads consecutive query heads."""
    if len(q.shape) < 3 or len(x.shape) < 3 or q.shape[-3] == x.shape[-3] or x.shape[-3] == 1:
        return x
    heads, kv = q.shape[-3], x.shape[-3]
    if heads % kv:
        raise ShapeMismatch(
            f"grouped heads need a multiple of {kv} query heads, got {q.type} and {x.type}"
        )
    wide = reshape(x, (*x.shape[:-2], 1, *x.shape[-2:]))
    wide = broadcast(wide, (*x.shape[:-2], heads // kv, *x.shape[-2:]))
    return reshape(wide, (*x.shape[:-3], heads, *x.shape[-2:]))
