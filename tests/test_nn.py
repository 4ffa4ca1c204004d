"""Modules: shapes, names, parameters in and out, and gradients against finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler import pytree
from eggpu.compiler.autodiff import value_and_grad
from eggpu.compiler.errors import ShapeMismatch, TypeMismatch
from eggpu.compiler.library import random
from eggpu.compiler.reference import evaluate
from eggpu.compiler.tracing import Array, array, trace_call


def run(function: Callable[..., Any], *args: Any, precision: Any = np.float64) -> Any:
    """`function` traced and interpreted; a pytree of NumPy arrays."""
    traced = trace_call(function, args)
    values = evaluate(traced.graph, [np.asarray(v) for v in pytree.flatten(args)[0]], precision)
    return pytree.unflatten(traced.results, values)


def tiny_gpt(layers: int = 2) -> nn.GPT:
    return nn.GPT(vocab=11, layers=layers, width=8, heads=2, context=6, key=3)


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 11, (3, 6)).astype(np.int32)


def test_linear_is_x_times_weight_plus_bias() -> None:
    layer = nn.Linear(3, 4, key=random.key(0))
    x = np.random.default_rng(1).standard_normal((2, 5, 3))
    expected = x @ layer.weight.numpy().astype(np.float64) + layer.bias.numpy()
    assert layer.weight.shape == (3, 4)
    np.testing.assert_allclose(run(lambda m, x: m(x), layer, x), expected, rtol=1e-12)
    assert np.abs(layer.weight.numpy()).max() <= 1 / math.sqrt(3)
    assert nn.Linear(3, 4, bias=False, key=0).bias is None


def test_keys_make_weights_reproducible_and_different() -> None:
    same, again, other = (nn.Linear(20, 20, key=k).weight.numpy() for k in (5, 5, 6))
    np.testing.assert_array_equal(same, again)
    assert not (same == other).any()
    model = tiny_gpt()
    first, second = (b.attention for b in model.blocks)
    drawn = [first.query, first.key, first.value, second.query]
    assert len({layer.weight.numpy().tobytes() for layer in drawn}) == 4


def test_gpt_starts_as_gpt2_does() -> None:
    model = nn.GPT(vocab=300, layers=2, width=64, heads=4, context=32, key=0)
    for name, value in nn.named_parameters(model).items():
        found = value.numpy()
        if name.endswith("bias"):
            assert not found.any(), name
        elif ".norm" in name or name.startswith("norm"):
            assert (found == 1).all(), name
        else:
            std = 0.02 / 2 if "output" in name or "down" in name else 0.02
            assert abs(found.std() / std - 1) < 0.1, name
            assert abs(found.mean()) < 0.1 * std, name


def test_norms() -> None:
    x = np.random.default_rng(2).standard_normal((4, 6)) * 3 + 1
    centered = x - x.mean(-1, keepdims=True)
    expected = centered / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(run(lambda m, x: m(x), nn.LayerNorm(6), x), expected, atol=1e-6)
    expected = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(run(lambda m, x: m(x), nn.RMSNorm(6), x), expected, atol=1e-6)
    assert nn.LayerNorm(6, bias=False).bias is None


def numpy_attention(m: nn.MultiHeadAttention, x: np.ndarray) -> np.ndarray:
    """The formula, one head at a time."""
    (t, width), size = x.shape, x.shape[1] // m.heads
    q, k, v = (x @ p.weight.numpy() + p.bias.numpy() for p in (m.query, m.key, m.value))
    out = np.empty((t, width))
    for h in range(m.heads):
        part = slice(h * size, (h + 1) * size)
        scores = q[:, part] @ k[:, part].T / math.sqrt(size)
        if m.causal:
            scores[np.triu_indices(t, 1)] = -np.inf
        e = np.exp(scores - scores.max(1, keepdims=True))
        out[:, part] = e / e.sum(1, keepdims=True) @ v[:, part]
    return out @ m.output.weight.numpy() + m.output.bias.numpy()


@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_the_formula(causal: bool) -> None:
    m = nn.MultiHeadAttention(12, 3, key=0, causal=causal, std=1.0)
    x = np.random.default_rng(3).standard_normal((2, 5, 12))
    expected = np.stack([numpy_attention(m, row) for row in x])
    np.testing.assert_allclose(run(lambda m, x: m(x), m, x), expected, rtol=1e-6)


def test_gpt_does_not_see_later_tokens(tokens: np.ndarray) -> None:
    model = tiny_gpt()
    changed = tokens.copy()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    before, after = (run(lambda m, t: m(t), model, t) for t in (tokens, changed))
    assert before.shape == (3, 6, 11)
    np.testing.assert_array_equal(before[:, :4], after[:, :4])
    assert (before[:, 4:] != after[:, 4:]).any()


def test_gpt_takes_shorter_and_unbatched_tokens(tokens: np.ndarray) -> None:
    model = tiny_gpt()
    whole = run(lambda m, t: m(t), model, tokens)
    part = run(lambda m, t: m(t), model, tokens[0, :4])
    np.testing.assert_allclose(part, whole[0, :4], rtol=1e-9, atol=1e-12)


def finite_differences(loss: Callable[..., Any], model: Any, *args: Any) -> None:
    """Compare gradients with central differences, in float64, at a few places of each leaf."""
    _, grads = run(value_and_grad(loss), model, *args)
    leaves, structure = pytree.flatten(model)
    traced = trace_call(loss, (model, *args))
    values = [np.asarray(v, np.float64) for v in leaves]
    rest = [np.asarray(v) for v in args]
    rng = np.random.default_rng(0)
    names = pytree.paths(structure)
    for name, value, grad in zip(names, values, pytree.flatten(grads)[0], strict=True):
        places = rng.choice(value.size, min(value.size, 3), replace=False)
        for at in places:
            old, ends = value.flat[at], []
            for step in (1e-5, -1e-5):
                value.flat[at] = old + step
                ends.append(evaluate(traced.graph, [*values, *rest], np.float64)[0])
            value.flat[at] = old
            slope = (ends[0] - ends[1]) / 2e-5
            assert abs(slope - grad.flat[at]) <= 1e-8 + 1e-6 * abs(slope), f"{name}[{at}]"


def test_gpt_gradients(tokens: np.ndarray) -> None:
    model = pytree.tree_map(lambda v: array(v.numpy() * 5), tiny_gpt())  # away from tiny slopes
    targets = np.roll(tokens, -1, 1)
    finite_differences(lambda m, x, y: nn.cross_entropy(m(x), y), model, tokens, targets)


def test_mlp_gradients() -> None:
    rng = np.random.default_rng(1)
    model = nn.MLP((5, 7, 6, 3), key=0, activation=nn.silu)
    x, y = rng.standard_normal((4, 5)), rng.integers(0, 3, 4).astype(np.int32)
    finite_differences(lambda m, x, y: nn.cross_entropy(m(x), y), model, x, y)


def test_rms_norm_and_embedding_gradients() -> None:
    @dataclass(frozen=True)
    class Bag(nn.Module):
        table: nn.Embedding
        norm: nn.RMSNorm
        out: nn.Linear

        def __call__(self, ids: Array) -> Array:
            return self.out(self.norm(self.table(ids)).mean(-2))

    model = Bag(nn.Embedding(9, 4, key=0), nn.RMSNorm(4), nn.Linear(4, 3, key=1))
    ids = np.array([[1, 1, 3], [8, 0, 1]], np.int32)
    y = np.array([2, 0], np.int32)
    finite_differences(lambda m, ids, y: nn.cross_entropy(m(ids), y), model, ids, y)


def assert_compiled(function: Callable[..., Any], *args: Any) -> None:
    """The compiled function gives what the interpreter gives in float64."""
    found, expected = eg.compile(function)(*args), run(function, *args)
    leaves, structure = pytree.flatten(expected)
    for name, value, right in zip(
        pytree.paths(structure), pytree.flatten(found)[0], leaves, strict=True
    ):
        # the gradient of a key's bias is 0 but for rounding
        atol = 1e-7 + 2e-5 * float(np.abs(right).max())
        np.testing.assert_allclose(value.numpy(), right, rtol=0, atol=atol, err_msg=name)


def test_compiled_gpt(tokens: np.ndarray) -> None:
    model = pytree.tree_map(lambda v: array(v.numpy() * 5), tiny_gpt(layers=1))

    def loss(m: Any, x: Any, y: Any) -> Any:
        return nn.cross_entropy(m(x), y)

    assert_compiled(value_and_grad(loss), model, tokens, np.roll(tokens, -1, 1))


def test_compiled_layers() -> None:
    x = np.random.default_rng(5).standard_normal((3, 7, 12)).astype(np.float32)
    attention = nn.MultiHeadAttention(12, 3, key=0, causal=False, std=0.5)
    layers = (nn.LayerNorm(12), nn.RMSNorm(12), nn.Linear(12, 5, key=1), attention)
    assert_compiled(lambda layers, x: tuple(f(x) for f in layers), layers, x)


def test_names_and_counts() -> None:
    model = tiny_gpt(layers=1)
    names = list(nn.named_parameters(model))
    assert names[:3] == ["tokens.weight", "positions.weight", "blocks.0.norm1.weight"]
    assert "blocks.0.attention.query.weight" in names
    assert "blocks.0.feed_forward.down.bias" in names
    assert names[-1] == "head.bias"
    block = 4 * (64 + 8) + (8 * 32 + 32) + (32 * 8 + 8) + 4 * 8
    assert nn.count_parameters(model) == 11 * 8 + 6 * 8 + block + 16 + 8 * 11 + 11


def test_printing_shows_a_table() -> None:
    model = nn.MLP((3, 4, 2), key=0)
    assert repr(model) == "MLP(26 parameters)"
    assert str(model).splitlines() == [
        "MLP              type       parameters",
        "layers.0.weight  f32[3, 4]          12",
        "layers.0.bias    f32[4]              4",
        "layers.1.weight  f32[4, 2]           8",
        "layers.1.bias    f32[2]              2",
        "total            0.00 MiB           26",
    ]


def test_state_goes_out_and_in() -> None:
    source, target = nn.MLP((3, 4, 2), key=0), nn.MLP((3, 4, 2), key=1)
    loaded = nn.load_state_dict(target, nn.state_dict(source))
    for name, value in nn.named_parameters(loaded).items():
        np.testing.assert_array_equal(value.numpy(), nn.state_dict(source)[name].numpy())
    assert loaded.activation is target.activation


def test_a_state_that_does_not_fit_is_told_by_name() -> None:
    model = nn.MLP((3, 4, 2), key=0)
    state: dict[str, Any] = dict(nn.state_dict(model))
    del state["layers.1.bias"]
    state["extra"] = np.zeros(3, np.float32)
    state["layers.0.weight"] = np.zeros((4, 3), np.float32)
    state["layers.0.bias"] = np.zeros(4, np.int32)
    with pytest.raises(nn.StateError) as error:
        nn.load_state_dict(model, state)
    assert str(error.value).splitlines() == [
        "the state does not fit MLP",
        "  missing: layers.1.bias",
        "  not expected: extra",
        "  layers.0.weight needs f32[3, 4], got f32[4, 3]",
        "  layers.0.bias needs f32[4], got i32[4]",
    ]


def test_modules_are_frozen_and_replace_copies() -> None:
    layer = nn.Linear(3, 4, key=0)
    with pytest.raises(FrozenInstanceError):
        layer.weight = array(0.0)  # type: ignore[misc]
    without = layer.replace(bias=None)
    assert without.bias is None
    assert layer.bias is not None
    assert without.weight is layer.weight
    with pytest.raises(nn.StateError, match="Linear has no field scale; it has weight, bias"):
        layer.replace(scale=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(0, 4, key=0), "Linear needs sizes of at least 1, got 0 and 4"),
        (lambda: nn.MLP((3,), key=0), "MLP needs at least two sizes, got [3]"),
        (
            lambda: nn.MultiHeadAttention(10, 3, key=0),
            "attention needs a width that its heads divide, got width 10 and 3 heads",
        ),
        (
            lambda: tiny_gpt()(np.zeros((2, 7), np.int32)),
            "GPT needs at most 6 tokens, its context, got 7",
        ),
        (lambda: nn.Linear(3, 4, key=0)(np.zeros((2, 5), np.float32)), "got f32[2, 5]"),
    ],
)
def test_wrong_sizes_say_what_was_needed(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ShapeMismatch) as error:
        make()
    assert message in str(error.value)


def test_gpt_needs_integer_tokens() -> None:
    with pytest.raises(TypeMismatch, match=r"GPT needs integer tokens \(\.\.\., t\), got f32\[6\]"):
        tiny_gpt()(np.zeros(6, np.float32))
