"""Loops: scan and fori_loop against the same program written out, their gradients, plans and
errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler import pytree
from eggpu.compiler.errors import IRError
from eggpu.compiler.ir import Graph, Kind
from eggpu.compiler.pipeline import compile_graph
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule.plan import Carry
from eggpu.compiler.schedule.serialize import plan_from_json, plan_to_json
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE
from eggpu.compiler.schedule.verify import verify_plan
from eggpu.compiler.text import constant_table, parse_graph, print_graph
from eggpu.compiler.verify import verify_graph

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32) / 2


def unrolled(f: Any, init: Any, xs: Any, length: int | None = None, reverse: bool = False) -> Any:
    """scan, written out."""
    leaves, structure = pytree.flatten(xs)
    count = length if length is not None else leaves[0].shape[0]
    rows: list[Any] = [None] * count
    carry = init
    for t in reversed(range(count)) if reverse else range(count):
        carry, rows[t] = f(carry, pytree.unflatten(structure, [x[t] for x in leaves]))
    flat = [pytree.flatten(row) for row in rows]
    stacks = [eg.stack([row[k] for row, _ in flat]) for k in range(len(flat[0][0]))]
    return carry, pytree.unflatten(flat[0][1], stacks)


Scan = Callable[..., Any]


def lstm(scan: Scan, w: Any, b: Any, h: Any, c: Any, xs: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        h, c = carry
        z = x + h @ w + b
        i, f, g, o = (z[:, k * 4 : (k + 1) * 4] for k in range(4))
        c = eg.sigmoid(f) * c + eg.sigmoid(i) * eg.tanh(g)
        h = eg.sigmoid(o) * eg.tanh(c)
        return (h, c), h

    return scan(step, (h, c), xs)


def running(scan: Scan, w: Any, xs: Any) -> Any:
    """A matrix that is multiplied up, with rows of odd sizes, integers and a backward direction."""

    def step(carry: Any, x: Any) -> Any:
        a, n = carry
        a = eg.tanh(a @ w + x["v"])
        return (a, n + x["k"]), (a.sum(), {"twice": 2 * n, "a": a[0]})

    init = (eg.ones((3, 3)), eg.array(2))
    return scan(step, init, {"v": xs, "k": eg.arange(xs.shape[0])}, reverse=True)


def nested(scan: Scan, w: Any, xs: Any) -> Any:
    def outer(h: Any, block: Any) -> Any:
        def inner(h: Any, x: Any) -> Any:
            h = eg.tanh(h * w + x)
            return h, h * h

        h, squares = scan(inner, h, block)
        return h * 0.5, (squares, h)

    return scan(outer, xs[0, 0] * 0, xs)


def seen(scan: Scan, w: Any, table: Any, xs: Any) -> Any:
    """No carry, and values from around the loop: one of them is moved, one of them is computed."""

    def step(carry: None, x: Any) -> Any:
        return carry, eg.tanh(table[x] @ w.T) + eg.exp(w[:, 0])

    return scan(step, None, xs)


def handed(scan: Scan, a: Any, b: Any) -> Any:
    """Carries that change places, stay as they are, are numbers, or are never read."""

    def step(carry: Any, _: None) -> Any:
        a, b, fixed, unused = carry
        return (b, a + fixed, fixed, unused * 2), eg.zeros(3)

    return scan(step, (a, b, b * 2, a), None, 6)


def window(scan: Scan, x: Any) -> Any:
    """A carry of which each run writes one element."""

    def step(total: Any, i: Any) -> Any:
        at = eg.array(i)
        return eg.where(eg.arange(total.shape[0]) == at, total.sum() * 0.1 + 1, total), total[0]

    return scan(step, x, eg.arange(5))


def cache(scan: Scan, x: Any, rows: Any) -> Any:
    """A window of a carry is written in each run, and rows of it are read."""

    def step(carry: Any, row: Any) -> Any:
        at, store = carry
        store = eg.dynamic_update_slice(store, row[None] + store[0], (at, 0))
        return (at + 1, store), store.sum()

    return scan(step, (eg.array(1), x), rows)


CASES: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "lstm": (lstm, (floats(4, 16), floats(16), floats(2, 4), floats(2, 4), floats(5, 2, 16))),
    "running": (running, (floats(3, 3), floats(4, 3, 3))),
    "nested": (nested, (floats(4), floats(3, 2, 4))),
    "seen": (seen, (floats(5, 3), floats(7, 3), np.array([6, 0, 3], np.int32))),
    "handed": (handed, (floats(3), floats(3))),
    "window": (window, (floats(6),)),
    "cache": (cache, (floats(7, 4), floats(4, 4))),
}


def leaves(tree: Any) -> list[Any]:
    return pytree.flatten(tree)[0]


def loss(case: str, scan: Scan) -> Callable[..., Any]:
    function, args = CASES[case]
    rng = np.random.default_rng(7)
    weights = [
        rng.normal(size=np.shape(y)).astype(np.float32)
        for y in leaves(function(unrolled, *map(eg.array, args)))
        if y.dtype.kind == "f"
    ]

    def run(*args: Any) -> Any:
        found = [y for y in leaves(function(scan, *args)) if y.dtype.kind == "f"]
        return sum(
            (y * np.float32(0.3 + k) * (y + w)).sum()
            for k, (y, w) in enumerate(zip(found, weights, strict=True))
        )

    return run


def moving(args: tuple[np.ndarray, ...]) -> tuple[int, ...]:
    return tuple(k for k, x in enumerate(args) if x.dtype == np.float32)


def double(function: Callable[..., Any], args: tuple[np.ndarray, ...]) -> list[np.ndarray]:
    graph = eg.trace(function, *args)
    verify_graph(graph)
    exact = [x.astype(np.float64) if x.dtype == np.float32 else x for x in args]
    return evaluate(graph, exact, np.float64)


def loops_of(graph: Graph) -> list[Any]:
    return [n.op for n in graph.nodes() if n.kind is Kind.LOOP]


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


def test_the_body_is_there_once_whatever_the_length() -> None:
    def run(xs: Any) -> Any:
        return eg.scan(lambda c, x: (c * 0.5 + x, c), eg.zeros(8), xs)

    sizes = [len(eg.trace(run, np.zeros((n, 8), np.float32)).nodes()) for n in (3, 300)]
    assert sizes[0] == sizes[1]
    step = eg.compile(run)
    before = eg.device().counters.dispatches
    step(np.zeros((300, 8), np.float32))[0].numpy()
    made = eg.device().counters.dispatches - before
    (loop,) = step.plan.loops
    outside = len(step.plan.kernels) - (loop.stop - loop.start)
    assert loop.count == 300
    assert made == outside + 300 * (loop.stop - loop.start)


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


def test_a_window_of_a_carry_is_written_in_place() -> None:
    """The whole is copied once, before the loop, and not at all where it is an argument that may be
    written over.
    """
    args = floats(4000, 16), floats(30, 16)

    def run(store: Any, rows: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            at, store = carry
            return (at + 1, eg.dynamic_update_slice(store, row[None], (at, 0))), None

        return eg.scan(step, (eg.array(5), store), rows)[0][1]

    want = args[0].copy()
    want[5:35] = args[1]
    for donate in ((), ("store",)):
        step = eg.compile(run, donate=donate)
        np.testing.assert_array_equal(step(*args).numpy(), want)
        (loop,) = step.plan.loops
        inside = step.plan.kernels[loop.start : loop.stop]
        assert sum(k.bytes_written for k in inside) < 1000
        before = [k for k in step.plan.kernels[: loop.start] if k.bytes_written >= args[0].nbytes]
        assert len(before) == (not donate)


def test_text_gives_loops_back() -> None:
    args = CASES["nested"][1]
    graph = eg.trace(eg.grad(loss("nested", eg.scan)), *args)
    again = parse_graph(print_graph(graph), constant_table(graph))
    assert all(a is b for a, b in zip(again.outputs, graph.outputs, strict=True))
    assert print_graph(again) == print_graph(graph)
    assert "test_loops.py" in print_graph(loops_of(graph)[0].body.replace(sources=graph.sources))


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


@dataclass
class Compiled:
    graph: Graph
    plan: Any


@pytest.fixture(scope="module")
def gradient() -> Compiled:
    graph = eg.trace(eg.grad(loss("lstm", eg.scan), (0, 1, 2, 3, 4)), *CASES["lstm"][1])
    return Compiled(graph, compile_graph(graph, LLVMPIPE).plan)


def test_plans_are_saved_with_their_loops(gradient: Compiled) -> None:
    plan = gradient.plan
    assert plan_from_json(plan_to_json(plan)) == plan
    assert len(plan.loops) == 2


@pytest.mark.parametrize("case", CASES)
def test_plans_for_gpus_are_sound(case: str) -> None:
    """Their rows need offsets that 256 divides; compile_graph checks the plan in the end."""
    args = CASES[case][1]
    graph = eg.trace(eg.grad(loss(case, eg.scan), moving(args)), *args)
    plan = compile_graph(graph, FLOOR).plan
    for row in (row for loop in plan.loops for row in loop.rows):
        assert row.step % 256 == 0


def test_a_plan_that_reads_a_carry_too_late_is_refused(gradient: Compiled) -> None:
    plan = gradient.plan
    loop = plan.loops[0]
    carry = loop.carries[0]
    size, mine = plan.buffers[carry.even].nbytes, (carry.even, carry.odd)
    scratch = [n for n, b in enumerate(plan.buffers) if (b.place[0], b.nbytes) == ("arena", size)]
    other = next(n for n in scratch if n not in mine)
    wrong = Carry(carry.value, carry.after, other, carry.even, carry.odd)
    changed = replace(loop, carries=(wrong, *loop.carries[1:]))
    bad = replace(plan, loops=(changed, *plan.loops[1:]))
    with pytest.raises(IRError, match=r"reads .*, but its bytes"):
        verify_plan(bad, LLVMPIPE)


def test_a_plan_whose_rows_leave_their_stack_is_refused(gradient: Compiled) -> None:
    plan = gradient.plan
    loop = plan.loops[0]
    row = replace(loop.rows[0], step=loop.rows[0].step * 2)
    changed = replace(loop, rows=(row, *loop.rows[1:]))
    with pytest.raises(IRError, match=r"rows of .* leave"):
        verify_plan(replace(plan, loops=(changed, *plan.loops[1:])), LLVMPIPE)


def test_plan_text_counts_runs() -> None:
    from eggpu.compiler.schedule.show import memory_map, plan_text

    graph = eg.trace(lambda x: eg.scan(lambda c, r: (c + r, c), x[0], x), floats(6, 8))
    plan = compile_graph(graph, LLVMPIPE).plan
    text = plan_text(plan)
    assert "  loop 0: kernels 1 to 1 run 6 times, with 1 carry and 2 stacks" in text
    assert "runs" in text.splitlines()[1]
    assert "loop 0" in memory_map(plan)


def test_profile_and_reports_know_loops() -> None:
    step = eg.compile(lambda x: eg.scan(lambda c, r: (eg.tanh(c + r), c), x[0], x), name="cell")
    x = floats(6, 8)
    step(x)
    assert len(step.profile(x).ns) == len(step.plan.kernels)
    inside = [k for k in step.profile(x).kernels if k.runs == 6]
    assert len(inside) == step.plan.loops[0].stop - step.plan.loops[0].start
    assert step.report.joint is not None
    assert step.report.joint.launches >= 6
    assert "loop(" in step.explain(x)


def test_the_op_of_a_nan_is_found_inside_a_loop() -> None:
    from eggpu.train.nans import find_not_finite

    def run(x: Any) -> Any:
        return eg.scan(lambda c, r: (c + eg.log(r), c), x[0], x)[0]

    found = find_not_finite(run, np.array([[1.0], [2.0], [-1.0], [3.0]], np.float32))
    assert found is not None
    assert found.op == "log of row 2"
    assert "test_loops.py" in found.source


def test_a_value_that_two_parts_need_is_stored_once() -> None:
    """Movement of an argument is no value that parts hand on, but each may want it stored."""
    table, ids = floats(30, 16), np.arange(24, dtype=np.int32).reshape(6, 4)

    def loss(table: Any, w: Any) -> Any:
        x = eg.take(table, ids, axis=0)
        return eg.scan(lambda h, r: (eg.tanh(h + r), h), x[0] @ w, x @ w)[1].sum()

    args = (table, floats(16, 16))
    step = eg.compile(eg.grad(loss, (0, 1)))
    for got, exact in zip(step(*args), double(eg.grad(loss, (0, 1)), args), strict=True):
        np.testing.assert_allclose(got.numpy(), exact, rtol=1e-4, atol=1e-5)


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
    assert error(lambda c, r: c, 0, x) == "scan needs a function that gives (carry, y), got a Array"
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
