"""Stepping stones: terms that rules use to name what a value is, each with its meaning in
primitives.

They live in the e-graph only: `Full` is a repeated number, `Causal` a triangular mask, `Softmax` a
softmax. Extraction never sees them. Those with a `report` are what the e-graph report counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ...ir import Node, make
from ...ops import broadcast as spread
from ...ops import cast, dot, full, iota, reduce, swap
from ...ops import elementwise as E
from ...ops.decode import AttentionOnline
from ...ops.fused import Attention, AttentionBackward, AttentionBias, get
from ...types import DTYPES, i32

Ints = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A stepping stone: operands (`T`, or `Tup` where `sorts` says so), attribute sorts, and the
    value that it stands for.
    """

    name: str
    operands: int
    attributes: tuple[str, ...]
    meaning: Callable[..., Node]
    report: str = ""
    sorts: tuple[str, ...] = ()  # of the operands; all T when empty

    def declaration(self) -> str:
        operands = self.sorts or ("T",) * self.operands
        return f"(constructor {self.name} ({' '.join((*operands, *self.attributes))}) T)"


def _full(value: float, dtype: str, shape: Ints) -> Node:
    return full(value, shape, DTYPES[dtype])


def _index(shape: Ints, axis: int, offset: float, dtype: str) -> Node:
    assert -len(shape) <= axis < 0
    return iota(shape, len(shape) + axis, DTYPES[dtype]) + offset


def _causal(shape: Ints, offset: float) -> Node:
    return E.le(_index(shape, -1, 0, "i32"), _index(shape, -2, offset, "i32"))


def _between(first: Node, end: Node, shape: Ints) -> Node:
    key = _index(shape, -1, 0, "i32")
    return E.and_(E.ge(key, spread(first, shape)), E.lt(key, spread(end, shape)))


def _softmax(x: Node, axes: Ints) -> Node:
    e = E.exp(x - spread(reduce("max", x, axes), x.shape))
    return e / spread(reduce("sum", e, axes), x.shape)


def _safe_softmax(x: Node, axes: Ints) -> Node:
    top = reduce("max", x, axes)
    hidden = E.eq(top, full(-math.inf, top.shape, x.dtype))
    e = E.exp(x - spread(E.select(hidden, full(0, top.shape, x.dtype), top), x.shape))
    total = reduce("sum", e, axes)
    return e / spread(E.select(hidden, full(1, top.shape, x.dtype), total), x.shape)


def _softmax_grad(p: Node, g: Node, axes: Ints, factor: float) -> Node:
    return p * (g - spread(reduce("sum", g * p, axes), g.shape)) * factor


def _log_softmax(x: Node, axes: Ints) -> Node:
    return E.log(_softmax(x, axes))


def _scores(q: Node, kt: Node, scale: float, softcap: float) -> Node:
    s = dot(q, kt) * scale
    return E.tanh(s / softcap) * softcap if softcap else s


def _weights(q: Node, k: Node, *rest: object) -> Node:
    """The probabilities of an attention: what it gives for values that are the unit matrix."""
    extra, options = (
        [r for r in rest if isinstance(r, Node)],
        [r for r in rest if not isinstance(r, Node)],
    )
    scale, causal, offset, window, softcap, *kind = options
    op = Attention(scale, bool(causal), offset, window, softcap, *(kind or ["none"]))  # type: ignore[arg-type]
    return get(make(op, q, k, _unit(q, k), *extra), 0)


def _unit(q: Node, k: Node) -> Node:
    n = k.shape[-2]
    square = (*k.shape[:-2], n, n)
    return cast(E.eq(_index(square, -1, 0, "i32"), _index(square, -2, 0, "i32")), q.dtype)


def _bounded_weights(q: Node, k: Node, *rest: Node | float | str) -> Node:
    """As `_weights`, of keys within bounds."""
    operands = [r for r in rest if isinstance(r, Node)]
    scale, causal, offset, window, softcap, *kind = [r for r in rest if not isinstance(r, Node)]
    extra, empty = ("none", *kind)[-2:]
    base = (scale, bool(causal), offset, window, softcap)
    op = AttentionOnline(*base, extra, 1, True, empty)  # type: ignore[arg-type]
    return get(make(op, q, k, _unit(q, k), *operands), 0)


