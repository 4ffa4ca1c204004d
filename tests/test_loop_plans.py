"""Plans of loops: kernels that repeat, rows and carries in memory, what is refused, reports."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from loop_cases import CASES, double, floats, loss, moving

import eggpu as eg
from eggpu.compiler.errors import IRError
from eggpu.compiler.ir import Graph
from eggpu.compiler.pipeline import compile_graph
from eggpu.compiler.schedule.plan import Carry
from eggpu.compiler.schedule.serialize import plan_from_json, plan_to_json
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE
from eggpu.compiler.schedule.verify import verify_plan


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
    assert [k.runs for k in step.report.kernels] == [1, 6]
    assert "6 times" in str(step.report.kernel(1))
    assert step.report.joint is not None
    assert step.report.joint.launches >= 6
    assert "loop(" in step.explain(x)


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
