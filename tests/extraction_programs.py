"""Small programs whose kernels are known, and what the tests of extraction do with programs."""

from __future__ import annotations

import numpy as np

from eggpu.compiler.autodiff import value_and_grad, vjp
from eggpu.compiler.egraph.snapshot import Snapshot, from_nodes
from eggpu.compiler.ir import Graph, Kind, Node, topological
from eggpu.compiler.library import nn as F
from eggpu.compiler.library.math import relu, rsqrt
from eggpu.compiler.library.reductions import mean
from eggpu.compiler.library.reductions import sum as total
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import parse_type


def softmax_vjp(x, ct):
    y, back = vjp(F.softmax, x)
    return y, *back(ct)


def layer_norm_vjp(x, weight, bias, ct):
    y, back = vjp(F.layer_norm, x, weight, bias)
    return y, *back(ct)


def linear_relu(x, w, b):
    y = F.linear(x, w, b)
    return y, relu(y)


def weight_step(x, ct, w, m, b):
    m = m * 0.9 + x.T @ ct
    return m, w - m * 0.1, b - total(ct, 0) * 0.1


def batch_norm(x):
    centered = x - mean(x, (0, 2, 3), keepdims=True)
    variance = mean(centered * centered, (0, 2, 3), keepdims=True)
    return relu(centered * rsqrt(variance + 1e-5))


def mlp_step(x, t, w0, w1):
    def loss(w0, w1):
        d = relu(x @ w0) @ w1 - t
        return total(d * d)

    value, (g0, g1) = value_and_grad(loss, (0, 1))(w0, w1)
    return value, w0 - 0.1 * g0, w1 - 0.1 * g1


def residual_norm(x, y, weight):
    h = x + y
    return h, h * rsqrt(mean(h * h, -1, keepdims=True) + 1e-5) * weight


def two_directions(x):
    """Sums along both axes of values of which one is stored."""
    y = relu(x)
    return y, total(y, 0), total(y * x, 1)


def gated(x, gate, up):
    return F.silu(x @ gate) * (x @ up)


def momentum(w, m, v, g):
    m, v = m * 0.9 + g * 0.1, v * 0.99 + g * g * 0.01
    return w - m * rsqrt(v + 1e-8) * 0.1, m, v


PROGRAMS = {
    "softmax": (F.softmax, "f32[512, 1024]"),
    "softmax_vjp": (softmax_vjp, "f32[512, 1024]", "f32[512, 1024]"),
    "cross_entropy": (F.cross_entropy, "f32[512, 1000]", "i32[512]"),
    "linear_relu": (linear_relu, "f32[512, 1024]", "f32[1024, 1024]", "f32[1024]"),
    "weight_step": (
        weight_step, "f32[512, 1024]", "f32[512, 1024]", "f32[1024, 1024]", "f32[1024, 1024]",
        "f32[1024]",
    ),
    "batch_norm": (batch_norm, "f32[32, 64, 32, 32]"),
    "residual_norm": (residual_norm, "f32[512, 1024]", "f32[512, 1024]", "f32[1024]"),
    "two_directions": (two_directions, "f32[512, 1024]"),
    "gated": (gated, "f32[512, 1024]", "f32[1024, 1024]", "f32[1024, 1024]"),
    "momentum": (momentum, *["f32[512, 1024]"] * 4),
    "mlp_step": (mlp_step, "f32[128, 256]", "f32[128, 16]", "f32[256, 256]", "f32[256, 16]"),
}  # fmt: skip
LARGER = {
    "layer_norm": (F.layer_norm, "f32[4, 128, 768]", "f32[768]", "f32[768]"),
    "layer_norm_vjp": (
        layer_norm_vjp, "f32[512, 768]", "f32[768]", "f32[768]", "f32[512, 768]",
    ),
}  # fmt: skip


def traced(name: str) -> Graph:
    function, *types = (PROGRAMS | LARGER)[name]
    return trace(function, *map(parse_type, types))


def graph_of(*outputs: Node) -> Graph:
    inputs = [n for n in topological(outputs) if n.kind is Kind.INPUT]
    return Graph("test", tuple(sorted(inputs, key=lambda n: n.op.position)), outputs)


def inputs_for(graph: Graph, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 4, n.shape).astype(np.int32)
        if n.dtype.kind == "i"
        else rng.standard_normal(n.shape).astype(np.float32)
        for n in graph.inputs
    ]


def with_equal(graph: Graph, *pairs: tuple[Node, Node]) -> Snapshot:
    """A snapshot of a program in which some nodes are known to be equal to others."""
    roots = [*graph.outputs, *(n for pair in pairs for n in pair)]
    plain = from_nodes(list(roots))
    leader = list(range(len(plain.types)))

    def find(c: int) -> int:
        while leader[c] != c:
            c = leader[c]
        return c

    for a, b in pairs:
        one, two = sorted((find(plain.class_of[a]), find(plain.class_of[b])))
        leader[two] = one
    return Snapshot(
        ops=plain.ops,
        kids=[tuple(map(find, kids)) for kids in plain.kids],
        cls=[find(c) for c in plain.cls],
        rule=plain.rule,
        types=plain.types,
        roots=[find(c) for c in plain.roots[: len(graph.outputs)]],
        class_of={n: find(c) for n, c in plain.class_of.items()},
    )
