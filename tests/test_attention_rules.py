"""Attention is found however it is written, and nothing else is taken for it."""

import math
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.egraph import Options
from eggpu.compiler.library.attention import scaled_dot_product_attention as A
from eggpu.compiler.library.einsum import einsum
from eggpu.compiler.library.softmax import log_softmax, softmax
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import TupleType, parse_type

sys.path.insert(0, str(Path(__file__).parent))
from equal_classes import unequal


def T(x):
    return x.swapaxes(-1, -2)


def causal(n, offset=0):
    return eg.arange(n)[:, None] + offset >= eg.arange(n)[None, :]


def over(s, v, normalize=softmax):
    return normalize(s, -1) @ v


def future(n):
    return eg.arange(n)[None, :] > eg.arange(n)[:, None]


def carried(q, k, v):
    below = eg.array(np.tri(5, dtype=bool))
    return over(eg.where(below, q @ T(k), -math.inf), v)


def exp_of_log(q, k, v):
    scores = eg.where(causal(5), q @ T(k) * 0.3, -1e9)
    return over(scores, v, lambda s, axis: eg.exp(log_softmax(s, axis)))


def by_einsum(q, k, v):
    p = softmax(einsum("...qd,...kd->...qk", q, k) * 0.5, -1)
    return einsum("...qk,...kd->...qd", p, v)


def spelled_out(q, k, v):
    s = q @ T(k) / math.sqrt(3)
    e = eg.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def at_most(n):
    return eg.arange(n)[None, :] <= eg.arange(n)[:, None]


def below(n):
    return eg.tril(eg.ones((n, n), "bool"))


def carried_added(q, k, v):
    above = np.where(np.tri(5, dtype=bool), 0.0, -1e9).astype(np.float32)
    return over(q @ T(k) * 0.3 + eg.array(above), v)


def band(n, width):
    row, column = eg.arange(n)[:, None], eg.arange(n)[None, :]
    return (column <= row) & (column > row - width)


SPELLINGS = {
    "plain": lambda q, k, v: over(q @ T(k), v),
    "scaled scores": lambda q, k, v: over(q @ T(k) * 0.3, v),
    "scaled query": lambda q, k, v: over((q * 0.3) @ T(k), v),
    "scaled key": lambda q, k, v: over(q @ T(k * 0.3), v),
    "both scaled": lambda q, k, v: over((q * 0.5) @ T(k * 0.7), v),
    "divided": lambda q, k, v: over(q @ T(k) / math.sqrt(3), v),
    "divided query": lambda q, k, v: over((q / math.sqrt(3)) @ T(k), v),
    "causal, huge": lambda q, k, v: over(eg.where(causal(5), q @ T(k) * 0.3, -1e9), v),
    "causal, infinite": lambda q, k, v: over(eg.where(causal(5), q @ T(k) * 0.3, -math.inf), v),
    "future": lambda q, k, v: over(eg.where(future(5), -math.inf, q @ T(k) / 2.0), v),
    "added": lambda q, k, v: over(q @ T(k) * 0.3 + eg.where(causal(5), 0.0, -1e9), v),
    "carried": carried,
    "exp of log": exp_of_log,
    "softcap": lambda q, k, v: over(eg.tanh(q @ T(k) * 0.5 / 5.0) * 5.0, v),
    "library": lambda q, k, v: A(q, k, v, causal=True),
    "library, window": lambda q, k, v: A(q, k, v, causal=True, window=2),
    "library, capped window": lambda q, k, v: A(q, k, v, causal=True, window=2, softcap=3.0),
    "einsum": by_einsum,
    "spelled out": spelled_out,
    "reciprocal of the square root": lambda q, k, v: over(q @ T(k) * 3**-0.5, v),
    "turned key": lambda q, k, v: over(q @ T(k) * 0.3, v),
    "values scaled": lambda q, k, v: over(q @ T(k), v * 2.0),
    "result scaled": lambda q, k, v: over(q @ T(k) * 0.3, v) * 2.0,
    "less or equal": lambda q, k, v: over(eg.where(at_most(5), q @ T(k), -1e9), v),
    "lower triangle": lambda q, k, v: over(eg.where(below(5), q @ T(k), -math.inf), v),
    "carried, added": carried_added,
    "window by and": lambda q, k, v: over(eg.where(band(5, 2), q @ T(k) * 0.3, -1e9), v),
}


