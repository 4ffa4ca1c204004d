"""Every public function with arguments of odd, empty and no axes, and what NumPy says that it gives.

A row's `call` takes the module (eggpu or, when there is no `oracle`, NumPy) and the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from scipy import special

import eggpu as eg
from eggpu import nn

A = np.ndarray


@dataclass(frozen=True)
class Row:
    name: str
    call: Callable[..., Any]
    args: list[tuple[Any, ...]]
    oracle: Callable[..., Any] | None = None
    module: Any = field(default=eg)


ROWS: list[Row] = []


def row(name: str, call: Callable[..., Any], args: list[tuple[Any, ...]],
        oracle: Callable[..., Any] | None = None, module: Any = eg) -> None:  # fmt: skip
    ROWS.append(Row(name, call, args, oracle, module))


def f(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> A:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape).astype(np.float32)


def i(*shape: int, seed: int = 0, low: int = -4, high: int = 5) -> A:
    return np.random.default_rng([seed, *shape]).integers(low, high, shape).astype(np.int32)


def u(*shape: int, seed: int = 0) -> A:
    return np.random.default_rng([seed, *shape]).integers(0, 9, shape).astype(np.uint32)


def b(*shape: int, seed: int = 0) -> A:
    return np.random.default_rng([seed, *shape]).integers(0, 2, shape).astype(bool)


def named(name: str, *rest: Any, **options: Any) -> Callable[..., Any]:
    """The function of that name of a module."""
    return lambda m, *xs: getattr(m, name)(*xs, *rest, **options)


SHAPES = ((), (0,), (7,), (3, 5), (2, 0, 3), (2, 3, 5))

# ---- elementwise
for name in ("exp", "sin", "cos", "tanh", "exp2", "expm1", "tan", "atan", "sinh", "cosh", "negative", "abs", "sign",
             "floor", "ceil", "round", "trunc", "square", "isnan", "isinf", "isfinite", "logical_not"):  # fmt: skip
    row(name, named(name), [(f(*s),) for s in SHAPES])
for name in ("log", "sqrt", "log2", "log10", "log1p"):
    row(name, named(name), [(f(*s, low=0.1),) for s in SHAPES])
for name in ("asin", "acos"):
    row(name, named(name), [(f(*s, low=-0.9, high=0.9),) for s in SHAPES])
for name in (
    "negative",
    "abs",
    "sign",
    "floor",
    "ceil",
    "round",
    "trunc",
    "square",
    "invert",
    "logical_not",
):
    row(name, named(name), [(i(*s),) for s in SHAPES] + [(u(7),)])
row("round", named("round", 2), [(f(3, 5),)])
row("round", named("round", -1), [(f(3, 5) * 40,)])
row("abs", named("abs"), [(b(5),)])
row("invert", named("invert"), [(b(3, 5),)])
row("rsqrt", named("rsqrt"), [(f(*s, low=0.1),) for s in SHAPES], lambda x: 1 / np.sqrt(x))
row("erf", named("erf"), [(f(*s),) for s in SHAPES], special.erf)
row("sigmoid", named("sigmoid"), [(f(*s),) for s in SHAPES], special.expit, nn)
row("stop_gradient", named("stop_gradient"), [(f(*s),) for s in SHAPES], lambda x: x)
row("astype", named("astype", "i32"), [(f(*s) * 3,) for s in SHAPES], lambda x: x.astype(np.int32))

PAIRS = [(s, s) for s in SHAPES] + [
    ((3, 1), (5,)),
    ((), (3, 5)),
    ((0, 1), (1, 4)),
    ((2, 1, 5), (3, 1)),
]
for name in ("add", "subtract", "multiply", "divide", "maximum", "minimum", "atan2", "floor_divide", "remainder",
             "equal", "not_equal", "less", "less_equal", "greater", "greater_equal"):  # fmt: skip
    row(name, named(name), [(f(*s), f(*t, seed=1, low=0.3)) for s, t in PAIRS])
for name in ("add", "subtract", "multiply", "maximum", "minimum", "floor_divide", "remainder", "equal", "not_equal",
             "less", "less_equal", "greater", "greater_equal", "bitwise_and", "bitwise_or", "bitwise_xor"):  # fmt: skip
    row(
        name,
        named(name),
        [(i(*s), i(*t, seed=1, low=1)) for s, t in PAIRS] + [(u(7), u(7, seed=1) + np.uint32(1))],
    )
for name in (
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "logical_and",
    "logical_or",
    "logical_xor",
):
    row(name, named(name), [(b(*s), b(*t, seed=1)) for s, t in PAIRS])
for name in ("left_shift", "right_shift"):
    row(
        name,
        named(name),
        [(i(*s), i(*t, seed=1, low=0)) for s, t in PAIRS] + [(u(7), u(7, seed=1))],
    )
row("power", named("power"), [(f(*s, low=0.2), f(*t, seed=1)) for s, t in PAIRS])
row("power", named("power"), [(i(*s), i(*t, seed=1, low=0)) for s, t in PAIRS])
for exponent in (0, 1, 2, 3, 5, 0.5, -1, -2, 2.5, -0.5):
    row("power", named("power", exponent), [(f(3, 5, low=0.3),), (f(0, 3, low=0.3),)])
row("power", lambda m, x: x**3 - x**2, [(f(7),), (i(7),)])
row("where", named("where"), [(b(*s), f(*t), f(*t, seed=1)) for s, t in PAIRS])
row("clip", named("clip", -0.5, 1.0), [(f(*s),) for s in SHAPES])
row("clip", lambda m, x, lo: m.clip(x, lo, None), [(f(3, 5), f(5, seed=1))])

# ---- reductions
AXES = (None, 0, 1, -1, (0, 2), (0, 1, 2), (1, -1))
for name, keep in product(
    ("sum", "mean", "prod", "max", "min", "var", "std", "any", "all"), (False, True)
):
    for axis in AXES:
        row(
            name,
            named(name, axis=axis, keepdims=keep),
            [(f(2, 3, 5),)] + ([(f(3, 1, 7),)] if keep else []),
        )
for name in ("sum", "mean", "prod", "max", "min", "var", "std", "any", "all"):
    row(name, named(name), [(f(),), (f(1, 1),), (f(37),)])
    row(name, named(name, axis=0), [(f(3, 0),)])
for name in ("sum", "prod", "any", "all"):
    row(name, named(name, axis=1), [(f(3, 0),), (f(0, 0, 2),)])
    row(name, named(name), [(f(0),), (i(5),), (b(5),)])
row("mean", lambda m, x: m.isnan(m.mean(x, axis=1)), [(f(3, 0),)], lambda x: np.ones(3, bool))
row("var", named("var", axis=1, ddof=1), [(f(3, 5),)])
for name in ("argmax", "argmin"):
    for axis, keep in product((None, 0, 1, -1), (False, True)):
        row(
            name,
            named(name, axis=axis, keepdims=keep),
            [(f(3, 5),), (i(3, 5),), (i(2, 3, 5),), (b(3, 4),), (u(4, 3),)],
        )
    row(name, named(name), [(f(),), (f(1),)])
    row(name, named(name, axis=0), [(f(3, 0),)])
for axis in (None, 0, (0, 1)):
    row("logsumexp", named("logsumexp", axis=axis), [(f(3, 5),), (f(2, 3, 5) * 100,)],
        lambda x, axis=axis: special.logsumexp(x, axis=axis))  # fmt: skip
    for p in (None, 0, 1, 2, 3, math.inf, -math.inf):
        row(
            "norm",
            named("norm", p, axis=axis),
            [(f(3, 5),)],
            lambda x, p=p, axis=axis: _norm(x, p, axis),
        )
row("logsumexp", named("logsumexp"), [(f(),)], special.logsumexp)
row("logsumexp", named("logsumexp", axis=0), [(f(3, 0),)], lambda x: np.zeros(0))
row("logsumexp", named("logsumexp", axis=1), [(f(3, 0),)], lambda x: np.full(3, -np.inf))
row("norm", named("norm"), [(f(),), (f(0),)], lambda x: np.sqrt((x * x).sum()))


def _norm(x: A, p: float | None, axis: Any) -> A:
    a = np.abs(x.astype(np.float64))
    if p in (math.inf, -math.inf):
        return (np.max if p > 0 else np.min)(a, axis=axis)
    return (a != 0).sum(axis) * 1.0 if p == 0 else (a ** (p or 2)).sum(axis) ** (1 / (p or 2))


# ---- running combinations and order
SCANS = {
    "cumsum": np.cumsum,
    "cumprod": np.cumprod,
    "cummax": np.maximum.accumulate,
    "cummin": np.minimum.accumulate,
}
for name, oracle in SCANS.items():
    for axis in (0, 1, -1):
        row(
            name,
            named(name, axis),
            [(f(3, 5),), (f(0, 5),), (f(3, 0),)],
            lambda x, g=oracle, axis=axis: g(x, axis),
        )
    row(name, named(name, 0, reverse=True), [(f(7, 2),), (i(5),)],
        lambda x, g=oracle: np.flip(g(np.flip(x, 0), 0), 0))  # fmt: skip
    row(name, named(name), [(f(),), (f(2, 3),)], lambda x, g=oracle: g(x.reshape(-1), 0))
for descending in (False, True):
    for axis in (0, -1, None):
        row("argsort", named("argsort", axis, descending), [(f(7, 3),), (i(5, 4),), (f(0, 3),), (b(6, 2),)],
            lambda x, d=descending, axis=axis: _argsort(x, axis, d))  # fmt: skip
        row("sort", named("sort", axis, descending), [(f(7, 3),), (i(5, 4),), (u(5, 4),), (f(0, 3),)],
            lambda x, d=descending, axis=axis: _sort(x, axis, d))  # fmt: skip
    for k in (0, 1, 3):
        row("topk", named("topk", k, 0, not descending), [(f(7, 3),), (i(5, 4),)],
            lambda x, k=k, d=descending: (_sort(x, 0, not d)[:k], _argsort(x, 0, not d)[:k]))  # fmt: skip


def _argsort(x: A, axis: int | None, descending: bool) -> A:
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
    if not descending:
        return np.argsort(x, axis, kind="stable")
    return x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)


def _sort(x: A, axis: int | None, descending: bool) -> A:
    out = np.sort(x, axis)
    return np.flip(out, 0 if axis is None else axis) if descending else out


# ---- shapes
row("reshape", named("reshape", (5, -1)), [(f(3, 5),), (f(5, 2, 3),)])
row("reshape", named("reshape", ()), [(f(1),), (f(1, 1),)])
row("reshape", named("reshape", (0, 7)), [(f(3, 0),)])
row("ravel", named("ravel"), [(f(*s),) for s in SHAPES])
row("transpose", named("transpose"), [(f(*s),) for s in SHAPES])
row("transpose", named("transpose", (2, 0, 1)), [(f(2, 3, 5),), (f(2, 0, 3),)])
row("transpose", lambda m, x: (x + 0).transpose(2, 0, 1), [(f(2, 3, 5),)])
row("swapaxes", named("swapaxes", 0, -1), [(f(3, 5),), (f(2, 3, 5),), (f(0, 3),)])
row("moveaxis", named("moveaxis", 0, 2), [(f(2, 3, 5),)])
row("moveaxis", named("moveaxis", (0, 1), (-1, 0)), [(f(2, 3, 5),)])
row("squeeze", named("squeeze"), [(f(1, 3, 1),), (f(),), (f(1, 0),)])
row("squeeze", named("squeeze", 1), [(f(3, 1, 1),)])
row("expand_dims", named("expand_dims", (0, -1)), [(f(*s),) for s in SHAPES])
row("broadcast_to", named("broadcast_to", (2, 3, 5)), [(f(),), (f(5),), (f(3, 1),)])
row("broadcast_to", named("broadcast_to", (0, 5)), [(f(5),), (f(1, 1),)])
row("flip", named("flip"), [(f(*s),) for s in SHAPES])
row("flip", named("flip", 1), [(f(3, 5),), (f(2, 3, 5),)])
for shift, axis in ((1, None), (-2, 0), (7, 1), ((1, 2), (0, 1)), (0, 0)):
    row("roll", named("roll", shift, axis), [(f(3, 5),), (f(0, 3),)])
row("roll", named("roll", 1), [(f(),)])
for widths, options in ((1, {}), (((1, 2), (0, 3)), {"constant_values": 2.5}), (((2, 1), (1, 1)), {"mode": "edge"}),
                        (((2, 1), (3, 4)), {"mode": "reflect"})):  # fmt: skip
    row("pad", named("pad", widths, **options), [(f(3, 5),)])
row("pad", named("pad", ((1, 1), (0, 2))), [(f(0, 3),), (i(2, 2),), (b(2, 2),)])
row("pad", named("pad", 0), [(f(),)])
for axis in (0, 1, -1):
    row(
        "concatenate",
        lambda m, *xs, axis=axis: m.concatenate(xs, axis),
        [(f(3, 5), f(3, 5, seed=1)), (f(0, 0), f(0, 0))],
    )
row("concatenate", lambda m, *xs: m.concatenate(xs, None), [(f(3, 5), f(2))])
row("concatenate", lambda m, *xs: m.concatenate(xs), [(f(3), i(2)), (f(0), f(3)), (b(3), i(2))])
for axis in (0, 1, -1):
    row(
        "stack",
        lambda m, *xs, axis=axis: m.stack(xs, axis),
        [(f(3), f(3, seed=1)), (f(0), f(0)), (f(2, 3), f(2, 3), f(2, 3))],
    )
row("stack", lambda m, *xs: m.stack(xs), [(f(), f(seed=1))])
row("split", named("split", 3), [(f(6, 2),), (f(0, 2),)])
row("split", named("split", [2, 3, 7], 1), [(f(3, 5),)])
row("tile", named("tile", 3), [(f(),), (f(2),), (f(2, 3),), (f(0),)])
row("tile", named("tile", (2, 1, 3)), [(f(2, 3),)])
row("repeat", named("repeat", 3), [(f(2, 3),), (f(),), (f(0),)])
row("repeat", named("repeat", 2, 1), [(f(3, 5),)])
row("repeat", named("repeat", [2, 0, 3], 0), [(f(3, 2),)])
for k in (-1, 0, 2):
    row("tril", named("tril", k), [(f(3, 5),), (f(2, 5, 3),), (i(4, 4),), (f(0, 3),)])
    row("triu", named("triu", k), [(f(3, 5),), (f(2, 5, 3),), (i(4, 4),), (f(0, 3),)])
    row("diag", named("diag", k), [(f(5),), (f(3, 5),), (f(5, 3),), (f(0),), (f(1),)])
row("full", lambda m: m.full((2, 3), 1.5), [()])
row("full", lambda m: m.full((0,), 7), [()])
row("zeros", lambda m: m.zeros((2, 0)), [()])
row("ones", lambda m: m.ones(()), [()])
row("zeros_like", named("zeros_like"), [(f(*s),) for s in SHAPES])
row("ones_like", named("ones_like"), [(i(3),)])
row("full_like", named("full_like", 3), [(f(*s),) for s in SHAPES])
row(
    "arange",
    lambda m: [
        m.arange(7),
        m.arange(2, 11, 3),
        m.arange(5, 0, -2),
        m.arange(0),
        m.arange(0.5, 3.0, 0.5),
    ],
    [()],
)
row(
    "linspace",
    lambda m: [
        m.linspace(0, 1, 7),
        m.linspace(2, -1, 1),
        m.linspace(0, 1, 5, endpoint=False),
        m.linspace(0, 1, 0),
    ],
    [()],
)
row("eye", lambda m: [m.eye(3), m.eye(3, 5, 1), m.eye(4, 2, -1), m.eye(0)], [()])
row("array", lambda m: [m.array([[1.0, 2.0], [3.0, 4.0]]), m.array(3)], [()])

# ---- indexing
KEYS = (
    np.s_[0], np.s_[-1], np.s_[1:], np.s_[::-1], np.s_[::2, ::-2], np.s_[..., 1], np.s_[:, None], np.s_[None, ..., None],
    np.s_[4:1:-1], np.s_[1:1], np.s_[[0, 2, -1]], np.s_[:, [0, 2]], np.s_[[0, 1], [2, 0]], np.s_[[[0], [1]], [1, 2]],
    np.s_[1, ..., ::-1],
)  # fmt: skip
for key in KEYS:
    row("getitem", lambda m, x, key=key: x[key], [(f(3, 5),), (i(3, 5, 2),)])
row("getitem", lambda m, x: [x[()], x[...], x[None]], [(f(),)])
row(
    "getitem",
    lambda m, x, at: x[at],
    [(f(5, 3), i(2, 3, low=0)), (f(5, 3), np.int32(2)), (f(5), i(0))],
)
row(
    "take",
    lambda m, x, at: m.take(x, at, 1),
    [(f(3, 5), i(4, low=0)), (f(3, 5), i(2, 2, low=-5, high=0)), (f(3, 5), i(0))],
)
row("take", lambda m, x, at: m.take(x, at), [(f(3, 5), i(4, low=0, high=15))])
row(
    "take_along_axis",
    lambda m, x, at: m.take_along_axis(x, at, 1),
    [(f(3, 5), i(3, 2, low=0)), (f(3, 5), i(3, 0))],
)
row(
    "gather",
    lambda m, x, at: m.gather(x, 0, at),
    [(f(5, 3), i(2, 3, low=0))],
    lambda x, at: np.take_along_axis(x, at, 0),
)
row("one_hot", named("one_hot", 4), [(i(5, low=-1),), (i(low=0),), (i(0),)],
    lambda x: (x[..., None] == np.arange(4)).astype(float))  # fmt: skip
row("scatter_add", lambda m, x, at, v: m.scatter_add(x, 1, at, v), [(f(3, 5), i(4, low=0), f(3, 4)), (f(3, 5), i(0), f(3, 0))],
    lambda x, at, v: _added(x, at, v))  # fmt: skip
row("dynamic_slice", lambda m, x, s: m.dynamic_slice(x, s, (2, 3)), [(f(3, 5), i(2, low=0, high=2)), (f(3, 5), np.array([9, -4], np.int32))],
    lambda x, s: x[tuple(slice(c, c + w) for c, w in zip(np.clip(s, 0, [1, 2]), (2, 3), strict=True))])  # fmt: skip
row("dynamic_update_slice", lambda m, x, v, s: m.dynamic_update_slice(x, v, s), [(f(3, 5), f(2, 3), i(2, low=0, high=2))],
    lambda x, v, s: _updated(x, v, s))  # fmt: skip
for key in (
    np.s_[1],
    np.s_[::-2, 1:4:2],
    np.s_[..., 2],
    np.s_[[0, 2, 0]],
    np.s_[[0, 1], [2, 2]],
    np.s_[:, [1, 3]],
    np.s_[1:1],
):
    row("at", lambda m, x, key=key: [x.at[key].set(2.0), x.at[key].add(x[key] * 3)], [(f(3, 5),)],
        lambda x, key=key: [_set(x, key, 2.0), _add(x, key, x[key] * 3)])  # fmt: skip


def _added(x: A, at: A, v: A) -> A:
    out = x.copy()
    np.add.at(out, (slice(None), at), v)
    return out


def _updated(x: A, v: A, s: A) -> A:
    out = x.copy()
    out[tuple(slice(c, c + n) for c, n in zip(s, v.shape, strict=True))] = v
    return out


def _set(x: A, key: Any, value: Any) -> A:
    out = x.copy()
    out[key] = value
    return out


def _add(x: A, key: Any, value: Any) -> A:
    out = x.copy()
    np.add.at(out, key, value)
    return out


# ---- products
MATRICES = [((3, 5), (5, 7)), ((5,), (5, 3)), ((3, 5), (5,)), ((5,), (5,)), ((2, 3, 5), (5, 4)), ((2, 1, 3, 5), (7, 5, 2)), ((3, 0), (0, 2)),
            ((0, 3), (3, 2)), ((0, 3, 2), (2, 4)), ((1, 1), (1, 1))]  # fmt: skip
row(
    "matmul",
    named("matmul"),
    [(f(*s), f(*t, seed=1)) for s, t in MATRICES] + [(i(3, 5), i(5, 2, seed=1))],
)
row("matmul", lambda m, x, y: x @ y, [(f(3, 5), f(5, 7))])
row(
    "dot",
    named("dot"),
    [
        (f(3, 5), f(5, 7)),
        (f(5), f(5)),
        (f(2, 3, 5), f(4, 5, 2)),
        (f(), f(3)),
        (f(2, 5), f(5)),
        (f(0), f(0)),
    ],
)
row("outer", named("outer"), [(f(3), f(5)), (f(2, 2), f(3)), (f(), f(3)), (f(0), f(3))])
for axes in (1, 2, ([0, 2], [1, 0])):
    row(
        "tensordot",
        named("tensordot", axes=axes),
        [(f(2, 3, 5), f(5, 2, 4))] if axes != 2 else [(f(4, 3, 5), f(3, 5, 2))],
    )
row("tensordot", named("tensordot", 0), [(f(2), f(3)), (f(), f(3))])
EINSUM = (
    ("ij,jk->ik", (3, 5), (5, 2)), ("ij,kj", (3, 5), (2, 5)), ("ij->ji", (3, 5)), ("ij->", (3, 5)), ("ij->i", (3, 5)), ("ii->i", (4, 4)), ("ii", (4, 4)),
    ("iij->ji", (3, 3, 2)), ("i,j->ij", (3,), (5,)), ("bij,bjk->bik", (2, 3, 5), (2, 5, 4)), ("...ij,...jk->...ik", (2, 1, 3, 5), (7, 5, 2)),
    ("...i->...", (2, 3, 5)), ("b...i,i...->b...", (2, 3, 5), (5, 3)), ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 7, 5)), ("i,i", (5,), (5,)),
    ("ij,jk,kl->il", (3, 4), (4, 5), (5, 2)), ("i,->i", (3,), ()), (",", (), ()), ("ab,cd->abcd", (2, 3), (4, 5)), ("ij,ij->ij", (3, 5), (3, 5)),
    ("ijk,ijl->ikl", (2, 3, 4), (2, 3, 5)), ("ba,b", (3, 5), (3,)), ("ij,jk", (3, 0), (0, 2)), ("...", (3, 2)), ("iijj->ij", (2, 2, 3, 3)),
)  # fmt: skip
for text, *shapes in EINSUM:
    row(
        "einsum",
        lambda m, *xs, text=text: m.einsum(text, *xs),
        [tuple(f(*s, seed=k) for k, s in enumerate(shapes))],
    )
