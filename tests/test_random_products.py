"""Products of arrays, numbers and what is broadcast along some axes; gradients of plain sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler.reference import evaluate

STYLES: tuple[Callable[..., Any], ...] = (
    lambda x, y, z, u, c: (x @ y) * z,
    lambda x, y, z, u, c: nn.softmax(x @ y, -1) @ eg.swapaxes(z, 1, 2),
    lambda x, y, z, u, c: nn.softmax(x @ eg.swapaxes(u, 1, 2) * c, -1) @ u,
    lambda x, y, z, u, c: (x @ y + z).sum(1, keepdims=True) * z,
    lambda x, y, z, u, c: eg.swapaxes(x @ y, 1, 2) @ (x - u),
    lambda x, y, z, u, c: (x @ y / (eg.abs(z) + 1)).mean((0, 2)),
    lambda x, y, z, u, c: eg.swapaxes(x, 1, 2) @ u @ y * c,
    lambda x, y, z, u, c: nn.softmax(eg.where(x @ y > 0, z, -1e30), -1),
)


def program(seed: int) -> tuple[Callable[..., Any], list[np.ndarray]]:
    """A function of four arrays with extents of 1, and values for them."""
    rng = np.random.default_rng(seed)
    b, m, k, n = (int(rng.integers(1, high)) for high in (4, 6, 6, 6))
    shapes = ((b, m, k), (b, k, n), (b, m, n), (b, m, k))
    kinds = [("number", "array", "array", "square")[rng.integers(4)] for _ in shapes]
    given = [tuple(1 if rng.random() < 0.5 else e for e in shape) for shape in shapes]
    number, style = float(rng.choice([0.5, 1.0, 2.0, -1.0, 3.0])), STYLES[rng.integers(len(STYLES))]

    def operand(kind: str, array: Any, shape: tuple[int, ...]) -> Any:
        if kind == "number":
            return eg.full(shape, number)
        whole = eg.broadcast_to(array, shape)
        return whole * array if kind == "square" else whole

    def function(*arrays: Any) -> Any:
        return style(*map(operand, kinds, arrays, shapes), number)

    return function, [rng.standard_normal(s).astype(np.float32) for s in given]


@pytest.mark.parametrize("seed", range(48))
def test_values_and_gradients_of_sums(seed: int) -> None:
    function, arrays = program(seed)

    def loss(*arrays: Any) -> Any:
        value = function(*arrays)
        return (value * (1.0, 0.5)[seed % 2]).sum() if seed % 3 else (value**2).sum()

    gradient = eg.grad(loss, argnums=(0, 1, 2, 3))
    found = [eg.compile(function)(*arrays), *eg.compile(gradient)(*arrays)]
    traces = [eg.trace(f, *arrays) for f in (function, gradient)]
    for got, want in zip(
        found, [v for graph in traces for v in evaluate(graph, arrays, np.float64)], strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max(initial=1.0))
