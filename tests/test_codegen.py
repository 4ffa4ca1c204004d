"""Groups lowered to WGSL and run on the device, for both classes of target, against NumPy in
float64."""

from __future__ import annotations

import math
import random
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from eggpu.compiler.codegen import lower
from eggpu.compiler.ir import Graph, Node
from eggpu.compiler.ops import (
    broadcast,
    cast,
    concat,
    dot,
    flip,
    full,
    gather,
    iota,
    literal,
    pad,
    reduce,
    reshape,
    scatter_add,
    slice_,
    transpose,
)
from eggpu.compiler.ops import elementwise as E
from eggpu.compiler.reference import evaluate
from eggpu.compiler.schedule.selection import Group
from eggpu.compiler.schedule.target import LLVMPIPE, Target
from eggpu.compiler.types import bool_, f16, f32, i32, u32
from eggpu.runtime import Device, open_device

sys.path.insert(0, str(Path(__file__).parent))
from lowering import (
    TARGETS,
    check,
    given,
    layer_norm,
    normalized,
    run,
    softmax,
    sources,
    spread,
    values,
)


@pytest.fixture(scope="module")
def device() -> Device:
    """No device fails the tests: nothing here skips."""
    return open_device()


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    return TARGETS[request.param]


# -- elementwise and movement


@pytest.mark.parametrize("shape", [(), (1,), (3,), (4,), (6, 8), (5, 7), (2, 3, 4)])
def test_elementwise_chain_with_several_outputs(device, target, shape):
    x, y = given(0, shape), given(1, shape)
    z = x * y + 0.5
    check(device, target, [x, y], [z, E.maximum(z, full(0, shape, f32)), E.tanh(z - x)], kernels=1)


def test_broadcast_and_transposed_operands(device, target):
    x, b, t = given(0, (6, 8)), given(1, (8,)), given(2, (8, 6))
    plan = check(
        device, target, [x, b, t], [(x + spread(b, (6, 8))) * transpose(t, (1, 0))], kernels=1
    )
    wgsl = plan.kernels[0].wgsl
    assert "array<vec4<f32>>" in wgsl  # x, b and the result are accessed by four
    assert "= mul(add(" in wgsl.splitlines()[0]
    assert "let add_" in wgsl


def test_outputs_of_different_shapes_and_equal_size(device, target):
    x, y = given(0, (4, 6)), given(1, (3, 8))
    check(device, target, [x, y], [E.exp(x), y * y], kernels=1)


@pytest.mark.parametrize("n", [4_250_001, 16_800_000])
def test_grids_beyond_one_dimension(device, n):
    x = given(0, (n,))
    got, plan = run(
        device, Graph("big", (x,), (-x,)), None, [np.arange(n, dtype=np.float32)], LLVMPIPE
    )
    assert plan.kernels[0].grid[1] > 1
    np.testing.assert_array_equal(got[0], -np.arange(n, dtype=np.float32))


@pytest.mark.parametrize(
    ("n", "threads"),
    [(4 << 17, 256), ((4 << 17) + 36, 256), ((1 << 17) + 1, 256),
     (16 << 17, 128), ((16 << 17) + 4 * 77, 128), ((4 << 17) + 129, 128)],
)  # fmt: skip
def test_workgroups_of_large_arrays_are_larger_on_gpus(device, n, threads):
    x = given(0, (n,))
    plan = check(device, TARGETS["gpu"], [x], [E.erf(x) + x], kernels=1)
    assert plan.kernels[0].workgroup == (threads, 1, 1)
    plan = check(device, TARGETS["gpu"], [given(0, (64,))], [E.erf(given(0, (64,)))], kernels=1)
    assert plan.kernels[0].workgroup == (64, 1, 1)


def test_results_lie_only_over_what_they_are_computed_from(target):
    """A driver may load y for the second result after it has stored the first."""
    x, y = given(0, (8, 8)), given(1, (8, 8))
    first = E.exp(x)
    second = first * y
    (kernel,) = lower(Group((first, second), (x, y)), target)
    pairs = {(kernel.writes[k], kernel.reads[j]) for k, j in kernel.in_place}
    assert pairs == {(first, x), (second, x), (second, y)}