def _capped_grad(t: Node, q: Node, k: Node, p: Node, do: Node, factor: float, *_: float) -> Node:
    op = t.op
    assert isinstance(op, AttentionBackward)
    base = (op.scale, op.causal, op.offset, op.window, op.softcap, op.extra, op.empty)
    return get(make(AttentionBias(*base), *t.operands), 0) * factor


def _score_grad(t: Node, q: Node, k: Node, p: Node, do: Node, factor: float, scale: float) -> Node:
    assert isinstance(t.op, AttentionBackward)
    ds, cap = _capped_grad(t, q, k, p, do, factor), t.op.softcap
    y = E.tanh(dot(q, swap(k)) * (scale / cap)) if cap else None
    return ds * (1.0 - y * y) if y is not None else ds


def _mean(x: Node, axes: Ints) -> Node:
    return reduce("sum", x, axes) * (1 / math.prod(x.shape[a] for a in axes))


def _layer_norm(x: Node, axes: Ints, eps: float) -> Node:
    return _rms_norm(x - spread(_mean(x, axes), x.shape), axes, eps)


def _rms_norm(x: Node, axes: Ints, eps: float) -> Node:
    return x * spread(E.rsqrt(_mean(x * x, axes) + eps), x.shape)


def _gelu(x: Node) -> Node:
    return x * 0.5 * (E.erf(x * math.sqrt(0.5)) + 1.0)


def _gelu_tanh(x: Node) -> Node:
    inner = (x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)
    return x * 0.5 * (E.tanh(inner) + 1.0)


def _picked(x: Node, ids: Node, axes: Ints) -> Node:
    hit = E.eq(spread(ids, x.shape), iota(x.shape, axes[0], i32))
    return reduce("sum", E.select(hit, _log_softmax(x, axes), full(0, x.shape, x.dtype)), axes)


_WEIGHTS = ("f64", "i64", "i64", "i64", "f64")  # scale, causal, offset, window, softcap
# the probabilities of an attention
WEIGHTS = ("Weights", "WeightsX", "WeightsXY", "WeightsB", "WeightsBX")
NAMED = {
    n.name: n
    for n in (
        Named("Full", 0, ("f64", "String", "Ints"), _full),
        # positions along an axis (counted from the end) plus an offset; and key j visible to query
        # i: j <= i + offset
        Named("Index", 0, ("Ints", "i64", "f64", "String"), _index),
        Named("Causal", 0, ("Ints", "f64"), _causal),
        # key j with first <= j < end, which have 1 for the last axis of the shape
        Named("Between", 2, ("Ints",), _between),
        Named("Softmax", 1, ("Ints",), _softmax, "softmax"),
        Named("SafeSoftmax", 1, ("Ints",), _safe_softmax, "softmax"),
        Named("LogSoftmax", 1, ("Ints",), _log_softmax),
        Named("SoftmaxGrad", 2, ("Ints", "f64"), _softmax_grad, "softmax gradient"),
        Named("Scores", 2, ("f64", "f64"), _scores),
        Named("Weights", 2, _WEIGHTS, _weights),
        Named("WeightsX", 3, (*_WEIGHTS, "String", "String"), _weights),  # extra, empty
        Named("WeightsXY", 4, (*_WEIGHTS, "String", "String"), _weights),
        # of few rows: keys within bounds; those and a mask or bias
        Named("WeightsB", 4, (*_WEIGHTS, "String"), _bounded_weights),
        Named("WeightsBX", 5, (*_WEIGHTS, "String", "String"), _bounded_weights),
        # of scores after and before their soft cap: the numbers around it, the scale (and the cap)
        Named("CappedGrad", 5, ("f64",) * 3, _capped_grad, sorts=("Tup", "T", "T", "T", "T")),
        Named("ScoreGrad", 5, ("f64", "f64"), _score_grad, sorts=("Tup", "T", "T", "T", "T")),
        Named("Mean", 1, ("Ints",), _mean),
        Named("LayerNorm", 1, ("Ints", "f64"), _layer_norm, "layer norm"),
        Named("RmsNorm", 1, ("Ints", "f64"), _rms_norm, "rms norm"),
        Named("Gelu", 1, (), _gelu, "gelu"),
        Named("GeluTanh", 1, (), _gelu_tanh, "gelu"),
        Named("Silu", 1, (), lambda x: x / (1.0 + E.exp(-x)), "silu"),
        Named("CrossEntropy", 2, ("Ints",), _picked, "cross-entropy"),
    )
}  # fmt: skip
