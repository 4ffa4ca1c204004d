"""`custom_vjp` and `checkpoint`: functions with gradients of their own."""

from __future__ import annotations

import numpy as np
import pytest

import eggpu as eg
from eggpu.testing import check_grads

X = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)


@pytest.fixture
def scaled():
    """sin(x) * y, whose gradient is ten times too large for x and none for y."""

    @eg.custom_vjp
    def function(x, y):
        return eg.sin(x) * y

    def forward(x, y):
        return eg.sin(x) * y, (x, y)

    def backward(kept, ct):
        x, y = kept
        return 10.0 * ct * y * eg.cos(x), None

    return function.defvjp(forward, backward)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_given_gradient_is_used_in_the_middle_of_a_graph(scaled, compiled):
    def loss(x, y):
        return (scaled(x * 2, y) * x).sum()

    step = eg.value_and_grad(loss, (0, 1))
    value, (dx, dy) = (eg.compile(step) if compiled else step)(X, X + 1)
    np.testing.assert_allclose(float(value), (np.sin(2 * X) * (X + 1) * X).sum(), rtol=1e-5)
    want = np.sin(2 * X) * (X + 1) + 20 * X * (X + 1) * np.cos(2 * X)
    np.testing.assert_allclose(dx.numpy(), want, rtol=1e-4, atol=1e-5)
    assert not dy.numpy().any()


def test_several_results_and_trees_share_one_backward_call():
    calls = []

    @eg.custom_vjp
    def function(p):
        return {"sum": p["a"] + p["b"], "product": p["a"] * p["b"]}

    def forward(p):
        return function.function(p), p

    def backward(p, ct):
        calls.append(1)
        both = ct["sum"], ct["product"]
        return ({"a": both[0] + both[1] * p["b"], "b": eg.clip(both[0] + both[1] * p["a"], -1, 1)},)

    function.defvjp(forward, backward)

    def loss(p):
        out = function(p)
        return (out["sum"] * 2 + eg.tanh(out["product"])).sum()

    grads = eg.grad(loss)({"a": X, "b": X * 3})
    slope = 1 - np.tanh(3 * X * X) ** 2
    np.testing.assert_allclose(grads["a"].numpy(), 2 + slope * 3 * X, rtol=1e-5)
    np.testing.assert_allclose(grads["b"].numpy(), np.clip(2 + slope * X, -1, 1), rtol=1e-5)
    assert calls == [1]


def test_a_result_that_is_not_used_has_a_zero_cotangent():
    function = eg.custom_vjp(lambda x: (x, x * 2))
    function.defvjp(lambda x: ((x, x * 2), None), lambda _, ct: (ct[0] + 5.0 * ct[1],))
    np.testing.assert_array_equal(eg.grad(lambda x: function(x)[0].sum())(X), np.ones_like(X))
    np.testing.assert_array_equal(eg.grad(lambda x: function(x)[1].sum())(X), np.full_like(X, 5))


def test_without_a_gradient_it_is_the_forward_function(scaled):
    np.testing.assert_allclose(scaled(X, X), np.sin(X) * X, rtol=1e-6)
    assert "custom" not in [n.op.name for n in eg.trace(scaled, X, X).nodes()]


def test_mistakes_are_told():
    function = eg.custom_vjp(lambda x: x)
    with pytest.raises(eg.TraceError, match="has no gradient yet"):
        function(X)
    function.defvjp(lambda x: (x, None), lambda _, ct: (ct, ct))
    with pytest.raises(eg.TraceError, match="a tuple of 1 cotangents"):
        eg.grad(lambda x: function(x).sum())(X)
    function.defvjp(lambda x: (x, None), lambda _, ct: (ct[0],))
    with pytest.raises(eg.TraceError, match=r"type of its argument, f32\[3, 4\], got f32\[4\]"):
        eg.grad(lambda x: function(x).sum())(X)


WEIGHTS = [
    np.random.default_rng(k).standard_normal((16, 16)).astype(np.float32) / 4 for k in range(6)
]


def block(h, w):
    for _ in range(4):
        h = eg.tanh(h @ w) + h
    return h


def loss_of(run):
    def loss(weights, x):
        for w in weights:
            x = run(x, w)
        return (x * x).mean()

    return loss


@pytest.mark.parametrize("optimize", [True, False])
def test_checkpoint_changes_memory_and_nothing_else(optimize):
    x = np.random.default_rng(9).standard_normal((256, 16)).astype(np.float32)
    plain = eg.compile(eg.value_and_grad(loss_of(block)), optimize=optimize)
    saving = eg.compile(eg.value_and_grad(loss_of(eg.checkpoint(block))), optimize=optimize)
    (value, grads), (same, again) = plain(WEIGHTS, x), saving(WEIGHTS, x)
    np.testing.assert_allclose(float(same), float(value), rtol=1e-6)
    for a, b in zip(again, grads, strict=True):
        np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-4, atol=1e-6)
    # a block's four products for the gradient of w may be one, for which their operands are kept
    assert sum(saving.plan.arena) < 0.8 * sum(plain.plan.arena)
    assert len(saving.plan.kernels) > len(plain.plan.kernels)


def test_checkpoint_differentiates_arrays_from_around_it():
    def loss(w, x):
        inner = eg.checkpoint(lambda h: eg.sin(h * w).sum())
        return inner(x * 2) + inner(x)

    check_grads(loss, X, X + 1)


def test_checkpoint_of_integers_trees_and_second_order():
    function = eg.checkpoint(lambda p, at: eg.take(p["table"], at, 0) * p["scale"])
    check_grads(lambda p: function(p, np.array([0, 2, 2])), {"table": X, "scale": np.float32(2)})
    check_grads(lambda x: eg.checkpoint(lambda v: eg.sin(v) * v)(x), X, order=2)


def test_dropout_is_the_same_when_it_is_computed_again():
    from eggpu import nn

    key = eg.random.key(3)
    function = eg.checkpoint(lambda x: nn.dropout(eg.tanh(x), 0.5, key) * x)
    got = eg.compile(eg.grad(lambda x: function(x).sum()))(X).numpy()
    keep = np.asarray(nn.dropout(np.ones_like(X), 0.5, key))
    np.testing.assert_allclose(
        got, keep * (np.tanh(X) + X * (1 - np.tanh(X) ** 2)), rtol=1e-4, atol=1e-6
    )
