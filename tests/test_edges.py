"""The edges: what is right where shapes and numbers end."""

from __future__ import annotations

import gc
import math
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler.errors import CompileError
from eggpu.compiler.pipeline import Options, compile_graph
from eggpu.compiler.reference import evaluate
from eggpu.compiler.types import parse_type

sys.path.insert(0, str(Path(__file__).parent))
from separate_runs import both_ways, f32  # noqa: F401

INF, NAN = math.inf, math.nan


# NaN and infinities, also as constants


def test_infinities_and_nan_as_constants(run):
    x = f32(0, 1, -2, INF, -INF, NAN)
    got = run(lambda x: (x * INF, x + NAN, x - INF, eg.maximum(x, -INF), eg.minimum(x, INF), x * 0.0,
                         x / 0.0, 0.0 / x, eg.where(x > 0, INF, -INF), eg.full((3,), NAN), x - x, x == x, x != x), x)  # fmt: skip
    with np.errstate(all="ignore"):
        want = (x * INF, x + NAN, x - INF, np.maximum(x, -INF), np.minimum(x, INF), x * 0, x / np.float32(0),
                0 / x, np.where(x > 0, INF, -INF), np.full(3, NAN), x - x, x == x, x != x)  # fmt: skip
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(g, w, equal_nan=g.dtype.kind == "f"), (g, w)


def test_constant_expressions_are_not_folded_wrong(run):
    got = run(lambda: (eg.array(0.0) / 0.0, eg.log(eg.array(-1.0)), eg.exp(eg.array(1000.0)), eg.array(INF) - INF,
                       eg.sqrt(eg.array(-1.0)), eg.array(3e38) * 10.0))  # fmt: skip
    assert np.array_equal(got, [NAN, NAN, INF, NAN, NAN, INF], equal_nan=True)


def test_reductions_with_nan_and_infinities(run):
    x = np.array([[1, NAN, 2], [INF, -INF, 0], [INF, 1, 2], [-INF, -INF, -INF]], np.float32)
    got = run(
        lambda x: (
            x.sum(1),
            x.max(1),
            x.min(1),
            x.prod(1),
            eg.logsumexp(x, 1),
            x.argmax(1),
            x.argmin(1),
            x.any(1),
            x.all(1),
        ),
        x,
    )
    with np.errstate(all="ignore"):
        lse = f32(NAN, INF, INF, -INF)
        want = (
            x.sum(1),
            x.max(1),
            x.min(1),
            x.prod(1),
            lse,
            x.argmax(1),
            x.argmin(1),
            x.any(1),
            x.all(1),
        )
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(g, w, equal_nan=g.dtype.kind == "f"), (g, w)


def test_argmax_ties_and_nan(run):
    x = np.array([[1, 5, 5, 2], [NAN, 9, NAN, 1], [-INF] * 4, [INF, INF, 0, NAN]], np.float32)
    n = np.array([[-3, -3, -7], [7, 7, 7]], np.int32)
    got = run(
        lambda x, n: (x.argmax(1), x.argmin(1), x.argmax(0), x.argmax(), n.argmax(1), n.argmin(1)),
        x,
        n,
    )
    want = (x.argmax(1), x.argmin(1), x.argmax(0), x.argmax(), n.argmax(1), n.argmin(1))
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(g, w)


def test_sorting_with_nan_and_infinities(run):
    x = f32(3, NAN, -INF, 0, INF, -0.0, NAN, -1)
    got = run(
        lambda x: (eg.sort(x), eg.argsort(x), eg.topk(x, 3)[1], eg.cummax(x), eg.cumsum(x)), x
    )
    with np.errstate(all="ignore"):
        want = (
            np.sort(x),
            np.argsort(x, kind="stable"),
            [1, 6, 4],
            np.maximum.accumulate(x),
            np.cumsum(x),
        )
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(g, w, equal_nan=g.dtype.kind == "f"), (g, w)


# softmax