def moved(x: Node, choice: random.Random) -> Node:
    """A random movement of x."""
    shape, rank = x.shape, len(x.shape)
    match choice.randrange(8):
        case 0 if rank > 1:
            return transpose(x, choice.sample(range(rank), rank))
        case 1:
            sizes, left = [], x.type.size
            while left > 1:
                d = choice.choice([k for k in range(2, left + 1) if left % k == 0])
                sizes.append(d)
                left //= d
            return reshape(x, sizes or (1,))
        case 2:
            start = [choice.randrange(n) for n in shape]
            stop = [choice.randrange(a + 1, n + 1) for a, n in zip(start, shape)]
            return slice_(x, start, stop, [choice.choice((1, 1, 2, 3)) for _ in shape])
        case 3:
            amounts = [[choice.choice((0, 0, 1, 2)) for _ in shape] for _ in range(3)]
            return pad(x, literal(1.5, f32), *amounts)
        case 4:
            return flip(x, [a for a in range(rank) if choice.random() < 0.5])
        case 5 if rank:
            axis = choice.randrange(rank)
            return concat([x, -x, flip(x, (axis,))][: choice.choice((2, 3))], axis)
        case 6 if rank:
            places = iota((4, 2), choice.randrange(2), i32) * choice.choice((-1, 2, 3))
            return gather(x, places, choice.randrange(rank))
        case _:
            wide = reshape(x, (*shape, 1))
            return broadcast(wide, (*shape, choice.choice((1, 3, 4)))) if rank < 4 else x


@pytest.mark.parametrize("seed", range(60))
def test_random_movement_and_reductions(device, seed):
    choice = random.Random(seed)
    x = y = given(0, [choice.choice((1, 2, 3, 4, 6, 8, 12)) for _ in range(choice.randrange(1, 4))])
    for _ in range(choice.randrange(2, 7)):
        new = moved(y, choice)
        if new.type.size <= 20000:
            y = new + cast(iota(new.shape, 0, i32), f32) if choice.random() < 0.3 else new
    axes = tuple(k for k in range(len(y.shape)) if choice.random() < 0.5)
    outputs = [-y]
    top = reduce("max", y, axes)
    if top is not y:
        rest = y - spread(top, y.shape)
        turned = transpose(rest, choice.sample(range(len(y.shape)), len(y.shape)))
        outputs = list(dict.fromkeys([rest, reduce("sum", E.abs_(rest), axes), -turned]))
    args = [np.random.default_rng(seed).integers(-50, 50, x.shape).astype(np.float32)]
    check(device, TARGETS[("cpu", "gpu", "gpu-subgroups")[seed % 3]], [x], outputs, args)


def test_positions_from_data_wrap_and_clip(device, target):
    table, places = given(0, (9, 4, 3)), given(1, (5, 2), i32)
    args = [values(table), np.array([[0, 1], [8, -1], [-9, 3], [99, -99], [4, 4]], np.int32)]
    check(device, target, [table, places], [gather(table, places, 0)], args)
    check(
        device, target, [table, places], [gather(table, places, 1), -gather(table, places, 1)], args
    )


def test_numbers_that_wgsl_cannot_spell(device, target):
    floats = [math.inf, -math.inf, math.nan, -0.0, 1e-45, 3.4028234e38, 1e-38, 0.1]
    x, n = given(0, (1,)), given(1, (1,), i32)
    outputs = [spread(literal(v, f32), (1,)) * x for v in floats]
    outputs += [spread(literal(v, i32), (1,)) + n for v in (-(2**31), 2**31 - 1, 0)]
    outputs += [spread(literal(2**32 - 1, u32), (1,)) + cast(n, u32)]
    args = [np.ones(1, np.float32), np.zeros(1, np.int32)]
    got, _ = run(device, Graph("n", (x, n), tuple(outputs)), None, args, target)
    for mine, want in zip(got, evaluate(Graph("n", (x, n), tuple(outputs)), args)):
        np.testing.assert_array_equal(mine, want)
    assert np.signbit(got[3][0])


