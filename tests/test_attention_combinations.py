"""Attention and all its gradients are in the e-graph as fused kernels, for every combination of
grouped heads, mask, bias, causal, window, soft cap and of what a row without keys gives.
"""

import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.reference import evaluate
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import parse_type

sys.path.insert(0, str(Path(__file__).parent))
from equal_classes import unequal

BATCH, HEADS, LENGTH, SIZE = 2, 4, 5, 3
GIVEN = {  # of a mask or bias
    "": "",
    "full": "2, 4, 5, 5",
    "heads": "1, 4, 5, 5",
    "batch": "2, 1, 5, 5",
    "keys": "2, 1, 1, 5",
}
PLACES = ("", "causal", "window")


def safe_softmax(s):
    """0 for a row of -inf."""
    top = s.max(-1, keepdims=True)
    e = eg.exp(s - eg.stop_gradient(eg.where(top == -np.inf, 0.0, top)))
    total = e.sum(-1, keepdims=True)
    return e / eg.where(total == 0, 1.0, total)


# what hidden scores are, and the softmax of them
EMPTY = {
    "zero": (-np.inf, safe_softmax),
    "nan": (-np.inf, lambda s: eg.nn.softmax(s, -1)),
    "mean": (-1e9, lambda s: eg.nn.softmax(s, -1)),
}


def attention(grouped, mask, bias, place, capped, empty):
    """The program, the types of its arrays, and which of them have gradients."""
    heads = 2 if grouped else HEADS
    types = [f"f32[2, {h}, 5, 3]" for h in (HEADS, heads, heads)]
    types += [f"{t}[{GIVEN[given]}]" for t, given in (("bool", mask), ("f32", bias)) if given]
    fill, softmax = EMPTY[empty]

    def run(q, k, v, *more):
        extra = list(more)
        seen = extra.pop(0) if mask else None
        if grouped:
            k, v = (eg.repeat(x, 2, 1) for x in (k, v))
        s = q @ k.swapaxes(-1, -2) * 0.4
        if capped:
            s = eg.tanh(s / 3.0) * 3.0
        if bias:
            s = s + extra.pop(0)
        row, key = eg.arange(LENGTH)[:, None], eg.arange(LENGTH)[None, :]
        if place:
            visible = key <= row
            visible = visible & (key > row - 3) if place == "window" else visible
            seen = visible if seen is None else seen & visible
        return softmax(s if seen is None else eg.where(seen, s, fill)) @ v

    return run, types, [i for i, t in enumerate(types) if t.startswith("f32")]


def cases():
    """All combinations; and arrays of other shapes, that are repeated, in a few of them."""
    every = product((False, True), ("", "full"), ("", "full"), PLACES, (False, True), EMPTY)
    shapes = product((False,), ("", "keys"), ("heads", "batch", "keys"), ("",), (True,), EMPTY)
    for case in (*every, *shapes):
        _, mask, bias, place, _, empty = case
        low_bias = empty == "mean" and bias  # no attention: see the near misses
        if not low_bias and (mask or place or empty == "nan"):
            yield case


def fused(snapshot, cls, kernel):
    """Whether a class is a result of a kernel, up to views of it and sums of heads."""
    rows = {}
    for op, kids, c in zip(snapshot.ops, snapshot.kids, snapshot.cls, strict=True):
        rows.setdefault(c, []).append((op.name, kids))
    stack, seen = [cls], {cls}
    while stack:
        for name, kids in rows[stack.pop()]:
            if name == "get" and any(maker == kernel for maker, _ in rows[kids[0]]):
                return True
            if name in ("reshape", "transpose", "sum") and kids[0] not in seen:
                stack.append(kids[0])
                seen.add(kids[0])
    return False


def step(*case):
    run, types, gradients = attention(*case)

    def loss(*arrays):
        out = run(*arrays)
        return eg.sum(out * out), out

    graph = trace(eg.value_and_grad(loss, gradients, has_aux=True), *map(parse_type, types))
    return graph, gradients


@pytest.mark.parametrize("case", [*cases()], ids=lambda c: "-".join(str(x) for x in c if x))
def test_every_combination_is_fused_forward_and_backward(case):
    graph, gradients = step(*case)
    found, snapshot, report = unequal(graph)
    assert found == []  # every e-node has the value of its class in float64
    assert report.stop == "saturated"
    assert fused(snapshot, snapshot.roots[1], "attention")
    for k, argument in enumerate(gradients):
        kernel = "attention_backward" if argument < 3 else "attention_bias"
        assert fused(snapshot, snapshot.roots[2 + k], kernel), argument


# -- on a device -----------------------------------------------------------------------------------

RUN = [
    (False, "", "full", "", False, "nan"),
    (False, "", "heads", "causal", True, "zero"),
    (True, "", "batch", "causal", False, "nan"),
    (True, "full", "", "", True, "mean"),
    (False, "keys", "", "window", False, "mean"),
    (False, "full", "heads", "", True, "zero"),
    (True, "keys", "batch", "causal", False, "zero"),
    (False, "keys", "keys", "window", True, "nan"),
]
KERNELS = ("attention", "attention_backward", "attention_bias")


@pytest.mark.parametrize("case", RUN, ids=lambda c: "-".join(str(x) for x in c if x))
def test_fused_kernels_agree_with_numpy(case):
    """The kernels, taken whatever they cost, against the traced program in float64."""
    run, types, gradients = attention(*case)

    def loss(*arrays):
        out = run(*arrays)
        return eg.sum(out * out), out

    program = eg.value_and_grad(loss, gradients, has_aux=True)
    rng = np.random.default_rng(0)
    arrays = []
    for text in types:
        shape = parse_type(text).shape
        if text.startswith("bool"):
            arrays.append(rng.random(shape) < 0.7)
            arrays[-1][..., 0] = True  # no row without keys: NaN would hide the rest
        else:
            arrays.append(rng.standard_normal(shape).astype(np.float32))
    graph, _ = step(*case)
    want = evaluate(graph, arrays, np.float64)
    forced = eg.compile(program, force=KERNELS)
    (value, out), grads = forced(*arrays)
    names = " ".join(k.name for k in forced.report.kernels)
    assert all(name in names for name in KERNELS[: 2 + bool(case[2])]), names
    for a, b in zip([value, out, *grads], want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=2e-5 * np.abs(b).max())
