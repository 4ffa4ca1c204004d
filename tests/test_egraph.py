"""The e-graph: programs in and out, equal values in every class, what is found, bounds, dumps."""

import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn, optim
from eggpu.compiler.egraph import Options, saturate, saturate_graph
from eggpu.compiler.egraph.language import families
from eggpu.compiler.egraph.patterns import Rule
from eggpu.compiler.egraph.rules import program_rules
from eggpu.compiler.egraph.saturate import prepare
from eggpu.compiler.egraph.snapshot import from_nodes
from eggpu.compiler.errors import CompileError
from eggpu.compiler.ir import Graph, Kind, make
from eggpu.compiler.library.attention import scaled_dot_product_attention as A
from eggpu.compiler.library.einsum import einsum
from eggpu.compiler.library.losses import cross_entropy
from eggpu.compiler.library.math import gelu, relu
from eggpu.compiler.library.nn import batch_norm
from eggpu.compiler.library.ordering import cumsum, sort
from eggpu.compiler.library.softmax import softmax
from eggpu.compiler.library.spatial import conv2d
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import parse_type

sys.path.insert(0, str(Path(__file__).parent))
from equal_classes import unequal

NO_RULES = Options(phases=(), disabled=tuple(r.base for r in program_rules()))


def gpt_step(layers=4, width=32, heads=4, context=16, vocab=33):
    """A training step: forward, backward, clipping, AdamW."""
    model = nn.GPT(vocab=vocab, layers=layers, width=width, heads=heads, context=context, key=0)
    optimizer = optim.adamw(1e-3, weight_decay=0.1)

    def step(model, state, tokens, targets):
        value, grads = eg.value_and_grad(lambda m: cross_entropy(m(tokens), targets))(model)
        model, state = optimizer.update(model, state, optim.clip_by_global_norm(grads, 1.0))
        return model, state, value

    tokens = parse_type(f"i32[2, {context}]")
    return trace(step, model, optimizer.init(model), tokens, tokens)


# Programs in and out


def everything(x, i, b):
    """Many ops in one program."""
    y = eg.concatenate([eg.flip(x, 0), eg.pad(x, 1)[1:3, :4]], 1)
    z = eg.where(b, eg.take(x, i, 0), x) + sort(x, -1) + cumsum(x, 1)
    return y, z, eg.argmax(x, 1), x.astype("i32"), einsum("ij,kj->ik", x, x), eg.max(x, 0)


def special(x):
    return (
        x * -0.0,
        x + math.nan,
        x + math.inf,
        eg.maximum(x, -math.inf),
        x * 0.1,
        eg.array([[1.0, -0.0]]) * x,
    )


@pytest.mark.parametrize(
    ("function", "types"),
    [
        (everything, ["f32[2, 4]", "i32[2]", "bool[2, 4]"]),
        (special, ["f32[1, 2]"]),
        (lambda x: conv2d(x, eg.ones((3, 2, 3, 3))), ["f32[1, 2, 5, 5]"]),
        (gelu, ["f16[3]"]),
    ],
)
def test_a_program_without_rules_comes_back_as_it_was(function, types):
    graph = trace(function, *map(parse_type, types))
    snapshot, _ = saturate_graph(graph, NO_RULES)
    plain = from_nodes(list(graph.outputs))

    def content(s):
        return Counter(
            (s.ops[i], s.types[s.cls[i]], tuple(s.types[k] for k in s.kids[i]))
            for i in range(len(s.ops))
        )

    kept = content(snapshot) - content(plain)
    assert content(plain) - content(snapshot) == Counter()
    assert {s[0].kind for s in kept} <= {Kind.LITERAL, Kind.MOVE}, (
        "only spellings of numbers are added"
    )
    assert [snapshot.types[c] for c in snapshot.roots] == [n.type for n in graph.outputs]
    for node, cls in snapshot.class_of.items():
        assert snapshot.types[cls] == node.type


def test_constants_keep_their_data_and_names_their_letters():
    table = eg.array(np.arange(6.0).reshape(2, 3))
    graph = trace(lambda x: x + table, parse_type("f32[2, 3]"))
    node = graph.inputs[0]
    odd = type(node.op)(0, 'a "quoted" \\ name\n', node.shape, "f32")
    graph = Graph("odd", (), (make(odd), *graph.outputs))
    snapshot, _ = saturate_graph(graph)
    assert odd in snapshot.ops
    constant = next(op for op in snapshot.ops if op.kind is Kind.CONSTANT)
    np.testing.assert_array_equal(constant.data, np.arange(6.0).reshape(2, 3))


