"""Kernels of running combinations, sorting and scattered writes, for both classes of device, in one
stage and in several."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from eggpu.compiler.errors import IRError
from eggpu.compiler.ir import Graph
from eggpu.compiler.ops import argsort, scan, scatter_set
from eggpu.compiler.ops import elementwise as E
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule.selection import Group
from eggpu.compiler.types import DTYPES, i32
from eggpu.runtime import open_device

sys.path.insert(0, str(Path(__file__).parent))
from lowering import TARGETS, given, run


@pytest.fixture(scope="module")
def device():
    return open_device(None, None)


@pytest.fixture(params=["cpu", "gpu"])
def target(request):
    return TARGETS[request.param]


def results(device, target, inputs, outputs, args):
    """Each output from a kernel group of its own, beside NumPy's in double precision."""
    graph = Graph("test", tuple(inputs), tuple(outputs))
    groups = [Group((o,), tuple(inputs)) for o in outputs]
    got, plan = run(device, graph, groups, args, target)
    return zip(got, evaluate(graph, args, np.float64), strict=True), plan


# rows that are many, few and long, side by side or not, in whole vec4 and with a rest
SHAPES = [
    ((7,), 0),
    ((3, 8), 1),
    ((3, 8), 0),
    ((2, 5, 4), 1),
    ((40, 129), 1),
    ((3, 9001), 1),
    ((9000, 4), 0),
    ((70_001,), 0),
]


@pytest.mark.parametrize(("shape", "axis"), SHAPES)
def test_running_sums_and_extremes(device, target, shape, axis):
    x = given(0, shape)
    value = np.random.default_rng(0).integers(-3, 4, shape).astype(np.float32)
    doubled = E.add(x, x)  # computed where it is read
    outputs = [scan(c, doubled, axis, r) for c in ("sum", "max", "min") for r in (False, True)]
    pairs, _ = results(device, target, [x], outputs, [value])
    for got, want in pairs:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["i32", "u32"])
def test_running_products_of_integers_wrap(device, target, dtype):
    x = given(0, (2, 5003), DTYPES[dtype])
    value = np.random.default_rng(0).integers(1, 2**31, (2, 5003)).astype(DTYPES[dtype].numpy) | 1
    pairs, _ = results(device, target, [x], [scan("prod", x, 1), scan("sum", x, 1, True)], [value])
    for got, want in pairs:
        np.testing.assert_array_equal(got, want)


def test_few_long_rows_are_cut_into_segments(device, target):
    x = given(0, (1 << 18,))
    _, plan = results(device, target, [x], [scan("sum", x, 0)], [np.ones(1 << 18, np.float32)])
    assert len(plan.kernels) == 3
    many = given(0, (4096, 16))
    _, plan = results(
        device, target, [many], [scan("sum", many, 1)], [np.ones((4096, 16), np.float32)]
    )
    assert len(plan.kernels) == 1


@pytest.mark.parametrize("shape", [(1,), (5,), (3, 64), (2, 65), (3, 2, 257), (4099,)])
@pytest.mark.parametrize("descending", [False, True])
def test_order_is_stable(device, target, shape, descending):
    x, n = given(0, shape), given(1, shape, i32)
    rng = np.random.default_rng(0)
    value = rng.integers(-4, 5, shape).astype(np.float32)
    value.flat[::7] = np.nan
    value[value == 0] *= rng.choice([-1, 1], int((value == 0).sum()))
    args = [value, rng.integers(-5, 5, shape).astype(np.int32)]
    pairs, _ = results(
        device, target, [x, n], [argsort(x, descending), argsort(n, descending)], args
    )
    for got, want in pairs:
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("rows", "count", "width"), [(5, 8, 3), (700, 900, 4), (3000, 40_001, 1), (1, 9, 8)]
)
def test_of_several_writes_to_a_place_the_last_stays(device, target, rows, count, width):
    x, u, at = given(0, (rows, width)), given(1, (count, width)), given(2, (count,), i32)
    rng = np.random.default_rng(0)
    args = [
        rng.standard_normal((rows, width)).astype(np.float32),
        rng.standard_normal((count, width)).astype(np.float32),
        rng.integers(-rows, rows, count).astype(np.int32),
    ]
    outputs = [E.mul(scatter_set(E.neg(x), u, at), x)]  # with what comes before and after
    pairs, _ = results(device, target, [x, u, at], outputs, args)
    for got, want in pairs:
        np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("build", [lambda x: scan("sum", x, 0), argsort])
def test_what_follows_a_scan_or_a_sort_is_another_kernel(device, build):
    x = given(0, (8,))
    after = E.add(build(x), build(x))
    with pytest.raises(IRError, match="shares no kernel with what follows it"):
        run(
            device,
            Graph("test", (x,), (after,)),
            [Group((after,), (x,))],
            [np.ones(8, np.float32)],
            TARGETS["cpu"],
        )
