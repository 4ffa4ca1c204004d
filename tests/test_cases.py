"""Known answers through the compiled path, with and without optimization."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn

_spec = importlib.util.spec_from_file_location(
    "known_answers", Path(__file__).with_name("known_answers.py")
)
known = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(known)
CASES = {c["name"]: c for c in known.CASES}


@pytest.fixture(params=[True, False], ids=["optimized", "separate"])
def run(request):
    """Compile a function, call it, give NumPy arrays."""

    def call(function, *args):
        out = eg.compile(function, optimize=request.param)(*args)
        return eg.tree_map(lambda a: np.asarray(a), out)

    return call


def given(name):
    inputs, expected = CASES[name]["fn"]()
    return inputs, expected, CASES[name]["tol"]


def close(got, want, tol):
    np.testing.assert_allclose(got, want, rtol=tol, atol=tol)


def test_every_case_is_tested():
    tested = {n.removeprefix("test_") for n in globals() if n.startswith("test_")}
    assert set(CASES) <= tested


def test_inf_times_variable(run):
    i, want, tol = given("inf_times_variable")
    close(run(lambda x: x * np.inf, i["x"]), want, tol)


def test_neg_inf_fill(run):
    i, want, _ = given("neg_inf_fill")
    out, top = run(
        lambda x, m: (eg.where(m, x, -np.inf), eg.where(m, x, -np.inf).max()), i["x"], i["m"]
    )
    assert np.array_equal(out, want)
    assert top == 3
    assert run(lambda: eg.full((5,), -np.inf).max()) == -np.inf


def test_where_dead_branch_forward(run):
    i, want, _ = given("where_dead_branch_forward")
    assert np.array_equal(run(eg.where, i["c"], i["a"], i["b"]), want)


def test_tanh_saturates(run):
    i, want, tol = given("tanh_saturates")
    close(run(eg.tanh, i["x"]), want, tol)


def test_ieee_basics(run):
    i, want, tol = given("ieee_basics")
    got = run(
        lambda a, b, c, d: {
            "div0": a / 0.0,
            "log": eg.log(b),
            "sqrt": eg.sqrt(c),
            "exp": eg.exp(d),
        },
        i["a"],
        np.array([0, -1, 1], np.float32),
        np.array([-1, 0, 4], np.float32),
        np.array([100, -200, 0], np.float32),
    )
    for k in want:
        close(got[k], want[k], tol)


def test_softmax_axis1(run):
    i, want, tol = given("softmax_axis1")
    close(run(lambda x: nn.softmax(x, axis=i["axis"]), i["x"]), want, tol)


def test_ce_far_target(run):
    i, want, tol = given("ce_far_target")
    value, grad = run(
        lambda z, t: eg.value_and_grad(nn.cross_entropy)(z, t), i["logits"], i["target"]
    )
    close(value, want["loss"], tol)
    close(grad, want["grad"], tol)


def test_sdpa_fully_masked_row(run):
    i, want, tol = given("sdpa_fully_masked_row")

    def loss(q, k, v, mask):
        out = nn.scaled_dot_product_attention(q, k, v, mask)
        return out.sum(), out

    (_, out), grads = run(
        lambda *a: eg.value_and_grad(loss, (0, 1, 2), has_aux=True)(*a), *i.values()
    )
    close(out, want, tol)
    assert all(np.isfinite(g).all() for g in grads)
    assert not grads[0][0, 0, 1].any()


def test_sdpa_causal_lq_ne_lk(run):
    i, want, tol = given("sdpa_causal_lq_ne_lk")
    for kind in ("bottom-right", "top-left"):
        out = run(
            lambda q, k, v, kind=kind: nn.scaled_dot_product_attention(q, k, v, causal=kind),
            *i.values(),
        )
        close(out, want[kind.replace("-", "_")], tol)


def test_gqa_head_map(run):
    i, want, tol = given("gqa_head_map")
    close(run(nn.scaled_dot_product_attention, i["q"], i["k"], i["v"]), want, tol)


def test_grad_max_ties(run):
    i, want, tol = given("grad_max_ties")
    close(run(eg.grad(lambda x: x.max()), i["x"]), want, tol)


def test_pow_negative_base(run):
    i, want, tol = given("pow_negative_base")
    got = run(lambda x: {str(p): eg.power(x, p) for p in want}, i["x"])
    for p in want:
        close(got[str(p)], want[p], tol)


def test_grad_gather_duplicates(run):
    i, want, tol = given("grad_gather_duplicates")
    close(run(eg.grad(lambda t, ids, ct: (eg.take(t, ids, 0) * ct).sum()), *i.values()), want, tol)


def test_layernorm_large_mean(run):
    i, want, tol = given("layernorm_large_mean")
    for m in i["means"]:
        row = (np.float32(m) + np.arange(16, dtype=np.float32) * np.float32(1e-3)).astype(
            np.float32
        )
        close(run(nn.layer_norm, row[None])[0, :3], want[m], tol)


def test_zero_size(run):
    i, want, _ = given("zero_size")
    a = i["a"]
    assert run(lambda x: x.max(axis=0), a).shape == want["max0_shape"].shape
    close(run(lambda x: x.sum(axis=1), a), want["sum1"], 0)
    assert np.isnan(run(lambda x: x.mean(axis=1), a)).all()
    close(run(eg.matmul, a, np.zeros((0, 3), np.float32)), want["matmul"], 0)
    with pytest.raises(ValueError, match="max over no elements"):
        run(lambda x: x.max(axis=1), a)


def test_matmul_broadcast_odd(run):
    i, want, tol = given("matmul_broadcast_odd")
    close(run(eg.matmul, i["a"], i["b"]), want["ab"], tol)
    close(run(eg.matmul, i["c"], i["c"]), want["cc"], tol)


def test_permute_then_reduce(run):
    i, want, tol = given("permute_then_reduce")
    got = run(
        lambda x: ((x.transpose((2, 0, 1)) * 2).sum(-1)[:3], (x.transpose((2, 0, 1)) * 2).sum()),
        i["x"],
    )
    close(got[0], want["sum_last"], tol)
    close(got[1], want["sum_all"], tol)


def test_multi_axis_reduce(run):
    i, want, tol = given("multi_axis_reduce")
    close(run(lambda x: x.sum((1, 2), keepdims=True), i["x"]), want["keep"], tol)
    close(run(lambda x: x.sum((-1, 1)), i["x"]), want["flat"], tol)


def test_argmax_ties(run):
    i, want, _ = given("argmax_ties")
    assert np.array_equal(
        run(lambda a: a.argmax(1), i["a"]), want["a"] if isinstance(want, dict) else want[0]
    )
    assert run(lambda b: (~b).argmax(), i["b"]) == 0


def test_int_wraparound(run):
    i, want, _ = given("int_wraparound")
    assert np.array_equal(run(lambda x: x | i["c"], i["x"].astype(np.int32)), want["or_"])
    assert run(lambda x: x.sum(), np.array([2**31 - 1, 1], np.int32)) == want["sum"]


def test_dispatch_over_65535(run):
    i, want, _ = given("dispatch_over_65535")
    out = run(
        eg.matmul,
        np.full((i["batch"], 3, 3), 2, np.float32),
        np.full((i["batch"], 3, 3), 2, np.float32),
    )
    assert (out == want["matmul_every"]).all()
    assert run(lambda x: x + 1.0, np.zeros(i["n"], np.float32))[-1] == want["add_one_last"]


def test_long_sum(run):
    _, want, _ = given("long_sum")
    ones = np.ones(2**24 + 64, np.float32)
    total, mean = run(lambda x: (x.sum(), x.mean()), ones)
    assert total == want["sum"]
    assert abs(mean - want["mean"]) < 1e-6


def test_repeated_layers_share_their_shaders(run):
    """Layers of one structure are lowered once and still keep their own values."""
    rng = np.random.default_rng(0)
    ws = [rng.standard_normal((33, 33)).astype(np.float32) / 6 for _ in range(4)]
    x = rng.standard_normal((5, 33)).astype(np.float32)

    def model(x, ws):
        for w in ws:
            x = nn.layer_norm(eg.tanh(x @ w)) + x
        return x, x.sum()

    want = x.astype(np.float64)
    for w in ws:
        h = np.tanh(want @ w)
        c = h - h.mean(-1, keepdims=True)
        want = c / np.sqrt((c * c).mean(-1, keepdims=True) + 1e-5) + want
    got, total = run(model, x, ws)
    close(got, want, 2e-5)
    close(total, want.sum(), 1e-4)
