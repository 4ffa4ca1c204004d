"""A limit on memory: values computed again, the same results, the price, and what cannot be."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn, optim
from eggpu.compiler.errors import CompileError


def loss(model, x, y):
    return nn.cross_entropy(model(x), y)


OPTIMIZER = optim.adamw(1e-3)


def step(model, state, x, y):
    value, grads = eg.value_and_grad(loss)(model, x, y)
    model, state = OPTIMIZER.update(model, state, grads)
    return model, state, value


@dataclass(frozen=True, repr=False)
class Deep(nn.Module):
    """Gelu after gelu, so that much is kept for the gradients."""

    layers: tuple[nn.Linear, ...]

    def __call__(self, x):
        for layer in self.layers:
            x = nn.gelu(layer(x))
        return x


def deep():
    return Deep(tuple(nn.Linear(32, 32, key=k) for k in range(5)))


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 32), np.float32)
    return deep(), x, rng.integers(0, 8, 512).astype(np.int32)


@pytest.fixture(scope="module")
def free(given):
    model, x, y = given
    compiled = eg.compile(step, cache=False)
    compiled.compile(model, OPTIMIZER.init(model), x, y)
    return compiled


def run(compiled, given):
    model, x, y = given
    state, values = OPTIMIZER.init(model), []
    for _ in range(2):
        model, state, value = compiled(model, state, x, y)
        values.append(float(value))
    return values, {k: v.numpy() for k, v in nn.state_dict(model).items()}


@pytest.mark.parametrize("share", [0.9, 0.7])
def test_a_limit_is_kept_and_the_results_are_the_same(free, given, share):
    most = int(free.plan.peak_bytes * share)
    tight = eg.compile(step, max_memory=most, cache=False)
    values, weights = run(tight, given)
    want, same = run(free, given)
    np.testing.assert_allclose(values, want, rtol=1e-5)
    for name, weight in same.items():
        np.testing.assert_allclose(weights[name], weight, rtol=1e-4, atol=1e-5, err_msg=name)
    assert tight.plan.peak_bytes <= most < free.plan.peak_bytes
    assert tight.plan.total_bytes >= tight.plan.peak_bytes
    price = tight.report.memory
    assert price.limit == most
    assert price.peak == tight.plan.peak_bytes
    assert price.peak_without == free.plan.peak_bytes
    assert price.ns > price.ns_without
    assert f"max_memory {most} bytes: peak {price.peak} instead of" in str(tight.report)


def test_less_memory_costs_more(free, given):
    model, x, y = given
    prices = []
    for share in (0.9, 0.8, 0.7):
        tight = eg.compile(step, max_memory=int(free.plan.peak_bytes * share), cache=False)
        tight.compile(model, OPTIMIZER.init(model), x, y)
        prices.append(tight.report.memory.ns)
    assert prices == sorted(prices)


def test_a_limit_that_is_no_limit_changes_nothing(free, given):
    model, x, y = given
    wide = eg.compile(step, max_memory=1 << 40, cache=False)
    wide.compile(model, OPTIMIZER.init(model), x, y)
    assert wide.plan == free.plan
    assert wide.report.memory.again == 0
    assert free.report.memory is None


def test_what_cannot_be_is_refused_with_the_least(given):
    model, x, y = given
    arguments = model, OPTIMIZER.init(model), x, y
    with pytest.raises(CompileError, match=r"max_memory=1000 bytes: .* the least found") as error:
        eg.compile(step, max_memory=1000, cache=False).compile(*arguments)
    least = int(re.search(r"is (\d+)", str(error.value))[1])
    plan = eg.compile(step, max_memory=least, cache=False).compile(*arguments).plan
    assert plan.peak_bytes <= least
    with pytest.raises(CompileError, match="above 0, got -1"):
        eg.compile(step, max_memory=-1, cache=False).compile(*arguments)


def test_without_optimization_values_are_computed_again_too(given):
    plain = eg.compile(step, optimize=False, cache=False)
    want, _ = run(plain, given)
    most = int(plain.plan.peak_bytes * 0.85)
    tight = eg.compile(step, optimize=False, max_memory=most, cache=False)
    values, _ = run(tight, given)
    np.testing.assert_allclose(values, want, rtol=1e-5)
    assert tight.plan.peak_bytes <= most
    assert len(tight.plan.kernels) > len(plain.plan.kernels)