def attention_step(function, types, wrt=3):
    numbers = tuple(range(wrt))

    def loss(*arrays):
        return eg.sum(function(*arrays) ** 2)

    return trace(eg.value_and_grad(loss, numbers), *map(parse_type, types))


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        *((name, "2, 2, ") for name in SPELLINGS),
        *(("library", b) for b in ("", "2, ", "2, 1, 2, ")),
    ],
)
def test_attention_is_found_however_it_is_written(name, batch):
    found, _, report = unequal(attention_step(SPELLINGS[name], [f"f32[{batch}5, 3]"] * 3))
    assert report.recognized["attention"] == (1, 1)
    assert report.recognized["attention backward"] == (1, 1)
    assert found == []


QKV = ["f32[2, 2, 5, 3]"] * 3
SCORES, KEYS = "[2, 2, 5, 5]", "bool[2, 1, 1, 5]"


def grouped(q, k, v):
    return A(q, k, v, causal=True)


def ends(q, k, v):
    return A(q, k, v, causal="bottom-right")


def shapes(q, kv):
    return [f"f32[{q}]", f"f32[{kv}]", f"f32[{kv}]"]


MANY = ["f32[2, 2, 17, 3]"] * 3  # more rows than the kernels for few rows have


def masked(q, k, v, m, fill):
    return over(eg.where(m, q @ T(k), fill), v)


WITH_OPERANDS = {
    "mask": (A, [*QKV, KEYS], (False, 0, 0, "mask")),
    "mask and causal": (partial(A, causal=True), [*QKV, KEYS], (True, 0, 0, "mask")),
    "bias and causal": (partial(A, causal=True), [*QKV, "f32" + SCORES], (True, 0, 0, "bias")),
    "grouped heads": (grouped, shapes("2, 4, 5, 3", "2, 2, 5, 3"), (True, 0, 0, "none")),
    "keys before": (ends, shapes("2, 3, 3", "2, 5, 3"), (True, 2, 0, "none")),
    "rows without keys": (ends, shapes("5, 3", "3, 3"), (True, -2, 0, "none")),
    "window": (partial(A, causal=True, window=2), QKV, (True, 0, 2, "none")),
    "NaN for rows without keys": (
        partial(masked, fill=-math.inf), [*MANY, "bool[2, 2, 17, 17]"], (False, 0, 0, "mask")),
    "the mean for rows without keys": (
        partial(masked, fill=-1e9), [*QKV, "bool" + SCORES], (False, 0, 0, "mask")),
    "the first query sees nothing": (
        lambda q, k, v: masked(q, k, v, causal(17, -1), -1e9), MANY, (False, 0, 0, "mask")),
    "a bias": (lambda q, k, v, b: over(q @ T(k) + b, v), [*QKV, "f32" + SCORES],
               (False, 0, 0, "bias")),
    "mask and bias": (
        lambda q, k, v, m, b: over(eg.where(m, q @ T(k) + b, -math.inf), v),
        [*QKV, KEYS, "f32[2, 5, 5]"], (False, 0, 0, "both")),
}  # fmt: skip


@pytest.mark.parametrize("name", WITH_OPERANDS)
def test_masks_biases_and_offsets_are_kept(name):
    function, types, options = WITH_OPERANDS[name]
    found, snapshot, report = unequal(attention_step(function, types))
    assert found == []
    assert report.recognized["attention backward"] == (1, 1)
    ops = [op for op in snapshot.ops if op.name == "attention"]
    assert {(op.causal, op.offset, op.window, op.extra) for op in ops} == {options}


