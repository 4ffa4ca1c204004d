"""Attention as other code writes it (GPT-2, T5, ALiBi, Flax, timm, Gemma and the like), and what is
nearly attention.
"""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler.egraph import Options
from eggpu.compiler.reference import evaluate
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import TupleType, parse_type

sys.path.insert(0, str(Path(__file__).parent))
from equal_classes import unequal
from test_attention_combinations import fused
from test_attention_rules import NOT_ATTENTION

B, H, T, D = 2, 4, 5, 8
LOWEST = float(np.finfo(np.float32).min)
QKV = [f"f32[{B}, {H}, {T}, {D}]"] * 3
BTHD = [f"f32[{B}, {T}, {H}, {D}]"] * 3
ROWS = [f"f32[{B}, {T}, {H * D}]"] * 3
GROUPED = [QKV[0], *[f"f32[{B}, 2, {T}, {D}]"] * 2]
KEYS, FLAGS = f"f32[{B}, 1, 1, {T}]", f"bool[{B}, {T}]"


def softmax(s):
    return nn.softmax(s, -1)


def turned(x):
    return x.swapaxes(-1, -2)


def scores(q, k):
    return q @ turned(k) / math.sqrt(D)


def lower():
    return eg.tril(eg.ones((T, T), "bool"))


def heads(x):
    return eg.transpose(x.reshape((B, T, H, D)), (0, 2, 1, 3))


def nano_gpt(q, k, v):
    mask = eg.array(np.tril(np.ones((1, 1, T, T), np.float32)))
    return softmax(eg.where(mask[:, :, :T, :T] == 0, -math.inf, scores(q, k))) @ v


def alibi(q, k, v):
    slopes = eg.array((2.0 ** -np.arange(1, H + 1)).astype(np.float32)).reshape((1, H, 1, 1))
    places = (eg.arange(T)[None, :] - eg.arange(T)[:, None]).astype("f32")
    return softmax(eg.where(lower(), scores(q, k) + slopes * places, -math.inf)) @ v


def flax(q, k, v):
    s = eg.einsum("bqhd,bkhd->bhqk", q / math.sqrt(D), k)
    return eg.einsum("bhqk,bkhd->bqhd", softmax(eg.where(lower(), s, LOWEST)), v)


def by_transpose(q, k, v):
    q, k, v = heads(q), heads(k), heads(v)
    return eg.transpose(softmax(scores(q, k)) @ v, (0, 2, 1, 3)).reshape((B, T, H * D))


def by_swapaxes(q, k, v):
    q, k, v = (x.reshape((B, T, H, D)).swapaxes(1, 2) for x in (q, k, v))
    out = softmax(eg.where(lower(), scores(q, k), -math.inf)) @ v
    return out.swapaxes(1, 2).reshape((B, T, H * D))


def timm(x):
    x = eg.transpose(x.reshape((B, T, 3, H, D)), (2, 0, 3, 1, 4))
    return softmax((x[0] * D**-0.5) @ turned(x[1])) @ x[2]


def split(x):
    q, k, v = (heads(x[..., i * H * D : (i + 1) * H * D]) for i in range(3))
    return softmax(eg.where(lower(), scores(q, k), -math.inf)) @ v


def shifted(q, k, v):
    s = scores(q, k)
    e = eg.exp(s - eg.stop_gradient(s.max(-1, keepdims=True)))
    return (e / e.sum(-1, keepdims=True)) @ v


def divided_last(q, k, v):
    s = scores(q, k)
    e = eg.exp(s - s.max(-1, keepdims=True))
    return (e @ v) / e.sum(-1, keepdims=True)


def reciprocal(q, k, v):
    s = scores(q, k)
    e = eg.exp(s - s.max(-1, keepdims=True))
    return (e * (1.0 / e.sum(-1, keepdims=True))) @ v


def log_sum_exp(q, k, v):
    s = scores(q, k)
    top = s.max(-1, keepdims=True)
    return eg.exp(s - (eg.log(eg.exp(s - top).sum(-1, keepdims=True)) + top)) @ v


