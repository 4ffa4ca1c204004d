"""Random small programs: compiled they give what NumPy gives in double precision, and their
gradients are finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import eggpu as eg
from eggpu import nn
from eggpu.compiler.reference import evaluate

SIZES = st.sampled_from([1, 2, 3, 4, 5])
SHAPES = st.lists(SIZES, min_size=0, max_size=3).map(tuple)


@dataclass(frozen=True)
class Step:
    """One op of a program: which values it takes, by number from the newest, and its choices."""

    name: str
    first: int
    second: int
    choice: int


def axis_of(x: Any, choice: int) -> int:
    return choice % x.ndim


def spread(y: Any, x: Any) -> Any:
    """y in a shape that broadcasts with x's."""
    return y if y.ndim == 0 else y.sum() if y.shape != x.shape else y


def product(x: Any, y: Any) -> Any:
    """A product that fits: with y where it does, else with x's own transpose."""
    if x.ndim < 2:
        return eg.outer(x, y)
    if y.ndim >= 2 and y.shape[-2] == x.shape[-1] and (y.ndim == 2 or y.shape[:-2] == x.shape[:-2]):
        return x @ y
    return x @ eg.swapaxes(x, -1, -2)


def joined(x: Any, y: Any, c: int) -> Any:
    return (
        eg.concatenate([x, y if y.shape == x.shape else x * 0.5, x[:1]], axis_of(x, 0))
        if c % 2
        else eg.stack([x, -x], -1)
    )


# name: (least rank, function of two values and a choice). All keep small values small.
OPS: dict[str, tuple[int, Callable[[Any, Any, int], Any]]] = {
    "tanh": (0, lambda x, y, c: eg.tanh(x)),
    "sin": (0, lambda x, y, c: eg.sin(x) + eg.cos(x * 0.5)),
    "exp": (0, lambda x, y, c: eg.exp(eg.tanh(x))),
    "log": (0, lambda x, y, c: eg.log(x * x + 0.5)),
    "sqrt": (0, lambda x, y, c: eg.sqrt(eg.abs(x) + 0.1) if c % 2 else eg.rsqrt(x * x + 0.5)),
    "relu": (
        0,
        lambda x, y, c: (nn.relu, nn.gelu, nn.silu, nn.softplus, nn.elu, nn.mish)[c % 6](x),
    ),
    "scale": (
        0,
        lambda x, y, c: (x * 0.5 - 0.25, 1.0 - x, -x, x / 3.0, 2.0 / (x * x + 1.0))[c % 5],
    ),
    "power": (0, lambda x, y, c: eg.tanh(x) ** (c % 4) + eg.power(eg.sigmoid(x), 1.5)),
    "add": (0, lambda x, y, c: x + spread(y, x)),
    "subtract": (0, lambda x, y, c: x - spread(y, x)),
    "multiply": (0, lambda x, y, c: eg.tanh(x) * eg.tanh(spread(y, x))),
    "divide": (0, lambda x, y, c: x / (spread(y, x) ** 2 + 1.0)),
    "maximum": (0, lambda x, y, c: (eg.maximum, eg.minimum)[c % 2](x, spread(y, x))),
    "where": (0, lambda x, y, c: eg.where(x > spread(y, x), x, eg.sin(x))),
    "clip": (0, lambda x, y, c: eg.clip(x, -0.5, 0.75)),
    "erf": (0, lambda x, y, c: eg.erf(x)),
    "sum": (1, lambda x, y, c: eg.mean(x, axis_of(x, c), keepdims=bool(c & 8)) * 2.0),
    "all": (1, lambda x, y, c: (eg.sum, eg.max, eg.min, eg.logsumexp, eg.var)[c % 5](x)),
    "max": (1, lambda x, y, c: (eg.max, eg.min)[c & 1](x, axis_of(x, c))),
    "var": (1, lambda x, y, c: eg.var(x, axis_of(x, c), keepdims=True) + x),
    "prod": (1, lambda x, y, c: eg.prod(eg.tanh(x), axis_of(x, c))),
    "norm": (1, lambda x, y, c: x / (eg.norm(x, axis=axis_of(x, c), keepdims=True) + 0.5)),
    "softmax": (1, lambda x, y, c: (nn.softmax, nn.log_softmax)[c & 1](x, axis_of(x, c >> 1))),
    "layer_norm": (
        1,
        lambda x, y, c: nn.layer_norm(x, eps=0.1) if c & 1 else nn.rms_norm(x, eps=0.1),
    ),
    "cumsum": (
        1,
        lambda x, y, c: (eg.cumsum, eg.cummax, eg.cummin)[c % 3](
            x, axis_of(x, c >> 2), reverse=bool(c & 1)
        ),
    ),
    "sort": (1, lambda x, y, c: eg.sort(x, axis_of(x, c))),
    "transpose": (2, lambda x, y, c: eg.swapaxes(x, 0, -1) if c & 1 else eg.transpose(x)),
    "reshape": (0, lambda x, y, c: x.reshape((-1,)) if c & 1 else eg.expand_dims(x, 0)),
    "slice": (
        1,
        lambda x, y, c: (x[::-1], x[: max(1, x.shape[0] - 1)], x[::2], x[None, ..., -1])[c % 4],
    ),
    "pad": (
        1,
        lambda x, y, c: (
            eg.pad(x, 1, constant_values=0.5) if c & 1 else eg.roll(x, 1, axis_of(x, c >> 1))
        ),
    ),
    "concatenate": (1, lambda x, y, c: joined(x, y, c)),
    "take": (1, lambda x, y, c: eg.take(x, np.array([0, -1, 0]), axis_of(x, c))),
    "matmul": (1, lambda x, y, c: eg.tanh(product(x, y))),
    "one_hot": (
        1,
        lambda x, y, c: x.at[0].set(0.25) if c & 1 else x.at[np.array([0, -1, 0])].add(x[:1]),
    ),
}