def over_wrong_sum(q, k, v):
    e = eg.exp(q @ T(k) - (q @ T(k)).max(-1, keepdims=True))
    return e / e.sum(-2, keepdims=True) @ v


def over_wrong_maximum(q, k, v):
    e = eg.exp(q @ T(k) - (q @ T(k)).max(-2, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ v


def with_epsilon(q, k, v):
    e = eg.exp(q @ T(k) - (q @ T(k)).max(-1, keepdims=True))
    return e / (e.sum(-1, keepdims=True) + 1e-6) @ v


def unshifted(q, k, v):
    e = eg.exp(q @ T(k))
    return e / e.sum(-1, keepdims=True) @ v


def a_sink(q, k, v):
    s = eg.concatenate([q @ T(k), eg.zeros((2, 2, 5, 1))], -1)
    return softmax(s, -1)[..., :5] @ v


def dropped(q, k, v, m):
    return (softmax(q @ T(k), -1) * m) @ v


NOT_ATTENTION = {
    "hidden scores count": (lambda q, k, v: masked(q, k, v, causal(5), -10.0), QKV),
    "a bias as far below as hidden scores": (
        lambda q, k, v, b: over(eg.where(causal(5), q @ T(k) + b, -1e9), v),
        [*QKV, "f32" + SCORES]),
    "softmax over queries": (lambda q, k, v: softmax(q @ T(k), -2) @ v, QKV),
    "dropout": (dropped, [*QKV, "f32" + SCORES]),
    "a mask after softmax": (
        lambda q, k, v: eg.where(causal(5), softmax(q @ T(k), -1), 0.0) @ v, QKV),
    "a scale for each head": (
        lambda q, k, v, c: over(q @ T(k) * c, v), [*QKV, "f32[2, 1, 1]"]),
    "a scale for each key": (
        lambda q, k, v, c: over(q @ T(k) * c, v), [*QKV, "f32[5]"]),
    "a sum over queries": (over_wrong_sum, QKV),
    "a maximum over queries": (over_wrong_maximum, QKV),
    "a sum and a bit": (with_epsilon, QKV),
    "no maximum": (unshifted, QKV),
    "a sink": (a_sink, QKV),
    "sigmoid": (lambda q, k, v: eg.sigmoid(q @ T(k)) @ v, QKV),
    "softmax twice": (lambda q, k, v: over(softmax(q @ T(k), -1), v), QKV),
    "logarithms": (lambda q, k, v: log_softmax(q @ T(k), -1) @ v, QKV),
    "sums of probabilities": (lambda q, k, v: eg.cumsum(softmax(q @ T(k), -1), -1) @ v, QKV),
    "squares of probabilities": (lambda q, k, v: softmax(q @ T(k), -1) ** 2 @ v, QKV),
    "squares of scores": (lambda q, k, v: over((q @ T(k)) ** 2, v), QKV),
    "a tangent without its scale": (lambda q, k, v: over(eg.tanh(q @ T(k)) + 1.0, v), QKV),
    "hidden scores are 0": (lambda q, k, v: masked(q, k, v, causal(5), 0.0), QKV),
    "two arrays of scores": (
        lambda q, k, v: over(eg.where(causal(5), q @ T(k), k @ T(q)), v), QKV),
    "distances": (
        lambda q, k, v: over(-((q[..., :, None, :] - k[..., None, :, :]) ** 2).sum(-1), v), QKV),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_ATTENTION)
def test_what_is_not_attention_stays_as_it_is(name):
    function, types = NOT_ATTENTION[name]
    found, snapshot, _ = unequal(attention_step(function, types))
    assert found == []
    assert not any(isinstance(t, TupleType) for t in snapshot.types)


def test_a_bias_below_a_mask_becomes_attention_when_asked_for():
    function, types = NOT_ATTENTION["a bias as far below as hidden scores"]
    found, _, report = unequal(attention_step(function, types), options=Options(relaxed=True))
    assert found == []
    assert report.recognized["attention backward"] == (1, 1)