def repeated(q, k, v):
    k, v = (eg.repeat(x, 2, 1) for x in (k, v))
    return softmax(eg.where(lower(), scores(q, k), -math.inf)) @ v


def expanded(q, k, v):
    shape = (B, 2, 2, T, D)
    k, v = (eg.broadcast_to(x[:, :, None], shape).reshape((B, H, T, D)) for x in (k, v))
    return softmax(scores(q, k)) @ v


def gemma(q, k, v):
    s = eg.tanh(scores(q, k) / 30.0) * 30.0
    return softmax(eg.where(lower(), s, -2.3819763e38)) @ v


def torch_mask(q, k, v):
    above = np.triu(np.full((T, T), -np.inf, np.float32), 1)
    return softmax(scores(q, k) + eg.array(above)) @ v


def both_hidden(q, k, v, m):
    s = eg.where(lower(), scores(q, k), -math.inf)
    return softmax(eg.where(m[:, None, None, :], s, -math.inf)) @ v


def guarded(q, k, v, m):
    m = m[:, None, None, :]
    return eg.where(m, softmax(eg.where(m, scores(q, k), -1e9)), 0.0) @ v


# name: program, types, how many of the first arrays have gradients (0: only forward is found)
AS_WRITTEN = {
    "nanoGPT": (nano_gpt, QKV, 3),
    "GPT-2, lowest float": (
        lambda q, k, v: softmax(eg.where(lower()[None, None], scores(q, k), LOWEST)) @ v, QKV, 3),
    "BERT, 1 - mask times -1e4": (
        lambda q, k, v, m: softmax(scores(q, k) + (1.0 - m) * -1e4) @ v, [*QKV, KEYS], 3),
    "BERT, 1 - mask times the lowest float": (
        lambda q, k, v, m: softmax(scores(q, k) + (1.0 - m) * LOWEST) @ v, [*QKV, KEYS], 3),
    "a mask as floats times -1e9": (
        lambda q, k, v, m: softmax(
            scores(q, k) + (~m[:, None, None]).astype("f32") * -1e9) @ v, [*QKV, FLAGS], 3),
    "causal by -inf, padding added": (
        lambda q, k, v, m: softmax(
            eg.where(lower(), scores(q, k), -math.inf) + m) @ v, [*QKV, KEYS], 3),
    "two masks added": (
        lambda q, k, v, m: softmax(
            scores(q, k) + eg.where(lower(), 0.0, -1e9) + m) @ v, [*QKV, KEYS], 3),
    "T5": (
        lambda q, k, v, b: softmax(eg.einsum("bhqd,bhkd->bhqk", q, k) + b) @ v,
        [*QKV, f"f32[1, {H}, {T}, {T}]"], 4),
    "ALiBi": (alibi, QKV, 3),
    "Flax": (flax, BTHD, 3),
    "heads by reshape and transpose": (by_transpose, ROWS, 3),
    "heads by swapaxes": (by_swapaxes, ROWS, 3),
    "timm": (timm, [f"f32[{B}, {T}, {3 * H * D}]"], 0),
    "parts of one product": (split, [f"f32[{B}, {T}, {3 * H * D}]"], 0),
    "heads in the batch": (
        lambda q, k, v: softmax(q * D**-0.5 @ eg.transpose(k, (0, 2, 1))) @ v,
        [f"f32[{B * H}, {T}, {D}]"] * 3, 3),
    "bthd": (
        lambda q, k, v: eg.einsum(
            "bhts,bshd->bthd", softmax(eg.einsum("bthd,bshd->bhts", q, k) * 0.3), v), BTHD, 3),
    "keys first": (
        lambda q, k, v: eg.einsum(
            "nhqk,nkhd->nqhd", softmax(eg.einsum("nkhd,nqhd->nhqk", k, q) * 0.3), v), BTHD, 3),
    "scores by keys, turned": (lambda q, k, v: softmax(turned(k @ turned(q)) * 0.3) @ v, QKV, 3),
    "values first": (
        lambda q, k, v: turned(turned(v) @ turned(softmax(scores(q, k)))), QKV, 3),
    "maximum as a constant": (shifted, QKV, 3),
    "divided after the product": (divided_last, QKV, 0),
    "reciprocal of the sum": (reciprocal, QKV, 0),
    "log-sum-exp": (log_sum_exp, QKV, 0),
    "heads repeated": (repeated, GROUPED, 3),
    "heads expanded": (expanded, GROUPED, 3),
    "one head of keys": (
        lambda q, k, v: softmax(scores(q, k)) @ v, [QKV[0], *[f"f32[{B}, 1, {T}, {D}]"] * 2], 3),
    "Gemma": (gemma, QKV, 3),
    "fourth roots": (
        lambda q, k, v: softmax((q * D**-0.25) @ turned(k * D**-0.25)) @ v, QKV, 3),
    "torch's square mask": (torch_mask, QKV, 3),
    "where of the upper triangle": (
        lambda q, k, v: softmax(eg.where(
            eg.triu(eg.ones((T, T), "bool"), 1), -math.inf, scores(q, k))) @ v, QKV, 3),
    "causal and keys": (
        lambda q, k, v, m: softmax(eg.where(
            lower()[None, None] & m[:, None, None, :], scores(q, k), -1e9)) @ v,
        [*QKV, FLAGS], 3),
    "hidden twice": (both_hidden, [*QKV, FLAGS], 3),
    "segments": (
        lambda q, k, v, i: softmax(eg.where(
            i[:, None, :, None] == i[:, None, None, :], scores(q, k), -math.inf)) @ v,
        [*QKV, f"i32[{B}, {T}]"], 3),
    "probabilities hidden too": (guarded, [*QKV, FLAGS], 0),
    "a matrix each": (
        lambda q, k, v: softmax(q @ k.T / np.sqrt(D)) @ v, [f"f32[{T}, {D}]"] * 3, 3),
}  # fmt: skip


