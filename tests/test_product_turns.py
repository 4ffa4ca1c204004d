"""Products whose results lanes store one after the other, with all that may follow them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import eggpu as eg
from eggpu import nn
from eggpu.compiler.codegen import lower
from eggpu.compiler.codegen.contract import product_tiles
from eggpu.compiler.codegen.source import Job
from eggpu.compiler.expand import expand
from eggpu.compiler.ir import Graph, Kind
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule.assemble import assemble
from eggpu.compiler.schedule.lanes import FEATURES
from eggpu.compiler.schedule.plan import Plan
from eggpu.compiler.schedule.selection import Group, Selection, body
from eggpu.compiler.schedule.target import LLVMPIPE
from eggpu.compiler.schedule.tile import Tile, candidates
from eggpu.compiler.schedule.verify import verify_plan
from eggpu.compiler.tracing import trace
from eggpu.compiler.types import parse_type
from eggpu.runtime import Device, Executable, open_device

sys.path.insert(0, str(Path(__file__).parent))
from lowering import values

ABLE = replace(LLVMPIPE, features=tuple(sorted((*FEATURES, "shader-f16"))))


@pytest.fixture(scope="module")
def device() -> Device:
    """No device fails the tests: nothing here skips."""
    return open_device()


def planned(function: Callable[..., Any], types: tuple[str, ...], **chosen: int) -> Plan:
    """The plan of one group with a tiling of these values, in which lanes are to store in turn."""
    graph = expand(trace(function, *map(parse_type, types)))
    group = Group(graph.outputs, graph.inputs)
    product = next(n for n in body(group) if n.kind is Kind.CONTRACT)
    tiles = product_tiles(Job(group, ABLE, {o: o for o in group.operands}), product, 200)
    wanted = {"CW": 4, "splits": 1} | chosen
    tile = next(
        t
        for t in tiles
        if not t.swap and all(t.values.get(name) == v for name, v in wanted.items())
    )
    return assembled(graph, replace(tile, params=(*tile.params, ("turns", True))))


def assembled(graph: Graph, tile: Tile) -> Plan:
    groups = (Group(graph.outputs, graph.inputs),)
    plan = assemble(Selection(graph, groups), ABLE, lambda g, t: lower(g, t, hints={"tile": tile}))
    verify_plan(plan, ABLE)
    return plan


def check(device: Device, function: Callable[..., Any], plan: Plan, types: tuple[str, ...]) -> None:
    graph = expand(trace(function, *map(parse_type, types)))
    args = [values(i) for i in graph.inputs]
    found = Executable(plan, device)([device.upload(a) for a in args])
    for buffer, out, want in zip(found, graph.outputs, evaluate(graph, args, np.float64)):
        got = device.download(buffer, out.shape, out.dtype.name)
        if out.dtype.kind == "f":
            got, want = got / np.abs(want).max(), want / np.abs(want).max()
        np.testing.assert_allclose(got, want, atol=2e-3 if out.dtype.size == 2 else 4e-6, rtol=0)


TYPES = ("f32[64, 20]", "f32[20, 96]", "f32[64, 96]", "f32[96]")
LONG = "finish("  # what follows is in a loop
CASES: dict[str, tuple[Callable[..., Any], bool]] = {
    "plain": (lambda a, b, c, d: a @ b, False),
    "residual": (lambda a, b, c, d: (a @ b) * 0.5 + c, False),
    "bias and residual": (lambda a, b, c, d: a @ b + d + c, True),
    "gelu": (lambda a, b, c, d: nn.gelu(a @ b + d) * c, True),
    "two results, both short": (lambda a, b, c, d: (a @ b, (a @ b) * 2.0), False),
    "transposed too": (lambda a, b, c, d: (a @ b, (a @ b).T), False),
    "bool": (lambda a, b, c, d: (a @ b) > 0.1, False),
    "heads": (lambda a, b, c, d: (a @ b).reshape(64, 3, 32).swapaxes(0, 1), False),
}


@pytest.mark.parametrize("rows", [4, 32])
@pytest.mark.parametrize("name", CASES)
def test_what_follows_a_product(device: Device, name: str, rows: int) -> None:
    function, folded = CASES[name]
    plan = planned(function, TYPES, TM=rows)
    (kernel,) = plan.kernels
    assert "shared_number" in kernel.wgsl
    assert (LONG in kernel.wgsl) == folded
    assert kernel.bindings[0].access == "read_write"
    assert "array<vec4<u64>>" in kernel.wgsl
    check(device, function, plan, TYPES)


def test_several_results_in_a_loop_stay_there(device: Device) -> None:
    def function(a: Any, b: Any, c: Any, d: Any) -> Any:
        return a @ b + d, eg.tanh(a @ b + d) * c

    plan = planned(function, TYPES, TM=32)
    assert "shared_number" not in plan.kernels[0].wgsl
    check(device, function, plan, TYPES)


@pytest.mark.parametrize(
    "types", [("f32[3, 16, 24]", "f32[3, 24, 32]"), ("f32[32, 9]", "f32[9, 64]")]
)
def test_batches_and_skewed_operands(device: Device, types: tuple[str, ...]) -> None:
    plan = planned(lambda a, b: a @ b, types, TM=16)
    assert "shared_number" in plan.kernels[0].wgsl
    check(device, lambda a, b: a @ b, plan, types)


def test_partial_sums(device: Device) -> None:
    types = "f32[8, 2048]", "f32[2048, 64]"
    plan = planned(lambda a, b: eg.exp(a @ b * 0.01), types, TM=8, splits=4)
    assert "shared_number" in plan.kernels[0].wgsl
    check(device, lambda a, b: eg.exp(a @ b * 0.01), plan, types)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: (a @ b).T,  # neighbours lie apart
        lambda a, b: (a @ b).astype("f16"),
    ],
)
def test_others_are_stored_as_before(device: Device, function: Callable[..., Any]) -> None:
    types = "f32[64, 20]", "f32[20, 96]"
    plan = planned(function, types, TM=16)
    assert "shared_number" not in plan.kernels[0].wgsl
    check(device, function, plan, types)


def test_an_operand_that_the_result_lies_over(device: Device) -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal((512, 512)).astype(np.float32) for _ in range(3))
    step = eg.compile(lambda a, b, c: a @ b + c * 0.5, donate=(2,))
    got = step(a, b, eg.put(c)).numpy()
    want = a.astype(np.float64) @ b + c * 0.5
    np.testing.assert_allclose(got, want, atol=2e-4)


def test_large_results_are_stored_in_turn_where_it_can_be() -> None:
    (best,) = candidates(ABLE, 1, 512, 512, 128, count=1)
    assert best.values["turns"]
    for shape in ((1, 128, 128, 128), (1, 514, 516, 128), (1, 512, 516, 128)):
        assert all("turns" not in t.values for t in candidates(ABLE, *shape, count=50))
    assert all("turns" not in t.values for t in candidates(LLVMPIPE, 1, 512, 512, 128, count=20))
