"""Convolutions, norms with states, dropout, pooling, attention of all kinds, initial weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn, optim
from eggpu.compiler import pytree
from eggpu.compiler.errors import ShapeMismatch, TraceError, TypeMismatch
from eggpu.compiler.reference import evaluate
from eggpu.compiler.tracing import array, trace_call
from eggpu.nn import initial


def run(function: Callable[..., Any], *args: Any, precision: Any = np.float64) -> Any:
    """`function` traced and interpreted; a pytree of NumPy arrays."""
    traced = trace_call(function, args)
    values = evaluate(traced.graph, [np.asarray(v) for v in pytree.flatten(args)[0]], precision)
    return pytree.unflatten(traced.results, values)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def call(m: Any, x: Any) -> Any:
    return m(x)


def test_conv2d_is_the_sum_over_windows() -> None:
    layer = nn.Conv2d(4, 6, (3, 2), key=0, stride=2, padding=1, dilation=(1, 2), groups=2)
    assert layer.weight.shape == (6, 2, 3, 2)
    x, w, b = numbers(2, 4, 7, 8), layer.weight.numpy(), layer.bias.numpy()
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    expected = np.empty((2, 6, 4, 4))
    for o in range(6):
        part = padded[:, 2 * (o // 3) : 2 * (o // 3) + 2]
        for i in range(4):
            for j in range(4):
                seen = part[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3 : 2]
                expected[:, o, i, j] = (seen * w[o]).sum((1, 2, 3)) + b[o]
    np.testing.assert_allclose(run(call, layer, x), expected, rtol=1e-9)
    assert np.abs(w).max() <= 1 / math.sqrt(12)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_a_transposed_convolution_is_the_adjoint(axes: int) -> None:
    there = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1](
        2, 3, 3, key=0, stride=2, padding=1, bias=False
    )
    back = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1](
        3, 2, 3, key=1, stride=2, padding=1, bias=False
    )
    back = back.replace(weight=there.weight)  # (out, in, *size) of one is (in, out, *size) here
    x, y = numbers(1, 2, *(5,) * axes), numbers(1, 3, *(3,) * axes, seed=1)
    # <conv(x), y> = <x, conv_transpose(y)>
    left, right = (run(call, there, x) * y).sum(), (x * run(call, back, y)).sum()
    assert abs(left - right) < 1e-9 * abs(left)


@pytest.mark.parametrize("shape", [(5, 6), (5, 6, 4)])
def test_batch_norm_keeps_running_statistics(shape: tuple[int, ...]) -> None:
    layer, x = nn.BatchNorm(6, momentum=0.25), numbers(*shape) * 2 + 3
    axes = tuple(k for k in range(len(shape)) if k != 1)
    out, after = run(lambda m, x: m.train(x), layer, x)
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    np.testing.assert_allclose(out, (x - mean) / np.sqrt(var + 1e-5), rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(after.running_mean, 0.25 * mean.ravel(), rtol=1e-6)
    unbiased = x.var(axes, ddof=1)
    np.testing.assert_allclose(after.running_var, 0.75 + 0.25 * unbiased, rtol=1e-6)
    used = run(call, after, x)
    column = (1, 6, *(1,) * (len(shape) - 2))
    center, spread = (v.reshape(column) for v in (after.running_mean, after.running_var))
    np.testing.assert_allclose(used, (x - center) / np.sqrt(spread + 1e-5), rtol=1e-6, atol=1e-9)


def test_states_are_saved_but_not_trained() -> None:
    model = nn.Sequential(nn.Linear(3, 4, key=0), nn.BatchNorm(4))
    assert "layers.1.running_mean" in nn.state_dict(model)
    assert "layers.1.running_mean" not in nn.named_parameters(model)
    assert nn.count_parameters(model) == 12 + 4 + 8
    assert "layers.1.running_var   f32[4]          state" in str(model)
    opt = optim.adamw(0.1, weight_decay=0.5)

    def loss(m: Any, x: Any) -> Any:
        y, m = m.train(x)
        return (y * y * y).mean(), m

    def step(m: Any, s: Any, x: Any) -> Any:
        (_, m), grads = eg.value_and_grad(loss, has_aux=True)(m, x)
        return opt.update(m, s, grads)

    x = numbers(6, 3)
    after, _ = run(step, model, opt.init(model), x)
    hidden = x @ model.layers[0].weight.numpy() + model.layers[0].bias.numpy()
    bn = after.layers[1]
    np.testing.assert_allclose(bn.running_mean, 0.1 * hidden.mean(0), rtol=1e-5)
    np.testing.assert_allclose(bn.running_var, 0.9 + 0.1 * hidden.var(0, ddof=1), rtol=1e-5)
    assert (after.layers[0].weight != model.layers[0].weight.numpy()).all()


def test_group_norm() -> None:
    x = numbers(2, 6, 5)
    grouped = x.reshape(2, 3, 10)
    normal = (grouped - grouped.mean(2, keepdims=True)) / grouped.std(2, keepdims=True)
    np.testing.assert_allclose(
        run(call, nn.GroupNorm(3, 6, eps=0.0), x), normal.reshape(x.shape), rtol=1e-6
    )


def test_dropout_drops_in_training_alone() -> None:
    x, layer = np.ones((50, 40), np.float32), nn.Dropout(0.3)
    np.testing.assert_array_equal(run(call, layer, x), x)
    out, _ = layer.train(array(x), key=eg.random.key(1))
    found = out.numpy()
    np.testing.assert_allclose(np.unique(found), [0, 1 / 0.7], rtol=1e-6)
    assert abs((found == 0).mean() - 0.3) < 0.05
    np.testing.assert_array_equal(found, layer(array(x), eg.random.key(1)).numpy())
    with pytest.raises(TraceError, match="Dropout needs a key in training"):
        layer.train(array(x))


def test_two_dropouts_of_one_key_differ() -> None:
    model = nn.Sequential(nn.Dropout(0.5), lambda x: x, nn.Dropout(0.5))
    out, _ = model.train(array(np.ones((40, 40), np.float32)), key=eg.random.key(0))
    assert abs((out.numpy() == 0).mean() - 0.75) < 0.05  # 0.5 if both dropped the same


def test_pools() -> None:
    x = numbers(2, 3, 8, 6)
    cells = x.reshape(2, 3, 4, 2, 3, 2)
    np.testing.assert_allclose(run(call, nn.MaxPool2d(2), x), cells.max((3, 5)))
    np.testing.assert_allclose(run(call, nn.AvgPool2d(2), x), cells.mean((3, 5)), rtol=1e-9)
    np.testing.assert_allclose(
        run(call, nn.AdaptiveAvgPool(1, 1), x)[:, :, 0, 0], x.mean((2, 3)), rtol=1e-6
    )
    assert run(call, nn.MaxPool1d(3, stride=1, padding=1), x[:, :, 0]).shape == (2, 3, 6)
    assert run(call, nn.AvgPool3d((1, 2, 2)), x[:, None]).shape == (2, 1, 3, 4, 3)
    assert run(call, nn.Upsample(2), x).shape == (2, 3, 16, 12)
    assert run(call, nn.Flatten(), x).shape == (2, 144)


def numpy_attention(m: nn.MultiHeadAttention, x: np.ndarray, source: np.ndarray) -> np.ndarray:
    """The formula, one head at a time, of (t, width) and (s, width)."""
    size, serves = x.shape[1] // m.heads, m.heads // m.kv_heads
    project = [(p.weight.numpy(), p.bias.numpy()) for p in (m.query, m.key, m.value)]
    q, k, v = (a @ w + b for a, (w, b) in zip((x, source, source), project, strict=True))
    out = np.empty((len(x), m.heads * size))
    for h in range(m.heads):
        mine, theirs = (slice(i * size, (i + 1) * size) for i in (h, h // serves))
        a, b = q[:, mine], k[:, theirs]
        if m.rope is not None:
            a, b = turned(a, m.rope), turned(b, m.rope)
        scores = a @ b.T / math.sqrt(size)
        if m.alibi:
            apart = np.abs(np.arange(len(x))[:, None] - np.arange(len(source)))
            scores -= 2.0 ** (-8 * (h + 1) / m.heads) * apart
        if m.causal:
            scores[np.triu_indices(len(x), 1, len(source))] = -np.inf
        e = np.exp(scores - scores.max(1, keepdims=True))
        out[:, mine] = e / e.sum(1, keepdims=True) @ v[:, theirs]
    return out @ m.output.weight.numpy() + m.output.bias.numpy()


def turned(x: np.ndarray, base: float) -> np.ndarray:
    """Pairs (i, i + d / 2) of row p as complex numbers, times exp(i p base^(-2 i / d))."""
    half = x.shape[1] // 2
    rates = base ** (-np.arange(half) / half)
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.arange(len(x))[:, None] * rates)
    return np.concatenate([z.real, z.imag], 1)


@pytest.mark.parametrize(
    "how",
    [
        {"causal": True, "kv_heads": 2},
        {"causal": False, "kv_heads": 1, "rope": 100.0},
        {"causal": True, "rope": 10000.0},
        {"causal": True, "alibi": True},
        {"causal": False, "alibi": True, "kv_heads": 2},
    ],
    ids=str,
)
def test_self_attention_of_all_kinds(how: dict[str, Any]) -> None:
    m, x = nn.MultiHeadAttention(16, 4, key=0, std=0.7, **how), numbers(2, 5, 16)
    expected = np.stack([numpy_attention(m, row, row) for row in x])
    np.testing.assert_allclose(run(call, m, x), expected, rtol=1e-5, atol=1e-6)


def test_cross_attention_with_a_mask() -> None:
    m = nn.MultiHeadAttention(16, 4, key=0, causal=False, from_width=6, std=0.7)
    x, context = numbers(2, 5, 16), numbers(2, 3, 6, seed=1)
    expected = np.stack([numpy_attention(m, a, b) for a, b in zip(x, context, strict=True)])
    found = run(lambda m, x, c: m(x, c), m, x, context)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    seen = np.array([True, True, False])
    masked = run(lambda m, x, c, s: m(x, c, s), m, x, context, seen)
    cut = run(lambda m, x, c: m(x, c), m, x, context[:, :2])
    np.testing.assert_allclose(masked, cut, rtol=1e-9)


def test_attention_says_what_it_needs() -> None:
    with pytest.raises(ShapeMismatch, match="heads that its kv_heads divide, got 4 and 3"):
        nn.MultiHeadAttention(16, 4, key=0, kv_heads=3)
    m = nn.MultiHeadAttention(16, 4, key=0, alibi=True)
    with pytest.raises(TypeMismatch, match=r"ALiBi needs a float mask, got bool\[5\]"):
        m(array(np.zeros((5, 16), np.float32)), mask=np.ones(5, bool))


def test_blocks_are_their_formulas() -> None:
    x, context = numbers(5, 8), numbers(3, 8, seed=1)
    gated = nn.SwiGLU(8, 12, key=0, std=0.5)
    g, u, d = (p.weight.numpy() for p in (gated.gate, gated.up, gated.down))
    a = x @ g
    expected = (a / (1 + np.exp(-a)) * (x @ u)) @ d
    np.testing.assert_allclose(run(call, gated, x), expected, rtol=1e-6)
    encoder = nn.EncoderBlock(8, 2, key=0)
    there, back = run(call, encoder, x), run(call, encoder, x[::-1])
    np.testing.assert_allclose(there, back[::-1], rtol=1e-9)  # no order without positions
    decoder = nn.DecoderBlock(8, 2, key=1)
    both = run(lambda m, x, c: m(x, c), decoder, x, context)
    later = x.copy()
    later[3:] += 1
    changed = run(lambda m, x, c: m(x, c), decoder, later, context)
    np.testing.assert_array_equal(both[:3], changed[:3])  # causal
    other = run(lambda m, x, c: m(x, c), decoder, x, context + 1e-2 * numbers(3, 8, seed=2))
    assert (both[0] != other[0]).any()


def test_initial_weights_have_their_deviations() -> None:
    shape = (200, 300)
    for draw, variance in (
        (initial.xavier_uniform, 2 / 500),
        (initial.xavier_normal, 2 / 500),
        (initial.he_uniform, 2 / 200),
        (initial.he_normal, 2 / 200),
    ):
        found = draw(3, shape).numpy()
        assert abs(found.var() / variance - 1) < 0.03, draw.__name__
        assert abs(found.mean()) < 0.02 * math.sqrt(variance) + 1e-3
    assert initial.fans((8, 4, 3, 3), "conv") == (36, 72)
    with pytest.raises(ShapeMismatch, match="fans need two axes"):
        initial.fans((8,))


@pytest.mark.parametrize("limit", [0.5, 1.0, 2.0])
def test_truncated_normal(limit: float) -> None:
    found = initial.truncated_normal(0, (100, 100), 0.1, limit).numpy() / 0.1
    assert np.abs(found).max() <= limit
    assert (np.abs(found) == limit).sum() == 0
    density = math.exp(-(limit**2) / 2) / math.sqrt(2 * math.pi)
    inside = math.erf(limit / math.sqrt(2))
    assert abs(found.var() - (1 - 2 * limit * density / inside)) < 0.02


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (4, 3, 2)])
def test_orthogonal(shape: tuple[int, ...]) -> None:
    w = initial.orthogonal(0, shape, gain=2.0).numpy().reshape(shape[0], -1)
    product = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
    np.testing.assert_allclose(product, 4 * np.eye(len(product)), atol=1e-5)


def test_state_goes_to_torch_names_and_back() -> None:
    model = {
        "net": nn.Sequential(nn.Linear(3, 4, key=0), nn.relu, nn.BatchNorm(4)),
        "attention": nn.MultiHeadAttention(8, 2, key=1),
    }
    state = nn.to_torch_state(model, fused_attention=True)
    assert state["net.0.weight"].shape == (4, 3)
    assert state["attention.in_proj_weight"].shape == (24, 8)
    assert set(state) >= {"net.2.running_var", "attention.out_proj.bias"}
    assert "attention.query.weight" in nn.to_torch_state(model)
    state["net.2.num_batches_tracked"] = np.array(7)
    other = eg.tree_map(lambda v: array(v.numpy() + 1), model)
    back = nn.from_torch_state(other, state)
    for name, value in nn.state_dict(back).items():
        np.testing.assert_array_equal(value.numpy(), nn.state_dict(model)[name].numpy(), name)
    moved = {f"body.{k}" if k.startswith("net") else k: v for k, v in state.items()}
    again = nn.from_torch_state(other, moved, {"body.net": "net"})
    np.testing.assert_array_equal(again["net"](np.eye(3)).numpy(), back["net"](np.eye(3)).numpy())
    with pytest.raises(nn.StateError, match=r"missing: attention\.output\.weight"):
        nn.from_torch_state(model, {k: v for k, v in state.items() if "out_proj.w" not in k})


def test_a_compiled_step_with_states_and_dropout() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, key=0, padding=1), nn.BatchNorm(3), nn.relu, nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 4, key=1),
    )  # fmt: skip

    def loss(m: Any, x: Any, y: Any, key: Any) -> Any:
        logits, m = m.train(x, key=key)
        return nn.cross_entropy(logits, y), m

    def both(m: Any, x: Any, y: Any, key: Any) -> Any:
        return eg.value_and_grad(loss, has_aux=True)(m, x, y, key)

    x, y = numbers(6, 1, 4, 4).astype(np.float32), np.arange(6, dtype=np.int32) % 4
    arguments = (model, x, y, eg.random.key(3))
    found, expected = eg.compile(both)(*arguments), run(both, *arguments)
    leaves, structure = pytree.flatten(expected)
    for name, value, right in zip(
        pytree.paths(structure), pytree.flatten(found)[0], leaves, strict=True
    ):
        atol = 1e-6 + 3e-5 * float(np.abs(right).max())
        np.testing.assert_allclose(value.numpy(), right, rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("kind", ["block", "gpt", "vit"])
def test_dropout_in_transformers(kind: str) -> None:
    rng = np.random.default_rng(0)
    x: Any = rng.standard_normal((2, 5, 8)).astype(np.float32)
    if kind == "block":
        model: Any = nn.EncoderBlock(8, 2, key=0, std=0.3, dropout=0.4)
    elif kind == "gpt":
        model, x = nn.GPT(7, 1, 8, 2, 5, key=0, dropout=0.4), rng.integers(0, 7, (2, 5))
    else:
        model = nn.ViT(1, 4, 3, key=0, layers=1, width=8, heads=2, dropout=0.4)
        x = rng.standard_normal((2, 1, 4, 4)).astype(np.float32)
    x = eg.array(x)
    plain = model(x).numpy()
    np.testing.assert_array_equal(model(x).numpy(), plain)
    one, again, other = (model.train(x, key=eg.random.key(k))[0].numpy() for k in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert (one != plain).any()
    assert (one != other).any()
    with pytest.raises(eg.TraceError, match="needs a key in training"):
        model.train(x)


def test_a_block_drops_weights_and_what_is_added() -> None:
    block = nn.Block(8, 2, key=0, dropout=0.5)
    x = np.random.default_rng(0).standard_normal((1, 4, 8))
    x, key = eg.array(x.astype(np.float32)), eg.random.key(3)
    scores, first, second = (eg.random.fold_in(key, i) for i in range(3))
    h = x + nn.dropout(block.attention(block.norm1(x), dropout_key=scores), 0.5, first)
    h = h + nn.dropout(block.feed_forward(block.norm2(h)), 0.5, second)
    np.testing.assert_allclose(block.train(x, key=key)[0].numpy(), h.numpy(), 1e-6)
    still = nn.Block(8, 2, key=0)
    np.testing.assert_array_equal(still.train(x)[0].numpy(), still(x).numpy())


def test_a_torch_state_is_copied_both_ways() -> None:
    there = {"weight": np.ones((2, 3), np.float32), "bias": np.zeros(2, np.float32)}
    layer = eg.from_torch_state(nn.Linear(3, 2, key=0), there)
    for value in there.values():
        value += 5  # as an optimizer of PyTorch does
    assert float(layer.bias.sum()) == 0  # type: ignore[union-attr]
    assert float(layer.weight.sum()) == 6
    back = eg.to_torch_state(layer)
    for value in back.values():
        value += 5
    assert float(layer.bias.sum()) == 0  # type: ignore[union-attr]
    assert float(layer.weight.sum()) == 6
