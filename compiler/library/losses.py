"""Losses, named as in torch.nn.functional. `reduction` is "mean", "sum" or "none"."""

from __future__ import annotations

import math

from ..errors import ShapeMismatch, TypeMismatch
from ..expect import expect
from ..ir import Node
from ..ops import broadcast, cast, full, gather, iota, reduce, reshape
from ..ops import elementwise as E
from ..tracing import Array
from ..types import i32
from .convert import Value, floating, node, together, wrap
from .softmax import log_softmax_node


def _reduced(x: Node, reduction: str, count: Node | None = None) -> Array:
    if reduction == "none":
        return wrap(x)
    if reduction not in ("mean", "sum"):
        raise TypeMismatch(f"reduction is 'mean', 'sum' or 'none', got {reduction!r}")
    total = reduce("sum", x, tuple(range(len(x.shape))))
    if reduction == "mean":
        size = x.type.size
        total = (
            total / broadcast(count, total.shape)
            if count is not None
            else total * (1.0 / size if size else math.nan)
        )
    return wrap(reshape(total, ()))


def _picked(logp: Node, targets: Node) -> Node:
    """logp[..., target] for each row, 0 where the target is out of range."""
    axis = len(logp.shape) - 1
    hit = E.eq(
        broadcast(reshape(cast(targets, i32), (*targets.shape, 1)), logp.shape),
        iota(logp.shape, axis, i32),
    )
    return reshape(
        reduce("sum", E.select(hit, E.tame(logp), full(0, logp.shape, logp.dtype)), (axis,)),
        targets.shape,
    )


