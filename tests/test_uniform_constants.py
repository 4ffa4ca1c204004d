"""Programs with arrays of one number, such as masks that hide nothing: saturation stays small, as
no rule feeds on values that equal their own choices or multiples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn

pytestmark = pytest.mark.timeout(60)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 3)).astype(np.float32)
ALL = np.ones((3, 3), bool)


def nodes(compiled: Any, *args: Any) -> int:
    """The most e-nodes that were held."""
    report = compiled.compile(*args).egraph
    return max((r.nodes for r in report.rounds), default=0) if report else 0


def summed(value: float) -> Callable[[Any], Any]:
    """Rows of a number, summed and spread, twice."""

    def spread(x: Any) -> Any:
        return eg.broadcast_to(x.sum(-1, keepdims=True), (2, 3, 3))

    return lambda x: x + spread(spread(eg.broadcast_to(np.full((1, 1, 1), value, "f"), (2, 3, 3))))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: eg.where(ALL, x, -np.inf), X),
        (lambda x: eg.where(~ALL, -1e9, eg.where(ALL, x, -1e9)), X),
        (lambda x: eg.where(ALL & (x > 0), x, 0.0), np.maximum(X, 0)),
        (lambda x: nn.softmax(eg.where(ALL[:1], x, -np.inf), -1).sum(-1), np.ones((2, 3))),
        (lambda x: nn.softmax(x[:, :1, :1] + np.where(ALL, 0, -1e9).astype("f"), -1).sum(-1),
         np.ones((2, 3))),
        (summed(0.0), X),
        (summed(1.0), X + 9),
        (summed(-np.inf), np.full_like(X, -np.inf)),
    ],
    ids=["true", "nested", "and", "softmax", "added", "zeros", "ones", "infinities"],
)  # fmt: skip
def test_what_is_known_feeds_no_rule(function: Callable[[Any], Any], expected: np.ndarray) -> None:
    compiled = eg.compile(function, cache=False)
    np.testing.assert_allclose(compiled(X).numpy(), expected, rtol=1e-6)
    assert nodes(compiled, X) < 60


@pytest.mark.parametrize("size", [1, 2, 5])
def test_attention_below_a_mask_that_hides_nothing(size: int) -> None:
    """As of batches without padding, and of a first token."""
    q, k, v = RNG.standard_normal((3, 1, size, 4)).astype(np.float32)
    mask = np.tril(np.ones((size, size), bool)) if size == 1 else np.ones((1, size), bool)

    def attention(q: Any, k: Any, v: Any) -> Any:
        scores = eg.where(mask, q @ k.swapaxes(-1, -2) * 0.5, -np.inf)
        return nn.softmax(scores, -1) @ v

    def step(q: Any, k: Any, v: Any) -> Any:
        return eg.grad(lambda *x: (attention(*x) ** 2).sum(), (0, 1, 2))(q, k, v)

    compiled = eg.compile(step, cache=False)
    plain = eg.compile(step, cache=False, optimize=False)
    for got, want in zip(compiled(q, k, v), plain(q, k, v), strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-4, atol=1e-5)
    assert nodes(compiled, q, k, v) < 400


def made(seed: int, x: Any) -> Any:
    """A random function of x, most of whose other operands are arrays of one number."""
    rng, shape, numbers, masks = np.random.default_rng(seed), x.shape, [x], []

    def number() -> Any:
        if rng.random() < 0.4:
            return numbers[rng.integers(len(numbers))]
        sizes = [(), shape, (1,) * len(shape)][rng.integers(3)]
        value = rng.choice([0.0, 1.0, -1.0, 2.0, -np.inf, -1e9])
        return eg.broadcast_to(np.full(sizes, value, np.float32), shape)

    def mask() -> Any:
        if masks and rng.random() < 0.5:
            return masks[rng.integers(len(masks))]
        sizes = [shape, (1,) * len(shape), shape[-1:]][rng.integers(3)]
        return eg.array(np.full(sizes, bool(rng.integers(2))))

    for _ in range(rng.integers(2, 9)):
        match rng.integers(8):
            case 0 | 1:
                numbers.append(eg.where(mask(), number(), number()))
            case 2:
                numbers.append(number() + number())
            case 3:
                numbers.append(number() * number())
            case 4:
                masks.append(mask() & mask())
            case 5:
                masks.append(~mask() if rng.integers(2) else number() > number())
            case 6:
                numbers.append(eg.broadcast_to(number().sum(-1, keepdims=True), shape))
            case _:
                numbers.append(number() - eg.maximum(number(), number()))
    return numbers[-1]


@pytest.mark.parametrize("start", range(0, 120, 20))
def test_random_programs_stay_small(start: int) -> None:
    for seed in range(start, start + 20):
        shape = [(1, 1, 1), (2, 3), (1, 4), (3, 1), (2, 2, 3)][seed % 5]
        compiled = eg.compile(functools.partial(made, seed), name="random", cache=False)
        assert nodes(compiled, np.zeros(shape, np.float32)) < 500, seed
