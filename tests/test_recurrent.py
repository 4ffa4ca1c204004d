"""Recurrent layers against NumPy in double precision and PyTorch: results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler import pytree
from eggpu.compiler.ir import Kind
from eggpu.compiler.reference import evaluate

RNG = np.random.default_rng(0)
LAYERS: dict[str, Callable[..., Any]] = {"RNN": nn.RNN, "GRU": nn.GRU, "LSTM": nn.LSTM}
CELLS: dict[str, Callable[..., Any]] = {
    "RNNCell": nn.RNNCell,
    "GRUCell": nn.GRUCell,
    "LSTMCell": nn.LSTMCell,
}


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def numpy_step(kind: str, x: np.ndarray, h: np.ndarray, c: np.ndarray, w: Any, end: str) -> Any:
    """One step of one layer, written after the equations; gives (h, c)."""
    width = h.shape[-1]
    a = x @ w[f"weight_ih{end}"].T + w.get(f"bias_ih{end}", 0)
    b = h @ w[f"weight_hh{end}"].T + w.get(f"bias_hh{end}", 0)
    parts = [slice(k * width, (k + 1) * width) for k in range(4)]
    if kind == "RNN":
        return np.tanh(a + b), c
    if kind == "GRU":
        r, z = (sigmoid(a[..., p] + b[..., p]) for p in parts[:2])
        n = np.tanh(a[..., parts[2]] + r * b[..., parts[2]])
        return (1 - z) * n + z * h, c
    i, f, o = (sigmoid((a + b)[..., parts[k]]) for k in (0, 1, 3))
    c = f * c + i * np.tanh((a + b)[..., parts[2]])
    return o * np.tanh(c), c


def numpy_layers(kind: str, model: Any, x: np.ndarray, h: np.ndarray, c: np.ndarray) -> Any:
    """(outputs, h, c) of x (steps, batch, width) in double precision."""
    w = {k: v.numpy().astype(np.float64) for k, v in nn.state_dict(model).items()}
    ways = 2 if model.bidirectional else 1
    hs, cs = [], []
    for layer in range(model.num_layers):
        outs = []
        for way in range(ways):
            end, row = f"_l{layer}" + "_reverse" * way, layer * ways + way
            hk, ck, ys = h[row], c[row], []
            for t in reversed(range(len(x))) if way else range(len(x)):
                hk, ck = numpy_step(kind, x[t], hk, ck, w, end)
                ys.append(hk)
            outs.append(np.stack(ys[::-1] if way else ys))
            hs.append(hk)
            cs.append(ck)
        x = np.concatenate(outs, -1)
    return x, np.stack(hs), np.stack(cs)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, True)])
def test_layers_follow_their_equations(kind: str, layers: int, bidirectional: bool) -> None:
    model = LAYERS[kind](5, 6, layers, bidirectional=bidirectional, batch_first=True, key=0)
    rows = layers * (1 + bidirectional)
    x, h, c = floats(3, 4, 5), floats(rows, 3, 6), floats(rows, 3, 6)
    state = (h, c) if kind == "LSTM" else h
    out, last = eg.compile(lambda m, x, s: m(x, s))(model, x, state)
    want = numpy_layers(kind, model, x.swapaxes(0, 1).astype(np.float64), h, c)
    np.testing.assert_allclose(out.numpy(), want[0].swapaxes(0, 1), rtol=1e-5, atol=2e-6)
    got = last if kind == "LSTM" else (last,)
    for a, b in zip(got, want[1:], strict=False):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("kind", LAYERS)
def test_the_first_state_is_zero_and_batches_may_be_missing(kind: str) -> None:
    model = LAYERS[kind](5, 6, key=1)
    x = floats(4, 5)
    out, last = model(x)
    zero = np.zeros((1, 1, 6))
    want = numpy_layers(kind, model, x[:, None].astype(np.float64), zero, zero)
    np.testing.assert_allclose(out.numpy(), want[0][:, 0], rtol=1e-5, atol=2e-6)
    h = last[0] if kind == "LSTM" else last
    assert (out.shape, h.shape) == ((4, 6), (1, 6))


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_are_finite_differences(kind: str) -> None:
    """In double precision, of a direction in the space of all weights."""
    model = LAYERS[kind](3, 4, 2, bidirectional=True, key=2)
    x, weights = floats(3, 2, 3), floats(3, 2, 8)

    def loss(model: Any, x: Any) -> Any:
        out, last = model(x)
        return (out * weights).sum() + sum((s * s).sum() for s in pytree.flatten(last)[0])

    leaves = [v.numpy().astype(np.float64) for v in pytree.flatten((model, x))[0][:-1]]
    leaves.append(x.astype(np.float64))
    graph = eg.trace(eg.value_and_grad(loss, (0, 1)), model, x)
    _, *grads = evaluate(graph, leaves, np.float64)
    way = [RNG.normal(size=v.shape) for v in leaves]

    def at(step: float) -> float:
        moved = [v + step * d for v, d in zip(leaves, way, strict=True)]
        return float(evaluate(graph, moved, np.float64)[0])

    slope = sum(float((g * d).sum()) for g, d in zip(grads, way, strict=True))
    assert slope == pytest.approx((at(1e-5) - at(-1e-5)) / 2e-5, rel=1e-6)


def test_a_layer_is_one_loop_a_direction() -> None:
    model = nn.LSTM(8, 8, 2, bidirectional=True, key=0)
    graph = eg.trace(lambda m, x: m(x)[0], model, floats(5, 2, 8))
    loops = [n.op for n in graph.nodes() if n.kind is Kind.LOOP]
    assert [(loop.count, loop.reverse) for loop in loops] == [(5, False), (5, True)] * 2
    assert [n.op.name for n in loops[0].body.nodes()].count("dot") == 1


def test_names_are_pytorch_s() -> None:
    model = nn.LSTM(3, 4, 2, bidirectional=True, key=0)
    ends = ["_l0", "_l0_reverse", "_l1", "_l1_reverse"]
    kinds = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    assert sorted(nn.state_dict(model)) == sorted(k + e for k, e in product(kinds, ends))
    assert model.weight_ih_l1.shape == (16, 8)
    assert sorted(nn.state_dict(nn.GRU(3, 4, bias=False, key=0))) == [
        "weight_hh_l0",
        "weight_ih_l0",
    ]
    with pytest.raises(AttributeError, match="LSTM has no attribute weight_ih_l2"):
        _ = model.weight_ih_l2
    again = nn.load_state_dict(nn.LSTM(3, 4, 2, bidirectional=True, key=1), nn.state_dict(model))
    np.testing.assert_array_equal(
        again.bias_hh_l0_reverse.numpy(), model.bias_hh_l0_reverse.numpy()
    )


def test_dropout_stands_between_layers_in_training() -> None:
    model, x = nn.GRU(4, 32, 2, dropout=0.5, key=0), floats(5, 3, 4)
    (out, _), same = model.train(x, key=eg.random.key(1))
    assert same is model
    whole = model(x)[0].numpy()
    assert not np.allclose(out.numpy(), whole)
    one = nn.GRU(4, 32, dropout=0.5, key=0)
    np.testing.assert_array_equal(one.train(x)[0][0].numpy(), one(x)[0].numpy())
    with pytest.raises(eg.TraceError, match="GRU needs a key for its dropout"):
        model.train(x)


def test_errors_say_what_was_needed() -> None:
    model = nn.LSTM(3, 4, key=0)
    with pytest.raises(
        eg.ShapeMismatch, match=r"LSTM needs \(steps, batch, 3\) or .* got f32\[2, 5\]"
    ):
        model(floats(2, 5))
    with pytest.raises(
        eg.ShapeMismatch, match=r"needs 2 of f32\[1, 2, 4\] as state, got f32\[1, 2, 5\]"
    ):
        model(floats(6, 2, 3), (floats(1, 2, 5), floats(1, 2, 4)))
    with pytest.raises(eg.ShapeMismatch, match="RNN needs sizes and layers of at least 1"):
        nn.RNN(3, 0, key=0)
    with pytest.raises(ValueError, match="tanh or relu"):
        nn.RNN(3, 4, nonlinearity="gelu", key=0)
    with pytest.raises(ValueError, match="0 <= dropout <= 1"):
        nn.GRU(3, 4, dropout=2.0, key=0)
    with pytest.raises(eg.ShapeMismatch, match=r"GRUCell needs \(batch, 3\)"):
        nn.GRUCell(3, 4, key=0)(floats(2, 5))


@pytest.mark.parametrize("kind", CELLS)
def test_cells_follow_their_equations(kind: str) -> None:
    cell, x, h, c = CELLS[kind](5, 6, key=0), floats(3, 5), floats(3, 6), floats(3, 6)
    w = {k: v.numpy().astype(np.float64) for k, v in nn.state_dict(cell).items()}
    want = numpy_step(kind.removesuffix("Cell"), x.astype(np.float64), h, c, w, "")
    got = cell(x, (h, c)) if kind == "LSTMCell" else (cell(x, h),)
    for a, b in zip(got, want, strict=False):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-5, atol=2e-6)
    first = cell(x)[0] if kind == "LSTMCell" else cell(x)
    assert first.shape == (3, 6)


@pytest.mark.models
@pytest.mark.timeout(300)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers_are_torch_s(kind: str, batch_first: bool) -> None:
    torch = pytest.importorskip("torch")
    net = getattr(torch.nn, kind)(5, 6, 2, bidirectional=True, batch_first=batch_first)
    model = LAYERS[kind](5, 6, 2, bidirectional=True, batch_first=batch_first, key=0)
    model = eg.from_torch_state(model, net.state_dict())
    x, h, c = floats(3, 4, 5), floats(4, 4, 6), floats(4, 4, 6)
    if batch_first:
        h, c = floats(4, 3, 6), floats(4, 3, 6)
    weights = floats(3, 4, 12)
    inputs = [torch.tensor(v, requires_grad=True) for v in (x, h, c)]
    state = tuple(inputs[1:]) if kind == "LSTM" else inputs[1]
    theirs, last = net(inputs[0], state)
    value = (theirs * torch.tensor(weights)).sum() + sum(
        (s * s).sum() for s in (last if kind == "LSTM" else (last,))
    )
    value.backward()

    def loss(model: Any, x: Any, h: Any, c: Any) -> Any:
        out, last = model(x, (h, c) if kind == "LSTM" else h)
        return (out * weights).sum() + sum((s * s).sum() for s in pytree.flatten(last)[0]), out

    both = eg.compile(eg.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))
    (ours, out), (grads, *rest) = both(model, x, h, c)
    assert float(ours) == pytest.approx(value.item(), rel=1e-5)
    np.testing.assert_allclose(out.numpy(), theirs.detach().numpy(), rtol=1e-5, atol=2e-6)
    want = {name: p.grad.numpy() for name, p in net.named_parameters()}
    for name, grad in nn.state_dict(grads).items():
        np.testing.assert_allclose(grad.numpy(), want[name], rtol=2e-5, atol=2e-5, err_msg=name)
    for grad, given in zip(rest, inputs, strict=True):
        if given.grad is not None:
            np.testing.assert_allclose(grad.numpy(), given.grad.numpy(), rtol=2e-5, atol=2e-5)
    back = eg.to_torch_state(model)
    assert list(back) == list(net.state_dict()) or set(back) == set(net.state_dict())
    net.load_state_dict({k: torch.tensor(v) for k, v in back.items()})


@pytest.mark.models
@pytest.mark.parametrize("kind", CELLS)
def test_cells_are_torch_s(kind: str) -> None:
    torch = pytest.importorskip("torch")
    net = getattr(torch.nn, kind)(5, 6)
    cell = eg.from_torch_state(CELLS[kind](5, 6, key=0), net.state_dict())
    x, h, c = floats(3, 5), floats(3, 6), floats(3, 6)
    given = tuple(map(torch.tensor, (h, c))) if kind == "LSTMCell" else torch.tensor(h)
    theirs = net(torch.tensor(x), given)
    ours = cell(x, (h, c)) if kind == "LSTMCell" else (cell(x, h),)
    for a, b in zip(ours, theirs if kind == "LSTMCell" else (theirs,), strict=True):
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-5, atol=2e-6)


@pytest.mark.models
def test_unbatched_layers_are_torch_s() -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.RNN(5, 6, nonlinearity="relu", bias=False)
    model = eg.from_torch_state(
        nn.RNN(5, 6, nonlinearity="relu", bias=False, key=0), net.state_dict()
    )
    x, h = floats(7, 5), floats(1, 6)
    theirs = net(torch.tensor(x), torch.tensor(h))
    for a, b in zip(model(x, h), theirs, strict=True):
        np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-5, atol=2e-6)