def test_infinities_are_not_simplified_away(device, target):
    x = given(0, (4,))
    args = [np.array([math.inf, math.nan, -2, 0], np.float32)]
    check(
        device, target, [x], [x * 0.0, x - x, x * math.inf, E.maximum(x, full(0, (4,), f32))], args
    )


def test_constants_alone_are_not_folded_into_errors(device, target):
    x = full(1e38, (3,), f32)
    zero = full(0, (3,), f32)
    got, _ = run(device, Graph("c", (), (x * x, zero / zero)), None, [], target)
    assert np.isinf(got[0]).all()
    assert np.isnan(got[1]).all()


def test_bools_are_words_in_memory(device, target):
    x, y = given(0, (5, 8), bool_), given(1, (5, 8))
    hot = E.and_(x, E.gt(y, full(0, y.shape, f32)))
    check(device, target, [x, y], [hot, E.select(hot, y, -y), cast(hot, i32)], kernels=1)
    check(device, target, [x], [reduce("any", x, (1,)), E.not_(reduce("all", x, (1,)))], kernels=1)


def test_half_precision_is_for_memory_only(device):
    """Values are float32 in registers, so sums keep their digits."""
    target = replace(LLVMPIPE, features=("immediates", "shader-f16", "subgroup"))
    x, y = given(0, (6, 8), f16), given(1, (7, 3), f16)
    args = [values(v).astype(np.float16) for v in (x, y)]
    outputs = [E.exp(x) * x, reduce("sum", x, (1,)), dot(x, transpose(x, (1, 0))), softmax(y, 1)]
    outputs += [cast(x, f32), cast(cast(y, f32) * 1000.0, f16)]
    check(device, target, [x, y], outputs, args, tol=5e-4, groups=None)
    ones = given(0, (4096,), f16)
    total = Graph("s", (ones,), (reduce("sum", ones, (0,)),))
    got, _ = run(device, total, None, [np.ones(4096, np.float16)], target)
    assert got[0][0] == 4096


# -- rows

ROWS = [
    (6, 8),
    (5, 7),
    (33, 64),
    (20, 130),
    (3, 1001),
    (257, 100),
    (1, 5000),
    (60000, 2),
    (2, 60000),
    (1, 200_000),
    (45, 18),
    (9, 20),
]


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("axis", [0, 1])
def test_softmax_is_one_kernel_unless_rows_are_few_and_long(device, target, shape, axis):
    x = given(0, shape)
    plan = check(device, target, [x], [softmax(x, axis)])
    rows, length = shape[1 - axis], shape[axis]
    if rows * length < 10_000 or (rows > 100 and length < 1000):
        assert len(plan.kernels) == 1
    shared = target.kind == "cpu" and axis == 1  # two rows keep two cores busy
    if (rows, length) in ((2, 60000), (1, 200_000)) and not (shared and rows == 2):
        # segments and their combination for each reduction, then the result
        assert len(plan.kernels) == 5


@pytest.mark.parametrize("shape", [(37, 64), (5, 130), (70, 259), (9, 20), (131, 512), (66, 1000)])
@pytest.mark.parametrize("dtype", [f32, f16, i32, u32, bool_])
def test_lanes_that_share_rows(device, shape, dtype):
    x = given(0, shape, dtype)
    least, most = ("any", "all") if dtype is bool_ else ("min", "max")
    low, high = (spread(reduce(c, x, (1,)), shape) for c in (least, most))
    middle = E.select(E.eq(x, high), low, x)
    outputs = [middle, reduce(most, middle, (1,))]
    arrays = [values(x)]
    if dtype is f16:
        arrays = [a.astype(np.float16) for a in arrays]
    target = replace(LLVMPIPE, features=("immediates", "shader-f16", "subgroup"))
    plan = check(device, target, [x], outputs, arrays, kernels=1)
    assert plan.kernels[0].template == "rows_cpu.wgsl.j2"


