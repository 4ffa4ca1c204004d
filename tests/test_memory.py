"""Memory: layouts, donation, orders, access, on programs of fake kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eggpu.compiler.errors import IRError
from eggpu.compiler.ir import make
from eggpu.compiler.ops import ELEMENTWISE, concat, constant, dot, input_node, reduce, reshape, swap
from eggpu.compiler.schedule.assemble import assemble
from eggpu.compiler.schedule.kernel import Scratch
from eggpu.compiler.schedule.memory import Item, Named, aligned, lay_out, most_alive, pair
from eggpu.compiler.schedule.order import dependencies, frugal, stable
from eggpu.compiler.schedule.placement import Placement
from eggpu.compiler.schedule.program import Program
from eggpu.compiler.schedule.selection import Group, Selection
from eggpu.compiler.schedule.target import FLOOR, LLVMPIPE, Target
from eggpu.compiler.schedule.verify import verify_plan
from eggpu.compiler.types import Type, bool_, f16, f32

sys.path.insert(0, str(Path(__file__).parent))
from fake_kernels import add, each, graph_of, inputs_of, lower, lower_split, place, source, tanh

SMALL = replace(FLOOR, max_buffer_bytes=4096, max_binding_bytes=2048)


# layouts


items = st.builds(
    lambda n, first, length: Item(4 * n, first, first + length),
    st.integers(1, 400),
    st.integers(0, 20),
    st.integers(0, 8),
)


@given(
    st.lists(items, max_size=30), st.sampled_from([4, 32, 256]), st.sampled_from([1600, 1 << 20])
)
def test_a_layout_keeps_living_values_apart(found: list[Item], alignment: int, limit: int) -> None:
    layout = lay_out(found, alignment, limit)
    assert layout == lay_out(found, alignment, limit)
    assert layout.nbytes <= sum(aligned(i.nbytes, alignment) for i in found)
    assert all(block <= limit for block in layout.blocks)
    for k, (a, (block, offset)) in enumerate(zip(found, layout.places)):
        assert offset % alignment == 0
        assert offset + a.nbytes <= layout.blocks[block]
        for b, (other, start) in zip(found[:k], layout.places):
            apart = a.last < b.first or b.last < a.first
            below = offset + a.nbytes <= start or start + b.nbytes <= offset
            assert apart or block != other or below


def test_a_layout_fills_gaps() -> None:
    found = [Item(512, 0, 9), Item(256, 0, 2), Item(256, 3, 5), Item(256, 6, 9), Item(128, 3, 4)]
    layout = lay_out(found, 4, 1 << 20)
    assert layout.blocks == (most_alive(found, 4),) == (896,)


def test_a_value_that_does_not_fit_opens_another_block() -> None:
    layout = lay_out([Item(600, 0, 1), Item(600, 0, 1), Item(600, 2, 3)], 4, 1000)
    assert layout.blocks == (600, 600)
    assert layout.places[2] == (0, 0)


# donation


def named(value: int, name: str, shape: tuple[int, ...] = (4,), dtype: str = "f32") -> Named:
    return Named(value, name, shape, dtype, 16)


def test_pairs_go_by_the_longest_common_end_of_names() -> None:
    inputs = [named(0, "model.a.w"), named(1, "state.m.a.w"), named(2, "state.v.a.w")]
    outputs = [named(3, "0.a.w"), named(4, "1.v.a.w"), named(5, "1.m.a.w"), named(6, "2")]
    assert pair(outputs, inputs, lambda *_: True) == {4: 2, 5: 1, 3: 0}


def test_pairs_need_equal_dtypes_and_bytes_and_prefer_equal_shapes() -> None:
    inputs = [named(0, "a", (2, 2)), named(1, "b"), named(2, "c", dtype="i32")]
    outputs = [named(3, "y", (4,)), named(4, "z", (4,))]
    assert pair(outputs, inputs, lambda *_: True) == {3: 1, 4: 0}
    assert pair(outputs, inputs, lambda y, x: y == 4) == {4: 1}


def test_an_update_in_place() -> None:
    p, g = input_node(0, "p.w", Type((8,), f32)), input_node(1, "g.w", Type((8,), f32))
    graph = graph_of([p, g], [add(p, g)], donated=[0], names=("0.w",))
    plan = assemble(each(graph), FLOOR, lower)
    verify_plan(plan, FLOOR)
    (out,) = plan.outputs
    assert plan.buffers[out].place == ("input", 0)
    assert plan.donated == (0,)
    (kernel,) = plan.kernels
    assert [(plan.buffers[b.buffer].name, b.access) for b in kernel.bindings] == [
        ("0.w", "read_write"),
        ("p.w", "read_write"),
        ("g.w", "read"),
    ]
    assert kernel.computes == "add(%p.w, %g.w)"
    assert "var<storage, read_write> in0" in kernel.wgsl
    assert "var<storage, read> in1" in kernel.wgsl


def test_a_donated_input_that_is_read_too_late_keeps_its_memory() -> None:
    p, g = inputs_of(2)
    new = dot(reshape(p, (1, 8)), reshape(g, (8, 1)))  # reads all of p, so not in place
    new = add(p, reshape(concat([reshape(new, (1,))] * 8, 0), (8,)))
    late = Group((tanh(add(p, new)),), (p, new))
    early = Group((new,), (p, g))
    graph = graph_of([p, g], [new, late.outputs[0]], donated=[0])
    selection = Selection(graph, (early, late))
    plan = assemble(
        selection, FLOOR, lambda g, t: [replace(k, in_place=frozenset()) for k in lower(g, t)]
    )
    verify_plan(plan, FLOOR)
    assert {plan.buffers[o].place[0] for o in plan.outputs} == {"output"}


def test_readers_of_a_donated_input_move_before_its_overwriting() -> None:
    p, g = inputs_of(2)
    new, other = add(p, g), reduce("sum", p, (0,))
    graph = graph_of([p, g], [new, other], donated=[0], names=("p", "other"))
    selection = Selection(graph, (Group((new,), (p, g)), Group((other,), (p,))))
    plan = assemble(selection, FLOOR, lower)
    verify_plan(plan, FLOOR)
    assert [k.name for k in plan.kernels] == ["sum", "add"]
    assert plan.buffers[plan.outputs[0]].place == ("input", 0)


def test_an_input_that_is_returned_is_not_written_over() -> None:
    p, g = inputs_of(2)
    graph = graph_of([p, g], [add(p, g), reshape(p, (2, 4))], donated=[0])
    plan = assemble(each(graph), FLOOR, lower)
    verify_plan(plan, FLOOR)
    assert [plan.buffers[o].place for o in plan.outputs] == [("output", 0), ("input", 0)]


def test_results_that_are_reshapes_constants_or_equal_share_a_buffer() -> None:
    (x,) = inputs_of(1)
    y = tanh(x)
    c = constant(np.array([True, False, True]), bool_)
    half = constant(np.array([1, 2, 3], np.float16), f16)
    graph = graph_of([x], [reshape(y, (2, 4)), y, reshape(y, (8, 1)), c, half])
    plan = assemble(each(graph), FLOOR, lower)
    verify_plan(plan, FLOOR)
    assert len(set(plan.outputs[:3])) == 1
    assert plan.buffers[plan.outputs[0]].shape == (2, 4)
    assert [c.data for c in plan.constants] == [
        np.array([1, 0, 1], "<u4").tobytes(),
        np.array([1, 2, 3, 0], "<f2").tobytes(),
    ]


# scratch and its access


def test_a_chain_runs_in_place_in_one_slot() -> None:
    (x,) = inputs_of(1)
    y = x
    for _ in range(10):
        y = tanh(y)
    plan = assemble(each(graph_of([x], [y])), FLOOR, lower)
    verify_plan(plan, FLOOR)
    assert plan.arena == (32,)
    assert plan.scratch_bytes == 9 * 256
    assert [b.access for b in plan.kernels[4].bindings] == ["read_write", "read_write"]
    assert [b.access for b in plan.kernels[0].bindings] == ["read_write", "read"]
    assert len({k.wgsl for k in plan.kernels[1:9]}) == 1  # equal kernels are compiled once


def test_scratch_between_the_kernels_of_a_group() -> None:
    (x,) = inputs_of(1)
    plan = assemble(each(graph_of([x], [tanh(tanh(x))])), FLOOR, lower_split)
    verify_plan(plan, FLOOR)
    assert [k.name for k in plan.kernels] == ["tanh", "tanh_join", "tanh", "tanh_join"]
    assert [b.name for b in plan.buffers if b.role == "scratch"] == ["t0", "t1", "t2"]
    assert plan.arena == (256 + 12 // 2 + 2,)  # two values at a time, 3 f16 rounded up to words


def test_empty_values_need_no_kernels() -> None:
    (x,) = inputs_of(1, (0, 4))
    empty = tanh(x)
    total = reduce("sum", empty, (0,))
    plan = assemble(each(graph_of([x], [total, empty, tanh(empty)])), FLOOR, lower)
    verify_plan(plan, FLOOR)
    assert [k.name for k in plan.kernels] == ["sum"]
    scratch = assemble(each(graph_of([x], [total])), FLOOR, lower)
    verify_plan(scratch, FLOOR)
    assert place(scratch, "empty") == ("arena", 0, 0)


def test_an_order_that_frees_memory_early_is_taken() -> None:
    xs = inputs_of(6, (64,))
    parts = [concat([x, x, x, x], 0) for x in xs]  # each 4 times its input
    sums = [reduce("sum", p, (0,)) for p in parts]
    total = sums[0]
    for s in sums[1:]:
        total = add(total, s)
    graph = graph_of(xs, [total])
    groups = [*(Group((p,), (x,)) for p, x in zip(parts, xs))]
    groups += [Group((s,), (p,)) for s, p in zip(sums, parts)]
    groups.append(Group((total,), tuple(sums)))
    plan = assemble(Selection(graph, tuple(groups)), FLOOR, lower)
    verify_plan(plan, FLOOR)
    assert [k.name for k in plan.kernels][:4] == ["concat", "sum", "concat", "sum"]
    assert sum(plan.arena) == 1024 + 5 * 256 + 4


def test_updates_follow_their_gradients() -> None:
    """Backward through a chain of products: no gradient waits for the end of the program."""
    x, *weights = [input_node(i, f"w.{i}", Type((16, 16), f32)) for i in range(9)]
    hidden = [x]
    for w in weights:
        hidden.append(tanh(dot(hidden[-1], w)))
    cotangent, updates = hidden[-1], []
    for w, h in zip(weights[::-1], hidden[-2::-1]):
        gradient = dot(swap(h), cotangent)
        updates.append(add(add(w, w), gradient))  # w + w could run at once
        cotangent = dot(cotangent, swap(w))
    names = tuple(f"0.w.{i}" for i in range(1, 9))
    graph = graph_of([x, *weights], [*updates[::-1], cotangent], range(1, 9), (*names, "cotangent"))
    plan = assemble(each(graph), FLOOR, lower)
    verify_plan(plan, FLOOR)
    assert sum(b.place[0] == "input" and b.role == "output" for b in plan.buffers) == 8
    one = 16 * 16 * 4
    assert sum(plan.arena) <= (8 + 4) * one + 256  # activations, and what one layer needs
    in_order = Placement(Program(each(graph), FLOOR, lower), range(len(plan.kernels)), FLOOR)
    assert in_order.nbytes > sum(plan.arena) + one


def test_the_plain_order_is_kept_when_no_other_is_better() -> None:
    xs = inputs_of(3)
    graph = graph_of(xs, [tanh(xs[2]), tanh(xs[0]), tanh(xs[1])])
    plan = assemble(each(graph), FLOOR, lower)
    assert [k.computes for k in plan.kernels] == ["tanh(%x2)", "tanh(%x0)", "tanh(%x1)"]


# random programs


@st.composite
def selections(draw: Callable) -> Selection:
    """A random program of kernels with one to three results, some inputs donated."""
    inputs = inputs_of(draw(st.integers(1, 4)), draw(st.sampled_from([(8,), (300,), (5, 3)])))
    values, groups = list(inputs), []
    for _ in range(draw(st.integers(1, 14))):
        operands = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
        kind = draw(st.sampled_from(["tanh", "reduce", "double", "many"]))
        head = operands[0]
        match kind:
            case "tanh":
                outputs = [tanh(head)]
            case "reduce":
                outputs = [reduce("sum", head, (0,))]
            case "double":
                outputs = [concat([head, head], 0)] if head.type.nbytes < 1000 else [tanh(head)]
            case _:
                outputs = [tanh(head), make(ELEMENTWISE["exp"], head), -head]
        outputs = [o for o in dict.fromkeys(outputs) if o not in values]
        if outputs:
            groups.append(Group(tuple(outputs), tuple(operands)))
            values += outputs
    made = [o for g in groups for o in g.outputs] or inputs
    results = draw(st.lists(st.sampled_from(made), min_size=1, max_size=4))
    results += draw(st.lists(st.sampled_from(inputs), max_size=1))
    donated = draw(st.lists(st.integers(0, len(inputs) - 1), unique=True))
    return Selection(graph_of(inputs, results, donated), tuple(groups))


@given(
    selections(), st.booleans(), st.sampled_from([FLOOR, SMALL, replace(FLOOR, offset_alignment=4)])
)
def test_random_programs_are_sound(selection: Selection, split: bool, target: Target) -> None:
    lowering = lower_split if split else lower
    plan = assemble(selection, target, lowering)
    verify_plan(plan, target)
    assert plan == assemble(selection, target, lowering)
    assert sum(plan.arena) <= plan.scratch_bytes
    assert len(plan.kernels) == len(selection.groups) * (2 if split else 1)
    names = [b.name for b in plan.buffers]
    assert len(set(names)) == len(names)


@given(selections())
def test_orders_are_legal(selection: Selection) -> None:
    program = Program(selection, FLOOR, lower)
    for order in program.orders():
        assert sorted(order) == list(range(len(program.steps)))
        position = {k: i for i, k in enumerate(order)}
        assert all(position[j] < position[k] for k, b in enumerate(program.before) for j in b)
    assert stable(program.before) == list(range(len(program.steps)))


@given(selections(), st.data())
def test_a_plan_that_was_tampered_with_is_refused(
    selection: Selection, data: st.DataObject
) -> None:
    """Two scratch values put in one place are refused unless their lifetimes are apart."""
    plan = assemble(selection, FLOOR, lower)
    scratch = [k for k, b in enumerate(plan.buffers) if b.role == "scratch"]
    if len(scratch) < 2:
        return
    a, b = data.draw(st.lists(st.sampled_from(scratch), min_size=2, max_size=2, unique=True))
    buffers = list(plan.buffers)
    buffers[b] = replace(buffers[b], place=buffers[a].place)
    arena = list(plan.arena)
    arena[buffers[a].place[1]] += buffers[b].nbytes
    uses = {
        v: [k for k, kernel in enumerate(plan.kernels) if v in {x.buffer for x in kernel.bindings}]
        for v in (a, b)
    }
    apart = max(uses[a]) < min(uses[b]) or max(uses[b]) < min(uses[a])
    moved = replace(plan, buffers=tuple(buffers), arena=tuple(arena))
    if not apart and set(uses[a]) & set(uses[b]) == set():
        with pytest.raises(IRError, match="plan g, kernel"):
            verify_plan(moved, FLOOR)


def test_predicted_time_lines_and_features_reach_the_plan() -> None:
    (x,) = inputs_of(1)
    y = tanh(x)
    z = add(y, y)
    graph = replace(graph_of([x], [z]), sources={y: "model.py:3", z: "model.py:4"})
    plan = assemble(
        Selection(graph, (Group((z,), (x,), predicted_ns=300.0),)),
        LLVMPIPE,
        lambda g, t: [replace(k, features=("subgroup",)) for k in lower_split(g, t)],
    )
    assert sum(k.predicted_ns for k in plan.kernels) == pytest.approx(300)
    assert {k.source for k in plan.kernels} == {("model.py:3", "model.py:4")}
    assert plan.features == ("subgroup",)


def test_dependencies_of_values_written_twice() -> None:
    (x,) = inputs_of(1)
    acc = Scratch("acc", (8,), "f32")
    y = tanh(x)
    kernels = [
        source("zero", (acc,), ()),
        source("add", (acc,), (x,)),
        source("take", (y,), (acc,)),
    ]
    program = Program(each(graph_of([x], [y])), FLOOR, lambda g, t: kernels)
    assert dependencies(program.steps) == [set(), {0}, {1}]
    assert frugal(program.before, program.steps, {1: 32}) == [0, 1, 2]
    verify_plan(assemble(each(graph_of([x], [y])), FLOOR, lambda g, t: kernels), FLOOR)