def saturated(function, types, wrt):
    def loss(*arrays):
        out = function(*arrays)
        return eg.sum(out * out), out

    program = eg.value_and_grad(loss, tuple(range(wrt)), has_aux=True)
    return unequal(trace(program, *map(parse_type, types)))


def behind_numbers(snapshot, cls):
    """The class, and those of which it is a multiple: a scale that was applied to an operand is
    applied to its gradient."""
    found, stack = {cls}, [cls]
    while stack:
        at = stack.pop()
        for op, kids, c in zip(snapshot.ops, snapshot.kids, snapshot.cls, strict=True):
            label = getattr(op, "label", op.name)
            if c == at and label in ("mul", "div", "transpose", "reshape"):
                stack += [k for k in kids[:1] if k not in found]
                found.update(kids[:1])
    return found


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_attention_as_written_is_found(name):
    function, types, wrt = AS_WRITTEN[name]
    found, snapshot, report = saturated(function, types, max(1, wrt))
    assert found == []
    assert report.recognized["attention"] == (1, 1)
    for k in range(wrt):
        kernel = "attention_backward" if k < 3 else "attention_bias"
        classes = behind_numbers(snapshot, snapshot.roots[2 + k])
        assert any(fused(snapshot, c, kernel) for c in classes), k


def other_mask(q, k, v, m):
    p = softmax(eg.where(m[:, None, None, :], scores(q, k), -1e9))
    return eg.where(m[:, None, :, None], p, 0.0) @ v


def talking_heads(q, k, v):
    p = softmax(scores(q, k))
    return eg.einsum("bhqk,hg->bgqk", p, eg.ones((H, H))) @ v


def normed(q, k, v):
    s = scores(q, k)
    return softmax(s - s.mean(-1, keepdims=True) * 0.5 * s) @ v