def test_minus_zero_is_not_zero():
    graph = trace(lambda x: (x * 0.0, x * -0.0), parse_type("f32[3]"))
    snapshot, _ = saturate_graph(graph)
    assert len(set(snapshot.roots)) == 2
    signs = {
        math.copysign(1, op.value)
        for op in snapshot.ops
        if op.kind is Kind.LITERAL and op.value == 0
    }
    assert signs == {1.0, -1.0}


def test_every_op_has_a_constructor():
    names = {f.cls for f in families().values()}
    assert len(families()) > 60
    assert all(f.name[0].isupper() for f in families().values())
    assert len(names) > 20


# Equal values


def test_all_of_a_training_step_is_equal():
    found, snapshot, report = unequal(gpt_step(2, 8, 2, 6, 11))
    assert found == []
    assert report.recognized["attention"] == (2, 2)
    assert len(snapshot.ops) > 1.2 * len(snapshot.class_of)


def resnet_block(x, w1, w2, s, b):
    y = relu(batch_norm(conv2d(x, w1, padding=1), s, b, s, b, training=True)[0])
    return eg.sum(relu(conv2d(y, w2, padding=1) + x) ** 2)


def test_all_of_a_convolution_step_is_equal():
    types = ["f32[2, 3, 5, 5]", "f32[3, 3, 3, 3]", "f32[3, 3, 3, 3]", "f32[3]", "f32[3]"]
    step = eg.value_and_grad(resnet_block, (0, 1, 2, 3, 4))
    graph = trace(step, *map(parse_type, types))
    assert unequal(graph, tolerance=1e-4)[0] == []


UNARY = (
    eg.negative,
    eg.exp,
    eg.tanh,
    eg.transpose,
    lambda x: x.T.T,
    lambda x: 1.0 / (1.0 + eg.exp(-x)),
    lambda x: x * 2.0,
    lambda x: 1.0 - x,
    lambda x: x / 4.0,
    lambda x: softmax(x, -1),
    lambda x: x.reshape((-1,)).reshape(x.shape),
    lambda x: eg.sum(x, 1, keepdims=True) + x * 0.0,
    lambda x: eg.where(x > 0, x, 0.0),
)
BINARY = (
    eg.add,
    eg.subtract,
    eg.multiply,
    lambda a, b: a / (eg.abs(b) + 1.0),
    eg.matmul,
    eg.maximum,
)


# the last four hold values that are 0 without being known to be: x - x, x * 0, their multiples
@pytest.mark.parametrize("seed", [*range(8), 50, 61, 115, 118])
def test_random_programs_stay_equal(seed):
    rng = np.random.default_rng(seed)

    def program(a, b):
        values = [a, b]
        for _ in range(14):
            k, j = rng.integers(0, len(values), 2)
            if rng.random() < 0.6:
                values.append(UNARY[rng.integers(len(UNARY))](values[k]))
            else:
                values.append(BINARY[rng.integers(len(BINARY))](values[k], values[j]))
        return eg.mean(values[-1] + values[-2] * 0.5)

    step = eg.value_and_grad(program, (0, 1))
    graph = trace(step, *map(parse_type, ["f32[4, 4]"] * 2))
    found, snapshot, report = unequal(graph, seed, 1e-4)
    assert found == []
    assert report.stop == "saturated"
    assert len(snapshot.ops) < 10 * len(graph.nodes())


# What is found


def test_every_layer_of_a_gpt_is_recognized():
    graph = gpt_step(4)
    snapshot, report = saturate_graph(graph)
    assert report.stop == "saturated"
    assert report.recognized == {
        "softmax": (5, 0),
        "softmax gradient": (4, 0),
        "layer norm": (9, 0),
        "gelu": (4, 0),
        "cross-entropy": (1, 0),
        "attention": (4, 4),
        "attention backward": (4, 4),
    }
    assert len(snapshot.ops) < 2 * len(graph.nodes())
    kernels = Counter(op.name for op in snapshot.ops)
    assert kernels["attention"] == kernels["attention_backward"] == 4
    assert "wide-product" in snapshot.rule
    assert "sum-of-products" in snapshot.rule


def test_twelve_layers_take_little_time():
    graph = gpt_step(12)
    start = time.process_time()
    _, report = saturate_graph(graph)
    took = time.process_time() - start
    assert report.recognized["attention"] == report.recognized["attention backward"] == (12, 12)
    assert took < 4, f"{took:.1f} s of processor time"


