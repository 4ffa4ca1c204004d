"""Making and reshaping arrays, named as in NumPy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ShapeMismatch
from ..ops import broadcast, cast, concat, iota
from ..ops import flip as flip_node
from ..ops import full as full_node
from ..ops import pad as pad_node
from ..ops import reshape as reshape_node
from ..ops import transpose as transpose_node
from ..tracing import Array, array
from ..types import bool_, f32, i32
from ..types import dtype as as_dtype
from .convert import (
    Value,
    axes_of,
    broadcast_shapes,
    is_scalar,
    node,
    one_axis,
    promoted,
    scalar_dtype,
    wrap,
)

Shape = int | Sequence[int]


def _shape(shape: Shape) -> tuple[int, ...]:
    out = (int(shape),) if isinstance(shape, (int, np.integer)) else tuple(int(n) for n in shape)
    if any(n < 0 for n in out):
        raise ShapeMismatch(f"a shape needs dimensions of at least 0, got {list(out)}")
    return out


def full(shape: Shape, value: Value, dtype: Any = None) -> Array:
    """`value` repeated to a shape."""
    if is_scalar(value):
        return wrap(
            full_node(
                value, _shape(shape), as_dtype(dtype) if dtype is not None else scalar_dtype(value)
            )
        )
    n = node(value)
    return wrap(broadcast(cast(n, as_dtype(dtype)) if dtype is not None else n, _shape(shape)))


def zeros(shape: Shape, dtype: Any = "f32") -> Array:
    """Zeros."""
    return full(shape, 0, dtype)


def ones(shape: Shape, dtype: Any = "f32") -> Array:
    """Ones."""
    return full(shape, 1, dtype)


def zeros_like(x: Value, dtype: Any = None) -> Array:
    """Zeros in the shape and dtype of x."""
    t = array(x).type
    return zeros(t.shape, dtype or t.dtype)


def ones_like(x: Value, dtype: Any = None) -> Array:
    """Ones in the shape and dtype of x."""
    t = array(x).type
    return ones(t.shape, dtype or t.dtype)


def full_like(x: Value, value: Value, dtype: Any = None) -> Array:
    """`value` in the shape and dtype of x."""
    t = array(x).type
    return full(t.shape, value, dtype or t.dtype)


def arange(
    start: int | float, stop: int | float | None = None, step: int | float = 1, dtype: Any = None
) -> Array:
    """start, start + step, ... below stop. i32 for integers, else f32."""
    if stop is None:
        start, stop = 0, start
    count = builtin_max(0, math.ceil((stop - start) / step))
    whole = all(isinstance(v, (int, np.integer)) for v in (start, stop, step))
    to = as_dtype(dtype) if dtype is not None else (i32 if whole else f32)
    steps = iota((count,), 0, to)
    return wrap(steps if (start, step) == (0, 1) else steps * step + start)


builtin_max = max


def linspace(
    start: float, stop: float, num: int = 50, endpoint: bool = True, dtype: Any = "f32"
) -> Array:
    """`num` evenly spaced numbers from start to stop."""
    values = np.linspace(start, stop, num, endpoint=endpoint)
    return array(values, dtype)


def eye(n: int, m: int | None = None, k: int = 0, dtype: Any = "f32") -> Array:
    """Ones on the k-th diagonal of an n by m matrix of zeros."""
    from ..ops import elementwise as E

    shape = (n, n if m is None else m)
    return wrap(cast(E.eq(iota(shape, 0, i32) + k, iota(shape, 1, i32)), as_dtype(dtype)))


def reshape(x: Value, shape: Shape, *more: int) -> Array:
    """x in another shape of as many elements; one dimension may be -1."""
    n = node(x)
    wanted = (
        [int(shape), *more] if isinstance(shape, (int, np.integer)) else [int(d) for d in shape]
    )
    if wanted.count(-1) > 1:
        raise ShapeMismatch(f"reshape may have one -1, got {wanted}")
    if -1 in wanted:
        rest = math.prod(d for d in wanted if d != -1)
        if rest == 0 or n.type.size % rest:
            raise ShapeMismatch(f"reshape of {n.type} to {wanted} does not come out even")
        wanted[wanted.index(-1)] = n.type.size // rest
    return wrap(reshape_node(n, wanted))


def ravel(x: Value) -> Array:
    """x with one axis."""
    return reshape(x, -1) if array(x).size else reshape(x, 0)


def transpose(x: Value, axes: int | Sequence[int] | None = None, *more: int) -> Array:
    """Axes permuted, given as a sequence or one by one; reversed when `axes` is None."""
    n = node(x)
    rank = len(n.shape)
    if isinstance(axes, (int, np.integer)):
        axes = (int(axes), *more)
    perm = (
        tuple(reversed(range(rank)))
        if axes is None
        else tuple(one_axis("transpose", a, rank) for a in axes)
    )
    return wrap(transpose_node(n, perm))


def swapaxes(x: Value, a: int, b: int) -> Array:
    """Two axes exchanged."""
    n = node(x)
    perm = list(range(len(n.shape)))
    a, b = one_axis("swapaxes", a, len(perm)), one_axis("swapaxes", b, len(perm))
    perm[a], perm[b] = perm[b], perm[a]
    return wrap(transpose_node(n, perm))


def moveaxis(x: Value, source: int | Sequence[int], destination: int | Sequence[int]) -> Array:
    """Axes moved to new places, the others in order."""
    n = node(x)
    rank = len(n.shape)
    src = [one_axis("moveaxis", a, rank) for a in ([source] if isinstance(source, int) else source)]
    dst = [
        one_axis("moveaxis", a, rank)
        for a in ([destination] if isinstance(destination, int) else destination)
    ]
    if len(src) != len(dst):
        raise ShapeMismatch("moveaxis needs as many destinations as sources")
    perm = [k for k in range(rank) if k not in src]
    for d, s in sorted(zip(dst, src, strict=True)):
        perm.insert(d, s)
    return wrap(transpose_node(n, perm))


def squeeze(x: Value, axis: int | Sequence[int] | None = None) -> Array:
    """x without axes of length 1 (all of them, or the given ones)."""
    n = node(x)
    axes = (
        tuple(k for k, d in enumerate(n.shape) if d == 1)
        if axis is None
        else axes_of("squeeze", axis, len(n.shape))
    )
    if any(n.shape[k] != 1 for k in axes):
        raise ShapeMismatch(f"squeeze needs axes of length 1, got axis {axis} of {n.type}")
    return wrap(reshape_node(n, [d for k, d in enumerate(n.shape) if k not in axes]))


def expand_dims(x: Value, axis: int | Sequence[int]) -> Array:
    """x with axes of length 1 inserted where the result has them."""
    n = node(x)
    count = 1 if isinstance(axis, int) else len(axis)
    axes = axes_of("expand_dims", axis, len(n.shape) + count)
    rest = iter(n.shape)
    return wrap(
        reshape_node(n, [1 if k in axes else next(rest) for k in range(len(n.shape) + count)])
    )


def broadcast_to(x: Value, shape: Shape) -> Array:
    """x repeated along axes of length 1 and new leading axes."""
    n = node(x)
    to = _shape(shape)
    if len(to) < len(n.shape) or broadcast_shapes("broadcast_to", n.shape, to) != to:
        raise ShapeMismatch(f"broadcast_to cannot make {list(to)} of {n.type}")
    return wrap(broadcast(n, to))


def concatenate(arrays: Sequence[Value], axis: int | None = 0) -> Array:
    """Arrays joined along an axis, or flat when axis is None."""
    if not len(arrays):
        raise ShapeMismatch("concatenate needs at least one array")
    if axis is None:
        arrays, axis = [ravel(a) for a in arrays], 0
    nodes = promoted("concatenate", list(arrays))
    return wrap(concat(nodes, one_axis("concatenate", axis, len(nodes[0].shape))))


def stack(arrays: Sequence[Value], axis: int = 0) -> Array:
    """Arrays of one shape joined along a new axis."""
    return concatenate([expand_dims(a, axis) for a in arrays], axis)


def split(x: Value, parts: int | Sequence[int], axis: int = 0) -> list[Array]:
    """x cut along an axis into equal parts, or at the given places."""
    from ..ops import slice_

    n = node(x)
    k = one_axis("split", axis, len(n.shape))
    size = n.shape[k]
    if isinstance(parts, int):
        if parts < 1 or size % parts:
            raise ShapeMismatch(
                f"split into {parts} equal parts needs a multiple of {parts}, got axis {axis} of "
                f"{n.type}"
            )
        cuts = [size // parts * i for i in range(1, parts)]
    else:
        cuts = [builtin_max(0, builtin_min(size, c + size if c < 0 else c)) for c in parts]
    out = []
    for a, b in zip([0, *cuts], [*cuts, size], strict=True):
        start, stop = [0] * len(n.shape), list(n.shape)
        start[k], stop[k] = a, builtin_max(a, b)
        out.append(wrap(slice_(n, start, stop)))
    return out


builtin_min = min
builtin_abs = abs


def flip(x: Value, axis: int | Sequence[int] | None = None) -> Array:
    """Axes in reverse order."""
    n = node(x)
    return wrap(flip_node(n, axes_of("flip", axis, len(n.shape))))


def pad(x: Value, widths: Any, mode: str = "constant", constant_values: Value = 0) -> Array:
    """x with `widths` = (before, after) an axis (one number or pair for all, or a pair an axis)
    around it.

    mode: "constant" (a number), "edge" (the outermost element) or "reflect" (mirrored without the
    edge).
    """
    from ..ops import gather

    n = node(x)
    pairs = np.broadcast_to(np.asarray(widths, dtype=int), (len(n.shape), 2)).tolist()
    if any(w < 0 for p in pairs for w in p):
        raise ShapeMismatch(f"pad needs widths of at least 0, got {widths}")
    if mode == "constant":
        if n.dtype is bool_ and is_scalar(constant_values):
            constant_values = bool(constant_values)
        value = promoted("pad", [wrap(n), constant_values])[1]
        if value.shape or value.dtype != n.dtype:
            raise ShapeMismatch(f"pad of {n.type} needs a number of its dtype, got {value.type}")
        return wrap(pad_node(n, value, [p[0] for p in pairs], [p[1] for p in pairs]))
    if mode not in ("edge", "reflect"):
        raise ShapeMismatch(f"pad knows the modes constant, edge and reflect, got {mode!r}")
    for axis, (low, high) in enumerate(pairs):
        size = n.shape[axis]
        if (low or high) and size < (2 if mode == "reflect" else 1):
            raise ShapeMismatch(
                f"pad mode {mode!r} needs more elements along axis {axis} of {n.type}"
            )
        if low or high:
            places = np.pad(np.arange(size, dtype=np.int32), (low, high), mode=mode)  # type: ignore[call-overload]
            n = gather(n, array(places).node, axis)
    return wrap(n)


def roll(x: Value, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Array:
    """Elements moved by `shift` along axes, those that leave coming in at the other end; flat when
    axis is None."""
    from ..ops import slice_

    n = node(x)
    if axis is None:
        return reshape(roll(ravel(x), shift, 0), n.shape)
    axes = [axis] if isinstance(axis, int) else list(axis)
    shifts = [shift] * len(axes) if isinstance(shift, int) else list(shift)
    if len(shifts) != len(axes):
        raise ShapeMismatch(f"roll needs one shift an axis, got {shift} for {axis}")
    for s, a in zip(shifts, axes, strict=True):
        k = one_axis("roll", a, len(n.shape))
        cut = (-s) % n.shape[k] if n.shape[k] else 0
        if cut:
            start, stop = [0] * len(n.shape), list(n.shape)
            middle = [*start[:k], cut, *start[k + 1 :]]
            end = [*stop[:k], cut, *stop[k + 1 :]]
            n = concat([slice_(n, middle, stop), slice_(n, start, end)], k)
    return wrap(n)


def tile(x: Value, repeats: int | Sequence[int]) -> Array:
    """x repeated whole, `repeats` times an axis."""
    n = node(x)
    times = [repeats] if isinstance(repeats, int) else list(repeats)
    rank = builtin_max(len(times), len(n.shape))
    times = [1] * (rank - len(times)) + times
    shape = (1,) * (rank - len(n.shape)) + n.shape
    wide = broadcast(
        reshape_node(n, [d for m in shape for d in (1, m)]),
        [d for r, m in zip(times, shape, strict=True) for d in (r, m)],
    )
    return wrap(reshape_node(wide, [r * m for r, m in zip(times, shape, strict=True)]))


def repeat(x: Value, repeats: int | Sequence[int], axis: int | None = None) -> Array:
    """Each element repeated in place along an axis (of the flat array when None), as often or each
    its own number of times."""
    n = node(x)
    if axis is None:
        n, axis = reshape_node(n, (n.type.size,)), 0
    k = one_axis("repeat", axis, len(n.shape)) + 1
    if not isinstance(repeats, (int, np.integer)):
        from ..ops import gather

        places = np.repeat(np.arange(n.shape[k - 1], dtype=np.int32), np.asarray(repeats))
        return wrap(gather(n, array(places).node, k - 1))
    repeats = int(repeats)
    wide = broadcast(
        reshape_node(n, (*n.shape[:k], 1, *n.shape[k:])), (*n.shape[:k], repeats, *n.shape[k:])
    )
    return wrap(reshape_node(wide, (*n.shape[: k - 1], n.shape[k - 1] * repeats, *n.shape[k:])))


def diag(x: Value, k: int = 0) -> Array:
    """The k-th diagonal of a matrix, or a matrix with x on its k-th diagonal."""
    from ..ops import literal, slice_

    n = node(x)
    down, right = builtin_max(-k, 0), builtin_max(k, 0)
    if len(n.shape) == 1:
        count, size = n.shape[0], n.shape[0] + builtin_abs(k)
        start = down * size + right
        used = start + builtin_max((count - 1) * (size + 1) + 1, 0)
        flat = pad_node(
            n, literal(0, n.dtype), (start,), (builtin_max(size * size - used, 0),), (size,)
        )
        return wrap(reshape_node(flat, (size, size))) if count else zeros((size, size), n.dtype)
    if len(n.shape) != 2:
        raise ShapeMismatch(f"diag needs a vector or a matrix, got {n.type}")
    rows, columns = n.shape
    count = builtin_max(0, builtin_min(rows - down, columns - right))
    if not count:
        return zeros((0,), n.dtype)
    start = down * columns + right
    stop = start + (count - 1) * (columns + 1) + 1
    return wrap(slice_(reshape_node(n, (n.type.size,)), (start,), (stop,), (columns + 1,)))


def tril(x: Value, k: int = 0) -> Array:
    """x with zeros above the k-th diagonal of its last two axes."""
    return _triangle(x, k, lower=True)


def triu(x: Value, k: int = 0) -> Array:
    """x with zeros below the k-th diagonal of its last two axes."""
    return _triangle(x, k, lower=False)


def _triangle(x: Value, k: int, lower: bool) -> Array:
    from ..ops import elementwise as E

    n = node(x)
    if len(n.shape) < 2:
        raise ShapeMismatch(f"tril and triu need at least two axes, got {n.type}")
    rank = len(n.shape)
    diagonal = iota(n.shape, rank - 2, i32) + k
    column = iota(n.shape, rank - 1, i32)
    keep = E.le(column, diagonal) if lower else E.ge(column, diagonal)
    return wrap(E.select(keep, n, full_node(0, n.shape, n.dtype)))
