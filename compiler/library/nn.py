"""What neural networks are made of, written in primitives; rewrite rules find the fast kernels.

Names and meanings are PyTorch's `torch.nn.functional`.
"""

from __future__ import annotations

import math

from ..errors import ShapeMismatch, TypeMismatch
from ..ir import Node
from ..ops import broadcast, cast, full, iota, reduce, reshape, swap
from ..ops import dot as dot_node
from ..ops import elementwise as E
from ..tracing import Array
from ..types import bool_, i32
from .convert import Value, broadcast_shapes, floating, node, one_axis, wrap
from .indexing import take
from .linalg import matmul
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
from .reductions import mean_node


def softmax(x: Value, axis: int = -1) -> Array:
    """exp(x) / sum(exp(x)) along an axis; the maximum is subtracted first, which changes nothing but overflow."""
    n = floating("softmax", x)
    e, total = _exponentials(n, one_axis("softmax", axis, len(n.shape)))
    return wrap(e / broadcast(total, n.shape))


def _exponentials(x: Node, axis: int) -> tuple[Node, Node]:
    e = E.exp(_shifted(x, axis))
    return e, reduce("sum", e, (axis,))


def _shifted(x: Node, axis: int) -> Node:
    return x - broadcast(E.stop_gradient(reduce("max", x, (axis,))), x.shape)


def log_softmax(x: Value, axis: int = -1) -> Array:
    """log(softmax(x)) along an axis, without overflow or loss of small probabilities."""
    n = floating("log_softmax", x)
    return wrap(log_softmax_node(n, one_axis("log_softmax", axis, len(n.shape))))


def log_softmax_node(x: Node, axis: int) -> Node:
    """log(softmax(x)) of a node."""
    shifted = _shifted(x, axis)
    return shifted - broadcast(E.log(reduce("sum", E.exp(shifted), (axis,))), x.shape)


def layer_norm(x: Value, weight: Value | None = None, bias: Value | None = None, eps: float = 1e-5) -> Array:
    """(x - mean) / sqrt(var + eps) over the last axis, times weight plus bias (Ba et al., 2016)."""
    n = floating("layer_norm", x)
    axes = (len(n.shape) - 1,)
    centered = n - broadcast(mean_node(n, axes), n.shape)
    rstd = E.rsqrt(mean_node(centered * centered, axes) + eps)
    return wrap(_affine(centered * broadcast(rstd, n.shape), weight, bias, "layer_norm"))


def rms_norm(x: Value, weight: Value | None = None, eps: float = 1e-6) -> Array:
    """x / sqrt(mean(x^2) + eps) over the last axis, times weight (Zhang and Sennrich, 2019)."""
    n = floating("rms_norm", x)
    rstd = E.rsqrt(mean_node(n * n, (len(n.shape) - 1,)) + eps)
    return wrap(_affine(n * broadcast(rstd, n.shape), weight, None, "rms_norm"))


def _affine(x: Node, weight: Value | None, bias: Value | None, name: str) -> Node:
    for label, value in (("weight", weight), ("bias", bias)):
        if value is not None and node(value).shape != x.shape[-1:]:
            raise ShapeMismatch(f"{name} needs a {label} of shape {list(x.shape[-1:])}, got {node(value).type}")
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


def cross_entropy(logits: Value, targets: Value) -> Array:
    """The mean of -log softmax(logits)[target] over all rows: logits (..., classes), integer targets (...)."""
    n, t = floating("cross_entropy", logits), node(targets)
    if t.dtype.kind not in "iu" or t.shape != n.shape[:-1]:
        raise TypeMismatch(f"cross_entropy needs logits (..., classes) and integer targets (...), got {n.type} and {t.type}")
    axis = len(n.shape) - 1
    logp = log_softmax_node(n, axis)
    hit = E.eq(broadcast(reshape(cast(t, i32), (*t.shape, 1)), n.shape), iota(n.shape, axis, i32))
    picked = reduce("sum", E.select(hit, logp, full(0, n.shape, n.dtype)), (axis,))
    rows = math.prod(t.shape)
    total = reduce("sum", picked, tuple(range(axis)))
    return wrap(reshape(total * (-1.0 / rows if rows else math.nan), ()))


