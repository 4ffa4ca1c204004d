"""Gradients on primitives: against finite differences in float64, and their rules at the edges."""

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.library import nn
from eggpu.compiler.reference import evaluate
from eggpu.compiler.tracing import trace_call


def gradients(function, *args):
    """Analytic and numeric gradients of sum(function(*args) * weights), in float64."""
    rng = np.random.default_rng(7)
    out = evaluate(trace_call(function, args).graph, args, np.float64)[0]
    weights = rng.standard_normal(out.shape)

    def loss(*xs):
        return eg.sum(function(*xs) * eg.array(weights))

    numbers = tuple(range(len(args)))
    both = trace_call(lambda *xs: eg.grad(loss, numbers)(*xs), args).graph
    analytic = evaluate(both, args, np.float64)
    graph = trace_call(function, args).graph
    numeric = []
    for k, x in enumerate(args):
        g = np.zeros(x.shape)
        for i in np.ndindex(*x.shape):
            ends = []
            for h in (1e-5, -1e-5):
                moved = [np.array(a, np.float64) for a in args]
                moved[k][i] += h
                ends.append(
                    (evaluate(graph, moved, np.float64)[0] * weights.astype(np.float32)).sum()
                )
            g[i] = (ends[0] - ends[1]) / 2e-5
        numeric.append(g)
    return analytic, numeric


def check(function, *args):
    for a, n in zip(*gradients(function, *args), strict=True):
        np.testing.assert_allclose(a, n, rtol=2e-5, atol=2e-6)


def rand(*shape, seed=0, positive=False):
    x = np.random.default_rng(seed).standard_normal(shape)
    return (np.abs(x) + 0.5 if positive else x).astype(np.float32)


@pytest.mark.parametrize("name", ["exp", "tanh", "sin", "cos", "square", "abs"])
def test_unary(name):
    check(getattr(eg, name), rand(3, 5))


@pytest.mark.parametrize("name", ["log", "sqrt", "rsqrt"])
def test_unary_positive(name):
    check(getattr(eg, name), rand(3, 5, positive=True))


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "divide", "maximum", "minimum"])
def test_binary_through_broadcasting(name):
    check(getattr(eg, name), rand(2, 3, 5), rand(3, 1, seed=1, positive=True))


@pytest.mark.parametrize("axis", [None, 0, 1, (0, 2), -1])
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min", "prod", "var", "logsumexp"])
def test_reductions(name, axis):
    check(lambda x: getattr(eg, name)(x, axis=axis), rand(2, 3, 4))


def test_prod_with_zeros():
    x = np.array([[2.0, 0.0, 3.0], [0.0, 0.0, 5.0], [1.0, 2.0, 4.0]], np.float32)
    check(lambda v: eg.prod(v, axis=1), x)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[::-1, 1:4:2],
        lambda x: x[:, ::-2],
        lambda x: x[None, ..., 2],
        lambda x: x[np.array([0, 2, 0, -1])],
        lambda x: x[np.array([0, 2]), np.array([1, 4])],
        lambda x: eg.pad(x, ((1, 2), (0, 3)), "constant", 2.0),
        lambda x: eg.concatenate([x, x * 2, x[:1]], 0),
        lambda x: eg.transpose(x).reshape(5, 3, 1) * 2,
        lambda x: eg.flip(x, 1),
        lambda x: eg.stack(eg.split(x, [2], axis=1)[0:1] * 2, 1),
        lambda x: eg.tril(x, 1),
        lambda x: eg.take_along_axis(x, np.array([[0, 4], [1, 1], [2, 0]]), 1),
    ],
)
def test_movement(function):
    check(function, rand(3, 5))


@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 4), (4, 5)),
        ((2, 3, 4), (4, 5)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((4,), (4, 5)),
        ((4,), (4,)),
    ],
)
def test_matmul(shapes):
    check(eg.matmul, rand(*shapes[0]), rand(*shapes[1], seed=1))


@pytest.mark.parametrize(
    "function", [nn.softmax, nn.log_softmax, nn.gelu if hasattr(nn, "gelu") else nn.softmax]
)
def test_nn_functions(function):
    check(function, rand(3, 5))


def test_layer_norm():
    check(lambda x, w, b: nn.layer_norm(x, w, b), rand(3, 7), rand(7, seed=1), rand(7, seed=2))


def test_attention_with_everything():
    mask = np.ones((5, 7), bool)
    mask[2] = False
    q, k, v = rand(1, 4, 5, 3), rand(1, 2, 7, 3, seed=1), rand(1, 2, 7, 6, seed=2)
    check(
        lambda a, b, c: nn.scaled_dot_product_attention(a, b, c, mask, causal="bottom-right"),
        q,
        k,
        v,
    )


def test_masked_row_is_zero_with_zero_gradient():
    mask = np.ones((3, 3), bool)
    mask[1] = False
    q = rand(3, 2)
    out = nn.scaled_dot_product_attention(q, q, q + 1, mask)
    assert np.array_equal(out.numpy()[1], [0, 0])
    g = eg.grad(lambda x: nn.scaled_dot_product_attention(x, q, q, mask).sum())(q).numpy()
    assert np.array_equal(g[1], [0, 0])
    assert np.isfinite(g).all()


