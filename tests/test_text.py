"""Graphs as text: every op and odd name comes back, and bad texts are refused with their line."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eggpu.compiler import ops
from eggpu.compiler.errors import IRError
from eggpu.compiler.ir import Graph, Kind, Node, make, recording
from eggpu.compiler.ops.decode import DECODE
from eggpu.compiler.ops.elementwise import ELEMENTWISE
from eggpu.compiler.ops.fused import Attention, AttentionBackward, AttentionBias, get
from eggpu.compiler.ops.leaf import Literal
from eggpu.compiler.ops.loop import Loop, loop
from eggpu.compiler.ops.scan import Argsort, Scan
from eggpu.compiler.ops.scatter import ScatterAdd, ScatterSet
from eggpu.compiler.ops.window import Conv, Windows
from eggpu.compiler.text import _Parser, _shown, constant_table, parse_graph, print_graph, registry
from eggpu.compiler.types import Type, bool_, f16, f32, i32, u32
from eggpu.compiler.verify import verify_graph

BY_KIND = {"f": f32, "i": i32, "u": u32, "b": bool_}


def program(*outputs: Node, donated: tuple[int, ...] = (), names: tuple[str, ...] = ()) -> Graph:
    """The graph of `outputs`, whose inputs have positions from 0 on."""
    nodes = Graph("g", (), outputs).nodes()
    found = sorted((n for n in nodes if n.kind is Kind.INPUT), key=lambda n: n.op.position)
    return Graph("g", tuple(found), outputs, tuple(n.op.label for n in found), names, donated)


def check(graph: Graph) -> str:
    """Prints, reads back and compares; gives the text."""
    verify_graph(graph)
    text = print_graph(graph)
    back = parse_graph(text, constant_table(graph))
    assert back == graph
    assert all(a is b for a, b in zip(back.outputs, graph.outputs, strict=True))
    assert print_graph(back) == print_graph(replace(graph, sources={}))
    return text


def attention() -> Graph:
    q, k, v = (input_node(i, n, Type((4, 64), f32)) for i, n in enumerate(("x.q", "x.k", "x.v")))
    sources: dict[Node, str] = {}
    with recording(sources):
        scores = ops.dot(q, ops.swap(k)) * 0.125
        e = make(
            ELEMENTWISE["exp"], scores - ops.broadcast(ops.reduce("max", scores, (1,)), (4, 4))
        )
        p = e / ops.broadcast(ops.reduce("sum", e, (1,)), e.shape)
        out = ops.dot(p, v)
    kept = {n: "model.py:7" for n in sources if n.op.name == "dot"}
    graph = Graph("attention", (q, k, v), (out, p), ("x.q", "x.k", "x.v"), ("0.out", "p"), (1,))
    return replace(graph, sources=kept)


def input_node(position: int, label: str, type_: Type) -> Node:
    return ops.input_node(position, label, type_)


def test_text_of_attention(golden) -> None:
    graph = attention()
    text = print_graph(graph)
    golden(text, "ir")
    back = parse_graph(text)
    assert back == graph
    assert back.sources == graph.sources
    assert print_graph(back) == text
    assert str(graph) == text


def test_a_graph_of_many_inputs_breaks_its_lines(golden) -> None:
    xs = [input_node(i, f"model.layers.{i}.weight", Type((2,), f32)) for i in range(6)]
    names = tuple(f"0.layers.{i}.weight" for i in range(6))
    golden(check(program(*(-x for x in xs), donated=(0, 5), names=names)), "ir")


def test_every_elementwise_op_comes_back() -> None:
    for op in ELEMENTWISE.values():
        for kind in op.takes:
            types = [BY_KIND[kind]] * op.arity
            if op.name == "select":
                types[0] = bool_
            xs = [input_node(i, f"x{i}", Type((2, 3), t)) for i, t in enumerate(types)]
            check(program(make(op, *xs)))


X, Y, N = Type((2, 3, 4), f32), Type((2, 4, 3), f32), Type((3,), i32)


def one_of_each() -> list[Node]:
    """Nodes of every op class."""
    x, y, n = (input_node(i, s, t) for i, (s, t) in enumerate(zip("xyn", (X, Y, N))))
    row, image = ops.slice_(x, (0, 0, 0), (1, 3, 4), (1, 2, 1)), ops.reshape(x, (1, 2, 3, 4))
    kernel = ops.full(1, (2, 1, 2, 2), f32)
    attention = make(Attention(0.5, True, 0, 0, 30.0, "none"), x, x, x)
    out, stats = get(attention, 0), get(attention, 1)
    backward = AttentionBackward(0.5, False, 1, 2, 0.0, "bias")
    summed = AttentionBias(0.5, False, 1, 2, 0.0, "bias", "nan", (0,))
    bias = ops.iota((2, 3, 3), 2, f32)
    delta = ops.iota((2, 3, 1), 2, f32)
    return [
        out,
        stats,
        get(make(backward, x, x, x, stats, delta, out, bias), 2),
        get(make(summed, x, x, x, stats, delta, out, bias), 0),
        ops.transpose(x, (1, 2, 0)),
        ops.broadcast(ops.reduce("sum", x, (0, 2)), (2, 3, 4)),
        ops.pad(x, ops.literal(-0.0, f32), (0, 1, 2), (0, 0, 1), (0, 1, 0)),
        ops.concat([x, x], 1),
        ops.flip(x, (0, 2)),
        ops.gather(x, n, 1),
        ops.dynamic_slice(x, n, (1, 2, 2)),
        ops.dynamic_update(x, row, n),
        ops.dot(x, y),
        ops.cast(x, f16),
        ops.constant(np.arange(6, dtype=np.float32), f32),
        ops.constant(np.array([True, False]), bool_),
        make(ScatterAdd(7), ops.reshape(x, (3, 8)), n),
        make(ScatterSet(), ops.reshape(x, (3, 8)), ops.reshape(y, (3, 8)), n),
        *(make(Scan(c, 1, c == "max"), x) for c in ("sum", "prod", "max", "min")),
        make(Argsort(True), x),
        *(
            get(make(form(0.5, False, 0, 0, 0.0, "none", 1, False, "zero"), x, x, x), 0)
            for form in DECODE
        ),
        *(ops.reduce(c, x, (1,)) for c in ("sum", "prod", "max", "min")),
        make(Windows((2, 2), (1, 1), (1, 2)), x),
        make(Conv((1, 1), (1, 1), 2), image, kernel),
        *loop(Loop(Graph("step", (x,), (x + x,)), 2, 0, 1, True), [ops.full(0, (2, 2, 3, 4), f32)]),
    ]


def test_every_op_class_comes_back() -> None:
    graph = program(*one_of_each())
    text = check(graph)
    made = {type(n.op) for n in graph.nodes()}
    assert made == {e.build for e in registry().values() if isinstance(e.build, type)}
    assert "= sum(%" in text
    assert "axes=[1])" in text
    assert "(f32[2, 3, 4], f32[2, 3, 2])" in text


def samples(kind: object) -> st.SearchStrategy:
    if kind == tuple[int, ...]:
        return st.lists(st.integers(-(2**40), 2**40), max_size=4).map(tuple)
    named = {int: st.integers(), float: st.floats(), bool: st.booleans(), str: st.text(max_size=6)}
    return named[kind]


@given(st.data())
def test_attributes_of_any_value_come_back(data: st.DataObject) -> None:
    """Attributes but graphs are read as they were written, whether or not the op accepts them."""
    every = {n: e.attributes for n, e in registry().items()}
    names = sorted(n for n, kinds in every.items() if kinds and Graph not in kinds.values())
    entry = registry()[data.draw(st.sampled_from(names))]
    given_ = {k: data.draw(samples(t), label=k) for k, t in entry.attributes.items()}
    text = ", ".join(f"{k}={_shown(v)}" for k, v in given_.items()) + ")"
    operands, back = _Parser(text, {}).arguments(entry.attributes)
    assert operands == []
    assert list(map(bits, back.values())) == list(map(bits, given_.values()))


def bits(value: object) -> object:
    return struct.pack(">d", value) if isinstance(value, float) else (type(value), value)


SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3.4028234663852886e38, 1e-5, -1.5e20]
NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0]


@pytest.mark.parametrize("value", [*SPECIAL, NAN_WITH_PAYLOAD])
def test_literals_keep_their_bits(value: float) -> None:
    node = make(Literal(value, "f32"))
    check(program(node))
    assert parse_graph(print_graph(program(node))).outputs[0] is node


@given(
    st.lists(st.text(max_size=6), min_size=1, max_size=5, unique=True),
    st.text(max_size=6),
    st.booleans(),
)
def test_names_of_any_characters_come_back(labels: list[str], name: str, named: bool) -> None:
    xs = tuple(input_node(i, label, Type((), f32)) for i, label in enumerate(labels))
    names = tuple(labels[::-1]) if named else ()
    check(Graph(name, xs, xs, tuple(labels), names))


def test_nodes_whose_labels_and_positions_differ_from_the_graphs_come_back() -> None:
    a, b = input_node(4, "a", Type((), f32)), input_node(1, "0", Type((2,), i32))
    graph = Graph("g", (a, b), (a, -b), ("first", "second"))
    text = print_graph(graph)
    assert '%first: f32[] (position=4, label="a"), %second: i32[2] (label="0")' in text
    assert parse_graph(text) == graph
    unlisted = Graph("g", (a,), (a, -b), ("first",))
    assert "input(position=1, label=0, shape=[2], dtype=i32)" in print_graph(unlisted)
    assert parse_graph(print_graph(unlisted)) == unlisted
    nameless = Graph("g", (a, b), (a,))
    assert parse_graph(print_graph(nameless)).input_names == ("a", "0")


def test_a_deep_graph_needs_no_recursion() -> None:
    x = y = input_node(0, "x", Type((2, 2), f32))
    for k in range(5000):
        y = make(ELEMENTWISE["tanh"], y) if k % 2 else y + x
    check(program(y))


@given(st.integers(0, 2**32 - 1))
def test_random_graphs_come_back(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = one_of_each()
    for _ in range(rng.integers(1, 20)):
        a = values[rng.integers(len(values))]
        same = [v for v in values if v.type == a.type]
        if a.dtype is f32:
            b = same[rng.integers(len(same))]
            values.append([a + b, a * b, a * float(rng.normal()), -a][rng.integers(4)])
    picked = [values[k] for k in rng.choice(len(values), 3)]
    inputs = tuple(input_node(i, s, t) for i, (s, t) in enumerate(zip("xyn", (X, Y, N))))
    donated = (int(rng.integers(3)),)
    check(Graph("g", inputs, tuple(picked), tuple("xyn"), tuple("pqr"), donated))


GOOD = """graph g(%x: f32[2], %y: f32[2] donated) {
  # a comment of its own
  %0  f32[2]  = add(%x, %y)  # model.py:3
  %1  f32[1]  = sum(%0, axes=[0])
  return %1 as total
}
"""


def test_a_text_by_hand() -> None:
    graph = parse_graph(GOOD)
    assert (graph.name, graph.donated, graph.output_names) == ("g", (1,), ("total",))
    assert graph.sources == {graph.outputs[0].operands[0]: "model.py:3"}
    assert parse_graph(GOOD.replace("\n", " \r\n")) == graph
    assert parse_graph("graph g(%x: f32) { return %x }").outputs[0].shape == ()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("graph g", "graf g", r"line 1: needs 'graph', got graf"),
        ("%y: f32[2]", "%x: f32[2]", r"line 1: %x is defined twice"),
        ("%x: f32[2]", "%x: f8[2]", r"line 1: needs a type with a dtype of bool, .*, got f8"),
        ("%x: f32[2]", "%x: f32[-2]", r"line 1: needs a size, got -2"),
        ("%x: f32[2]", "%x: (f32[2])", r"line 1: input %x needs the type of one array"),
        ("add(%x, %y)", "add(%x, %z)", r"line 3: %z is not defined before it is used"),
        ("add(%x, %y)", "add(%x)", r"line 3: add takes 2 operands, got 1"),
        ("add(%x, %y)", "plus(%x, %y)", r"line 3: there is no op plus"),
        ("add(%x, %y)", "add(%x, %y", r"line 4: needs ',', got %1"),
        ("add(%x, %y)", "add(%x, %y, k=1)", r"line 3: needs an operand, got k"),
        ("add(%x, %y)", "dot(%x, %y)", r"line 3: dot needs \(\.\.\., m, k\)"),
        ("%0  f32[2]", "%0  f32[3]", r"line 3: add gives f32\[2\], the text says f32\[3\]"),
        ("axes=[0]", "axes=[0.5]", r"line 4: needs a value of type int, got 0.5"),
        ("axes=[0]", "axes=0", r"line 4: needs '\[', got 0"),
        ("axes=[0]", "axes=[3]", r"line 4: sum over axes \(3,\) does not fit f32\[2\]"),
        (", axes=[0]", "", r"line 4: sum needs the attributes axes"),
        ("axes=[0]", "axes=[0], axes=[0]", r"line 4: needs an operand or axes, got axes"),
        ("return %1", "return %9", r"line 5: %9 is not defined"),
        ("return %1 as total", "return %1 as total, %0", r"line 6: some outputs have names"),
        ("return %1 as total\n}", "return %1", r"line 6: needs ',', got the end of the text"),
        ("}\n", "} graph", r"line 6: needs the end of the text, got graph"),
        ("add(%x", "add(?x", r"line 3: '\?x, %y\)  # model.py:' is no part of a graph"),
        ("}\n", "", r"line 6: needs ',', got the end of the text"),
    ],
)
def test_a_bad_text_is_refused_with_its_line(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(IRError, match=message):
        parse_graph(GOOD.replace(old, new, 1))


def test_a_constant_needs_its_array() -> None:
    graph = program(ops.constant(np.array([1, 2, 3], np.int32), i32))
    text, (digest,) = print_graph(graph), constant_table(graph)
    with pytest.raises(IRError, match=f"line 2: the array of constant {digest} is not given"):
        parse_graph(text)
    with pytest.raises(IRError, match=f"line 2: the array given for constant {digest} is another"):
        parse_graph(text, {digest: np.array([1, 2, 4], np.int32)})


# what a graph must be


def broken() -> list[tuple[Graph, str]]:
    x, y = input_node(0, "x", Type((2,), f32)), input_node(1, "y", Type((2,), f32))
    both = make(Attention(0.5, True, 0, 0, 0.0, "none"), *[ops.reshape(x, (1, 2))] * 3)
    g = Graph("g", (x, y), (x + y,), ("x", "y"), ("z",))
    wrong = Node.__new__(Node)
    wrong.op, wrong.operands, wrong.type = ELEMENTWISE["add"], (x, y), Type((3,), f32)
    ill = Node.__new__(Node)
    ill.op, ill.operands, ill.type = ELEMENTWISE["and"], (x, y), Type((2,), f32)
    loose = Node.__new__(Node)
    loose.op, loose.operands, loose.type = ELEMENTWISE["neg"], (both,), Type((2,), f32)
    return [
        (replace(g, inputs=(y, x)), "graph g: input 0 has position 1"),
        (replace(g, inputs=(x, -y)), r"graph g: input 1 needs an input node, got <neg f32\[2\]>"),
        (replace(g, inputs=(x,), input_names=("x",)), r"graph g: <input f32\[2\]> is no input"),
        (replace(g, donated=(2,)), "graph g: donates input 2 of 2 inputs"),
        (replace(g, donated=(1, 1)), r"graph g: donates an input twice: \(1, 1\)"),
        (replace(g, input_names=("x",)), "graph g: needs 2 input names, got 1"),
        (replace(g, input_names=("x", "x")), "graph g: input name x stands for 2 inputs"),
        (replace(g, output_names=("a", "b")), "graph g: needs 1 output names, got 2"),
        (replace(g, outputs=(both,)), r"graph g: output 0 needs one array, got <attention \("),
        (replace(g, outputs=(loose,)), r"graph g: <neg f32\[2\]> cannot use <attention \("),
        (replace(g, outputs=(ill,)), "graph g: .* and needs operands of one dtype"),
        (
            replace(g, outputs=(wrong,), sources={wrong: "model.py:9"}),
            r"graph g at model.py:9: <add f32\[3\]> has the type f32\[3\], add gives f32\[2\]",
        ),
    ]


@pytest.mark.parametrize("case", range(len(broken())))
def test_a_graph_that_is_not_well_formed_is_refused(case: int) -> None:
    graph, message = broken()[case]
    with pytest.raises(IRError, match=message):
        verify_graph(graph)


ENDING = """
import numpy
from eggpu.compiler.ops import literal
from eggpu.compiler.types import f32

kept = [literal(value, f32) for value in (2.0, 0.0, -0.0, float("nan"))]
for name in list(vars(numpy)):
    setattr(numpy, name, None)
kept.clear()
"""


def test_literals_may_outlive_numpy() -> None:
    """When the interpreter ends modules are emptied, in an order of its own."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
