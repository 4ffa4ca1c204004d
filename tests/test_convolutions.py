"""Convolutions: their forms have equal values, the cheapest is taken, and gradients are right."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler.ir import Graph, make
from eggpu.compiler.ops import input_node
from eggpu.compiler.ops.window import Conv
from eggpu.compiler.pipeline import compile_graph
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule.target import FLOOR, H200
from eggpu.compiler.tracing import trace_call
from eggpu.compiler.types import Type, f32

GPU = replace(FLOOR, name="gpu", max_bindings=16, subgroup=32, features=("subgroup",), profile=H200)

# shapes of x and w, stride, padding, dilation, groups
CASES = {
    "plain": ((2, 3, 9, 8), (4, 3, 3, 3), 1, 1, 1, 1),
    "1x1": ((2, 5, 7, 6), (3, 5, 1, 1), 1, 0, 1, 1),
    "stride": ((2, 3, 10, 9), (4, 3, 3, 2), 2, 1, 1, 1),
    "stride leaves a rest": ((1, 2, 11, 8), (3, 2, 3, 3), 3, 0, 1, 1),
    "dilation": ((2, 3, 11, 9), (2, 3, 3, 2), 1, 2, 2, 1),
    "groups": ((2, 6, 8, 7), (4, 3, 3, 3), 2, 1, 1, 2),
    "depthwise": ((3, 8, 12, 11), (8, 1, 3, 3), 1, 1, 1, 8),
    "depthwise, two results each": ((2, 4, 9, 9), (8, 1, 5, 3), 2, 2, 1, 4),
    "one place": ((2, 4, 3, 3), (5, 4, 3, 3), 1, 0, 1, 1),
}


def reference(x, w, c, stride, padding, dilation, groups):
    """The convolution, and gradients of its sum times c, by loops over the window in float64."""
    x, w, c = (v.astype(np.float64) for v in (x, w, c))
    places = c.shape[2:]
    wide = np.pad(x, ((0, 0), (0, 0), *[(padding, padding)] * 2))
    out, dx, dw = np.zeros(c.shape), np.zeros(wide.shape), np.zeros(w.shape)
    each_in, each_out = w.shape[1], w.shape[0] // groups
    for g, i, j in itertools.product(range(groups), *map(range, w.shape[2:])):
        ins, outs = slice(g * each_in, (g + 1) * each_in), slice(g * each_out, (g + 1) * each_out)
        at = [
            slice(k * dilation, k * dilation + (p - 1) * stride + 1, stride)
            for k, p in zip((i, j), places, strict=True)
        ]
        part = wide[:, ins, at[0], at[1]]
        out[:, outs] += np.einsum("nihw,oi->nohw", part, w[outs, :, i, j])
        dx[:, ins, at[0], at[1]] += np.einsum("nohw,oi->nihw", c[:, outs], w[outs, :, i, j])
        dw[outs, :, i, j] = np.einsum("nohw,nihw->oi", c[:, outs], part)
    inner = [slice(padding, padding + s) for s in x.shape[2:]]
    return out, dx[:, :, inner[0], inner[1]], dw


@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_values_and_both_gradients(name, optimize):
    xs, ws, stride, padding, dilation, groups = CASES[name]
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(xs, np.float32), rng.standard_normal(ws, np.float32)
    given = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    spans = [s + 2 * padding - (k - 1) * dilation - 1 for s, k in zip(xs[2:], ws[2:], strict=True)]
    c = rng.standard_normal((xs[0], ws[0], *(s // stride + 1 for s in spans)), np.float32)

    def total(x, w, c):
        out = nn.conv2d(x, w, **given)
        return (out * c).sum(), out

    run = eg.compile(eg.value_and_grad(total, (0, 1), has_aux=True), optimize=optimize, cache=False)
    (_, out), gradients = run(x, w, c)
    for what, got, want in zip(
        ("value", "dx", "dw"), (out, *gradients), reference(x, w, c, **given), strict=True
    ):
        np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=1e-4, err_msg=what)


@pytest.mark.parametrize("name", CASES)
def test_all_forms_have_the_values_of_the_op(name):
    xs, ws, stride, _, dilation, groups = CASES[name]
    x, w = (input_node(k, "xw"[k], Type(s, f32)) for k, s in enumerate((xs, ws)))
    conv = make(Conv((stride,) * 2, (dilation,) * 2, groups), x, w)
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(s, np.float32) for s in (xs, ws)]
    forms = conv.op.expansions(x, w)
    assert len(forms) == 3
    (want,) = evaluate(Graph("g", (x, w), (conv,)), values)
    for form in forms:
        assert form.type == conv.type
        (got,) = evaluate(Graph("g", (x, w), (form,)), values)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def plan_of(target, xs, ws, **given):
    args = [np.zeros(s, np.float32) for s in (xs, ws)]
    return compile_graph(trace_call(lambda x, w: nn.conv2d(x, w, **given), args).graph, target).plan


@pytest.mark.parametrize("kind", ["here", "gpu"])
def test_the_cheapest_form_is_taken(kind):
    target = GPU if kind == "gpu" else eg.device().target
    families = {}
    for name, xs, ws, given in (
        ("plain", (8, 32, 28, 28), (64, 32, 3, 3), {"padding": 1}),
        ("1x1", (8, 64, 28, 28), (128, 64, 1, 1), {}),
        ("depthwise", (8, 64, 28, 28), (64, 1, 3, 3), {"padding": 1, "groups": 64}),
    ):
        plan = plan_of(target, xs, ws, **given)
        families[name] = plan.kernels[-1].template.partition("_")[0]
        matrix = 4 * ws[2] * ws[3] * int(np.prod(xs))  # bytes of all windows
        if kind == "gpu":  # a CPU copies them where reading is dear
            assert plan.scratch_bytes == 0
        elif name != "plain":
            assert plan.scratch_bytes < matrix / 4
    assert families == {"plain": "contract", "1x1": "contract", "depthwise": "rowwise"}


def test_without_the_rule_the_plain_form_is_left():
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s, np.float32) for s in ((2, 4, 6, 6), (4, 1, 3, 3)))
    run = lambda x, w: nn.conv2d(x, w, groups=4)  # noqa: E731
    plain = eg.compile(run, without=("expand",), cache=False)(x, w).numpy()
    want = eg.compile(run, cache=False)(x, w).numpy()
    np.testing.assert_allclose(plain, want, rtol=1e-5, atol=1e-5)