def cross_entropy(
    logits: Value,
    targets: Value,
    *,
    weight: Value | None = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Array:
    """-log softmax(logits)[target], by default the mean over rows: logits (..., classes).

    Targets are integers (...) or probabilities (..., classes). `weight` (classes,) weighs classes
    and the mean, rows whose target is `ignore_index` count for nothing, and `label_smoothing` mixes
    the target with the uniform distribution.

    Targets that name no class raise OutOfRange (an IndexError) where the host has them: NumPy
    arrays, at once or as arguments of a compiled call, and arrays that were made from such. Those
    that only the device has are not read back: a row of such a target counts 0.
    """
    n, t = floating("cross_entropy", logits), node(targets)
    if not n.shape:
        raise ShapeMismatch(f"cross_entropy needs logits (..., classes), got {n.type}")
    logp = log_softmax_node(n, len(n.shape) - 1)
    if t.dtype.kind == "f":
        if t.shape != n.shape:
            raise ShapeMismatch(
                f"cross_entropy needs probabilities in the shape of the logits, got {n.type} and "
                f"{t.type}"
            )
        return _soft(logp, t, weight, label_smoothing, reduction)
    if t.dtype.kind not in "iu" or t.shape != n.shape[:-1]:
        raise TypeMismatch(
            f"cross_entropy needs logits (..., classes) and integer targets (...), got {n.type} "
            f"and {t.type}"
        )
    expect(t, n.shape[-1], "cross_entropy", ignore_index)
    return _nll(logp, t, weight, ignore_index, label_smoothing, reduction)


def _soft(
    logp: Node, target: Node, weight: Value | None, smoothing: float, reduction: str
) -> Array:
    classes, axis = logp.shape[-1], len(logp.shape) - 1
    target = cast(target, logp.dtype)
    if smoothing:
        target = target * (1 - smoothing) + smoothing / classes
    if weight is not None:
        logp = logp * broadcast(cast(node(weight), logp.dtype), logp.shape)
    rows = -reduce("sum", logp * target, (axis,))
    return _reduced(reshape(rows, logp.shape[:-1]), reduction)


def _nll(
    logp: Node, t: Node, weight: Value | None, ignore: int | None, smoothing: float, reduction: str
) -> Array:
    classes, axis = logp.shape[-1], len(logp.shape) - 1
    w = None
    if weight is not None:
        table = cast(node(weight), logp.dtype)
        if table.shape != (classes,):
            raise ShapeMismatch(
                f"cross_entropy needs a weight of shape [{classes}], got {table.type}"
            )
        w = gather(table, t, 0)
    rows = -_picked(logp, t) if w is None else -(_picked(logp, t) * w)
    if smoothing:
        spread = (
            logp if weight is None else logp * broadcast(cast(node(weight), logp.dtype), logp.shape)
        )
        even = reshape(reduce("sum", spread, (axis,)), t.shape) * (-smoothing / classes)
        rows = rows * (1 - smoothing) + even
    if ignore is None and w is None:
        return _reduced(rows, reduction)
    counted = w if w is not None else full(1, t.shape, logp.dtype)
    if ignore is not None:
        kept = E.ne(cast(t, i32), full(ignore, t.shape, i32))
        rows = E.select(kept, rows, full(0, t.shape, logp.dtype))
        counted = E.select(kept, counted, full(0, t.shape, logp.dtype))
    return _reduced(rows, reduction, reduce("sum", counted, tuple(range(len(t.shape)))))


def nll_loss(
    log_probabilities: Value,
    targets: Value,
    *,
    weight: Value | None = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
) -> Array:
    """-log_probabilities[..., target], by default the mean over rows; targets that name no class
    as for `cross_entropy`."""
    n, t = floating("nll_loss", log_probabilities), node(targets)
    if t.dtype.kind not in "iu" or t.shape != n.shape[:-1]:
        raise TypeMismatch(
            f"nll_loss needs (..., classes) and integer targets (...), got {n.type} and {t.type}"
        )
    expect(t, n.shape[-1], "nll_loss", ignore_index)
    return _nll(n, t, weight, ignore_index, 0.0, reduction)


def mse_loss(x: Value, target: Value, reduction: str = "mean") -> Array:
    """(x - target)^2."""
    a, b = together("mse_loss", wrap(floating("mse_loss", x)), target)
    d = a - b
    return _reduced(d * d, reduction)


def l1_loss(x: Value, target: Value, reduction: str = "mean") -> Array:
    """|x - target|; the gradient where they are equal is 0."""
    a, b = together("l1_loss", wrap(floating("l1_loss", x)), target)
    return _reduced(E.abs_(a - b), reduction)


def huber_loss(x: Value, target: Value, delta: float = 1.0, reduction: str = "mean") -> Array:
    """d^2 / 2 where |d| <= delta, else delta (|d| - delta / 2), of d = x - target (Huber, 1964)."""
    a, b = together("huber_loss", wrap(floating("huber_loss", x)), target)
    d = a - b
    size = E.abs_(d)
    near = E.le(size, full(delta, d.shape, d.dtype))
    return _reduced(
        E.select(near, E.tame(d * d * 0.5), E.tame((size - 0.5 * delta) * delta)), reduction
    )


def bce_with_logits(
    logits: Value, target: Value, *, pos_weight: Value | None = None, reduction: str = "mean"
) -> Array:
    """Binary cross-entropy of sigmoid(logits) with targets in [0, 1], without overflow."""
    from .math import softplus

    x, t = together("bce_with_logits", wrap(floating("bce_with_logits", logits)), target)
    if pos_weight is None:  # softplus(x) - x t
        return _reduced(node(softplus(wrap(x))) - x * t, reduction)
    w = broadcast(cast(node(pos_weight), x.dtype), x.shape)
    out = (1.0 - t) * x + (1.0 + (w - 1.0) * t) * node(softplus(wrap(-x)))
    return _reduced(out, reduction)


def kl_div(
    log_probabilities: Value, target: Value, *, log_target: bool = False, reduction: str = "mean"
) -> Array:
    """target * (log(target) - log_probabilities), with 0 log 0 = 0; "batchmean" divides the sum by
    the first axis."""
    x, t = together("kl_div", wrap(floating("kl_div", log_probabilities)), target)
    if log_target:
        out = E.exp(t) * (t - x)
    else:
        zero = full(0, t.shape, t.dtype)
        some = E.gt(t, zero)
        safe = E.select(some, E.tame(t), full(1, t.shape, t.dtype))
        out = E.select(some, E.tame(t * (E.log(safe) - x)), zero)
    if reduction == "batchmean":
        return wrap(node(_reduced(out, "sum")) * (1.0 / out.shape[0]))
    return _reduced(out, reduction)