NEARLY = {
    "masked scores are 0": (lambda q, k, v, m: softmax(scores(q, k) * m) @ v, [*QKV, KEYS]),
    "-100 counts": (
        lambda q, k, v, m: softmax(eg.where(m > 0.5, scores(q, k), -100.0)) @ v, [*QKV, KEYS]),
    "probabilities hidden by another mask": (other_mask, [*QKV, FLAGS]),
    "softmax over heads": (lambda q, k, v: nn.softmax(scores(q, k), 1) @ v, QKV),
    "heads mixed": (talking_heads, QKV),
    "a temperature of each head": (
        lambda q, k, v, t: softmax(scores(q, k) / t) @ v, [*QKV, f"f32[{H}, 1, 1]"]),
    "scores less part of their mean": (normed, QKV),
    "probabilities renormalized": (
        lambda q, k, v, m: (lambda p: (p / p.sum(-1, keepdims=True)) @ v)(
            softmax(scores(q, k)) * m), [*QKV, KEYS]),
    "padding added after a mask": (
        lambda q, k, v, m: softmax(eg.where(lower(), scores(q, k), LOWEST) + m) @ v, [*QKV, KEYS]),
    "a linear one": (lambda q, k, v: softmax(q) @ (turned(nn.softmax(k, -2)) @ v), QKV),
}  # fmt: skip


@pytest.mark.parametrize("name", NEARLY)
def test_what_is_nearly_attention_stays_as_it_is(name):
    function, types = NEARLY[name]
    found, snapshot, _ = saturated(function, types, 3)
    assert found == []
    assert not any(isinstance(t, TupleType) for t in snapshot.types)


@pytest.mark.parametrize("name", [*NOT_ATTENTION, *NEARLY])
def test_what_is_nearly_attention_is_computed_as_written(name):
    function, types = (NOT_ATTENTION | NEARLY)[name]
    rng = np.random.default_rng(3)
    arrays = []
    for kind in map(parse_type, types):
        given = rng.standard_normal(kind.shape).astype(np.float32)
        arrays.append(given > -0.8 if kind.dtype.name == "bool" else given)
    graph = trace(function, *map(parse_type, types))
    (want,) = evaluate(graph, arrays, np.float64)
    compiled = eg.compile(function, cache=False)
    np.testing.assert_allclose(np.asarray(compiled(*arrays)), want, rtol=2e-4, atol=2e-5)
    assert not any("attention" in kernel.name for kernel in compiled.plan.kernels)


REASONS = {  # of what is nearly attention, what keeps it from being found
    "a sum over queries": "exponentials are divided by their sum over axis 2, not over the keys",
    "a maximum over queries": "the maximum over axis 2 is subtracted, not that of the keys",
    "a sum and a bit": "something is added to the sum that softmax divides by",
    "a sink": "the probabilities go through slice before the product with the values",
    "softmax twice": "softmax is taken of probabilities, not of scores",
    "squares of scores": "two products are multiplied in the scores",
    "a tangent without its scale": "tanh stands between the product and softmax: a soft cap is",
    "padding added after a mask": "what is added to masked scores belongs to the scores",
    "probabilities renormalized": "the probabilities go through div before the product",
    "a temperature of each head": "the scale is an array that differs between scores (div)",
    "sigmoid": None,
    "distances": None,
}


@pytest.mark.parametrize("name", REASONS)
def test_what_is_nearly_attention_is_told_why(name):
    function, types = (NOT_ATTENTION | NEARLY)[name]
    _, _, report = unequal(trace(function, *map(parse_type, types)))
    told = [miss.why for miss in report.near_misses]
    assert len(told) == (REASONS[name] is not None)
    assert all(why.startswith(REASONS[name]) for why in told)


def test_what_relaxed_is_said_to_ignore_is_then_found():
    function, types = NOT_ATTENTION["no maximum"]
    graph = trace(function, *map(parse_type, types))
    (miss,) = unequal(graph)[2].near_misses
    assert miss.why.endswith(": relaxed=True ignores that")
    found = unequal(graph, options=Options(relaxed=True))[2]
    assert found.recognized["attention"] == (1, 1)
    assert found.near_misses == []