def test_lanes_that_share_rows_keep_nan_and_infinities_in_their_row(device):
    x = given(0, (66, 131))
    array = values(x)
    array[3, 130], array[4, 7], array[5, 64], array[6] = np.nan, np.inf, -np.inf, -np.inf
    graph = Graph("s", (x,), (softmax(x, 1), reduce("max", x, (1,))))
    (got, top), plan = run(device, graph, [Group(graph.outputs, (x,))], [array], LLVMPIPE)
    assert [k.template for k in plan.kernels] == ["rows_cpu.wgsl.j2"]
    assert np.isnan(got[[3, 4, 6]]).any(1).all()
    assert np.isnan(got[3]).all()
    assert np.isfinite(np.delete(got, [3, 4, 6], 0)).all()
    assert got[5, 64] == 0
    np.testing.assert_array_equal(top, array.max(1, keepdims=True))


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((4, 5, 6), (0, 2)),
        ((7, 4, 5, 8), (0, 2, 3)),
        ((64, 8, 16), (0, 2)),
        ((2, 3, 5), (0, 1, 2)),
        ((3, 70000, 4), (1,)),
        ((5, 9001, 3), (1,)),
        ((300007,), (0,)),
        ((1 << 20,), (0,)),
    ],
)
def test_sums_over_any_axes(device, target, shape, axes):
    x = given(0, shape)
    total = reduce("sum", x, axes)
    args = [np.random.default_rng(1).random(shape, np.float32)]
    check(device, target, [x], [total, reduce("max", E.abs_(x), axes)], args)
    check(device, target, [x], [x * spread(total, shape), total], args)


def test_sum_of_many_ones_is_exact(device, target):
    x = given(0, (1 << 24,))
    got, plan = run(
        device,
        Graph("s", (x,), (reduce("sum", x, (0,)),)),
        None,
        [np.ones(1 << 24, np.float32)],
        target,
    )
    assert got[0][0] == 1 << 24
    assert len(plan.kernels) == 2


def test_sum_of_tenths_keeps_its_digits(device, target):
    x = given(0, (16, 30000))
    got, _ = run(
        device,
        Graph("s", (x,), (reduce("sum", x, (1,)),)),
        None,
        [np.full(x.shape, 0.1, np.float32)],
        target,
    )
    np.testing.assert_allclose(got[0], 30000 * np.float64(np.float32(0.1)), rtol=2e-6)


@pytest.mark.parametrize(
    ("combine", "dtype"), [("prod", f32), ("min", i32), ("max", u32), ("sum", i32), ("sum", u32)]
)
def test_combinations_of_other_dtypes(device, target, combine, dtype):
    x = given(0, (9, 37), dtype)
    args = [
        np.random.default_rng(2).integers(0 if dtype is u32 else -3, 4, x.shape).astype(dtype.numpy)
    ]
    check(
        device, target, [x], [reduce(combine, x, (1,)), reduce(combine, x, (0,))], args, groups=None
    )


@pytest.mark.parametrize(("rows", "width"), [(6, 8), (40, 130), (512, 96), (7, 4000), (300, 7)])
def test_layer_norm_and_its_gradients(device, target, rows, width):
    inputs, (y, mu, scale, dx, dgain, dbias) = layer_norm(rows, width)
    forward = [inputs[0], inputs[2], inputs[3]]
    check(device, target, forward, [y, mu, scale], [values(i) for i in forward], kernels=1)
    # rows and columns of one matrix: the columns' sums are finished by a second kernel
    check(device, target, inputs[:3], [dx, dgain, dbias], tol=1e-5, kernels=2)
    check(device, target, inputs, [y, dx, dgain], tol=1e-5, groups=[
        Group((y, mu, scale), tuple(forward)), Group((dx, dgain), (*inputs[:3], mu, scale)),
    ])  # fmt: skip


