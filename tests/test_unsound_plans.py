"""Plans that are refused: what no device runs, and what reads or writes at the wrong time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from eggpu.compiler.errors import CompileError, IRError
from eggpu.compiler.ops import concat, reduce, reshape
from eggpu.compiler.schedule.assemble import assemble
from eggpu.compiler.schedule.plan import Access, Binding, Plan
from eggpu.compiler.schedule.selection import Group, Selection
from eggpu.compiler.schedule.target import FLOOR
from eggpu.compiler.schedule.verify import verify_plan

sys.path.insert(0, str(Path(__file__).parent))
from fake_kernels import add, each, graph_of, inputs_of, lower, place, tanh


def sound() -> Plan:
    p, g = inputs_of(2)
    h = concat([p, g], 0)
    return assemble(each(graph_of([p, g], [reduce("sum", h, (0,)), add(p, g)], [0])), FLOOR, lower)


def with_kernel(plan: Plan, k: int, **changes: object) -> Plan:
    kernels = list(plan.kernels)
    kernels[k] = replace(kernels[k], **changes)
    return replace(plan, kernels=tuple(kernels))


def reordered(plan: Plan, *order: int) -> Plan:
    return replace(plan, kernels=tuple(plan.kernels[k] for k in order))


def with_buffer(plan: Plan, name: str, **changes: object) -> Plan:
    return replace(
        plan, buffers=tuple(replace(b, **changes) if b.name == name else b for b in plan.buffers)
    )


def with_access(plan: Plan, k: int, *accesses: Access) -> Plan:
    bindings = tuple(replace(b, access=a) for b, a in zip(plan.kernels[k].bindings, accesses))
    return with_kernel(plan, k, bindings=bindings)


TAMPERED: list[tuple[Callable[[Plan], Plan], str]] = [
    (lambda p: with_kernel(p, 0, grid=(70000, 1, 1)), r"kernel 0 .* 1 to 65535 .* 70000x1x1"),
    (lambda p: with_kernel(p, 0, grid=(0, 1, 1)), r"kernel 0 .* got 0x1x1"),
    (lambda p: with_kernel(p, 0, workgroup=(16, 32, 1)), r"kernel 0 .* 1 to 256 .* 16x32x1"),
    (lambda p: with_kernel(p, 0, workgroup=(1, 1, 65)), r"kernel 0 .* got 1x1x65"),
    (lambda p: with_kernel(p, 0, bindings=()), r"kernel 0 .* 1 to 8 bindings .* got 0"),
    (lambda p: with_kernel(p, 0, writes=9), r"kernel 0 .* writes 9 of its 3 bindings"),
    (lambda p: with_kernel(p, 0, bindings=(Binding(9, "read"),)), "bindings name buffer 9 of 5"),
    (lambda p: replace(p, donated=()), r"kernel 2 \(add\): writes out1 over input 0, which is not"),
    (lambda p: replace(p, donated=(2,)), "donates input 2 of 2 inputs"),
    (lambda p: reordered(p, 0, 2), "result 0: reads out0, but its bytes were never"),
    (lambda p: reordered(p, 1, 2), r"kernel 0 \(sum\): reads t0, but its bytes were never"),
    (lambda p: reordered(p, 2, 1, 0), r"kernel 1 \(sum\): reads t0, but its bytes were never"),
    (lambda p: reordered(p, 2, 0, 1), r"1 \(concat\): reads x0, but its bytes hold out1"),
    (lambda p: with_buffer(p, "t0", nbytes=60), r"t0: needs 64 bytes for f32\[16\], got 60"),
    (lambda p: with_buffer(p, "t0", dtype="f8"), "t0: f8 is none of"),
    (lambda p: with_buffer(p, "t0", place=("arena", 0, 4)), "t0: needs an offset .* 256, got 4"),
    (lambda p: with_buffer(p, "t0", place=("arena", 0, 256)), "t0: 256:320 leaves a block of 64"),
    (lambda p: with_buffer(p, "t0", place=("arena", 1, 0)), r"t0: lies at \('arena', 1, 0\), wh"),
    (lambda p: with_buffer(p, "t0", place=("input", 0)), r"0 \(concat\): binds x0 as read, needs"),
    (lambda p: with_buffer(p, "x1", place=("input", 0)), r"input 1 needs a place \('input', 1\)"),
    (lambda p: with_access(p, 1, "read_write", "read_write"), r"1 \(sum\): .* needs read$"),
    (lambda p: with_access(p, 1, "read", "read"), r"1 \(sum\): .* needs read_write$"),
]


@pytest.mark.parametrize(("tamper", "message"), TAMPERED, ids=range(len(TAMPERED)))
def test_an_unsound_plan_is_refused(tamper: Callable[[Plan], Plan], message: str) -> None:
    plan = sound()
    verify_plan(plan, FLOOR)
    with pytest.raises(IRError, match=message):
        verify_plan(tamper(plan), FLOOR)


def test_a_part_of_an_operand_cannot_be_written_over() -> None:
    (x,) = inputs_of(1)
    y = tanh(x)
    z = concat([y, y], 0)
    plan = assemble(each(graph_of([x], [reduce("sum", z, (0,))])), FLOOR, lower)
    access = tuple(replace(b, access="read_write") for b in plan.kernels[1].bindings)
    same = replace(with_buffer(plan, "t1", place=place(plan, "t0")), arena=(512,))
    with pytest.raises(IRError, match=r"kernel 1 \(concat\): writes t1 over t0, which it binds"):
        verify_plan(with_kernel(same, 1, bindings=access), FLOOR)


def test_an_array_beyond_the_binding_limit_is_named() -> None:
    (x,) = inputs_of(1, (1024,))
    target = replace(FLOOR, max_binding_bytes=4096)
    y = concat([x, x], 0)
    graph = replace(graph_of([x], [reduce("sum", y, (0,))]), sources={y: "model.py:7"})
    message = r"scratch concat f32\[2048\] needs 8192 bytes at model.py:7, .* at most 4096 as one"
    with pytest.raises(CompileError, match=message):
        assemble(each(graph), target, lower)


def test_a_selection_that_lacks_a_kernel_or_an_input_is_refused() -> None:
    x, other = inputs_of(2)
    y = tanh(tanh(x))
    with pytest.raises(IRError, match=r"kernel tanh reads scratch tanh f32\[8\] before it is"):
        assemble(Selection(graph_of([x], [y]), (Group((y,), y.operands),)), FLOOR, lower)
    with pytest.raises(IRError, match=r"kernel tanh reads <input f32\[8\]>, no input of graph g"):
        assemble(each(graph_of([other], [tanh(x)])), FLOOR, lower)
    twice = Selection(graph_of([x], [tanh(x)]), (Group((tanh(x),), (x, reshape(x, (8, 1)))),))
    with pytest.raises(IRError, match="kernel tanh binds a value twice"):
        assemble(twice, FLOOR, lower)
    plan = assemble(Selection(graph_of([x], [y]), ()), FLOOR, lower)
    with pytest.raises(IRError, match="plan g, result 0: reads out0, but its bytes were never"):
        verify_plan(plan, FLOOR)
