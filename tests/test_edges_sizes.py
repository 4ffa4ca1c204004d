"""Where sizes end: workgroups, rows, loops, operands, results, arrays that no binding holds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn, optim
from eggpu.compiler.errors import CompileError
from eggpu.compiler.pipeline import Options, compile_graph
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE
from eggpu.compiler.tracing import trace_call
from eggpu.compiler.types import parse_type
from eggpu.runtime.limits import check_plan

sys.path.insert(0, str(Path(__file__).parent))
from separate_runs import both_ways, f32  # noqa: F401


def test_more_than_65535_workgroups_in_one_dimension(run):
    n = 65535 * 64 + 2
    x = np.arange(n, dtype=np.float32)
    add, last, odd = run(lambda x: (x + 1.0, x[::-1], x[1:] * 2.0), x)
    assert np.array_equal(add, x + 1)
    assert np.array_equal(last, x[::-1])
    assert np.array_equal(odd, x[1:] * 2)


def test_a_batch_of_70001_products(run):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-4, 5, (70001, 3, 3)).astype(np.float32) for _ in range(2))
    assert np.array_equal(run(eg.matmul, a, b), a @ b)


def test_many_rows_and_columns(run):
    x = np.random.default_rng(0).integers(-9, 9, (4_194_305, 2)).astype(np.float32)
    rows, columns, best = run(lambda x: (x.sum(1), x.sum(0), x.max(1)), x)
    assert np.array_equal(rows, x.sum(1))
    np.testing.assert_allclose(columns, x.sum(0, dtype=np.float64), rtol=1e-6)
    assert np.array_equal(best, x.max(1))


def test_more_loop_iterations_than_an_invocation_may_make(run):
    n = 70_003
    rng = np.random.default_rng(0)
    a, b = (
        rng.integers(-2, 3, (2, n)).astype(np.float32),
        rng.integers(-2, 3, (n, 3)).astype(np.float32),
    )
    i, u = rng.integers(0, 9, (3, n)).astype(np.int32), rng.integers(0, 5, n)
    got = run(lambda a, b, i, u: (a @ b, a.sum(1), b.max(0), i.prod(1), i.sum(1), a.argmax(1), eg.cumsum(i, 1), b.T.cumsum(1),
                                  eg.grad(lambda t: (eg.take(t, u, 0) * b).sum())(b[:5]), nn.softmax(a * 0.0, 1)[:, 0]), a, b, i, u)  # fmt: skip
    table = np.zeros((5, 3))
    np.add.at(table, u, b)
    with np.errstate(over="ignore"):
        want = (a @ b, a.sum(1), b.max(0), i.prod(1, dtype=np.int32), i.sum(1), a.argmax(1), np.cumsum(i, 1), np.cumsum(b.T, 1), table,
                np.full(2, np.float32(1 / n)))  # fmt: skip
    for k, (g, w) in enumerate(zip(got, want, strict=True)):
        np.testing.assert_allclose(g, w, rtol=1e-6, err_msg=str(k))


def test_an_array_that_no_binding_holds_is_refused_before_anything_runs():
    limit = eg.device().target.max_binding_bytes
    n = limit // 4 + 4
    target = eg.device().target
    graph = eg.trace(lambda x: x * 2.0, parse_type(f"f32[{n}]"))
    with pytest.raises(
        CompileError, match=rf"f32\[{n}\] needs {4 * n} bytes.*can bind at most {limit}"
    ):
        compile_graph(graph, target)
    before = eg.device().counters.submits
    with pytest.raises(CompileError, match="can bind at most"):
        eg.compile(lambda s: eg.broadcast_to(s, (n,)).cumsum())(np.float32(1))
    assert eg.device().counters.submits == before


@pytest.mark.parametrize("base", [LLVMPIPE, FLOOR], ids=["cpu", "gpu"])
def test_where_a_value_is_too_large_another_program_is_taken(base):
    """Scores of 128 KiB where a binding holds 64: attention that never stores them."""

    def gradients(q, k, v):
        return eg.grad(lambda *x: (nn.scaled_dot_product_attention(*x) ** 2).sum(), (0, 1, 2))(
            q, k, v
        )

    graph = eg.trace(gradients, *[parse_type("f32[1, 2, 128, 16]")] * 3)
    target = replace(base, max_binding_bytes=64 << 10)
    plan = compile_graph(graph, target).plan
    assert all(b.nbytes <= 64 << 10 for b in plan.buffers)
    check_plan(plan, target)
    assert any(k.template.startswith("attention") for k in plan.kernels)
    with pytest.raises(CompileError, match="can bind at most 65536 as one array"):
        compile_graph(graph, target, Options(optimize=False))


def test_what_lies_together_fits_in_a_binding():
    parameters = {f"p{i}": np.zeros((16, 16), np.float32) for i in range(12)}
    opt = optim.adamw(1e-3)
    traced = trace_call(
        lambda m, s, x: opt.update(m, s, {k: x * v for k, v in m.items()}),
        (parameters, opt.init(parameters), np.zeros((16, 16), np.float32)),
    )
    graph = traced.graph.replace(donated=tuple(range(len(traced.graph.inputs) - 1)))
    kernels = []
    for limit in (1 << 20, 4096, 1024):
        target = replace(FLOOR, max_bindings=16, max_binding_bytes=limit)
        plan = compile_graph(graph, target).plan
        check_plan(plan, target)  # also the range that parts of one dispatch share
        kernels.append(len(plan.kernels))
    assert kernels == [2, 4, 13]  # all together, four and four, each alone; and the count of steps


def test_a_large_value_that_is_never_stored_needs_no_memory():
    n = eg.device().target.max_binding_bytes // 4 + 4
    total = eg.compile(lambda s: (eg.broadcast_to(s, (n,)) * 0.5).sum())(np.float32(2))
    np.testing.assert_allclose(float(total), n, rtol=1e-6)


# deep and wide graphs


def test_a_graph_of_5000_nodes_in_a_chain(run):
    def deep(x):
        for k in range(2500):
            x = x * 0.999 + (0.5 if k % 2 else -0.5)
        return x

    x = f32(1, 2, 3)
    graph = eg.trace(deep, x)
    assert len(graph.nodes()) > 5000
    (want,) = evaluate(graph, [x], np.float64)
    np.testing.assert_allclose(run(deep, x), want, rtol=1e-4)


def test_the_gradient_of_a_deep_graph(run):
    def deep(x):
        for _ in range(400):
            x = eg.sin(x) * 0.5 + x * 0.5
        return x.sum()

    x = f32(0.1, 2, -3)
    (want,) = evaluate(eg.trace(eg.grad(deep), x), [x], np.float64)
    np.testing.assert_allclose(run(eg.grad(deep), x), want, rtol=1e-3)


def test_a_thousand_operands(run):
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal(3).astype(np.float32) for _ in range(1000)]

    def wide(xs):
        total = xs[0]
        for x in xs[1:]:
            total = total + x
        return eg.concatenate(xs), eg.stack(xs, 1), total

    flat, columns, total = run(wide, xs)
    assert np.array_equal(flat, np.concatenate(xs))
    assert np.array_equal(columns, np.stack(xs, 1))
    np.testing.assert_allclose(total, np.sum(xs, 0, dtype=np.float64), rtol=1e-4, atol=1e-4)


def test_hundreds_of_results(run):
    out = run(lambda x: [x + float(k) for k in range(300)], f32(1, 2))
    assert all(np.array_equal(o, f32(1 + k, 2 + k)) for k, o in enumerate(out))


def test_a_graph_whose_tree_is_exponential(run):
    def grow(x):
        for _ in range(60):
            x = x * x * 0.5 + x * 0.25
        return x

    x = f32(0.5, 1.0, -1.25)
    (want,) = evaluate(eg.trace(grow, x), [x], np.float64)
    np.testing.assert_allclose(run(grow, x), want, rtol=1e-4, atol=1e-30)
    (want,) = evaluate(eg.trace(eg.grad(lambda x: grow(x).sum()), x), [x], np.float64)
    np.testing.assert_allclose(
        run(eg.grad(lambda x: grow(x).sum()), x), want, rtol=1e-3, atol=1e-30
    )