def test_softmax_of_huge_equal_infinite_and_single_elements(run):
    rows = np.array(
        [
            [1e38, 1e38, -1e38],
            [-3e38, -3e38, -3e38],
            [5, -INF, 5],
            [88, 89, 1000],
            [-1000, -1001, -2000],
        ],
        np.float32,
    )
    single = f32(3, -1e38, 0).reshape(3, 1)
    soft, logs, one, zero, axis0 = run(
        lambda x, s: (
            nn.softmax(x),
            nn.log_softmax(x),
            nn.softmax(s),
            nn.log_softmax(s),
            nn.softmax(x, 0),
        ),
        rows,
        single,
    )
    wide = rows.astype(np.float64)
    shifted = wide - wide.max(1, keepdims=True)
    want = np.exp(shifted) / np.exp(shifted).sum(1, keepdims=True)
    np.testing.assert_allclose(soft, want, rtol=1e-6, atol=1e-37)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(
            logs, shifted - np.log(np.exp(shifted).sum(1, keepdims=True)), rtol=1e-6
        )
    assert np.array_equal(one, np.ones((3, 1)))
    assert np.array_equal(zero, np.zeros((3, 1)))
    assert np.isfinite(axis0).all()


def test_softmax_of_all_minus_infinity_and_of_nan_is_nan(run):
    x = np.array([[-INF, -INF], [NAN, 1], [INF, 1]], np.float32)
    assert np.isnan(run(nn.softmax, x)).all()


def test_gradients_of_softmax_at_its_ends(run):
    x = np.array([[1e30, 0, -1e30], [7, 7, 7], [0, -INF, 0]], np.float32)
    grad = run(eg.grad(lambda x: (nn.softmax(x)[:, 0] * 3).sum()), x)
    p = np.array([[1, 0, 0], [1 / 3] * 3, [0.5, 0, 0.5]])
    np.testing.assert_allclose(grad, 3 * p[:, :1] * (np.eye(3)[0] - p), atol=1e-6)


# attention


@pytest.mark.parametrize("form", ["mask", "causal"])
def test_fully_masked_rows_of_attention_are_zero_with_zero_gradients(run, form):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, n, 4)).astype(np.float32) for n in (5, 4, 4))
    if form == "causal":  # queries 0 and 1 come before every key
        q = rng.standard_normal((2, 3, 6, 4)).astype(np.float32)
        options, hidden = {"causal": "bottom-right"}, [0, 1]
    else:
        mask = rng.random((5, 4)) < 0.6
        mask[[1, 3]], mask[0, 0] = False, True
        options = {"mask": mask}
        hidden = [1, 3]

    def loss(q, k, v):
        out = nn.scaled_dot_product_attention(q, k, v, **options)
        return (out * out).sum(), out

    (_, out), grads = run(eg.value_and_grad(loss, (0, 1, 2), has_aux=True), q, k, v)
    assert not out[:, :, hidden].any()
    assert not grads[0][:, :, hidden].any()
    assert all(np.isfinite(g).all() for g in grads)
    assert out[:, :, [n for n in range(out.shape[2]) if n not in hidden]].all()


# norms and long sums


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e3, 1e4, -1e5])
def test_layer_norm_of_a_row_with_a_large_mean(run, mean):
    spread = 1.0 if abs(mean) > 1e3 else 1e-2
    x = (mean + spread * np.random.default_rng(0).standard_normal((3, 257))).astype(np.float32)
    wide = x.astype(np.float64)
    rest = wide - wide.mean(1, keepdims=True)
    want = rest / np.sqrt((rest * rest).mean(1, keepdims=True) + 1e-5)
    got, var = run(lambda x: (nn.layer_norm(x), x.var(1)), x)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(var, wide.var(1), rtol=1e-4)


def test_norm_of_equal_elements_is_zero(run):
    x = np.full((2, 5), 1e4, np.float32)
    got, grad = run(
        lambda x: (nn.layer_norm(x), eg.grad(lambda x: (nn.layer_norm(x) ** 2).sum())(x)), x
    )
    assert not got.any()
    assert np.isfinite(grad).all()


def test_sums_of_2_to_the_24_ones_are_exact(run):
    n = 2**24 + 3
    x = np.ones(n, np.float32)
    total, mean, column, count = run(
        lambda x: (x.sum(), x.mean(), x[: 2**24].reshape(2**12, 2**12).sum(0).sum(), (x > 0).sum()),
        x,
    )
    assert total == np.float32(n)
    assert mean == 1
    assert column == 2**24
    assert count == n


# integers