def test_repeated_operands_and_middle_of_a_graph():
    check(lambda x: x * x + eg.tanh(x * x) @ eg.transpose(x), rand(3, 3))


def test_masked_branch_never_poisons():
    x = np.array([-1.0, 4.0], np.float32)
    g = eg.grad(lambda v: eg.where(v > 0, eg.sqrt(v), v).sum())(x)
    np.testing.assert_allclose(g.numpy(), [1.0, 0.25])


def test_ties_of_max_share_evenly():
    g = eg.grad(lambda v: eg.max(v))(np.array([1, 2, 2, 1, 2], np.float32))
    np.testing.assert_allclose(g.numpy(), [0, 1 / 3, 1 / 3, 0, 1 / 3])


def test_repeated_ids_add_their_gradients():
    ids, ct = np.array([3, 9, 3, 41]), np.array([[1, 1], [2, 2], [3, 3], [4, 4]], np.float32)
    g = eg.grad(lambda t: (eg.take(t, ids, 0) * ct).sum())(np.zeros((50, 2), np.float32)).numpy()
    want = np.zeros((50, 2))
    np.add.at(want, ids, ct)
    assert np.array_equal(g, want)


def test_second_order():
    x = rand(4)
    g = eg.grad(lambda v: eg.grad(lambda u: (eg.sin(u) * u * u).sum())(v).sum())(x).numpy()
    np.testing.assert_allclose(
        g, 2 * np.sin(x) + 4 * x * np.cos(x) - x * x * np.sin(x), rtol=1e-5, atol=1e-5
    )


def test_stop_gradient_and_structures():
    params = {"w": rand(3), "n": np.arange(3)}
    value, grads = eg.value_and_grad(lambda p: (p["w"] * eg.stop_gradient(p["w"])).sum())(params)
    np.testing.assert_allclose(grads["w"].numpy(), params["w"])
    assert not grads["n"].numpy().any()
    np.testing.assert_allclose(float(value), (params["w"] ** 2).sum(), rtol=1e-6)


def test_errors_say_what_was_needed():
    with pytest.raises(eg.TraceError, match="scalar result, got f32\\[3\\]"):
        eg.grad(lambda x: x)(rand(3))
    with pytest.raises(eg.TraceError, match="out of range"):
        eg.grad(lambda x: x.sum(), 1)(rand(3))


def test_vjp():
    x = rand(3)
    out, pullback = eg.vjp(lambda v: (eg.exp(v), v * 2), x)
    (g,) = pullback((np.ones(3, np.float32), np.full(3, 5, np.float32)))
    np.testing.assert_allclose(g.numpy(), np.exp(x) + 10, rtol=1e-6)
    np.testing.assert_allclose(out[0].numpy(), np.exp(x), rtol=1e-6)


ACTIVATIONS = {
    "gelu": lambda x: eg.nn.gelu(x, "tanh"),
    "gelu-erf": eg.nn.gelu,
    "mish": eg.nn.mish,
    "cubic": lambda x: eg.sin(x * x * x + x) * x,
    "squares": lambda x: (x * x + 1.0) * (x * x + 1.0),
    "of-itself": lambda x: eg.nn.gelu(eg.nn.gelu(x, "tanh") * 2.0, "tanh") + x,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_functions_of_one_value(name):
    check(ACTIVATIONS[name], rand(3, 5))
    check(lambda x, y: ACTIVATIONS[name](x + y) * y, rand(3, 5), rand(3, 5, seed=1))


def slopes_used(function, *args):
    """In how many ops the cotangent of the result meets something else."""
    graph = trace_call(lambda ct, *xs: eg.vjp(function, *xs)[1](ct), args).graph
    return sum(graph.inputs[0] in node.operands for node in graph.nodes())


def test_a_function_of_one_value_has_one_slope():
    x = rand(3, 5)
    assert slopes_used(lambda x: eg.nn.gelu(x, "tanh"), x, x) == 1
    assert slopes_used(lambda x, y: eg.tanh(x * y + x) * y, x, x, x) > 1  # of two values


def test_a_slope_behind_a_mask_never_poisons():
    x = np.array([-2.0, np.inf, 0.5, np.nan], np.float32)
    visible = np.array([True, False, True, False])

    def masked(v):
        return eg.where(visible, eg.sin(v * v * v) * v + v, 0.0).sum()

    (got,) = evaluate(trace_call(eg.grad(masked), (x,)).graph, [x], np.float64)
    assert np.isfinite(got).all()
    assert got[1] == got[3] == 0.0
    v = x[::2].astype(np.float64)
    np.testing.assert_allclose(got[::2], np.sin(v**3) + 3 * v**3 * np.cos(v**3) + 1, rtol=1e-5)


def test_the_second_derivative_of_a_function_of_one_value():
    x = rand(7)
    second = eg.grad(lambda v: eg.grad(lambda u: (u * u * u * u).sum())(v).sum())
    (got,) = evaluate(trace_call(second, (x,)).graph, [x], np.float64)
    np.testing.assert_allclose(got, 12 * x.astype(np.float64) ** 2, rtol=1e-6)
