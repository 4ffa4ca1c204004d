"""Convolution, pooling and resizing of (n, c, *spatial) arrays, named as in torch.nn.functional."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ..errors import ShapeMismatch
from ..ir import Node
from ..ops import (
    broadcast,
    cast,
    conv,
    flip,
    gather,
    literal,
    reduce,
    reshape,
    slice_,
    transpose,
    windows,
)
from ..ops import pad as pad_node
from ..tracing import Array, array
from .convert import Value, floating, node, promoted, wrap

Size = int | Sequence[int]


def _each(value: Size, d: int, what: str) -> tuple[int, ...]:
    out = (value,) * d if isinstance(value, int) else tuple(value)
    if len(out) != d:
        raise ShapeMismatch(f"{what} needs {d} numbers, got {value}")
    return out


def _spatial(name: str, x: Node, d: int) -> None:
    if len(x.shape) != d + 2:
        raise ShapeMismatch(f"{name} needs (n, c, {', '.join('dhw'[3 - d :])}), got {x.type}")


def _padded(x: Node, low: Sequence[int], high: Sequence[int], value: float) -> Node:
    return pad_node(x, literal(value, x.dtype), (0, 0, *low), (0, 0, *high))


def _conv(d: int) -> Callable[..., Array]:
    def run(
        x: Value,
        weight: Value,
        bias: Value | None = None,
        stride: Size = 1,
        padding: Size | str = 0,
        dilation: Size = 1,
        groups: int = 1,
    ) -> Array:
        a, w = promoted(f"conv{d}d", [x, weight])
        _spatial(f"conv{d}d", a, d)
        s, e = _each(stride, d, "stride"), _each(dilation, d, "dilation")
        spans = [(k - 1) * g for k, g in zip(w.shape[2:], e, strict=False)]
        if padding == "same":
            if set(s) != {1}:
                raise ShapeMismatch("padding='same' needs stride 1")
            low = [v // 2 for v in spans]
            high = [v - v // 2 for v in spans]
        else:
            low = high = list(_each(0 if padding == "valid" else padding, d, "padding"))  # type: ignore[arg-type]
        return wrap(_biased(conv(_padded(a, low, high, 0), w, s, e, groups), bias))

    run.__name__ = run.__qualname__ = f"conv{d}d"
    run.__doc__ = f"""Correlation of x (n, c, {d} spatial axes) with weight
    (o, c / groups, {d} sizes), plus bias (o,).

    `padding` is zeros on both sides, or "same" or "valid". Result (n, o, *places)."""
    return run


conv1d, conv2d, conv3d = _conv(1), _conv(2), _conv(3)


def _biased(out: Node, bias: Value | None) -> Node:
    if bias is None:
        return out
    b = cast(node(bias), out.dtype)
    if b.shape != (out.shape[1],):
        raise ShapeMismatch(f"conv needs a bias of shape [{out.shape[1]}], got {b.type}")
    return out + broadcast(reshape(b, (1, out.shape[1], *(1,) * (len(out.shape) - 2))), out.shape)


def _conv_transpose(d: int) -> Callable[..., Array]:
    def run(
        x: Value,
        weight: Value,
        bias: Value | None = None,
        stride: Size = 1,
        padding: Size = 0,
        output_padding: Size = 0,
        groups: int = 1,
        dilation: Size = 1,
    ) -> Array:
        a, w = promoted(f"conv_transpose{d}d", [x, weight])
        _spatial(f"conv_transpose{d}d", a, d)
        s, p = _each(stride, d, "stride"), _each(padding, d, "padding")
        e, o = _each(dilation, d, "dilation"), _each(output_padding, d, "output_padding")
        if w.shape[0] != a.shape[1] or a.shape[1] % groups or len(w.shape) != d + 2:
            raise ShapeMismatch(
                f"conv_transpose{d}d needs a weight (c, o / groups, *size) for {a.type}, got "
                f"{w.type}"
            )
        spans = [(k - 1) * g for k, g in zip(w.shape[2:], e, strict=True)]
        # spread by the stride, then correlate with mirrored weights; more padding than the span
        # cuts the result
        grow = [v - q for v, q in zip(spans, p, strict=True)]
        low = [max(g, 0) for g in grow]
        high = [max(g + r, 0) for g, r in zip(grow, o, strict=True)]
        spread = pad_node(
            a, literal(0, a.dtype), (0, 0, *low), (0, 0, *high), (0, 0, *(v - 1 for v in s))
        )
        start = (0, 0, *(max(-g, 0) for g in grow))
        stop = (
            *spread.shape[:2],
            *(n - max(-(g + r), 0) for n, g, r in zip(spread.shape[2:], grow, o, strict=True)),
        )
        spread = slice_(spread, start, stop)
        c, og = w.shape[0], w.shape[1]
        mirrored = reshape(flip(w, range(2, 2 + d)), (groups, c // groups, og, *w.shape[2:]))
        mirrored = reshape(
            transpose(mirrored, (0, 2, 1, *range(3, 3 + d))),
            (groups * og, c // groups, *w.shape[2:]),
        )
        return wrap(_biased(conv(spread, mirrored, (1,) * d, e, groups), bias))

    run.__name__ = run.__qualname__ = f"conv_transpose{d}d"
    run.__doc__ = (
        f"""The transpose of conv{d}d with weight (c, o / groups, *size), as in PyTorch."""
    )
    return run


conv_transpose1d, conv_transpose2d, conv_transpose3d = (_conv_transpose(d) for d in (1, 2, 3))


def _pool(kind: str, d: int) -> Callable[..., Array]:
    def run(x: Value, size: Size, stride: Size | None = None, padding: Size = 0) -> Array:
        n = floating(f"{kind}_pool{d}d", x)
        _spatial(f"{kind}_pool{d}d", n, d)
        k = _each(size, d, "size")
        s = k if stride is None else _each(stride, d, "stride")
        p = _each(padding, d, "padding")
        view = windows(_padded(n, p, p, -math.inf if kind == "max" else 0.0), k, s, (1,) * d)
        axes = tuple(range(2 + d, 2 + 2 * d))
        out = reshape(reduce("max" if kind == "max" else "sum", view, axes), view.shape[: 2 + d])
        return wrap(out if kind == "max" else out * (1 / math.prod(k)))

    run.__name__ = run.__qualname__ = f"{kind}_pool{d}d"
    what, padded = ("largest", "never chosen") if kind == "max" else ("mean", "zeros, which count")
    run.__doc__ = f"""The {what} element of each window of (n, c, {d} spatial axes).

    `stride` is the window's size by default; padding is {padded}."""
    return run