def test_integers_wrap_around(run):
    n = np.array([2**31 - 1, -(2**31), -1, 65536], np.int32)
    u = np.array([2**32 - 1, 2**31, 1, 65536], np.uint32)
    got = run(lambda n, u: (n + 1, n * n, -n, eg.abs(n), n - 3, n.sum(), n.prod(), eg.cumsum(n), u + 1, u * u, -u, u - 3, u.sum(), n**3,
                            n // -1, n % 7, u // 7, n << 4, n >> 4, u >> 4, ~n, n | 0xFFFFFFFF, n @ n), n, u)  # fmt: skip
    with np.errstate(over="ignore"):
        want = (n + 1, n * n, -n, np.abs(n), n - 3, n.sum(dtype=np.int32), n.prod(dtype=np.int32), n.cumsum(dtype=np.int32), u + 1, u * u,
                -u, u - np.uint32(3), u.sum(dtype=np.uint32), n * n * n, n // -1, n % 7, u // 7, n << 4, n >> 4, u >> 4, ~n, n | -1, n @ n)  # fmt: skip
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        assert np.array_equal(g, w), (k, g, w)


def test_large_integers_stay_exact(run):
    n = np.array([16777217, 2**31 - 1, -16777219], np.int32)
    got = run(
        lambda n: (
            n + 0,
            n.max(),
            eg.where(n > 0, n, 0),
            n.astype("u32"),
            eg.sort(n),
            n[::-1],
            eg.maximum(n, 16777218),
        ),
        n,
    )
    want = (
        n,
        n.max(),
        np.where(n > 0, n, 0),
        n.astype(np.uint32),
        np.sort(n),
        n[::-1],
        np.maximum(n, 16777218),
    )
    for g, w in zip(got, want, strict=True):
        assert np.array_equal(g, w)


# masked branches


def test_masked_branches_never_poison_values_or_gradients(run):
    x = f32(-2, 0, 3, INF, NAN)
    safe = [
        (lambda v: eg.where(v > 0, eg.sqrt(v), v), f32(1, 1, 0.5 / math.sqrt(3), 0, 1)),
        (lambda v: eg.where(v > 0, v * eg.log(v), 0.0), f32(0, 0, 1 + math.log(3), NAN, 0)),
        (lambda v: eg.where(v == 3, 1 / (v - 2.5), 2.0), f32(0, 0, -4, 0, 0)),
        (
            lambda v: eg.where(eg.isfinite(v), eg.exp(v * 0.5), 1.0),
            f32(0.5 / math.e, 0.5, 0.5 * math.exp(1.5), 0, 0),
        ),
        (lambda v: eg.where(v < 0, eg.prod(eg.stack([v, v]), 0), 0.0), f32(-4, 0, 0, 0, 0)),
        (
            lambda v: eg.where(v > 1e30, 0.0, eg.max(eg.stack([v, v * 2]), 0) ** 2),
            f32(-4, 0, 24, 0, NAN),
        ),
    ]
    for k, (function, want) in enumerate(safe):
        got = run(eg.grad(lambda v, g=function: g(v).sum()), x)
        np.testing.assert_allclose(got, want, rtol=1e-5, err_msg=str(k))


def test_the_gradient_of_where_at_a_negative_number_is_one():
    assert eg.grad(lambda x: eg.where(x > 0, eg.sqrt(x), x))(np.float32(-4)).item() == 1.0


# gradients where mathematics leaves a choice (docs/ops.md)


def test_chosen_gradients(run):
    zero = f32(0, 0)
    cases = [
        (lambda x: eg.abs(x), zero, [0, 0]), (lambda x: nn.relu(x), zero, [0, 0]), (lambda x: eg.sqrt(x), zero, [INF, INF]),
        (lambda x: eg.norm(x), zero, [0, 0]), (lambda x: eg.max(x), f32(2, 2), [0.5, 0.5]), (lambda x: eg.min(x), f32(2, 2), [0.5, 0.5]),
        (lambda x: eg.maximum(x, 2.0), f32(2, 2), [0.5, 0.5]), (lambda x: eg.clip(x, 0.0, 1.0), f32(0, 1), [0.5, 0.5]),
        (lambda x: eg.std(x), f32(3, 3), [0, 0]), (lambda x: eg.sign(x), zero, [0, 0]), (lambda x: eg.floor(x), f32(1, 2.5), [0, 0]), (lambda x: x**0, zero, [0, 0]),
        (lambda x: eg.power(x, eg.array(f32(0, 2))), zero, [0, 0]), (lambda x: eg.prod(x), f32(0, 3), [3, 0]), (lambda x: eg.prod(x), zero, [0, 0]),
        (lambda x: nn.elu(x, 0.5), zero, [0.5, 0.5]), (lambda x: nn.hardswish(x), f32(-3, 3), [-0.25, 1.25]),
        (lambda x: eg.cummax(x) * eg.array(f32(1, 5)), f32(3, 3), [1, 5]), (lambda x: eg.sort(x) * eg.array(f32(1, 5)), f32(3, 3), [1, 5]),
        (lambda x: x % eg.array(f32(2, 2)), f32(2, 3), [1, 1]), (lambda x: nn.softplus(x), zero, [0.5, 0.5]),
        (lambda x: nn.max_pool1d(x.reshape(1, 1, 2), 2), f32(3, 3), [0.5, 0.5]), (lambda x: eg.trunc(x), f32(1, -2.5), [0, 0]),
        (lambda x: eg.cummax(x), f32(1, 1), [1, 1]), (lambda x: nn.leaky_relu(x), zero, [0.01, 0.01]), (lambda x: nn.l1_loss(x, zero), zero, [0, 0]),
    ]  # fmt: skip
    for k, (function, x, want) in enumerate(cases):
        got = run(eg.grad(lambda v, g=function: g(v).sum()), x)
        np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=f"case {k}")


# half precision


def test_half_precision_needs_a_device_that_has_it():
    target = eg.device().target
    graph = eg.trace(lambda x: x * 2 + 1, parse_type("f16[5]"))
    without = replace(target, features=tuple(f for f in target.features if f != "shader-f16"))
    for optimize in (True, False):
        with pytest.raises(CompileError, match=r"f16.*shader-f16"):
            compile_graph(graph, without, Options(optimize=optimize))


def test_half_precision(run):
    if "shader-f16" not in eg.device().target.features:
        pytest.skip("the device has no shader-f16")
    rng = np.random.default_rng(0)
    x, w = (
        rng.standard_normal((5, 7)).astype(np.float16),
        rng.standard_normal((7, 3)).astype(np.float16),
    )

    def every(x, w):
        y = eg.tanh(x @ w)
        return (
            y,
            x.sum(0),
            nn.softmax(x),
            x.astype("f32"),
            x[:, ::2] * 70000.0,
            eg.cumsum(x, 1),
            eg.grad(lambda w: (eg.tanh(x @ w) ** 2).sum())(w),
        )

    for got, want in zip(
        run(every, x, w), evaluate(eg.trace(every, x, w), [x, w], np.float64), strict=True
    ):
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(got, want.astype(got.dtype), rtol=4e-3, atol=4e-3)


# memory


def test_a_value_found_again_in_an_unreachable_cycle_does_not_end_the_process():
    compiled = eg.compile(lambda x: x + 1)
    x = np.ones(1000, np.float32)
    for _ in range(20):
        cycle = [compiled(x)]
        cycle.append(cycle)
        del cycle
        gc.collect()
        assert compiled(compiled(x)).numpy()[0] == 3


def test_products_do_not_write_over_what_others_still_read(run):
    rng = np.random.default_rng(0)
    x, w = (
        rng.standard_normal((512, 64)).astype(np.float32),
        rng.standard_normal((64, 64)).astype(np.float32) / 8,
    )
    want = x.astype(np.float64)
    for _ in range(4):
        want = want @ w
    np.testing.assert_allclose(
        run(lambda x, w: x @ w @ w @ w @ w, x, w), want, rtol=1e-4, atol=1e-4
    )


def test_numbers_times_numbers_are_no_scores():
    """The report looks for the array below a scale: in the gradient there is none."""

    def loss(x, w):
        return ((x @ w) * 0.5).sum()

    x, w = np.ones((2, 5, 4), np.float32), np.ones((2, 4, 3), np.float32)
    compiled = eg.compile(eg.grad(loss, argnums=(0, 1)), cache=False)
    dx, dw = compiled(x, w)
    np.testing.assert_allclose(dx, np.full(x.shape, 1.5), rtol=1e-6)
    np.testing.assert_allclose(dw, np.full(w.shape, 2.5), rtol=1e-6)
    assert compiled.report.near_misses == ()
