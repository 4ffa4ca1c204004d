"""Plans as text: the tables and the picture of a small training step, also with measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eggpu.compiler.ir import Graph, Kind, make
from eggpu.compiler.ops import ELEMENTWISE, dot, input_node, transpose
from eggpu.compiler.schedule.assemble import assemble
from eggpu.compiler.schedule.kernel import KernelSource
from eggpu.compiler.schedule.plan import Plan
from eggpu.compiler.schedule.selection import Group, separate
from eggpu.compiler.schedule.show import kernel_wgsl, lifetimes, memory_map, plan_text
from eggpu.compiler.schedule.target import FLOOR, Target
from eggpu.compiler.types import Type, f32


def lower(group: Group, target: Target) -> list[KernelSource]:
    """One kernel a group that counts honestly and computes nothing."""
    (out,) = group.outputs
    names = ", ".join(f"${k + 1}" for k in range(len(group.operands)))
    same = {(0, j) for j, o in enumerate(group.operands) if o.type == out.type}
    return [
        KernelSource(
            name=out.op.name,
            template=f"{out.kind.value}.wgsl.j2",
            text="fn main() { let x = $1[0]; $0[0] = x; }",
            writes=group.outputs,
            reads=group.operands,
            elements=("f32",) * (1 + len(group.operands)),
            grid=(-(-out.type.size // 64), 1, 1),
            workgroup=(64, 1, 1),
            flops=out.op.flops(out.type, *(o.type for o in out.operands)),
            bytes_read=sum(o.type.nbytes for o in group.operands),
            bytes_written=out.type.nbytes,
            computes=f"{out.op.name}({names})",
            in_place=frozenset(same) if out.kind is Kind.ELEMENTWISE else frozenset(),
        )
    ]


def step() -> Plan:
    """w - x^T (tanh(x w) - y), written over w."""
    x = input_node(0, "x", Type((64, 32), f32))
    y = input_node(1, "y", Type((64, 16), f32))
    w = input_node(2, "model.w", Type((32, 16), f32))
    h = make(ELEMENTWISE["tanh"], dot(x, w))
    error = h - y
    new = w - dot(transpose(x, (1, 0)), error)
    names = (("x", "y", "model.w"), ("0.w", "1"))
    sources = {h: "model.py:3", error: "model.py:4", new: "train.py:10"}
    graph = Graph("step", (x, y, w), (new, error * error), *names, (2,), sources)
    selection = separate(graph)
    groups = [replace(g, predicted_ns=4000.0 + k) for k, g in enumerate(selection.groups)]
    return assemble(replace(selection, groups=tuple(groups)), FLOOR, lower)


def test_plan_text(golden) -> None:
    plan = step()
    golden(plan_text(plan))
    times = [1000.0 * (k + 1) for k in range(len(plan.kernels))]
    golden(plan_text(plan, measured_ns=times), part="measured")


def test_memory_map(golden) -> None:
    golden(memory_map(step()))


def test_the_picture_of_a_long_plan_is_scaled() -> None:
    plan = step()
    long = replace(plan, kernels=plan.kernels * 100)
    text = memory_map(long)
    rows = [line.split("|")[1] for line in text.splitlines() if "|" in line]
    assert {len(row) for row in rows} == {96}
    assert "block 0: 6 KiB, kernels 0 to 599, 7 kernels a column" in text
    assert lifetimes(long)[plan.inputs[0]] == (0, 6 * 99 + 3)


def test_kernels_are_shown_with_the_plans_names(golden) -> None:
    golden("\n\n".join(kernel_wgsl(step(), k) for k in range(2)), "wgsl")


def test_an_empty_plan_has_its_texts() -> None:
    x = input_node(0, "x", Type((4,), f32))
    plan = assemble(separate(Graph("same", (x,), (x,))), FLOOR, lower)
    assert plan_text(plan).startswith("plan same: 0 kernels, 0.00 MFLOP, 0.00 MB moved, 0.0 us")
    assert "in0" in memory_map(plan)


def test_times_for_other_kernels_are_refused() -> None:
    plan = step()
    with pytest.raises(
        ValueError, match=f"one time for each of {len(plan.kernels)} kernels, got 1"
    ):
        plan_text(plan, measured_ns=[1.0])


def test_a_name_that_the_wgsl_uses_is_changed() -> None:
    text = kernel_wgsl(step(), 0)
    assert "x_b: array<f32>" in text
    assert "let x = x_b[0];" in text
