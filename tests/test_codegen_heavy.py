"""Products, convolutions, scatter-add and attention as whole groups, with what is computed before
and after them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from eggpu.compiler.ir import Graph, make
from eggpu.compiler.ops import (
    dot,
    full,
    scatter_add,
    swap,
    transpose,
)
from eggpu.compiler.ops import elementwise as E
from eggpu.compiler.ops.fused import Attention, AttentionBackward, AttentionBias, get
from eggpu.compiler.ops.window import conv
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule.target import Target
from eggpu.compiler.types import bool_, f32, i32
from eggpu.runtime import Device, open_device

sys.path.insert(0, str(Path(__file__).parent))
from lowering import TARGETS, check, given, spread, values


@pytest.fixture(scope="module")
def device() -> Device:
    """No device fails the tests: nothing here skips."""
    return open_device()


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


# -- products, convolutions, scatter-add, attention

PRODUCTS = [
    ((), 5, 7, 3),
    ((2,), 33, 20, 17),
    ((2, 3), 16, 32, 24),
    ((), 1, 300, 500),
    ((), 300, 1, 64),
    ((), 4, 8, 5000),
]


@pytest.mark.parametrize(("lead", "m", "n", "k"), PRODUCTS)
def test_products_in_every_layout(device, target, lead, m, n, k):
    for left in (given(0, (*lead, m, k)), swap(given(0, (*lead, k, m)))):
        for right in (given(1, (*lead, k, n)), swap(given(1, (*lead, n, k)))):
            inputs = [o.operands[0] if o.operands else o for o in (left, right)]
            check(device, target, inputs, [dot(left, right)], tol=3e-6)


@pytest.mark.parametrize(("lead", "m", "n", "k"), PRODUCTS)
def test_product_with_prologue_and_epilogue(device, target, lead, m, n, k):
    a, b, bias, row = (
        given(0, (*lead, m, k)),
        given(1, (*lead, k, n)),
        given(2, (n,)),
        given(3, (m, 1)),
    )
    c = dot(E.maximum(a * spread(row, a.shape), full(0, a.shape, f32)), b * 0.25)
    y = E.sigmoid(c + spread(bias, c.shape))
    check(device, target, [a, b, bias, row], [c, y, swap(y) * 2.0], tol=5e-6)


def test_products_of_integers(device, target):
    a, b = given(0, (5, 6), i32), given(1, (6, 8), i32)
    check(device, target, [a, b], [dot(a, b) + 1])


@pytest.mark.parametrize(
    ("stride", "dilation", "groups"), [((1, 1), (1, 1), 1), ((2, 1), (1, 2), 2)]
)
def test_convolution(device, target, stride, dilation, groups):
    x, w = given(0, (2, 4, 9, 10)), given(1, (6, 4 // groups, 3, 2))
    y = conv(x, w, stride, dilation, groups)
    check(device, target, [x, w], [E.maximum(y, full(0, y.shape, f32))], kernels=1)


@pytest.mark.parametrize(
    ("count", "rows", "width"),
    [(4, 50, 2), (513, 300, 6), (1000, 40, 4), (64, 1, 8), (2000, 3000, 1), (40000, 7, 4)],
)
def test_scatter_add_loses_no_update(device, target, count, rows, width):
    updates, places, w = given(0, (count, width)), given(1, (count,), i32), given(2, (rows, width))
    total = scatter_add(updates * 0.5, places, rows)
    args = [
        values(updates),
        np.random.default_rng(1).integers(-2 * rows, 2 * rows, count).astype(np.int32),
        values(w),
    ]
    check(
        device, target, [updates, places, w], [w - total, transpose(total, (1, 0))], args, tol=5e-6
    )


@pytest.mark.parametrize(
    ("lead", "tq", "tk", "d", "dv", "causal", "window", "cap", "extra"),
    [
        ((2, 3), 16, 16, 8, 8, True, 0, 0.0, "none"),
        ((2,), 13, 21, 7, 5, False, 0, 0.0, "mask"),
        ((2, 2), 40, 40, 16, 16, True, 9, 0.0, "bias"),
        ((1,), 33, 33, 64, 64, True, 0, 5.0, "none"),
    ],
)
def test_attention_and_its_gradients(
    device, target, lead, tq, tk, d, dv, causal, window, cap, extra
):
    q, k, v = given(0, (*lead, d, tq)), given(1, (*lead, tk, d)), given(2, (*lead, tk, dv))
    row = [given(3, (tq, tk), f32 if extra == "bias" else bool_)] if extra != "none" else []
    more = [spread(r, (*lead, tq, tk)) for r in row]
    attributes = (d**-0.5, causal, tk - tq, window, cap, extra)
    both = make(Attention(*attributes), swap(q), k, v, *more)
    out, stats = get(both, 0), get(both, 1)
    check(device, target, [q, k, v, *row], [swap(out), stats], tol=3e-6, kernels=1)
    forward = Graph("f", (q, k, v, *row), (stats,))
    args = [values(i) for i in forward.inputs]
    given_stats, delta, ct = (
        given(4, (*lead, tq, 2)),
        given(5, (*lead, tq, 1)),
        given(6, (*lead, tq, dv)),
    )
    grads = make(AttentionBackward(*attributes), swap(q), k, v, given_stats, delta, ct, *more)
    args += [evaluate(forward, args)[0], values(delta), values(ct)]
    outputs = [get(grads, 0) + swap(q), get(grads, 1), swap(get(grads, 2))]
    check(
        device, target, [q, k, v, *row, given_stats, delta, ct], outputs, args, tol=1e-5, kernels=2
    )


@pytest.mark.parametrize("axes", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("extra", ["bias", "both"])
def test_the_gradient_of_a_bias(device, target, axes, extra):
    lead, t, n = (2, 3), 13, 20
    q, k, v = given(0, (*lead, t, 8)), given(1, (*lead, n, 8)), given(2, (*lead, n, 4))
    rows = [given(3, (t, n), bool_)] * (extra == "both")
    rows.append(given(4, (*[1 if a in axes else m for a, m in enumerate(lead)], t, n)))
    more = [spread(r, (*lead, t, n)) for r in rows]
    attributes = (0.5, True, n - t, 0, 0.0, extra, "nan")
    stats = get(make(Attention(*attributes), q, k, v, *more), 1)
    forward = Graph("f", (q, k, v, *rows), (stats,))
    args = [values(i) for i in forward.inputs]
    rest = given(5, (*lead, t, 2)), given(6, (*lead, t, 1)), given(7, (*lead, t, 4))
    bias = make(AttentionBias(*attributes, axes), q, k, v, *rest, *more)
    args += [evaluate(forward, args)[0], *map(values, rest[1:])]
    kernels = [get(bias, 0) * 2.0]
    check(device, target, [q, k, v, *rows, *rest], kernels, args, tol=1e-5, kernels=1)
