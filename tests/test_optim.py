"""Optimizers, schedules and clipping against torch's formulas in float64 NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from optimizing import gradient, interpreted, start

import eggpu as eg
from eggpu import optim
from eggpu.compiler import pytree
from eggpu.compiler.errors import TraceError
from eggpu.compiler.library import math as M
from eggpu.compiler.library import shaping
from eggpu.compiler.reference import evaluate
from eggpu.compiler.tracing import Array, array, trace_call
from eggpu.optim import adaptive

Tree = Any
Vector = np.ndarray


def torch_sgd(lr: Any, momentum: float, nesterov: bool, decay: float, steps: int) -> dict:
    p, buffers = start(), {}
    for i in range(steps):
        for k, g in gradient(i).items():
            g = g + decay * p[k]
            if momentum:
                buffers[k] = g if i == 0 else momentum * buffers[k] + g
                g = g + momentum * buffers[k] if nesterov else buffers[k]
            p[k] = p[k] - lr(i) * g
    return p


def torch_adam(lr: Any, b1: float, b2: float, eps: float, decay: float, decoupled: bool) -> dict:
    p = start()
    m, v = ({k: np.zeros_like(x) for k, x in p.items()} for _ in range(2))
    for i in range(100):
        for k, g in gradient(i).items():
            if decoupled:
                p[k] = p[k] * (1 - lr(i) * decay)
            else:
                g = g + decay * p[k]
            m[k] = m[k] + (g - m[k]) * (1 - b1)
            v[k] = v[k] * b2 + (1 - b2) * g * g
            c1, c2 = 1 - b1 ** (i + 1), 1 - b2 ** (i + 1)
            p[k] = p[k] - lr(i) / c1 * m[k] / (np.sqrt(v[k]) / math.sqrt(c2) + eps)
    return p


def train(opt: Any, steps: int = 100) -> Any:
    """The parameters after `steps` updates along the made-up gradients."""
    model = pytree.tree_map(array, start())
    state: Any = opt.init(model)
    update = interpreted(opt.update, model, state, model)
    model = start()
    for i in range(steps):
        model, state = update(model, state, gradient(i))
    assert int(state.step) == steps
    return model


def assert_close(found: Any, expected: Any, rtol: float = 2e-6, atol: float = 1e-7) -> None:
    for k in expected:
        np.testing.assert_allclose(found[k], expected[k], rtol, atol, err_msg=k)


def constant(i: int) -> float:
    return 0.05


def falling(i: int) -> float:
    return 0.05 * (1 - i / 200)


@pytest.mark.parametrize(
    ("momentum", "nesterov", "decay"),
    [(0.0, False, 0.0), (0.0, False, 0.1), (0.9, False, 0.0), (0.9, True, 0.1)],
)
def test_sgd(momentum: float, nesterov: bool, decay: float) -> None:
    expected = torch_sgd(lambda i: 0.05, momentum, nesterov, decay, 100)
    assert_close(train(optim.sgd(0.05, momentum, nesterov, decay)), expected)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam(decay: float) -> None:
    expected = torch_adam(lambda i: 0.01, 0.9, 0.999, 1e-8, decay, decoupled=False)
    assert_close(train(optim.adam(0.01, weight_decay=decay)), expected)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_with_a_schedule(decay: float) -> None:
    expected = torch_adam(falling, 0.8, 0.99, 1e-6, decay, decoupled=True)
    schedule = optim.linear(0.05, 0.0, 200)
    assert_close(train(optim.adamw(schedule, 0.8, 0.99, 1e-6, decay)), expected)


def test_sgd_with_a_schedule() -> None:
    schedule = optim.linear(0.05, 0.0, 200)
    assert_close(train(optim.sgd(schedule, 0.9)), torch_sgd(falling, 0.9, False, 0.0, 100))


@pytest.mark.parametrize(
    ("opt", "expected"),
    [
        (optim.sgd(0.05, 0.9, True, 0.1), lambda: torch_sgd(constant, 0.9, True, 0.1, 100)),
        (
            optim.adamw(optim.linear(0.05, 0.0, 200), 0.8, 0.99, 1e-6, 0.1),
            lambda: torch_adam(falling, 0.8, 0.99, 1e-6, 0.1, decoupled=True),
        ),
    ],
    ids=["sgd", "adamw"],
)
def test_compiled_updates_with_donation(opt: Any, expected: Callable[[], Any]) -> None:
    model = pytree.tree_map(array, start())
    state: Any = opt.init(model)
    update = eg.compile(opt.update, donate=("model", "state"), name="update")
    for i in range(100):
        grads = {k: g.astype(np.float32) for k, g in gradient(i).items()}
        model, state = update(model, state, grads)
    assert int(state.step) == 100
    assert_close({k: v.numpy() for k, v in model.items()}, expected(), rtol=1e-5, atol=2e-6)
    assert not update.recompilations


def test_the_first_adam_step_is_exact_in_float32() -> None:
    """1 - 0.999 computed in float32 would lose three digits."""
    model = {"w": np.ones(3, np.float32)}
    opt = optim.adam(0.125, eps=0.0)
    traced = trace_call(opt.update, (model, opt.init(model), model))
    grads = np.array([1.0, -2.0, 1e-3], np.float32)
    leaves = pytree.flatten((model, opt.init(model), {"w": grads}))[0]
    new = evaluate(traced.graph, [np.asarray(v) for v in leaves])[0]
    np.testing.assert_allclose(new, 1 - 0.125 * np.sign(grads), rtol=3e-7)


@pytest.mark.parametrize("b", [0.0, 0.5, 0.9, 0.999, 0.99999])
def test_one_minus_power_in_float32(b: float) -> None:
    steps = np.array([1, 2, 3, 10, 100, 499, 500, 700, 5000, 10**6], np.int32)
    traced = trace_call(lambda step: adaptive._one_minus_power(b, step), (steps,))
    (found,) = evaluate(traced.graph, [steps])
    np.testing.assert_allclose(found, -np.expm1(steps * np.log(max(b, 1e-300))), rtol=5e-7)


def test_only_floats_change_and_moments_follow_the_model() -> None:
    model = {"w": array([1.0, 2.0]), "n": array([3, 4]), "h": array([1.0], "f16")}
    for opt in (optim.sgd(0.1, momentum=0.9), optim.adamw(0.1)):
        state = opt.init(model)
        new, state = opt.update(model, state, pytree.tree_map(shaping.ones_like, model))
        assert [v.type for v in new.values()] == [v.type for v in model.values()]
        np.testing.assert_array_equal(new["n"].numpy(), [3, 4])
        assert (new["w"].numpy() < [1.0, 2.0]).all()
        assert new["h"].numpy()[0] < 1
        moments = state.velocity if isinstance(state, optim.SGDState) else state.second
        assert repr(moments["h"].type) == "f32[1]"


def test_an_update_needs_gradients_like_the_model() -> None:
    model, opt = {"w": array([1.0, 2.0])}, optim.sgd(0.1)
    state = opt.init(model)
    with pytest.raises(TraceError, match="gradients in the structure of the model"):
        opt.update(model, state, {"v": array([1.0, 2.0])})
    with pytest.raises(TraceError, match=r"gradient f32\[1\] does not fit parameter f32\[2\]"):
        opt.update(model, state, {"w": array([1.0])})


def values(schedule: Callable[[Array], Any], steps: int) -> np.ndarray:
    """The rates of the first `steps` updates."""
    call = interpreted(lambda step: array(schedule(step)), np.int32(0))
    return np.array([call(np.int32(i)) for i in range(steps)])


def numpy_cosine(i: int) -> float:
    if i < 5:
        return 2.0 * (i + 1) / 5
    return 0.2 + 1.8 * (1 + math.cos(math.pi * min(i - 5, 15) / 15)) / 2


def torch_one_cycle(i: int) -> float:
    def anneal(a: float, b: float, part: float) -> float:
        return b + (a - b) / 2 * (math.cos(math.pi * part) + 1)

    top = 0.3 * 20 - 1
    if i <= top:
        return anneal(2 / 25, 2.0, i / top)
    return anneal(2.0, 2 / 25 / 1e4, (i - top) / (19 - top))


def warm_linear(i: int) -> float:
    return 2.0 * (1 - min(i / 10, 1)) * min((i + 1) / 5, 1)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (optim.constant(2.0), lambda i: 2.0),
        (optim.linear(2.0, 0.5, 10), lambda i: 2.0 - 1.5 * min(i / 10, 1)),
        (optim.warmup(2.0, 5), lambda i: 2.0 * min((i + 1) / 5, 1)),
        (optim.warmup(optim.linear(2.0, 0.0, 10), 5), warm_linear),
        (optim.cosine(2.0, warmup=5, steps=20, floor=0.2), numpy_cosine),
        (optim.cosine(2.0, steps=20), lambda i: 1 + math.cos(math.pi * min(i, 20) / 20)),
        (optim.step_decay(2.0, 0.1, 4), lambda i: 2.0 * 0.1 ** (i // 4)),
        (optim.one_cycle(2.0, 20), torch_one_cycle),
    ],
    ids=["constant", "linear", "warmup", "warm linear", "warm cosine", "cosine", "decay", "cycle"],
)
def test_schedules(schedule: Any, expected: Callable[[int], float]) -> None:
    count = 20
    np.testing.assert_allclose(
        values(schedule, count), [expected(i) for i in range(count)], rtol=1e-5, atol=1e-7
    )


def test_a_schedule_takes_its_length_as_an_argument() -> None:
    """So that training can be cut to a time without compiling again."""
    rate = interpreted(
        lambda step, steps: optim.cosine(2.0, warmup=5, steps=steps, floor=0.2)(step),
        np.int32(0),
        np.float32(0),
    )
    found = [rate(np.int32(i), np.float32(20)) for i in range(25)]
    np.testing.assert_allclose(found, [numpy_cosine(i) for i in range(25)], rtol=1e-6)


def test_schedules_say_what_they_need() -> None:
    with pytest.raises(ValueError, match="0 <= warmup < steps, got 20 and 20"):
        optim.cosine(1.0, warmup=20, steps=20)
    with pytest.raises(ValueError, match="1 < rise \\* steps < steps"):
        optim.one_cycle(1.0, steps=2)
    with pytest.raises(ValueError, match="factor above 0"):
        optim.step_decay(1.0, 0.0, 4)
    with pytest.raises(ValueError, match="nesterov needs a momentum"):
        optim.sgd(0.1, nesterov=True)


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clip_by_global_norm_as_torch(limit: float) -> None:
    grads = gradient(0)
    norm = math.sqrt(sum((g * g).sum() for g in grads.values()))
    clipped, found = interpreted(
        lambda g: (optim.clip_by_global_norm(g, limit), optim.global_norm(g)), grads
    )(grads)
    np.testing.assert_allclose(found, norm, rtol=1e-9)
    scale = min(1.0, limit / (norm + 1e-6))
    for k, g in grads.items():
        np.testing.assert_allclose(clipped[k], g * scale, rtol=1e-6)


def test_clipping_leaves_integers_alone() -> None:
    grads = {"w": array([3.0, 4.0]), "n": array([100])}
    assert float(optim.global_norm(grads)) == 5.0
    np.testing.assert_array_equal(optim.clip_by_value(grads, 3.5)["w"].numpy(), [3.0, 3.5])
    assert optim.clip_by_value(grads, 1.0)["n"].item() == 100
    assert optim.clip_by_global_norm(grads, 1.0)["n"].item() == 100
    with pytest.raises(TraceError, match="at least one float array"):
        optim.global_norm({"n": array([1])})


def test_a_nan_gradient_is_not_hidden_by_clipping() -> None:
    grads = {"w": array([1.0, math.nan])}
    assert np.isnan(optim.clip_by_global_norm(grads, 1.0)["w"].numpy()).all()
    assert bool(M.isnan(optim.global_norm(grads)))