@st.composite
def steps(draw: st.DrawFn) -> Step:
    return Step(
        draw(st.sampled_from(sorted(OPS))),
        draw(st.integers(0, 5)),
        draw(st.integers(0, 5)),
        draw(st.integers(0, 15)),
    )


@st.composite
def programs(draw: st.DrawFn, most: int) -> tuple[list[tuple[int, ...]], list[Step]]:
    return draw(st.lists(SHAPES, min_size=1, max_size=3)), draw(
        st.lists(steps(), min_size=2, max_size=most)
    )


def function_of(program: list[Step]) -> Callable[..., list[Any]]:
    """The program as a function that returns all that it computes."""

    def run(*arrays: Any) -> list[Any]:
        values = list(arrays)
        for step in program:
            x = values[-1 - step.first % len(values)]
            y = values[-1 - step.second % len(values)]
            rank, op = OPS[step.name]
            if x.ndim >= rank and x.size < 400:
                values.append(op(x, y, step.choice))
        return values[len(arrays) :] or [values[0] * 2.0]

    return run


def numbers(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    rng = np.random.default_rng(sum(map(math.prod, shapes)))
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


COMMON = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much], derandomize=True
)


@settings(COMMON, max_examples=40)
@given(programs(9))
def test_compiled_equals_numpy(given_: tuple[list[tuple[int, ...]], list[Step]]) -> None:
    shapes, program = given_
    function, arrays = function_of(program), numbers(shapes)
    graph = eg.trace(function, *arrays)
    double, single = evaluate(graph, arrays, np.float64), evaluate(graph, arrays)
    for optimize in (True, False):
        found = eg.compile(function, optimize=optimize)(*arrays)
        for got, want, near in zip(found, double, single, strict=True):
            allowed = 1e-5 * np.max(np.abs(want), initial=1) + 30 * np.max(
                np.abs(near - want), initial=0
            )
            np.testing.assert_allclose(got.numpy(), want, rtol=2e-5, atol=allowed)


@settings(COMMON, max_examples=20)
@given(programs(6))
def test_compiled_gradients_equal_numpy_s(given_: tuple[list[tuple[int, ...]], list[Step]]) -> None:
    shapes, program = given_
    function, arrays = function_of(program), numbers(shapes)
    step = eg.value_and_grad(loss_of(function), tuple(range(len(arrays))))
    graph = eg.trace(step, *arrays)
    double, single = evaluate(graph, arrays, np.float64), evaluate(graph, arrays)
    value, grads = eg.compile(step)(*arrays)
    for got, want, near in zip([value, *grads], double, single, strict=True):
        allowed = 2e-5 * np.max(np.abs(want), initial=1) + 50 * np.max(
            np.abs(near - want), initial=0
        )
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=allowed)


def loss_of(function: Callable[..., list[Any]]) -> Callable[..., Any]:
    """A scalar to which every value of the program counts, each element in its own way."""

    def loss(*arrays: Any) -> Any:
        total = eg.array(0.0)
        for k, v in enumerate(function(*arrays)):
            weights = np.cos(np.arange(v.size, dtype=np.float32) + k).reshape(v.shape)
            total = total + (v * eg.array(weights)).sum()
        return total

    return loss


@settings(COMMON, max_examples=250)
@given(programs(10))
def test_gradients_are_finite_differences(given_: tuple[list[tuple[int, ...]], list[Step]]) -> None:
    shapes, program = given_
    loss, arrays = loss_of(function_of(program)), numbers(shapes)
    wide = [a.astype(np.float64) for a in arrays]
    rng = np.random.default_rng(1)
    direction = [rng.standard_normal(a.shape) for a in arrays]
    graph = eg.trace(loss, *arrays)
    grads = evaluate(eg.trace(eg.grad(loss, tuple(range(len(arrays)))), *arrays), wide, np.float64)

    def slope(h: float) -> float:
        ends = [
            evaluate(
                graph, [a + s * h * d for a, d in zip(wide, direction, strict=True)], np.float64
            )[0]
            for s in (1, -1)
        ]
        return float(ends[0] - ends[1]) / (2 * h)

    near, nearer = slope(1e-6), slope(3e-7)
    assume(
        abs(near - nearer) < 1e-5 * (1 + abs(near))
    )  # else a corner of the function lies between
    got = sum(float((g * d).sum()) for g, d in zip(grads, direction, strict=True))
    assert math.isclose(got, near, rel_tol=1e-4, abs_tol=1e-4), (got, near)