def test_views_are_symmetric():
    graph = trace(lambda x: (x.T, x.reshape((6,))), parse_type("f32[2, 3]"))
    snapshot, _ = saturate_graph(graph)
    of_x = {
        op.name
        for op, cls in zip(snapshot.ops, snapshot.cls)
        if cls == snapshot.class_of[graph.inputs[0]]
    }
    assert of_x == {"input", "transpose", "reshape"}


# Bounds and failures

AC = tuple(
    Rule(f"{name}-{op.lower()}", left.replace("@", op), right.replace("@", op))
    for op in ("Add", "Mul")
    for name, left, right in (
        ("comm", "(@ a b)", "(@ b a)"),
        ("assoc", "(@ (@ a b) c)", "(@ a (@ b c))"),
    )
)


def test_explosive_rules_are_held_back():
    _, report = saturate_graph(gpt_step(2), Options(extra=AC))
    assert report.matches["assoc-add"] > 0
    assert report.rounds[-1].nodes < 60_000


def test_the_row_bound_stops_saturation():
    long_sum = trace(
        lambda x: eg.sum(sum((x * float(k) for k in range(2, 30)), x)), parse_type("f32[4]")
    )
    _, report = saturate_graph(long_sum, Options(extra=AC, max_rows=500))
    assert "row bound" in report.stop


def test_the_clock_stops_saturation():
    _, report = saturate_graph(gpt_step(1), Options(max_seconds=0.0))
    assert report.stop == "time bound reached in simplify"


def test_disabled_rules_do_not_match():
    graph = gpt_step(1)
    _, report = saturate_graph(graph, Options(disabled=("attention",)))
    assert "attention" not in report.matches
    snapshot, _ = saturate_graph(graph, Options(disabled=("wide-product", "sum-of-products")))
    assert "concat" not in {op.name for op in snapshot.ops}


def test_an_unsound_rule_fails_loudly():
    wrong = Rule("forget-sum", "(Sum x a)", "x", theme="algebra")
    with pytest.raises(CompileError, match="merge"):
        saturate_graph(gpt_step(1), Options(extra=(wrong,)))


def test_a_deep_program_needs_no_deep_stack():
    def deep(x):
        for k in range(3000):
            x = eg.tanh(x) if k % 2 else x + x
        return x

    snapshot, report = saturate_graph(trace(deep, parse_type("f32[2]")))
    assert len(snapshot.ops) == 3001
    assert report.stop == "saturated"


# The report


def test_report_of_attention(golden):
    def attention(q, k, v):
        return eg.sum(A(q, k, v, causal=True) ** 2)

    step = eg.value_and_grad(attention, (0, 1, 2))
    _, report = saturate_graph(trace(step, *map(parse_type, ["f32[2, 4, 8]"] * 3)))
    golden(report.text())


def test_the_report_has_no_times_unless_asked_for():
    _, report = saturate_graph(gpt_step(1))
    assert " ms" not in report.text()
    assert "saturate" in report.text(times=True)


DETERMINISM = """
import hashlib, sys
sys.path.insert(0, {tests!r})
from test_egraph import gpt_step, saturate_graph
s, r = saturate_graph(gpt_step(2))
ops = [(o.name, o.attributes()) for o in s.ops]
text = repr((ops, s.kids, s.cls, s.rule, s.types, s.roots)) + r.text()
print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_the_same_program_gives_the_same_e_graph():
    code = DETERMINISM.format(tests=os.path.dirname(__file__))
    runs = set()
    for seed in ("0", "1", "random"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code]
        runs.add(subprocess.run(command, env=env, capture_output=True, check=True).stdout)
    assert len(runs) == 1


def test_loaded_rules_are_used_again(monkeypatch):
    """Rules are loaded once for programs of the same ops; nothing of one is left in the next."""
    made = Counter()

    def counted(*args):
        made["engines"] += 1
        return prepare(*args)

    monkeypatch.setattr(saturate, "prepare", counted)
    monkeypatch.setattr(saturate, "_threads", threading.local())
    x = parse_type("f32[4, 8]")
    one = trace(lambda x: softmax(gelu(x)), x)
    two = trace(lambda x: gelu(softmax(x)) + 1.0, x)
    first, other, again = (saturate_graph(g)[0] for g in (one, two, one))
    assert made["engines"] <= 2
    assert (first.ops, first.kids, first.cls) == (again.ops, again.kids, again.cls)
    assert other.kids != first.kids
    forms, rules = saturate.language_of([], Options().rules())
    with pytest.raises(InterruptedError), saturate.prepared(rules, forms) as failed:
        raise InterruptedError
    with saturate.prepared(rules, forms) as engine:
        assert engine is not failed