def scaled_dot_product_attention(q: Value, k: Value, v: Value, mask: Value | None = None, *, causal: str | bool = False,
                                 scale: float | None = None) -> Array:  # fmt: skip
    """softmax(scale * q k^T) v: q (..., t, d), k (..., s, d), v (..., s, e) -> (..., t, e).

    `mask` is bool (True: visible) or a float bias, broadcast to (..., t, s). `causal` is "top-left" (True: key j is visible
    to query i when j <= i) or "bottom-right" (j <= i + s - t, for queries that end where the keys end). `scale` is
    1 / sqrt(d) by default. k and v may have fewer heads (axis -3) when they divide q's: grouped heads, each serving
    consecutive query heads. A row without visible keys is 0 with zero gradients.
    """
    from .convert import promoted

    qn, kn, vn = promoted("attention", [q, k, v])
    kn, vn = _grouped(qn, kn), _grouped(qn, vn)
    if min(map(lambda n: len(n.shape), (qn, kn, vn))) < 2 or qn.shape[-1] != kn.shape[-1] or kn.shape[-2] != vn.shape[-2]:
        raise ShapeMismatch(f"attention needs q (..., t, d), k (..., s, d), v (..., s, e), got {qn.type}, {kn.type}, {vn.type}")
    batch = broadcast_shapes("attention", qn.shape[:-2], kn.shape[:-2], vn.shape[:-2])
    qn, kn, vn = (broadcast(n, (*batch, *n.shape[-2:])) for n in (qn, kn, vn))
    scores = dot_node(qn, swap(kn)) * (1 / math.sqrt(qn.shape[-1]) if scale is None else scale)
    visible = None
    if mask is not None:
        m = node(mask)
        if m.dtype is bool_:
            visible = broadcast(m, scores.shape)
        else:
            scores = scores + broadcast(cast(m, scores.dtype), scores.shape)
    if causal:
        seen = _causal_mask(scores.shape, causal)
        visible = seen if visible is None else E.and_(visible, seen)
    return wrap(dot_node(_masked_softmax(scores, visible), vn))


def _causal_mask(shape: tuple[int, ...], causal: str | bool) -> Node:
    if causal not in (True, "top-left", "bottom-right"):
        raise TypeMismatch(f"causal is 'top-left', 'bottom-right', True or False, got {causal!r}")
    t, s = shape[-2:]
    row, column = iota((t, s), 0, i32), iota((t, s), 1, i32)
    if causal == "bottom-right" and s != t:
        row = row + (s - t)
    return broadcast(E.ge(row, column), shape)


def _masked_softmax(scores: Node, visible: Node | None) -> Node:
    axes = (len(scores.shape) - 1,)
    if visible is not None:
        scores = E.select(visible, scores, full(-math.inf, scores.shape, scores.dtype))
    top = E.stop_gradient(reduce("max", scores, axes))
    if visible is not None:  # rows without visible keys: exp(-inf - 0) = 0, and 0 / 1 = 0
        top = E.select(E.eq(top, full(-math.inf, top.shape, top.dtype)), full(0, top.shape, top.dtype), top)
    e = E.exp(scores - broadcast(top, scores.shape))
    total = reduce("sum", e, axes)
    if visible is not None:
        total = E.select(E.eq(total, full(0, total.shape, total.dtype)), full(1, total.shape, total.dtype), total)
    return e / broadcast(total, scores.shape)


def _grouped(q: Node, x: Node) -> Node:
    """Key or value heads repeated so that each serves q.heads / x.heads consecutive query heads."""
    if len(q.shape) < 3 or len(x.shape) < 3 or q.shape[-3] == x.shape[-3] or x.shape[-3] == 1:
        return x
    heads, kv = q.shape[-3], x.shape[-3]
    if heads % kv:
        raise ShapeMismatch(f"grouped heads need a multiple of {kv} query heads, got {q.type} and {x.type}")
    wide = reshape(x, (*x.shape[:-2], 1, *x.shape[-2:]))
    wide = broadcast(wide, (*x.shape[:-2], heads // kv, *x.shape[-2:]))
    return reshape(wide, (*x.shape[:-3], heads, *x.shape[-2:]))
