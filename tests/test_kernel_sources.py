"""Kernels as data: what may share memory, bindings, equal texts, and what no kernel can do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eggpu.compiler.errors import CompileError, IRError
from eggpu.compiler.ops import dot, flip, reduce, reshape, transpose
from eggpu.compiler.schedule.target import FLOOR

sys.path.insert(0, str(Path(__file__).parent))
from lowering import TARGETS, given, layer_norm, softmax, sources, spread


def test_results_may_take_the_memory_of_operands_read_at_the_same_place():
    x, y = given(0, (8, 8)), given(1, (8, 8))
    assert sources([x * y], [x, y])[0].in_place == {(0, 0), (0, 1)}
    assert sources([x + transpose(y, (1, 0))], [x, y])[0].in_place == {(0, 0)}
    assert sources([softmax(given(0, (9, 400)), 1)], [given(0, (9, 400))])[0].in_place == {(0, 0)}
    # the sum is read again after x would be overwritten
    assert sources([x * 2.0, x - spread(reduce("sum", x, (1,)), x.shape)], [x])[0].in_place >= {
        (1, 0)
    }


def test_bindings_say_how_they_are_accessed():
    x, y = given(0, (3,)), given(1, (3,))
    kernel = sources([x + y], [x, y])[0]
    text = kernel.source(["t0", "weights", "new loop"], frozenset({1}))
    assert "@binding(0) var<storage, read_write> t0: array<f32>;" in text
    assert "@binding(1) var<storage, read> weights: array<f32>;" in text
    assert "@binding(2) var<storage, read_write> new_loop: array<f32>;" in text
    assert kernel.describe(["t0", "x", "y"]) == "t0 = add(x, y)"


def test_lowering_is_deterministic():
    inputs, outputs = layer_norm(40, 130)
    for target in TARGETS.values():
        once, again = (sources(outputs[3:], inputs[:3], target) for _ in range(2))
        assert [(k.text, k.grid, k.computes) for k in once] == [
            (k.text, k.grid, k.computes) for k in again
        ]


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda x: dot(x, reshape(reduce("sum", x, (1,)), (8, 1))), "of values of rows"),
        (lambda x: dot(dot(x, x), x), "in one kernel"),
        (lambda x: reduce("sum", reduce("max", x, (1,)), (0,)), "reduces values of rows"),
        (lambda x: flip(reduce("sum", x, (1,)), (0,)), "moves values of rows"),
        (lambda x: spread(reshape(reduce("sum", x, (1,)), (1, 8)), (8, 8)) + x, "is not its row"),
    ],
)
def test_illegal_kernels(build, why):
    x = given(0, (8, 8))
    with pytest.raises(IRError, match=f"illegal kernel .*{why}"):
        sources([build(x)], [x])


def test_too_many_bindings_for_the_target():
    inputs = [given(k, (4,)) for k in range(9)]
    total = inputs[0]
    for x in inputs[1:]:
        total = total + x
    with pytest.raises(CompileError, match="binds 8 arrays, got 10"):
        sources([total], inputs, FLOOR)
