"""The interpreter: values, double precision, memory, chosen programs, and what it refuses."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eggpu.compiler.errors import IRError, TypeMismatch
from eggpu.compiler.ir import Graph, Kind, Node, Op, make
from eggpu.compiler.ops import (
    ELEMENTWISE,
    broadcast,
    cast,
    constant,
    dot,
    full,
    input_node,
    iota,
    literal,
    reduce,
    reshape,
    transpose,
)
from eggpu.compiler.ops.fused import Attention, get
from eggpu.compiler.reference import evaluate, evaluate_selection
from eggpu.compiler.schedule.selection import Group, Selection, separate
from eggpu.compiler.types import Type, bool_, f16, f32, i32, u32

RNG = np.random.default_rng(0)


def program(*outputs: Node, inputs: tuple[Node, ...]) -> Graph:
    return Graph("g", inputs, outputs, tuple(n.op.label for n in inputs))


def softmax() -> tuple[Graph, Node]:
    x = input_node(0, "x", Type((3, 5), f32))
    e = make(ELEMENTWISE["exp"], x - broadcast(reduce("max", x, (1,)), x.shape))
    y = e / broadcast(reduce("sum", e, (1,)), x.shape)
    return program(y, inputs=(x,)), x


def test_values_of_softmax() -> None:
    graph, _ = softmax()
    x = RNG.normal(size=(3, 5)).astype(np.float32)
    (y,) = evaluate(graph, [x])
    e = np.exp(x.astype(np.float64))
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, e / e.sum(1, keepdims=True), rtol=1e-6)


def test_double_precision_starts_at_the_leaves() -> None:
    x = input_node(0, "x", Type((2,), f32))
    n = input_node(1, "n", Type((2,), i32))
    half = constant(np.array([0.5, 0.25], np.float32), f32)
    y = x * half + cast(n, f32) + full(0.1, (2,), f32) + iota((2,), 0, f32)
    graph = program(y, cast(x, f16), n + n, inputs=(x, n))
    tiny = 1.0 + 2.0**-40
    y64, h64, n64 = evaluate(graph, [np.array([tiny, 1.0]), [1, 2**31 - 1]], np.float64)
    assert (y64.dtype, h64.dtype, n64.dtype) == (np.float64, np.float64, np.int32)
    assert y64[0] == tiny * 0.5 + 1 + float(np.float32(0.1))
    assert n64[1] == -2  # integers wrap at 32 bits
    y32, h32, _ = evaluate(graph, [np.array([tiny, 1.0]), [1, 2]])
    assert (y32.dtype, h32.dtype) == (np.float32, np.float16)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.zeros((3, 4), np.float32), r"x needs f32\[3, 5\], got float32\[3, 4\]"),
        (np.zeros((3, 5), np.complex64), r"x needs f32\[3, 5\], got complex64\[3, 5\]"),
        ("text", r"x needs f32\[3, 5\], got <U4\[\]"),
    ],
)
def test_an_argument_that_does_not_fit(value: object, message: str) -> None:
    graph, _ = softmax()
    with pytest.raises(TypeMismatch, match=message):
        evaluate(graph, [value])


def test_a_missing_argument_and_a_float_where_integers_are_needed() -> None:
    graph, _ = softmax()
    with pytest.raises(TypeMismatch, match="graph g takes 1 inputs, got 0"):
        evaluate(graph, [])
    n = input_node(0, "n", Type((1,), u32))
    with pytest.raises(TypeMismatch, match=r"n needs u32\[1\], got float64\[1\]"):
        evaluate(program(n, inputs=(n,)), [[1.5]])
    assert evaluate(program(n, inputs=(n,)), [[7]])[0].dtype == np.uint32


def test_an_output_is_a_copy_in_row_major_order() -> None:
    x = input_node(0, "x", Type((2, 3), f32))
    b = input_node(1, "b", Type((), bool_))
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    same, turned, flag = evaluate(
        program(x, transpose(x, (1, 0)), b, inputs=(x, b)), [array, np.array(True)]
    )
    same[0, 0] = 9
    assert array[0, 0] == 0
    assert turned.flags.c_contiguous
    assert flag.shape == ()


@given(st.floats(width=32), st.floats(width=32))
def test_literals_keep_their_bits(a: float, b: float) -> None:
    x = literal(a, f32), literal(b, f32)
    assert [v.tobytes() for v in evaluate(program(*x, inputs=()), [])] == [
        np.float32(a).tobytes(),
        np.float32(b).tobytes(),
    ]


def test_a_deep_graph_needs_no_recursion_and_little_memory() -> None:
    alive: list[weakref.ref] = []

    @dataclass(frozen=True)
    class Watch(Op):
        step: int
        name = "watch"
        kind = Kind.ELEMENTWISE

        def infer(self, x: Type) -> Type:
            return x

        def evaluate(self, x: np.ndarray) -> np.ndarray:
            out = x + x.dtype.type(1)
            alive.append(weakref.ref(out))
            assert sum(r() is not None for r in alive[-20:]) <= 2
            return out

    x = input_node(0, "x", Type((4,), f32))
    y = x
    for step in range(5000):
        y = make(Watch(step), y)
    (out,) = evaluate(program(y, inputs=(x,)), [np.zeros(4)])
    assert (out == 5000).all()


def test_an_op_that_breaks_its_type_rule_is_named() -> None:
    @dataclass(frozen=True)
    class Wrong(Op):
        name = "wrong"
        kind = Kind.ELEMENTWISE

        def infer(self, x: Type) -> Type:
            return x

        def evaluate(self, x: np.ndarray) -> np.ndarray:
            return x[:1]

    x = input_node(0, "x", Type((4,), f32))
    with pytest.raises(IRError, match=r"wrong gave float32\[1\] where its type is f32\[4\]"):
        evaluate(program(make(Wrong(), x), inputs=(x,)), [np.zeros(4)])


def attention_program() -> tuple[Graph, Node, Node, Node]:
    q, k, v = (input_node(i, n, Type((2, 4, 8), f32)) for i, n in enumerate("qkv"))
    both = make(Attention(0.5, True, 0, 0, 0.0, "none"), q, k, v)
    return program(get(both, 0), get(both, 1), inputs=(q, k, v)), q, k, v


def test_a_kernel_with_several_results() -> None:
    graph, *_ = attention_program()
    q, k, v = (RNG.normal(size=(2, 4, 8)) for _ in range(3))
    s = np.where(np.tril(np.ones((4, 4), bool)), q @ k.swapaxes(1, 2) * 0.5, -math.inf)
    top = s.max(-1, keepdims=True)
    p = np.exp(s - top)
    total = p.sum(-1, keepdims=True)
    out, stats = evaluate(graph, [q, k, v], np.float64)
    np.testing.assert_allclose(out, p / total @ v, rtol=1e-12)
    np.testing.assert_allclose(stats, np.concatenate([top, 1 / total], -1), rtol=1e-12)
    for got, want in zip(evaluate_selection(separate(graph), [q, k, v], np.float64), (out, stats)):
        np.testing.assert_array_equal(got, want)


def test_a_selection_means_what_its_graph_means() -> None:
    x = input_node(0, "x", Type((4, 6), f32))
    w = constant(RNG.normal(size=(6, 3)).astype(np.float32), f32)
    h = dot(x, w)
    y = make(ELEMENTWISE["tanh"], h)
    total = reshape(reduce("sum", y * h, (0, 1)), ())
    graph = program(y, total, reshape(y, (12,)), reshape(w, (18,)), x, inputs=(x,))
    fused = Selection(graph, (Group((y, h), (x, w)), Group((total.operands[0],), (y, h))))
    array = RNG.normal(size=(4, 6)).astype(np.float32)
    for selection in (separate(graph), fused):
        for got, want in zip(evaluate_selection(selection, [array]), evaluate(graph, [array])):
            np.testing.assert_array_equal(got, want)


def test_a_selection_that_reads_what_is_not_there() -> None:
    x = input_node(0, "x", Type((4,), f32))
    y = x + x
    z = y * y
    graph = program(z, inputs=(x,))
    late = Selection(graph, (Group((z,), (y,)), Group((y,), (x,))))
    with pytest.raises(IRError, match=r"group 0 reads <add f32\[4\]>, which no earlier group"):
        evaluate_selection(late, [np.ones(4)])
    with pytest.raises(IRError, match=r"output <mul f32\[4\]> is stored by no group"):
        evaluate_selection(Selection(graph, (Group((y,), (x,)),)), [np.ones(4)])
    with pytest.raises(IRError, match=r"input <input f32\[4\]> has no value"):
        evaluate_selection(Selection(graph, (Group((z,), ()),)), [np.ones(4)])
