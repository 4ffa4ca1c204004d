"""Loops: scan and fori_loop against the same program written out, their gradients and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from loop_cases import CASES, Scan, double, floats, leaves, loops_of, loss, moving, unrolled

import eggpu as eg
from eggpu.compiler.schedule.target import LLVMPIPE
from eggpu.compiler.text import constant_table, parse_graph, print_graph


@pytest.mark.parametrize("case", CASES)
def test_a_loop_means_the_program_written_out(case: str) -> None:
    function, args = CASES[case]
    found = double(lambda *a: function(eg.scan, *a), args)
    want = double(lambda *a: function(unrolled, *a), args)
    for got, exact in zip(found, want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-12)
    assert loops_of(eg.trace(lambda *a: function(eg.scan, *a), *args))


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_program_written_out(case: str, order: int) -> None:
    args = CASES[case][1]
    argnums = moving(args)

    def gradient(scan: Scan) -> Callable[..., Any]:
        one = eg.value_and_grad(loss(case, scan), argnums)
        if order == 1:
            return one
        return eg.value_and_grad(
            lambda *a: sum((g * g).sum() * (k + 1) for k, g in enumerate(one(*a)[1])), argnums
        )

    found, want = double(gradient(eg.scan), args), double(gradient(unrolled), args)
    for got, exact in zip(found, want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_kernels_give_values_and_gradients(case: str, optimize: bool) -> None:
    function, args = CASES[case]

    def both(*a: Any) -> Any:
        return function(eg.scan, *a), eg.grad(loss(case, eg.scan), moving(args))(*a)

    found = leaves(eg.compile(both, optimize=optimize)(*args))
    for got, exact in zip(found, double(both, args), strict=True):
        np.testing.assert_allclose(got.numpy(), exact, rtol=2e-5, atol=1e-5)


def test_a_gradient_shares_the_forward_loop() -> None:
    args = CASES["lstm"][1]
    graph = eg.trace(eg.value_and_grad(loss("lstm", eg.scan)), *args)
    forward, back = loops_of(graph)
    assert (forward.reverse, back.reverse) == (False, True)
    kinds = [n.op.name for n in back.body.nodes()]
    assert kinds.count("dot") == 1  # of the cotangent; that of w is one product after the loop
    assert [n.op.name for n in graph.nodes()].count("dot") == 1
    assert not any(n.shape == (4, 16) for n in back.body.outputs)


def test_unused_parts_of_a_loop_are_left_out() -> None:
    def run(x: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            a, b = carry
            return (a + row, eg.exp(b) * a), (row * 3, b)

        return eg.scan(step, (x[0], x[1]), x)[0][0]

    (loop,) = loops_of(eg.trace(run, floats(4, 8)))
    assert (loop.carries, len(loop.body.outputs)) == (1, 1)
    assert "exp" not in [n.op.name for n in loop.body.nodes()]


def test_what_does_not_change_is_computed_once() -> None:
    def run(w: Any, x: Any) -> Any:
        return eg.scan(lambda c, row: (c + row @ eg.exp(w), None), eg.zeros(8), x)[0]

    graph = eg.trace(run, floats(8, 8), floats(4, 8))
    (loop,) = loops_of(graph)
    assert "exp" in [n.op.name for n in graph.nodes()]
    assert "exp" not in [n.op.name for n in loop.body.nodes()]


def test_random_numbers_differ_from_run_to_run_by_their_keys() -> None:
    keys = eg.random.split(eg.random.key(3), 5)

    def draws(scan: Scan, keys: Any) -> Any:
        return scan(lambda c, k: (c, eg.random.bernoulli(k, 0.5, (40,))), None, keys)[1]

    found = eg.compile(lambda k: draws(eg.scan, k))(keys).numpy()
    np.testing.assert_array_equal(found, np.asarray(draws(unrolled, keys)))
    assert len({row.tobytes() for row in found}) == 5


def test_text_gives_loops_back() -> None:
    args = CASES["nested"][1]
    graph = eg.trace(eg.grad(loss("nested", eg.scan)), *args)
    again = parse_graph(print_graph(graph), constant_table(graph))
    assert all(a is b for a, b in zip(again.outputs, graph.outputs, strict=True))
    assert print_graph(again) == print_graph(graph)
    assert "loop_cases.py" in print_graph(loops_of(graph)[0].body.replace(sources=graph.sources))


def test_lines_of_the_body_do_not_change_the_key() -> None:
    from eggpu import cache

    def one(x: Any) -> Any:
        return eg.scan(lambda c, r: (c + r, c), x[0], x)

    def two(x: Any) -> Any:
        return eg.scan(lambda c, r: (c + r, c), x[0], x)

    def three(x: Any) -> Any:
        return eg.scan(lambda c, r: (c + 2 * r, c), x[0], x)

    options = eg.Options()
    graphs = [eg.trace(f, floats(4, 8)).replace(name="f") for f in (one, two, three)]
    keys = [cache.key(g, LLVMPIPE, options) for g in graphs]
    assert keys[0] == keys[1] != keys[2]


def test_the_op_of_a_nan_is_found_inside_a_loop() -> None:
    from eggpu.train.nans import find_not_finite

    def run(x: Any) -> Any:
        return eg.scan(lambda c, r: (c + eg.log(r), c), x[0], x)[0]

    found = find_not_finite(run, np.array([[1.0], [2.0], [-1.0], [3.0]], np.float32))
    assert found is not None
    assert found.op == "log of row 2"
    assert "test_loops.py" in found.source


def test_fori_loop_counts() -> None:
    assert int(eg.fori_loop(2, 6, lambda i, total: total * i, 1)) == 2 * 3 * 4 * 5
    assert int(eg.fori_loop(3, 3, lambda i, total: total * i, 7)) == 7
    power = eg.compile(lambda x: eg.fori_loop(0, 5, lambda i, y: y * x, eg.ones_like(x)))
    np.testing.assert_allclose(power(np.float32([2, 3])).numpy(), [32, 243])
    grad = eg.grad(lambda x: eg.fori_loop(0, 5, lambda i, y: y * x, eg.array(1.0)))
    assert float(grad(2.0)) == 80


def test_no_rows_give_the_carry_and_empty_stacks() -> None:
    carry, ys = eg.scan(lambda c, x: (c + x, (x, c.sum())), eg.ones(3), eg.zeros((0, 3)))
    assert carry.tolist() == [1, 1, 1]
    assert [y.shape for y in ys] == [(0, 3), (0,)]


def test_rows_without_elements() -> None:
    run = eg.compile(lambda x: eg.scan(lambda c, r: (c + 1, (r, c)), 0, x))
    found = run(np.zeros((3, 0), np.float32))
    assert int(found[0]) == 3
    assert [y.shape for y in found[1]] == [(3, 0), (3,)]


def error(f: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(eg.EggpuError) as caught:
        eg.scan(f, *args, **kwargs)
    return str(caught.value).splitlines()[0]


def test_errors_name_the_leaf() -> None:
    x = eg.zeros((4, 2))
    assert error(lambda c, r: ({"h": c["h"][0]}, r), {"h": eg.zeros(2)}, x) == (
        "scan needs a carry that keeps its type: "
        "carry.h is f32[2] at first, the function gives f32[]"
    )
    assert error(lambda c, r: (c + 1.5, r), 0, x).startswith("add")
    assert error(lambda c, r: (eg.astype(c, "f32"), r), 0, x) == (
        "scan needs a carry that keeps its type: carry is i32[] at first, the function gives f32[]"
    )
    assert error(lambda c, r: ((c, r), r), x[0], x).startswith(
        "scan needs a function that keeps the structure of the carry, which differs in carry"
    )
    assert (
        error(lambda c, r: c, 0, x) == "scan needs a function that gives (carry, y), got an Array"
    )
    assert error(lambda c, r: (c, r), 0, {"a": x, "b": x[1:]}) == (
        "scan needs as many rows in each array: xs.a has 4, xs.b has 3"
    )
    assert error(lambda c, r: (c, r), 0, x, length=5) == (
        "scan needs as many rows in each array: length asks for 5, xs has 4"
    )
    assert error(lambda c, r: (c, r), 0) == "scan needs xs or a length"
    assert (
        error(lambda c, r: (c, r), 0, 1.0) == "scan needs arrays with a first axis, got xs: f32[]"
    )
    with pytest.raises(eg.TraceError, match="fori_loop needs integers as bounds"):
        eg.fori_loop(0, 2.5, lambda i, c: c, 0)  # type: ignore[arg-type]


def test_a_gradient_of_its_own_inside_a_loop() -> None:
    @eg.custom_vjp
    def steep(x: Any) -> Any:
        return x * x

    steep.defvjp(lambda x: (x * x, eg.exp(x)), lambda kept, ct: (ct * kept,))

    def run(scan: Scan) -> Callable[..., Any]:
        def f(x: Any) -> Any:
            h, ys = scan(lambda h, r: (h * 0.5 + steep(r * 0.1), steep(h)), x[0], x)
            return (h * h).sum() + ys.sum()

        return eg.value_and_grad(f)

    args = (CASES["running"][1][1],)
    for got, exact in zip(double(run(eg.scan), args), double(run(unrolled), args), strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-9)


def test_checkpoint_inside_a_loop_keeps_less() -> None:
    def run(scan: Scan, kind: str) -> Callable[..., Any]:
        def inner(h: Any, r: Any) -> Any:
            return eg.tanh(h @ w + r)

        w = eg.array(CASES["running"][1][0])
        if kind == "checkpoint":
            inner = eg.checkpoint(inner)

        def f(x: Any) -> Any:
            h, ys = scan(lambda h, r: (inner(h, r), h), x[0], x)
            return (h * h).sum() + ys.sum()

        return eg.value_and_grad(f)

    args = (CASES["running"][1][1],)
    want = double(run(unrolled, "plain"), args)
    for kind in ("plain", "checkpoint"):
        for got, exact in zip(double(run(eg.scan, kind), args), want, strict=True):
            np.testing.assert_allclose(got, exact, rtol=1e-9)
    plain, again = (loops_of(eg.trace(run(eg.scan, k), *args))[0] for k in ("plain", "checkpoint"))
    assert len(again.body.outputs) < len(plain.body.outputs)  # it keeps less