max_pool1d, max_pool2d, max_pool3d = (_pool("max", d) for d in (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = (_pool("avg", d) for d in (1, 2, 3))


def _adaptive(d: int) -> Callable[..., Array]:
    def run(x: Value, size: Size) -> Array:
        name = f"adaptive_avg_pool{d}d"
        n = floating(name, x)
        _spatial(name, n, d)
        for axis, s in zip(range(2, 2 + d), _each(size, d, "size"), strict=True):
            n = _cells(n, axis, s)
        return wrap(n)

    run.__name__ = run.__qualname__ = f"adaptive_avg_pool{d}d"
    run.__doc__ = f"""The means of `size` cells that cover the {d} spatial axes evenly: cell i of s
    spans floor(i n / s) to ceil((i + 1) n / s)."""
    return run


def _cells(x: Node, axis: int, size: int) -> Node:
    """Means of `size` cells of an axis: a product with a matrix of shares."""
    import numpy as np

    from .linalg import tensordot

    m = x.shape[axis]
    share = np.zeros((m, size), np.float32)
    for i in range(size):
        a, b = i * m // size, -(-(i + 1) * m // size)
        share[a:b, i] = 1 / (b - a)
    out = tensordot(wrap(x), array(share, x.dtype), ([axis], [0])).node
    last = len(out.shape) - 1
    return transpose(out, (*range(axis), last, *range(axis, last)))


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = (_adaptive(d) for d in (1, 2, 3))


def upsample(x: Value, scale: int, mode: str = "nearest") -> Array:
    """(n, c, *spatial) enlarged by a whole factor: "nearest", or "bilinear" (half-pixel centers)
    over two axes."""
    n = floating("upsample", x)
    if mode == "nearest":
        for axis in range(2, len(n.shape)):
            place = array([i // scale for i in range(n.shape[axis] * scale)]).node
            n = gather(n, place, axis)
        return wrap(n)
    if mode != "bilinear" or len(n.shape) != 4:
        raise ShapeMismatch(
            f"upsample knows 'nearest', and 'bilinear' of (n, c, h, w), got {mode!r} of {n.type}"
        )
    for axis in (2, 3):
        m = n.shape[axis]
        at = [max((i + 0.5) / scale - 0.5, 0.0) for i in range(m * scale)]
        low = [min(int(a), m - 1) for a in at]
        high = [min(v + 1, m - 1) for v in low]
        shape = [1] * 4
        shape[axis] = m * scale
        weight = reshape(array([a - v for a, v in zip(at, low, strict=True)], n.dtype).node, shape)
        first, second = (gather(n, array(v).node, axis) for v in (low, high))
        n = first + (second - first) * broadcast(weight, first.shape)
    return wrap(n)
