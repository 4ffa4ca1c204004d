"""Elementwise kernels whose lanes store one after the other on llvmpipe: which do, and that they
compute what NumPy does in float64."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import eggpu as eg
from eggpu.compiler.codegen import elementwise, lower
from eggpu.compiler.ir import Graph, Node
from eggpu.compiler.ops import elementwise as E
from eggpu.compiler.ops import full, reshape, transpose
from eggpu.compiler.pipeline import compile_graph
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule.assemble import assemble
from eggpu.compiler.schedule.lanes import LARGE, can_store
from eggpu.compiler.schedule.parts import mergeable
from eggpu.compiler.schedule.plan import Plan
from eggpu.compiler.schedule.selection import Group, Selection
from eggpu.compiler.schedule.target import Target
from eggpu.compiler.tracing import array, trace
from eggpu.compiler.types import DType, bool_, f16, f32, i32, u32
from eggpu.runtime import Device, Executable

sys.path.insert(0, str(Path(__file__).parent))
from lowering import given, spread, values

TEMPLATE, PLAIN = "elementwise_cpu.wgsl.j2", "elementwise.wgsl.j2"


@pytest.fixture(scope="module")
def device() -> Device:
    return eg.device()


@pytest.fixture(scope="module")
def target(device: Device) -> Target:
    """The device's own, whose features the form needs."""
    if not can_store(device.target, [("f32", 8)]):
        pytest.skip("lanes store one after the other on llvmpipe only")
    return device.target


def plan_of(target: Target, inputs: Sequence[Node], outputs: Sequence[Node]) -> Plan:
    """One kernel, the second way of a small group: with lanes in turn."""
    graph = Graph("test", tuple(inputs), tuple(outputs))
    group = Group(tuple(outputs), tuple(inputs))
    return assemble(Selection(graph, (group,)), target, partial(lower, hints={"rank": 1}))


def check(
    device: Device,
    target: Target,
    inputs: Sequence[Node],
    outputs: Sequence[Node],
    template: str = TEMPLATE,
) -> Plan:
    """The kernel is of a template and gives what NumPy gives."""
    plan = plan_of(target, inputs, outputs)
    (kernel,) = plan.kernels
    assert kernel.template == template
    assert ("var<immediate>" in kernel.wgsl) == (template == TEMPLATE)
    args = [values(i).astype(i.dtype.numpy) for i in inputs]
    buffers = Executable(plan, device)([device.upload(a) for a in args])
    wanted = evaluate(Graph("test", tuple(inputs), tuple(outputs)), args, np.float64)
    for out, buffer, want in zip(outputs, buffers, wanted, strict=True):
        mine = device.download(buffer, out.shape, out.dtype.name)
        close = 2e-3 if out.dtype is f16 else 3e-6
        np.testing.assert_allclose(mine, want, rtol=close, atol=close, err_msg=repr(out))
    return plan


# a subgroup, some, an odd number of them, several workgroups
@pytest.mark.parametrize("shape", [(64,), (3, 64), (8, 9, 8), (16, 128), (37, 320), (5, 7, 64)])
def test_all_elements_are_stored(device: Device, target: Target, shape: tuple[int, ...]) -> None:
    x, y = given(0, shape), given(1, shape)
    check(device, target, [x, y], [E.tanh(x * y) + x])


@pytest.mark.parametrize("dtype", [u32, i32])
def test_integers(device: Device, target: Target, dtype: DType) -> None:
    x, y = given(0, (12, 64), dtype), given(1, (12, 64), dtype)
    check(device, target, [x, y], [x * y + x])


def test_bools(device: Device, target: Target) -> None:
    x, y = given(0, (12, 64)), given(1, (12, 64))
    check(device, target, [x, y], [E.lt(x, y), x + y])
    c = given(0, (12, 64), bool_)
    check(device, target, [c, y], [E.select(c, y, full(0, (12, 64), y.dtype))])


def test_halves_are_stored_otherwise(device: Device, target: Target) -> None:
    x = given(0, (12, 64), f16)
    check(device, target, [x], [x + x], PLAIN)


def test_several_results_of_other_shapes_and_orders(device: Device, target: Target) -> None:
    x, y = given(0, (32, 24)), given(1, (32, 24))
    z = x * y
    outputs = [z, reshape(z - x, (24, 32)), transpose(z + y, (1, 0)), E.exp(x)]
    plan = check(device, target, [x, y], outputs)
    written = [t for t in plan.kernels[0].wgsl.splitlines() if "var<storage, read_write>" in t]
    assert all("vec4<u64>" in line for line in written)