@pytest.mark.parametrize(("rows", "classes"), [(32, 10), (64, 257), (3, 50257)])
def test_cross_entropy_and_its_gradient(device, target, rows, classes):
    z, labels = given(0, (rows, classes)), given(1, (rows,), i32)
    top = reduce("max", z, (1,))
    e = E.exp(z - spread(top, z.shape))
    total = reduce("sum", e, (1,))
    hot = E.eq(iota(z.shape, 1, i32), spread(reshape(labels, (rows, 1)), z.shape))
    loss = E.log(total) + top - reduce("sum", E.select(hot, z, full(0, z.shape, f32)), (1,))
    dz = (e / spread(total, z.shape) - cast(hot, f32)) * (1 / rows)
    check(device, target, [z, labels], [loss, dz])


@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (5, 6, 7, 7), (2, 16, 10, 10)])
def test_batch_norm_reduces_around_the_channels(device, target, shape):
    x = given(0, shape)
    y, scale, _ = normalized(x, (0, 2, 3))
    check(device, target, [x], [E.maximum(y, full(0, shape, f32)), scale], tol=5e-6, kernels=1)
    last = transpose(x, (0, 2, 3, 1))
    check(device, target, [x], [normalized(last, (0, 1, 2))[0]], tol=5e-6, kernels=1)


def test_transposed_stores(device, target):
    x = given(0, (33, 64))
    y = normalized(x, (1,))[0]
    check(device, target, [x], [transpose(y, (1, 0)) * 2.0, y], kernels=1)


@pytest.mark.parametrize(
    ("shape", "perm"),
    [((6, 8), (1, 0)), ((5, 7), (1, 0)), ((2, 9), (1, 0)), ((3, 4, 6), (0, 2, 1)),
     ((3, 5, 2), (2, 0, 1)), ((4, 1, 8), (2, 1, 0))],
)  # fmt: skip
def test_an_operand_and_its_transpose_are_one_load(device, target, shape, perm):
    """As updated weights with a copy for a product: the result may lie over the operand."""
    w, g = given(0, shape), given(1, (8, *shape))
    single = given(2, shape)
    for step, operand in ((single, single), (reshape(reduce("sum", g, (0,)), shape), g)):
        new, turned = w - step * 0.1, transpose(w, perm)
        check(device, target, [w, operand], [new, turned], kernels=1)
        (kernel,) = sources([new, turned], [w, operand], target)
        assert (0, kernel.reads.index(w)) in kernel.in_place
        assert kernel.writes == (new, turned)


@pytest.mark.parametrize("shape", [(6, 8), (33, 17), (40, 64)])
def test_an_operand_of_a_product_s_epilogue_and_its_transpose(device, target, shape):
    m, n = shape
    a, b, w = given(0, (m, 24)), given(1, (24, n)), given(2, (m, n))
    new, turned = w - dot(a, b) * 0.1, transpose(w, (1, 0))
    check(device, target, [a, b, w], [new, turned], kernels=1)
    (kernel,) = sources([new, turned], [a, b, w], target)
    assert (0, kernel.reads.index(w)) in kernel.in_place


def test_pure_outputs_beside_rows(device, target):
    x, w = given(0, (6, 8)), given(1, (6,))
    check(device, target, [x, w], [reduce("sum", x, (1,)), w * 2.0, x + 1.0], kernels=1)


@pytest.mark.parametrize("combine", ["sum", "prod"])
def test_empty_arrays(device, target, combine):
    x, y = given(0, (0, 4)), given(1, (3, 0))
    places = given(2, (0,), i32)
    outputs = [
        reduce(combine, v, axes) for v, axes in ((x, (0,)), (y, (1,)), (y, (0,)), (y, (0, 1)))
    ]
    outputs += [
        x + x,
        pad(x, literal(2, f32), (1, 0), (1, 0)),
        dot(y, x),
        scatter_add(x, places, 3),
    ]
    check(device, target, [x, y, places], outputs, groups=None)
