"""Mixed precision: what is rounded to f16, what stays f32, and training that comes to the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import eggpu as eg
from eggpu import data, nn, optim
from eggpu.compiler.errors import CompileError
from eggpu.compiler.mixed import mixed
from eggpu.compiler.pipeline import Options, compile_graph
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule.target import FLOOR, GENERIC_GPU
from eggpu.compiler.tracing import trace_call
from eggpu.train import Trainer

RATES = replace(GENERIC_GPU, launch=2500, bandwidth=3500, contract=42000, elementwise=12000)
GPU = replace(
    FLOOR, name="gpu", max_bindings=16, subgroup=32, features=("shader-f16", "subgroup"),
    max_workgroup_bytes=32 << 10, profile=RATES,
)  # fmt: skip
HALF = pytest.mark.skipif(
    "shader-f16" not in eg.device().target.features, reason="the device has no shader-f16"
)


def graph_of(function, *shapes):
    values = [np.zeros(s, np.float32) for s in shapes]
    return trace_call(function, values).graph


def rounded(node):
    """Whether a node is a value rounded to f16, seen through movement."""
    while node.op.name in ("transpose", "reshape", "broadcast"):
        node = node.operands[0]
    return node.op.name == "cast" and node.operands[0].dtype.name == "f16"


def products(graph):
    return [n for n in graph.nodes() if n.op.name == "dot"]


def test_operands_and_activations_are_rounded_and_the_result_is_not():
    graph = mixed(graph_of(lambda x, w, v: eg.tanh(x @ w) @ v, (8, 16), (16, 12), (12, 4)))
    first, second = products(graph)
    assert all(rounded(o) for n in (first, second) for o in n.operands)
    readers = [n for n in graph.nodes() if first in n.operands]
    assert [n.op.name for n in readers] == ["cast"]  # the activation
    assert all(n.dtype.name == "f32" for n in (first, second))  # f32 accumulation
    assert graph.outputs[0] is second


def test_softmax_and_what_leads_to_it_stay_exact():
    def attention(q, k, v):
        return nn.softmax(q @ k.T, axis=-1) @ v

    graph = mixed(graph_of(attention, (16, 8), (16, 8), (16, 8)))
    scores, values = products(graph)
    assert all(rounded(o) for o in scores.operands)
    assert not any(n.op.name == "cast" for n in graph.nodes() if scores in n.operands)
    assert [rounded(o) for o in values.operands] == [False, True]


def test_gradients_of_weights_are_not_rounded():
    def loss(w, x):
        return eg.sum(eg.tanh(x @ w) ** 2)

    values = np.zeros((16, 12), np.float32), np.zeros((8, 16), np.float32)
    graph = mixed(trace_call(eg.grad(loss), values).graph)
    assert graph.outputs[0].dtype.name == "f32"
    assert graph.outputs[0].op.name == "dot"


def test_integers_and_f16_are_left_alone():
    graph = graph_of(lambda x: eg.matmul(x.astype("i32"), x.astype("i32")), (4, 4))
    assert mixed(graph).outputs == graph.outputs


def network(x, w, v):
    return nn.softmax(nn.relu(x @ w) @ v, axis=-1)


@HALF
@pytest.mark.parametrize("optimize", [True, False])
def test_the_device_computes_what_the_reference_says(optimize):
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(s, np.float32) for s in ((33, 64), (64, 48), (48, 10))]
    run = eg.compile(network, precision="mixed", optimize=optimize, cache=False)
    got = run(*values).numpy()
    traced = trace_call(network, values).graph
    halves = evaluate(mixed(traced), values)[0]
    np.testing.assert_allclose(got, halves, rtol=5e-3, atol=2e-3)
    exact = eg.compile(network, cache=False)(*values).numpy()
    assert 1e-6 < np.abs(got - exact).max() < 2e-2


def step(model, x, y):
    def loss(m):
        return nn.cross_entropy(m(x), y)

    return eg.value_and_grad(loss)(model)


def test_a_gpu_stores_activations_as_f16_and_accumulates_in_f32():
    model = nn.MLP((256, 512, 512, 64), key=0)
    x, y = np.zeros((512, 256), np.float32), np.zeros(512, np.int32)
    graph = trace_call(step, (model, x, y)).graph
    half = compile_graph(graph, GPU, Options(precision="mixed")).plan
    full = compile_graph(graph, GPU).plan
    kept = [b for b in half.buffers if b.dtype == "f16" and b.role == "scratch"]
    assert len(kept) >= 3
    assert not any(b.dtype == "f16" for b in full.buffers)
    assert "shader-f16" in half.features
    moved = [sum(k.bytes_read + k.bytes_written for k in p.kernels) for p in (half, full)]
    assert moved[0] < moved[1]
    heavy = [k for k in half.kernels if k.template.startswith("contract")]
    assert any("enable f16" in k.wgsl for k in heavy)
    for k in heavy:  # f16 is what memory holds: no sum is kept in it
        variables = [line for line in k.wgsl.splitlines() if line.strip().startswith("var ")]
        assert not any("f16" in line for line in variables)


def test_a_device_without_f16_is_refused_with_a_reason():
    graph = graph_of(lambda x, w: x @ w, (8, 8), (8, 8))
    lacking = replace(GPU, name="old", features=("subgroup",))
    with pytest.raises(
        CompileError, match=r"precision='mixed' needs .*shader-f16, which old lacks"
    ):
        compile_graph(graph, lacking, Options(precision="mixed"))
    with pytest.raises(CompileError, match="'float32' or 'mixed', got 'half'"):
        compile_graph(graph, GPU, Options(precision="half"))  # type: ignore[arg-type]


@HALF
def test_training_comes_to_what_f32_comes_to(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 16), np.float32)
    y = (x @ rng.standard_normal((16, 4)).astype(np.float32)).argmax(1).astype(np.int32)

    def trained(precision):
        model = nn.MLP((16, 32, 4), key=1)
        batches = data.Batches((x, y), 64, seed=3)
        loss = lambda m, x, y: nn.cross_entropy(m(x), y)  # noqa: E731
        trainer = Trainer(
            model, loss, optim.adamw(1e-2), batches, valid=[(x, y)], precision=precision
        )
        result = trainer.fit(tmp_path / precision, steps=60, quiet=True)
        return result.valid, trainer

    (full, _), (half, trainer) = trained("float32"), trained("mixed")
    assert half < 0.5 * np.log(4)
    assert abs(half - full) < 0.03
    assert isinstance(trainer.state, optim.ScaledState)
    assert float(trainer.state.scale) >= 256


@HALF
def test_small_gradients_need_the_factor_of_the_loss():
    x = np.ones((8, 8), np.float32)
    w = np.ones((8, 8), np.float32)

    def tiny(w, x, factor):
        return eg.sum(eg.tanh((x @ w) * 1e-2) @ w) * 1e-7 * factor

    gradient = eg.compile(eg.grad(tiny), precision="mixed", cache=False)
    exact = eg.compile(eg.grad(tiny), cache=False)(w, x, np.float32(1)).numpy()
    lost = gradient(w, x, np.float32(1)).numpy()
    kept = gradient(w, x, np.float32(2**16)).numpy() / 2**16
    assert np.abs(kept - exact).max() < 5e-3 * np.abs(exact).max()
    assert np.abs(lost - exact).max() > 1e-2 * np.abs(exact).max()


def exact(q, k, v, ct, bias, seen):
    """Attention and its gradients in float64."""
    q, k, v, ct = (x.astype(np.float64) for x in (q, k, v, ct))
    s = np.where(seen, q @ k.swapaxes(-1, -2) * 0.25 + bias, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = ct @ v.swapaxes(-1, -2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    dq, dk = ds @ k * 0.25, ds.swapaxes(-1, -2) @ q * 0.25
    return p @ v, dq, dk, p.swapaxes(-1, -2) @ ct


@HALF
@pytest.mark.parametrize("large", [1, 32], ids=["", "large"])
@pytest.mark.parametrize(
    ("queries", "keys", "size", "width"), [(33, 33, 15, 15), (17, 130, 20, 5), (1, 64, 16, 16)]
)
@pytest.mark.parametrize("half", [False, True], ids=["f32", "f16"])
def test_attention_is_as_near_as_its_operands(half, queries, keys, size, width, large):
    """Operands that f16 holds exactly: what is left is float32's rounding, and where the program
    itself has f16 scores, that of the scores. Some rows see one key only."""
    rng = np.random.default_rng(queries)

    def values(*shape):
        return rng.standard_normal(shape).astype(np.float16).astype(np.float32)

    q, k = values(2, queries, size) * large, values(2, keys, size)
    v, ct, bias = values(2, keys, width), values(2, queries, width), values(queries, keys)
    seen = rng.random((queries, keys)) < 0.6
    seen[1::4] = False
    seen[:, 0] = True

    def attention(q, k, v):
        if half:
            q, k, v = (x.astype("f16") for x in (q, k, v))
        scores = (q @ k.swapaxes(-1, -2)).astype("f32") * 0.25 + bias
        return nn.softmax(eg.where(seen, scores, -np.inf), -1) @ v.astype("f32")

    def step(q, k, v, ct):
        grads = eg.grad(lambda *x: (attention(*x) * ct).sum(), (0, 1, 2))(q, k, v)
        return attention(q, k, v), *grads

    want = exact(q, k, v, ct, bias, seen)
    rounding = np.abs(q @ k.swapaxes(-1, -2)).max() * 0.25 * 2.0 ** (-10 if half else -21)
    for precision in ("mixed", "float32"):
        got = eg.compile(step, precision=precision, cache=False)(q, k, v, ct)
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            error = np.abs(np.asarray(a) - b).max() / np.abs(b).max()
            assert error < (3e-3 if half else 1e-5) + rounding, (precision, name)