def test_repeated_operands_are_read_from_images(device: Device, target: Target) -> None:
    shape = (24, 128)
    x, b, s = given(0, shape), given(1, (1, 128)), given(2, (24, 1))
    plan = check(device, target, [x, b, s], [x * spread(b, shape) + spread(s, shape)])
    assert {plan.buffers[c.buffer].name for c in plan.copies} == {"in1", "in2"}


@pytest.mark.parametrize("length", [4, 5, 7, 31])
@pytest.mark.parametrize("dtype", [f32, f16, bool_, i32])
def test_rows_that_begin_within_a_vec4(
    device: Device, target: Target, length: int, dtype: DType
) -> None:
    shape = (128, length)
    x, row, column = given(0, shape), given(1, (128, 1), dtype), given(2, (1, length), dtype)
    y, z = spread(row, shape), spread(column, shape)
    number = [E.select(v, x, x + 1.0) if dtype is bool_ else E.cast(v, x.dtype) for v in (y, z)]
    plan = check(device, target, [x, row, column], [x * number[0] + number[1]])
    wgsl = plan.kernels[0].wgsl  # divides for the first and the last of four
    assert wgsl.count(f"/ {length}u") <= 2 * wgsl.count("let bits_")


def test_any_number_of_subgroups_share_a_workgroup(device: Device, target: Target) -> None:
    x = given(0, (29, 4 * target.subgroup))
    kernel = check(device, target, [x], [x + 1.0]).kernels[0]
    assert kernel.grid == (1, 1, 1)
    assert f"@workgroup_size({29 * target.subgroup})" in kernel.wgsl


def test_transposed_operands_and_results(device: Device, target: Target) -> None:
    x, y = given(0, (24, 128)), given(1, (128, 24))
    check(device, target, [x, y], [x - transpose(y, (1, 0))])
    check(device, target, [x], [transpose(x, (1, 0))])


@pytest.mark.parametrize("shape", [(63,), (4,), (12, 5), (8, 10), (66, 16)])
def test_what_no_subgroups_fill_is_stored_otherwise(
    device: Device, target: Target, shape: tuple[int, ...]
) -> None:
    x = given(0, shape)
    check(device, target, [x], [x * 2.0], PLAIN)


def test_grids_of_two_dimensions(
    device: Device, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elementwise, "_LEAST_GROUPS", 1)
    few = replace(target, max_groups=20)
    x = given(0, (26, 8 * 4 * 4 * target.subgroup))  # workgroups
    plan = check(device, few, [x], [x + 1.0])
    assert plan.kernels[0].grid == (13, 2, 1)
    x = given(0, (23, 8 * 4 * 4 * target.subgroup))  # one more would return early
    check(device, few, [x], [x + 1.0], PLAIN)


def test_large_arrays_only(target: Target) -> None:
    """Small kernels stay such as can be parts of others; the search knows what large ones take."""
    found: list[Plan] = []
    for rows in (LARGE // 512, LARGE // 1024):
        x = np.zeros((rows, 512), np.float32)
        found.append(compile_graph(trace(lambda x: x * 2.0, x), target).plan)
    large, small = (plan.kernels[0] for plan in found)
    assert (large.template, small.template) == (TEMPLATE, PLAIN)
    assert not mergeable(large.wgsl)
    assert mergeable(small.wgsl)
    assert large.predicted_ns < 1.6 * small.predicted_ns


def test_two_results_count_twice(target: Target) -> None:
    x = np.zeros((LARGE // 1024, 512), np.float32)
    plan = compile_graph(trace(lambda x: (x * 2.0, x + 1.0), x), target).plan
    assert [k.template for k in plan.kernels] == [TEMPLATE]


def test_donated_arrays_are_written_over() -> None:
    rng = np.random.default_rng(0)
    p, m, g = (rng.standard_normal((LARGE // 512, 512)).astype(np.float32) for _ in range(3))

    def update(p, m, g):
        m = m * 0.9 + g * 0.1
        return p - m * m, m

    step = eg.compile(update, donate=(0, 1), cache=False)
    ours = array(p), array(m)
    plain = p.astype(float), m.astype(float)
    for _ in range(3):
        ours = step(*ours, g)
        now = plain[1] * 0.9 + g.astype(float) * 0.1
        plain = plain[0] - now * now, now
    places = [step.plan.buffers[b].place for b in step.plan.outputs]
    assert places == [("input", 0), ("input", 1)]
    for mine, want in zip(ours, plain, strict=True):
        np.testing.assert_allclose(np.asarray(mine), want, rtol=1e-5, atol=1e-5)
