"""Attention's gradients where the maximum of a row's scores is large, as an additive mask makes it:
fused kernels are as near to float64 as the program without them.
"""

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler.egraph.rules import attention, attention_gradient

BATCH, ROWS, KEYS, SIZE = 2, 21, 40, 16
KERNELS = ("attention", "attention_backward", "attention_bias")
RULES = (*attention.KERNELS, *attention_gradient.KERNELS)
UNFUSED = tuple(r.name for r in RULES if r.name != "delta")
LOWEST = float(np.finfo(np.float32).min)


def quarters(rng, *shape):
    """Random multiples of 1/4, so that scores are exact in float32 and only the kernels round."""
    return (np.round(rng.standard_normal(shape) * 4) / 4).astype(np.float32)


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    q, k = quarters(rng, BATCH, ROWS, SIZE), quarters(rng, BATCH, KEYS, SIZE)
    v, ct = (rng.standard_normal((BATCH, n, SIZE)).astype(np.float32) for n in (KEYS, ROWS))
    return q, k, v, quarters(rng, BATCH, ROWS, KEYS), ct


def gradients(causal, biased):
    """The program; queries see keys up to a few after them when causal."""

    def step(q, k, v, bias, ct):
        def loss(q, k, v, bias):
            s = q @ k.swapaxes(-1, -2) * 0.25
            s = s + bias if biased else s
            if causal:
                seen = eg.arange(KEYS)[None, :] <= eg.arange(ROWS)[:, None] + 5
                s = eg.where(seen, s, -np.inf)
            return (nn.softmax(s, -1) @ v * ct).sum()

        return eg.grad(loss, (0, 1, 2, 3)[: 3 + biased])(q, k, v, bias)

    return step


def expected(q, k, v, bias, ct, causal, biased):
    """In float64, but for scores, which are float32's."""
    q, k, v, ct = (x.astype(np.float64) for x in (q, k, v, ct))
    s = q @ k.swapaxes(1, 2) * 0.25
    s = (s.astype(np.float32) + bias * np.float32(biased)).astype(np.float64)
    if causal:
        s = np.where(np.tri(ROWS, KEYS, 5, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = ct @ v.swapaxes(1, 2)
    ds = p * (dp - (p * dp).sum(-1, keepdims=True))
    return ds @ k * 0.25, ds.swapaxes(1, 2) @ q * 0.25, p.swapaxes(1, 2) @ ct, ds


def errors(program, options, operands, want):
    """Of each gradient, against its largest element."""
    compiled = eg.compile(program, **options)
    got = compiled(*operands)
    fused = [k.name for k in compiled.report.kernels if "attention" in k.name]
    assert bool(fused) == ("force" in options)
    return [np.abs(np.asarray(a) - b).max() / np.abs(b).max() for a, b in zip(got, want)]


def masks(value, keys=slice(None)):
    def add(bias):
        bias[:, ::3, keys] = value

    return add


ADDED = {
    "-1e9 on whole rows": masks(-1e9),
    "the lowest float on whole rows": masks(LOWEST),
    "-1e4 on whole rows": masks(-1e4),
    "-1000 on whole rows": masks(-1000.0),
    "-1e9 on parts of rows": masks(-1e9, slice(1, None, 2)),
    "1e5 everywhere": lambda bias: np.add(bias, 1e5, out=bias),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ADDED)
def test_a_huge_bias(name, causal):
    q, k, v, bias, ct = arrays()
    ADDED[name](bias)
    want = expected(q, k, v, bias, ct, causal, True)
    program = gradients(causal, True)
    assert max(errors(program, {"force": KERNELS}, (q, k, v, bias, ct), want)) < 2e-6


def rounded(size):
    rng = np.random.default_rng(2)
    q, k = (rng.standard_normal((BATCH, n, SIZE)).astype(np.float32) for n in (ROWS, KEYS))
    return q * np.float32(size), k * np.float32(size)


def shifted(by):
    """Scores that are exact, those of a row alike up to a few: by * by / 4 and these."""
    q, k = arrays(1)[:2]
    q[..., 0] = k[..., 0] = by
    return q, k


PRODUCTS = {
    "of 1": rounded(1),
    "of 10": rounded(3),
    "of 100": rounded(10),
    "64 and a few": shifted(16),
    "16,384 and a few": shifted(256),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_large_products(name):
    operands = *PRODUCTS[name], *arrays()[2:]
    want = expected(*operands, False, False)
    program = gradients(False, False)
    fused = errors(program, {"force": KERNELS[:2]}, operands, want)
    unfused = errors(program, {"without": UNFUSED}, operands, want)
    for ours, theirs in zip(fused, unfused, strict=True):
        assert ours < 4 * theirs + 5e-7, (fused, unfused)


def test_grouped_heads_below_a_huge_bias():
    rng = np.random.default_rng(3)
    q = quarters(rng, 1, 4, 17, SIZE)
    k, v = quarters(rng, 1, 2, 24, SIZE), rng.standard_normal((1, 2, 24, SIZE)).astype(np.float32)
    hidden = np.zeros((1, 1, 17, 24), np.float32)
    hidden[:, :, ::3] = -1e9

    def loss(q, k, v, hidden):
        k, v = (eg.repeat(x, 2, 1) for x in (k, v))
        return ((nn.softmax(q @ k.swapaxes(-1, -2) * 0.25 + hidden, -1) @ v) ** 2).sum()

    program = eg.grad(loss, (0, 1, 2))
    fused = eg.compile(program, force=KERNELS[:2])
    unfused = eg.compile(program, without=UNFUSED)
    for a, b in zip(fused(q, k, v, hidden), unfused(q, k, v, hidden), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-6 * np.abs(np.asarray(b)).max(), rtol=0)
    assert any("attention_backward" in k.name for k in fused.report.kernels)
    assert not any("attention" in k.name for k in unfused.report.kernels)
