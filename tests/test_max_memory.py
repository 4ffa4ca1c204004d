"""A limit on memory: values computed again, the same results, the price, and what cannot be."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn, optim
from eggpu.compiler.errors import CompileError
from eggpu.compiler.pipeline import Options, compile_graph
from eggpu.compiler.schedule.target import LLVMPIPE
from eggpu.compiler.tracing import trace


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


def product(x, w):
    return eg.tanh(x @ w)


def factors(n=512):
    rng = np.random.default_rng(0)
    return rng.standard_normal((n, n), np.float32), rng.standard_normal((n, n), np.float32)


def test_copies_in_images_are_given_up_first():
    """Just below what arguments, results and images take there is nothing to compute again."""
    graph = trace(product, *factors())
    plan = compile_graph(graph, LLVMPIPE).plan
    assert plan.images
    assert not sum(plan.arena)
    without = plan.peak_bytes - sum(image.nbytes for image in plan.images)
    for most in (plan.peak_bytes - 1, without):
        less = compile_graph(graph, LLVMPIPE, Options(max_memory=most))
        assert less.plan.peak_bytes == without
        assert not less.plan.images
        assert not less.plan.copies
        assert less.memory_price.spared
        assert less.memory_price.ns > less.memory_price.ns_without
        assert "no copies in images" in str(less.memory_price)
    with pytest.raises(CompileError, match=f"the least found.* is {without}"):
        compile_graph(graph, LLVMPIPE, Options(max_memory=without - 1))


def test_products_without_images_are_right():
    x, w = factors()
    free = eg.compile(product, cache=False)
    want = np.tanh(x.astype(np.float64) @ w)
    np.testing.assert_allclose(free(x, w).numpy(), want, atol=1e-4)
    if not free.plan.images:
        pytest.skip("the device reads no images")
    tight = eg.compile(product, cache=False, max_memory=free.plan.peak_bytes - 1)
    np.testing.assert_allclose(tight(x, w).numpy(), want, atol=1e-4)
    assert not tight.plan.images


def test_a_device_that_spares_images_has_the_same_rates():
    """Products of a device without images are as fast as its profile says; one that spares them
    is slower than its profile."""
    graph = trace(product, *factors(2048))
    times = [
        compile_graph(graph, target).plan.kernels[0].predicted_ns
        for target in (LLVMPIPE, LLVMPIPE.sparing(), replace(LLVMPIPE, images=False))
    ]
    assert times[1] > 1.2 * max(times[0], times[2])
    assert LLVMPIPE.sparing().rated() == replace(LLVMPIPE, keeps=False)


def test_a_step_in_the_least_memory_gives_the_same():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((256, 256), np.float32), rng.integers(0, 8, 256).astype(np.int32)
    model = Deep(tuple(nn.Linear(256, 256, key=k) for k in range(3)))
    wide = eg.compile(step, cache=False)
    want, same = run(wide, (model, x, y))
    with pytest.raises(CompileError) as error:
        run(eg.compile(step, max_memory=1, cache=False), (model, x, y))
    least = int(re.search(r"is (\d+)", str(error.value))[1])
    tight = eg.compile(step, max_memory=least, cache=False)
    values, weights = run(tight, (model, x, y))
    np.testing.assert_allclose(values, want, rtol=1e-5)
    for name, weight in same.items():
        np.testing.assert_allclose(weights[name], weight, rtol=1e-3, atol=1e-4, err_msg=name)
    assert tight.plan.peak_bytes <= least < wide.plan.peak_bytes
    assert not tight.plan.images
