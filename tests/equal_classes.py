"""Whether all e-nodes of an e-class have one value: the check of every rule at once."""

import numpy as np

from eggpu.compiler.egraph import saturate_graph
from eggpu.compiler.ir import Kind


def random_input(node, rng):
    if node.dtype.kind == "b":
        return rng.random(node.shape) < 0.6
    if node.dtype.kind in "iu":
        return rng.integers(0, 3, node.shape).astype(node.dtype.numpy)
    positive = "state" in node.op.label
    values = rng.standard_normal(node.shape)
    return np.abs(values) + 1 if positive else values


def class_values(snapshot, inputs):
    """The value of each class, through the first e-node that can be computed."""
    values = {}
    order = sorted(range(len(snapshot.ops)), key=lambda i: (snapshot.rule[i] != "", i))
    while len(values) < len(snapshot.types):
        before = len(values)
        for i in order:
            if snapshot.cls[i] not in values and all(k in values for k in snapshot.kids[i]):
                values[snapshot.cls[i]] = enode_value(snapshot, i, values, inputs)
        assert len(values) > before, "a class has no finite term"
    return values


def enode_value(snapshot, i, values, inputs):
    op = snapshot.ops[i]
    if op.kind is Kind.INPUT:
        return inputs[op.position]
    out = op.evaluate(*(values[k] for k in snapshot.kids[i]))
    return tuple(map(_double, out)) if isinstance(out, tuple) else _double(out)


def _double(x):
    return np.asarray(x, np.float64 if x.dtype.kind == "f" else x.dtype)


def unequal(graph, seed=0, tolerance=2e-5, options=None):
    """The e-nodes whose values differ from those of their class, with their rules."""
    snapshot, report = saturate_graph(graph, options)
    rng = np.random.default_rng(seed)
    inputs = {k: random_input(n, rng) for k, n in enumerate(graph.inputs)}
    found = []
    with np.errstate(all="ignore"):
        values = class_values(snapshot, inputs)
        for i, cls in enumerate(snapshot.cls):
            a, b = enode_value(snapshot, i, values, inputs), values[cls]
            pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
            if not all(close(x, y, tolerance) for x, y in pairs):
                found.append((snapshot.ops[i].name, snapshot.rule[i]))
    return found, snapshot, report


def close(x, y, tolerance):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    if x.shape != y.shape or not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return False
    size = 1e-3 + np.abs(y[finite]).max(initial=0.0)
    return np.abs(x[finite] - y[finite]).max(initial=0.0) <= tolerance * size
