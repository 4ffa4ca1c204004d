"""`eggpu.testing.check_grads`: what it accepts, and how it tells what is wrong."""

from __future__ import annotations

import re

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.testing import WrongGradient, check_grads

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


def test_right_gradients_are_counted() -> None:
    assert check_grads(lambda x: eg.tanh(x) @ eg.transpose(x), X) == 12
    assert check_grads(lambda x, n: eg.sin(x) * n, X, 3) == 12
    assert check_grads(lambda p: p["w"] * p["b"], {"w": X, "b": np.float32(2)}) == 13


def test_second_order() -> None:
    assert check_grads(lambda x: eg.sin(x) * x * x, X, order=2) == 24
    assert check_grads(lambda x: nn.softmax(x) ** 2, X, order=2) == 24
    with pytest.raises(WrongGradient, match="the second-order gradient of <lambda>"):
        check_grads(lambda x: frozen_slope(x), X, order=2)


def frozen_slope(x: eg.Array) -> eg.Array:
    """x squared with the right gradient, of which the second is lost."""
    square = eg.custom_vjp(lambda v: v * v)
    square.defvjp(lambda v: (v * v, v), lambda v, ct: (ct * eg.stop_gradient(v * 2),))
    return square(x)


def test_of_a_large_array_some_elements_are_compared() -> None:
    assert check_grads(lambda x: x * x, np.ones((50, 50), np.float32), most=30) == 30


def wrong(v: eg.Array) -> eg.Array:
    return v * v


def test_a_wrong_gradient_is_told_by_argument_and_element() -> None:
    bad = eg.custom_vjp(wrong)
    bad.defvjp(lambda v: (v * v, v), lambda v, ct: (eg.where(v > 0, 2 * v, 0.0) * ct,))

    def model(weight: eg.Array) -> eg.Array:
        return bad(weight)

    with pytest.raises(WrongGradient) as caught:
        check_grads(model, np.array([1.0, -2.0, 3.0], np.float32))
    text = str(caught.value)
    assert "the gradient of model is wrong in 1 of 3 elements" in text
    assert re.search(r"weight\[1\]: gradient -?0, finite difference", text)
    assert [d.index for d in caught.value.differences] == [(1,)]


def test_a_corner_is_told() -> None:
    with pytest.raises(
        WrongGradient, match=r"a corner: -?0 from the left, -?[0-9.]+ from the right"
    ):
        check_grads(nn.relu, np.zeros(1, np.float32))


def test_nan_is_wrong() -> None:
    with pytest.raises(WrongGradient, match=r"gradient nan|finite difference nan"):
        check_grads(eg.sqrt, np.array([-1.0], np.float32))
