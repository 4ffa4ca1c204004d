"""Lion, RMSprop, Adafactor, and optimizers around optimizers, against their formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from optimizing import gradient, interpreted, start

import eggpu as eg
from eggpu import nn, optim
from eggpu.compiler import pytree
from eggpu.compiler.errors import TraceError
from eggpu.compiler.tracing import array

Vector = np.ndarray


def train(opt: Any, steps: int = 100, change: Callable[[int, Any], Any] | None = None) -> Any:
    """The parameters and the state after `steps` updates along the made-up gradients."""
    model = pytree.tree_map(array, start())
    state: Any = opt.init(model)
    update = interpreted(opt.update, model, state, model)
    model = start()
    for i in range(steps):
        grads = gradient(i) if change is None else change(i, state)
        model, state = update(model, state, grads)
    return model, state


def assert_close(found: Any, expected: Any, rtol: float = 3e-6, atol: float = 1e-7) -> None:
    for k in expected:
        np.testing.assert_allclose(found[k], expected[k], rtol, atol, err_msg=k)


def numpy_lion(lr: float, b1: float, b2: float, decay: float) -> dict:
    p, m = start(), {k: np.zeros_like(v) for k, v in start().items()}
    for i in range(100):
        for k, g in gradient(i).items():
            way = np.sign(b1 * m[k] + (1 - b1) * g)
            p[k] = p[k] * (1 - lr * decay) - lr * way
            m[k] = b2 * m[k] + (1 - b2) * g
    return p


def torch_rmsprop(lr: float, alpha: float, decay: float, momentum: float, centered: bool) -> dict:
    p = start()
    v, m, b = ({k: np.zeros_like(x) for k, x in p.items()} for _ in range(3))
    for i in range(100):
        for k, g in gradient(i).items():
            g = g + decay * p[k]
            v[k] = alpha * v[k] + (1 - alpha) * g * g
            m[k] = m[k] + (1 - alpha) * (g - m[k])
            size = np.sqrt(v[k] - m[k] ** 2 if centered else v[k]) + 1e-8
            b[k] = momentum * b[k] + g / size
            p[k] = p[k] - lr * b[k]
    return p


def torch_adafactor(lr: float, decay: float) -> dict:
    p, eps = start(), float(np.finfo(np.float32).eps)
    r, c = {"w": np.zeros((3, 1)), "b": np.zeros(4)}, np.zeros((1, 4))
    for i in range(100):
        share = (i + 1) ** -0.8
        for k, g in gradient(i).items():
            size = min(lr, 1 / math.sqrt(i + 1))
            alpha = max(1e-3, np.linalg.norm(p[k]) / math.sqrt(p[k].size)) * size
            p[k] = p[k] * (1 - lr * decay)
            if k == "w":
                r[k] = r[k] + share * ((g * g).mean(1, keepdims=True) - r[k])
                c = c + share * ((g * g).mean(0, keepdims=True) - c)
                spread = r[k] @ c / max(r[k].mean(), eps)
            else:
                spread = r[k] = r[k] + share * (g * g - r[k])
            change = g / np.sqrt(np.maximum(spread, eps * eps))
            size = max(1.0, np.linalg.norm(change) / math.sqrt(change.size))
            p[k] = p[k] - alpha / size * change
    return p


@pytest.mark.parametrize(
    ("opt", "expected"),
    [
        (optim.lion(0.01), lambda: numpy_lion(0.01, 0.9, 0.99, 0.0)),
        (optim.lion(0.01, 0.95, 0.98, 0.1), lambda: numpy_lion(0.01, 0.95, 0.98, 0.1)),
        (optim.rmsprop(0.01), lambda: torch_rmsprop(0.01, 0.99, 0.0, 0.0, False)),
        (
            optim.rmsprop(0.01, 0.9, weight_decay=0.1, momentum=0.9, centered=True),
            lambda: torch_rmsprop(0.01, 0.9, 0.1, 0.9, True),
        ),
        (optim.rmsprop(0.01, centered=True), lambda: torch_rmsprop(0.01, 0.99, 0.0, 0.0, True)),
        (optim.adafactor(), lambda: torch_adafactor(0.01, 0.0)),
        (optim.adafactor(0.3, weight_decay=0.1), lambda: torch_adafactor(0.3, 0.1)),
    ],
    ids=["lion", "lion-decay", "rmsprop", "rmsprop-all", "rmsprop-centered", "adafactor", "decay"],
)
def test_formulas(opt: Any, expected: Callable[[], dict]) -> None:
    model, state = train(opt)
    assert int(state.step) == 100
    assert_close(model, expected(), atol=1e-6)


def test_lion_moves_by_the_rate_alone() -> None:
    model, _ = train(optim.lion(0.25), steps=1)
    np.testing.assert_allclose(np.abs(model["w"] - start()["w"]), 0.25, rtol=1e-6)


def test_groups_have_their_own_settings() -> None:
    opt = optim.groups(optim.sgd(0.1, weight_decay=0.5), {"b*": {"lr": 0.3, "weight_decay": 0.0}})
    model, state = train(opt, steps=10)
    apart = {"w": train(optim.sgd(0.1, weight_decay=0.5), steps=10)[0]["w"]}
    apart["b"] = train(optim.sgd(0.3), steps=10)[0]["b"]
    assert_close(model, apart)
    assert int(state.step) == 10
    stays, _ = train(optim.groups(optim.adamw(0.1), {"w": optim.frozen()}), steps=3)
    np.testing.assert_array_equal(stays["w"], start()["w"])
    assert (stays["b"] != 0).all()


def test_the_first_pattern_counts_and_every_pattern_names_something() -> None:
    opt = optim.groups(optim.sgd(1.0), {"*": {"lr": 0.5}, "w": optim.frozen()})
    with pytest.raises(TraceError, match="no parameter's name matches the group 'w'"):
        opt.init(pytree.tree_map(array, start()))


def test_groups_leave_states_of_modules_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 3, key=0), nn.BatchNorm(3))
    opt = optim.groups(optim.adamw(0.1), {"*.bias": {"weight_decay": 0.0}})
    update = interpreted(opt.update, model, opt.init(model), model)
    new, _ = update(model, opt.init(model), model)  # the weights as their own gradients
    np.testing.assert_array_equal(new.layers[1].running_var, np.ones(3))
    assert (new.layers[1].weight < 0.95).all()


def test_accumulated_gradients_are_one_update_along_their_mean() -> None:
    model, state = train(optim.accumulate(optim.adamw(0.05), 3), steps=11)
    assert (int(state.seen), int(state.step)) == (11, 3)

    def mean(i: int, _: Any) -> dict:
        parts = [gradient(3 * i + k) for k in range(3)]
        return {k: sum(p[k] for p in parts) / 3 for k in parts[0]}

    whole, _ = train(optim.adamw(0.05), steps=3, change=mean)
    assert_close(model, whole, rtol=1e-6)
    np.testing.assert_allclose(state.total["w"], gradient(9)["w"] + gradient(10)["w"], rtol=1e-6)


def test_the_average_follows_the_model() -> None:
    model, state = train(optim.ema(optim.sgd(0.1), 0.9), steps=20)
    plain, average = start(), start()
    for i in range(20):
        plain = {k: v - 0.1 * gradient(i)[k] for k, v in plain.items()}
        average = {k: 0.9 * v + 0.1 * plain[k] for k, v in average.items()}
    assert_close(model, plain)
    assert_close(state.average, average)


def test_scaled_losses_skip_what_overflows() -> None:
    opt = optim.scaled(optim.sgd(0.1, 0.9), initial=8.0, interval=3)
    scales: list[float] = []

    def change(i: int, state: Any) -> dict:
        scale = float(state.scale)
        scales.append(scale)
        if i == 4:
            return {"w": np.full((3, 4), np.inf), "b": np.zeros(4)}
        return {k: g * scale for k, g in gradient(i).items()}

    model, state = train(opt, steps=9, change=change)
    assert scales == [8, 8, 8, 16, 16, 8, 8, 8, 16]
    assert int(state.step) == 8
    kept = [i for i in range(9) if i != 4]
    assert_close(
        model, train(optim.sgd(0.1, 0.9), steps=8, change=lambda i, _: gradient(kept[i]))[0]
    )


@pytest.mark.parametrize("value", [np.nan, 0.0])
def test_the_factor_of_a_loss_comes_back_from_any_run_of_steps(value: float) -> None:
    opt = optim.scaled(optim.sgd(0.0), interval=1)
    update = eg.compile(lambda s, g: opt.update(g, s, g)[1], name="update")
    state = opt.init({"w": np.zeros(3, np.float32)})
    for _ in range(160):  # 2^16 doubled so often is infinite, halved so often 0
        state = update(state, {"w": np.full(3, value, np.float32)})
    assert float(state.scale) == (2.0**96 if value == 0.0 else 2.0**-24)
    other = np.full(3, 0.0 if np.isnan(value) else np.nan, np.float32)
    assert float(update(state, {"w": other}).scale) == (2.0**95 if value == 0.0 else 2.0**-23)


def test_clipped_is_clipping_before_the_update() -> None:
    found, _ = train(optim.clipped(optim.sgd(0.1), norm=0.5, value=0.4), steps=5)
    plain = start()
    for i in range(5):
        g = {k: np.clip(v, -0.4, 0.4) for k, v in gradient(i).items()}
        norm = math.sqrt(sum((v * v).sum() for v in g.values()))
        plain = {k: v - 0.1 * g[k] * min(1, 0.5 / (norm + 1e-6)) for k, v in plain.items()}
    assert_close(found, plain)


def test_all_of_them_inside_one_compiled_step() -> None:
    inner = optim.groups(optim.lion(0.01), {"b": optim.adafactor(0.1)})
    opt = optim.scaled(optim.accumulate(optim.ema(optim.clipped(inner, norm=1.0), 0.5), 2), 4.0)
    model = pytree.tree_map(array, start())
    state: Any = opt.init(model)
    slow = interpreted(opt.update, model, state, model)
    fast = eg.compile(opt.update, donate=("model", "state"), name="all_of_them")
    other, slow_state = start(), opt.init(pytree.tree_map(array, start()))
    for i in range(6):
        grads = {k: (4 * g).astype(np.float32) for k, g in gradient(i).items()}
        model, state = fast(model, state, grads)
        other, slow_state = slow(other, slow_state, grads)
    assert int(state.step) == 3
    assert_close({k: v.numpy() for k, v in model.items()}, other, rtol=1e-5, atol=1e-6)
    average = {k: v.numpy() for k, v in state.inner.inner.average.items()}
    assert_close(average, slow_state.inner.inner.average, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.accumulate(optim.sgd(1.0), 0), "at least 1 gradient an update, got 0"),
        (lambda: optim.ema(optim.sgd(1.0), 1.5), "0 <= decay <= 1, got 1.5"),
        (lambda: optim.clipped(optim.sgd(1.0)), "a norm or a value"),
    ],
)
def test_settings_say_what_they_need(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.models
@pytest.mark.parametrize(
    ("name", "settings", "ours"),
    [
        ("SGD", {"lr": 0.05}, optim.sgd(0.05)),
        (
            "SGD",
            {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            optim.sgd(0.05, 0.9, True, 0.1),
        ),
        ("Adam", {"lr": 0.01, "weight_decay": 0.1}, optim.adam(0.01, weight_decay=0.1)),
        ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, optim.adamw(0.01, weight_decay=0.1)),
        (
            "RMSprop",
            {"lr": 0.01, "alpha": 0.9, "momentum": 0.9, "centered": True},
            optim.rmsprop(0.01, 0.9, momentum=0.9, centered=True),
        ),
        ("Adafactor", {"lr": 0.1, "weight_decay": 0.1}, optim.adafactor(0.1, weight_decay=0.1)),
    ],
)
def test_torch_gives_the_same(name: str, settings: dict[str, Any], ours: Any) -> None:
    torch = pytest.importorskip("torch")
    params = {k: torch.tensor(v, dtype=torch.float32) for k, v in start().items()}
    theirs = getattr(torch.optim, name)(list(params.values()), **settings)
    model = pytree.tree_map(lambda v: array(v.astype(np.float32)), start())
    state = ours.init(model)
    update = eg.compile(ours.update, donate=("model", "state"), name=f"update_{name}")
    for i in range(100):
        for k, g in gradient(i).items():
            params[k].grad = torch.tensor(g, dtype=torch.float32)
        theirs.step()
        grads = {k: g.astype(np.float32) for k, g in gradient(i).items()}
        model, state = update(model, state, grads)
    expected = {k: v.numpy() for k, v in params.items()}
    assert_close({k: v.numpy() for k, v in model.items()}, expected, rtol=1e-5, atol=3e-6)
