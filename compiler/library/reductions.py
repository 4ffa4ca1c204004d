"""Reductions over axes, named and shaped as in NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..ir import Node
from ..ops import broadcast, cast, full, iota, reduce, reshape
from ..ops import elementwise as E
from ..tracing import Array
from ..types import bool_, i32
from .convert import Value, axes_of, floating, node, wrap

Axis = int | Sequence[int] | None


def _reduce(combine: str, x: Node, axis: Axis, keepdims: bool) -> Array:
    axes = axes_of(combine, axis, len(x.shape))
    return wrap(_drop(reduce(combine, x, axes), axes, keepdims))


def _drop(x: Node, axes: tuple[int, ...], keepdims: bool) -> Node:
    return x if keepdims else reshape(x, tuple(n for k, n in enumerate(x.shape) if k not in axes))


def _number(x: Value) -> Node:
    n = node(x)
    return cast(n, i32) if n.dtype is bool_ else n


def sum(x: Value, axis: Axis = None, keepdims: bool = False) -> Array:
    """The sum over axes; bools count as i32, integers wrap."""
    return _reduce("sum", _number(x), axis, keepdims)


def prod(x: Value, axis: Axis = None, keepdims: bool = False) -> Array:
    """The product over axes."""
    return _reduce("prod", _number(x), axis, keepdims)


def max(x: Value, axis: Axis = None, keepdims: bool = False) -> Array:
    """The largest over axes; NaN if any is. Ties share the gradient evenly. An empty axis is an
    error."""
    return _reduce("max", node(x), axis, keepdims)


def min(x: Value, axis: Axis = None, keepdims: bool = False) -> Array:
    """The smallest over axes; NaN if any is. Ties share the gradient evenly. An empty axis is an
    error."""
    return _reduce("min", node(x), axis, keepdims)


def any(x: Value, axis: Axis = None, keepdims: bool = False) -> Array:
    """True where any element is not zero."""
    return _reduce("any", cast(node(x), bool_), axis, keepdims)


def all(x: Value, axis: Axis = None, keepdims: bool = False) -> Array:
    """True where all elements are not zero."""
    return _reduce("all", cast(node(x), bool_), axis, keepdims)


def mean_node(x: Node, axes: tuple[int, ...]) -> Node:
    """The mean over axes, kept with length 1."""
    count = math.prod(x.shape[a] for a in axes)
    total = reduce("sum", x, axes)
    return total * (1.0 / count) if count else full(math.nan, total.shape, x.dtype)


def centered(x: Node, axes: tuple[int, ...]) -> Node:
    """x - mean(x). The mean is taken a second time of what is left, since one of large numbers is
    rounded too coarsely."""
    shifted = x - broadcast(E.stop_gradient(mean_node(x, axes)), x.shape)
    return shifted - broadcast(mean_node(shifted, axes), x.shape)


def mean(x: Value, axis: Axis = None, keepdims: bool = False) -> Array:
    """The mean over axes; NaN over no elements."""
    n = floating("mean", x)
    axes = axes_of("mean", axis, len(n.shape))
    return wrap(_drop(mean_node(n, axes), axes, keepdims))


def var(x: Value, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Array:
    """The variance over axes in two passes, divided by the count less `ddof`."""
    n = floating("var", x)
    axes = axes_of("var", axis, len(n.shape))
    count = math.prod(n.shape[a] for a in axes)
    rest = centered(n, axes)
    total = reduce("sum", rest * rest, axes)
    out = total * (1.0 / (count - ddof)) if count > ddof else full(math.nan, total.shape, n.dtype)
    return wrap(_drop(out, axes, keepdims))


def std(x: Value, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Array:
    """The standard deviation over axes; its gradient at 0 is 0."""
    return wrap(_root(node(var(x, axis, keepdims, ddof))))


def _root(x: Node) -> Node:
    """sqrt(x) with the gradient 0 at 0: the slope there is infinite, so it is kept out."""
    zero = full(0, x.shape, x.dtype)
    none = E.eq(x, zero)
    return E.select(
        none, zero, E.tame(E.sqrt(E.select(none, full(1, x.shape, x.dtype), E.tame(x))))
    )


def _arg(combine: str, x: Value, axis: int | None, keepdims: bool) -> Array:
    n = node(x)
    if axis is None:
        shape = (1,) * len(n.shape) if keepdims else ()
        return wrap(reshape(node(_arg(combine, wrap(reshape(n, (n.type.size,))), 0, False)), shape))
    axes = axes_of(f"arg{combine}", axis, len(n.shape))
    best = broadcast(reduce(combine, n, axes), n.shape)
    hit = E.eq(n, best)
    if n.dtype.kind == "f":
        hit = E.or_(hit, E.isnan(n))
    place = iota(n.shape, axes[0], i32)
    first = reduce("min", E.select(hit, place, full(2**31 - 1, n.shape, i32)), axes)
    return wrap(_drop(first, axes, keepdims))


def argmax(x: Value, axis: int | None = None, keepdims: bool = False) -> Array:
    """The position of the first largest element (the first NaN if there is one), i32; flat when
    axis is None."""
    return _arg("max", x, axis, keepdims)


def argmin(x: Value, axis: int | None = None, keepdims: bool = False) -> Array:
    """The position of the first smallest element (the first NaN if there is one), i32; flat when
    axis is None."""
    return _arg("min", x, axis, keepdims)


def logsumexp(x: Value, axis: Axis = None, keepdims: bool = False) -> Array:
    """log(sum(exp(x))), without overflow; -inf over elements that are all -inf, and over none."""
    n = floating("logsumexp", x)
    axes = axes_of("logsumexp", axis, len(n.shape))
    if not math.prod(n.shape[a] for a in axes):
        return wrap(_drop(E.log(reduce("sum", n, axes)), axes, keepdims))  # log(0)
    top = safe_max(n, axes)
    total = reduce("sum", E.exp(n - broadcast(top, n.shape)), axes)
    return wrap(_drop(E.log(total) + top, axes, keepdims))


def safe_max(x: Node, axes: tuple[int, ...]) -> Node:
    """The maximum as a constant for gradients, with 0 in place of infinities so that x - max is
    never NaN."""
    top = E.stop_gradient(reduce("max", x, axes))
    infinite = E.eq(E.abs_(top), full(math.inf, top.shape, x.dtype))
    return E.select(infinite, full(0, top.shape, x.dtype), top)


def norm(
    x: Value, ord: float | int | None = None, axis: Axis = None, keepdims: bool = False
) -> Array:
    """The vector norm over axes: (sum |x|^ord)^(1/ord), 2 by default, also 0, 1, inf and -inf. The
    gradient at 0 is 0."""
    n = floating("norm", x)
    axes = axes_of("norm", axis, len(n.shape))
    p = 2 if ord is None else ord
    a = E.abs_(n)
    zero = full(0, n.shape, n.dtype)
    if p in (math.inf, -math.inf):
        out = reduce("max" if p > 0 else "min", a, axes)
    elif p == 0:
        out = reduce("sum", cast(E.ne(n, zero), n.dtype), axes)
    elif p == 1:
        out = reduce("sum", a, axes)
    else:
        from .math import power

        total = reduce("sum", n * n if p == 2 else node(power(wrap(a), float(p))), axes)
        none = E.eq(
            total, full(0, total.shape, n.dtype)
        )  # the root's slope at 0 is infinite: keep it out of gradients
        safe = E.select(none, full(1, total.shape, n.dtype), E.tame(total))
        root = E.sqrt(safe) if p == 2 else node(power(wrap(safe), 1 / p))
        out = E.select(none, full(0, total.shape, n.dtype), E.tame(root))
    return wrap(_drop(out, axes, keepdims))
